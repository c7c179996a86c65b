"""Count spacing, size and foreground of cases, so that sums over sites give the quantiles of all cases together.

Source:
    ``docs/nnunet.md`` has the protocol. What is derived from the counts: :mod:`fairflare.core.plans.document`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STEPS_PER_MM = 1000  # spacings are counted in whole thousandths of a mm
#: Largest value on each axis of a question: spacing in thousandths of a mm, and size in voxels; the smallest is 1.
MOST = {"spacing": 20_000, "size": 4096, "resampled": 4096}
LOWEST_HU, HIGHEST_HU = -1024, 3071  # range of the histogram of a CT's foreground; other values count at its ends
LOST = 0.75  # share of a volume's voxels that crops to less than this count as having lost a quarter
Counts = Counter[int]


@dataclass(frozen=True)
class Case:
    """Represent what a plan needs to know of one case; it never leaves the site.

    Attributes:
        spacing: size of a voxel in mm along each axis.
        size: number of voxels along each axis, cropped to values other than 0.
        share: share of the volume's voxels that the crop leaves.
    """

    spacing: tuple[float, ...]
    size: tuple[int, ...]
    share: float

    def steps(self, kind: str, target: Sequence[float] = ()) -> list[int]:
        """Return what is counted of the case along each axis: ``"spacing"``, ``"size"`` or ``"resampled"``.

        The resampled size is that of the rounded spacing too, as the target is: else 640 voxels of 0.2703125 mm each,
        in cases that are all alike, would become 641.
        """
        from fairflare.core.plans.rules import resampled_size

        steps: Sequence[int] = [round(mm * STEPS_PER_MM) for mm in self.spacing]
        if kind != "spacing":
            steps = (
                self.size if kind == "size" else resampled_size(self.size, [mm / STEPS_PER_MM for mm in steps], target)
            )
        return [min(max(value, 1), MOST[kind]) for value in steps]


def count_values(cases: Sequence[Case], kind: str, target: Sequence[float] = ()) -> list[Counts]:
    """Return for each axis how many cases have each value; arguments: see :meth:`Case.steps`."""
    return [Counter(along) for along in zip(*(case.steps(kind, target) for case in cases), strict=True)]


def merge_counts(counts: Counts, least: int) -> Counts:
    """Return counts in which each value stands for at least ``least`` cases; empty if there are fewer.

    The sorted values are cut into runs of nearly equal length, of which each gets its (lower) median.
    """
    values = sorted(counts.elements())
    runs = np.array_split(values, len(values) // least) if len(values) >= least else []
    medians = Counter[int]()
    for run in runs:
        medians[int(run[(len(run) - 1) // 2])] += len(run)
    return medians


def quantile(counts: Mapping[int, int], share: float, unit: int = 1) -> float:
    """Return the quantile of counted values, linear between the two nearest of them, to the bit as NumPy's.

    Args:
        counts: how often each value is there.
        share: of the values that are below.
        unit: number by which the values are divided first.
    """
    values = sorted(counts)
    last = np.cumsum([counts[value] for value in values])
    place = (int(last[-1]) - 1) * share
    below, above = (
        values[int(np.searchsorted(last, rank, side="right"))] / unit for rank in (np.floor(place), np.ceil(place))
    )
    return float(
        below + (above - below) * (place % 1) if place % 1 < 0.5 else above - (above - below) * (1 - place % 1)
    )


def foreground(image: npt.NDArray[np.floating], inside: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the share of a case's foreground at each whole HU, (4096,), of sum 1; zeros without a foreground."""
    values = np.clip(np.round(image[inside]), LOWEST_HU, HIGHEST_HU).astype(np.int64) - LOWEST_HU
    histogram = np.bincount(values, minlength=HIGHEST_HU - LOWEST_HU + 1).astype(np.float64)
    return np.asarray(histogram / max(1.0, histogram.sum()))


def intensities(histogram: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return nnU-Net's figures of the foreground from the sum of the cases' histograms."""
    values = np.arange(LOWEST_HU, HIGHEST_HU + 1)
    share = histogram / histogram.sum()
    mean = float(share @ values)
    upto = np.cumsum(share)

    def percentile(percent: float) -> float:
        return float(values[int(np.searchsorted(upto, percent / 100))])

    there = values[share > 0]
    return {
        "max": float(there[-1]), "mean": mean, "median": percentile(50), "min": float(there[0]),
        "percentile_00_5": percentile(0.5), "percentile_99_5": percentile(99.5),
        "std": float(np.sqrt(share @ (values - mean) ** 2)),
    }  # fmt: skip


def total(parts: Iterable[Mapping[int, int]]) -> Counts:
    """Return the sum of counts."""
    counts = Counter[int]()
    for part in parts:
        counts.update(part)
    return counts
