"""What a preparer hands on for each image: where its pixels come from, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.data.corruptions import corrupt
from fairflare.data.datalist import DataError, Sample
from fairflare.data.preparers.tables import Row
from fairflare.data.reading import read_image, read_mask

Pixels: TypeAlias = "npt.NDArray[np.uint8]"


# Pixels, a file, or what makes pixels when they are written.
Source: TypeAlias = "Pixels | Path | Callable[[], Pixels]"


@dataclass(frozen=True)
class Item:
    """One image on its way into a site's folder.

    Attributes:
        name: of its file, without ending.
        group: items of one group (a patient) stay in one split and at one site.
        image: its pixels; a path is copied as it is.
        mask: the same, or the number of the class, first its name.
        patient: the site's own key, for the datalist; None: not known.
        site: where the source says that it is from.
        splits: where the source puts it; none: drawn.
        volume, spacing: for the datalist.
        attributes: of the person, for the datalist; None: not known.
        slices: numbers of those to be listed, each as an entry; None: the file as it is.
        shared: every site has it: its file is written once.
        fold: of a cross-validation in which it is tested, from 0; None: drawn within its site.
        attribute: of the person (skin tone): of a common test set ``test_<attribute>`` has those with it.
        text: that a patient is searched in; empty: the name.
        row: of a table, for attributes.
    """

    name: str
    group: str
    image: Any  # Source; once written the path below the folder of the site
    mask: Any  # the same, int or str
    patient: str | None = None
    site: str = ""
    splits: tuple[str, ...] = ()
    volume: str | None = None
    spacing: tuple[float, ...] | None = None
    shared: bool = False
    attribute: str = ""
    fold: int | None = None
    slices: tuple[int, ...] | None = None
    attributes: Mapping[str, str | float] | None = None
    text: str = ""
    row: Row = field(default_factory=Row)


def relabelled(source: Source, tops: Sequence[int], labels: Sequence[int]) -> Pixels:
    """Return a mask whose grey values become labels by range.

    Args:
        source: the mask.
        tops: of each range but the last one, in order, the highest value; the last one goes to 255.
        labels: one for each range.
    """
    return np.asarray(labels, np.uint8)[np.searchsorted(np.asarray(tops), mask_of(source))]


def corrupted(source: Source, kind: str, severity: int, seed: int, edge: int) -> Pixels:
    """Return a corrupted copy of an image that is brought to edge x edge pixels before."""
    return corrupt(resized(source, edge), kind, severity, seed)


def pixels_of(source: Source) -> Pixels:
    """Return the pixels of an image as 8 bits, of its own size; those of a file as training reads it."""
    if isinstance(source, Path):
        pixels = np.round(read_image(Sample(source, 0), site="source", split="none") * 255).astype(np.uint8)
        return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    return source() if callable(source) else source


def mask_of(source: Source) -> Pixels:
    """Return the values of a mask, 0 to 255; those of a file as training reads it."""
    if not isinstance(source, Path):
        return source() if callable(source) else source
    values = read_mask(Sample(source, source), site="source", split="none")
    if values.min() < 0 or values.max() > 255:
        raise DataError(f"mask '{source}' has values from {values.min()} to {values.max()}; expected 0 to 255")
    return values.astype(np.uint8)


def resized(source: Source, edge: int, is_mask: bool = False) -> Pixels:
    """Bring an image to edge x edge pixels by Pillow's bilinear filter, a low-pass where it shrinks, a mask by nearest
    neighbour.
    """
    pixels = mask_of(source) if is_mask else pixels_of(source)
    if pixels.shape[:2] == (edge, edge):
        return pixels
    from PIL import Image

    how = Image.Resampling.NEAREST if is_mask else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((edge, edge), how))
