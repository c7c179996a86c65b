"""Draws of a site's test images with replacement: the same in every run, so that runs are compared image by image."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from fairflare.core import checks

MOST = 10_000  # draws that a site makes


def draws(site: str, num_images: int, count: int) -> npt.NDArray[np.int64]:
    """Bootstrap samples of a site's test images.

    Args:
        site: name. Together with the other two it decides the draws, whatever the method and the run's seed.
        num_images: of the test split, ``>= 1``.
        count: number of draws, from 1 to :data:`MOST`.

    Returns:
        (count, num_images), indices of images in the order of the split.

    Raises:
        ValueError: a number out of range.

    Source:
        Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 1979.
    """
    checks.whole(f"site {site!r}: number of test images", num_images)
    checks.number("number of draws", count, low=1, high=MOST, whole=True)
    digest = hashlib.sha256(f"{site}/{num_images}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).integers(0, num_images, (count, num_images))
