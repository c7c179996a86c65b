"""Runs of sites that lack channels of the images: input columns, secure sums, dropped channels, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fairflare.base.site_data import SiteData
from fairflare.core.aggregation.tensor_mean import Aggregate
from fairflare.core.cells import Cell
from fairflare.core.features.layers import input_tensors
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import SiteRun
from fairflare.reporting.documents import Info, RunResults
from fairflare.reporting.notes import channel_notes, run_notes
from fairflare.reporting.results import read_results
from tests.tiny import run_document

from ..unit.test_partial_slices import middle
from .network import number
from .summing import Numbers, Run

CHANNELS = ("T2w", "ADC", "DWI")
WEIGHT = "0.weight"
LACKS_DWI = {"site-3": (0, 1)}


class Pictures(SiteData):
    """Hold drawn images of one site, whose lacking channels are 0."""

    def __init__(self, site: str, channels: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(number(site))
        count = 6 + 3 * number(site)
        self.channels, self.inputs = channels, torch.zeros(count, len(CHANNELS), 2, 2)
        self.inputs[:, channels] = torch.randn(count, len(channels), 2, 2, generator=generator) + 0.5
        self.targets = torch.randn(count, 1, generator=generator)

    def num_samples(self, split: str) -> int:
        return len(self.inputs)

    def batches(self, split: str, *, batch_size: int, **_: Any) -> Any:
        return list(zip(self.inputs.split(batch_size), self.targets.split(batch_size), strict=True))


class OfChannels(Numbers):
    """Define a regression from images of three channels, which some sites lack."""

    channels = CHANNELS

    def __init__(self, has: dict[str, tuple[int, ...]] | None = None) -> None:
        self.has = has or {}

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(len(CHANNELS), 4, 1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 1)
        )

    def input_tensors(self) -> Any:
        return input_tensors(self.build_model(), torch.zeros(1, len(CHANNELS), 2, 2))

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Pictures(site, self.has.get(site, (0, 1, 2)))


def run(folder: Path, has: dict[str, tuple[int, ...]] | None = None, method: str = "fed_avg", **more: Any) -> Run:
    """Run sites that decay their weights, so that columns without a gradient move, too."""
    half = {"weight_decay": 0.3, **more.pop("half", {})}
    settings = {"secure": "", "keep_local_models": not more.get("secure"), "channel_drop": 0.0, **more}
    return Run(folder, method, task=OfChannels(has or LACKS_DWI), half=half, **settings)


def sent(found: Run, current_round: int) -> dict[str, np.ndarray]:
    folder = found.folder / "fairflare" / "local_models" / f"round_{current_round:04d}"
    files = sorted(folder.glob("*.safetensors"))
    return {f.stem.removeprefix("local_model_"): load_file(f)[WEIGHT].double().numpy() for f in files}


def test_a_column_is_of_the_sites_that_have_its_channel(tmp_path: Path) -> None:
    """Compare each column with the weighted sum of what its owners sent; the other columns are of all sites."""
    found = run(tmp_path)()
    models, made = sent(found, 1), found.model[WEIGHT].numpy()
    weights = found.results["rounds"][1]["site_weights"]
    for column in range(3):
        owners = [site for site in models if column in LACKS_DWI.get(site, (0, 1, 2))]
        assert len(owners) == (2 if column == 2 else 3)
        total = sum(weights[site] for site in owners)
        mean = sum(weights[site] / total * models[site][:, column] for site in owners)
        np.testing.assert_allclose(made[:, column], mean, atol=1e-6)
    assert abs(models["site-3"][:, 2] - made[:, 2]).max() > 0.01
    assert found.results["info"]["channels"] == {"T2w": [*models], "ADC": [*models], "DWI": ["site-1", "site-2"]}


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
def test_robust_means_are_of_the_owners(aggregate: str, tmp_path: Path) -> None:
    found = run(tmp_path, aggregate=aggregate)()
    models, column = sent(found, 1), found.model[WEIGHT].numpy()[:, 2]
    weights, how = found.results["rounds"][1]["site_weights"], Aggregate(aggregate)
    shares = np.array([weights["site-1"], weights["site-2"]]) / (weights["site-1"] + weights["site-2"])
    own = np.stack([models[site][:, 2].ravel() for site in ("site-1", "site-2")]).T
    np.testing.assert_allclose(column.ravel(), [middle(values, shares, how) for values in own], atol=1e-6)


@pytest.mark.parametrize(
    "method", ["fed_lwr", "fed_opt", "q_fed_avg", "scaffold", "fed_nova", "fed_awa", "fed_ism_plus_l"]
)
def test_every_kind_of_rule_moves_a_column_as_its_owner_did(method: str, tmp_path: Path) -> None:
    """Let one site have the channel: the model's column moves along this site's step, by a server's optimizer too."""
    only = {"site-1": (0, 1), "site-3": (0, 1)}
    found = run(tmp_path, only, method, num_rounds=1)()
    torch.manual_seed(0)
    start = OfChannels().build_model().state_dict()[WEIGHT].double().numpy()[:, 2].ravel()
    own, moved = sent(found, 0)["site-2"][:, 2].ravel() - start, found.model[WEIGHT].numpy()[:, 2].ravel() - start
    if method == "fed_opt":  # Adam at the server: each number by its sign
        assert (np.sign(own) == np.sign(moved)).all()
    else:
        assert own @ moved / np.linalg.norm(own) / np.linalg.norm(moved) == pytest.approx(1, abs=1e-4)


