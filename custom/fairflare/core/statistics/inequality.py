"""Test whether a metric differs between sites by more than chance, find these sites, and compute intervals.

Sites are called equal if the test cases of all sites are draws from one distribution. The functions take and return
plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairflare.base import checks
from fairflare.core.statistics.intervals import LEVEL, wilson

DRAWS = 9_999  # number of random deals of one test
WORK = 4_000_000  # largest number of random numbers of one test; with many sites it has fewer deals, at least 999
SEED = 20_260_101  # fixed seed of the random deals, so that equal results give equal figures
MOST_CASES = 10**9 - 1  # largest number of cases that NumPy's sampling accepts
_TIE = 1e-9  # difference through rounding up to which two statistics count as equal

Counts = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


# ------------------------------------------------------------------------------------------------ intervals


def share_interval(right: float, total: float) -> tuple[float, float]:
    """Return Wilson's interval at :data:`LEVEL` for a share: ``right`` of ``total`` cases, total ``>= 1``.

    Source:
        Wilson, Journal of the American Statistical Association 1927.
    """
    checks.number("right", right, low=0, high=checks.number("total", total, low=1))
    _, low, high = wilson(np.array([right], float), np.array([total], float), 1 - LEVEL)[0].tolist()
    return (0.0 if right == 0 else low), (1.0 if right == total else high)


def mean_of_shares_interval(right: Sequence[float], total: Sequence[float]) -> tuple[float, float]:
    r"""Return an interval at :data:`LEVEL` for a mean of independent shares, such as the mean recall of some classes.

    With Wilson's interval from :math:`l_c` to :math:`u_c` of each share :math:`p_c`, the interval of the mean is
    :math:`\bar p - \frac1C \sqrt{\sum (p_c - l_c)^2}` to :math:`\bar p + \frac1C \sqrt{\sum (u_c - p_c)^2}`. The
    interval is not empty even if a class has a single case, which is right.

    Source:
        Zou and Donner, Statistics in Medicine 2008 (method of variance estimates recovery).
    """
    shares = [k / n for k, n in zip(right, total, strict=True)]
    limits = [share_interval(k, n) for k, n in zip(right, total, strict=True)]
    mean = sum(shares) / len(shares)
    below = math.sqrt(sum((p - low) ** 2 for p, (low, _) in zip(shares, limits, strict=True))) / len(shares)
    above = math.sqrt(sum((high - p) ** 2 for p, (_, high) in zip(shares, limits, strict=True))) / len(shares)
    return mean - below, mean + above


def mean_interval(
    value: float, error: float, cases: int, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    r"""Return Student's interval at :data:`LEVEL` around a metric's value; for a bounded metric, on the logit's scale.

    For a bounded metric, with :math:`p = (v - low) / (high - low)`, the interval is symmetric in
    :math:`\log(p / (1 - p))`, whose error is :math:`e / ((high - low)\, p (1 - p))`: scores near a bound are skewed,
    and a symmetric interval misses the truth too often (ten cases of Dice .93: 0.90 in place of 0.95).

    Args:
        value: value of the metric.
        error: standard error of the value over ``cases`` cases.
        cases: number of independent cases.
        low, high: range of the metric; if one of both is infinite, the interval is symmetric around the value and cut
            to the range.

    Returns:
        Lower and upper end. Both are NaN with fewer than two cases, or if the error is 0 or unknown: equal values of
        all cases do not show how much further cases would differ.

    Source:
        Agresti, Categorical Data Analysis, 2002, chapter 1 (intervals by transforming, delta method).
    """
    if cases < 2 or not error > 0 or not math.isfinite(error):
        return math.nan, math.nan
    from scipy.special import expit, logit, stdtrit

    half = float(stdtrit(cases - 1, 0.5 + LEVEL / 2)) * error
    if not (math.isfinite(low) and math.isfinite(high) and low < value < high):
        return max(low, value - half), min(high, value + half)
    share = (value - low) / (high - low)
    middle, half = float(logit(share)), half / ((high - low) * share * (1 - share))
    ends = [low + (high - low) * float(expit(middle + end)) for end in (-half, half)]
    return ends[0], ends[1]


# ------------------------------------------------------------------------------------------------ tests


@dataclass(frozen=True)
class Compared:
    """Store how sites compare with equal sites that differ by chance alone; arrays are in the order of the sites.

    Attributes:
        p_value: probability that equal sites are at least as unequal as these sites, by the sum of squared standardised
            deviations.
        expected: value that each site would have on average if the sites were equal (with the site's own classes and
            numbers of cases).
        p_sites: for each site the probability that any of equal sites is as far from its expectation, in standard
            errors, as this site is; corrected for testing all sites.
        chance_std: mean standard deviation (population) between equal sites.
        chance_gap: mean distance by which the worst of equal sites is worse than its expectation.
    """

    p_value: float
    expected: Numbers
    p_sites: Numbers
    chance_std: float
    chance_gap: float


def permutation_test(
    counts: Sequence[Counts], scores: Sequence[Sequence[float]], weights: Numbers, *,
    higher_is_better: bool = True, draws: int = DRAWS,
) -> Compared:  # fmt: skip
    r"""Compare the sites' values with those after random deals of each class's cases, with unchanged numbers per site.

    The value of site s is :math:`v_s = \sum_c w_{sc} \bar x_{sc}`, where :math:`\bar x_{sc}` is the mean score of its
    cases of class c. With :math:`e_s` and :math:`\sigma_s` its mean and variance over the deals, the sites' inequality
    is :math:`\sum_s (v_s - e_s)^2 / \sum_c w_{sc}^2 s_c^2 / n_{sc}` (of one class, right and wrong: Pearson's
    chi-squared) and a site's is :math:`|v_s - e_s| / \sigma_s`, compared with the largest of every deal.

    Args:
        counts: number of cases of each site by score, one array (sites, bins) for each class; whole numbers ``>= 0``.
        scores: score of each bin, one sequence for each class.
        weights: w, weight of each class in each site's value, (sites, classes); 0 if a site has no case of a class.
        higher_is_better: whether a higher value of the metric is better.
        draws: number of random deals; fewer are made if they would take more than :data:`WORK` random numbers.

    Raises:
        ValueError: there are fewer than two sites, shapes do not fit, or a class has more than :data:`MOST_CASES`
            cases.

    Source:
        Pesarin, Multivariate Permutation Tests, 2001 (strata); Westfall and Young, 1993 (the largest of each deal).
    """
    sites = len(weights)
    checks.whole("the number of sites", sites, low=2)
    values, expected = np.zeros(sites), np.zeros(sites)
    within, between = np.zeros(sites), np.zeros(sites)
    draws = min(draws, max(WORK // (sites * max(1, sum(len(marks) for marks in scores))), 999))
    dealt = np.zeros((draws, sites))
    generator = np.random.default_rng(SEED)
    for index, (table, marks) in enumerate(zip(counts, scores, strict=True)):
        sizes, total = table.sum(1), int(table.sum())
        points, share = np.asarray(marks, np.float64), weights[:, index]
        if table.shape != (sites, len(points)) or (table < 0).any() or (share[sizes == 0] != 0).any():
            raise ValueError("counts, scores and weights do not fit together")
        if not total:
            continue
        if total > MOST_CASES:
            raise ValueError(f"a class has {total} cases, more than {MOST_CASES}")
        part = np.divide(share, sizes, out=np.zeros(sites), where=sizes > 0)  # weight of a case in its site's value
        mean = float(points @ table.sum(0)) / total
        variance = float(np.square(points - mean) @ table.sum(0)) / total
        values += part * (table @ points)
        expected += part * sizes * mean
        within += part**2 * sizes * variance
        between += part**2 * sizes * variance * (total - sizes) / max(total - 1, 1)
        dealt += part * _dealt(generator, sizes, table.sum(0), points, draws)
    return _compared(
        values, expected, within, np.sqrt(between), (dealt, expected, within, np.sqrt(between)), higher_is_better
    )


def _dealt(generator: np.random.Generator, sizes: Counts, bins: Counts, points: Numbers, draws: int) -> Numbers:
    """Return the summed scores of the cases that each site is dealt, (draws, sites), by drawing tables bin by bin."""
    free = np.tile(sizes, (draws, 1))  # cases of each site that are not dealt yet
    sums = np.zeros(free.shape)
    for count, point in zip(bins, points, strict=True):
        left, others = np.full(draws, count), free.sum(1)
        for site in range(len(sizes)):
            if not left.any():
                break
            others -= free[:, site]
            taken = generator.hypergeometric(free[:, site], others, left)
            free[:, site] -= taken
            left -= taken
            sums[:, site] += taken * point
    return sums


def errors_test(
    values: Sequence[float], errors: Sequence[float], cases: Sequence[int], *,
    higher_is_better: bool = True, draws: int = DRAWS,
) -> Compared:  # fmt: skip
    r"""Compare sites by their standard errors, for metrics that are not made of single cases (AUC).

    The statistic is Cochran's :math:`Q = \sum_s (v_s - \bar v)^2 / e_s^2` around the mean weighted by
    :math:`1 / e_s^2`. Its chance distribution is simulated, since a chi-squared distribution would ignore that errors
    are estimates: values are drawn from a normal distribution with these errors, and errors as estimated from so few
    cases.

    Args:
        values, errors: value of the metric and its standard error, ``> 0``, for each site.
        cases: number of independent cases from which each error is estimated, ``>= 2``.
        higher_is_better: whether a higher value of the metric is better.
        draws: number of simulated draws.

    Raises:
        ValueError: fewer than two sites, or an error or number of cases out of range.

    Source:
        Cochran, Biometrics 1954; Krishnamoorthy, Lu and Mathew, Computational Statistics and Data Analysis 2007.
    """
    checks.whole("the number of sites", len(values), low=2)
    for error, count in zip(errors, cases, strict=True):
        checks.number("standard error", error, above=0)
        checks.whole("cases", count, low=2)
    found, scale = np.asarray(values, np.float64), np.asarray(errors, np.float64)
    freedom = np.asarray(cases, np.float64) - 1
    generator = np.random.default_rng(SEED)
    drawn = generator.standard_normal((draws, len(found))) * scale
    scales = scale * np.sqrt(generator.chisquare(freedom, (draws, len(found))) / freedom)
    middle = _weighted_mean(found, scale)
    return _compared(
        found, middle, scale**2, _own_error(scale),
        (drawn, _weighted_mean(drawn, scales), scales**2, _own_error(scales)), higher_is_better,
    )  # fmt: skip


def _weighted_mean(values: Numbers, errors: Numbers) -> Numbers:
    weights = 1 / errors**2
    mean: Numbers = (values * weights).sum(-1, keepdims=True) / weights.sum(-1, keepdims=True)
    return np.broadcast_to(mean, values.shape)


def _own_error(errors: Numbers) -> Numbers:
    """Return the standard errors of the sites' values minus the weighted mean, which includes the value itself."""
    return np.asarray(np.sqrt(np.maximum(errors**2 - 1 / (1 / errors**2).sum(-1, keepdims=True), 0)))


