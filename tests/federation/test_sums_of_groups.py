"""Test secure sums of groups of people: the figures of the plain run, what too few sites have, and servers that lie."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.base.cases.floor import find_hidden_rows
from fairflare.core.statistics.group_sums import find_hidden_groups, find_hidden_parts
from fairflare.exchange.messages import Message
from fairflare.federation.site.groups import KEPT, NAMES, SUMS
from fairflare.reporting.groups import POOLED, group_notes
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import read_results
from fairflare.tasks.base import SiteData

from .network import number
from .summing import Numbers, Run, Wire, lost

SEXES = ("female", "male", "unknown")
ALL = {f"site-{k}": (0, 1, 2) for k in range(1, 5)}
GROUPS: dict[str, Any] = {"groups": ["sex"], "group_bins": 4, "calibration_bins": 3, "num_rounds": 1, "sites": 4}


@pytest.fixture(autouse=True)
def _no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairflare.federation.record.journal.tell_listeners", lambda *args: [])


class Patients(SiteData):
    """Hold points of three classes, of patients of the given sexes."""

    num_classes, attributes = 3, {"sex": SEXES}

    def __init__(self, site: str, sexes: tuple[int, ...]) -> None:
        draws = np.random.default_rng(number(site))
        self.inputs = torch.tensor(draws.normal(size=(20 + 10 * number(site), 6)), dtype=torch.float32)
        self.targets = torch.tensor(draws.choice(3, len(self.inputs), p=(0.5, 0.4, 0.1)))
        self.sex = [sexes[place % len(sexes)] for place in range(len(self.inputs))]

    def num_samples(self, split: str) -> int:
        return len(self.inputs)

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self.targets, minlength=3)

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return self.sex

    def batches(self, split: str, *, batch_size: int, **_: Any) -> Any:
        return list(zip(self.inputs.split(batch_size), self.targets.split(batch_size), strict=True))


class People(Numbers):
    """Define a classifier of points, at sites with the given sexes; of a segmentation it tells Dice."""

    has_classes = True

    def __init__(self, sexes: Mapping[str, tuple[int, ...]] = ALL, *, dice: bool = False) -> None:
        self.sexes, self.dice, self.has_classes = sexes, dice, not dice

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets)

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Patients(site, self.sexes[site])

    def outcome_names(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def outcomes(self, model: Any, data: Any, split: str, device: Any) -> Any:
        with torch.no_grad():
            told = model.eval()(data.inputs).double().softmax(1).numpy()
        return (None, np.where(told < 0.2, np.nan, told)) if self.dice else (data.targets.numpy(), told)


def both(folder: Path, task: Any = None, **options: Any) -> tuple[Run, Run]:
    """Do a run of secure sums and the plain run of the same weights."""
    given = {**GROUPS, "task": task or People(), **options}
    return Run(folder / "a", **given)(), Run(folder / "b", secure="", max_weight=0.5, **given)()


def figures(run: Run) -> dict[str, Any]:
    """Return the pooled figures by group, without those that need each site's sums or their parts."""
    found = copy.deepcopy(pooled_of(run)["sex"])
    for name in ("within", "without"):
        found.pop(name, None)
    for part in ("gaps", "gap_intervals"):
        found[part] = {name: of for name, of in found[part].items() if not name.endswith("_within")}
    return found


