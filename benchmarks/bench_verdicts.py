"""Measure how often each sentence that carries a verdict is said of equal models, sites, methods and groups of people.

Scores of cases are made up in worlds in which the sentence is false; everything from a site's figures to the verdict is
the package's own code. Random deals are 999 a test, in place of up to 9,999.

    python benchmarks/bench_verdicts.py                # the table of docs/compare_statistics.md, some minutes
    python benchmarks/bench_verdicts.py --worlds 50    # quicker, and rougher
    python benchmarks/bench_verdicts.py --power        # worlds with a true difference, in which the sentences are true
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from bench_group_verdicts import at_the_server
from fairflare.base.cases.resampling import draws
from fairflare.base.cases.sampling import report_mean
from fairflare.base.task import Metric
from fairflare.core.cells import Cell, Vector
from fairflare.core.statistics import inequality
from fairflare.core.statistics.areas import ALL, delong
from fairflare.core.statistics.group_sums import FOLDS
from fairflare.core.statistics.intervals import paired_gain
from fairflare.federation.site.groups import FIELDS, GroupTable, read_groups
from fairflare.reporting.documents import RunResults, encode_value
from fairflare.reporting.sites.clinical import clinical_of
from fairflare.reporting.sites.own_models import SHOULD, SHOULD_NOT, personal
from fairflare.reporting.standing import standing
from fairflare_lab.compare.differences import BETTER, MEASURES, WORSE, correct_p_values, differences_of
from fairflare_lab.compare.group_gaps import Value, difference_of
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.unseen import unseen_of

Array: TypeAlias = "npt.NDArray[np.float64]"
Generator = np.random.Generator
Shape: TypeAlias = Callable[[Generator, int], Array]  # (generator, cases) -> differences of mean 0 and deviation 1
#: One world: from a generator and the size of a true difference (0: none) to the sentences that are said.
World: TypeAlias = Callable[[Generator, float], set[str]]
ALL_WORLDS: dict[str, tuple[World, tuple[str, ...], float]] = {}  # with its sentences, and a difference for --power
BEHIND, AHEAD, UNEQUAL = "behind", "ahead", "more unequal than chance"
SHAPES: Mapping[str, Shape] = {
    "normal": lambda rng, cases: rng.normal(0, 1, cases),
    "skewed": lambda rng, cases: 1 - rng.exponential(1, cases),
    "skewed upwards": lambda rng, cases: rng.exponential(1, cases) - 1,
}
DICE = Metric(name="dice", doc="", higher_is_better=True, mean_of_images=True)
NAMES = ["sex=F", "sex=M"]


def world(name: str, sentences: tuple[str, ...], lag: float, of: World) -> None:
    ALL_WORLDS[name] = (of, sentences, lag)


# ------------------------------------------------------------------------------------------------ gains on test cases


def drawn(site: str, gains: Array, count: int) -> Array:
    return gains[draws(site, len(gains), count)].mean(1)


def own_models(shape: Shape, cases: int) -> World:
    """Return worlds of three sites, each with a model of its own that is as good as the common one."""

    def one(rng: Generator, lag: float) -> set[str]:
        told = {}
        for number in range(3):
            gains = 0.1 * (shape(rng, cases) + lag)
            found = paired_gain(float(gains.mean()), drawn(f"site-{number}", gains, 1000), cases)
            told[f"site-{number}"] = {
                "own_gain": [0.5, 0.5 + found[0], *found], "tuned_steps": 3.0, "tuned_passes": 1.0,
                "tuned_before": 0.5, "tuned_after": 0.6,
            }  # fmt: skip
        common = {site: {"dice": 0.5} for site in told}
        of = personal(DICE, told, common, dict.fromkeys(told, cases), {})["sites"]
        return {site["advice"] for site in of.values()} & {SHOULD, SHOULD_NOT}

    return one


def run_of(label: str, seed: int, scores: Mapping[str, Array], rounds: int) -> RunResults:
    """Return a run's results: mean scores of the test cases, and their means on 200 draws."""
    info = {
        "label": label, "seed": seed, "primary_metric": "dice", "higher_is_better": {"dice": True},
        "num_rounds": rounds, "config": {"seed": seed, "label": label}, "metric_range": [None, None],
    }  # fmt: skip
    return RunResults.model_validate(
        encode_value(
            {
                "info": info, "status": "completed",
                "cells": [Cell("dice", site, value=float(of.mean())) for site, of in scores.items()],
                "vectors": [
                    Vector("dice", site, unit="patients", count=len(of), values=tuple(drawn(site, of, 200).tolist()))
                    for site, of in scores.items()
                ],
            },
            "results",
        )
    )  # fmt: skip


