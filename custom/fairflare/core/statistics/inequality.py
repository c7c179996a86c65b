"""Test whether a metric differs between sites by more than chance, find these sites, and compute intervals.

Sites are called equal if the test cases of all sites are draws from one distribution. The functions take and return
plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairflare.base import checks
from fairflare.core.statistics.intervals import LEVEL, Array, wilson

DRAWS = 9_999  # number of random deals of one test
WORK = 4_000_000  # largest number of random numbers of one test; with many sites it has fewer deals, at least 999
SEED = 20_260_101  # fixed seed of the random deals, so that equal results give equal figures
MOST_CASES = 10**9 - 1  # largest number of cases that NumPy's sampling accepts
_TIE = 1e-9  # difference through rounding up to which two statistics count as equal

Counts = npt.NDArray[np.int64]


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
    below, above = (
        math.sqrt(sum((p - ends[side]) ** 2 for p, ends in zip(shares, limits, strict=True))) / len(shares)
        for side in (0, 1)
    )
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
    from scipy.special import stdtrit

    reach = float(stdtrit(cases - 1, 0.5 + LEVEL / 2)) * error
    if not (math.isfinite(low) and math.isfinite(high) and low < value < high):
        return max(low, value - reach), min(high, value + reach)
    middle, reach = (float(part) for part in _logits(np.asarray(value), np.asarray(reach), low, high))
    bottom, top = _values_of_logits(np.array([middle - reach, middle + reach]), low, high).tolist()
    return bottom, top


def _logits(values: Array, errors: Array, low: float, high: float) -> tuple[Array, Array]:
    """Return the logits of values as shares of a range, and the logits' standard errors by the delta method."""
    from scipy.special import logit

    shares = (values - low) / (high - low)
    return logit(shares), errors / ((high - low) * shares * (1 - shares))


def _values_of_logits(logits: Array, low: float, high: float) -> Array:
    """Return the values in a range whose shares of it have these logits."""
    from scipy.special import expit

    return np.asarray(low + (high - low) * expit(logits))


# ------------------------------------------------------------------------------------------------ tests


@dataclass(frozen=True)
class SitesCompared:
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
    expected: Array
    p_sites: Array
    chance_std: float
    chance_gap: float


