"""Nuclei in five acquisition groups of the 2018 Data Science Bowl."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from fairflare.base.checks import whole
from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError
from fairflare.data.preparers.common import Item, Preparer, Writing, mask_items, npz_files, write_sites
from fairflare.data.preparers.options import option

NUCLEI = ("fluo256", "fluo360", "fluo520", "histology256x320", "brightfield1024")


def prepare_nuclei(
    source_dir: str | Path, out_dir: str | Path, *, crop: int | None = None, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """Five groups of nucleus images from ``nuclei_<group>.npz``; masks 0 and 1, split by source image.

    Args:
        source_dir: folder with the files.
        crop: so many pixels in height and width from the middle of each image, and the rest is left out: what is small
            is then not made smaller still by the network's ``image_size``; ``None``: whole images.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: an image is smaller than ``crop`` (names site and image).
    """
    files = npz_files(Path(source_dir), "nuclei_", NUCLEI)
    items = {name: mask_items(name, file, (0, 1)) for name, file in files.items()}
    if crop is not None:
        side = whole("crop", crop, low=1)
        items = {name: _middles(name, those, side) for name, those in items.items()}
    return write_sites(items, out_dir, **writing)


def _middles(site: str, items: Iterable[Item], side: int) -> Iterator[Item]:
    for item in items:
        image, mask = np.asarray(item.image), np.asarray(item.mask)
        height, width = mask.shape
        if side > min(height, width):
            raise DataError(f"site '{site}': image {item.name!r} has {height}x{width} pixels; crop must be no larger")
        top, left = (height - side) // 2, (width - side) // 2
        part = np.s_[top : top + side, left : left + side]
        yield replace(item, image=np.ascontiguousarray(image[part]), mask=np.ascontiguousarray(mask[part]))


OPTIONS = (option("crop", int | None, "Only the middle of each image; default: all of it.", None, metavar="PIXELS"),)
PREPARERS = (Preparer("nuclei", "nucleus segmentation, five acquisition groups", prepare_nuclei, OPTIONS),)
