"""Test areas under the ROC curve: DeLong's covariance by case, intervals, thresholds, against other implementations."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from monai.metrics import compute_average_precision, compute_roc_auc
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from fairflare.core.statistics.areas import area_interval, delong, logit_interval, newcombe_end, threshold

# The worked example: positives .9 .8 .4 and negatives .7 .5 .4 .1 of one model; .8 .6 .5 and .9 .5 .3 .2 of another.
TRUTH = np.array([True] * 3 + [False] * 4)
SCORES = np.array([[0.9, 0.8, 0.4, 0.7, 0.5, 0.4, 0.1], [0.8, 0.6, 0.5, 0.9, 0.5, 0.3, 0.2]])
CASES = np.array([0, 0, 1, 0, 1, 2, 3])


def by_pairs(truth: np.ndarray, scores: np.ndarray, cases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count every pair, and sum the products of the placements of every two images of a case: no ranks, no algebra."""
    positive, negative = np.flatnonzero(truth), np.flatnonzero(~truth)
    m, n = len(positive), len(negative)
    wins = {
        (k, i, j): float(own[i] > own[j]) + 0.5 * float(own[i] == own[j])
        for k, own in enumerate(scores)
        for i, j in product(positive, negative)
    }
    areas = np.array([sum(wins[k, i, j] for i, j in product(positive, negative)) / (m * n) for k in range(len(scores))])
    placed = {(k, i): sum(wins[k, i, j] for j in negative) / n for k in range(len(scores)) for i in positive}
    placed |= {(k, j): sum(wins[k, i, j] for i in positive) / m for k in range(len(scores)) for j in negative}

    def summed(k: int, other: int, one: np.ndarray, two: np.ndarray) -> float:
        return sum(
            (placed[k, i] - areas[k]) * (placed[other, j] - areas[other])
            for i, j in product(one, two)
            if cases[i] == cases[j]
        )

    of = {name: len({*cases[who].tolist()}) for name, who in (("+", positive), ("-", negative))}
    of[""] = len({*cases.tolist()})
    grow = {name: count / (count - 1) for name, count in of.items()}
    found = np.empty((len(scores), len(scores)))
    for k, other in product(range(len(scores)), repeat=2):
        found[k, other] = grow["+"] * summed(k, other, positive, positive) / m**2
        found[k, other] += grow["-"] * summed(k, other, negative, negative) / n**2
        found[k, other] += grow[""] * summed(k, other, positive, negative) / (m * n)
        found[k, other] += grow[""] * summed(k, other, negative, positive) / (m * n)
    return areas, found


def test_the_worked_example_of_the_published_implementation() -> None:
    """Compare with figures of ``compare_auc_delong_xu.py`` (yandexdataschool/roc_comparison), to six digits."""
    areas, covariance = delong(TRUTH, SCORES)
    assert areas == pytest.approx([0.791667, 0.708333], abs=1e-6)
    assert covariance == pytest.approx(np.array([[0.049769, 0.020833], [0.020833, 0.059028]]), abs=1e-6)


