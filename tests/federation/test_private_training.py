"""Test training under differential privacy: its steps against Opacus, what is refused, and every byte that leaves."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from scipy import stats
from torch import nn

from fairflare.cli.run.view import RunView
from fairflare.data.datalist import write_datalist
from fairflare.exchange.messages import SiteReply, encode_reply
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import RESULTS_FOLDER
from fairflare.federation.server.sums import SecureSums, SumLost
from fairflare.federation.site.replies import read_stats
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import RUN_DIR, run_local
from fairflare.flare.statistics import ImageStatistics
from fairflare.flare.stock_tasks import NotServed, metrics_of
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_heal import ConsistentTraining
from fairflare.methods.fed_ism import SharpnessAwareTraining
from fairflare.methods.fed_prox import ProximalTraining
from fairflare.methods.parts.anchor_report import LayerSimilarityReport
from fairflare.methods.parts.probes import LossProbe
from fairflare.privacy import ledger, policy
from fairflare.privacy.ledger import BOOKS, LEDGER
from fairflare.privacy.policy import declares
from fairflare.privacy.secret import SecretDraws
from fairflare.privacy.training import PrivateLoop, PrivateUnits
from fairflare.reporting.findings import run_findings
from fairflare.reporting.layout import number as printed
from fairflare.reporting.results import read_results
from fairflare.tasks.classification import ClassificationTask
from tests.tiny import metric_values, withheld_names

from ..methods.support import initial, request

PICTURES: dict[str, Any] = {
    "image_size": (32, 32), "network": "vit_mini", "phantom": "fundus", "phantom_sites": 2, "phantom_samples": 60,
    "phantom_test": 40, "partition": "iid", "corrupted_sites": 0,
}  # fmt: skip
OWN = {"epsilon": 100.0}


@pytest.fixture(autouse=True)
def by_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count by a plain sum of steps, which needs no opacus and no time."""
    monkeypatch.setattr(ledger, "epsilon", lambda history, *_: (float(sum(c[2] for c in history)), "sum"))


def site(
    folder: Path, half: LocalTraining | None = None, own: Any = OWN, task: Any = None, **settings: Any
) -> SiteWorker:
    given = {"privacy": own, "state_root": str(folder / "root"), **settings}
    task = ClassificationTask(**PICTURES) if task is None else task
    return SiteWorker("site-1", task, half or LocalTraining(batch_size=8), given, folder / "state", num_threads=1)


# ------------------------------------------------------------------------------------------------ secret draws


def test_the_stream_is_chacha20() -> None:
    """Compare with RFC 8439, A.1, test vector 1: the key stream of a key and a nonce of zeros."""
    first = int.from_bytes(bytes.fromhex("76b8e0ada0f13d90"), "little") >> 11
    assert SecretDraws(bytes(32)).uniform(3)[0] == first / 2**53


def test_noise_is_normal_and_nobody_can_know_it() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        drawn.append(SecretDraws().noise(200_001))
    noise, again = drawn
    assert not np.isin(again, noise).any()
    assert noise.shape == (200_001,)
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(noise[:100_000], noise[100_000:-1])[0, 1]) < 0.02


def test_each_unit_is_drawn_by_itself() -> None:
    counts = np.array([len(SecretDraws().draw(400, 1 / 8)) for _ in range(400)])
    assert counts.mean() == pytest.approx(50, abs=2)
    assert counts.var() == pytest.approx(400 / 8 * 7 / 8, rel=0.4)  # a shuffled list would have none
    assert SecretDraws().draw(5, 1.0) == [0, 1, 2, 3, 4]


def test_some_images_of_a_patient_are_chosen_at_random() -> None:
    chosen = [SecretDraws().some([7, 8, 9], 2) for _ in range(200)]
    assert {len(set(of)) for of in chosen} == {2}
    assert {image for of in chosen for image in of} == {7, 8, 9}
    assert SecretDraws().some([7, 8], 2) == [7, 8]


# ------------------------------------------------------------------------------------------------ the steps


