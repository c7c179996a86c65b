"""Simulate how a site's camera changes every picture: colour balance, contrast, vignetting, blur.

Sites differ in their cameras and stains as hospitals do: mildly, and always in the same way. A site's number determines
its camera; another seed of a phantom gives other pictures taken by the same cameras.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import number, whole
from fairflare_lab.phantoms.canvas import Colour
from fairflare_lab.phantoms.scene import coordinates

BALANCE = (0.05, 0.11)  # range of the standard deviation of the logarithms of the three channels' gains
CONTRAST = (-0.35, 0.35)  # range of the contrast: below 0 a flat curve, above 0 a steep one
DARK_CORNERS = (0.0, 0.4)  # range of the share of light that a corner loses
BLUR = (0.0, 0.010)  # range of the Gaussian blur's standard deviation, as a share of the image's width
# Cameras of neighbouring numbers are far apart, and any number of them is spread evenly: multiples of the powers of
# 1/x, modulo 1, with x ** 6 = x + 1 (the golden ratio for five quantities).
STEPS = tuple(1.1347241384015194**-power for power in range(1, 6))


@dataclass(frozen=True)
class Camera:
    """Simulate a camera, as a function from pictures to pictures without state and without random numbers.

    Args:
        balance: gains of red, green and blue, ``> 0``.
        contrast: -1 to 1. Above 0, mid tones are spread; below 0, they are compressed; black and white do not change.
        vignetting: 0 to 1, share of the light lost in the corners; half as much is lost at the middle of an edge.
        blur: standard deviation of a Gaussian blur, as a share of the width; ``>= 0``.
    """

    balance: Colour = (1.0, 1.0, 1.0)
    contrast: float = 0.0
    vignetting: float = 0.0
    blur: float = 0.0

    def take(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return images (n, size, size, 3) uint8 as this camera shows them; the same array if it changes nothing.

        The effects are applied in the order of a real camera: blur, vignetting, colour balance, contrast.
        """
        if self == PLAIN or not len(images):
            return images
        size = images.shape[1]
        seen = images.astype(np.float32) / 255
        if self.blur:
            from scipy.ndimage import gaussian_filter

            seen = gaussian_filter(seen, (0, self.blur * size, self.blur * size, 0), mode="nearest")
        x, y = coordinates(size)
        seen *= (1 - np.float32(self.vignetting) * (x * x + y * y) / 2)[:, :, None]
        seen = np.clip(seen * np.asarray(self.balance, np.float32), 0, 1)
        seen += np.float32(self.contrast) * (seen * seen * (3 - 2 * seen) - seen)
        return np.round(np.clip(seen, 0, 1) * 255).astype(np.uint8)


PLAIN = Camera()  # camera that does not change images


def camera_of(site: int, strength: float = 1.0) -> Camera:
    """Return the camera of a site.

    Args:
        site: number of the site, from 0.
        strength: 0 for a camera that does not change images, 1 for a mild and visible difference; at most 1.5.

    >>> camera_of(0, 0.0) == PLAIN
    True
    """
    whole("site", site, low=0)
    number("strength", strength, low=0, high=1.5)
    reach, contrast, corners, turn, blur = ((0.5 + (site + 1) * step) % 1 for step in STEPS)
    # The logarithms of the gains are cosines of three angles 120 degrees apart, so that they sum to 0 for any hue.
    around = 2 * np.pi * (turn + np.arange(3) / 3)
    gains = np.exp(strength * np.interp(reach, (0, 1), BALANCE) * np.sqrt(2) * np.cos(around))
    return Camera(
        balance=(float(gains[0]), float(gains[1]), float(gains[2])),
        contrast=strength * float(np.interp(contrast, (0, 1), CONTRAST)),
        vignetting=strength * float(np.interp(corners, (0, 1), DARK_CORNERS)),
        blur=strength * float(np.interp(blur, (0, 1), BLUR)),
    )