def test_the_worked_example_by_patient() -> None:
    _, covariance = delong(TRUTH, SCORES, CASES)
    assert covariance == pytest.approx(np.array([[0.083526, -0.010995], [-0.010995, 0.044946]]), abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("patients", [None, 17])
def test_delong_is_what_two_other_implementations_give(seed: int, patients: int | None) -> None:
    random = np.random.default_rng(seed)
    truth = random.random(60) < 0.3
    scores = np.round(random.random((3, 60)) + 0.4 * truth, 1 if seed % 2 else 6)  # with ties, and without
    cases = np.arange(60) if patients is None else random.integers(0, patients, 60)
    areas, covariance = delong(truth, scores, None if patients is None else cases)
    assert areas == pytest.approx([roc_auc_score(truth, own) for own in scores], abs=1e-12)
    of_monai = [compute_roc_auc(torch.from_numpy(own), torch.from_numpy(truth * 1)) for own in scores]
    assert areas == pytest.approx(of_monai, abs=1e-6)
    expected_areas, expected = by_pairs(truth, scores, cases)
    assert areas == pytest.approx(expected_areas, abs=1e-12)
    assert covariance == pytest.approx(expected, abs=1e-12)
    if patients is None:  # of independent images: the covariance of the placements, by numpy
        wins = (scores[:, truth][:, :, None] > scores[:, ~truth][:, None]) * 1.0
        wins += 0.5 * (scores[:, truth][:, :, None] == scores[:, ~truth][:, None])
        plain = np.cov(wins.mean(2)) / truth.sum() + np.cov(wins.mean(1)) / (~truth).sum()
        assert covariance == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_average_precision_is_the_step_sum_of_two_other_implementations(seed: int) -> None:
    """Compare with scikit-learn, which computes the figure, with MONAI, and with the sum over distinct scores."""
    random = np.random.default_rng(seed)
    truth = random.random(80) < 0.25
    scores = np.round(random.random(80) * 0.6 + 0.3 * truth, 1 if seed % 2 else 6)
    found, recall = 0.0, 0.0
    for mark in np.unique(scores)[::-1]:
        told = scores >= mark
        found += (truth[told].sum() / truth.sum() - recall) * truth[told].mean()
        recall = truth[told].sum() / truth.sum()
    assert average_precision_score(truth, scores) == pytest.approx(found, abs=1e-12)
    if not seed % 2:  # MONAI orders ties by index
        of_monai = compute_average_precision(torch.from_numpy(scores), torch.from_numpy(truth * 1))
        assert of_monai == pytest.approx(found, abs=1e-6)


def test_average_precision_of_the_worked_example_has_no_order_of_ties() -> None:
    assert [average_precision_score(TRUTH, own) for own in SCORES] == pytest.approx([0.833333, 0.588889], abs=1e-6)
    assert average_precision_score(TRUTH[::-1], SCORES[0, ::-1]) == pytest.approx(0.833333, abs=1e-6)


def test_intervals_of_the_worked_example() -> None:
    areas, covariance = delong(TRUTH, SCORES)
    assert logit_interval(areas[0], covariance[0, 0]) == pytest.approx((0.211470, 0.981766), abs=1e-6)
    assert area_interval(1.0, 0.0, 3, 4) == pytest.approx((0.539692, 1.0), abs=1e-6)
    assert area_interval(0.791667, 0.049769, 3, 4) == pytest.approx((0.352848, 0.960183), abs=1e-6)
    assert area_interval(0.0, 0.0, 4, 3) == pytest.approx((0.0, 1 - 0.539692), abs=1e-6)
    assert newcombe_end(0.0, 3, 4) == 0.0
    with_many = area_interval(0.8, 0.002, 40, 50)
    assert with_many == pytest.approx(logit_interval(0.8, 0.002))
    # Without scatter there is one all the same, and it is no point.
    low, high = area_interval(1.0, 0.0, 40, 50)
    assert 0.9 < low < high == 1.0


@pytest.mark.parametrize(("positive", "negative"), [(1, 9), (9, 1)])
def test_one_case_on_a_side_has_no_interval(positive: int, negative: int) -> None:
    assert all(map(math.isnan, area_interval(0.8, 0.01, positive, negative)))
    truth = np.array([True] * positive + [False] * negative)
    areas, covariance = delong(truth, np.linspace(0, 1, 10)[None])
    assert np.isfinite(areas).all()
    assert np.isnan(covariance).all()


def test_one_side_alone_has_no_area() -> None:
    areas, covariance = delong(np.ones(4, bool), np.ones((2, 4)))
    assert np.isnan(areas).all()
    assert np.isnan(covariance).all()


def test_intervals_by_patient_hold_where_those_by_image_do_not() -> None:
    """Check 40 patients of three alike images: the interval by patient covers the true area as often as stated."""
    random, inside = np.random.default_rng(3), np.zeros(2)
    true = float(stats.norm.cdf(1 / np.sqrt(2 * 1.0)))
    for _ in range(300):
        truth = np.repeat(np.arange(40) < 20, 3)
        own = np.repeat(random.normal(size=40), 3) * 0.9 + random.normal(size=120) * math.sqrt(1 - 0.81)
        scores, cases = (own + truth)[None], np.repeat(np.arange(40), 3)
        for way, whose in enumerate((cases, None)):
            areas, covariance = delong(truth, scores, whose)
            count = 20 if way == 0 else 60
            low, high = area_interval(float(areas[0]), float(covariance[0, 0]), count, count)
            inside[way] += low <= true <= high
    assert inside[0] / 300 > 0.9
    assert inside[1] / 300 < 0.85


def test_thresholds_of_the_worked_example() -> None:
    truth = np.array([False] * 5 + [True] * 3)
    scores = np.array([0.1, 0.2, 0.3, 0.5, 0.6, 0.4, 0.7, 0.9])
    assert threshold(truth, scores, 0.8, "specificity") == 0.6
    assert threshold(truth, scores, 1.0, "specificity") == 0.7
    assert threshold(truth, scores, 0.6, "sensitivity") == 0.7
    assert threshold(truth, scores, 1.0, "sensitivity") == 0.4
    assert threshold(truth, np.where(truth, 0.2, 0.9), 0.8, "specificity") == math.inf  # no score is above the 0.9
    assert math.isnan(threshold(np.ones(2, bool), np.ones(2), 0.9, "specificity"))
    assert math.isnan(threshold(np.zeros(2, bool), np.ones(2), 0.9, "sensitivity"))


@pytest.mark.parametrize("seed", range(4))
def test_a_threshold_reaches_its_share_and_the_next_one_does_not(seed: int) -> None:
    random = np.random.default_rng(seed)
    truth, scores = random.random(50) < 0.5, np.round(random.random(50), 1)
    found = threshold(truth, scores, 0.7, "specificity")
    assert (scores[~truth] < found).mean() >= 0.7
    assert all((scores[~truth] < mark).mean() < 0.7 for mark in scores if mark < found)
    found = threshold(truth, scores, 0.7, "sensitivity")
    assert (scores[truth] >= found).mean() >= 0.7
    assert all((scores[truth] >= mark).mean() < 0.7 for mark in scores if mark > found)
