r"""Compute confidence intervals for metrics of groups of people and for gaps between groups, from :mod:`.group_sums`.

The intervals have the confidence level :data:`.intervals.LEVEL`, and their sampling unit is the case (patient). All
images of one case are taken to be alike, so that n images count as :math:`n^2 / \sum_p n_p^2` independent images, where
n_p is the number of images of case p (Kish's effective number). If all cases have equally many images, this is the
number of cases. If images of a case differ, the intervals are wider than necessary. A group of fewer than :data:`FEW`
cases has no interval, nor has a gap in which it takes part.

Shares have Wilson's intervals, areas under the ROC curve DeLong's (on the bins of the histograms), and Dice Student's.
For means over classes or structures only the standard error of each part is known; the standard error of the mean is at
most the mean of the parts' standard errors, which is used. The ends of the interval of a difference d between two
groups follow from the groups' values v, lower ends l and upper ends u (Newcombe's method 10):

.. math:: d - \sqrt{(v_1 - l_1)^2 + (u_2 - v_2)^2}, \quad d + \sqrt{(u_1 - v_1)^2 + (v_2 - l_2)^2}

A gap is the largest of several differences, of each pair of groups in each class. All differences have simultaneous
intervals (Bonferroni); the true gap is no smaller than the largest of the lower ends and no larger than the largest of
the upper ends. A gap whose interval begins at 0 may be chance.

Sources: Wilson, JASA 1927; Newcombe, "Interval estimation for the difference between independent proportions",
Statistics in Medicine 1998; DeLong et al., Biometrics 1988; Zou and Donner, Statistics in Medicine 2008; Kish, Survey
Sampling, 1965.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from fairflare.core.statistics.areas import Ends
from fairflare.core.statistics.group_metrics import images_of, positives
from fairflare.core.statistics.group_sums import (
    CALIBRATION,
    CASES,
    CELLS,
    CONFUSION,
    DICE,
    HISTOGRAM,
    Array,
    Sums,
)
from fairflare.core.statistics.intervals import FEW, LEVEL, wilson

#: Type of a function that maps sums and an error probability to an array (parts, 3): value, lower and upper end of each
#: part (class or structure); NaN if undefined.
Measure: TypeAlias = Callable[[Sums, float], Array]


def interval_over_cases(hits: Array, count: Array, squares: Array, error: float) -> Array:
    """Return the interval of :func:`wilson` for the effective number of independent images, as a case may have several.

    ``squares``: (parts,), the sum over cases of the squared number of images of a case.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = count / squares
    return wilson(hits * factor, count * factor, error)


def _accuracy(sums: Sums, error: float) -> Array:
    count, _, right = sums[CALIBRATION].sum(0)[:, None]
    return interval_over_cases(right, count, sums[CASES][1], error)


def _count_outcomes(sums: Sums) -> tuple[Array, Array]:
    """Return TP, FP, FN and TN of each positive class, and squared image counts of cases with and without the class.

    The shapes are (4, parts) and (2, parts). The squared image counts are summed over the cases.
    """
    wanted = positives(len(sums[CONFUSION]))
    return sums[CONFUSION][wanted].T, sums[CELLS][wanted, :, 1].T


def _sensitivity(sums: Sums, error: float) -> Array:
    (tp, _, fn, _), (squares, _) = _count_outcomes(sums)
    return interval_over_cases(tp, tp + fn, squares, error)


def _odds(sums: Sums, error: float) -> Array:
    """Return the sensitivity of each class with its interval, then the share of false positives of each class."""
    (_, fp, _, tn), (_, squares) = _count_outcomes(sums)
    return np.concatenate([_sensitivity(sums, error), interval_over_cases(fp, fp + tn, squares, error)])


def _test_positives(sums: Sums, error: float) -> Array:
    (tp, fp, fn, tn), _ = _count_outcomes(sums)
    return interval_over_cases(tp + fp, tp + fp + fn + tn, sums[CASES][1], error)


