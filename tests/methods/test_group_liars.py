"""Test sites that lie about groups of people: real training with an exported job's bounds, one or two of six."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fairflare.base.settings import build, field_names, values_of
from fairflare.exchange.messages import TASK_TRAIN, TASK_VALIDATE, Message
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.plan.bounds import FOR_HOSPITALS, Bounds
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.transports.local import LocalTransport
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.base.training import SiteError
from fairflare.methods.fair_fed import FairFed
from fairflare.methods.flex_fair import FlexFair, VariancePenalty
from fairflare.methods.group_dro import GroupDRO, GroupWeighted
from fairflare.methods.parts.group_sums import LEAST, MOST
from fairflare.tasks.base import Metric, SiteData, Task
from tests.tiny import run_document

SITES = [f"site-{k}" for k in range(1, 7)]
ONE, TWO = ("site-6",), ("site-5", "site-6")
CLASSES, WIDTH, ROUNDS = 3, 8, 6
TRAINING = {"optimizer": "sgd", "learning_rate": 0.3, "momentum": 0.0, "batch_size": 200, "local_epochs": 3}


class People(SiteData):
    """Hold points around three centres; the second sex lies elsewhere and is rarer."""

    synthetic, num_classes = True, CLASSES
    attributes = {"sex": ("female", "male", "unknown")}  # noqa: RUF012

    def __init__(self, site: str) -> None:
        centres = np.random.default_rng(0).normal(size=(CLASSES, WIDTH)) * 1.4
        own = np.random.default_rng([1, SITES.index(site)])
        self._splits = {}
        for split, count in (("training", 60 + 20 * SITES.index(site)), ("validation", 40), ("test", 100)):
            labels, sex = own.integers(0, CLASSES, count), own.choice(2, count, p=[0.7, 0.3])
            inputs = centres[labels] + 0.5 * sex[:, None] + own.normal(size=(count, WIDTH))
            self._splits[split] = torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels), sex.tolist()

    def num_samples(self, split: str) -> int:
        return len(self._splits[split][1])

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self._splits[split][1], minlength=CLASSES)

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return list(self._splits[split][2])

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int]:
        generator = torch.Generator().manual_seed(shuffle_seed or 0)
        count = self.num_samples(split)
        return list(range(count)) if shuffle_seed is None else torch.randperm(count, generator=generator).tolist()

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False) -> Any:
        inputs, labels, _ = self._splits[split]
        parts = torch.tensor(self.order(split, shuffle_seed)).split(batch_size)
        return [(inputs[part], labels[part]) for part in parts]


class PeopleTask(Task):
    """Define a task that finds the centre a point belongs to."""

    primary_metric, has_classes = "accuracy", True

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="accuracy", doc="share of the points", higher_is_better=True),)

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets)

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def evaluate(self, model: Any, batches: Any, device: Any) -> dict[str, float]:
        with torch.no_grad():
            told = [((model(x).argmax(1) == y).sum(), len(y), self.loss(model(x), y)) for x, y in batches]
        right, seen = sum(int(r) for r, _, _ in told), sum(n for _, n, _ in told)
        return {"accuracy": right / seen, "loss": sum(float(of) for *_, of in told) / len(told)}

    def outcome_names(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def outcomes(self, model: Any, data: Any, split: str, device: Any) -> Any:
        with torch.no_grad():
            told = [(y, model(x).double().softmax(1)) for x, y in data.batches(split, batch_size=500)]
        return np.concatenate([y for y, _ in told]), np.concatenate([p for _, p in told])

    def open_site(self, site: str, settings: Any) -> SiteData:
        return People(site)


Lie = Callable[[str, Message, Message], None]


class Net(LocalTransport):
    """Run sites in this process, some of which change their reports."""

    liars: Sequence[str] = ()
    lie: Lie | None = None

    def _answer(self, site: str, name: str, task: Message) -> Message:
        reply = super()._answer(site, name, task)
        if site in self.liars and self.lie is not None:
            self.lie(name, task, reply)
        return reply


def run(
    folder: Path, name: str, settings: dict[str, Any], liars: Sequence[str] = (), lie: Lie | None = None,
    bounds: dict[str, Any] = FOR_HOSPITALS, **of_run: Any,
) -> dict[str, Any]:  # fmt: skip
    method, task = all_methods()[name], PeopleTask()
    own = {**method.site, **TRAINING, "keep_optimizer_state": False}
    training = build(method.training, own | {k: v for k, v in settings.items() if k in field_names(method.training)})
    server = {k: v for k, v in settings.items() if k in field_names(method.rule)}
    rule = build(method.rule, {**method.server, **server})
    net = Net(SITES, task, training, {}, folder / "sites")
    net.liars, net.lie = liars, lie
    place = Place(folder / "run", folder / "kept", "x", site_half=values_of(training))
    Rounds(task, rule, RunSettings(**{"num_rounds": ROUNDS, **bounds, **of_run}), net, place).run()
    return run_document(folder / "run" / "fairflare")


def accuracy(results: dict[str, Any]) -> float:
    """Return the mean accuracy over the sites that are always honest."""
    return float(np.mean([results["test"][site]["accuracy"] for site in SITES if site not in TWO]))


def accused(results: dict[str, Any]) -> set[str]:
    """Return the sites that are left out anywhere."""
    rounds = [left["site"] for record in results["rounds"] for left in record["left_out"]]
    return {*rounds, *(left["site"] for left in results["left_out"])}


def says(losses: Any = None, images: Any = None, only: Sequence[int] = range(ROUNDS)) -> Lie:
    """Return a liar's version of its losses and numbers of images by group."""

    def lie(name: str, task: Message, reply: Message) -> None:
        if name == TASK_TRAIN and task.current_round in only:
            report = reply.meta["report"]
            for field, change in (("group_losses", losses), ("group_images", images)):
                if change is not None and field in report:
                    report[field] = change(report[field])

    return lie