def test_a_column_that_nobody_has_stays(tmp_path: Path) -> None:
    found = run(tmp_path, dict.fromkeys(("site-1", "site-2", "site-3"), (0, 1)))()
    torch.manual_seed(0)
    assert torch.equal(found.model[WEIGHT][:, 2], OfChannels().build_model().state_dict()[WEIGHT][:, 2])


def test_nothing_changes_where_all_have_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = run(tmp_path / "a", {"site-1": (0, 1, 2)})()
    monkeypatch.setattr(OfChannels, "channels", ())
    monkeypatch.setattr(Pictures, "channels", property(lambda own: None, lambda own, channels: None))
    silent = run(tmp_path / "b", {"site-1": (0, 1, 2)})()
    assert all(torch.equal(tensor, silent.model[name]) for name, tensor in every.model.items())
    assert every.results["info"]["channels"] == {}
    assert all(task.meta.get("channel_drop") is None for _, _, task in every.wire.asked)


def test_a_network_without_such_columns_is_refused_before_training(tmp_path: Path) -> None:
    found = run(tmp_path)
    first = torch.nn.Sequential(torch.nn.BatchNorm2d(3), *OfChannels().build_model())
    found.rounds.task.build_model = lambda: first  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"functional.batch_norm, not to conv"):
        found()
    assert not [name for _, name, _ in found.wire.asked if name == "train"]


# ------------------------------------------------------------------------------------------------ secure sums


@pytest.mark.parametrize("method", ["fed_avg", "fed_opt", "fed_lwr", "fed_ism_plus_l"])
def test_secure_sums_give_the_plain_runs_columns(method: str, tmp_path: Path) -> None:
    has = {"site-5": (0, 1)}
    sums = run(tmp_path / "a", has, method, sites=5, secure="sums")()
    plain = run(tmp_path / "b", has, method, sites=5, max_weight=0.5)()
    for name, tensor in plain.model.items():
        torch.testing.assert_close(sums.model[name], tensor, atol=2e-6, rtol=0)


