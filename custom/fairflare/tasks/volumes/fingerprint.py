"""Measure spacing, size and foreground of a site's training volumes, from which a plan is made."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.machine.memory import print_progress, workers
from fairflare.core.plans.counts import Case, foreground
from fairflare.core.plans.document import AXES
from fairflare.data.orientation import orient_view
from fairflare.data.whole_volumes import Whole

Histograms = dict[int, npt.NDArray[np.float64]]


def fingerprint(whole: Whole, labels: Collection[int], of_ct: Collection[int]) -> tuple[Case, Histograms]:
    """Return what a plan needs of one volume, and the histograms of its CT channels in the foreground.

    Args:
        whole: the volume with its mask, as stored.
        labels: values of the mask that are foreground.
        of_ct: numbers of the channels that are CT.
    """
    affine = np.eye(4) if whole.affine is None else whole.affine
    image, lies = orient_view(np.moveaxis(crop_zeros(whole).image, 0, -1), affine, AXES)
    inside = np.isin(whole.mask if whole.mask is not None else 0, [*labels])
    case = Case(tuple(np.linalg.norm(lies[:3, :3], axis=0).tolist()), image.shape[:3], image.size / whole.image.size)
    return case, {number: foreground(whole.image[number], inside) for number in of_ct}


def crop_zeros(whole: Whole) -> Whole:
    """Return the box of a volume outside which all channels are 0; the volume itself where they are 0 everywhere."""
    from scipy.ndimage import find_objects

    boxes = find_objects((whole.image != 0).any(0).view(np.uint8))
    box = boxes[0] if boxes else (slice(0, None),) * 3
    start, affine = [along.start for along in box], whole.affine
    lies = None if affine is None else affine + np.pad((affine[:, :3] @ start)[:, None], ((0, 0), (3, 0)))
    return Whole(whole.image[:, box[0], box[1], box[2]], None if whole.mask is None else whole.mask[box], lies)


def fingerprints(data: Any, split: str, of_ct: Collection[int]) -> list[tuple[Hashable, Case, Histograms]]:
    """Return the patient and the fingerprint of each volume of a site's list, each of whose files is read once."""
    coding = getattr(data, "coding", None) or {}
    labels = {value for labels_of_structure in data.task.structures for value in labels_of_structure}
    values = {value for value in {*labels, *coding} if coding.get(value, value) in labels}
    numbers = range(data.num_volumes(split))

    def measure_volume(number: int) -> tuple[Hashable, Case, Histograms]:
        patient, whole = data.original(split, number)
        return patient, *fingerprint(whole, values, of_ct)

    with ThreadPool(workers(data.takes())) as threads:
        return list(print_progress(threads.imap(measure_volume, numbers), len(numbers), "volumes measured"))
