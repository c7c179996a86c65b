"""Read whole volumes of a datalist: NIfTI, DICOM series and 3D arrays as stored, with the affine of their voxels.

The images of a case (its channels) are brought to one grid: that of the first one on which the mask lies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import refuse
from fairflare.data import reading
from fairflare.data.datalist import DataError, Sample
from fairflare.data.geometry import Grid, resample
from fairflare.data.image_file import MAX_IMAGE_BYTES, ImageFile, image_file
from fairflare.data.intensity import slabs
from fairflare.data.reading import (
    PLAIN,
    Labels,
    Reading,
    _bounds,
    _mask,
    _name_file,
    _open,
    _Opened,
    _picture,
    _scale,
    open_image,
    open_pair,
    whole_numbers,
)

_OPENING = threading.Lock()  # held while a case is read of which others want slices


@dataclass(frozen=True)
class Whole:
    """Represent a volume with its mask and affine.

    Attributes:
        image: (channels, rows, columns, slices) float32 in [0, 1].
        mask: (rows, columns, slices) values of the mask's file in the smallest unsigned type; ``None`` if not
            requested.
        affine: (4, 4) matrix from (row, column, slice) to mm (RAS); ``None`` if the file does not state one.
    """

    image: npt.NDArray[np.float32]
    mask: Labels | None
    affine: npt.NDArray[np.float64] | None


@dataclass(frozen=True)
class Opened:
    """Represent the decoded files of a case.

    Attributes:
        images: the images of the case, in the order of the datalist, each as its own file has it.
        grid: the grid to which they are brought.
        mask, affine: see :class:`Whole`.
    """

    images: tuple[_Opened, ...]
    grid: Grid
    mask: Labels | None
    affine: npt.NDArray[np.float64] | None

    def bring_to_grid(self, number: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values of an image, (rows, columns, slices) of its own file, on the grid of the case.

        Raises:
            DataError: the image does not lie where the label lies.
        """
        one = self.images[number]
        if one.facts.grid is self.grid:
            return values
        from scipy.ndimage import find_objects

        box = None if self.mask is None else next(iter(find_objects((self.mask > 0).view(np.int8))), None)
        with _name_file(one.file.path, one.what, one.site, one.split):
            return resample(self.grid, one.facts.grid, values, box)

    def scale(self, how: Reading, limit: int) -> npt.NDArray[np.float32]:
        """Return the channels, (channels, rows, columns, slices) float32 in [0, 1]; a lacking one is 0."""
        scaled = {}
        for number, channel in enumerate(how.channels):
            if channel >= 0:
                one, reading = self.images[number], how.channel_reading(channel)
                scaled[channel] = self.bring_to_grid(
                    number, _scale(one, one.array, None, _bounds(one, reading, limit), reading)
                )
        if how.width == 1:
            return scaled[0][None]
        return np.stack([scaled.get(k, np.zeros(self.grid.shape, np.float32)) for k in range(how.width)])