def alike(one: Any, other: Any) -> bool:
    """Return whether two documents have the same keys and words, and numbers that differ by 1e-6 at most."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(of, other[key]) for key, of in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == pytest.approx(other, abs=1e-6) if isinstance(one, float) else bool(one == other)


def pooled_of(run: Run) -> Any:
    """Return the figures by group over all sites; empty where every site withholds them."""
    return (run.results["groups"] or {"pooled": {}})["pooled"]


def told(run: Run, name: str) -> dict[str, Message]:
    return {site: message for site, of, message in run.wire.sent if of == name}


def asked(run: Run) -> list[Any]:
    """Return the questions for sums of groups."""
    every = [q for _, name, task in run.wire.asked if name == "mask" for q in task.meta["sums"]["questions"]]
    return [q for q in every if q["label"] == "groups"]


@pytest.mark.parametrize("dice", [False, True])
@pytest.mark.parametrize("least", [1, 4])
def test_figures_by_group_are_those_of_the_plain_run(least: int, dice: bool, tmp_path: Path) -> None:
    """Compare all figures; a class of few cases stays at some sites with 4, and no site sends a sum in the clear."""
    sums, plain = both(tmp_path, People(dice=dice), min_cases=least)
    found, wanted = figures(sums), figures(plain)
    for group in ("female", "male", "unknown"):  # counts are exact
        for name in ("images", "cases"):
            assert found["groups"][group][name] == wanted["groups"][group][name] > 0
    assert alike(found, wanted)
    assert sums.results["groups"]["sites"] == {}
    for site, message in told(sums, "validate").items():
        assert not message.meta["stats"].keys() & {*SUMS.values()}, site
        assert set(message.meta["stats"][KEPT]) == {0, 2}
    vectors = [message.params["groups"] for message in told(sums, "mask").values()]
    counts = np.bincount(torch.cat(vectors).numpy().view(np.uint8), minlength=256)
    assert ((counts - counts.sum() / 256) ** 2 / (counts.sum() / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5


def test_a_group_that_fewer_than_three_sites_have_is_not_opened(tmp_path: Path) -> None:
    """Let two sites have men, one of whom keeps its classes: of men nothing is known, of women all but some classes."""
    sexes = {"site-1": (0, 1), "site-2": (0, 1), "site-3": (0,), "site-4": (0,)}
    local = {"sites": {"site-1": {"metrics_by_class": False}, "site-2": {"metrics_by_class": False}}}
    sums, plain = both(tmp_path, People(sexes), local=local)
    found, wanted = figures(sums), figures(plain)
    assert set(found["groups"]["male"].values()) == {None}
    assert {name: found["groups"]["female"][name] for name in ("images", "cases")} == {
        name: wanted["groups"]["female"][name] for name in ("images", "cases")
    }
    assert found["groups"]["female"]["ece"] == pytest.approx(wanted["groups"]["female"]["ece"], abs=1e-6)
    assert found["groups"]["female"]["auc"] is None  # two sites alone would tell their classes
    assert found["groups"]["unknown"]["images"] == 0
    for question in asked(sums):
        columns = np.array([question["table"][site] for site in sorted(question["table"])])
        assert set((columns > 0).sum(0)) == {0, 4}
    assert sums.results["groups"]["kept"] == {POOLED: ["sex=male"]}
    notes = " ".join(group_notes(read_results(sums.folder / "fairflare")))
    assert "Groups of people that stay at a site, some only to hide another one" in notes
    assert "all sites: sex=male" in notes


def test_a_site_that_is_lost_is_in_no_figure(tmp_path: Path) -> None:
    """Lose a site before its sums arrive, and one for a moment while they are opened."""
    few = Run(tmp_path / "a", twist=lost("site-4", "mask", 9, first=1), task=People(), **GROUPS)()
    only = Run(tmp_path / "b", task=People(), **{**GROUPS, "sites": 3})()
    for name in ("images", "cases"):
        assert [of[name] for of in figures(few)["groups"].values()] == [
            of[name] for of in figures(only)["groups"].values()
        ]
    assert asked(few)[-1]["table"].keys() == {"site-1", "site-2", "site-3"}
    left = {"site": "site-4", "phase": "groups", "reason": "its process died"}
    assert few.results["left_out"] == [left]  # of the sums alone: it has its metrics
    assert few.results["test"].keys() == ALL.keys()
    assert "site-4 after the last round, groups: its process died" in format_notes(few)
    assert {"mask", "release"} <= {phase["name"] for phase in few.results["phases"]}
    whole = Run(tmp_path / "c", task=People(), **GROUPS)()
    again = Run(tmp_path / "d", twist=lost("site-2", "release", 1, first=1), task=People(), **GROUPS)()
    assert figures(again) == figures(whole)


def format_notes(run: Run) -> str:
    return "\n".join(run_notes(read_results(run.folder / "fairflare")))


def test_a_site_without_a_key_at_the_end_is_in_no_figure(tmp_path: Path) -> None:
    """Let a site lose its place in the agreement in the last round, and be silent when asked for a key again."""

    def away(site: str, name: str, count: int) -> Any:
        gone = {("mask", 0), *(("keys", number) for number in range(2, 9))}
        return "its process died" if site == "site-4" and (name, count) in gone else None

    run = Run(tmp_path, twist=away, task=People(), **GROUPS)()
    assert [(left["site"], left["phase"]) for left in run.results["left_out"]] == [("site-4", "groups")]
    assert asked(run)[0]["table"].keys() == {"site-1", "site-2", "site-3"}
    assert figures(run)["groups"]["male"]["images"] > 0


@pytest.mark.parametrize("lie", ["another key", "silence"])
def test_a_sum_of_groups_that_cannot_be_opened_costs_the_groups_alone(
    lie: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Spoil the sum by one site's key, or never send the key: model, tests and the reason are there."""
    monkeypatch.setattr("fairflare.federation.server.sums.PAUSE", 0.01)
    run, answer = Run(tmp_path, task=People(), experiment="e", **{**GROUPS, "anchor_timeout": 0.2}), Wire._answer

    def other(wire: Wire, site: str, name: str, task: Message) -> Any:
        found = answer(wire, site, name, task)
        if (site, name) == ("site-2", "release") and task.meta["sums"]["questions"][0]["label"] == "groups":
            found.meta["report"] = {"groups": bytes(32)}
            return found if lie == "another key" else "its process died"
        return found

    run.wire._answer = other.__get__(run.wire)  # type: ignore[method-assign]
    results = run().results
    assert results["status"] == "completed"
    assert results["test"].keys() == ALL.keys()
    assert (results["groups"] or {"pooled": {}})["pooled"] == {}
    reason = results["left_out"][-1]
    assert (reason["site"], reason["phase"]) == (POOLED, "groups")
    said = "nobody can say which" if lie == "another key" else "site-2: its process died. Without all of"
    assert said in reason["reason"]
    assert f"{POOLED} after the last round, groups: round 1" in format_notes(run)
    again = Run(tmp_path, task=People(), experiment="e", **GROUPS)()  # the same run again opens the sum
    assert figures(again) == figures(Run(tmp_path / "whole", task=People(), experiment="e", **GROUPS)())


