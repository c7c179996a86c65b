"""Compute intervals of shares, and the spread of figures by leaving out each part of the cases in turn (jackknife).

All functions take arrays and work element by element.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

LEVEL = 0.95  # confidence level of intervals
Array = npt.NDArray[np.float64]


def wilson(hits: Array, count: Array, error: float) -> Array:
    """Return shares (hits of trials), each with Wilson's confidence interval.

    Args:
        hits, count: number of hits and number of trials of each share, (parts,).
        error: error probability, 1 minus the confidence level.

    Returns:
        (parts, 3): share, lower and upper end; NaN where ``count`` is 0.
    """
    z = -NormalDist().inv_cdf(error / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = hits / count
        middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
        half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return np.stack([share, middle - half, middle + half], 1)


def paired_gain(gain: float, draws: Array) -> list[float]:
    """Return a gain, the ends of its interval, its two-sided p-value, and its standard error, from bootstrap draws.

    Args:
        gain: gain of one model over another on the same cases.
        draws: the gain on draws of the cases with replacement; an undefined gain (NaN) does not count.

    Returns:
        five numbers, all but the first NaN without a defined draw. With B draws, p is 2 / (B + 1) at least.

    Source:
        Percentile interval and p: Davison and Hinkley, Bootstrap Methods and their Application, 1997, 5.3.1 and 4.4.1.
    """
    known = draws[np.isfinite(draws)]
    if not len(known):
        return [gain, *[float("nan")] * 4]
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    beyond = min(np.count_nonzero(known <= 0), np.count_nonzero(known >= 0))
    return [gain, float(low), float(high), min(1.0, 2 * (1 + beyond) / (1 + len(known))), float(known.std())]


def holm(p: npt.ArrayLike) -> Array:
    """Correct p-values for their number, so that in at most 5 % of families any is below 0.05 by chance.

    Args:
        p: p-values, (..., tests); each family of tests is along the last axis.
    """
    found = np.asarray(p, float)
    order = np.argsort(found, -1)
    factors = found.shape[-1] - np.arange(found.shape[-1])
    stepped = np.minimum(np.maximum.accumulate(np.take_along_axis(found, order, -1) * factors, -1), 1.0)
    corrected = np.empty_like(stepped)
    np.put_along_axis(corrected, order, stepped, -1)
    return corrected


def of_folds(without: npt.ArrayLike) -> Array:
    r"""Rescale figures measured without each part of the cases in turn, so that they spread as repeated draws would.

    The sample variance of the rescaled figures is the jackknife's, :math:`\frac{F - 1}{F} \sum_f (x_f - \bar x)^2`.

    Args:
        without: figures, (..., parts); the last axis is over the part that was left out.

    Source:
        Kott, "The delete-a-group jackknife", Journal of Official Statistics 2001.
    """
    found = np.asarray(without, float)
    parts = found.shape[-1]
    return np.asarray((parts - 1) / np.sqrt(parts) * (found - found.mean(-1, keepdims=True)))


def degrees_of_folds(parts: int, cases: float) -> float:
    """Return the degrees of freedom of a variance that is computed by :func:`of_folds`; a low, safe number.

    The number is at most half the number of parts, since a part has few cases of a group and their mean is not normally
    distributed. With this number, equal methods are called different in fewer than 5 of 100 comparisons
    (``benchmarks/bench_group_verdicts.py``).

    Args:
        parts: number of parts into which the cases are divided.
        cases: number of cases of the smallest group, above 1.
    """
    return min(parts // 2, cases - 1)
