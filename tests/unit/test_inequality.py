"""Test intervals of sites, and whether they differ by more than chance: against scipy, enumeration and simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from fairflare.base.cases.sampling import BINS, case_scores, jackknife, report_mean, standard_error
from fairflare.core.statistics.inequality import (
    SitesCompared,
    errors_test,
    mean_interval,
    mean_of_shares_interval,
    permutation_test,
    scores_test,
    share_interval,
)

MIDDLES = ((np.arange(BINS) + 0.5) / BINS).tolist()
Numbers = npt.NDArray[np.floating]


def of_shares(right: list[int], total: list[int], **more: int) -> SitesCompared:
    return permutation_test(np.array(right)[:, None], np.array(total)[:, None], np.ones((len(right), 1)), **more)


# ------------------------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize(("right", "total"), [(0, 5), (5, 5), (1, 1), (7, 9), (180, 200)])
def test_a_share_has_wilsons_interval(right: int, total: int) -> None:
    expected = stats.binomtest(right, total).proportion_ci(method="wilson")
    assert share_interval(right, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_mean_of_shares_by_hand() -> None:
    (l1, u1), (l2, u2) = ((c.low, c.high) for c in (
        stats.binomtest(k, n).proportion_ci(method="wilson") for k, n in ((3, 4), (50, 80))
    ))  # fmt: skip
    low, high = mean_of_shares_interval([3, 50], [4, 80])
    assert low == pytest.approx(0.6875 - 0.5 * math.hypot(0.75 - l1, 0.625 - l2))
    assert high == pytest.approx(0.6875 + 0.5 * math.hypot(u1 - 0.75, u2 - 0.625))


def test_students_interval_and_where_there_is_none() -> None:
    scores = np.array([0.5, 0.7, 0.9, 0.8])
    expected = stats.t.interval(0.95, 3, scores.mean(), stats.sem(scores))
    assert mean_interval(scores.mean(), stats.sem(scores), 4) == pytest.approx(expected)
    # With a range: odds times and divided by the same factor, whose logarithm is t error / (p (1 - p)).
    low, high = mean_interval(0.9, 0.02, 4, 0, 1)
    factor = math.exp(stats.t.ppf(0.975, 3) * 0.02 / 0.09)
    assert (low / (1 - low), high / (1 - high)) == pytest.approx((9 / factor, 9 * factor))
    assert mean_interval(90, 2, 4, 0, 100) == pytest.approx((100 * low, 100 * high))
    assert mean_interval(2.0, 1.0, 4, 0, math.inf)[0] == 0.0
    assert mean_interval(1.0, 0.1, 4, 0, 1)[1] == 1.0
    for error, cases in ((0.1, 1), (0.0, 5), (math.nan, 5)):
        assert all(math.isnan(end) for end in mean_interval(0.5, error, cases))


# ------------------------------------------------------------------------------------------------ at a site


def test_the_standard_error_of_a_mean() -> None:
    scores = np.array([0.2, 0.9, 0.4, 0.7, 0.7])
    assert standard_error((scores - scores.mean()) / 5) == pytest.approx(stats.sem(scores))
    # Two images each of two patients, and one of a third: sums within patients, by hand.
    u = (scores - scores.mean()) / 5
    sums = [u[0] + u[2], u[1] + u[4], u[3]]
    assert standard_error(u, ["a", "b", "a", "c", "b"]) == pytest.approx(math.sqrt(1.5 * sum(s * s for s in sums)))
    assert math.isnan(standard_error(u, ["a"] * 5))
    with pytest.raises(ValueError, match="2 cases are named for 5 images"):
        standard_error(u, ["a", "b"])


def test_the_jackknife_of_an_area_without_each_case() -> None:
    generator = np.random.default_rng(0)
    truth, score = generator.integers(0, 2, 30), generator.random(30)
    cases = np.repeat(np.arange(15), 2)

    def area(kept: Numbers) -> float:
        return float(roc_auc_score(truth[kept], score[kept]))

    without = [area(np.array([i for i in range(30) if cases[i] != own])) for own in range(15)]
    expected = math.sqrt(14 / 15 * sum((m - np.mean(without)) ** 2 for m in without))
    assert jackknife(area, 30, cases.tolist()) == pytest.approx(expected)
    assert jackknife(lambda kept: float(score[kept].mean()), 30) == pytest.approx(stats.sem(score))


def test_many_cases_are_left_out_in_groups() -> None:
    score = np.random.default_rng(0).random(2000)
    asked: list[int] = []

    def mean(kept: npt.NDArray[np.int64]) -> float:
        asked.append(len(kept))
        return float(score[kept].mean())

    assert jackknife(mean, 2000) == pytest.approx(stats.sem(score), rel=0.2)
    assert asked == [1980] * 100


def test_cases_are_counted_by_their_mean_score() -> None:
    scores = np.array([0.0, 0.049, 0.05, 0.5, 0.999, 1.0])
    assert case_scores(scores, None, 0, 1) == np.histogram(scores, BINS, (0, 1))[0].tolist()
    assert case_scores(np.array([0.0, 1.0, 0.3]), ["a", "a", "b"], 0, 1) == [int(b in (10, 6)) for b in range(BINS)]
    assert sum(case_scores(np.array([-3.0, 30.0]), None, 0, 10)) == 2
    with pytest.raises(ValueError, match="finite"):
        case_scores(scores, None, 0, math.inf)


def test_what_a_site_says_of_a_mean() -> None:
    said = report_mean([0.5, math.nan, 0.7, 0.9], ["a", "b", "c", "c"], 0, 1)
    assert said["test_cases"] == 2  # b has no image that counts
    assert sum(said["case_scores"]) == 2
    assert "standard_error" not in report_mean([0.5], None, 0, 1)
    assert "case_scores" not in report_mean([0.5, 3.0], None, 0, math.inf)
    assert report_mean([math.nan], None, 0, 1) == {}


# ------------------------------------------------------------------------------------------------ the tests


def test_two_sites_exactly_by_the_hypergeometric_distribution() -> None:
    right, total = [9, 4], [12, 11]
    law = stats.hypergeom(sum(total), sum(right), total[0])
    off = abs(right[0] - law.mean())
    exact = sum(law.pmf(k) for k in range(13) if abs(k - law.mean()) >= off - 1e-9)
    found = of_shares(right, total)
    assert found.p_value == pytest.approx(exact, abs=0.012)
    assert found.p_sites == pytest.approx([exact, exact], abs=0.012)
    pooled = 13 / 23
    assert found.expected == pytest.approx([pooled, pooled])
    spread = sum(law.pmf(k) * np.std([k / 12, (13 - k) / 11]) for k in range(13) if 13 - k <= 11)
    assert found.chance_std == pytest.approx(spread, abs=0.003)


def test_three_sites_of_unequal_size_exactly() -> None:
    """Check each site's deviation in its own standard errors, which depend on the other sites' sizes too."""
    sizes, right = [20, 5, 4], [17, 2, 3]
    law = stats.multivariate_hypergeom(sizes, sum(right))
    mean, sd = law.mean() / sizes, np.sqrt(np.diag(law.cov())) / sizes
    deals = [(a, b, 22 - a - b) for a in range(21) for b in range(6) if 0 <= 22 - a - b <= 4]
    weights = np.array([law.pmf(d) for d in deals])
    single = np.abs(np.array(deals) / sizes - mean) / sd
    pooled = 22 / 29
    sums = ((np.array(deals) / sizes - mean) ** 2 * sizes / (pooled * (1 - pooled))).sum(1)
    seen = deals.index(tuple(right))
    found = of_shares(right, sizes, draws=40_000)
    for site in range(3):
        exact = weights[single.max(1) >= single[seen, site] - 1e-9].sum()
        assert found.p_sites[site] == pytest.approx(exact, abs=0.008)
    assert found.p_value == pytest.approx(weights[sums >= sums[seen] - 1e-9].sum(), abs=0.008)


def test_two_classes_exactly_by_enumeration() -> None:
    """Check permutations within classes: a site's number of each class does not change."""
    sizes, right = np.array([[8, 3], [6, 9]]), np.array([[7, 0], [5, 6]])
    laws = [stats.hypergeom(sizes[:, c].sum(), right[:, c].sum(), sizes[0, c]) for c in range(2)]
    totals = right.sum(0)

    def values(a: int, b: int) -> tuple[float, float]:
        return (a / 8 + b / 3) / 2, ((totals[0] - a) / 6 + (totals[1] - b) / 9) / 2

    every = [(values(a, b), laws[0].pmf(a) * laws[1].pmf(b)) for a, b in itertools.product(range(9), range(4))]
    every = [(v, p) for v, p in every if p > 0]
    mean = [sum(v[s] * p for v, p in every) for s in range(2)]
    sd = [math.sqrt(sum((v[s] - mean[s]) ** 2 * p for v, p in every)) for s in range(2)]
    seen = values(7, 0)

    def largest(v: tuple[float, ...]) -> float:
        return max(abs(v[s] - mean[s]) / sd[s] for s in range(2))

    found = permutation_test(right, sizes, np.full((2, 2), 0.5))
    assert found.expected == pytest.approx(mean)
    for s in range(2):
        exact = sum(p for v, p in every if largest(v) >= abs(seen[s] - mean[s]) / sd[s] - 1e-9)
        assert found.p_sites[s] == pytest.approx(exact, abs=0.015)
    gap = sum(max(mean[s] - v[s] for s in range(2)) * p for v, p in every)
    assert found.chance_gap == pytest.approx(gap, abs=0.003)


