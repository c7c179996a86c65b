"""What a preparer hands on for each image: where its pixels come from, and what is known about it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.data.corruptions import corrupt
from fairflare.data.datalist import DataError, Sample
from fairflare.data.reading import read_image, read_mask

Pixels: TypeAlias = "npt.NDArray[np.uint8]"


class Picture(ABC):
    """Pixels that are made from a file when they are written. Subclasses are frozen dataclasses of plain values."""

    @abstractmethod
    def read(self) -> Pixels:
        """(height, width) or (height, width, 3).

        Raises:
            DataError: the file cannot be read.
        """

    def files(self) -> tuple[Path, ...]:
        """What it is made from."""
        return tuple(path for value in vars(self).values() for path in files_of(value))


Source: TypeAlias = "Pixels | Path | Picture"


@dataclass(frozen=True)
class Item:
    """One image on its way into a site's folder.

    Attributes:
        name: of its file, without ending.
        group: items of one group (a patient) stay in one split and at one site.
        image: its pixels; a path is copied as it is.
        mask: the same, or the number of the class.
        patient: the site's own key, for the datalist; None: not known.
        site: where the source says that it is from.
        splits: where the source puts it; none: drawn.
        volume, spacing: for the datalist.
        attributes: of the person, for the datalist; None: not known.
        slices: numbers of those to be listed, each as an entry; None: the file as it is.
        shared: every site has it: its file is written once.
        fold: of a cross-validation in which it is tested, from 0; None: drawn within its site.
        attribute: of the person (skin tone): of a common test set ``test_<attribute>`` has those with it.
    """

    name: str
    group: str
    image: Source
    mask: Source | int
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


@dataclass(frozen=True)
class Resized(Picture):
    """An image of any kind that a datalist may name, as 8 bits, of another size.

    Attributes:
        source: the image.
        height, width: in pixels; 0: as it is.
    """

    source: Source
    height: int = 0
    width: int = 0

    def read(self) -> Pixels:
        return resized(pixels_of(self.source), self.height, self.width)


@dataclass(frozen=True)
class MaskResized(Picture):
    """A mask of another size, by nearest neighbour.

    Attributes:
        source: the mask; its values are from 0 to 255.
        height, width: in pixels.
    """

    source: Source
    height: int
    width: int

    def read(self) -> Pixels:
        return resized(mask_of(self.source), self.height, self.width, nearest=True)


@dataclass(frozen=True)
class Relabelled(Picture):
    """A mask whose grey values become labels by range.

    Attributes:
        source: the mask.
        tops: of each range but the last one, in order, the highest value; the last one goes to 255.
        labels: one for each range.
    """

    source: Source
    tops: tuple[int, ...]
    labels: tuple[int, ...]

    def read(self) -> Pixels:
        return np.asarray(self.labels, np.uint8)[np.searchsorted(np.asarray(self.tops), mask_of(self.source))]


@dataclass(frozen=True)
class Corrupted(Picture):
    """A corrupted copy of an image.

    Attributes:
        source: the image.
        kind, severity, seed: as in :func:`fairflare.data.corruptions.corrupt`.
        height, width: that it is brought to before; 0: as it is.
    """

    source: Source
    kind: str
    severity: int
    seed: int
    height: int = 0
    width: int = 0

    def read(self) -> Pixels:
        pixels = resized(pixels_of(self.source), self.height, self.width)
        return corrupt(pixels, self.kind, self.severity, self.seed)


def pixels_of(source: Source) -> Pixels:
    """The pixels of an image as 8 bits, of its own size; those of a file as training reads it."""
    if isinstance(source, Path):
        return as_bytes(read_image(Sample(source, 0), site="source", split="none"))
    return source.read() if isinstance(source, Picture) else source


def mask_of(source: Source) -> Pixels:
    """The values of a mask, 0 to 255; those of a file as training reads it."""
    if not isinstance(source, Path):
        return source.read() if isinstance(source, Picture) else source
    values = read_mask(Sample(source, source), site="source", split="none")
    if values.min() < 0 or values.max() > 255:
        raise DataError(f"mask '{source}' has values from {values.min()} to {values.max()}; expected 0 to 255")
    return values.astype(np.uint8)


def files_of(source: object) -> tuple[Path, ...]:
    """The files that something is made from."""
    if isinstance(source, Picture):
        return source.files()
    return (source,) if isinstance(source, Path) else ()


def stamp(source: Source) -> str:
    """The same for the same pixels: what they are made from and how, files by name, size and time of their change."""
    found = hashlib.sha256(repr(_how(source)).encode())
    for path in files_of(source):
        status = path.stat()
        found.update(f"{path.absolute()} {status.st_size} {status.st_mtime_ns}".encode())
    return found.hexdigest()


def _how(value: object) -> object:
    """What pixels are made of, without the names of files."""
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, Picture):
        return type(value).__name__, *(_how(part) for part in vars(value).values())
    return "file" if isinstance(value, Path) else repr(value)


def as_bytes(image: npt.NDArray[np.float32]) -> Pixels:
    """(height, width, channels) in [0, 1] as 8 bits; one channel as (height, width)."""
    pixels = np.round(image * 255).astype(np.uint8)
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def resized(pixels: Pixels, height: int, width: int, nearest: bool = False) -> Pixels:
    """By Pillow's bilinear filter, which is a low-pass where it shrinks; 0: as it is."""
    if not height or pixels.shape[:2] == (height, width):
        return pixels
    from PIL import Image

    how = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), how))