class Small(nn.Module):
    """Represent a network with a group norm, a buffer that a forward pass changes, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += inputs.sum().detach()  # type: ignore[operator]
        return self.frozen(self.head(self.norm(self.conv(inputs)).relu().mean((2, 3))))  # type: ignore[no-any-return]


class Few:
    """Represent nine images of five patients."""

    def __init__(self) -> None:
        self.inputs, self.targets = (
            torch.randn(9, 1, 6, 6, generator=torch.Generator().manual_seed(3)),
            torch.arange(9) % 3,
        )
        self.patients = [0, 0, 1, 2, 2, 2, 3, 4, 4]

    def num_samples(self, split: str) -> int:
        return 9

    def cases(self, split: str) -> list[tuple[str, int]]:
        return [("patient", patient) for patient in self.patients]

    def chosen(self, split: str, numbers: Sequence[int], seed: int, augment: bool) -> Iterator[Any]:
        return iter([(self.inputs[list(numbers)], self.targets[list(numbers)])])


def stepped(model: nn.Module, data: Any, noise: float = 0.0, clip: float = 0.05, images: int = 9, **more: Any) -> Any:
    """Make one step with all patients, and return the change of each trained tensor at a learning rate of 1."""
    half = LocalTraining(
        **{"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 1.0, "batch_size": 9, **more},
        keep_optimizer_state=False,
    )
    run = SimpleNamespace(
        site="s", seed=0, task=SimpleNamespace(loss=nn.functional.cross_entropy), data=data, store=None,
        current_round=0, num_rounds=1, device=torch.device("cpu"), on_device=lambda tensor: tensor, batch=None,
        drop_channels=lambda inputs, *step: inputs,
    )  # fmt: skip
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    found = PrivateLoop(half, run, model, noise, clip, images).train(PrivateUnits.find(data))  # type: ignore[arg-type]
    assert found.num_steps == 1
    return {name: before[name] - tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("clip", [0.05, 0.5, 100.0])
def test_a_step_is_that_of_opacus(clip: float) -> None:
    """Compare with Opacus' gradients of single images, added up by patient, clipped by norm and divided."""
    grad_sample = pytest.importorskip("opacus.grad_sample", reason="opacus is not installed: make test-dp")
    data, model = Few(), Small()
    reference = grad_sample.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    nn.functional.cross_entropy(reference(data.inputs), data.targets, reduction="sum").backward()
    own = {
        name.removeprefix("_module."): torch.zeros(5, *p.shape).index_add(0, torch.tensor(data.patients), p.grad_sample)
        for name, p in reference.named_parameters()
        if p.requires_grad
    }
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in own.values()]).norm(dim=0)
    factors = (clip / (norms + 1e-6)).clamp(max=1)
    assert clip != 0.05 or (factors < 1).all()
    assert clip != 100.0 or (factors == 1).all()
    change = stepped(model, data, clip=clip)
    for name, gradients in own.items():
        expected = torch.einsum("n,n...->...", factors, gradients) / 5
        torch.testing.assert_close(change[name], expected, atol=1e-6, rtol=1e-5)


def test_only_what_is_trained_changes() -> None:
    change = stepped(Small(), Few(), noise=1.0)
    assert {name for name, by in change.items() if not by.any()} == {"seen", "frozen.weight", "frozen.bias"}


def test_gradients_hold_no_graph_where_pytorchs_zeros_require_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give zeros as PyTorch 2.4 does in place of the gradients of unused parameters."""
    model, grad = Small(), torch.autograd.grad
    model.unused = nn.Linear(2, 2)

    def grad_of_2_4(outputs: Any, inputs: Any, **more: Any) -> Any:
        found = grad(outputs, inputs, allow_unused=True)
        return tuple(
            torch.zeros_like(p, requires_grad=True) if g is None else g for p, g in zip(inputs, found, strict=True)
        )

    monkeypatch.setattr(torch.autograd, "grad", grad_of_2_4)
    graphs = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step",
        lambda self, *more: (graphs.extend(p.grad.requires_grad for p in model.parameters() if p.requires_grad),
                             step(self, *more)),
    )  # fmt: skip
    stepped(model, Few())
    assert graphs
    assert not any(graphs)


def test_one_patient_moves_a_step_by_the_clip_at_most() -> None:
    """Check the sensitivity with gradients of any length, with labels the wrong way and with NaN."""
    model = Small()
    usual = stepped(copy.deepcopy(model), Few())
    for harm in (1.0, -30.0, 1e20, math.nan, math.inf):
        data = Few()
        data.inputs[3:6] *= harm
        data.targets[3:6] = 2 - data.targets[3:6]
        other = stepped(copy.deepcopy(model), data)
        moved = math.sqrt(sum(float((usual[n] - other[n]).double().square().sum()) for n in usual)) * 5
        assert math.isfinite(moved)
        assert moved <= 2 * 0.05 + 1e-5  # blank in place of the patient: the clip; another patient: twice


def test_the_noise_has_the_declared_size() -> None:
    """Check the spread over all numbers of a step: z times the clip over the expected number of patients."""
    model, data = Small(), Few()
    plain = stepped(copy.deepcopy(model), data)
    gaps = [
        float(value)
        for _ in range(60)
        for name, by in stepped(copy.deepcopy(model), data, noise=3.0).items()
        for value in (by - plain[name]).flatten()
        if name.split(".")[0] in ("conv", "norm", "head")
    ]
    assert np.std(gaps) == pytest.approx(3.0 * 0.05 / 5, rel=0.05)
    assert stats.kstest(np.array(gaps) / (3.0 * 0.05 / 5), "norm").pvalue > 1e-6


def test_a_step_is_divided_by_the_expected_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a step in which one of five patients is drawn, where 5 / 3 are expected, and one in which none is."""
    model, data = Small(), Few()
    monkeypatch.setattr(SecretDraws, "draw", lambda self, count, rate: [2])
    of_five = stepped(copy.deepcopy(model), data)
    for name, change in stepped(copy.deepcopy(model), data, batch_size=2, local_steps=1).items():
        torch.testing.assert_close(change, 3 * of_five[name])
    monkeypatch.setattr(SecretDraws, "draw", lambda self, count, rate: [])
    assert not any(change.any() for change in stepped(model, data).values())