def _compared(
    values: Numbers, expected: Numbers, within: Numbers, errors: Numbers,
    chance: tuple[Numbers, Numbers, Numbers, Numbers], higher: bool,
) -> Compared:  # fmt: skip
    """Compare the sites' values with values that were drawn by chance.

    Both are given as values, expected values, variances for the sum of squares, and standard errors for single sites.
    """
    dealt, middle = chance[0], chance[1]
    inequality, single = _statistics(values, expected, within, errors)
    sums, singles = _statistics(*chance)
    largest = singles.max(1)
    draws = len(dealt)
    p_value = (1 + int((sums >= inequality * (1 - _TIE) - _TIE).sum())) / (draws + 1)
    p_sites = [(1 + int((largest >= own * (1 - _TIE) - _TIE).sum())) / (draws + 1) for own in single]
    behind = (middle - dealt) * (1 if higher else -1)
    return Compared(
        p_value, np.array(expected), np.array(p_sites), float(dealt.std(1).mean()), float(behind.max(1).mean())
    )


def _statistics(values: Numbers, expected: Numbers, within: Numbers, errors: Numbers) -> tuple[Numbers, Numbers]:
    """Return the sum of squared deviations, and each site's deviation in standard errors (0 if its error is 0)."""
    off = values - expected
    squares = np.divide(off**2, within, out=np.zeros_like(off), where=np.broadcast_to(within > 0, off.shape))
    moves = np.broadcast_to(errors > 1e-12, off.shape)
    return squares.sum(-1), np.divide(np.abs(off), errors, out=np.zeros_like(off), where=moves)
