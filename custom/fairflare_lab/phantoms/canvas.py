"""What the classification phantoms draw with: a small colour canvas. NumPy only.

Coordinates run from -1 to 1, x to the right and y downwards, whatever the size of the image; random numbers
are drawn in an order that does not depend on the size either, except for the sensor noise, which comes last.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Map = npt.NDArray[np.floating[Any]]  # (size, size), float32 but for passing results
Colour = tuple[float, float, float]  # red, green, blue in [0, 1]

NOISE_SCALE = 1 / 0.4794  # brings B-spline noise to a deviation of about 1


@lru_cache(maxsize=8)
def grid(size: int) -> tuple[Map, Map]:
    line = ((np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1).astype(np.float32)
    x, y = (np.ascontiguousarray(m) for m in np.meshgrid(line, line))
    x.flags.writeable = y.flags.writeable = False
    return x, y


@lru_cache(maxsize=256)
def _spline(size: int, cells: int) -> npt.NDArray[np.float32]:
    """(size, cells + 3) cubic B-spline weights that spread ``cells`` intervals over the image."""
    t = (np.arange(size) + 0.5) * cells / size
    left = np.floor(t).astype(int)
    f = t - left
    weights = np.stack([(1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3]) / 6
    matrix = np.zeros((size, cells + 3), np.float32)
    for k in range(4):
        matrix[np.arange(size), left + k] = weights[k]
    return matrix


def ramp(values: Map, low: Map | float, high: Map | float) -> Map:
    """0 at and below ``low``, 1 at and above ``high`` (or the other way round), straight between."""
    start, slope = np.asarray(low, np.float32), np.asarray(1 / (high - low), np.float32)
    return np.clip((values - start) * slope, 0, 1)


class Canvas:
    """One image while it is drawn: ``image`` is (3, size, size), in [0, 1]."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self.size = size
        self.rng = rng
        self.x, self.y = grid(size)
        self.pixel = 2 / size
        self.image = np.zeros((3, size, size), np.float32)

    # random numbers

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def count(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included."""
        return int(self.rng.integers(low, high + 1))

    def noise(self, cells: int, stretch: float = 1.0) -> Map:
        """A smooth random field of mean 0 and deviation 1, with features of about a ``cells``-th of the width.

        ``stretch`` above 1: longer in x by that factor.
        """
        across = max(1, round(cells / stretch))
        grid = self.rng.standard_normal((cells + 3, across + 3), np.float32)
        return (_spline(self.size, cells) * NOISE_SCALE) @ grid @ _spline(self.size, across).T

    # shapes

    def cover(self, distance: Map, softness: float = 0.0) -> Map:
        """Share of each pixel that lies inside, from a signed distance (negative inside)."""
        return np.clip(0.5 - distance * np.float32(1 / max(self.pixel, softness)), 0, 1)

    def ellipse(self, cx: float, cy: float, a: float, b: float, turn: float = 0.0) -> Map:
        """Relative radius: below 1 inside."""
        c, s = np.float32(np.cos(turn)), np.float32(np.sin(turn))
        dx, dy = self.x - np.float32(cx), self.y - np.float32(cy)
        return np.sqrt(((c * dx + s * dy) / np.float32(a)) ** 2 + ((c * dy - s * dx) / np.float32(b)) ** 2)

    def stamp(self, px: npt.ArrayLike, py: npt.ArrayLike, radius: npt.ArrayLike) -> Map:
        """Union of discs, as the share of each pixel; below a pixel they fade instead of shrinking."""
        x, y, r = np.broadcast_arrays(*(np.asarray(v, np.float32).ravel() for v in (px, py, radius)))
        if not len(x):
            return np.zeros((self.size, self.size), np.float32)
        column = (x + 1) / np.float32(self.pixel) - 0.5
        row = (y + 1) / np.float32(self.pixel) - 0.5
        reach = r / np.float32(self.pixel)
        half = max(1, int(np.ceil(reach.max())))  # a disc reaches at most so far from the pixel it is centred in
        border = 2 * half + 1  # what lies off the canvas is drawn into a border
        wide = self.size + 2 * border
        offset = np.arange(-half, half + 1, dtype=np.int32)
        columns, rows = np.rint(column), np.rint(row)
        dx = (columns - column)[:, None] + offset.astype(np.float32)
        dy = (rows - row)[:, None] + offset.astype(np.float32)
        distance = np.sqrt((dx * dx)[:, None, :] + (dy * dy)[:, :, None])
        alpha = np.clip((reach + np.float32(0.5))[:, None, None] - distance, 0, np.clip(2 * reach, 0, 1)[:, None, None])
        columns, rows = (
            np.clip(v, -half - 1, self.size + half).astype(np.int32)[:, None] + (offset + border)
            for v in (columns, rows)
        )
        index = rows[:, :, None] * wide + columns[:, None, :]
        out = np.zeros(wide * wide, np.float32)
        np.maximum.at(out, index.ravel(), alpha.ravel())
        return np.ascontiguousarray(out.reshape(wide, wide)[border:-border, border:-border])

    def stroke(self, px: npt.ArrayLike, py: npt.ArrayLike, width: Any) -> Map:
        """Lines through points: (n,) or (lines, n) coordinates, about evenly spaced; ``width`` as they, or one."""
        x, y = np.atleast_2d(np.asarray(px, np.float32)), np.atleast_2d(np.asarray(py, np.float32))
        w = np.asarray(width, np.float32)
        dx, dy = x[:, 1:] - x[:, :-1], y[:, 1:] - y[:, :-1]
        step = float(np.sqrt((dx * dx + dy * dy).max(initial=0.0)))
        pieces = max(1, int(np.ceil(step / max(0.85 * self.pixel, 0.35 * float(w.max())))))
        if pieces > 1:  # points between, without the last of each line
            t = np.arange(pieces, dtype=np.float32) / np.float32(pieces)
            x, y = x[:, :-1, None] + dx[:, :, None] * t, y[:, :-1, None] + dy[:, :, None] * t
            if w.ndim:
                w = np.broadcast_to(np.broadcast_to(w, (len(dx), dx.shape[1] + 1))[:, :-1, None], x.shape)
        return self.stamp(x, y, w / 2)

    # colour

    def fill(self, colour: Colour | npt.NDArray[Any]) -> None:
        self.image[:] = np.asarray(colour, np.float32)[:, None, None]

    def paint(self, alpha: Map | float, colour: Colour | npt.NDArray[Any]) -> None:
        """Lay a colour over the image: (3,), or (3, size, size)."""
        over = np.asarray(colour, np.float32)
        if over.ndim == 1:
            over = over[:, None, None]
        self.image += alpha * (over - self.image)

    def shade(self, factor: Map | float) -> None:
        self.image *= factor

    def absorb(self, *layers: tuple[Map | float, Colour]) -> None:
        """Beer-Lambert: darken by exp(-sum of density * absorption of red, green and blue)."""
        density = np.zeros_like(self.image)
        for amount, absorption in layers:
            density += np.asarray(amount, np.float32) * np.asarray(absorption, np.float32)[:, None, None]
        self.image *= np.exp(-density)

    def finish(self, *, gain: float, cast: float, noise: float) -> npt.NDArray[np.uint8]:
        """Exposure and white balance that differ by ``gain`` and ``cast``, sensor noise; (size, size, 3) uint8."""
        balance = np.exp(self.rng.normal(0, cast, 3) + self.rng.normal(0, gain)).astype(np.float32)
        self.image *= balance[:, None, None]
        if noise:
            self.image += np.float32(noise) * self.rng.standard_normal(self.image.shape, np.float32)
        levels = np.round(np.clip(self.image, 0, 1) * 255).astype(np.uint8)
        return np.ascontiguousarray(levels.transpose(1, 2, 0))