def test_of_a_patient_at_most_so_many_images_are_used() -> None:
    data, seen = Few(), []
    chosen = data.chosen
    data.chosen = lambda split, numbers, *more: seen.append(numbers) or chosen(split, numbers, *more)  # type: ignore
    stepped(Small(), data, images=2)
    assert sorted(map(len, seen)) == [1, 1, 2, 2, 2]
    assert all(len({data.patients[k] for k in numbers}) == 1 for numbers in seen)


def test_an_unreadable_image_counts_as_a_gradient_of_zero(caplog: pytest.LogCaptureFixture) -> None:
    data, model = Few(), Small()
    usual = stepped(copy.deepcopy(model), data)
    chosen = data.chosen

    def damaged(split: str, numbers: Sequence[int], *more: Any) -> Iterator[Any]:
        if 6 in numbers:
            raise ValueError("image_6.png is damaged")
        return chosen(split, numbers, *more)

    data.chosen = damaged  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        other = stepped(copy.deepcopy(model), data)
    assert "image_6.png is damaged" in caplog.text
    moved = math.sqrt(sum(float((usual[n] - other[n]).double().square().sum()) for n in usual)) * 5
    assert 0 < moved <= 0.05 + 1e-6


def test_steps_are_fixed_beforehand() -> None:
    units = PrivateUnits.find(Few())  # type: ignore[arg-type]
    assert (units.kind, [len(of) for of in units.members]) == ("patient", [2, 1, 3, 1, 2])
    assert units.plan(LocalTraining(batch_size=2, local_epochs=4)) == (1 / 3, 12)
    assert units.plan(LocalTraining(batch_size=9)) == (1.0, 1)
    assert units.plan(LocalTraining(batch_size=2, local_steps=7)) == (1 / 3, 7)


# ------------------------------------------------------------------------------------------------ what is refused


class Changed(LocalTraining):
    """Represent a new site half that has not said what it is."""

    def loss(self, *args: Any) -> Any:
        return super().loss(*args)


class Same(LocalTraining):
    """Represent a site half that changes nothing."""


COUNTED = {
    LocalTraining, ProximalTraining, ConsistentTraining, LossProbe, SharpnessAwareTraining, LayerSimilarityReport,
}  # fmt: skip


def test_a_new_method_is_refused_until_it_says_what_it_is() -> None:
    assert declares(LocalTraining)
    assert declares(Same)
    assert not declares(Changed)
    assert not declares(type("Begun", (LocalTraining,), {"__init__": lambda self: None}))
    told = {method.training for method in all_methods().values() if declares(method.training)}
    assert told == COUNTED
    assert {half for half in told if half.step is not LocalTraining.step} == {SharpnessAwareTraining}
    assert {half for half in told if half.report is not LocalTraining.report} == {SharpnessAwareTraining, LossProbe}
    assert {half.train for half in told} == {LocalTraining.train}  # which is never called
    for own in ({"step": Changed.loss}, {"report": Changed.loss}, {"train": Changed.loss}):  # nobody counts these
        assert not policy.can_account(type("Own", (LocalTraining,), {"under_dp": True, **own}))


