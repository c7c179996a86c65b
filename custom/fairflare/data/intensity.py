"""Values of a file: grey ones to [0, 1], by what the task chose, and labels to whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

TOP_PERCENTILE = 99.0  # of an image without a fixed scale: brighter than this is white

Intensity = Literal["auto", "range", "percentile", "window", "zscore"]
LABEL_OFF = 1e-3  # from a whole number: what scaling and float32 do to a label
SHOWN_LABELS = 5
MOST_LABEL = 2**31
DEVIATIONS = 3.0  # of "zscore", below and above the mean

#: What each does, for whoever finds a model years later.
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
    """Return what becomes 0 and 1; ``None``: some values are NaN or infinite. Alike where all values are.

    Args:
        array: the values of a whole file.
        kind: ``"range"``, ``"percentile"``, ``"zscore"``; ``"percentile, inverted"``: the darkest percent is white.
        padded: NaN marks what lies outside the picture, and does not count.
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
    """Return ``values`` clipped to ``bounds`` and scaled to [0, 1]; 0 where the bounds are alike."""
    low, high = bounds
    if high <= low:
        return np.zeros(values.shape, np.float32)
    scaled = (values.astype(np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(scaled, 0.0, 1.0, out=scaled)


def labels_of(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the labels of a mask: values that are whole numbers of 0 and more within 0.001.

    Raises:
        ValueError: some are none; shows the first and where the first of them is.
    """
    if array.dtype.kind not in "biuf":
        raise ValueError(f"its values are {array.dtype}, no labels")
    if array.dtype.kind == "b" or not array.size:
        return array.astype(np.int64)
    usable: npt.NDArray[np.bool_] = (array >= -LABEL_OFF) & (array <= MOST_LABEL)  # NaN is not
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
    """Which values are shown between black and white: PS3.3, C.11.2.1.

    Args:
        centre, width: in measured values (after the rescaling).
        function: ``"LINEAR"``, ``"LINEAR_EXACT"`` or ``"SIGMOID"``.
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