def test_scores_as_scipys_permutation_test() -> None:
    generator = np.random.default_rng(3)
    own = [np.round(generator.beta(8, 2, n) * 20 - 0.5).clip(0, 19) for n in (9, 12, 15)]
    own[1] = (own[1] - 3).clip(0)
    variance = (np.concatenate(own) / BINS).var()

    def statistic(*of: Numbers) -> float:
        """Return Cochran's Q of logits, with variances of half a case more that has the scatter of all."""
        means, squares = [], []
        for x in ((scores + 0.5) / BINS for scores in of):
            mean = x.mean()
            scatter = (np.square(x - mean).sum() + variance / 2) / (len(x) - 0.5)
            means.append(math.log(mean / (1 - mean)))
            squares.append(scatter / len(x) / (mean * (1 - mean)) ** 2)
        middle = np.average(means, weights=1 / np.array(squares))
        return float((np.square(np.array(means) - middle) / squares).sum())

    expected = stats.permutation_test(
        own, statistic, n_resamples=4000, alternative="greater", random_state=0, vectorized=False
    )
    counts = np.stack([np.bincount(x.astype(int), minlength=BINS) for x in own])
    found = scores_test(counts, MIDDLES)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.02)


def test_the_errors_test_of_many_cases_is_cochrans_q() -> None:
    values, errors = [0.81, 0.74, 0.9, 0.83], [0.03, 0.05, 0.04, 0.02]
    weights = 1 / np.square(errors)
    middle = np.average(values, weights=weights)
    q = float((weights * (np.array(values) - middle) ** 2).sum())
    found = errors_test(values, errors, [10**6] * 4)
    assert found.p_value == pytest.approx(stats.chi2.sf(q, 3), abs=0.012)
    assert found.expected == pytest.approx([middle] * 4)
    # With two cases an error is known so badly that the same figures show nothing.
    assert errors_test(values, errors, [2] * 4).p_value > 2 * found.p_value