@pytest.mark.many
@pytest.mark.parametrize("name", {method.training: name for name, method in all_methods().items()}.values())
def test_every_other_method_is_refused_by_name(name: str, tmp_path: Path) -> None:
    method = all_methods()[name]
    half = method.training(**method.site)
    reply = site(tmp_path, half).perform(request("check", {}))
    if type(half) in COUNTED and half.criterion == "task":
        assert reply.status == "ok"
    else:
        assert reply.status == "skipped"
        assert "'site-1': differential privacy: " in reply.reason
        assert type(half).__name__ in reply.reason or "criterion" in reply.reason


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"criterion": "balanced_softmax"},
            "criterion='balanced_softmax' cannot go with it (class counts have no noise)",
        ),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0 cannot go with it"),
        ({"norm_statistics": "site"}, "norm_statistics='site' cannot"),
        ({"personalise": "finetune"}, "personalise='finetune' cannot"),
        ({"unlabelled": "consistency"}, "unlabelled='consistency' cannot"),
        ({"precision": "fp16"}, "precision='fp16' scales the loss"),
    ],
)
@pytest.mark.parametrize("task", ["check", "train"])
def test_settings_that_cannot_be_counted_are_refused(settings: Any, why: str, task: str, tmp_path: Path) -> None:
    """Check both tasks: a server need not ask ``check`` first."""
    half = LocalTraining(**{"batch_size": 8, **settings})
    state = {} if task == "check" else initial(ClassificationTask(**PICTURES))
    reply = site(tmp_path, half).perform(request(task, state))
    assert (reply.status, reply.update) == ("skipped", None)
    assert why in reply.reason
    assert not (tmp_path / "root" / BOOKS).exists()


class OwnLoss(ClassificationTask):
    """Represent a task of a user, whose loss may be anything."""

    def loss(self, *args: Any) -> Any:
        return super().loss(*args)


class OwnName(ClassificationTask):
    """Represent the task file of a job that changes nothing."""


def test_networks_and_tasks_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    batch = ClassificationTask(**{**PICTURES, "network": "resnet18"})
    reply = site(tmp_path, task=batch).perform(request("check", {}))
    assert "norms over a batch ('encoder.bn1.running_mean')" in reply.reason
    assert "network=vit_s" in reply.reason
    assert "OwnLoss does not say" in site(tmp_path, task=OwnLoss(**PICTURES)).perform(request("check", {})).reason
    assert site(tmp_path, task=OwnName(**PICTURES)).perform(request("check", {})).status == "ok"


