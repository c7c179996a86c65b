"""Sum outcomes by group of people, and find the sums that are withheld because they rest on too few cases.

Sums of one group at two sites add up, entry by entry, to the sums over both sites;
:mod:`fairflare.core.statistics.group_metrics` computes metrics from them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.base.cases.floor import find_hidden_rows
from fairflare.base.checks import group_by_key

Array: TypeAlias = "npt.NDArray[np.float64]"
Sums: TypeAlias = Mapping[str, Array]
#: Names of the sums of one group of people; :func:`shapes` describes them.
IMAGES, CASES, CELLS, CONFUSION, HISTOGRAM, CALIBRATION, BRIER, DICE = (
    "images", "cases", "cells", "confusion", "histogram", "calibration", "brier", "dice",
)  # fmt: skip
#: Number of parts into which a site divides its test cases (patients). Leaving out each part in turn (jackknife) shows
#: how much a figure depends on the cases.
FOLDS = 20
OF_CLASSES = (CELLS, CONFUSION, HISTOGRAM, CALIBRATION, BRIER)


def shapes(parts: int, bins: int, calibration_bins: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each sum of one group.

    ``images``: number of images. ``cases``: number of cases (patients), and the sum over cases of the squared number of
    images. ``cells``: the same two numbers for the images with each class, then for those without it. ``confusion``:
    TP, FP, FN, TN of each class. ``histogram``: for each class the number of images with, then without the class whose
    probability of the class lies in each of ``bins`` equal bins. ``calibration``: for each of ``calibration_bins``
    equal bins of the predicted class's probability the number of images, the sum of that probability, and the number of
    correct predictions. ``brier``: sum over images and classes of the squared difference between probability and truth.
    ``dice``: for each structure the number of images, the sum of Dice and the sum of squared Dice. ``parts`` is the
    number of classes or structures.
    """
    return {
        IMAGES: (), CASES: (2,), CELLS: (parts, 2, 2), CONFUSION: (parts, 4), HISTOGRAM: (parts, 2, bins),
        CALIBRATION: (calibration_bins, 3), BRIER: (), DICE: (parts, 3),
    }  # fmt: skip


def sums_of(
    labels: npt.NDArray[np.int64] | None,
    scores: Array,
    chosen: npt.NDArray[np.bool_],
    bins: int,
    calibration_bins: int,
    cases: npt.NDArray[np.int64] | None = None,
    least: int = 1,
) -> dict[str, Array]:
    """Return the sums over the images of one group, by name, in the shapes of :func:`shapes`.

    Args:
        labels: (n,) class of each image; ``None`` if the task has no classes.
        scores: (n, parts) probabilities of the classes, each row with sum 1; or, if ``labels`` is None, Dice of each
            structure, NaN of one that is not annotated.
        chosen: (n,) whether each image belongs to the group.
        bins, calibration_bins: numbers of bins, as in :func:`shapes`.
        cases: (n,) number of the case (patient) that each image belongs to; ``None`` if each image is a case.
        least: a bin of fewer cases is merged with the next ones.
    """
    group_scores, whose = scores[chosen], np.flatnonzero(chosen) if cases is None else cases[chosen]
    sums = {IMAGES: np.asarray(float(len(group_scores))), CASES: _count_cases(whose)}
    if labels is None:
        labelled, known = np.isfinite(group_scores), np.nan_to_num(group_scores)
        return {**sums, DICE: np.stack([labelled.sum(0).astype(float), known.sum(0), (known**2).sum(0)], 1)}
    truth = np.eye(scores.shape[1], dtype=bool)[labels[chosen]]
    best = group_scores.argmax(1)
    labelled = np.eye(scores.shape[1], dtype=bool)[best]
    place = _bin_of(group_scores, bins)
    confidence = group_scores[np.arange(len(group_scores)), best]
    bin_of_image = _merge_bins(
        _bin_of(confidence, calibration_bins), whose, (labelled.any(1),), calibration_bins, least
    )
    weights = (np.ones(len(group_scores)), confidence, (best == labels[chosen]).astype(float))
    return {
        **sums,
        CELLS: np.stack([[_count_cases(whose[part]) for part in (has, ~has)] for has in truth.T]),
        CONFUSION: np.stack(
            [cell.sum(0) for cell in (truth & labelled, ~truth & labelled, truth & ~labelled, ~truth & ~labelled)], 1
        ).astype(float),
        HISTOGRAM: np.stack(
            [[np.bincount(_merge_bins(place[:, c], whose, (has, ~has), bins, least)[part], minlength=bins)
              for part in (has, ~has)] for c, has in enumerate(truth.T)]
        ).astype(float),
        CALIBRATION: np.stack([np.bincount(bin_of_image, weight, calibration_bins) for weight in weights], 1),
        BRIER: np.asarray(((group_scores - truth) ** 2).sum()),
    }  # fmt: skip


