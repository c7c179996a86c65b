"""Draw shapes, noise and colours of the phantoms on a small canvas of pictures or volumes. NumPy only.

Random numbers are drawn in an order that does not depend on the number of pixels, except for the sensor's noise, which
comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Map = npt.NDArray[np.floating[Any]]  # array of the canvas's shape, float32 apart from intermediate results
Colour = tuple[float, float, float]  # red, green and blue, each in [0, 1]

NOISE_SCALE = 1 / 0.4794  # factor that brings B-spline noise of a picture to a standard deviation of about 1


@lru_cache(maxsize=256)
def _spline(size: int, cells: int) -> npt.NDArray[np.float32]:
    """Return (size, cells + 3) cubic B-spline weights that spread ``cells`` intervals over the image."""
    t = (np.arange(size) + 0.5) * cells / size
    left = np.floor(t).astype(int)
    f = t - left
    weights = np.stack([(1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3]) / 6
    matrix = np.zeros((size, cells + 3), np.float32)
    matrix[np.arange(size), left + np.arange(4)[:, None]] = weights
    return matrix


def ramp(values: Map, low: Map | float, high: Map | float) -> Map:
    """Map values linearly to [0, 1]: 0 at and below ``low``, 1 at and above ``high``; ``low > high`` inverts this."""
    start, slope = np.asarray(low, np.float32), np.asarray(1 / (high - low), np.float32)
    return np.clip((values - start) * slope, 0, 1)


class Canvas:
    """Represent one image while it is drawn.

    Args:
        places: coordinates x, y and for volumes z of the pixels, float32, which broadcast to the canvas's shape.
        rng: random generator of noise.
        channels: number of colours. Attribute ``image`` is (channels, *shape), in [0, 1].
    """

    def __init__(self, places: Sequence[Map], rng: np.random.Generator, channels: int = 3) -> None:
        self.places, self.rng, self.channels = list(places), rng, channels
        self.shape = np.broadcast_shapes(*(place.shape for place in places))
        self.image = np.zeros((channels, *self.shape), np.float32)

    def noise(self, cells: Sequence[int]) -> Map:
        """Return a smooth random field of mean 0; of pictures its deviation is 1, of volumes 0.7.

        Args:
            cells: along each axis of the canvas, how many features it has, about.
        """
        field = self.rng.standard_normal([count + 3 for count in cells], np.float32)
        for axis, (size, count) in enumerate(zip(self.shape, cells, strict=True)):
            scale = NOISE_SCALE if axis == 0 else 1
            field = np.moveaxis(np.tensordot(_spline(size, count) * scale, field, (1, axis)), 0, axis)
        return field

    def ellipse(self, centre: Iterable[float], radii: Iterable[float], turn: float = 0.0) -> Map:
        """Return each pixel's radius relative to an ellipsoid: below 1 inside, 1 on its edge; ``turn``: about z."""
        c, s = np.float32(np.cos(turn)), np.float32(np.sin(turn))
        x, y, *rest = (place - np.float32(middle) for place, middle in zip(self.places, centre, strict=True))
        turned = zip((c * x + s * y, c * y - s * x, *rest), radii, strict=True)
        return np.sqrt(sum((part / np.float32(radius)) ** 2 for part, radius in turned))

    def paint(self, alpha: Map | float, colour: Sequence[float] | npt.NDArray[Any]) -> None:
        """Blend a colour (channels,) over the image, with ``alpha`` as its share at each pixel."""
        self.image += alpha * (np.asarray(colour, np.float32).reshape(-1, *[1] * len(self.shape)) - self.image)
