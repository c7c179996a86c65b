"""How the images and masks of a datalist are read: decoded, then one picture of one scale."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.datalist import TOP_PERCENTILE, VOLUMES, DataError, Sample, suffix_of
from fairflare.data.decoding import MAX_IMAGE_BYTES, TooLarge, decode

#: What :func:`read_image` does with grey values, for whoever finds a model years later.
INTENSITIES = (
    "8 bits: divided by 255; others and NIfTI: clipped to [minimum, 99th percentile] of the file, scaled to [0, 1]"
)


def read_image(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES
) -> npt.NDArray[np.float32]:  # fmt: skip
    """The image of ``sample`` as (height, width, 1 or 3) float32 in [0, 1].

    8-bit pictures and arrays are divided by 255. All others, and NIfTI, are clipped to [minimum, 99th
    percentile] of their file (of the whole volume when a slice is picked) and scaled; a constant image is 0.

    Args:
        sample: with the file.
        site, split: for the messages.
        max_bytes: that the decoded file may take (setting ``max_image_bytes`` of the site).

    Raises:
        DataError: the file is larger, damaged, or holds no image.
    """
    array = _read(sample.image, "image", site, split, max_bytes)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    low, high = 0.0, 255.0
    if array.dtype != np.uint8 or suffix_of(sample.image) in VOLUMES:
        if array.dtype.kind not in "iuf":
            raise _unreadable(sample.image, "image", site, split, f"it holds {array.dtype} values, not numbers")
        found = _range_of(sample.image, max_bytes)
        if found is None:
            raise DataError(
                f"site '{site}': image '{sample.image}' of split '{split}' has values that are NaN or "
                "infinite; repair the file or take it out of the datalist",
                f"site '{site}': an image of split '{split}' has values that are not finite",
                "it has values that are NaN or infinite",
            )
        low, high = found
    array = _plane(array, sample.image, "image", sample.slice, site, split)
    if array.ndim == 2:
        array = array[:, :, None]
    channels = array.shape[2]
    if channels not in (1, 3):
        raise DataError(
            f"site '{site}': image '{sample.image}' of split '{split}' has {channels} channels; "
            "1 (grey) or 3 (colour) are understood: convert the file",
            f"site '{site}': an image of split '{split}' has {channels} channels",
            f"it has {channels} channels; 1 (grey) or 3 (colour) are understood",
        )
    if high <= low:
        return np.zeros(array.shape, np.float32)
    scaled = (array.astype(np.float32) - np.float32(low)) / np.float32(high - low)
    return np.ascontiguousarray(np.clip(scaled, 0.0, 1.0, out=scaled))


def slices_in(path: Path, *, max_bytes: int = MAX_IMAGE_BYTES) -> int | None:
    """Number of slices of a NIfTI volume; ``None``: the file is one picture.

    Raises:
        DataError: the file cannot be read.
    """
    if suffix_of(path) not in VOLUMES:
        return None
    shape = _read(path, "image", "none", "none", max_bytes).shape
    return shape[2] if len(shape) == 3 else None


def read_mask(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES
) -> npt.NDArray[np.int64]:  # fmt: skip
    """The mask of ``sample`` as a (height, width) array of the values in the file; otherwise as :func:`read_image`."""
    file = sample.label
    if isinstance(file, int):
        raise DataError(
            f"site '{site}': image '{sample.image}' of split '{split}' is labelled with a class, it has no mask",
            f"site '{site}': an image of split '{split}' has no mask",
        )
    array = _read(file, "mask", site, split, max_bytes)
    array = _plane(array, file, "mask", sample.slice, site, split)
    if array.ndim == 3:
        if array.shape[2] != 1 and (array[:, :, :3] != array[:, :, :1]).any():
            reason = "it is a colour image; a mask has one channel of label values"
            raise _unreadable(file, "mask", site, split, reason)
        array = array[:, :, 0]
    values = np.asarray(array, np.float64) if array.dtype.kind in "biuf" else None
    if values is None or not (np.isfinite(values) & (values == np.round(values))).all():
        raise _unreadable(file, "mask", site, split, "its values are not whole numbers")
    return values.astype(np.int64)


def read_pair(
    sample: Sample, *, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Image and mask of ``sample``, checked to be of one size."""
    image = read_image(sample, site=site, split=split, max_bytes=max_bytes)
    mask = read_mask(sample, site=site, split=split, max_bytes=max_bytes)
    if image.shape[:2] != mask.shape:
        raise DataError(
            f"site '{site}': image '{sample.image}' is {_size(image.shape)} but its mask '{sample.label}' is "
            f"{_size(mask.shape)} (split '{split}'); they must have the same size",
            f"site '{site}': an image of split '{split}' and its mask differ in size",
        )
    return image, mask


