"""Test FairLoRA: the adapter against a loop in NumPy, the average against a replay of a run, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairflare.core.features.adapting import network_of
from fairflare.core.features.group_adapter import GroupAdapter, adapters_of, people, start_of
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.fair_lora import VALUES, FairLoRA, GroupAdapters
from fairflare.prediction.predictor import load_predictor
from tests.federation.test_groups import SITES, SMALL, federation
from tests.tiny import model_in, run_document

RANK, ALPHA, OWN = 4, 3.0, 0.7


def filled(layer: nn.Module, groups: int = 3, rank: int = RANK) -> GroupAdapter:
    torch.manual_seed(5)
    adapter = GroupAdapter(layer, "fc", groups, rank, ALPHA, OWN)
    for parameter in adapter.parameters():
        nn.init.normal_(parameter)
    return adapter


def values_for(adapter: GroupAdapter, number: int) -> np.ndarray[Any, Any]:
    """Compute image by image, as in the paper's picture: one group's own part and the other groups'."""
    table = [v.detach().double().numpy() for v in adapter.values]
    if number == len(table):
        return np.sum(table, 0) / len(table)
    found = OWN * table[number]
    for other, row in enumerate(table):
        if other != number:
            found = found + (1 - OWN) / (len(table) - 1) * row
    return found


NUMBERS = [2, 0, 3, 1, 2]  # 3: not known


@pytest.mark.parametrize("shape", [(5, 6), (5, 7, 6)])
def test_a_linear_layer_against_a_loop(shape: tuple[int, ...]) -> None:
    adapter, inputs = filled(nn.Linear(6, 3)), torch.randn(*shape)
    with people(adapter, NUMBERS), torch.no_grad():
        found = adapter(inputs)
    w, b = (t.detach().double().numpy() for t in (adapter.base_layer.weight, adapter.base_layer.bias))
    up, down = (f.weight.detach().double().numpy() for f in (adapter.fair_B, adapter.fair_A))
    for index, number in enumerate(NUMBERS):
        whole = w + ALPHA / RANK * up @ np.diag(values_for(adapter, number)) @ down
        expected = inputs[index].double().numpy() @ whole.T + b
        np.testing.assert_allclose(found[index].numpy(), expected, atol=1e-5)
    with torch.no_grad():  # nobody says whose they are: all groups alike
        whole = w + ALPHA / RANK * up @ np.diag(values_for(adapter, 3)) @ down
        np.testing.assert_allclose(adapter(inputs)[0].numpy(), inputs[0].double().numpy() @ whole.T + b, atol=1e-5)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_is_one_with_the_whole_kernel(dims: int) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    adapter = filled(conv(2, 3, 3, stride=2, padding=1, padding_mode="reflect" if dims < 3 else "zeros"))
    inputs = torch.randn(5, 2, *[7] * dims)
    with people(adapter, NUMBERS), torch.no_grad():
        found = adapter(inputs)
    up, down = adapter.fair_B.weight.detach().flatten(1), adapter.fair_A.weight.detach()
    plain = adapter.base_layer
    kernel = plain.weight.detach().clone()
    for index, number in enumerate(NUMBERS):
        low = torch.from_numpy(values_for(adapter, number)).float()[:, None] * down.flatten(1)
        with torch.no_grad():
            plain.weight.copy_(kernel + ALPHA / RANK * (up @ low).reshape(kernel.shape))
            expected = plain(inputs[index : index + 1])
            plain.weight.copy_(kernel)
        torch.testing.assert_close(found[index : index + 1], expected, atol=1e-4, rtol=1e-4)


def test_one_image_may_be_given_in_many_pieces_and_others_not() -> None:
    adapter, inputs = filled(nn.Linear(6, 3)), torch.randn(4, 6)
    with people(adapter, [1] * 4), torch.no_grad():
        each = adapter(inputs)
    with people(adapter, [1]), torch.no_grad():
        assert torch.equal(adapter(inputs), each)
    match = "layer 'fc' is given 4 rows for 2 images"
    with people(adapter, [1, 0]), pytest.raises(ValueError, match=match):
        adapter(inputs)
    assert adapter.numbers is None  # also behind an error