@pytest.mark.parametrize("name", ["anchor", "norms"])
def test_questions_that_are_not_counted_are_refused(name: str, tmp_path: Path) -> None:
    reply = site(tmp_path).perform(request(name, initial(ClassificationTask(**PICTURES))))
    assert f"answers to the task '{name}' are not counted" in reply.reason
    assert (reply.status, reply.report, reply.stats) == ("skipped", {}, {})


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (True, "must be an object with 'epsilon', got True"),
        ({}, "needs the setting 'epsilon'"),
        ({"epsilon": 0}, "epsilon must be"),
        ({"epsilon": 1.0, "nose": 2}, "nose"),
        ({"epsilon": 1.0, "noise": 0.0}, "noise must be"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta must be"),
    ],
)
def test_a_wrong_setting_is_named(own: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(policy.SiteError, match="site 'site-1': setting 'privacy'") as refused:
        site(tmp_path, own=own)
    assert why in str(refused.value)


@pytest.mark.parametrize(("root", "got"), [({}, "None"), ({"state_root": "kept"}, "'kept'")])
def test_the_ledger_needs_a_folder_that_outlives_jobs(root: dict[str, str], got: str, tmp_path: Path) -> None:
    with pytest.raises(policy.SiteError, match=f"'privacy' needs 'state_root', .*, got {got}") as refused:
        SiteWorker("site-1", ClassificationTask(**PICTURES), LocalTraining(), {"privacy": OWN, **root}, tmp_path)
    assert got not in refused.value.public


def test_a_delta_that_means_nothing_is_refused(tmp_path: Path) -> None:
    here = site(tmp_path, own={**OWN, "delta": 0.5})
    for task in ("check", "train"):
        reply = here.perform(request(task, initial(here.task)))
        assert (reply.status, reply.report) == ("skipped", {})
        assert re.search(
            r"delta must lie between 0 and 1/(\d+) \(one over its \1 images\), got 0.5; correct it", reply.reason
        )


@pytest.mark.parametrize(
    ("images", "given", "delta"),
    [
        (9, None, 1e-5), (10_000, None, 1e-5), (20_000, None, 5e-6),  # the less of 1e-5 and 1 / (10 n)
        (9, 0.1, 0.1), (10, 0.1, None), (9, 1e-7, 1e-7),  # below 1 / n
    ],
)  # fmt: skip
def test_delta_is_less_than_one_image_s_share(
    images: int, given: float | None, delta: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look at what a check of the budget asks the ledger: one step of DP-SGD, at the rate of one image."""
    asked: list[Any] = []
    monkeypatch.setattr(ledger.Ledger, "lasts", lambda self, cases, spending, most, **_: asked.append((spending, most)))
    data: Any = SimpleNamespace(
        cases=lambda split: [], num_samples=lambda split: images, identities=lambda split: range(images)
    )
    private = policy.Private("s", policy.PrivacySettings(epsilon=3.0, delta=given, noise=1.5, clip=0.7), tmp_path)
    if delta is None:
        with pytest.raises(ledger.BudgetRefused, match=rf"delta must lie between 0 and 1/{images} .* got {given:g}"):
            private.check_budget(data)
        return
    private.check_budget(data)
    wanted = ledger.Spending("train", "image", images, 1.5, 1 / images, 1, 0.7, 3.0, pytest.approx(delta, rel=1e-12))
    assert asked == [(wanted, 1)]


def test_a_spent_budget_ends_the_site_s_training_over_jobs(tmp_path: Path) -> None:
    state = initial(ClassificationTask(**PICTURES))
    first = site(tmp_path, own={"epsilon": 10.0})
    replies = [first.perform(request("train", state, number)) for number in range(2)]
    assert [reply.status for reply in replies] == ["ok", "ok"]
    steps = replies[0].num_steps
    assert [reply.stats["epsilon"] for reply in replies] == [steps, 2 * steps]
    again = site(tmp_path, own={"epsilon": 10.0})  # another job, of another experiment
    reply = again.perform(request("train", state, 0, run="other", experiment="second"))
    assert (reply.status, reply.update, reply.num_samples) == ("skipped", None, None)
    assert "privacy budget spent" in reply.reason
    found = [json.loads(line) for line in (tmp_path / "root" / BOOKS / "site-1" / LEDGER).read_text().splitlines()]
    assert [(of["round"], of["unit"], of["q"], of["steps"]) for of in found] == [
        (0, "image", 1 / steps, steps), (1, "image", 1 / steps, steps),
    ]  # fmt: skip


@pytest.mark.parametrize("task", ["check", "train"])
def test_a_ledger_that_lacks_what_the_server_shows_is_refused_by_name(tmp_path: Path, task: str) -> None:
    """Check what a server shows, also one that lies or shows no text; another site's entry means nothing."""
    here = site(tmp_path)
    state = {} if task == "check" else initial(here.task)
    for shown in ("0" * 64, "", 5, {}):
        reply = here.perform(request(task, state, directives={"ledger": {"site-1": shown}}))
        assert (reply.status, reply.update) == ("skipped", None)
        assert "'site-1': differential privacy: 'ledger.jsonl' of its ledger is gone" in reply.reason
    for shown in ({"site-2": "0" * 64}, 5, None):
        assert here.perform(request(task, state, directives={"ledger": shown})).status == "ok"
    last = here.perform(request("train", initial(here.task))).stats["ledger"]
    assert here.perform(request(task, state, directives={"ledger": {"site-1": last}})).status == "ok"
    reply = here.perform(request(task, state, directives={"ledger": {"site-1": "0" * 64}}))
    assert "its ledger lacks the line that the server last heard of" in reply.reason


@pytest.mark.parametrize("last", ["", "0" * 63, "A" * 64, "0" * 64 + "\n", "\ud800" * 64, 5, ["0" * 64]])
def test_what_a_site_says_of_its_ledger_is_a_hash_or_refused(last: Any) -> None:
    with pytest.raises(ReportError, match="site 's': field 'ledger' must be"):
        read_stats("s", {"stats": {"ledger": last}})
    assert read_stats("s", {"stats": {"ledger": "0a" * 32}})["ledger"] == "0a" * 32


def test_a_round_is_in_the_ledger_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = []

    def killed(self: PrivateLoop, units: PrivateUnits) -> Any:
        there.append((tmp_path / "root" / BOOKS / "site-1" / LEDGER).read_text().count("\n"))
        raise KeyboardInterrupt

    monkeypatch.setattr(PrivateLoop, "train", killed)
    here = site(tmp_path)
    for _ in range(2):  # a round that is redone is counted again
        with pytest.raises(KeyboardInterrupt):
            here.perform(request("train", initial(here.task)))
    assert there == [1, 2]


# ------------------------------------------------------------------------------------------------ what leaves


def pictures(folder: Path, seed: int, patients: bool = True) -> str:
    """Write a site's images and return the folder; another seed's have other pixels and labels."""
    random = np.random.default_rng(seed)
    folder.mkdir()
    splits: dict[str, Any] = {"training": [], "validation": [], "test": [], "test_dark": []}
    for split, count in zip(splits, (12, 6, 6, 4), strict=True):
        for number in range(count):
            name = f"{split}_{number}.png"
            Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / name)
            who = {"patient": f"{split}-{number // 2}"} if patients else {}
            splits[split].append({"image": name, "label": int(random.integers(0, 5)), **who})
    write_datalist(folder / "datalist.json", splits, class_names=list("abcde"))
    return str(folder)


def told(reply: SiteReply) -> tuple[Any, ...]:
    message = encode_reply(reply, 0)
    # A hash of what only the site's own random secret gives: it tells of no image, and is another one every time.
    assert len(message.meta["stats"].pop("ledger", "0" * 64)) == 64
    shapes = {name: tensor.shape for name, tensor in (message.params or {}).items()}
    return shapes, message.metrics, message.meta, message.is_update


def test_nothing_but_the_update_depends_on_an_image_or_a_label(tmp_path: Path) -> None:
    """Check every byte of every reply of two sites that have no pixel and hardly a label in common."""
    task = ClassificationTask(**{**PICTURES, "num_classes": 5})
    state, found = initial(task), []
    for seed in (1, 2):
        own = tmp_path / str(seed)
        own.mkdir()
        here = site(own, task=copy.deepcopy(task), data_root=pictures(own / "images", seed))
        asked = [
            request("check", {}), request("train", state), request("train", state, 1, min_cases=3),
            request("validate", state), request("validate", state, measure=("test", "validation"), resample=20),
            request("validate", state, as_sent=True), request("anchor", state), request("norms", state),
        ]  # fmt: skip
        found.append([told(here.perform(one)) for one in asked])
    for first, second in zip(*found, strict=True):
        assert first == second
    check, train, _, validate, *_ = [of[2] for of in found[0]]
    assert check["report"] == {
        "splits": ["training", "validation", "test", "test_dark"], "images": [12, 6, 6, 4], "synthetic": False,
        "device": "cpu", "class_names": list("abcde"), "personal": False,
        "privacy": ["patient", "DP-SGD, noise 1, clip 1", "updates; reports and metrics stay at home"],
        "budget": [100.0, 1e-5, 0.0, 3.0],
    }  # fmt: skip
    assert (train["num_samples"], train["num_steps"]) == (12, 1)
    assert train["stats"].keys() == {"synthetic", "epsilon"}
    assert {"loss", "balanced_accuracy"} < {*withheld_names(found[0][1][1])}
    assert validate["stats"] == {}
    assert all(metric_values(of[1]) == {} and of[2].get("report", {}) == {} for of in found[0][1:])


def test_with_secure_sums_the_norm_of_the_noised_update_leaves(tmp_path: Path) -> None:
    private, reply = site(tmp_path).private, SiteReply("ok", report={"update_norm": 1.5, "probe_loss": 2.0})
    assert private is not None
    for name, sums, left in (("train", {"run": b"r"}, {"update_norm": 1.5}), ("train", {}, {}), ("validate", {}, {})):
        assert private.release(request(name, {}, sums=sums), reply, [], None).report == left


def test_that_a_site_allows_sums_only_leaves_as_it_tells_of_no_image(tmp_path: Path) -> None:
    here = site(tmp_path, secure="sums")
    assert "its own file has secure=sums, the run has not" in here.perform(request("check", initial(here.task))).reason


@pytest.mark.parametrize(("least", "told"), [(1, True), (1000, False)])
def test_the_noise_of_a_test_figure_hides_the_number_of_cases_that_min_cases_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, told: bool
) -> None:
    """Check that 'reports' over the number of test patients leaves only if that number may."""
    monkeypatch.setattr(ledger, "epsilon", lambda history, *_: (0.0, "none"))
    here = site(tmp_path, own={**OWN, "reports": 0.05}, min_cases=least)
    reply = here.perform(request("check", initial(here.task)))
    assert reply.status == "ok", reply.reason
    assert ("test" in reply.report["splits"]) == told
    assert ("standard deviation" in str(reply.report)) == told