#: A liar that is refused in each of these, and one that is bounded.
REFUSED: dict[str, Lie] = {
    "images 1e9 and a loss of 1e6": says(lambda of: [1e6] * len(of), lambda of: [*of[:-1], 1e9]),
    "images 1e9 and no loss": says(lambda of: [0.0] * len(of), lambda of: [*of[:-1], 1e9]),
    "a group of its own": says(lambda of: [*of, 1e6], lambda of: [*of, 1.0]),
    "a group of its own, of no image": says(lambda of: [*of, 1e6], lambda of: [*of, 0.0]),
    "a group fewer": says(lambda of: of[:-1], lambda of: of[:-1]),
    "100,000 groups": says(lambda of: [1.0] * 100_000, lambda of: [0.0] * 100_000),
}
BOUNDED: dict[str, Lie] = {
    "a loss of 1e6": says(lambda of: [1e6] * len(of)),
    "a loss of 1e6 in the first round": says(lambda of: [1e6] * len(of), only=(0,)),
    "a loss of 1e6 of the last group": says(lambda of: [*of[:-1], 1e6]),
    "no loss": says(lambda of: [0.0] * len(of)),
}
DRO = ("group_dro", {"dro_attribute": "sex"})
METHODS: list[tuple[str, dict[str, Any]]] = [
    DRO, ("group_dro", {}),
    ("flex_fair", {}),
    ("flex_fair", {"flexfair_over": "both", "flexfair_attribute": "sex"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], float]:
    """Return the accuracy of the honest sites where no site lies, by the number of the method."""

    @cache
    def of(number: int) -> float:
        results = run(tmp_path_factory.mktemp("honest"), *METHODS[number])
        assert accused(results) == set()
        return accuracy(results)

    return of


@pytest.mark.many
@pytest.mark.parametrize("number", range(len(METHODS)))
@pytest.mark.parametrize("liars", [ONE, TWO], ids=["one", "two"])
def test_liars_about_groups_cost_the_honest_nothing(
    number: int, liars: Sequence[str], honest: Any, tmp_path: Path
) -> None:
    """Check what is bounded for one liar and for two, and what is refused, site by site, for two."""
    for index, (words, lie) in enumerate({**BOUNDED, **(REFUSED if liars == TWO else {})}.items()):
        results = run(tmp_path / str(index), *METHODS[number], liars, lie)
        assert results["status"] == "completed", words
        assert accuracy(results) >= honest(number) - 0.02, words
        assert accused(results) <= {*liars}, words
        if words in BOUNDED:
            assert accused(results) == set(), words
            kinds = {(w["site"], w["kind"]) for record in results["rounds"] for w in record["warnings"]}
            assert {(site, "max_update_norm, group_losses") for site in liars} <= kinds, words


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.parametrize("bounds", [FOR_HOSPITALS, {}], ids=["exported", "without bounds"])
def test_what_a_site_cannot_have_is_refused_by_name(bounds: dict[str, Any], words: str, tmp_path: Path) -> None:
    results = run(tmp_path, *DRO, ONE, REFUSED[words], bounds, num_rounds=2)
    for record in results["rounds"]:
        (left,) = record["left_out"]
        assert left["site"] == "site-6"
        assert left["reason"].startswith("site 'site-6'")
        assert max(record["details"]["q"].values()) < 0.9
    assert results["rounds"][-1]["accepted"] == SITES[:-1]


@pytest.mark.parametrize("liars", [ONE, TWO], ids=["one", "two"])
def test_counts_of_groups_for_fair_fed(liars: Sequence[str], tmp_path: Path) -> None:
    """Check counts against validation images; an accepted count has no larger part in the gap than in a model."""

    def lie(name: str, task: Message, reply: Message) -> None:
        if name == TASK_TRAIN:
            counts = reply.meta["report"]["group_counts"]
            reply.meta["report"]["group_counts"] = [*([1e12] * 4), *counts[4:]]

    settings = {"fairfed_attribute": "sex"}
    results = run(tmp_path / "a", "fair_fed", settings, liars, lie)
    assert accused(results) == {*liars}
    reason = results["rounds"][0]["left_out"][0]["reason"]
    assert "its report is of 4000000000" in reason
    assert "validation images, it has 40" in reason
    assert accuracy(results) >= accuracy(run(tmp_path / "b", "fair_fed", settings)) - 0.02


# ------------------------------------------------------------------------------------------------ the final test


def in_test(change: Callable[[dict[str, Any]], None]) -> Lie:
    def lie(name: str, task: Message, reply: Message) -> None:
        if name == TASK_VALIDATE and "group_names" in reply.meta.get("stats", {}):
            change(reply.meta["stats"])

    return lie


def _first(name: str, value: float) -> Callable[[dict[str, Any]], None]:
    return lambda stats: stats[name].__setitem__(0, value)


def _only(*names: str) -> Callable[[dict[str, Any]], None]:
    """Return vectors of some groups alone, with the length that this needs."""

    def change(stats: dict[str, Any]) -> None:
        count = len(stats["group_names"])
        for key, of in stats.items():
            if key.startswith("group_") and key != "group_names":
                stats[key] = of[: len(of) * len(names) // count]
        stats["group_names"] = list(names)

    return change


WRONG_IN_TEST: dict[str, Callable[[dict[str, Any]], None]] = {
    "no group": _only(),
    "a group too few": _only("sex=female", "sex=male"),
    "a group of its own": _only("sex=female", "sex=male", "sex=other"),
    "another order": _only("sex=male", "sex=female", "sex=unknown"),
    "images 1e15": _first("group_images", 1e15),
    "more images than it has": _first("group_images", 101.0),
    "images that are in no class": _first("group_confusion", 1e6),
    "a negative bin": _first("group_histogram", -1.0),
    "a bin of 1e9": _first("group_histogram", 1e9),
    "surer than sure": lambda stats: stats.update(group_calibration=[9.0] * len(stats["group_calibration"])),
    **{
        f"no {name}": (lambda key: lambda stats: stats.pop(key))(f"group_{name}")
        for name in ("calibration", "brier", "confusion", "histogram")
    },
    "a Brier sum of 1e9": _first("group_brier", 1e9),
    "groups kept that nobody asked for": lambda stats: stats.update(
        suppressed=[f"groups/sex=g{k}" for k in range(800)]
    ),
}


@pytest.mark.long
def test_wrong_groups_in_the_final_test_cost_their_site_its_figures(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"groups": ["sex"], "group_bins": 10, "num_rounds": 1}
    whole = run(tmp_path / "whole", "fed_avg", {}, **asked)
    assert sorted(whole["groups"]["sites"]) == SITES
    for index, (words, change) in enumerate(WRONG_IN_TEST.items()):
        results = run(tmp_path / str(index), "fed_avg", {}, ONE, in_test(change), **asked)
        assert results["status"] == "completed", words
        assert sorted(results["test"]) == SITES[:-1], words
        assert results["test"] == {site: whole["test"][site] for site in SITES[:-1]}, words
        (left,) = results["left_out"]
        assert (left["site"], left["phase"]) == ("site-6", "validate"), words
        assert left["reason"].startswith("site 'site-6'"), words
        assert len(left["reason"]) < 360, words
        assert sorted(results["groups"]["sites"]) == SITES[:-1], words
        assert {name: results["groups"]["sites"][name] for name in SITES[:-1]} == {
            name: whole["groups"]["sites"][name] for name in SITES[:-1]
        }, words


def test_claims_beyond_what_was_said_at_the_start(tmp_path: Path) -> None:
    def lie(name: str, task: Message, reply: Message) -> None:
        if name in (TASK_TRAIN, TASK_VALIDATE):
            reply.meta["num_samples"] = 10**6

    results = run(tmp_path, "fed_avg", {}, ONE, lie, {})
    for record in results["rounds"]:
        (warned,) = [w for w in record["warnings"] if w["kind"] == "num_samples"]
        assert (warned["site"], warned["value"], warned["used"]) == ("site-6", 10**6, 160)
        assert record["site_weights"]["site-6"] == pytest.approx(160 / 660)
    (left,) = results["left_out"]
    assert left["reason"].startswith(
        "site 'site-6': it speaks of 1000000 test images, and had 100 before the first round"
    )


# ------------------------------------------------------------------------------------------------ rules and halves


def inputs(reports: dict[str, dict[str, Any]], bounds: Bounds | None = None) -> RoundInputs:
    held = Influence(bounds or Bounds())
    sites = sorted(reports)
    return RoundInputs(
        0, 2, sites, dict.fromkeys(sites, 100), reports, {}, {}, {}, moderated=held.moderated,
        remembered=held.remembered, bounded=held.bound_made,
    )  # fmt: skip


def told_by(losses: Sequence[float], images: Sequence[float]) -> dict[str, Any]:
    return {"group_losses": list(losses), "group_images": list(images)}


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(**FOR_HOSPITALS)], ids=["none", "exported"])
def test_no_weight_of_a_group_is_above_10_or_below_a_tenth(bounds: Bounds) -> None:
    """Check any reports for any time; after honest rounds the weights return to normal."""
    rule = GroupDRO(dro_attribute="sex", dro_rate=1.0)
    good = {site: told_by([0.5, 0.7], [60, 40]) for site in "abc"}
    for lie in (told_by([1e6, 0.0], [1, 99]), told_by([0.0, 1e6], [99, 1]), told_by([1e6, 1e6], [100, 0])):
        for _ in range(5):
            found = rule.weigh(inputs({**good, "d": lie}, bounds))
            assert math.fsum(found.details["q"].values()) == pytest.approx(1.0)
            weights = rule.directives(0, 2, ["a"])["group_weights"]
            assert all(LEAST <= weight <= MOST for weight in weights)
    for _ in range(40):
        rule.weigh(inputs({site: told_by([0.2, 1.5], [60, 40]) for site in "abcd"}, bounds))
    first, second = rule.directives(0, 2, ["a"])["group_weights"]
    assert second > first  # the group with the higher loss weighs more, whatever was said of it before
    assert second > 1


