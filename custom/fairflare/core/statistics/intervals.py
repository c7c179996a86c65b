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
    """Return shares with Wilson's interval.

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