def test_a_renamed_image_without_a_patient_is_the_same_case(tmp_path: Path) -> None:
    """Check that images are told apart by their pixels, whatever the job makes of them."""
    first = pictures(tmp_path / "a", 1, patients=False)
    second = pictures(tmp_path / "b", 1, patients=False)
    for path in (tmp_path / "b").iterdir():
        path.rename(path.with_name(path.name.replace("training", "other")))
    listed = tmp_path / "b" / "datalist.json"
    listed.write_text(listed.read_text().replace("training_", "other_"))
    spent = []
    for folder, size in ((first, 32), (second, 48), (pictures(tmp_path / "c", 2, patients=False), 32)):
        task = ClassificationTask(**{**PICTURES, "num_classes": 5, "image_size": (size, size), "intensity": "range"})
        here = site(tmp_path, task=task, data_root=folder)
        spent.append(here.perform(request("train", initial(task))).stats["epsilon"])
    assert spent == [2.0, 4.0, 2.0]


@pytest.mark.parametrize("wrong", ["loss", "data"])
def test_a_failure_leaves_as_one_fixed_text(tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise policy.SiteError("the loss of patient 7 became nan")

    here = site(tmp_path)
    monkeypatch.setattr(*((LocalTraining, "loss", fails) if wrong == "loss" else (here.task, "open_site", fails)))
    reply = here.perform(request("train", initial(ClassificationTask(**PICTURES))))
    assert reply == SiteReply("failed", reason="site 'site-1': train failed; its own log says why")


def test_other_questions_of_flare_are_not_answered(tmp_path: Path) -> None:
    here = site(tmp_path)
    reply = here.perform(request("validate", initial(here.task), as_sent=True))
    with pytest.raises(NotServed, match="balanced_accuracy is suppressed"):
        metrics_of(reply, "balanced_accuracy")
    sums = ImageStatistics()
    sums.open("site-1", {"privacy": OWN, "data_root": str(tmp_path)})
    with pytest.raises(policy.SiteError, match="not counted under its 'privacy'"):
        sums.features()


def test_moments_of_a_training_without_noise_are_not_continued(tmp_path: Path) -> None:
    """Check a site that is given its setting in the middle of a run: its Adam begins anew."""
    state = initial(ClassificationTask(**PICTURES))
    plain = SiteWorker("site-1", ClassificationTask(**PICTURES), LocalTraining(batch_size=8), {}, tmp_path / "state")
    assert plain.perform(request("train", state)).status == "ok"
    here, taken = site(tmp_path), []
    load = here.state.store("").__class__.load_before
    here.state.store("").__class__.load_before = lambda self, name, at: (
        taken.append((name, load(self, name, at))) or None
    )  # type: ignore
    try:
        assert here.perform(request("train", state, 1)).status == "ok"
    finally:
        here.state.store("").__class__.load_before = load  # type: ignore[method-assign]
    assert taken == [("private_optimizer", None)]


@pytest.mark.parametrize(
    ("method", "task", "settings"),
    [
        ("fed_avg", "classification", {**PICTURES, "image_size": [32, 32], "batch_size": 8}),
        (
            "fed_prox",
            "segmentation",
            {"image_size": [32, 32], "phantom_cases": 0.1, "network": "segresnet", "width": 8},
        ),
    ],
)
def test_a_run_says_what_is_covered(tmp_path: Path, method: str, task: str, settings: Any) -> None:
    plan = make_plan(
        method, task=task, sites=["site-1", "site-2"], num_rounds=2, settings={**settings, "local_epochs": 1}
    )
    own = {"privacy": {"epsilon": 100, "noise": 2.0}, "state_root": str(tmp_path / "root")}
    folder = run_local(plan, tmp_path / "run", {"sites": {"site-1": own}})
    results = read_results(folder)
    assert [record.accepted for record in results.rounds] == [["site-1", "site-2"]] * 2
    assert results.rounds[1].train["site-1"]["epsilon"] == 2 * results.rounds[1].train["site-1"]["num_steps"]
    assert results.rounds[1].train["site-1"]["loss"] is None or math.isnan(results.rounds[1].train["site-1"]["loss"])
    assert not any(cell.value is not None for cell in results.cells if (cell.site, cell.split) == ("site-1", "test"))
    said = [one.text for one in run_findings(results)]
    (first,) = (text for text in said if text.startswith("Differential privacy at "))
    unit = "image" if task == "classification" else "patient"
    spent = 2 * results.rounds[1].train["site-1"]["num_steps"]
    assert first.startswith(
        f"Differential privacy at site-1 (epsilon {printed(spent)} of at most 100, delta 1e-05, unit "
    )
    assert f"unit {unit}; DP-SGD, noise 2, clip 1; covers updates; reports and metrics stay at home)" in first
    assert first.endswith("Updates, metrics and reports of site-2 are in the clear.")
    assert (results.info.privacy["site-1"]["epsilon"], [*results.info.privacy]) == (spent, ["site-1"])
    assert any("site-1 (suppressed: differential privacy)" in text for text in said)


def test_a_lost_round_of_secure_sums_is_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the first of two rounds after all sites have sent their masked updates: the site has spent both."""
    mean = SecureSums.mean

    def lost_first(sums: SecureSums, *given: Any) -> Any:
        found = mean(sums, *given)
        if sums.record.current_round == 0:
            raise SumLost("nobody can say which")
        return found

    monkeypatch.setattr(SecureSums, "mean", lost_first)
    settings = {**PICTURES, "image_size": [32, 32], "phantom_sites": 3, "local_epochs": 1}
    names = ["site-1", "site-2", "site-3"]
    plan = make_plan("fed_avg", task="classification", sites=names, num_rounds=2, settings=settings, secure="sums")
    own = {"privacy": {"epsilon": 100.0}, "state_root": str(tmp_path / "root")}
    results = read_results(run_local(plan, tmp_path / "run", {"sites": {"site-1": own}}))
    assert [record.accepted for record in results.rounds] == [[], names]
    assert "the round is lost" in results.rounds[0].warnings[-1].text
    found = [json.loads(line) for line in (tmp_path / "root" / BOOKS / "site-1" / LEDGER).read_text().splitlines()]
    assert [of["round"] for of in found] == [0, 1]
    steps = [of["steps"] for of in found]
    assert min(steps) > 0
    assert results.rounds[1].train["site-1"]["epsilon"] == sum(steps)
    assert results.info.privacy["site-1"]["epsilon"] == sum(steps)


@pytest.mark.parametrize(
    ("target", "lasts", "rounds", "told"),
    [
        (8.0, 3, 3, [("epsilon 8 lasts for 3 of 3 round(s)", False)]),
        (10.0, 0, 0, []),
        (
            1e9,
            0,
            0,
            [("epsilon 1e+09 protects little or nothing (at most 10 counts as reasonable); let its own", True)],
        ),
        (11.0, 2, 3, [("epsilon 11 lasts for 2 of 3 round(s), then", True), ("epsilon 11 protects little", True)]),
    ],
)
def test_what_users_are_told_of_a_budget(target: float, lasts: float, rounds: int, told: Any) -> None:
    found = list(policy.budget_notes(target, lasts, rounds))
    for (text, warning), (beginning, grave) in zip(found, told, strict=True):
        assert text.startswith(beginning)
        assert warning == grave


def test_the_check_says_how_many_rounds_the_budget_lasts_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check a budget for two of three rounds, and one for none, which ends the run before any training."""
    settings = {**PICTURES, "image_size": [32, 32], "batch_size": 8, "local_epochs": 1}
    plan = make_plan("fed_avg", task="classification", sites=["site-1", "site-2"], num_rounds=3, settings=settings)
    own: dict[str, Any] = {"privacy": {"epsilon": 10, "delta": 1 / 3000}, "state_root": str(tmp_path / "root")}
    shown = io.StringIO()
    with caplog.at_level(logging.INFO), RunView(Console(file=shown, width=200)) as view:
        found = read_results(run_local(plan, tmp_path / "run", {"sites": {"site-1": own}}, listeners=[view]))
    assert [record.accepted for record in found.rounds] == [["site-1", "site-2"], ["site-1", "site-2"], ["site-2"]]
    assert found.info.privacy["site-1"]["lasts"] == 2
    told = "privacy budget of site 'site-1': epsilon 10 lasts for 2 of 3 round(s), then it skips them; run fewer rounds"
    assert told in caplog.text
    assert [line.startswith(told) for line in shown.getvalue().splitlines() if "budget of" in line] == [True]
    assert (
        "DP-SGD, noise 1, clip 1; covers updates; reports and metrics stay at home; epsilon at most 10;" in caplog.text
    )
    assert "delta 0.000333;" in caplog.text
    assert "lasts" not in caplog.text.partition("site 'site-2' has")[2].partition("\n")[0]
    own["privacy"]["epsilon"] = 0.5
    own["state_root"] = str(tmp_path / "other")
    why = "^check, .*'site-1': .*too small for one"
    with pytest.raises(RoundFailed, match=why):
        run_local(plan, tmp_path / "again", {"sites": {"site-1": own}})
    assert read_results(tmp_path / "again" / RUN_DIR / RESULTS_FOLDER).rounds == []