def test_too_few_sites_have_no_groups_and_the_run_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, twist=lost("site-4", "mask", 9, first=1), task=People(), **{**GROUPS, "min_cases": 45})()
    assert run.results["status"] == "completed"  # of four sites two have enough cases
    assert pooled_of(run) == {}
    assert asked(run) == []


def test_a_run_in_which_two_sites_are_left_says_that_no_group_is_known(tmp_path: Path) -> None:
    def away(site: str, name: str, count: int) -> Any:
        return "its process died" if site in ("site-3", "site-4") and (name, count) == ("mask", 1) else None

    run = Run(tmp_path, twist=away, task=People(), **GROUPS)()
    assert pooled_of(run) == {}
    assert [(left["site"], left["phase"]) for left in run.results["left_out"]] == [
        ("site-3", "groups"), ("site-4", "groups")
    ]  # fmt: skip
    notes = " ".join(group_notes(read_results(run.folder / "fairflare")))
    assert "all sites: sex=female, sex=male, sex=unknown (secure sums of fewer than three sites)." in notes


def test_a_server_that_dies_after_the_sums_of_groups_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    """Let the outcomes move between two jobs, as on a GPU: the answers that were kept fit the open sum."""
    first = Run(tmp_path, experiment="e", task=People(), **GROUPS)
    monkeypatch.setattr(first.rounds.journal, "record_test", _dies)
    with pytest.raises(KeyboardInterrupt):
        first()
    whole = Run(tmp_path / "whole", experiment="e", task=People(), **GROUPS)()
    told_before = People.outcomes
    monkeypatch.setattr(People, "outcomes", lambda *args: (told_before(*args)[0], told_before(*args)[1][:, [1, 2, 0]]))
    assert figures(Run(tmp_path, experiment="e", task=People(), **GROUPS)()) == figures(whole)