def _count_cases(whose: npt.NDArray[np.int64]) -> Array:
    """Return the number of cases that images belong to, and the sum of the cases' squared numbers of images."""
    images = np.bincount(whose).astype(float)
    return np.array([np.count_nonzero(images), images @ images])


def _bin_of(values: Array, bins: int) -> npt.NDArray[np.int64]:
    """Return the index of the equal bin of [0, 1] that holds each value; 1 belongs to the last bin."""
    return np.minimum((values * bins).astype(np.int64), bins - 1)


def _merge_bins(
    place: npt.NDArray[np.int64],
    whose: npt.NDArray[np.int64],
    sides: Sequence[npt.NDArray[np.bool_]],
    bins: int,
    least: int,
) -> npt.NDArray[np.int64]:
    """Return the bin of each value after bins of fewer than ``least`` cases are merged with the next ones.

    Bins at the end that together have too few cases are merged with the bin before them.

    Args:
        place: the bin of each value.
        whose: number of the case that each value belongs to.
        sides: masks of the values that are counted separately; a merged bin has enough cases in every mask.
        bins: number of bins.
        least: smallest number of cases of a bin.
    """
    goes, start = np.arange(bins), 0
    for end in range(bins):
        inside = (place >= start) & (place <= end)
        if all(len({*whose[inside & side].tolist()}) >= least for side in sides):
            goes[start : end + 1], start = end, end + 1
    goes[start:] = goes[start - 1] if start else bins - 1
    return goes[place] if least > 1 else place


def add_sums(sums: Sequence[Sums]) -> dict[str, Array]:
    """Return the sums of several groups or sites together, entry by entry.

    A NaN (an entry that a site withholds) is left out of the sum; an entry that all withhold is NaN.
    """
    by_name = group_by_key(item for one in sums for item in one.items())
    return {name: np.where(np.isnan(arrays).all(0), np.nan, np.nansum(arrays, 0)) for name, arrays in by_name.items()}


def leave_each_out(sums: Sums) -> list[dict[str, Array]]:
    """Return the sums without each of the :data:`FOLDS` parts of the cases in turn; empty if sums are not in parts.

    Args:
        sums: sums in the shapes of :func:`shapes`, or with an additional first axis over the parts.
    """
    if np.ndim(sums[IMAGES]) == 0 or len(sums[IMAGES]) != FOLDS:
        return []
    whole = add_parts(sums)
    return [{name: whole[name] - parts[part] for name, parts in sums.items()} for part in range(FOLDS)]


def add_parts(sums: Sums) -> dict[str, Array]:
    """Add up sums over the parts into which a site's cases are divided; sums without parts are returned unchanged."""
    return {
        name: np.asarray(parts).sum(0) if np.ndim(sums[IMAGES]) else np.asarray(parts) for name, parts in sums.items()
    }


