r"""How sure metrics of groups of people and the gaps between them are, from sums alone (:mod:`.group_sums`).

Intervals are over images, as if each were of another patient, and hold at :data:`.intervals.LEVEL`. Shares have
Wilson's, areas under the ROC curve DeLong's (on the bins of the histograms), Dice Student's. Of means over classes or
structures only each part's scatter is known; the root of a mean's variance is at most the mean of the parts' roots,
which is taken. The ends of a difference of two groups follow from theirs (Newcombe's method 10):

.. math:: d - \sqrt{(v_1 - l_1)^2 + (u_2 - v_2)^2}, \quad d + \sqrt{(u_1 - v_1)^2 + (v_2 - l_2)^2}

A gap is the largest of several differences, of each pair of groups in each class. All of them are given intervals that
hold together (Bonferroni); the true gap is no smaller than the largest of their lower ends and no larger than the
largest of their upper ones. A gap whose interval begins at 0 may be chance.

Sources: Wilson, JASA 1927; Newcombe, "Interval estimation for the difference between independent proportions",
Statistics in Medicine 1998; DeLong et al., Biometrics 1988; Zou and Donner, Statistics in Medicine 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from fairflare.core.statistics.group_metrics import positives
from fairflare.core.statistics.group_sums import CALIBRATION, CONFUSION, DICE, HISTOGRAM, Array, Sums
from fairflare.core.statistics.intervals import LEVEL

Ends: TypeAlias = tuple[float, float]
#: (parts, 3): of each part value, lower and upper end; NaN: not defined. Given the sums and the error probability.
Measure: TypeAlias = Callable[[Sums, float], Array]


def wilson(hits: Array, count: Array, error: float) -> Array:
    """Shares with Wilson's interval.

    Args:
        hits, count: (parts,) of how many, and out of how many.
        error: 1 minus the level.

    Returns:
        (parts, 3): share, lower and upper end; NaN where ``count`` is 0.
    """
    z = -NormalDist().inv_cdf(error / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = hits / count
        middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
        half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return np.stack([share, middle - half, middle + half], 1)


def _accuracy(sums: Sums, error: float) -> Array:
    count, _, right = sums[CALIBRATION].sum(0)[:, None]
    return wilson(right, count, error)


def _of_confusion(sums: Sums) -> Array:
    """(4, parts): TP, FP, FN, TN of the classes that are looked for."""
    found: Array = sums[CONFUSION][positives(len(sums[CONFUSION]))].T
    return found


def _sensitivity(sums: Sums, error: float) -> Array:
    tp, _, fn, _ = _of_confusion(sums)
    return wilson(tp, tp + fn, error)


def _odds(sums: Sums, error: float) -> Array:
    """Sensitivities, then shares of false positives."""
    _, fp, _, tn = _of_confusion(sums)
    return np.concatenate([_sensitivity(sums, error), wilson(fp, fp + tn, error)])


def _told(sums: Sums, error: float) -> Array:
    tp, fp, fn, tn = _of_confusion(sums)
    return wilson(tp + fp, tp + fp + fn + tn, error)


def _auc(sums: Sums, error: float) -> Array:
    """Mean over the classes that have an area. One without scatter (all pairs in order) has no interval."""
    found = []
    for positive, negative in sums[HISTOGRAM][positives(len(sums[HISTOGRAM]))]:
        m, n = positive.sum(), negative.sum()
        if not (m > 0 and n > 0):  # also NaN
            continue
        below = (np.cumsum(negative) - negative / 2) / n  # share of those without the class that a bin is above
        above = 1 - (np.cumsum(positive) - positive / 2) / m
        area = float(positive @ below) / m
        scatter = np.nan
        if min(m, n) > 1:
            scatter = positive @ (below - area) ** 2 / m / (m - 1) + negative @ (above - area) ** 2 / n / (n - 1)
        found.append((area, np.sqrt(scatter)))
    if not found:
        return np.full((1, 3), np.nan)
    area, root = np.mean(found, 0)
    half = -NormalDist().inv_cdf(error / 2) * root if root > 0 else np.nan
    return np.asarray(np.clip([[area, area - half, area + half]], 0, 1))


def _dice(sums: Sums, error: float) -> Array:
    from scipy.special import stdtrit

    count, total, squares = sums[DICE].T
    if not (count > 0).any():
        return np.full((1, 3), np.nan)
    known = count > 0
    count, mean = count[known], total[known] / count[known]
    least = count.min()
    if least < 2:
        return np.array([[mean.mean(), np.nan, np.nan]])
    scatter = np.maximum(squares[known] - count * mean**2, 0) / (count - 1)
    half = stdtrit(least - 1, 1 - error / 2) * np.sqrt(scatter / count).mean()
    return np.asarray(np.clip([[mean.mean(), mean.mean() - half, mean.mean() + half]], 0, 1))


#: Needed sums and measure, by metric of a group and by gap.
METRICS: Mapping[str, tuple[str, Measure]] = {
    "accuracy": (CALIBRATION, _accuracy), "auc": (HISTOGRAM, _auc), "dice": (DICE, _dice),
}  # fmt: skip
GAPS: Mapping[str, tuple[str, Measure]] = {
    "equalised_odds": (CONFUSION, _odds),
    "equal_opportunity": (CONFUSION, _sensitivity),
    "demographic_parity": (CONFUSION, _told),
    **{f"{name}_gap": of for name, of in METRICS.items()},
}


def intervals_of(sums: Sums) -> dict[str, Ends]:
    """Intervals of a group's metrics, of :data:`METRICS` those that its sums allow; NaN: none."""
    return {
        name: (float(of[1]), float(of[2]))
        for name, (needed, measure) in METRICS.items()
        if needed in sums
        for of in measure(sums, 1 - LEVEL)
    }


def gap_intervals(groups: Mapping[str, Sums]) -> dict[str, Ends]:
    """Intervals of the gaps of :func:`.group_metrics.gaps_of`, of :data:`GAPS` those that the sums allow.

    Args:
        groups: sums by group; without the group of those who are not known.

    Returns:
        lower end, ``>= 0``, and upper end, ``<= 1``; NaN: there is no gap, or a group that is in it has no interval.
    """
    return {
        name: _of_gap(list(groups.values()), measure)
        for name, (needed, measure) in GAPS.items()
        if groups and all(needed in sums for sums in groups.values())
    }


def _of_gap(groups: list[Sums], measure: Measure) -> Ends:
    defined = np.isfinite(np.stack([measure(sums, 1 - LEVEL)[:, 0] for sums in groups]))
    pairs = [
        (one, other, part)
        for one, other in combinations(range(len(groups)), 2)
        for part in range(defined.shape[1])
        if defined[one, part] and defined[other, part]
    ]
    if not pairs:
        return np.nan, np.nan
    found = [measure(sums, (1 - LEVEL) / len(pairs)) for sums in groups]
    ends = []
    for one, other, part in pairs:
        (value, low, high), (against, least, most) = found[one][part], found[other][part]
        below = value - against - np.hypot(value - low, most - against)
        above = value - against + np.hypot(high - value, against - least)
        ends.append([np.maximum(0.0, max(below, -above)), max(-below, above)])
    lowest, highest = np.max(ends, 0)  # NaN where one of them is
    return float(lowest) + 0.0, float(np.minimum(highest, 1.0))  # no minus before 0