def methods(shape: Shape, cases: int, seeds: int, rows: int = 1, luck: float = 0.01) -> World:
    """Return worlds of equal methods at three sites; with no seed two given models, as ``evaluate`` tests them."""

    def one(rng: Generator, lag: float) -> set[str]:
        sites, found = [f"site-{k}" for k in range(3)], {}
        hard = {site: 0.7 + 0.1 * rng.normal(0, 1, cases) for site in sites}
        for row in range(rows + 1):
            taste = {site: 0.1 * (shape(rng, cases) + lag) if row else np.zeros(cases) for site in sites}
            found[f"row {row}"] = [
                run_of(f"row {row}", seed, {
                    s: hard[s] + taste[s] + (seeds > 0) * (luck * rng.normal() + 0.03 * rng.normal(0, 1, cases))
                    for s in sites
                }, seeds)
                for seed in range(max(seeds, 1))
            ]  # fmt: skip
        told = differences_of(found, "row 0", "dice", True)
        return {
            f"{d.verdict} ({'average, spread, worst' if d.measure in MEASURES else 'a site'})" for d in told
            if d.verdict in (BETTER, WORSE)
        }  # fmt: skip

    return one


METHODS = tuple(f"{verdict} ({of})" for of in ("average, spread, worst", "a site") for verdict in (BETTER, WORSE))


def left_out(shape: Shape, cases: int, seeds: int) -> World:
    """Return worlds of three left-out sites with models that do as well as at the others, and adapted ones."""

    def one(rng: Generator, lag: float) -> set[str]:
        sites, pairs = [f"site-{k}" for k in range(3)], []
        hard = {site: 0.1 * rng.normal(0, 1, cases) for site in sites}
        taste = {site: 0.1 * (shape(rng, cases) + lag) for site in sites}
        for seed in range(seeds):
            for site in sites:
                run = run_of("row", seed, {s: 0.7 + hard[s] for s in sites if s != site}, 3)
                scores = {
                    kind: 0.7 + hard[site] + more + 0.02 * rng.normal(0, 1, cases)
                    for kind, more in (("metrics", 0.0), ("adapted", taste[site]))
                }
                of = {kind: drawn(site, values, 200).tolist() for kind, values in scores.items()}
                pairs.append((run, Unseen(
                    site=site, metrics={"dice": float(scores["metrics"].mean())}, resampled=of["metrics"],
                    adapted={"dice": float(scores["adapted"].mean())}, adapted_resampled=of["adapted"],
                    unit="patients", units=cases,
                )))  # fmt: skip
        (row,) = unseen_of(pairs).rows
        gain = row.sure["gain"]
        return {"adapted beyond noise"} if gain.low > 0 or gain.high < 0 else set()

    return one


for shape in SHAPES:
    for cases in (5, 8, 12, 20, 40):
        lag = {5: 1.5, 8: 1.2, 12: 0.9, 20: 0.7, 40: 0.5}[cases]
        world(f"own model, gains {shape}, {cases} cases", (SHOULD, SHOULD_NOT), lag, own_models(SHAPES[shape], cases))
    for cases in (5, 10, 20):
        lag = {5: 1.0, 10: 0.7, 20: 0.5}[cases]
        world(f"evaluate, gains {shape}, {cases} cases", METHODS, lag, methods(SHAPES[shape], cases, 0))
    world(f"compare, 3 seeds, gains {shape}, 10 cases", METHODS, 0.7, methods(SHAPES[shape], 10, 3))
    world(f"left-out sites, 1 seed, gains {shape}, 10 cases", ("adapted beyond noise",), 0.5,
          left_out(SHAPES[shape], 10, 1))  # fmt: skip