def impossible(sums: Sums) -> str:
    """Return the name of a sum that is impossible for the number of a group's images; empty if all sums are possible.

    Args:
        sums: sums in the shapes of :func:`shapes`; further axes in front are allowed.
    """
    images = np.asarray(sums[IMAGES])
    by_part = images[..., None]
    for name, array in sums.items():
        if name in (CONFUSION, HISTOGRAM):
            total = array.sum(-1 if name == CONFUSION else (-2, -1))
            bounds = [(total, by_part), (-total, -by_part)]
        elif name == CALIBRATION:
            count, confidence, right = np.moveaxis(array, -1, 0)
            bounds = [(count.sum(-1), images), (-count.sum(-1), -images), (confidence, count), (right, count)]
        elif name == DICE:
            count, total, squares = np.moveaxis(array, -1, 0)
            bounds = [(count, by_part), (total, count), (squares, total)]
        else:  # Brier: at most 2 per image; squared image counts: at most the squared number of images
            most = 2 * images if name == BRIER else np.maximum(images**2, images)
            bounds = [(array, most.reshape(most.shape + (1,) * (np.ndim(array) - most.ndim)))]
        if any(_exceeds(values, bound) for values, bound in bounds):
            return name
    return ""


def _exceeds(values: Array, most: Array) -> bool:
    """Return whether any number exceeds its upper bound, or is known although its bound is unknown (NaN)."""
    return bool((~np.isnan(values) & ~(values <= most + 1e-6 * (1 + np.abs(most)))).any())


def find_hidden_groups(
    cases: Sequence[Hashable], numbers: npt.NDArray[np.int64], groups: int, least: int
) -> frozenset[int]:
    """Return the groups of an attribute whose sums a site withholds.

    These are the groups with fewer than ``least`` cases, and further groups that are withheld so that nobody can
    compute the sums of the former.

    The sums over all groups are known from the site's metrics, so that the sums of a single hidden group would follow
    from those of the other groups: see :func:`fairflare.base.cases.floor.find_hidden_rows`.

    Args:
        cases: the case (patient) that each image belongs to.
        numbers: (n,) group of each image.
        groups: number of groups.
        least: least number of cases of a group that is reported, ``>= 1``.
    """
    if least <= 1:
        return frozenset()
    return find_hidden_rows({g: _different(cases, numbers == g) for g in range(groups)}, least)


def find_hidden_parts(
    cases: Sequence[Hashable],
    labels: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int64],
    hidden: frozenset[int],
    least: int,
    classes: int,
) -> frozenset[int]:
    """Return the classes whose sums a site withholds in all groups of an attribute.

    A class is reported if every reported group, and all hidden groups together, have at least ``least`` cases with the
    class and ``least`` cases without it. Both margins of the table of groups and classes are known; further classes,
    those with the fewest cases first, are therefore hidden until in no group the hidden classes together have fewer
    than ``least`` cases.

    Args:
        cases, numbers, least: as in :func:`find_hidden_groups`.
        labels: (n,) class of each image.
        hidden: groups whose sums are withheld.
        classes: number of classes.
    """
    if least <= 1:
        return frozenset()
    withheld = np.isin(numbers, sorted(hidden))
    rows = [numbers == g for g in np.unique(numbers) if g not in hidden] + ([withheld] if withheld.any() else [])
    counts = [[_different(cases, row & (labels == c)) for c in range(classes)] for row in rows]
    without = [[_different(cases, row & (labels != c)) for c in range(classes)] for row in rows]
    least_of = np.min(counts + without, 0)
    too_few = {c for c in range(classes) if least_of[c] < least}
    order = sorted(set(range(classes)) - too_few, key=lambda c: (least_of[c], c))
    while order and too_few and any(0 < sum(row[c] for c in too_few) < least or len(too_few) == 1 for row in counts):
        too_few.add(order.pop(0))
    return frozenset(too_few)


def _different(cases: Sequence[Hashable], chosen: npt.NDArray[np.bool_]) -> int:
    return len({cases[i] for i in np.flatnonzero(chosen).tolist()})
