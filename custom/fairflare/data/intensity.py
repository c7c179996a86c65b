"""Grey values of a file to [0, 1], by what the task chose."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

TOP_PERCENTILE = 99.0  # of an image without a fixed scale: brighter than this is white

Intensity = Literal["auto", "range", "percentile", "window", "zscore"]
INTENSITIES: tuple[str, ...] = get_args(Intensity)
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


def bounds_of(array: npt.NDArray[Any], kind: str) -> Bounds | None:
    """What becomes 0 and 1; ``None``: some values are NaN or infinite. Alike where all values are.

    Args:
        array: the values of a whole file.
        kind: ``"range"``, ``"percentile"``, ``"zscore"``; ``"percentile, inverted"``: the darkest percent is white.
    """
    values = array.astype(np.float32)
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
    """``values`` clipped to ``bounds`` and scaled to [0, 1]; 0 where the bounds are alike."""
    low, high = bounds
    if high <= low:
        return np.zeros(values.shape, np.float32)
    scaled = (values.astype(np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(scaled, 0.0, 1.0, out=scaled)