def _dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def changed(change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Any:
    """Return what a server does that changes its questions for sums of groups; ``change`` has site and question."""
    answer = Wire._answer

    def other(wire: Wire, site: str, name: str, task: Message) -> Any:
        sums = task.meta.get("sums", {})
        if name in ("mask", "release") and sums["questions"][0]["label"] == "groups":
            lie = [change(site, question) for question in sums["questions"]]
            task = replace(
                task, meta={**task.meta, "sums": {**sums, "questions": lie, "present": sorted(lie[0]["table"])}}
            )
        return answer(wire, site, name, task)

    return other


def reasons(run: Run) -> set[str]:
    return {m.meta["reason"].partition(": sum 'groups' of ")[2] for _, of, m in run.wire.sent if m.meta["reason"]}


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ((1.0, 0.0, 0.0, 0.0), "a group has the numbers of fewer than 3 sites; leave this group out"),
        ((0.5, 0.5, 0.0, 0.0), "a group has the numbers of fewer than 3 sites; leave this group out"),
        ((0.4, 0.3, 0.3, 0.0), "a group that it has no numbers of has a weight, so that they would be of fewer sites"),
    ],
)
def test_a_server_that_asks_for_the_group_of_one_site_is_refused(weights: Any, why: str, tmp_path: Path) -> None:
    """Ask for men, whom one site alone has, in a table that is otherwise the right one."""
    task = People({"site-1": (0, 1), **{f"site-{k}": (0,) for k in (2, 3, 4)}})
    run = Run(tmp_path, task=task, **GROUPS)

    def men(site: str, question: dict[str, Any]) -> dict[str, Any]:
        half = len(question["table"]["site-1"]) // 3
        rows = zip(question["table"].items(), weights, strict=False)
        return {**question, "table": {name: [*row[:half], w, *row[half + 1 :]] for (name, row), w in rows}}

    run.wire._answer = changed(men).__get__(run.wire)  # type: ignore[method-assign]
    assert pooled_of(run()) == {}
    assert any(why in reason for reason in reasons(run))


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ((0.4, 0.2, 0.2, 0.2), "sites of a group have unequal weights; give each the same"),
        ((0.25 + 1e-10, 0.25 - 1e-10, 0.25, 0.25), "sites of a group have unequal weights; give each the same"),
        ((1 / 3, 1 / 3, 1 / 3, 0.0), "it is left out of some sums of its groups, which beside the others would show"),
    ],
)
def test_no_sum_of_a_group_tells_its_sites_apart(weights: Any, why: str, tmp_path: Path) -> None:
    """Give the sites' numbers of men other weights than their cases, which are as many: each count would follow."""
    run = Run(tmp_path, task=People(), **GROUPS)

    def men(site: str, question: dict[str, Any]) -> dict[str, Any]:
        half = len(question["table"]["site-1"]) // 3
        rows = zip(question["table"].items(), weights, strict=False)
        return {**question, "table": {name: [*row[:half], w, *row[half + 1 :]] for (name, row), w in rows}}

    run.wire._answer = changed(men).__get__(run.wire)  # type: ignore[method-assign]
    opened = pooled_of(run())
    assert any(why in reason for reason in reasons(run))
    assert (opened == {}) == (weights[-1] > 0)  # the fourth site, left out, refuses alone; the others open theirs