def test_a_site_without_a_channel_sends_no_change_of_its_column(tmp_path: Path) -> None:
    """Open the sum of the column by hand, from the updates that the sites kept, in integers."""
    found = run(tmp_path, {"site-4": (0, 1)}, sites=4, secure="sums", num_rounds=1)()
    updates = {site: kept["params"][WEIGHT].double().numpy() for (site, _), kept in found.wire.updates.items()}
    (question,) = [
        q for _, name, task in found.wire.asked if name == "mask" for q in task.meta["sums"]["questions"]
        if q["label"] == "params"
    ][:1]  # fmt: skip
    weights = {site: row[0] for site, row in question["table"].items()}
    own = {site: weights[site] / (1 - weights["site-4"]) for site in ("site-1", "site-2", "site-3")}
    torch.manual_seed(0)
    start = OfChannels().build_model().state_dict()[WEIGHT].double().numpy()
    wanted = start[:, 2] + sum(own[site] * updates[site][:, 2] for site in own)
    np.testing.assert_allclose(found.model[WEIGHT].numpy()[:, 2], wanted, atol=1e-7)
    assert abs(updates["site-4"][:, 2]).max() > 1e-3


def test_too_few_owners_are_refused_before_training(tmp_path: Path) -> None:
    found = run(tmp_path, {"site-3": (0, 1), "site-4": (0, 1)}, sites=4, secure="sums")
    with pytest.raises(RoundFailed, match=r"'DWI' is at 2 .*\(site-1, site-2\)"):
        found()
    assert not [name for _, name, _ in found.wire.asked if name == "train"]


def test_a_column_of_too_few_sites_of_a_round_stays(tmp_path: Path) -> None:
    """Lose one of three owners in the second round: the sum would show two sites' columns to each other."""
    from .summing import lost

    twist = lost("site-3", "train", 1, first=1)
    found = run(tmp_path, {"site-4": (0, 1)}, sites=4, secure="sums", twist=twist)()
    one = run(tmp_path / "one", {"site-4": (0, 1)}, sites=4, secure="sums", num_rounds=1)()
    assert torch.equal(found.model[WEIGHT][:, 2], one.model[WEIGHT][:, 2])
    assert not torch.equal(found.model[WEIGHT][:, 1], one.model[WEIGHT][:, 1])
    (told,) = [w["text"] for w in found.results["rounds"][1]["warnings"] if "slice" in w["text"]]
    assert told.startswith("1 slice(s) of tensors")


# ------------------------------------------------------------------------------------------------ dropped channels


def kept(share: float, *step: int, channels: tuple[int, ...] | None = (0, 2, 3), seed: int = 5) -> torch.Tensor:
    data: Any = SimpleNamespace(channels=channels)
    none: Any = None
    told = {"channel_drop": share} if share else {}
    run = SiteRun("a", none, data, torch.device("cpu"), 0, 1, seed, told, none, none)
    return run.drop_channels(torch.ones(4000, 4, 1, 2), *step)[:, :, 0, 1]


def test_channels_are_dropped_with_the_probability_and_one_stays() -> None:
    found = kept(0.4, 0, 1)
    assert (found[:, 1] == 1).all()  # a channel that the site lacks is 0 already
    assert (found[:, [0, 2, 3]].sum(1) >= 1).all()
    # All three would be dropped in .064 of the samples; one of the three, each as often, then stays.
    np.testing.assert_allclose(found[:, [0, 2, 3]].mean(0), 0.6 + 0.064 / 3, atol=0.025)
    assert kept(0.9, 0, channels=(1,)).all()
    assert kept(0.0, 0).all()
    assert kept(0.4, 0, channels=None).all()


def test_drops_belong_to_seed_epoch_and_step() -> None:
    first = kept(0.4, 0, 1)
    assert torch.equal(first, kept(0.4, 0, 1))
    assert not any(torch.equal(first, other) for other in (kept(0.4, 0, 2), kept(0.4, 1, 1), kept(0.4, 0, 1, seed=6)))