def _auc(sums: Sums, error: float) -> Array:
    """Return the mean area under the ROC curve over the classes that have one, with its interval if areas vary."""
    areas = []
    wanted = positives(len(sums[HISTOGRAM]))
    for (positive, negative), ((_, squares), (_, others)) in zip(
        sums[HISTOGRAM][wanted], sums[CELLS][wanted], strict=True
    ):
        m, n = positive.sum(), negative.sum()
        if not (m > 0 and n > 0):  # the comparison is also False for NaN
            continue
        below = (np.cumsum(negative) - negative / 2) / n  # share of images without the class whose score is lower
        above = 1 - (np.cumsum(positive) - positive / 2) / m
        area = float(positive @ below) / m
        scatter = np.nan
        if (p := m**2 / squares) > 1 and (q := n**2 / others) > 1:  # effective numbers of independent images
            scatter = positive @ (below - area) ** 2 / m / (p - 1) + negative @ (above - area) ** 2 / n / (q - 1)
        areas.append((area, np.sqrt(scatter)))
    if not areas:
        return np.full((1, 3), np.nan)
    area, root = np.mean(areas, 0)
    reach = -NormalDist().inv_cdf(error / 2) * root if root > 0 else np.nan
    return np.asarray(np.clip([[area, area - reach, area + reach]], 0, 1))


def _dice(sums: Sums, error: float) -> Array:
    from scipy.special import stdtrit

    count, total, squares = sums[DICE][sums[DICE][:, 0] > 0].T
    if not count.size:
        return np.full((1, 3), np.nan)
    mean, free = total / count, count.min() ** 2 / sums[CASES][1] - 1
    scatter = np.maximum(squares / count - mean**2, 0)
    reach = stdtrit(free, 1 - error / 2) * np.sqrt(scatter / free).mean() if free > 0 else np.nan
    return np.asarray(np.clip([[mean.mean(), mean.mean() - reach, mean.mean() + reach]], 0, 1))


#: The sums that each metric of a group needs, and the function that returns its value and interval; then for gaps.
METRICS: Mapping[str, tuple[str, Measure]] = {
    "accuracy": (CALIBRATION, _accuracy), "auc": (HISTOGRAM, _auc), "dice": (DICE, _dice),
}  # fmt: skip
GAPS: Mapping[str, tuple[str, Measure]] = {
    "equalised_odds": (CONFUSION, _odds),
    "equal_opportunity": (CONFUSION, _sensitivity),
    "demographic_parity": (CONFUSION, _test_positives),
    **{f"{name}_gap": of for name, of in METRICS.items()},
}


def few(sums: Sums) -> bool:
    """Return whether a group of people has too few cases for an interval, or an unknown number of cases."""
    return CASES not in sums or not sums[CASES][0] >= FEW


def intervals_of(sums: Sums) -> dict[str, Ends]:
    """Return the intervals of those metrics of :data:`METRICS` that a group's sums allow; NaN for no interval."""
    known = {name: measure for name, (needed, measure) in METRICS.items() if needed in sums}
    if few(sums):
        return dict.fromkeys(known, (np.nan, np.nan))
    return {name: (float(row[1]), float(row[2])) for name, measure in known.items() for row in measure(sums, 1 - LEVEL)}


def gap_intervals(groups: Mapping[str, Sums]) -> dict[str, Ends]:
    """Return intervals of the gaps between groups: those of :data:`GAPS` that the groups' sums allow.

    Args:
        groups: sums by group, without the group of people whose group is unknown.

    Returns:
        Lower end, ``>= 0``, and upper end, ``<= 1``, by gap; NaN if the gap is undefined, or one of its groups has no
        interval.
    """
    there = [sums for sums in groups.values() if images_of(sums) > 0]
    unsure = len(there) < 2 or any(map(few, there))
    return {
        name: (np.nan, np.nan) if unsure else _gap_interval(there, measure)
        for name, (needed, measure) in GAPS.items()
        if groups and all(needed in sums for sums in groups.values())
    }


def _gap_interval(groups: list[Sums], measure: Measure) -> Ends:
    defined = np.isfinite(np.stack([measure(sums, 1 - LEVEL)[:, 0] for sums in groups]))
    pairs = [
        (one, other, part)
        for one, other in combinations(range(len(groups)), 2)
        for part in range(defined.shape[1])
        if defined[one, part] and defined[other, part]
    ]
    if not pairs:
        return np.nan, np.nan
    measured = [measure(sums, (1 - LEVEL) / len(pairs)) for sums in groups]
    ends = []
    for one, other, part in pairs:
        (value, low, high), (against, least, most) = measured[one][part], measured[other][part]
        below = value - against - np.hypot(value - low, most - against)
        above = value - against + np.hypot(high - value, against - least)
        ends.append([np.maximum(0.0, max(below, -above)), max(-below, above)])
    lowest, highest = np.max(ends, 0)  # NaN if any end is NaN
    return float(lowest) + 0.0, float(np.minimum(highest, 1.0))  # adding 0.0 turns -0.0 into 0.0