world("compare, 2 seeds, 3 rows, 20 cases", METHODS, 0.5, methods(SHAPES["normal"], 20, 2, rows=3))
world("compare, 5 seeds, 20 cases", METHODS, 0.5, methods(SHAPES["normal"], 20, 5))
world("left-out sites, 3 seeds, 10 cases", ("adapted beyond noise",), 0.5, left_out(SHAPES["normal"], 10, 3))


# ------------------------------------------------------------------------------------------------ sites


def said_of(found: Mapping[str, Any] | None) -> set[str]:
    if not found:
        return set()
    told = {BEHIND: found["behind"], AHEAD: found["ahead"], UNEQUAL: (found["p_value"] or 1) <= 0.05}
    return {sentence for sentence, holds in told.items() if holds}


def beta(rng: Generator, mean: float, sd: float, cases: int) -> Array:
    size = mean * (1 - mean) / sd**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, cases)


def of_scores(sites: tuple[tuple[int, float], ...], ends: tuple[float, float], mean: float) -> World:
    """Return worlds of sites with these numbers of cases and deviations, and one mean of skewed scores."""

    def one(rng: Generator, lag: float) -> set[str]:
        test, said = {}, {}
        for number, (cases, sd) in enumerate(sites):
            below = lag if number == len(sites) - 1 else 0.0
            if ends[1] == 1:
                scores = beta(rng, mean - below, sd, cases)
            else:
                scores = mean + sd * (rng.gamma(2, 1 / np.sqrt(2), cases) - np.sqrt(2)) - below
            test[f"site-{number}"] = {"dice": float(scores.mean())}
            said[f"site-{number}"] = {"images": cases, **report_mean(scores, None, *ends)}
        return said_of(standing(test, said, {"primary_metric": "dice", "metric_range": [0, ends[1]]})[0])

    return one


def of_recalls(sizes: tuple[tuple[int, ...], ...]) -> World:
    """Return worlds of sites with these numbers of cases of each class, and the same recalls."""

    def one(rng: Generator, lag: float) -> set[str]:
        test, said = {}, {}
        for number, cases in enumerate(sizes):
            recalls = np.array([0.9, 0.7, 0.6]) - lag * (number == 0)
            right = rng.binomial(cases, recalls)
            known = {f"c{c}": right[c] / n for c, n in enumerate(cases) if n}
            test[f"site-{number}"] = {"balanced_accuracy": float(np.mean([*known.values()]))}
            test[f"site-{number}"] |= {f"recall_{name}": float(value) for name, value in known.items()}
            said[f"site-{number}"] = {
                "images": sum(cases), "test_cases": sum(cases), "standard_error": 0.05,
                "class_support": {f"c{c}": n for c, n in enumerate(cases)},
            }  # fmt: skip
        return said_of(standing(test, said, {"primary_metric": "balanced_accuracy"})[0])

    return one