def test_a_group_that_hardly_any_site_has_is_held_against_all_losses() -> None:
    rule = GroupDRO(dro_attribute="sex", dro_rate=1.0)
    nan = math.nan
    good = {site: told_by([0.5, nan], [60, nan]) for site in "abc"}
    influence = inputs({**good, "d": told_by([0.5, 1e6], [60, 40])}, Bounds(max_update_norm=3.0))
    losses, _ = rule._pool_groups(influence)
    assert losses == {"0": pytest.approx(0.5), "1": pytest.approx(1.5)}  # three times the median of all


def test_a_site_has_no_more_part_in_a_pool_than_in_a_model() -> None:
    """Check by hand five sites of 100 images and one of 500: half of all, and at most 0.25 of the weight."""
    reports = {site: told_by([1.0], [100]) for site in "abcde"} | {"f": told_by([2.0], [500])}
    plain, _ = GroupDRO(dro_attribute="sex")._pool_groups(inputs(reports))
    held, _ = GroupDRO(dro_attribute="sex")._pool_groups(inputs(reports, Bounds(max_weight=0.25)))
    assert plain["0"] == pytest.approx(1.5)
    assert held["0"] == pytest.approx(0.75 * 1 + 0.25 * 2)
    tables = {site: {"rows": 2.0, **told_by([1.0] * 2, [100] * 2)} for site in "abcde"}
    tables["f"] = {"rows": 2.0, **told_by([2.0] * 2, [500] * 2)}
    _, images = FlexFair(flexfair_over="groups")._tables(inputs(tables, Bounds(max_weight=0.25)))
    assert images["f"][1, 0] / sum(of[1, 0] for of in images.values()) == pytest.approx(0.25)
    counts = [[[10.0, 0, 10, 80]] * 2] * 2
    of_f = [[[400.0, 0, 0, 100]] * 2] * 2
    said = {site: {"accuracy": 0.5, "groups": 2.0, "group_counts": np.ravel(counts).tolist()} for site in "abcde"}
    said["f"] = {"accuracy": 0.5, "groups": 2.0, "group_counts": np.ravel(of_f).tolist()}
    with mock.patch.object(FairFed, "_gap", lambda self, groups: float(groups["0"]["confusion"][0, 0])):
        found = FairFed(fairfed_attribute="sex").weigh(inputs(said, Bounds(max_weight=0.25)))
    share = found.details["group_gap_of_all"]
    assert share == pytest.approx(5 * 10 * 1.5 + 400 * 0.5)  # 0.75 of 1000 images at five, 0.25 at the sixth