def permutation_test(
    right: Counts, total: Counts, weights: Array, *, higher_is_better: bool = True, draws: int = DRAWS
) -> SitesCompared:
    r"""Compare the sites' shares with those after random deals of each class's cases, with unchanged numbers per site.

    The value of site s is :math:`v_s = \sum_c w_{sc} \bar x_{sc}`, where :math:`\bar x_{sc}` is the share of its cases
    of class c that are right. With :math:`e_s` and :math:`\sigma_s` its mean and variance over the deals, the sites'
    inequality is :math:`\sum_s (v_s - e_s)^2 / \sum_c w_{sc}^2 s_c^2 / n_{sc}` (of one class: Pearson's chi-squared)
    and a site's is :math:`|v_s - e_s| / \sigma_s`, compared with the largest of every deal.

    Args:
        right: number of right cases, (sites, classes).
        total: number of all cases, (sites, classes).
        weights: w, weight of each class in each site's value, (sites, classes); 0 if a site has no case of a class.
        higher_is_better: whether a higher value of the metric is better.
        draws: number of random deals; fewer are made if they would take more than :data:`WORK` random numbers.

    Raises:
        ValueError: there are fewer than two sites, the arrays do not fit together, or a class has more than
            :data:`MOST_CASES` cases.

    Source:
        Pesarin, Multivariate Permutation Tests, 2001 (strata); Westfall and Young, 1993 (the largest of each deal).
    """
    checks.whole("the number of sites", len(weights), low=2)
    if not right.shape == total.shape == weights.shape or (right < 0).any() or weights[total == 0].any():
        raise ValueError("right, total and weights do not fit together")
    checks.number("cases of a class", int(total.sum(0).max()), high=MOST_CASES)
    cases, hits, part = total.sum(0), right.sum(0), weights / np.maximum(total, 1)  # part: a case's weight in its site
    mean = hits / np.maximum(cases, 1)
    within = part**2 * total * mean * (1 - mean)
    errors = np.sqrt((within * (cases - total) / np.maximum(cases - 1, 1)).sum(1))
    generator, many = np.random.default_rng(SEED), min(draws, max(WORK // (2 * total.size), 999))
    dealt = sum(
        part[:, c] * generator.multivariate_hypergeometric(total[:, c], hits[c], many) for c in range(len(cases))
    )
    equal = weights @ mean, within.sum(1), errors
    return _compare((part * right).sum(1), *equal, (np.asarray(dealt), *equal), higher_is_better)


def scores_test(
    counts: Counts, scores: Sequence[float], *, higher_is_better: bool = True, draws: int = DRAWS
) -> SitesCompared:
    r"""Compare the sites' mean scores with those after random deals of all cases, each in its own standard errors.

    Sites may have equal means and unequal scatter; then the deals alone would call a site with few, scattered cases
    unequal in up to 15 of 100 runs. The statistics of :func:`errors_test` are therefore computed from the cases of each
    deal as from the sites' own: on the logit's scale, with the variance :math:`s^2 = (\sum (x - \bar x)^2 + \sigma^2 /
    2) / (n - 1/2)`, where :math:`\sigma^2` is the variance of all cases; so the variance of few equal scores is not 0.

    Args:
        counts: number of cases by site and score, (sites, bins); whole numbers ``>= 0``, of each site at least one.
        scores: score of each bin, in (0, 1).
        higher_is_better: whether a higher value of the metric is better.
        draws: number of random deals; fewer are made if they would take more than :data:`WORK` random numbers.

    Raises:
        ValueError: there are fewer than two sites, a site has no case, or all have more than :data:`MOST_CASES`.

    Source:
        Janssen, Statistics and Probability Letters 1997; Chung and Romano, Annals of Statistics 2013 (studentised
        permutation tests).
    """
    checks.whole("the number of sites", len(counts), low=2)
    sizes, bins = counts.sum(1), counts.sum(0)
    checks.whole("cases of a site", int(sizes.min()))
    checks.number("cases of all sites", total := int(sizes.sum()), high=MOST_CASES)
    powers = np.stack([np.asarray(scores, np.float64), np.square(scores)])
    mean, square = powers @ bins / total

    def compare_logits(sums: Array) -> tuple[Array, Array]:
        means = sums[0] / sizes
        variance = (sums[1] - sizes * means**2 + (square - mean**2) / 2) / (sizes - 0.5)
        return _logits(means, np.sqrt(np.maximum(variance, _TIE) / sizes), 0, 1)

    return _compare_with_errors(
        compare_logits(powers @ counts.T),
        compare_logits(_deal(sizes, bins, powers, min(draws, max(WORK // counts.size, 999)))),
        (0, 1),
        higher_is_better,
    )


def _deal(sizes: Counts, bins: Counts, points: Array, draws: int) -> Array:
    """Return the summed scores of the cases that each site is dealt, by drawing tables bin by bin.

    ``points``: (kinds, bins), of each kind of score; the result is (kinds, draws, sites).
    """
    generator, free = np.random.default_rng(SEED), np.tile(sizes, (draws, 1))  # cases of a site that are not dealt yet
    sums = np.zeros((len(points), *free.shape))
    for count, point in zip(bins, points.T, strict=True):
        left, others = np.full(draws, count), free.sum(1)
        for site in range(len(sizes)):
            if not left.any():
                break
            others -= free[:, site]
            taken = generator.hypergeometric(free[:, site], others, left)
            free[:, site] -= taken
            left -= taken
            sums[:, :, site] += np.multiply.outer(point, taken)
    return sums


def errors_test(
    values: Sequence[float], errors: Sequence[float], cases: Sequence[int], *,
    low: float = -math.inf, high: float = math.inf, higher_is_better: bool = True, draws: int = DRAWS,
) -> SitesCompared:  # fmt: skip
    r"""Compare sites by their standard errors, for metrics that are not made of single cases (AUC).

    The statistic is Cochran's :math:`Q = \sum_s (v_s - \bar v)^2 / e_s^2` around the mean weighted by
    :math:`1 / e_s^2`; a site's is its distance to this mean in standard errors. Their chance distribution is simulated,
    since a chi-squared distribution would ignore that errors are estimates: values are drawn from a normal distribution
    with these errors, and errors as estimated from so few cases, with half of their degrees of freedom if the metric
    has no range, since losses are skewed. Values of a bounded metric are compared by their logits, as in
    :func:`mean_interval`: the error of an area that is near 1 by chance is small by chance, so that such a site would
    seem ahead (in up to 12 of 100 runs of equal sites).

    Args:
        values, errors: value of the metric and its standard error, ``> 0``, for each site.
        cases: number of independent cases from which each error is estimated, ``>= 2``.
        low, high: range of the metric; values are compared as they are if an end is infinite, or a value is at an end.
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
    measured, scale = np.asarray(values, np.float64), np.asarray(errors, np.float64)
    ends = (low, high) if math.isfinite(high - low) and low < measured.min() and measured.max() < high else None
    if ends:
        measured, scale = _logits(measured, scale, *ends)
    freedom = (np.asarray(cases, np.float64) - 1) / (1 if ends else 2)
    generator = np.random.default_rng(SEED)
    drawn = _weighted_mean(measured, scale) + generator.standard_normal((draws, len(measured))) * scale
    scales = scale * np.sqrt(generator.chisquare(freedom, (draws, len(measured))) / freedom)
    return _compare_with_errors((measured, scale), (drawn, scales), ends, higher_is_better)


def _compare_with_errors(
    sites: tuple[Array, Array], chance: tuple[Array, Array], ends: tuple[float, float] | None, higher: bool
) -> SitesCompared:
    """Compare the sites' values and standard errors with those that were drawn; both are logits if ``ends`` are given.

    ``ends``: ends of the metric's range. The error of a site's distance to the weighted mean is smaller than that of
    its value, which is a part of the mean.
    """
    statistics_of_sites, drawn = (
        (part, _weighted_mean(part, error), error**2, np.sqrt(np.maximum(error**2 - _variance_of_mean(error), 0)))
        for part, error in (sites, chance)
    )
    return _compare(
        *statistics_of_sites, drawn, higher, lambda values: _values_of_logits(values, *ends) if ends else values
    )


def _weighted_mean(values: Array, errors: Array) -> Array:
    return np.broadcast_to((values / errors**2).sum(-1, keepdims=True) * _variance_of_mean(errors), values.shape)


def _variance_of_mean(errors: Array) -> Array:
    """Return the variance of the mean weighted by ``1 / errors**2``."""
    return np.asarray(1 / (1 / errors**2).sum(-1, keepdims=True))


def _compare(
    values: Array, expected: Array, within: Array, errors: Array,
    chance: tuple[Array, Array, Array, Array], higher: bool, back: Callable[[Array], Array] = np.asarray,
) -> SitesCompared:  # fmt: skip
    """Compare the sites' values with values that were drawn by chance.

    Both are given as values, expected values, variances for the sum of squares, and standard errors for single sites.
    ``back`` turns values into those of the metric.
    """
    inequality, single = _statistics(values, expected, within, errors)
    sums, singles = _statistics(*chance)
    largest, dealt = singles.max(1), back(chance[0])
    behind = (back(chance[1]) - dealt) * (1 if higher else -1)
    return SitesCompared(
        _p_value(sums, inequality), back(expected),
        np.array([_p_value(largest, distance) for distance in single]),
        float(dealt.std(1).mean()), float(behind.max(1).mean()),
    )  # fmt: skip


def _p_value(drawn: Array, measured: Array | float) -> float:
    """Return the share of drawn statistics that are at least as large as the measured one, which counts as drawn."""
    return (1 + int((drawn >= measured * (1 - _TIE) - _TIE).sum())) / (len(drawn) + 1)


def _statistics(values: Array, expected: Array, within: Array, errors: Array) -> tuple[Array, Array]:
    """Return the sum of squared deviations, and each site's deviation in standard errors (0 if its error is 0)."""
    off = values - expected
    squares, distances = (
        np.divide(over, under, out=np.zeros_like(off), where=np.broadcast_to(under > least, off.shape))
        for over, under, least in ((off**2, within, 0), (np.abs(off), errors, 1e-12))
    )
    return squares.sum(-1), distances
