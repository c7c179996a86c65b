"""Represent the images of a preparer before they are written: source of the pixels, and facts about each image."""

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


# Source of an image: pixels, the path of a file, or a function that returns pixels when the image is written.
Source: TypeAlias = "Pixels | Path | Callable[[], Pixels]"


@dataclass(frozen=True)
class Item:
    """Represent one image that is to be written into a site's folder.

    Attributes:
        name: file name of the image, without ending.
        group: name of the image's group (patient); images of one group stay in one split and at one site.
        image: source of the pixels; a path is copied unchanged.
        mask: source of the mask, or the number of the class; before classes are numbered, the name of the class. None:
            the image has no label.
        patient: identifier of the patient for the datalist; None if it is not known.
        site: name of the site that the source gives.
        splits: splits that the source gives; empty if the split is drawn.
        volume, spacing: values of the keys ``volume`` and ``spacing`` of the image's entry in the datalist.
        attributes: attributes of the person for the datalist; None if it is not known.
        slices: numbers of the slices to list, each as an entry; None if the file is listed as one entry.
        shared: whether every site has the image, whose file is then written once.
        fold: number of the cross-validation's fold that tests the image, from 0; None if the folds are drawn by site.
        attribute: attribute of the person (skin tone), for the test list ``test_<attribute>`` of a common test set.
        text: text in which the patient's identifier is searched; empty for the name.
        row: row of the table that names the image, for the person's attributes.
        more: further images of the case, as sources; each is a channel.
        channels: names of the channels; one for each image, or for each volume along the fourth axis of the only file.
    """

    name: str
    group: str
    image: Any  # a Source; after writing, the path below the folder of the site
    mask: Any  # a Source, path, class number (int), class name (str) or None
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
    more: tuple[Any, ...] = ()
    channels: tuple[str, ...] = ()


def relabel_mask(source: Source, tops: Sequence[int], labels: Sequence[int]) -> Pixels:
    """Convert the grey values of a mask to labels: each range of values becomes one label.

    Args:
        source: source of the mask.
        tops: highest value of each range but the last, in order; the last range ends at 255.
        labels: label of each range.
    """
    return np.asarray(labels, np.uint8)[np.searchsorted(np.asarray(tops), mask_of(source))]


def corrupt_image(source: Source, kind: str, severity: int, seed: int, edge: int) -> Pixels:
    """Resize an image to edge x edge pixels, and return a copy with noise or blur."""
    return corrupt(resize_image(source, edge), kind, severity, seed)


def pixels_of(source: Source) -> Pixels:
    """Return the pixels of an image as 8 bits in its own size; a file is read as training reads it."""
    if isinstance(source, Path):
        pixels = np.round(read_image(Sample(source, 0), site="source", split="none") * 255).astype(np.uint8)
        return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    return source() if callable(source) else source


def mask_of(source: Source) -> Pixels:
    """Return the values of a mask, 0 to 255; a file is read as training reads it."""
    if not isinstance(source, Path):
        return source() if callable(source) else source
    values = read_mask(Sample(source, source), site="source", split="none")
    if values.min() < 0 or values.max() > 255:
        raise DataError(
            f"mask '{source}' has values from {values.min()} to {values.max()}; number its labels anew, from 0 to 255"
        )
    return values.astype(np.uint8)


def resize_image(source: Source, edge: int, is_mask: bool = False) -> Pixels:
    """Resize an image or a mask to edge x edge pixels.

    An image is resized by Pillow's bilinear filter, which smooths where it shrinks; a mask by nearest neighbour.
    """
    pixels = mask_of(source) if is_mask else pixels_of(source)
    if pixels.shape[:2] == (edge, edge):
        return pixels
    from PIL import Image

    how = Image.Resampling.NEAREST if is_mask else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((edge, edge), how))