def read_whole(
    sample: Sample, *, masked: bool, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> Whole:
    """Return the volume of a sample, its grey values scaled by the bounds of the whole file.

    Args:
        sample: entry of a datalist without the key ``slice``.
        masked: whether the sample's mask is read too; its shape and position must be those of the volume.
        site, split: names for the messages.
        max_bytes: largest number of bytes that a decoded file may take.
        how: settings that scale intensities; the volume is not reoriented.

    Raises:
        DataError: a file is too large, damaged or no volume, or volume and mask do not fit together.
    """
    opened = open_volume(sample, site, split, max_bytes, how, masked=masked)
    return Whole(opened.scale(replace(how, once=True), max_bytes), opened.mask, opened.affine)


def open_volume(
    sample: Sample, site: str, split: str, limit: int, how: Reading, *, masked: bool = True
) -> Opened:  # fmt: skip
    """Open the images of a case and its mask as stored.

    Arguments and errors are those of :func:`read_whole`.
    """
    reason = (
        f"the datalist picks slice {sample.slice} of it, which a task on whole volumes does not use; take the key "
        "'slice' out (one entry for each volume), or run a task on slices"
    )
    refuse({
        f"site '{site}': volume '{sample.image}' of split '{split}' cannot be used: {reason}":
            sample.slice is not None,
    }, partial(
        DataError, public=f"site '{site}': a volume of split '{split}' cannot be used", reason=reason,
    ))  # fmt: skip
    how = replace(how, orientation="stored", once=True)
    where = (site, split, limit, how)
    first, *masks = open_pair(sample, *where) if masked else [open_image(sample, *where)]
    images = [
        first
        if file == first.file.path
        else _open(file, "image", site, split, limit, how.channel_reading(0), alone=False)
        for file in sample.files
    ]
    if first.facts.volumes > 1:
        images = [replace(first, array=first.array[..., k]) for k in range(first.facts.volumes)]
    affine = first.facts.grid.affine if first.fit is None else first.fit.affine
    if affine is None and sample.spacing is not None and len(sample.spacing) == 3:
        affine = np.diag([*sample.spacing, 1.0])
    mask = next((whole_numbers(mask, _volume(mask).array) for mask in masks), None)
    return Opened(tuple(map(_volume, images)), first.facts.grid, mask, affine)


def read_image(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> npt.NDArray[np.float32]:  # fmt: skip
    """Return the image of a sample as :func:`reading.read_image` does, of several channels all of them."""
    if how.channels == (0,):
        return reading.read_image(sample, site=site, split=split, max_bytes=max_bytes, how=how)
    where = (replace(sample, label=None), site, split, max_bytes, how)
    return replace(open_image(*where), array=stack_channels(*where)).plane(sample.slice)


def read_pair(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> tuple[npt.NDArray[np.float32], Labels]:
    """Return the image and mask of ``sample``, with the mask brought to the image's axes however both are stored."""
    image, mask = open_pair(sample, site, split, max_bytes, how)
    return _pictures(image, sample, max_bytes, how)(sample.slice), _mask(mask, sample.slice)


def read_planes(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> Iterator[tuple[npt.NDArray[np.float32], Labels | None]]:
    """Yield the picture of ``sample``, or each slice of its volume, with the mask; each file is decoded once.

    Arguments and errors are those of :func:`read_image`; the mask is ``None`` for an image with a class.
    """
    how = replace(how, once=True) if sample.slice is None and how.channels == (0,) else how
    where = (site, split, max_bytes, how)
    image, mask = (open_image(sample, *where), None) if sample.mask is None else open_pair(sample, *where)
    picture = _pictures(image, sample, max_bytes, how)
    for number in range(image.slices) if sample.slice is None and image.slices is not None else (sample.slice,):
        yield picture(number), None if mask is None else _mask(mask, number)


def _pictures(
    opened: _Opened, sample: Sample, limit: int, how: Reading
) -> Callable[[int | None], npt.NDArray[np.float32]]:
    """Return the function that gives a slice, or the only picture, of an image with all channels of its case."""
    if how.channels == (0,):
        return partial(_picture, opened, bounds=_bounds(opened, how, limit), how=how)
    return replace(opened, array=stack_channels(sample, opened.site, opened.split, limit, how)).plane


def stack_channels(sample: Sample, *where: Any) -> npt.NDArray[np.float32]:
    """Return all channels of a case along the last axis, on one grid, scaled to [0, 1].

    Args:
        sample: entry of a datalist; if it has a mask, the grid is that of an image on which the mask lies.
        where: site, split, largest number of bytes of a decoded file, and settings, as in :func:`read_whole`.
    """
    files = tuple(image_file(path) for path in (*sample.files, sample.mask) if path is not None)
    with _OPENING:
        return _channels(files, replace(sample, slice=None), *where)


@lru_cache(maxsize=2)
def _channels(
    files: tuple[ImageFile, ...], sample: Sample, site: str, split: str, limit: int, how: Reading
) -> npt.NDArray[np.float32]:
    """Return the channels of a case on one grid, (rows, columns, slices, channels) float32 in [0, 1].

    The last two cases stay in memory, for slices that are read one after the other; ``files`` are their states.
    """
    how = replace(how, kept=None)
    whole = read_whole(sample, masked=sample.mask is not None, site=site, split=split, max_bytes=limit, how=how)
    return np.moveaxis(whole.image, 0, -1)


def check_scale(opened: _Opened, how: Reading) -> None:
    """Raise ``DataError`` if the values of a volume cannot be scaled: they are not finite, or there is no window."""
    array, padded = opened.array, opened.facts.padded
    if array.dtype.kind == "f" and not all(
        (np.isfinite(slab) | (np.isnan(slab) & padded)).all() for slab in slabs(array)
    ):
        raise opened.not_finite()
    if how.intensity == "window":
        _scale(opened, array[:, :, :1], 0, None, how)


def read_labels(sample: Sample, site: str, split: str, max_bytes: int, how: Reading) -> Labels:
    """Return the mask alone of a volume, as :func:`read_whole` does."""
    how = replace(how, orientation="stored", once=True)
    mask = open_pair(sample, site, split, max_bytes, how, masks_only=True)[1]
    return whole_numbers(mask, _volume(mask).array)


def _volume(opened: _Opened) -> _Opened:
    array = opened.array
    refuse({
        f"it holds {array.dtype} values, not numbers": array.dtype.kind not in "biuf",
        f"it has the shape {array.shape}, which is no volume with one value a voxel; tasks on pictures are "
        "'segmentation' and 'classification'":
            array.ndim != 3 or (opened.facts.slices is None and array.shape[2] in (3, 4)) or 0 in array.shape,
    }, opened.unreadable)  # fmt: skip
    return opened
