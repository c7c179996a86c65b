r"""Compute areas under the ROC curve with DeLong's covariance by case, their intervals, and thresholds of scores.

A pair of a positive and a negative image counts 1 if the positive one has the higher score, and a half for a tie.
The area is the mean over all pairs. For m positive and n negative images, with r the mid-ranks among all images, and r+
and r- the mid-ranks among the positive and among the negative ones:

.. math:: V10_i = (r_i - r^+_i) / n, \quad V01_j = 1 - (r_j - r^-_j) / m, \quad A = \overline{V10}

Sources: DeLong, DeLong and Clarke-Pearson, Biometrics 1988; mid-ranks: Sun and Xu, IEEE Signal Processing Letters 2014
(their code calls V10 and V01 the other way round); several images of a case: Obuchowski, Biometrics 1997; interval
without a variance: Newcombe, Statistics in Medicine 2006 ("Confidence intervals for an effect size measure", method 5).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.core.statistics.intervals import LEVEL, ROUNDING, Array

Truth: TypeAlias = "npt.NDArray[np.bool_]"
Ends: TypeAlias = tuple[float, float]
#: Operating points: sensitivity or specificity, and its wanted value; thresholds are found on validation images.
OPERATING = (("specificity", 0.90), ("sensitivity", 0.90))
ALL = "all classes"  # name of the figures that do not belong to a single class
FEW = 10  # positive or negative cases; with fewer, the interval does not use the variance


def delong(truth: Truth, scores: Array, cases: npt.NDArray[np.int64] | None = None) -> tuple[Array, Array]:
    r"""Return the areas under the ROC curves (AUC) of several models on the same images, and their covariance.

    .. math:: C = \frac{I^+}{I^+ - 1} \frac{\sum a a'}{m^2} + \frac{I^-}{I^- - 1} \frac{\sum b b'}{n^2}
        + \frac{I}{I - 1} \frac{\sum (a b' + b a')}{m n}

    For each case, a is the sum of V10 - A over its positive images, and b the sum of V01 - A over its negative ones. I
    is the number of cases, of which :math:`I^+` have positive and :math:`I^-` have negative images. With one image per
    case this is DeLong's covariance.

    Args:
        truth: (n,) whether each image is positive.
        scores: (models, n) scores.
        cases: (n,) number of the case (patient) of each image; ``None`` if each image is its own case.

    Returns:
        (models,) areas, NaN if all images are alike; (models, models) covariance, NaN with fewer than two cases with
        positive, or with negative images.
    """
    from scipy.stats import rankdata

    models, (m, n) = len(scores), (int(truth.sum()), int((~truth).sum()))
    if not (m and n):
        return np.full(models, np.nan), np.full((models, models), np.nan)
    ranks, whose = rankdata(scores, axis=1), np.arange(len(truth)) if cases is None else cases
    above = (ranks[:, truth] - rankdata(scores[:, truth], axis=1)) / n
    below = 1 - (ranks[:, ~truth] - rankdata(scores[:, ~truth], axis=1)) / m
    areas = above.mean(1)
    a, b = (
        np.stack([np.bincount(whose[chosen], row, whose.max() + 1) for row in parts - areas[:, None]])
        for chosen, parts in ((truth, above), (~truth, below))
    )
    counts = np.array([len(np.unique(whose[chosen])) for chosen in (truth, ~truth, truth | ~truth)])
    of_a, of_b, both = np.divide(counts, counts - 1, out=np.full(3, np.nan), where=counts > 1)
    return areas, of_a * a @ a.T / m**2 + of_b * b @ b.T / n**2 + both * (a @ b.T + b @ a.T) / (m * n)


def area_interval(area: float, variance: float, positive: int, negative: int) -> Ends:
    """Return the confidence interval of an area under the ROC curve (AUC) at :data:`.intervals.LEVEL`.

    The interval is computed for the area's logit; with fewer than :data:`FEW` cases on one side, or without scatter, by
    Newcombe's method 5. Its ends are NaN with fewer than two cases on a side.

    Args:
        area, variance: from :func:`delong`.
        positive, negative: number of cases (patients) with positive and with negative images.
    """
    if not min(positive, negative) >= 2 or not math.isfinite(area):
        return math.nan, math.nan
    if min(positive, negative) < FEW or not (variance > ROUNDING and 0 < area < 1):
        return newcombe_end(area, positive, negative), 1 - newcombe_end(1 - area, positive, negative)
    return logit_interval(area, variance)


def logit_interval(area: float, variance: float) -> Ends:
    """Return the interval of an AUC inside (0, 1), whose logit is taken to be normally distributed."""
    from scipy.special import expit, logit

    reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt(variance) / (area * (1 - area))
    return float(expit(logit(area) - reach)), float(expit(logit(area) + reach))


def newcombe_end(area: float, positive: int, negative: int) -> float:
    r"""Return the lower end of an AUC's interval: the least :math:`\theta` that is not too far below the area.

    .. math:: A - \theta = z \sqrt{\frac{\theta (1 - \theta)}{m n}
        \Big(1 + N \frac{1 - \theta}{2 - \theta} + N \frac{\theta}{1 + \theta}\Big)}, \quad N = \frac{m + n}{2} - 1
    """
    from scipy.optimize import brentq

    z, more = NormalDist().inv_cdf((1 + LEVEL) / 2), (positive + negative) / 2 - 1

    def off(theta: float) -> float:
        factor = 1 + more * (1 - theta) / (2 - theta) + more * theta / (1 + theta)
        return area - theta - z * math.sqrt(theta * (1 - theta) / (positive * negative) * factor)

    return float(brentq(off, 0.0, area * (1 - 1e-9))) if area > 0 else 0.0


def threshold(truth: Truth, scores: Array, share: float, rate: str) -> float:
    """Return the observed score from which on images are called positive, to reach a sensitivity or specificity.

    Args:
        truth: (n,) whether each image is positive.
        scores: (n,) scores.
        share: sensitivity or specificity that is reached at least.
        rate: ``"specificity"``: the smallest such score, infinity if no score is high enough; ``"sensitivity"``: the
            largest one.

    Returns:
        The score; NaN if there is no image of the kind (positive or negative) whose share is wanted.
    """
    marks, chosen = np.unique(scores), np.sort(scores[truth if rate == "sensitivity" else ~truth])
    if not len(chosen):
        return math.nan
    below = np.searchsorted(chosen, marks)  # how many of them are under each score
    if rate == "sensitivity":
        return float(marks[len(chosen) - below >= share * len(chosen) - 1e-9].max())
    return float(marks[below >= share * len(chosen) - 1e-9].min(initial=math.inf))