def test_a_site_whose_file_allows_sums_only_sends_no_sums_in_the_clear(tmp_path: Path) -> None:
    local = {"sites": {"site-4": {"secure": "sums"}}}
    run = Run(tmp_path, **GROUPS, task=People(), secure="", min_sites=3, require_all_sites=False, local=local)()
    answers = told(run, "validate")
    for task in ("check", "validate"):
        assert "its own file has secure=sums, the run has not" in told(run, task)["site-4"].meta["reason"]
    assert not answers["site-4"].meta["stats"].keys() & answers["site-1"].meta["stats"].keys() - {"seconds"}


def test_one_weight_for_all_groups_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, task=People(), **GROUPS)
    even = changed(lambda site, question: {**question, "table": {name: [0.25] for name in ALL}})
    run.wire._answer = even.__get__(run.wire)  # type: ignore[method-assign]
    assert pooled_of(run()) == {}
    assert reasons(run) == {"round 1: the table has 1 layers, its model 48; use one model"}


def test_groups_of_another_model_are_of_the_same_sites(tmp_path: Path) -> None:
    """Ask again in a longer run of the experiment, without a site: how many men it has would be the difference."""
    options = {"experiment": "e", "task": People(), **GROUPS}
    Run(tmp_path, **options)()
    again = Run(tmp_path, twist=lost("site-4", "validate", 9), **{**options, "num_rounds": 2})()
    assert pooled_of(again) == {}
    assert {reason.partition(": ")[2] for reason in reasons(again)} == {
        "groups were summed with other members or weights in round 1; ask with these"
    }
    same = Run(tmp_path / "b", **options)()
    longer = Run(tmp_path / "b", **{**options, "num_rounds": 2})()
    assert figures(longer)["groups"]["male"]["images"] == figures(same)["groups"]["male"]["images"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({KEPT: [2.0] * 47}, "field 'group_kept' must be 48 times 0, 1 or 2, got 47 numbers"),
        ({KEPT: [0.5] * 48}, "field 'group_kept' must be 0, 1 or 2"),
        ({KEPT: [3.0] * 48}, r"field 'group_kept\[0\]' must lie in \[0, 2\], got 3.0"),
        ({NAMES: ["sex=a", "sex=b", "sex=c"]}, "must name the 3 groups that the datalists declare"),
        ({NAMES: ["../../x"] * 3}, "must name groups of sex, got '../../x'"),
    ],
)
def test_an_answer_about_groups_that_cannot_be_is_refused(change: Any, why: str, tmp_path: Path) -> None:
    run = Run(tmp_path, task=People(), **GROUPS)
    answer = Wire._answer

    def other(wire: Wire, site: str, name: str, task: Message) -> Any:
        found = answer(wire, site, name, task)
        if (site, name) == ("site-4", "validate"):
            found.meta["stats"].update(change)
        return found

    run.wire._answer = other.__get__(run.wire)  # type: ignore[method-assign]
    (left,) = run().results["left_out"]
    assert left["site"] == "site-4"
    assert re.search(why, left["reason"])
    assert asked(run)[0]["table"].keys() == {"site-1", "site-2", "site-3"}


# ------------------------------------------------------------------------------------------------ what follows