def test_a_site_is_told_as_many_weights_as_it_has_groups() -> None:
    data = SimpleNamespace(group_numbers=lambda split, name: [0, 1, 2], attributes=People.attributes)
    run_of: Any = SimpleNamespace(site="a", batch=[0, 1, 2], data=data, device=torch.device("cpu"), task=PeopleTask())
    run_of.task_on = lambda split: run_of.task
    outputs, targets = torch.randn(3, 3), torch.tensor([0, 1, 2])
    for half, told in (
        (GroupWeighted(dro_attribute="sex"), {"group_weights": [0.0, 0.0, 601.0]}),
        (VariancePenalty(flexfair_over="groups", flexfair_attribute="sex"), {"loss_slopes": [0.0, 0.0, 1.0, 7.0]}),
    ):
        run_of.directives = told
        with pytest.raises(SiteError, match=r"the server sent \d \w+ of groups"):
            half.loss(run_of, lambda inputs: outputs, torch.zeros(3), targets)
    run_of.directives = {"group_weights": [1e9, 1.0]}
    half = GroupWeighted(dro_attribute="sex")
    plain = PeopleTask().sample_losses(outputs, targets)
    wanted = (torch.tensor([MOST, 1.0, 1.0]) * plain).mean()
    assert torch.allclose(half.loss(run_of, lambda inputs: outputs, torch.zeros(3), targets), wanted)
