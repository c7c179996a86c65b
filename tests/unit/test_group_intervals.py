"""Test intervals of group metrics and gaps: against SciPy, published formulas in loops, and a simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, norm, t

from fairflare.core.cells import Cell, Vector
from fairflare.core.statistics.group_intervals import GAPS, gap_intervals, intervals_of
from fairflare.core.statistics.group_metrics import gaps_of
from fairflare.core.statistics.group_sums import add_sums, sums_of
from fairflare.reporting.documents import Info, RunResults
from fairflare.reporting.layout import print_cell
from fairflare_lab.compare.group_gaps import Value, average_seeds, gap_table, gaps_in_words
from tests.unit.report_runs import read
from tests.unit.test_groups import made

BINS, SURE = 40, 7


def by_group(labels: Any, scores: Any, numbers: Any, groups: int = 3) -> dict[str, Any]:
    return {f"g{g}": sums_of(labels, scores, numbers == g, BINS, SURE) for g in range(groups)}


def wilson(hits: int, count: int, error: float) -> tuple[float, float]:
    of = binomtest(hits, count).proportion_ci(1 - error, method="wilson")
    return float(of.low), float(of.high)


def newcombe(a: tuple[int, int], b: tuple[int, int], error: float) -> tuple[float, float]:
    """Compute the interval of the difference of two shares from hits and counts: Newcombe 1998, method 10."""
    p1, p2 = a[0] / a[1], b[0] / b[1]
    (l1, u1), (l2, u2) = wilson(*a, error), wilson(*b, error)
    delta, epsilon = math.sqrt((p1 - l1) ** 2 + (u2 - p2) ** 2), math.sqrt((u1 - p1) ** 2 + (p2 - l2) ** 2)
    return p1 - p2 - delta, p1 - p2 + epsilon


def largest(shares: list[list[tuple[int, int]]]) -> tuple[float, float]:
    """Compute the interval of the largest difference between groups in any part; ``shares[group][part]``."""
    pairs = [(a[k], b[k]) for a, b in combinations(shares, 2) for k in range(len(a)) if a[k][1] and b[k][1]]
    low, high = 0.0, 0.0
    for one, other in pairs:
        below, above = newcombe(one, other, 0.05 / len(pairs))
        low = max(low, below, -above)
        high = max(high, abs(below), abs(above))
    return low, high


@pytest.mark.parametrize("classes", [2, 4])
def test_gaps_of_shares_have_newcombes_intervals(classes: int) -> None:
    labels, scores, numbers = made(classes, 300, 3)
    told, wanted = scores.argmax(1), [1] if classes == 2 else list(range(classes))
    sensitivity, false, share, right = [], [], [], []
    for g in range(3):
        mine = numbers == g
        sensitivity.append([(int((mine & (labels == c) & (told == c)).sum()), int((mine & (labels == c)).sum()))
                            for c in wanted])  # fmt: skip
        false.append([(int((mine & (labels != c) & (told == c)).sum()), int((mine & (labels != c)).sum()))
                      for c in wanted])  # fmt: skip
        share.append([(int((mine & (told == c)).sum()), int(mine.sum())) for c in wanted])
        right.append([(int((mine & (told == labels)).sum()), int(mine.sum()))])
    found = gap_intervals(by_group(labels, scores, numbers))
    odds = [[*a, *b] for a, b in zip(sensitivity, false, strict=True)]
    for name, of in (
        ("equal_opportunity", sensitivity), ("equalised_odds", odds), ("demographic_parity", share),
        ("accuracy_gap", right),
    ):  # fmt: skip
        assert found[name] == pytest.approx(largest(of), abs=1e-12), name
    gaps = gaps_of(by_group(labels, scores, numbers), add_sums(list(by_group(labels, scores, numbers).values())))
    assert all(found[name][0] <= gaps[name] <= found[name][1] for name in GAPS if name in found)
    assert found["accuracy_gap"][0] > 0  # the model is worse in group 1


def delong(scores: Any, truth: Any) -> tuple[float, float]:
    """Compute an area and its standard error, pair by pair."""
    positive, negative = scores[truth], scores[~truth]
    v10 = [np.mean([(p > n) + (p == n) / 2 for n in negative]) for p in positive]
    v01 = [np.mean([(p > n) + (p == n) / 2 for p in positive]) for n in negative]
    error = math.sqrt(np.var(v10, ddof=1) / len(positive) + np.var(v01, ddof=1) / len(negative))
    return float(np.mean(v10)), error


def test_an_area_has_delongs_interval() -> None:
    labels, scores, numbers = made(2, 160, 5, 2)
    place = np.minimum((scores[:, 1] * BINS).astype(int), BINS - 1)
    z, ends = norm.ppf(0.975), []
    for g in range(2):
        area, error = delong(place[numbers == g], labels[numbers == g] == 1)
        low, high = intervals_of(by_group(labels, scores, numbers, 2)[f"g{g}"])["auc"]
        assert (low, high) == pytest.approx((max(0, area - z * error), min(1, area + z * error)), abs=1e-12)
        ends.append((area, error))
    differ, error = ends[0][0] - ends[1][0], math.hypot(ends[0][1], ends[1][1])
    assert ends[0][0] + z * ends[0][1] < 1  # no end is cut
    found = gap_intervals(by_group(labels, scores, numbers, 2))["auc_gap"]
    assert found == pytest.approx((differ - z * error, differ + z * error), abs=1e-12)


def test_dice_has_students_interval() -> None:
    rng = np.random.default_rng(1)
    dice, numbers = rng.uniform(0.3, 0.6, size=(30, 1)), rng.integers(0, 2, 30)
    dice[numbers == 1] += 0.3
    of = {f"g{g}": sums_of(None, dice, numbers == g, BINS, SURE) for g in range(2)}
    ends = []
    for g in range(2):
        own = dice[numbers == g, 0]
        half = t.ppf(0.975, len(own) - 1) * own.std(ddof=1) / math.sqrt(len(own))
        assert intervals_of(of[f"g{g}"])["dice"] == pytest.approx((own.mean() - half, own.mean() + half), abs=1e-12)
        ends.append((own.mean(), half))
    gap, half = ends[1][0] - ends[0][0], math.hypot(ends[0][1], ends[1][1])
    assert gap_intervals(of)["dice_gap"] == pytest.approx((gap - half, gap + half), abs=1e-12)


def test_of_several_structures_the_interval_is_no_shorter_than_that_of_the_images_means() -> None:
    dice = np.random.default_rng(2).uniform(size=(25, 3))
    low, high = intervals_of(sums_of(None, dice, np.ones(25, bool), BINS, SURE))["dice"]
    own = dice.mean(1)
    assert high - low >= 2 * t.ppf(0.975, 24) * own.std(ddof=1) / 5


def test_what_has_no_interval() -> None:
    labels, scores, numbers = made(3, 90)
    of = by_group(labels, scores, numbers)
    nobody = sums_of(labels, scores, np.zeros(90, bool), BINS, SURE)
    for ends in (intervals_of(nobody), gap_intervals({"a": of["g0"], "none": nobody})):
        assert all(math.isnan(end) for pair in ends.values() for end in pair)
    assert gap_intervals({"a": of["g0"], "b": of["g1"], "none": nobody}) == gap_intervals(
        {"a": of["g0"], "b": of["g1"]}
    )
    perfect = np.where(labels == 1, 0.9, 0.1)
    two = np.stack([1 - perfect, perfect], 1)
    sums = sums_of((labels == 1).astype(int), two, np.ones(90, bool), BINS, SURE)
    assert math.isnan(intervals_of(sums)["auc"][0])  # no scatter: nothing is known, not everything
    one = sums_of(None, np.array([[0.5]]), np.ones(1, bool), BINS, SURE)
    assert math.isnan(intervals_of(one)["dice"][0])


# ------------------------------------------------------------------------------------------------ of patients


def both(ends: Any, wanted: Any) -> None:
    assert {*ends} == {*wanted}
    for name in ends:
        assert ends[name] == pytest.approx(wanted[name], abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_several_images_of_a_patient_count_as_one(classes: int) -> None:
    """Check patients whose images are alike: twelve such images count as one."""
    labels, scores, numbers = made(max(classes, 2), 90, 4)
    labels, scores = (labels, scores) if classes else (None, scores[:, :1])
    whose = np.repeat(np.arange(90), 12)
    each = None if labels is None else labels[whose]
    single = {f"g{g}": sums_of(labels, scores, numbers == g, BINS, SURE) for g in range(3)}
    many = {f"g{g}": sums_of(each, scores[whose], numbers[whose] == g, BINS, SURE, whose) for g in range(3)}
    assert [of["cases"][0] for of in many.values()] == [(numbers == g).sum() for g in range(3)]
    both(gap_intervals(many), gap_intervals(single))
    for group in single:
        both(intervals_of(many[group]), intervals_of(single[group]))
    assert not all(math.isnan(low) for low, _ in gap_intervals(many).values())


def test_one_patient_with_most_images_is_one_patient() -> None:
    """Check Kish by hand: of 9 patients with 1 image and one with 91, 100^2 / (9 + 91^2) = 1.206 count."""
    whose = np.array([*range(9), *[9] * 91])
    right = (np.arange(100) < 60).astype(float)
    sums = sums_of(np.zeros(100, np.int64), np.stack([right, 1 - right], 1), np.ones(100, bool), 5, 5, whose)
    low, high = intervals_of(sums)["accuracy"]
    n, z = 100**2 / (9 + 91**2), norm.ppf(0.975)
    middle, half = (0.6 + z * z / 2 / n) / (1 + z * z / n), z / (1 + z * z / n) * math.sqrt(0.24 / n + z * z / 4 / n**2)
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=1e-12)


@pytest.mark.parametrize(("patients", "told"), [(4, False), (5, True)])
def test_below_five_patients_there_is_no_interval(patients: int, told: bool) -> None:
    labels, scores, numbers = made(2, 400, 5, 2)
    few = np.flatnonzero(numbers == 1)
    whose = np.arange(400)
    whose[few] = np.arange(len(few)) % patients  # as many images as before
    of = {f"g{g}": sums_of(labels, scores, numbers == g, BINS, SURE, whose) for g in (0, 1)}
    found = [*gap_intervals(of).values(), *intervals_of(of["g1"]).values()]
    assert [math.isfinite(low) for low, _ in found] == [told] * len(found)
    assert all(math.isfinite(low) for low, _ in intervals_of(of["g0"]).values())


# ------------------------------------------------------------------------------------------------ over seeds


def run(
    label: str, seed: int, gap: float, ends: list[float | None], kept: Any = None, cases: int = 50, without: Any = None
) -> RunResults:
    """Return a run of two groups; without each part of the cases the gap moves by ``without``, else hardly."""
    moved = np.arange(20) % 2 * 1e-6 if without is None else np.asarray(without)
    of = {
        "gaps": {"accuracy_gap": gap}, "gap_intervals": {"accuracy_gap": ends}, "worst": {"accuracy": "dark"},
        "groups": {name: {"images": 2 * cases, "cases": cases} for name in ("dark", "light")},
        "without": {"accuracy_gap": (gap + moved).tolist()},
    }  # fmt: skip
    return read(info={"label": label, "seed": seed}, groups={"pooled": {"tone": of}, "kept": kept or {}})


def test_over_seeds_the_images_are_the_same() -> None:
    gaps, ends = [0.10, 0.14, 0.18], (0.02, 0.30)
    half = t.ppf(0.975, 2) * np.std(gaps, ddof=1) / math.sqrt(3)
    low, high = average_seeds([Value(gap, ends) for gap in gaps])
    below, above = np.mean([g - ends[0] for g in gaps]), np.mean([ends[1] - g for g in gaps])
    assert low == pytest.approx(max(0.0, 0.14 - math.hypot(below, half)), abs=1e-12)
    assert high == pytest.approx(0.14 + math.hypot(above, half), abs=1e-12)
    assert average_seeds([Value(0.1, (0.02, 0.3))]) == pytest.approx((0.02, 0.3), abs=1e-12)
    assert all(map(math.isnan, average_seeds([Value(0.1, (math.nan, math.nan))])))


def test_methods_side_by_side() -> None:
    rows = {
        "fed_avg": [run("fed_avg", s, 0.20 + 0.01 * s, [0.1, 0.3]) for s in range(3)],
        "other": [run("other", s, 0.05 + 0.012 * s, [0.0, 0.2], {"site-1": ["tone=dark"]}) for s in range(3)],
    }
    table = gap_table(rows, "fed_avg")
    first, second = table.rows
    assert [print_cell(cell) for cell in first[:4]] == ["accuracy_gap", "tone", "fed_avg", "3"]
    assert first[-1] == "dark"
    assert print_cell(first[6]) == "-"
    differ = np.array([-0.15, -0.148, -0.146])
    half = t.ppf(0.975, 2) * differ.std(ddof=1) / math.sqrt(3)
    assert second[6].values == pytest.approx([differ.mean(), differ.mean() - half, differ.mean() + half], abs=1e-12)
    assert second[8] == "better"
    text = gaps_in_words(rows, "fed_avg")
    assert "other: groups or classes of them stay at site-1 and are in no figure" in text
    assert "fed_avg: groups" not in text
    lines = gaps_in_words(rows, "fed_avg", style="csv").splitlines()
    assert lines[0].startswith("measure,attribute,method,seeds,mean,sd,low,high,difference,")
    assert float(lines[1].split(",")[4]) == pytest.approx(0.21)


def test_equity_scaled_metrics_are_compared_and_larger_is_better() -> None:
    def scaled(label: str, seed: int, pooled: float, groups: tuple[float, ...]) -> RunResults:
        found = run(label, seed, max(groups) - min(groups), [0.0, 0.5])
        scaled = pooled / (1 + sum(abs(pooled - value) for value in groups))
        found.cells.append(Cell("es_accuracy", group="tone", value=scaled))
        found.vectors.append(Vector("es_accuracy", group="tone", unit="parts", values=(scaled,) * 20))
        return found

    rows = {
        "fed_avg": [scaled("fed_avg", s, 0.80 + 0.001 * s, (0.9, 0.6)) for s in range(3)],
        "other": [scaled("other", s, 0.80, (0.81, 0.79 - 0.001 * s)) for s in range(3)],
    }
    table = gap_table(rows, "fed_avg")
    measures = [(row[0], row[2]) for row in table.rows]
    assert measures == [(name, m) for name in ("accuracy_gap", "es_accuracy") for m in rows]
    first, second = (row for row in table.rows if row[0] == "es_accuracy")
    by_hand = [0.80 / 1.3, 0.801 / (1 + 0.099 + 0.201), 0.802 / (1 + 0.098 + 0.202)]
    better = [0.80 / 1.02, 0.80 / 1.021, 0.80 / 1.022]
    assert first[4].mean == pytest.approx(np.mean(by_hand), abs=1e-12)
    assert second[6].values[0] == pytest.approx(np.mean(better) - np.mean(by_hand), abs=1e-12)
    assert second[8] == "better"
    assert print_cell(second[5]) == "-"  # over the images there is no interval
    assert "of equity-scaled metrics larger" in gaps_in_words(rows, "fed_avg")


def test_images_and_seeds_are_in_a_verdict_together() -> None:
    """Check by hand that an effect of one method with these cases, equal for every seed, gives no certainty."""
    taste = np.linspace(-0.02, 0.02, 20)  # what the difference becomes without each part

    def rows(without: Any) -> dict[str, Any]:
        return {
            "fed_avg": [run("fed_avg", s, 0.30, [0.1, 0.5]) for s in range(3)],
            "other": [run("other", s, 0.20 + 0.001 * s, [0.0, 0.4], without=without) for s in range(3)],
        }

    sure, unsure = (gap_table(rows(without), "fed_avg").rows[-1] for without in (None, taste))
    assert (sure[8], unsure[8]) == ("better", "within noise")
    error = math.sqrt(19 / 20 * np.square(taste - taste.mean()).sum() + 0.001**2 / 3)  # jackknife, and over the seeds
    low, high = unsure[6].values[1:]
    assert (high - low) / 2 == pytest.approx(t.ppf(0.975, 10) * error, rel=0.01)
    # Without parts (min_cases above 1) both intervals, as if they were of other cases; nothing where there is none.
    for ends, width in (([0.1, 0.5], 0.2), ([None, None], math.nan)):
        made = rows(None)
        for one in (*made["fed_avg"], *made["other"]):
            one.vectors = []
            for cell in one.cells:
                if cell.metric == "accuracy_gap":
                    low, high = (None, None) if ends[0] is None else (cell.value - width, cell.value + width)
                    one.cells[one.cells.index(cell)] = replace(cell, low=low, high=high)
        cell = gap_table(made, "fed_avg").rows[-1]
        assert cell[8] == ("not known" if ends[0] is None else "within noise")
        low, high = cell[6].values[1:]
        if ends[0] is None:
            assert math.isnan(low), "from seeds alone there is no interval either"
        else:
            assert (high - low) / 2 == pytest.approx(
                t.ppf(0.975, 49) * math.hypot(0.2, 0.2) / norm.ppf(0.975), rel=0.01
            )


def test_of_fewer_than_five_patients_there_is_no_verdict() -> None:
    for cases, verdict in ((4, "not known"), (5, "better")):
        rows = {
            "fed_avg": [run("fed_avg", s, 0.5, [0.1, 0.9], cases=cases) for s in range(3)],
            "other": [run("other", s, 0.1 + 0.001 * s, [0.0, 0.4], cases=cases) for s in range(3)],
        }
        assert gap_table(rows, "fed_avg").rows[-1][8] == verdict


def test_a_run_without_groups_is_named() -> None:
    rows = {"fed_avg": [run("fed_avg", 0, 0.2, [0.1, 0.3])], "other": [RunResults(info=Info(seed=0))]}
    assert "other: 1 of 1 runs did not ask for groups." in gaps_in_words(rows, "fed_avg")


def test_gaps_that_are_the_same_with_every_seed_keep_their_images_interval() -> None:
    assert average_seeds([Value(0.1, (0.05, 0.2))] * 3) == pytest.approx((0.05, 0.2))