def test_areas_near_one_are_compared_by_their_logits() -> None:
    """Check against a chi-squared distribution on the logit's scale; and that the range is taken as it is."""
    values, errors = np.array([0.97, 0.9, 0.93, 0.95]), np.array([0.012, 0.03, 0.025, 0.02])
    logits, scaled = np.log(values / (1 - values)), errors / (values * (1 - values))
    middle = np.average(logits, weights=1 / scaled**2)
    found = errors_test(values.tolist(), errors.tolist(), [10**6] * 4, low=0, high=1)
    assert found.p_value == pytest.approx(stats.chi2.sf((((logits - middle) / scaled) ** 2).sum(), 3), abs=0.012)
    assert found.expected == pytest.approx([1 / (1 + math.exp(-middle))] * 4)
    percent = errors_test((10 + 90 * values).tolist(), (90 * errors).tolist(), [10**6] * 4, low=10, high=100)
    assert percent.p_value == found.p_value
    assert percent.expected == pytest.approx(10 + 90 * found.expected)
    assert percent.chance_std == pytest.approx(90 * found.chance_std)
    at_the_end = errors_test([1.0, 0.9], [0.01, 0.03], [50, 50], low=0, high=1)
    assert at_the_end.p_value == errors_test([1.0, 0.9], [0.01, 0.03], [50, 50]).p_value