# --- the files ------------------------------------------------------------------------------------------


#: Slices of one volume come one after the other, in several threads: the first decodes it, the others wait.
_TURNS = tuple(threading.Lock() for _ in range(64))


def _read(path: Path, what: str, site: str, split: str, limit: int) -> npt.NDArray[Any]:
    """The array in a file: (height, width), (height, width, channels) or, of NIfTI, (..., slices)."""
    try:
        status = path.stat()
        with _TURNS[hash(path) % len(_TURNS)]:
            return _decode(path, what == "mask", status.st_mtime_ns, status.st_size, limit)
    except TooLarge as error:
        raise DataError(
            f"site '{site}': {what} '{path}' of split '{split}' would take {error.size} bytes decoded, more than "
            f"max_image_bytes={limit}; take it out of the datalist, or raise 'max_image_bytes' in the site's "
            "fairflare.json",
            f"site '{site}': {_article(what)} of split '{split}' is larger than the site's max_image_bytes",
            f"it would take {error.size} bytes decoded, more than {limit}",
        ) from error
    except Exception as error:  # the libraries below raise what they like for a damaged file
        raise _unreadable(path, what, site, split, f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=4)
def _decode(path: Path, is_mask: bool, stamp: int, size: int, limit: int) -> npt.NDArray[Any]:
    """Kept for a moment, since slices of one volume come one after the other; a replaced file is noticed."""
    return decode(path, is_mask=is_mask, limit=limit)


def _range_of(path: Path, limit: int) -> tuple[float, float] | None:
    """Of a file that :func:`_read` could read, once for all slices of a volume; ``None``: it is not finite."""
    status = path.stat()
    with _TURNS[hash(path) % len(_TURNS)]:
        return _range(path, status.st_mtime_ns, status.st_size, limit)


@lru_cache(maxsize=4)
def _range(path: Path, stamp: int, size: int, limit: int) -> tuple[float, float] | None:
    array = _decode(path, False, stamp, size, limit).astype(np.float32)
    if not np.isfinite(array).all():
        return None
    low, high = float(array.min()), float(np.percentile(array, TOP_PERCENTILE))
    return low, high if high > low else float(array.max())


def _plane(
    array: npt.NDArray[Any], path: Path, what: str, number: int | None, site: str, split: str
) -> npt.NDArray[Any]:
    """One picture, (height, width) or (height, width, channels), out of what a file holds."""
    if suffix_of(path) in VOLUMES and array.ndim == 3:
        slices = array.shape[2]
        if number is None and slices != 1:
            reason = (
                f"it is a volume of {slices} slices; pick one with the key 'slice' in the datalist, "
                "or make slices of it with fairflare.data.preparers"
            )
            raise _unreadable(path, what, site, split, reason)
        if (number or 0) >= slices:
            raise _unreadable(path, what, site, split, f"'slice' is {number}, but it has {slices} slices")
        return array[:, :, number or 0]
    if number is not None and number != 0:
        raise _unreadable(path, what, site, split, "'slice' was given, but it is not a volume")
    if array.ndim == 3 and array.shape[2] > 4 and array.shape[0] <= 4:
        array = np.moveaxis(array, 0, 2)  # channels first
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[2] > 4):
        raise _unreadable(path, what, site, split, f"it has the shape {array.shape}, which is not one picture")
    return array


def _unreadable(path: Path, what: str, site: str, split: str, reason: str) -> DataError:
    return DataError(
        f"site '{site}': {what} '{path}' of split '{split}' cannot be used: {reason}. "
        "Repair the file or take it out of the datalist",
        f"site '{site}': {_article(what)} of split '{split}' cannot be read",
        reason,
    )


def _article(what: str) -> str:
    return f"an {what}" if what == "image" else f"a {what}"


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]} (width x height)"