def test_training_is_on_fewer_channels_and_measuring_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the inputs of the network: in training some are 0, in evaluation none; equal bits on the next run."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    forward = torch.nn.Sequential.forward

    def watched(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        shares[self.training].append(float((inputs == 0).double().mean()))
        return forward(self, inputs)

    monkeypatch.setattr(torch.nn.Sequential, "forward", watched)
    found = run(tmp_path / "a", {"site-1": (0, 1, 2)}, channel_drop=0.5)()
    assert np.mean(shares[True]) == pytest.approx(0.5 - 0.125 / 3, abs=0.1)
    assert not any(shares[False])
    again = run(tmp_path / "b", {"site-1": (0, 1, 2)}, channel_drop=0.5)()
    assert all(torch.equal(tensor, again.model[name]) for name, tensor in found.model.items())


def test_sites_are_told_a_quarter_where_one_lacks_a_channel(tmp_path: Path) -> None:
    for given, has, told in ((None, LACKS_DWI, 0.25), (None, {"site-1": (0, 1, 2)}, None), (0.5, LACKS_DWI, 0.5)):
        found = run(tmp_path / f"{given} {told}", has, channel_drop=given, num_rounds=1)()
        directives = [task.meta["directives"] for _, name, task in found.wire.asked if name == "train"]
        assert [of.get("channel_drop") for of in directives] == [told] * 3
        others = [task.meta.get("directives", {}) for _, name, task in found.wire.asked if name != "train"]
        assert not any("channel_drop" in of for of in others)


# ------------------------------------------------------------------------------------------------ files


def volumes(folder: Path, names: list[str], **said: Any) -> dict[str, Any]:
    """Write four volumes whose lesion is bright in the second channel, and return the site's block."""
    rng = np.random.default_rng(ord(folder.name))
    lists: dict[str, Any] = {"channels": names}
    folder.mkdir(parents=True)
    for number_of, split in enumerate(("training", "training", "validation", "test")):
        label = np.zeros((32, 32, 32), np.uint8)
        label[8:20, 8:20, 8:20] = 1
        image = rng.random((32, 32, 32, len(names))).astype(np.float32)
        image[..., -1] += label
        entry = {"image": f"{number_of}.nii.gz", "label": f"{number_of}_label.nii.gz"}
        for key, array in (("image", image), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / entry[key])
        lists.setdefault(split, []).append(entry)
    (folder / "datalist.json").write_text(json.dumps(lists), encoding="utf-8")
    return {"data_root": str(folder), **said}


def test_a_run_waits_until_the_site_says_what_it_lacks(tmp_path: Path) -> None:
    """Follow the refusal's remedy, and read what the run then says of channels."""
    local = {name: volumes(tmp_path / name, ["T2w", "ADC"]) for name in ("A", "B")}
    local["C"] = volumes(tmp_path / "C", ["T2w"])
    settings = {"channels": ["T2w", "ADC"], "features": [4, 4, 8, 8, 8, 4], "patches": 1}
    form: dict[str, Any] = {"task": "volume_segmentation", "sites": [*local], "num_rounds": 1, "settings": settings}
    with pytest.raises(RoundFailed, match=r"""site 'C': .*"channels": \["T2w"\]"""):
        run_local(make_plan("fed_avg", **form), tmp_path / "refused", {"sites": local})
    local["C"]["channels"] = ["T2w"]
    results = run_local(make_plan("fed_avg", **form), tmp_path / "run", {"sites": local})
    found = run_document(results)
    assert found["info"]["channels"] == {"T2w": ["A", "B", "C"], "ADC": ["A", "B"]}
    dice = {site: of["dice"] for site, of in found["test"].items()}
    told = " ".join(run_notes(read_results(results)))
    assert f"T2w, ADC: {(dice['A'] + dice['B']) / 2:.2f}"[:-1] in told
    assert "(A, B); T2w: " in told


def test_who_is_behind_with_fewer_channels_is_said() -> None:
    info = Info(primary_metric="dice", sites=["A", "B", "C"], channels={"T2w": ["A", "B", "C"], "ADC": ["A", "B"]})
    cells = [Cell("dice", site, value=value) for site, value in (("A", 0.8), ("B", 0.6), ("C", 0.25))]
    found = RunResults(info=info, cells=cells)
    (means,) = channel_notes(found)
    assert means.endswith("Mean Dice by channels: T2w, ADC: 0.700 (A, B); T2w: 0.250 (C).")
    found.inequality.behind = ["A", "C"]
    assert channel_notes(found)[1:] == ["Behind with fewer channels than others have: C."]
    found.info.channels = {}
    assert channel_notes(found) == []