def test_a_small_scattered_site_is_not_called_behind_for_its_scatter() -> None:
    """Check one site of eight cases, far more scattered than the others, whose deals would have its spread."""
    steady = np.zeros(BINS, int)
    steady[15:18] = (10, 10, 10)
    wild = np.zeros(BINS, int)
    wild[[5, 6, 12, 19]] = (1, 1, 2, 4)
    found = scores_test(np.stack([steady, steady, wild]), MIDDLES, draws=1999)
    own = (np.array(MIDDLES) @ wild) / 8
    assert own < found.expected[2] - 0.05
    assert found.p_sites[2] > 0.2


@pytest.mark.parametrize("turn", [1, -1])
def test_the_last_of_equal_sites_is_behind_by_chance(turn: int) -> None:
    drawn = np.random.default_rng(0).normal(0, 0.05, (20_000, 5))
    found = errors_test([0.5] * 5, [0.05] * 5, [10**6] * 5, higher_is_better=turn > 0)
    assert found.chance_gap == pytest.approx((drawn.mean(1) - drawn.min(1)).mean(), rel=0.05)
    assert found.chance_std == pytest.approx(drawn.std(1).mean(), rel=0.05)
    # Five of six are right: the site that is dealt the wrong one has 1/2, the others have 1.
    dealt = of_shares([2, 2, 1], [2, 2, 2], higher_is_better=turn > 0)
    assert dealt.chance_gap == pytest.approx(5 / 6 - 1 / 2 if turn > 0 else 1 - 5 / 6)


def test_classes_do_not_make_a_site_the_worst() -> None:
    """Check one classifier at all sites; one site alone has no case of the class that it does badly."""
    sizes = np.array([[200, 200, 200], [200, 200, 0], [200, 200, 200]])
    right = np.array([[180, 160, 80], [180, 160, 0], [180, 160, 80]])
    weights = (sizes > 0) / (sizes > 0).sum(1, keepdims=True)
    found = permutation_test(right, sizes, weights)
    assert found.expected == pytest.approx([0.7, 0.85, 0.7])
    assert found.p_value > 0.99


def test_where_chance_moves_nothing_nothing_is_shown() -> None:
    found = of_shares([5, 7], [5, 7])
    assert (found.p_value, found.p_sites.tolist(), found.chance_std) == (1.0, [1.0, 1.0], 0.0)


