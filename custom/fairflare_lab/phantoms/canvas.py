"""Draw shapes, noise and colours of the classification phantoms on a small colour canvas. NumPy only.

Coordinates run from -1 to 1, x to the right and y downwards, whatever the size of the image; random numbers
are drawn in an order that does not depend on the size either, except for the sensor noise, which comes last.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Map = npt.NDArray[np.floating[Any]]  # array (size, size), float32 apart from intermediate results
Colour = tuple[float, float, float]  # red, green and blue, each in [0, 1]

NOISE_SCALE = 1 / 0.4794  # factor that brings B-spline noise to a standard deviation of about 1


@lru_cache(maxsize=8)
def grid(size: int) -> tuple[Map, Map]:
    line = ((np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1).astype(np.float32)
    x, y = (np.ascontiguousarray(m) for m in np.meshgrid(line, line))
    x.flags.writeable = y.flags.writeable = False
    return x, y


@lru_cache(maxsize=256)
def _spline(size: int, cells: int) -> npt.NDArray[np.float32]:
    """Return (size, cells + 3) cubic B-spline weights that spread ``cells`` intervals over the image."""
    t = (np.arange(size) + 0.5) * cells / size
    left = np.floor(t).astype(int)
    f = t - left
    weights = np.stack([(1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3]) / 6
    matrix = np.zeros((size, cells + 3), np.float32)
    for k in range(4):
        matrix[np.arange(size), left + k] = weights[k]
    return matrix


def ramp(values: Map, low: Map | float, high: Map | float) -> Map:
    """Map values linearly to [0, 1]: 0 at and below ``low``, 1 at and above ``high``; ``low > high`` inverts this."""
    start, slope = np.asarray(low, np.float32), np.asarray(1 / (high - low), np.float32)
    return np.clip((values - start) * slope, 0, 1)


class Canvas:
    """Represent one image while it is drawn; attribute ``image`` is (3, size, size), in [0, 1]."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self.size = size
        self.rng = rng
        self.uniform = rng.uniform
        self.x, self.y = grid(size)
        self.image = np.zeros((3, size, size), np.float32)

    # methods that draw random numbers

    def noise(self, cells: int, stretch: float = 1.0) -> Map:
        """Return a smooth random field of mean 0 and deviation 1, with features of about a ``cells``-th of the width.

        A ``stretch`` above 1 makes the features longer in x by that factor.
        """
        across = max(1, round(cells / stretch))
        grid = self.rng.standard_normal((cells + 3, across + 3), np.float32)
        return (_spline(self.size, cells) * NOISE_SCALE) @ grid @ _spline(self.size, across).T

    # methods that return shapes

    def ellipse(self, cx: float, cy: float, a: float, b: float, turn: float = 0.0) -> Map:
        """Return each pixel's radius relative to an ellipse: below 1 inside, 1 on its edge."""
        c, s = np.float32(np.cos(turn)), np.float32(np.sin(turn))
        dx, dy = self.x - np.float32(cx), self.y - np.float32(cy)
        return np.sqrt(((c * dx + s * dy) / np.float32(a)) ** 2 + ((c * dy - s * dx) / np.float32(b)) ** 2)

    # methods that paint

    def paint(self, alpha: Map | float, colour: Colour | npt.NDArray[Any]) -> None:
        """Blend a colour (3,) over the image, with ``alpha`` as its share at each pixel."""
        self.image += alpha * (np.asarray(colour, np.float32)[:, None, None] - self.image)

    def finish(self, *, gain: float, cast: float, noise: float) -> npt.NDArray[np.uint8]:
        """Apply exposure and white balance that differ by ``gain`` and ``cast``, and sensor noise.

        Returns:
            (size, size, 3) uint8.
        """
        balance = np.exp(self.rng.normal(0, cast, 3) + self.rng.normal(0, gain)).astype(np.float32)
        self.image *= balance[:, None, None]
        self.image += np.float32(noise) * self.rng.standard_normal(self.image.shape, np.float32)
        levels = np.round(np.clip(self.image, 0, 1) * 255).astype(np.uint8)
        return np.ascontiguousarray(levels.transpose(1, 2, 0))