def of_areas(sites: tuple[tuple[int, float, float], ...], area: float) -> World:
    """Return worlds of sites with these numbers of cases, shares and deviations of positives, and one true AUC."""

    def one(rng: Generator, lag: float) -> set[str]:
        test, said, told = {}, {}, {}
        for number, (cases, share, sd) in enumerate(sites):
            truth = rng.permutation(cases) < max(round(share * cases), 3)
            shift = norm.ppf(area - lag * (number == len(sites) - 1)) * np.hypot(1, sd)
            scores = np.where(truth, rng.normal(shift, sd, cases), rng.normal(0, 1, cases))
            found, covariance = delong(truth, scores[None])
            test[f"site-{number}"] = {"auc": float(found[0])}
            said[f"site-{number}"] = {
                "images": cases, "test_cases": cases, "standard_error": float(np.sqrt(covariance[0, 0])),
            }  # fmt: skip
            counts = (int(truth.sum()), int((~truth).sum()))
            told[f"site-{number}"] = {ALL: {"calibration": []}, "c": {
                "auc": float(found[0]), "auc_variance": float(covariance[0, 0]), "cases_with": counts[0],
                "cases_without": counts[1], "squares_with": counts[0], "squares_without": counts[1],
                **dict.fromkeys(("tp", "fn", "fp", "tn"), 1.0),
                **{f"{n}_at_{s}_0.90": 1.0 for n in ("tp", "fn", "fp", "tn") for s in ("specificity", "sensitivity")},
            }}  # fmt: skip
        sentences = said_of(standing(test, said, {"primary_metric": "auc"})[0])
        tests = [cell.value for cell in clinical_of(told)[0] if cell.metric == "auc_p_value"]
        return sentences | ({"p of a class's AUC"} if tests[0] is not None and tests[0] <= 0.05 else set())

    return one


SITES = (BEHIND, AHEAD, UNEQUAL)
for name, sites, power in (
    ("3 sites, 6 to 10 cases", ((6, 0.1), (8, 0.1), (10, 0.1)), 0.15),
    ("6 sites, 5 to 40 cases", tuple((n, 0.1) for n in (5, 10, 15, 20, 30, 40)), 0.07),
    ("deviations x 1.9, 30 and 8 cases", ((30, 0.1), (30, 0.1), (8, 0.19), (8, 0.19)), 0.2),
    ("deviations x 1.9 at one of 8 cases", ((30, 0.1), (30, 0.1), (30, 0.1), (8, 0.19)), 0.2),
    ("deviations x 1.9, 20 cases", ((20, 0.1), (20, 0.1), (20, 0.19), (20, 0.19)), 0.2),
    ("deviations x 1.9, the many are scattered", ((8, 0.1), (8, 0.1), (30, 0.19), (30, 0.19)), 0.15),
):
    world(f"Dice, {name}", SITES, power, of_scores(sites, (0, 1), 0.8))
world(
    "loss, 4 sites, 10 to 40 cases",
    SITES,
    0.25,
    of_scores(((10, 0.2), (20, 0.2), (30, 0.2), (40, 0.2)), (0, np.inf), 1),
)
world("balanced accuracy, 4 sites", SITES, 0.25, of_recalls(((20, 10, 10), (30, 30, 5), (10, 20, 20), (15, 15, 15))))
world("balanced accuracy, classes shift", SITES, 0.3,
      of_recalls(((40, 5, 5), (5, 40, 5), (5, 5, 40), (20, 0, 20), (15, 15, 15))))  # fmt: skip
AREAS = (*SITES, "p of a class's AUC")
for area in (0.75, 0.85, 0.95):
    for name, of_sites in (
        ("30 to 100 cases", ((30, 0.5, 1.0), (50, 0.5, 1.0), (70, 0.5, 1.0), (100, 0.5, 1.0))),
        ("30 cases each", ((30, 0.5, 1.0),) * 4),
        ("shares of positives .15 to .5", ((30, 0.2, 1.0), (50, 0.5, 1.0), (70, 0.3, 1.0), (100, 0.15, 1.0))),
        ("unequal scatter", ((30, 0.5, 2.0), (50, 0.5, 1.0), (70, 0.5, 1.0), (100, 0.5, 0.6))),
    ):
        world(f"AUC {area}, {name}", AREAS, 0.2, of_areas(of_sites, area))


# ------------------------------------------------------------------------------------------------ groups of people

GAPS = ("accuracy_gap", "auc_gap", "equalised_odds", "dice_gap")