class OfTwo(Patients):
    """Hold 60 images of two classes, each of a patient with a sex and an age."""

    num_classes, attributes = 2, {"sex": ("female", "male"), "age": ("young", "old")}

    def __init__(self, site: str) -> None:
        draws = np.random.default_rng(number(site))
        self.inputs = torch.tensor(draws.normal(size=(60, 6)), dtype=torch.float32)
        self.targets = torch.tensor(draws.choice(2, 60))

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self.targets, minlength=2)

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return [place // (2 if attribute == "age" else 1) % 2 for place in range(60)]


class OfTwoAttributes(People):
    def open_site(self, site: str, settings: Any) -> SiteData:
        return OfTwo(site)

    def outcome_names(self) -> tuple[str, ...]:
        return ("a", "b")

    def outcomes(self, model: Any, data: Any, split: str, device: Any) -> Any:
        with torch.no_grad():
            told = model.eval()(data.inputs).double()[:, :2]
        return data.targets.numpy(), (told / told.std()).softmax(1).numpy()


def linked(opened: Mapping[str, Mapping[str, Any]]) -> int:
    """Count the images that histograms of two attributes tell apart: alone in a bin of a class in a group of both."""
    places: Counter[tuple[int, ...]] = Counter()
    for sums in opened.values():
        places.update(map(tuple, np.argwhere(sums["histogram"][:, 0] == 1).tolist()))
    return sum(count == 2 for count in places.values())


@pytest.mark.parametrize(("least", "most"), [(1, 180), (5, 0)])
def test_no_image_is_linked_over_two_attributes_in_opened_sums(least: int, most: int, tmp_path: Path) -> None:
    """Count images of 3 x 60 whose class, sex, age and score the sums tell, in 100 bins, without and with a floor."""
    options: dict[str, Any] = {**GROUPS, "groups": ["sex", "age"], "group_bins": 100, "sites": 3}
    run = Run(tmp_path, task=OfTwoAttributes(), min_cases=least, **options)
    opened, groups = list[Any](), run.rounds.sums.groups  # type: ignore[union-attr]
    run.rounds.sums.groups = lambda *args: opened.append(groups(*args)) or opened[-1]  # type: ignore
    run()
    (found, few), *_ = opened
    assert few == []
    assert sum(of["histogram"].sum() for of in found.values()) == 4 * 180  # each image by sex and age, of 2 classes
    print(f"with min_cases={least} opened sums link {linked(found)} of 180 images over two attributes")  # with -s
    assert (linked(found) == 0) == (most == 0)


def test_no_count_below_the_floor_follows_from_sums() -> None:
    """Solve for each site's counts by group and class: from opened sums of 4 sites, and from totals in the clear.

    Sites withhold other groups and classes, so the sums are of other sites; by their difference a group's size at a
    site follows now and then, but no count of 1 to 4 cases.
    """
    draws, least, sites, groups, classes, images = np.random.default_rng(0), 5, 4, 2, 3, 60
    found: Counter[str] = Counter()
    for _ in range(120):
        shares = [draws.dirichlet(np.full(count, 2.0), sites) for count in (groups, classes)]
        of, labels = (np.array([draws.choice(len(row), images, p=row) for row in share]) for share in shares)
        counts = np.array([[[((o == g) & (la == c)).sum() for c in range(classes)] for g in range(groups)]
                           for o, la in zip(of, labels, strict=True)])  # fmt: skip
        hidden = [find_hidden_groups(range(images), o, groups, least) for o in of]
        parts = [
            find_hidden_parts(range(images), la, o, h, least, classes)
            for la, o, h in zip(labels, of, hidden, strict=True)
        ]
        known = list[np.ndarray]()

        def tells(*chosen: Any, of: list[np.ndarray] = known) -> None:
            of.append(np.zeros(counts.shape))  # noqa: B023
            of[-1][chosen] = 1

        for site in range(sites):
            tells(site)
            rare = find_hidden_rows(dict(enumerate(counts[site].sum(0).tolist())), least)
            for label in {*range(classes)} - rare:
                tells(site, slice(None), label)
        for group in range(groups):
            own = [site for site in range(sites) if group not in hidden[site]]
            for label in [None, *range(classes)]:
                if len(has := [site for site in own if label is None or label not in parts[site]]) >= 3:
                    tells(has, group)
                    tells(has, group, slice(None) if label is None else label)
        rows = np.stack(known).reshape(len(known), -1)
        _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
        basis = directions[sizes > 1e-9]
        for place in np.ndindex(sites, groups):
            for cells in (place, *((*place, label) for label in range(classes))):
                one = np.zeros(counts.shape)
                one[cells] = 1
                left = one.reshape(-1) - basis.T @ (basis @ one.reshape(-1))
                kind = "size" if len(cells) == 2 else "cell"
                found[kind] += 1
                if abs(left).max() < 1e-9:
                    found[f"{kind} follows"] += 1
                    found["below"] += 0 < int(counts[cells].sum()) < least
    assert found["below"] == 0
    assert 0 < found["size follows"] < 0.15 * found["size"]
