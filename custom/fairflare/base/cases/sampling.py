"""Measure how far chance moves a site's metric: standard error over its test cases, and histogram of their scores.

A *case* is a unit of independent samples: a patient if the data name the patient of an image, else a volume or an
image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base import checks

SHARES = ("accuracy", "recall")  # metrics that are the share of images whose class was predicted correctly
MEAN_RECALL = "balanced_accuracy"  # the metric that is the mean recall of the classes that occur
BINS = 20  # number of equal bins of a metric's range, in which cases are counted
MOST_GROUPS = 100  # largest number of groups of cases that the jackknife leaves out in turn

Cases = Sequence[Hashable]


def standard_error(influence: npt.NDArray[np.floating], cases: Cases | None = None) -> float:
    r"""Return the standard error of a metric that is a constant plus a sum over images, such as a mean.

    .. math:: \sqrt{\frac{G}{G - 1} \sum_{g=1}^{G} \Big(\sum_{i \in g} u_i\Big)^2}

    Args:
        influence: u, (images,): how far each image moves the metric; the entries sum to 0. For a mean of x over n
            images: (x - mean) / n.
        cases: the case of each image; ``None`` if each image is its own case, and for a mean the result is s / sqrt(n).

    Returns:
        ``>= 0``; NaN with fewer than two cases.

    Source:
        Liang and Zeger, Biometrika 1986 (sums within clusters); the factor is the usual one for few clusters.
    """
    count, number = number_cases(len(influence), cases)
    if count < 2:
        return math.nan
    sums = np.bincount(number, weights=np.asarray(influence, np.float64), minlength=count)
    return float(np.sqrt(count / (count - 1) * np.square(sums).sum()))


def jackknife(metric: Callable[[npt.NDArray[np.int64]], float], images: int, cases: Cases | None = None) -> float:
    r"""Compute the standard error of any metric by the jackknife: from its values without each case in turn.

    .. math:: \sqrt{\frac{G - 1}{G} \sum_{g=1}^{G} (m_{-g} - \bar m)^2}

    If there are more than :data:`MOST_GROUPS` cases, they are left out in that many groups: the first case together
    with the 101st, and so on.

    Args:
        metric: function that returns the metric over the images with the given indices.
        images: number of images.
        cases: the case of each image; ``None`` if each image is its own case.

    Returns:
        ``>= 0``; NaN with fewer than two cases, or if the metric is not defined without one of the groups.

    Source:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11.
    """
    count, number = number_cases(images, cases)
    groups = min(count, MOST_GROUPS)
    if groups < 2:
        return math.nan
    left = np.array([metric(np.flatnonzero(number % groups != group)) for group in range(groups)])
    return float(np.sqrt((groups - 1) / groups * np.square(left - left.mean()).sum()))


def case_scores(scores: npt.NDArray[np.floating], cases: Cases | None, low: float, high: float) -> list[int]:
    """Count cases by their mean score, in :data:`BINS` equal bins of [low, high].

    Args:
        scores: (images,) in [low, high]; a case whose mean lies outside is counted in the nearest bin.
        cases: the case of each image; ``None`` if each image is its own case.
        low, high: finite bounds of the scores, low < high.

    Returns:
        Number of cases in each bin, from the lowest bin to the highest, which includes ``high``.
    """
    checks.refuse({
        f"the range of the scores must be finite with low < high, got [{low}, {high}]":
            not (math.isfinite(low) and math.isfinite(high) and low < high),
    })  # fmt: skip
    count, number = number_cases(len(scores), cases)
    sums = np.bincount(number, weights=np.asarray(scores, np.float64), minlength=count)
    means = sums / np.bincount(number, minlength=count)
    # A score on a bin's border belongs to the bin above; 1e-9 keeps it there when rounding leaves the sum just below.
    places = np.floor((means - low) / (high - low) * BINS + 1e-9).clip(0, BINS - 1).astype(np.int64)
    return [int(n) for n in np.bincount(places, minlength=BINS)]


def report_mean(
    scores: Sequence[float] | npt.NDArray[np.floating], cases: Cases | None, low: float, high: float
) -> dict[str, Any]:
    """Return a site's report on the sampling of a metric that is the mean of the scores of its images.

    Args:
        scores: score of each image; NaN if the image does not count.
        cases: the case of each image; ``None`` if each image is its own case.
        low, high: range of the scores; may be infinite.

    Returns:
        ``test_cases``, ``standard_error`` (with at least two cases), ``case_scores`` (if the range is finite); empty
        if no image counts.
    """
    array = np.asarray(scores, np.float64)
    finite = np.flatnonzero(np.isfinite(array))
    if not len(finite):
        return {}
    values, whose = array[finite], None if cases is None else [cases[int(i)] for i in finite]
    error = standard_error((values - values.mean()) / len(values), whose)
    has_range = math.isfinite(low) and math.isfinite(high) and low < high
    return {
        "test_cases": number_cases(len(values), whose)[0],
        **({"standard_error": error} if math.isfinite(error) else {}),
        **({"case_scores": case_scores(values, whose, low, high)} if has_range else {}),
    }


def number_cases(images: int, cases: Cases | None) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the number of cases, and for each image the number of its case; cases are numbered as they appear."""
    checks.whole("the number of images", images)
    if cases is None:
        return images, np.arange(images)
    checks.refuse({f"{len(cases)} cases are named for {images} images": len(cases) != images})
    numbers = {case: number for number, case in enumerate(dict.fromkeys(cases))}
    return len(numbers), np.array([numbers[case] for case in cases], np.int64)
