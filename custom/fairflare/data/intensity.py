"""Scale the grey values of a file to [0, 1] by the rule that the task chose, and read labels as whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

TOP_PERCENTILE = 99.0  # in an image without a fixed scale, values above this percentile are white

Intensity = Literal["auto", "range", "percentile", "window", "zscore"]
LABEL_OFF = 1e-3  # tolerance of a label from a whole number, for errors of scaling and of float32
SHOWN_LABELS = 5  # number of wrong values that a message shows
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
    if not np.isfinite(values).all():
        return None
    low, high = float(values.min()), float(values.max())
    if kind == "percentile":
        top = float(np.percentile(values, TOP_PERCENTILE))
        return low, top if top > low else high
    if kind == "percentile, inverted":
        bottom = float(np.percentile(values, 100 - TOP_PERCENTILE))
        return bottom if bottom < high else low, high
    if kind == "zscore":
        middle, spread = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
        return middle - DEVIATIONS * spread, middle + DEVIATIONS * spread
    return low, high


def between(values: npt.NDArray[Any], bounds: Bounds) -> npt.NDArray[np.float32]:
    """Return ``values`` clipped to ``bounds`` and scaled to [0, 1]; all are 0 if the bounds are equal."""
    low, high = bounds
    if high <= low:
        return np.zeros(values.shape, np.float32)
    scaled = (values.astype(np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(scaled, 0.0, 1.0, out=scaled)


def labels_of(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the labels of a mask as int64; each value must be a whole number of at least 0, within 0.001.

    Raises:
        ValueError: some values are no labels; the message shows a few of them, and the position of the first one.
    """
    if array.dtype.kind not in "biuf":
        raise ValueError(f"the mask's values are {array.dtype}, no numbers; save labels as whole numbers")
    if array.dtype.kind == "b" or not array.size:
        return array.astype(np.int64)
    usable: npt.NDArray[np.bool_] = (array >= -LABEL_OFF) & (array <= MOST_LABEL)  # the comparison is False for NaN
    if array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            usable &= np.abs(array - np.round(array)) <= LABEL_OFF
    if usable.all():
        return np.round(array).astype(np.int64)
    places = np.argwhere(~usable)
    values = list(dict.fromkeys(f"{array[tuple(place)]:.7g}" for place in places[:1000]))[:SHOWN_LABELS]
    where = ", ".join(
        f"{name} {at}" for name, at in zip(("row", "column", "slice", "channel"), places[0], strict=False)
    )
    more = " ..." if len(places) > 1 else ""
    raise ValueError(
        f"its values are not whole numbers from 0 to {MOST_LABEL}: {len(places)} of {array.size} are "
        f"{', '.join(values)}{more}, the first at {where} (from 0)"
    )


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
            away = (values.astype(np.float64) - self.centre) / self.width
            return np.asarray(1 / (1 + np.exp(-4 * away)), np.float32)
        centre, width = (self.centre - 0.5, self.width - 1) if self.function == "LINEAR" else (self.centre, self.width)
        if width <= 0:  # LINEAR with a width of 1 is a threshold
            return (values > centre).astype(np.float32)
        return between(values, (centre - width / 2, centre + width / 2))