def test_the_start_is_the_networks_own() -> None:
    layer = nn.Linear(6, 3)
    adapter, inputs = GroupAdapter(layer, "fc", 3, 12, 2.0, OWN), torch.randn(4, 6)
    with people(adapter, [0, 1, 2, 3]):
        assert torch.equal(adapter(inputs), layer(inputs))
    starts = torch.stack([start_of(group, 3, 12) for group in range(3)])
    assert torch.equal(starts[0, :6], starts[2, :6])
    assert sorted(starts[0].tolist()) == sorted(starts[1].tolist())  # turned
    assert not torch.equal(starts[0], starts[1])


def test_one_batch_is_learned_by_all_three_factors() -> None:
    """Check that only A, which is 0, has a gradient at first; one step later all factors have, and groups diverge."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 3).requires_grad_(False)
    adapter, inputs, targets = GroupAdapter(layer, "fc", 2, RANK, 2.0, OWN), torch.randn(12, 6), torch.randn(12, 3)
    optimizer = torch.optim.Adam([p for p in adapter.parameters() if p.requires_grad], lr=0.05)
    losses, learned = [], []
    for _ in range(200):
        optimizer.zero_grad()
        with people(adapter, [0, 1] * 6):
            loss = (adapter(inputs) - targets).square().mean()
        loss.backward()
        factors = (adapter.fair_A.weight, adapter.fair_B.weight, *adapter.values)
        learned.append([bool(p.grad is not None and p.grad.abs().min() > 0) for p in factors])
        losses.append(loss.item())
        optimizer.step()
    assert learned[0] == [True, False, False, False]
    assert learned[1] == [True] * 4
    # Least squares with one matrix for both groups reach this; with one for each group it is far less.
    whole = np.asarray(inputs, np.float64), np.asarray(targets - layer.bias, np.float64)
    rest = np.linalg.lstsq(*whole)[1].sum() / targets.numel()
    assert losses[-1] < rest / 2 < rest < losses[0]


# ------------------------------------------------------------------------------------------------ the server's half


def inputs_of(reports: dict[str, list[float]], current_round: int, states: Any, num_rounds: int = 4) -> RoundInputs:
    samples = {"a": 40, "b": 60}
    told = {site: {"group_images": images} for site, images in reports.items()}
    owner = {name: name.rpartition(".")[0] for name in states}
    return RoundInputs(current_round, num_rounds, sorted(told), samples, told, {}, {}, owner)


def named(group: int) -> str:
    return f"fc.fair_S.{group}"


def test_singular_values_are_weighed_by_the_images_of_their_group() -> None:
    nan = math.nan
    names = dict.fromkeys([*(f"{named(g)}.weight" for g in range(4)), "fc.fair_A.weight", "fc.base_layer.weight"])
    reports = {"a": [10.0, 30.0, nan, nan], "b": [40.0, 0.0, 20.0, nan]}
    found = FairLoRA().weigh(inputs_of(reports, 0, names)).layers
    assert found is not None
    assert found[named(0)] == {"a": 0.2, "b": 0.8}
    assert found[named(1)] == {"a": 1.0, "b": 0.0}
    assert found[named(2)] == {"a": 0.0, "b": 1.0}  # a keeps it
    assert found[named(3)] == {"a": 0.4, "b": 0.6}  # nobody tells: by samples
    assert found["fc.fair_A"] == {"a": 0.4, "b": 0.6}


def test_the_moving_mean_and_the_shared_half() -> None:
    rng = np.random.default_rng(0)
    change = {f"{named(g)}.weight": torch.from_numpy(rng.standard_normal(6)) for g in range(3)}
    change["fc.fair_A.weight"] = torch.from_numpy(rng.standard_normal((2, 3)))
    rule = FairLoRA(fairlora_ema=0.8)
    rule.weigh(inputs_of({"a": [1.0] * 3, "b": [1.0] * 3}, 1, change))
    moved = rule.move(change)
    keep = 0.8 * 1 / 4
    shared = sum(change[f"{named(g)}.weight"][:3].numpy() for g in range(3)) / 3
    for group in range(3):
        whole = np.concatenate([shared, change[f"{named(group)}.weight"][3:].numpy()])
        np.testing.assert_allclose(moved[f"{named(group)}.weight"].numpy(), (1 - keep) * whole, atol=1e-12)
    np.testing.assert_allclose(moved["fc.fair_A.weight"].numpy(), (1 - keep) * change["fc.fair_A.weight"].numpy())
    plain = FairLoRA(fairlora_ema=0.0, fairlora_shared=False)
    plain.weigh(inputs_of({"a": [1.0] * 3, "b": [1.0] * 3}, 1, change))
    assert plain.move(change) is change
    assert plain.follows_num_rounds() == []
    assert rule.follows_num_rounds() == ["fairlora_ema"]


# ------------------------------------------------------------------------------------------------ runs


def plan_of(**more: Any) -> Plan:
    options = {name: more.pop(name) for name in ("num_rounds", "exchange", "keep_local_models") if name in more}
    settings = {**SMALL, "fairlora_attribute": "sex", "adapters.rank": RANK, "learning_rate": 0.01, **more}
    return make_plan("fair_lora", task="classification", sites=SITES, settings=settings, **{"num_rounds": 2, **options})


def local_models(results: Path, current_round: int) -> dict[str, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    found = {site: sorted(results.parent.rglob(f"*{current_round}*/{site}*.safetensors")) for site in SITES}
    return {site: load_file(paths[0]) for site, paths in found.items()}


def test_a_run_is_the_paper_average_of_what_the_sites_trained(tmp_path: Path) -> None:
    """Replay rounds in NumPy from the local models; site-2 nearly lacks one sex, site-1 has both alike."""

    def few_women(content: dict[str, Any]) -> None:
        for index, entry in enumerate(content["training"]):
            entry["attributes"]["sex"] = "female" if index < 4 else "male"

    local = federation(tmp_path / "data", change=few_women)
    plan = plan_of(num_rounds=2, keep_local_models=True)
    folder = run_local(plan, tmp_path / "run", local)
    torch.manual_seed(plan.run.seed)
    start = {n: t.double().numpy() for n, t in network_of(plan.task).state_dict().items()}
    rounds = run_document(folder)["rounds"]
    women, shares = {"site-1": 8, "site-2": 4}, {"site-1": 0.5, "site-2": 0.5}
    weights = {layer: of for layer, of in rounds[0]["layers"].items() if layer.endswith("fair_S.0")}
    assert len(weights) > 4
    assert all(of["site-1"]["weight"] == pytest.approx(8 / 12, abs=1e-4) for of in weights.values())
    by_group = [
        {site: women[site] / 12 for site in SITES},
        {site: (16 - women[site]) / 20 for site in SITES},
    ]
    model = dict(start)
    for current_round in range(2):
        own = {s: {n: t.double().numpy() for n, t in m.items()} for s, m in local_models(folder, current_round).items()}
        beta = 0.999 * current_round / 2
        mean = {}
        for name in model:
            match = VALUES.fullmatch(name)
            weights = by_group[int(match["group"])] if match else shares
            mean[name] = sum(weights[site] * own[site][name] for site in SITES)
        by_site = dict(mean)
        for name in mean:
            if match := VALUES.fullmatch(name):
                both = [by_site[f"{match['layer']}.fair_S.{group}.weight"][: RANK // 2] for group in range(2)]
                mean[name] = np.concatenate([sum(both) / 2, mean[name][RANK // 2 :]])
        buffer = [n for n in model if n.endswith(("running_mean", "running_var"))]
        before, model = model, {}
        for name in mean:
            kept = 0.0 if name in buffer else beta
            model[name] = (1 - kept) * mean[name] + kept * before[name]
    final = model_in(folder)
    trained = {name for name in final if not np.array_equal(final[name].double().numpy(), start[name])}
    assert any(VALUES.fullmatch(name) for name in trained)
    assert not any(".base_layer." in name for name in trained)
    for name in trained:
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(final[name].double().numpy(), model[name], atol=2e-6, err_msg=name)


def test_what_travels_is_less_and_the_same_bits(tmp_path: Path) -> None:
    local = federation(tmp_path / "data")
    every = model_in(run_local(plan_of(), tmp_path / "all", local))
    sent = model_in(run_local(plan_of(exchange="trainable"), tmp_path / "trainable", local))
    assert {name for name in every if ".base_layer." in name} <= set(every) - set(sent)
    assert all(torch.equal(sent[name], every[name]) for name in sent)


def test_singular_values_of_few_people_stay_as_they_came(tmp_path: Path) -> None:
    def few_women(content: dict[str, Any]) -> None:
        for index, entry in enumerate(content["training"]):
            entry["attributes"]["sex"] = "female" if index < 4 else "male"

    local = federation(tmp_path / "data", declared={"sex": {"kind": "category", "values": ["female", "male", "other"]}},
                       change=few_women)  # fmt: skip
    for site in SITES:
        for entry in (content := json.loads((tmp_path / "data" / site / "datalist.json").read_text()))["training"]:
            entry["attributes"] = {"sex": entry["attributes"]["sex"]}
        for split in ("validation", "test"):
            for entry in content[split]:
                entry["attributes"] = {k: v for k, v in entry["attributes"].items() if k == "sex"}
        (tmp_path / "data" / site / "datalist.json").write_text(json.dumps(content))
    local["sites"]["site-2"]["min_cases"] = 5  # of four women, so the twelve men go with them
    plan = plan_of(num_rounds=1, keep_local_models=True, **{"adapters.groups": 3})
    folder = run_local(plan, tmp_path / "run", local)
    for layer, of in run_document(folder)["rounds"][0]["layers"].items():
        told = [of[site]["weight"] for site in SITES]
        assert told == ([0.5, 0.5] if layer.endswith("fair_S.2") else [1.0, 0.0]), layer
    torch.manual_seed(plan.run.seed)
    start, own = network_of(plan.task).state_dict(), local_models(folder, 0)
    values = [name for name in start if VALUES.fullmatch(name) and not name.endswith(".2.weight")]
    assert all(torch.equal(own["site-2"][name], start[name]) for name in values)
    assert any(not torch.equal(own["site-1"][name], start[name]) for name in values)


def test_a_model_is_trained_and_tested_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check each batch in the order of the images, whoever asks for it."""
    told: list[tuple[bool, list[int] | None]] = []
    forward = GroupAdapter.forward

    def watched(self: GroupAdapter, inputs: torch.Tensor) -> torch.Tensor:
        if self.name.endswith("conv1") and "layer" not in self.name:
            told.append((self.training, None if self.numbers is None else self.numbers.tolist()))
            assert self.numbers is None or len(self.numbers) == len(inputs)
        return forward(self, inputs)

    monkeypatch.setattr(GroupAdapter, "forward", watched)
    local = federation(tmp_path / "data")
    run_local(plan_of(num_rounds=1), tmp_path / "run", local)
    tests = [numbers for training, numbers in told if not training and numbers is not None]
    # The first test image's sex is not known: 2.
    whole = [2 if index == 0 else index // 2 % 2 for index in range(24)]
    assert [number for batch in tests for number in batch].count(2) >= 2
    assert [whole[:16], whole[16:]] in [tests[i : i + 2] for i in range(len(tests) - 1)]
    trained = [numbers for training, numbers in told if training and numbers is not None]
    assert len(trained) == 2
    assert all(sorted(numbers) == [0] * 8 + [1] * 8 for numbers in trained)
    assert any(numbers != [index // 2 % 2 for index in range(16)] for numbers in trained)  # shuffled


def test_of_people_who_are_not_known_all_groups_count_alike(tmp_path: Path) -> None:
    folder = run_local(plan_of(num_rounds=1), tmp_path / "run", federation(tmp_path / "data"))
    network = load_predictor(folder.parent, "last").network
    adapters = adapters_of(network)
    assert len(adapters) > 4
    assert all(adapter.numbers is None for adapter in adapters)


# ------------------------------------------------------------------------------------------------ what is refused


def refused(local: dict[str, Any], folder: Path, **more: Any) -> str:
    with pytest.raises(RoundFailed) as failure:
        run_local(plan_of(**more), folder, local)
    return str(failure.value)


def test_a_site_that_knows_no_groups_is_named(tmp_path: Path) -> None:
    local = federation(tmp_path / "data")
    told = refused(local, tmp_path / "a", fairlora_attribute="tone")
    assert "'site-1', 'site-2': the method goes by the groups of 'tone', which its data do not declare" in told
    told = refused(local, tmp_path / "b", **{"adapters.groups": 3})
    wanted = "attribute 'sex' has 2 groups in its datalist, the job has adapters.groups=3; set"
    assert f"'site-1', 'site-2': {wanted}" in told


def test_a_task_without_the_adapters_is_refused() -> None:
    with pytest.raises(ValueError, match="has adapters=none: set adapters=fair_lora"):
        make_plan("fair_lora", task="classification", sites=SITES, settings={**SMALL, "adapters": "none"})
    with pytest.raises(ValueError, match="fair_lora needs fairlora_attribute"):
        plan_of(fairlora_attribute="")
    with pytest.raises(ValueError, match=r"adapters=fair_lora: .*rank"):
        plan_of(**{"adapters.rank": 3})
    with pytest.raises(ValueError, match=r"adapters=fair_lora: .*groups"):
        plan_of(**{"adapters.groups": 1})
    assert GroupAdapters(fairlora_attribute="sex").attribute == "sex"
