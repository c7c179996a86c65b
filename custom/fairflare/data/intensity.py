"""Scale the grey values of a file to [0, 1] by the rule that the task chose, and read labels as whole numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import refuse

TOP_PERCENTILE = 99.0  # in an image without a fixed scale, values above this percentile are white

Intensity = Literal["auto", "range", "percentile", "window", "zscore"]
LABEL_OFF = 1e-3  # tolerance of a label from a whole number, for errors of scaling and of float32
MOST_LABEL = 2**31  # largest value of a label
DEVIATIONS = 3.0  # number of standard deviations from the mean at which "zscore" clips

#: Description of each rule for intensities, which is stored with a model.
IN_WORDS = {
    "auto": "8 bits: divided by 255; others and NIfTI: clipped to [minimum, 99th percentile] of the file, scaled to "
    "[0, 1]",
    "range": "[minimum, maximum] of the file scaled to [0, 1]",
    "percentile": "clipped to [minimum, 99th percentile] of the file, scaled to [0, 1]",
    "window": "clipped to a window, scaled to [0, 1]",
    "zscore": "mean -+ 3 standard deviations of the file clipped and scaled to [0, 1]",
}
Bounds = tuple[float, float]
SLAB = 2**22  # number of values that are converted at a time, so that no second copy of a volume is needed


def slabs(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield views of an array that follow each other along its last axis, each of at most about 4 million values."""
    along = array.T
    step = max(1, SLAB * len(along) // max(1, array.size))
    yield from (along[start : start + step].T for start in range(0, len(along), step))


def counts_of(mask: npt.NDArray[Any]) -> dict[int, int]:
    """Return how often each value occurs in a mask of whole numbers, in ascending order of the values."""
    low, high = (int(bound(initial=0)) for bound in (mask.min, mask.max))
    total = Counter[int]()
    counts: Iterable[tuple[int, int]]
    for slab in slabs(mask):
        if high - low < 2**16:  # a table counts the values without sorting
            counts = enumerate(np.bincount((slab - low).ravel()).tolist(), low)
        else:
            counts = zip(*(part.tolist() for part in np.unique(slab, return_counts=True)), strict=True)
        total.update({value: count for value, count in counts if count})
    return dict(sorted(total.items()))


def bounds_of(array: npt.NDArray[Any], kind: str, padded: bool = False) -> Bounds | None:
    """Return the values of a file that become 0 and 1, or ``None`` if some values are NaN or infinite.

    The two bounds are equal if all values are equal.

    Args:
        array: the values of a whole file.
        kind: ``"range"``, ``"percentile"``, ``"zscore"``; ``"percentile, inverted"``: the lowest percent is clipped,
            for images whose lowest value is white.
        padded: whether NaN marks pixels outside the picture, which do not count.
    """
    values = array.astype(np.float32)
    if padded:
        values = values[~np.isnan(values)]
        if not values.size:
            return 0.0, 0.0
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):  # a single NaN makes both NaN
        return None
    if kind == "percentile":
        top = float(np.percentile(values, TOP_PERCENTILE, overwrite_input=True))  # else numpy makes a second copy
        return low, top if top > low else high
    if kind == "percentile, inverted":
        bottom = float(np.percentile(values, 100 - TOP_PERCENTILE, overwrite_input=True))
        return bottom if bottom < high else low, high
    if kind == "zscore":
        middle, spread = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
        return middle - DEVIATIONS * spread, middle + DEVIATIONS * spread
    return low, high


def rescale(values: npt.NDArray[Any], bounds: Bounds) -> npt.NDArray[np.float32]:
    """Return ``values`` clipped to ``bounds`` and scaled to [0, 1]; all are 0 if the bounds are equal."""
    low, high = bounds
    if high <= low:
        return np.zeros(values.shape, np.float32)
    scaled = values.astype(np.float32)
    scaled -= np.float32(low)
    scaled /= np.float32(high - low)
    return np.clip(scaled, 0.0, 1.0, out=scaled)


def labels_of(array: npt.NDArray[Any]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the labels of a mask in the smallest unsigned type; each must be a whole number >= 0, within 0.001.

    Raises:
        ValueError: some values are no labels; the message shows a few of them, and the position of the first one.
    """
    refuse({
        f"the mask's values are {array.dtype}, no numbers; save labels as whole numbers":
            array.dtype.kind not in "biuf",
    })  # fmt: skip
    if array.dtype.kind == "b" or not array.size:
        return array.astype(np.uint8)
    low, high = array.min(), array.max()  # both are NaN if a value is
    if low >= -LABEL_OFF and high <= MOST_LABEL:
        smallest = np.min_scalar_type(round(float(high)))
        if array.dtype.kind != "f":
            return array.astype(smallest, copy=False)
        labels = np.empty_like(array, smallest)
        if all(_round_into(values, into) for values, into in zip(slabs(array), slabs(labels), strict=True)):
            return labels
    usable: npt.NDArray[np.bool_] = (array >= -LABEL_OFF) & (array <= MOST_LABEL)  # the comparison is False for NaN
    if array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            usable &= np.abs(array - np.round(array)) <= LABEL_OFF
    places = np.argwhere(~usable)
    values = list(dict.fromkeys(f"{array[tuple(place)]:.7g}" for place in places[:1000]))[:5]
    where = ", ".join(
        f"{name} {index}" for name, index in zip(("row", "column", "slice", "channel"), places[0], strict=False)
    )
    raise ValueError(
        f"its values are not whole numbers from 0 to {MOST_LABEL}: {len(places)} of {array.size} are "
        f"{', '.join(values)}{' ...' * (len(places) > 1)}, the first at {where} (from 0)"
    )


def _round_into(values: npt.NDArray[Any], into: npt.NDArray[Any]) -> bool:
    """Write values as whole numbers into an array; return whether each was a whole number, within 0.001."""
    into[...] = np.round(values)
    return bool((np.abs(values - into) <= LABEL_OFF).all())


@dataclass(frozen=True)
class Window:
    """Scale values by a DICOM display window, which maps a range of values to greys, black to white (PS3.3, C.11.2.1).

    Args:
        centre, width: centre and width of the window in measured values (after the rescaling).
        function: DICOM's VOI LUT function: ``"LINEAR"``, ``"LINEAR_EXACT"`` or ``"SIGMOID"``.
    """

    centre: float
    width: float
    function: str = "LINEAR_EXACT"

    def __call__(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return values scaled to [0, 1] by the window."""
        if self.function == "SIGMOID":
            return np.asarray(1 / (1 + np.exp(-4 * (values.astype(np.float64) - self.centre) / self.width)), np.float32)
        centre, width = (self.centre - 0.5, self.width - 1) if self.function == "LINEAR" else (self.centre, self.width)
        if width <= 0:  # LINEAR with a width of 1 is a threshold
            return (values > centre).astype(np.float32)
        return rescale(values, (centre - width / 2, centre + width / 2))
