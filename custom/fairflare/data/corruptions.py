"""Corrupt images as in the FedISM experiments: Gaussian noise and motion blur of severity 1 to 5. NumPy only.

The constants are those of Hendrycks & Dietterich (2019), for images of 224 x 224 (spec README 4.5).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import choice, number, refuse

Image = npt.NDArray[np.uint8]

SEVERITIES = (1, 2, 3, 4, 5)
NOISE_SIGMA = (0.08, 0.12, 0.18, 0.26, 0.38)  # standard deviation of the noise by severity, for intensities in [0, 1]
# Radius and standard deviation s of the blur by severity, in pixels of a 224-pixel image.
BLUR = ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0))
BLUR_ANGLE = 45.0  # largest angle of the motion from the horizontal, in degrees, to either side
REFERENCE_SIZE = 224  # height and width in pixels for which the constants are defined


def gaussian_noise(image: Image, severity: int, rng: np.random.Generator) -> Image:
    r"""Add Gaussian noise to an image, independent for each pixel and channel: :math:`clip(x + N(0, \sigma^2), 0, 1)`.

    Args:
        image: (h, w) or (h, w, channels) uint8. Corrupt a grey image before repeating it to three channels.
        severity: 1 to 5: sigma 0.08, 0.12, 0.18, 0.26, 0.38 of the full range.
        rng: source of the noise.

    Returns:
        A new uint8 image of the same shape; intensities are truncated, not rounded, as in the published code.
    """
    noise = rng.standard_normal(_check_image(image).shape, np.float32) * (255 * NOISE_SIGMA[_severity(severity) - 1])
    return np.clip(noise + image, 0, 255).astype(np.uint8)


def motion_blur(image: Image, severity: int, rng: np.random.Generator) -> Image:
    r"""Blur an image along a line of random direction with a one-sided Gaussian.

    .. math:: y = \sum_{i=0}^{2r} k_i \, x(\cdot + d_i), \quad k_i \propto e^{-i^2 / 2 s^2}, \quad
        d_i = \lceil i (\cos\theta, \sin\theta) - 0.5 \rceil, \quad \theta \sim U(-45°, 45°)

    Outside the image the edge is repeated. A constant image is unchanged. At 224 x 224 this is ImageMagick's
    ``-motion-blur``, which the published code calls: compared with version 6.9.11 for severities 1, 3 and 5 and
    angles from -40 to 45 degrees, no pixel differed by more than 1.

    Args:
        image: (h, w) or (h, w, channels) uint8.
        severity: 1 to 5: radius r and s (10, 3), (15, 5), (15, 8), (15, 12), (20, 15). They are multiplied by
            size / 224, size being the shorter edge, so that a 48-pixel image loses as much of its content as a
            224-pixel one does.
        rng: source of the direction.

    Returns:
        A new uint8 image of the same shape, rounded.
    """
    height, width = _check_image(image).shape[:2]
    angle = math.radians(rng.uniform(-BLUR_ANGLE, BLUR_ANGLE))
    blurred = np.zeros(image.shape, np.float32)
    for i, k in enumerate(blur_kernel(severity, size=min(height, width)).tolist()):
        dx, dy = (math.ceil(i * part - 0.5) for part in (math.cos(angle), math.sin(angle)))
        y, x = np.clip(np.arange(height) + dy, 0, height - 1), np.clip(np.arange(width) + dx, 0, width - 1)
        blurred += np.float32(k) * image[y[:, None], x[None, :]]
    return np.round(np.clip(blurred, 0, 255)).astype(np.uint8)


def blur_kernel(severity: int, *, size: int = REFERENCE_SIZE) -> npt.NDArray[np.float64]:
    """Return the weights k_i of :func:`motion_blur`, sum 1.

    >>> blur_kernel(3).size, round(float(blur_kernel(3)[0]), 6)
    (31, 0.095011)
    """
    radius, s = BLUR[_severity(severity) - 1]
    scale = size / REFERENCE_SIZE
    radius, s = max(1, round(radius * scale)), s * scale
    kernel = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * s * s))
    return kernel / kernel.sum()


CORRUPTIONS: Mapping[str, Callable[..., Image]] = {"gaussian_noise": gaussian_noise, "motion_blur": motion_blur}


def corrupt(image: Image, kind: str, severity: int, seed: int) -> Image:
    """Return one corrupted copy of an image; the same seed gives the same copy.

    Args:
        image: (h, w) or (h, w, channels) uint8.
        kind: ``"gaussian_noise"`` or ``"motion_blur"``.
        severity: 1 to 5.
        seed: random seed for this image, such as ``image_seed(file name)``.
    """
    return CORRUPTIONS[choice("corruption", kind, CORRUPTIONS)](image, severity, np.random.default_rng(seed))


def image_seed(image_id: str | int, seed: int = 0) -> int:
    """Return a seed for one image from a hash of its id: independent of order, of other images and of the machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{image_id}".encode()).digest()[:8], "little")


def _severity(severity: Any) -> int:
    return int(number("severity", severity, low=1, high=len(SEVERITIES), whole=True))


def _check_image(image: Any) -> Image:
    kind, shape = getattr(image, "dtype", type(image).__name__), getattr(image, "shape", ())
    refuse({
        f"image must be a uint8 array of shape (h, w) or (h, w, channels), got {kind} {shape}":
            not isinstance(image, np.ndarray) or kind != np.uint8 or len(shape) not in (2, 3) or not image.size,
    })  # fmt: skip
    return image