def test_the_same_figures_every_time_and_whatever_the_order() -> None:
    first, second = of_shares([9, 4, 7], [12, 11, 10]), of_shares([9, 4, 7], [12, 11, 10])
    assert (first.p_value, first.chance_std) == (second.p_value, second.chance_std)
    assert of_shares([7, 9, 4], [10, 12, 11]).p_value == pytest.approx(first.p_value, abs=0.02)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the number of sites"):
        of_shares([1], [2])
    with pytest.raises(ValueError, match="do not fit together"):
        permutation_test(np.array([[2], [0]]), np.array([[3], [0]]), np.ones((2, 1)))
    with pytest.raises(ValueError, match="do not fit together"):
        permutation_test(np.array([[2], [-1]]), np.array([[3], [4]]), np.ones((2, 1)))
    with pytest.raises(ValueError, match=r"^cases of a class.* got 1000000010$"):
        of_shares([1, 2], [10**9, 10])
    with pytest.raises(ValueError, match=r"^cases of all sites.* got 1000000010$"):
        scores_test(np.array([[10**9, 0], [5, 5]]), [0.25, 0.75])
    with pytest.raises(ValueError, match="cases of a site"):
        scores_test(np.array([[0, 0], [5, 5]]), [0.25, 0.75])
    with pytest.raises(ValueError, match="standard error"):
        errors_test([0.5, 0.6], [0.1, 0.0], [5, 5])
    with pytest.raises(ValueError, match="cases"):
        errors_test([0.5, 0.6], [0.1, 0.1], [5, 1])


# ------------------------------------------------------------------------------------------------ size and power

Deal = Callable[[np.random.Generator, float], tuple[SitesCompared, Numbers]]  # with the sites' values


def _shares(generator: np.random.Generator, lag: float) -> tuple[SitesCompared, Numbers]:
    """Draw six sites of unequal size and class mix; the last has a lower recall."""
    sizes = np.array([[20, 10], [60, 5], [15, 15], [40, 20], [10, 30], [30, 30]])
    recalls = np.tile([0.9, 0.6], (6, 1))
    recalls[-1] -= lag
    right = generator.binomial(sizes, recalls)
    return permutation_test(right, sizes, np.full((6, 2), 0.5), draws=399), (right / sizes).mean(1)


def _scores(generator: np.random.Generator, lag: float) -> tuple[SitesCompared, Numbers]:
    """Draw skewed Dice values."""
    own = [generator.beta(9, 1.5, n) for n in (8, 12, 20, 30, 10, 25)]
    own[-1] = own[-1] - lag
    counts = np.array([case_scores(x, None, 0, 1) for x in own])
    return scores_test(counts, MIDDLES, draws=399), np.array([x.mean() for x in own])


def _errors(generator: np.random.Generator, lag: float) -> tuple[SitesCompared, Numbers]:
    """Draw sites of unequal scatter."""
    sizes, sds = (10, 12, 20, 30, 15, 25), (0.05, 0.1, 0.1, 0.2, 0.1, 0.1)
    own = [generator.normal(0.7, sd, n) for n, sd in zip(sizes, sds, strict=True)]
    own[-1] = own[-1] - lag
    means = np.array([x.mean() for x in own])
    return errors_test(means.tolist(), [stats.sem(x) for x in own], sizes, draws=399), means


def _behind(found: SitesCompared, values: Numbers) -> npt.NDArray[np.bool_]:
    return (found.p_sites <= 0.05) & (values < found.expected)


@pytest.mark.many
@pytest.mark.parametrize(("deal", "lag"), [(_shares, 0.4), (_scores, 0.12), (_errors, 0.1)])
def test_equal_sites_are_told_apart_in_one_run_of_twenty_and_a_bad_one_is_found(deal: Deal, lag: float) -> None:
    generator = np.random.default_rng(11)
    equal = [deal(generator, 0.0)[0] for _ in range(600)]
    assert np.mean([found.p_value <= 0.05 for found in equal]) == pytest.approx(0.05, abs=0.027)  # three deviations
    assert 0.02 <= np.mean([found.p_sites.min() <= 0.05 for found in equal]) <= 0.077
    bad, told = zip(*(deal(generator, lag) for _ in range(100)), strict=True)
    assert np.mean([found.p_value <= 0.05 for found in bad]) > 0.8
    assert np.mean([found.p_sites[-1] <= 0.05 for found in bad]) > 0.8
    # The bad one draws the expectation down, so that others may seem ahead; but no other is called behind.
    assert np.mean([_behind(found, values)[:-1].any() for found, values in zip(bad, told, strict=True)]) <= 0.05
