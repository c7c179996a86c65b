"""Draw a synthetic spot whose colour, outline, texture and dots depend on its class, without patient data.

One scene serves any number of classes. A class is a point in a space of eight numbers, which is drawn from the number
of the class; images are random points near the point of their class, so that near classes are hard to distinguish and
every class can be recognised better than by chance.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fairflare_lab.phantoms.canvas import Canvas, Colour, Map, ramp

TONES = ("light", "dark")  # tones of the skin around the spot
SKIN: dict[str, Colour] = {"light": (0.86, 0.70, 0.62), "dark": (0.46, 0.33, 0.27)}
SEEN = {"light": 1.0, "dark": 0.75}  # contrast of a spot on skin of each tone
SEED = 20260  # random seed of the classes, the same for every phantom


class SpotLook(NamedTuple):
    """Store the usual look of a class: colour of the spot, lobes of its outline, cells of its texture, dots."""

    colour: npt.NDArray[np.float64]  # colour of the spot, (3,) in [0, 1]
    lobes: int
    ragged: float
    cells: int
    stretch: float
    dots: int
    bright: float  # brightness of the dots, in [0, 1]


@lru_cache(maxsize=64)
def look_of(label: int) -> SpotLook:
    """Return the usual look of a spot of class number ``label``, from 0."""
    rng = np.random.default_rng([SEED, label])
    return SpotLook(
        colour=rng.uniform(0.1, 0.75, 3),
        lobes=int(rng.integers(2, 7)),
        ragged=float(rng.uniform(0.0, 0.3)),
        cells=int(rng.choice([3, 5, 8, 12])),
        stretch=float(rng.choice([1.0, 3.0])),
        dots=int(rng.choice([0, 4, 12])),
        bright=float(rng.choice([0.05, 0.95])),
    )


def coordinates(size: int) -> tuple[Map, Map]:
    """Return x, to the right, and y, downwards, of the pixels of a picture: from -1 to 1 whatever its size."""
    line = ((np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1).astype(np.float32)
    return line[None, :], line[:, None]


def draw_spot(size: int, rng: np.random.Generator, label: int, tone: str | None) -> npt.NDArray[np.uint8]:
    """Draw one image of a spot on skin.

    Args:
        size: height and width in pixels.
        rng: random generator; the image is a function of its state.
        label: number of the class.
        tone: tone of the skin, one of :data:`TONES`; ``None`` for the first tone.

    Returns:
        (size, size, 3) uint8.
    """
    c, uniform = Canvas(coordinates(size), rng), rng.uniform
    look, tone = look_of(label), tone or TONES[0]
    c.paint(1, SKIN[tone])
    c.image *= 1 + 0.06 * c.noise((4, 4)) + np.float32(uniform(0.01, 0.04)) * c.noise((14, 14))
    cx, cy = uniform(-0.2, 0.2), uniform(-0.2, 0.2)
    radius = uniform(0.45, 0.75)
    turn, stretched = uniform(0, 2 * np.pi), uniform(0.75, 1.0)
    angle = np.arctan2(c.places[1] - np.float32(cy), c.places[0] - np.float32(cx))
    waves = np.float32(look.ragged * uniform(0.5, 1.2)) * np.cos(look.lobes * (angle - np.float32(turn)))
    edge = c.ellipse((cx, cy), (radius, radius * stretched), turn) * (1 + waves)
    inside = ramp(edge, 1.1, 0.85)
    colour = np.clip(look.colour + rng.normal(0, 0.13, 3), 0, 1)
    c.paint(inside * np.float32(SEEN[tone] * uniform(0.45, 0.9)), colour)
    texture = ramp(c.noise((look.cells, max(1, round(look.cells / look.stretch)))), -0.4, 0.6)
    c.image *= 1 - inside * texture * np.float32(SEEN[tone] * uniform(0.15, 0.5))
    dots = np.zeros_like(inside)
    for _ in range(int(rng.poisson(look.dots))):
        reach, around, dot = radius * np.sqrt(uniform(0, 1)), uniform(0, 2 * np.pi), uniform(0.04, 0.08)
        there = c.ellipse((cx + reach * np.cos(around), cy + reach * np.sin(around)), (dot, dot))
        dots = np.maximum(dots, ramp(there, 1.3, 0.7))
    c.paint(dots * np.float32(SEEN[tone] * uniform(0.4, 0.9)), (look.bright,) * 3)
    # Exposure and white balance, then the sensor's noise.
    c.image *= np.exp(rng.normal(0, 0.06, 3) + rng.normal(0, 0.12)).astype(np.float32)[:, None, None]
    c.image += np.float32(0.015) * rng.standard_normal(c.image.shape, np.float32)
    return np.ascontiguousarray(np.round(np.clip(c.image, 0, 1) * 255).astype(np.uint8).transpose(1, 2, 0))