def of_groups(cases: int) -> World:
    """Return worlds of two equal groups at two sites: the interval of a gap after a single run excludes 0."""

    def one(rng: Generator, lag: float) -> set[str]:
        group, said = np.arange(2 * cases) % 2, set()
        label = rng.integers(0, 2, 2 * cases)
        level = rng.normal(size=2 * cases) + 0.8 - lag * group
        right = 1 / (1 + np.exp(-1.5 * level))
        positive = np.where(label == 1, right, 1 - right)
        for labels, scores in (
            (label, np.stack([1 - positive, positive], 1)), (None, np.clip(0.6 + 0.15 * level, 0, 1)[:, None]),
        ):  # fmt: skip
            sums = []
            for at in (np.arange(2 * cases) < cases, np.arange(2 * cases) >= cases):
                whose = np.flatnonzero(at).tolist()
                own = None if labels is None else labels[at]
                table = GroupTable("a", (own, scores[at]), {"sex": group[at]}, whose, NAMES, 20, 5)
                sent, _ = table.sent(1, True)
                stats = {field.name: sent.get(field.name) for field in FIELDS}
                sums.append(read_groups("a", stats, ["sex"], scores.shape[1], 20, 5) or {})
            said |= {gap for gap, of in at_the_server(sums).items() if gap in GAPS and of.ends[0] > 0}
        return said

    return one


def of_gaps(cases: int, seeds: int) -> World:
    """Return worlds of two methods with equal gaps between two groups, over seeds."""

    def one(rng: Generator, lag: float) -> set[str]:
        group, values = np.arange(2 * cases) % 2, {}
        part, hard = rng.permutation(2 * cases) % FOLDS, rng.normal(size=2 * cases)
        kept = np.stack([part >= 0, *(part != k for k in range(FOLDS))]).astype(float)
        for label, gap in (("first", 0.8), ("second", 0.8 - lag)):
            level = hard + 0.7 * rng.normal(size=2 * cases) + 0.5 * rng.normal(size=(seeds, 2 * cases))
            level = (0.15 * (level - (gap + 0.1 * rng.normal(size=(seeds, 1))) * group)).T
            of = [(kept * (group == g)) @ level / (kept * (group == g)).sum(1, keepdims=True) for g in (0, 1)]
            gaps = np.abs(of[0] - of[1])
            values[label, "sex", "dice_gap"] = {
                s: Value(float(gaps[0, s]), (0.0, 1.0), gaps[1:, s].tolist(), cases) for s in range(seeds)
            }
        found = difference_of(("second", "sex", "dice_gap"), values, "first")
        return {correct_p_values([found])[0].verdict} & {BETTER, WORSE} if found else set()

    return one


for cases in (20, 60):
    world(f"gap between groups of one run, {cases} cases a group", GAPS, 0.8, of_groups(cases))
    world(f"gaps compared, 3 seeds, {cases} cases a group", (BETTER, WORSE), 0.8, of_gaps(cases, 3))


# ------------------------------------------------------------------------------------------------ the table


def shares(name: str, worlds: int, power: bool = False) -> dict[str, float]:
    """Return how often each sentence is said in these worlds; all are, whatever the others are, the same each time."""
    one, sentences, lag = ALL_WORLDS[name]
    inequality.WORK, usual = 0, inequality.WORK
    try:
        rng = np.random.default_rng([11, *name.encode()])
        said = Counter(sentence for _ in range(worlds) for sentence in one(rng, lag if power else 0.0))
    finally:
        inequality.WORK = usual
    return {sentence: said[sentence] / worlds for sentence in sentences}


def table(worlds: int, power: bool = False, only: str = "") -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each kind of worlds."""
    yield "| worlds | said falsely |" if not power else "| worlds | said |"
    yield "| --- | --- |"
    for name in ALL_WORLDS:
        if only in name:
            told = ", ".join(f"{sentence} {share:.3f}" for sentence, share in shares(name, worlds, power).items())
            yield f"| {name} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=300)
    parser.add_argument("--power", action="store_true", help="with a true difference")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    given = parser.parse_args()
    for line in table(given.worlds, given.power, given.only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
