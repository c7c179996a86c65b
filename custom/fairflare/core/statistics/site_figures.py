"""Define the figures about a site's images that a site may report, and compute differences between sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairflare.base.cases.floor import find_hidden_rows

ALIKE = 0.02  # Wasserstein distance of intensities below which two sites count as alike
PERCENTS = (5, 25, 50, 75, 95)  # percentages of the reported quantiles


@dataclass(frozen=True)
class Axis:
    """Define bins of equal width from 0; values above the last bin are counted in it.

    Attributes:
        width: width of a bin, in ``unit``.
        bins: number of bins.
        unit: unit of the values.
        doc: description of the quantity that is counted.
        whole: whether values are whole numbers, of which a bin holds ``width``.
    """

    width: float
    bins: int
    unit: str
    doc: str
    whole: bool = True

    def bin_of(self, value: float) -> int:
        """Return the number of the axis's bin that holds a value ``>= 0``."""
        return min(int(round(value / self.width, 6)), self.bins - 1)

    def number(self, low: float) -> int:
        """Return the number of the bin with this lower end.

        Raises:
            ValueError: no bin has this lower end.
        """
        place = round(low / self.width)
        if not 0 <= place < self.bins or abs(place * self.width - low) > 1e-4 * self.width + 1e-6:
            raise ValueError(f"no bin begins at {low}")
        return place


CLASS, INTENSITY = "class", "intensity"
AXES = {
    INTENSITY: Axis(1 / 64, 64, "of the intensity range", "values of pixels as the network gets them", whole=False),
    CLASS: Axis(1, 256, "", "images by class or finding, of masks pixels by label"),
    "width": Axis(32, 128, "px", "images by width"),
    "height": Axis(32, 128, "px", "images by height"),
    "slices": Axis(8, 128, "slices", "volumes by number of slices"),
    "spacing": Axis(0.1, 100, "mm", "images by distance of rows", whole=False),
    "slice_spacing": Axis(0.5, 100, "mm", "volumes by distance of slices", whole=False),
}
SPLITS = ("training", "validation", "test")
PARTLY = 2  # value of the count "annotated" of a site that annotated some structures or classes only
COUNTS = {
    "min_cases": "the site's floor: what has fewer cases is not told",
    "synthetic": "1: the site's list says that the images are made up",
    "annotated": "1: the site's file says that all structures or classes are annotated, 2: some of them",
    "findings": "1: labels are findings, of which an image may have several",
    "channels": "images of a case that the site's list names, such as T2w and ADC",
    "cases": "patients, else volumes, else images",
    "images": "images, a whole volume is one",
    "unusable": "entries whose file is missing or cannot be read",
    "missing_labels": "entries without a mask or class",
    "empty_masks": "images whose mask marks nothing",
    **{f"{what}_{split}": f"{what} in {split}" for what in ("cases", "images") for split in SPLITS},
}


def drop_few(counts: Mapping[int, int], cases: Mapping[int, int], least: int) -> dict[int, int]:
    """Return counts by bin without bins that have too few cases, and without bins that would reveal these counts.

    Args:
        counts: number of records by bin.
        cases: number of cases with a record in the bin, by bin, ``>= 1``; same keys as ``counts``.
        least: smallest number of cases that a bin must have to be reported.
    """
    hidden = find_hidden_rows(cases, least)
    return {number: counts[number] for number in sorted(counts) if number not in hidden}


def quantile(counts: Sequence[int], percent: float) -> float:
    """Return the bin number, with a fraction within the bin, below which ``percent`` of the records lie.

    The result is less than one bin's width away from the quantile of the values themselves. NaN: no record.
    """
    total = np.cumsum(np.asarray(counts, dtype=np.float64))
    if not len(total) or total[-1] == 0:
        return float("nan")
    wanted = percent / 100 * total[-1]
    number = max(int(np.searchsorted(total, wanted)), int(np.flatnonzero(total)[0]))
    before = float(total[number - 1]) if number else 0.0
    return float(number + (wanted - before) / (float(total[number]) - before))


def wasserstein(counts: Sequence[int], others: Sequence[int], width: float) -> float:
    """Return the Wasserstein distance of two histograms with the same bins; NaN if one histogram is empty.

    The distance is the mean distance by which records must be moved to turn one histogram into the other, in the unit
    of ``width``.
    """
    from scipy.stats import wasserstein_distance

    if not sum(counts) or not sum(others):
        return float("nan")
    places = np.arange(len(counts)) * width
    return float(wasserstein_distance(places, places, counts, others))


def jensen_shannon(counts: Mapping[int, int], others: Mapping[int, int]) -> float:
    """Return the Jensen-Shannon distance (base 2) of two mixes of labels.

    The distance is 0 for equal shares and 1 for mixes without common labels. NaN: one mix is empty.
    """
    from scipy.spatial.distance import jensenshannon

    numbers = sorted({*counts, *others})
    if not sum(counts.values()) or not sum(others.values()):
        return float("nan")
    # SciPy divides each mix by its sum.
    return float(jensenshannon(*([mix.get(number, 0) for number in numbers] for mix in (counts, others)), base=2))
