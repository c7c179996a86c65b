"""How the images and masks of a datalist are read: MONAI's readers, then one picture of one scale."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.datalist import ARRAYS, TOP_PERCENTILE, VOLUMES, DataError, Sample, suffix_of


def read_image(sample: Sample, *, site: str, split: str) -> npt.NDArray[np.float32]:
    """The image of ``sample`` as (height, width, 1 or 3) float32 in [0, 1].

    8-bit pictures and arrays are divided by 255. All others, and NIfTI, are clipped to [minimum, 99th
    percentile] of their file (of the whole volume when a slice is picked) and scaled; a constant image is 0.
    """
    array = _read(sample.image, "image", site, split)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    low, high = 0.0, 255.0
    if array.dtype != np.uint8 or suffix_of(sample.image) in VOLUMES:
        if array.dtype.kind not in "iuf":
            raise _unreadable(sample.image, "image", site, split, f"it holds {array.dtype} values, not numbers")
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(
                f"site '{site}': image '{sample.image}' of split '{split}' has values that are NaN or "
                "infinite; repair the file or take it out of the datalist",
                f"site '{site}': an image of split '{split}' has values that are not finite",
            )
        low, high = float(array.min()), float(np.percentile(array, TOP_PERCENTILE))
        if high <= low:
            high = float(array.max())
    array = _plane(array, sample.image, "image", sample.slice, site, split)
    if array.ndim == 2:
        array = array[:, :, None]
    channels = array.shape[2]
    if channels not in (1, 3):
        raise DataError(
            f"site '{site}': image '{sample.image}' of split '{split}' has {channels} channels; "
            "1 (grey) or 3 (colour) are understood: convert the file",
            f"site '{site}': an image of split '{split}' has {channels} channels",
        )
    if high <= low:
        return np.zeros(array.shape, np.float32)
    scaled = (array.astype(np.float32) - np.float32(low)) / np.float32(high - low)
    return np.ascontiguousarray(np.clip(scaled, 0.0, 1.0, out=scaled))


def read_mask(sample: Sample, *, site: str, split: str) -> npt.NDArray[np.int64]:
    """The mask of ``sample`` as a (height, width) array of the values in the file."""
    file = sample.label
    if isinstance(file, int):
        raise DataError(
            f"site '{site}': image '{sample.image}' of split '{split}' is labelled with a class, it has no mask",
            f"site '{site}': an image of split '{split}' has no mask",
        )
    array = _read(file, "mask", site, split)
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


def read_pair(sample: Sample, *, site: str, split: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Image and mask of ``sample``, checked to be of one size."""
    image = read_image(sample, site=site, split=split)
    mask = read_mask(sample, site=site, split=split)
    if image.shape[:2] != mask.shape:
        raise DataError(
            f"site '{site}': image '{sample.image}' is {_size(image.shape)} but its mask '{sample.label}' is "
            f"{_size(mask.shape)} (split '{split}'); they must have the same size",
            f"site '{site}': an image of split '{split}' and its mask differ in size",
        )
    return image, mask


# --- the files ------------------------------------------------------------------------------------------


def _read(path: Path, what: str, site: str, split: str) -> npt.NDArray[Any]:
    """The array in a file: (height, width), (height, width, channels) or, of NIfTI, (..., slices)."""
    try:
        status = path.stat()
        return _decode(path, what == "mask", status.st_mtime_ns, status.st_size)
    except Exception as error:  # the libraries below raise what they like for a damaged file
        raise _unreadable(path, what, site, split, f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=4)
def _decode(path: Path, is_mask: bool, stamp: int, size: int) -> npt.NDArray[Any]:
    """Kept for a moment, since slices of one volume come one after the other; a replaced file is noticed."""
    suffix = suffix_of(path)
    if suffix in ARRAYS:  # MONAI's NumpyReader runs pickled objects before version 1.6
        return np.load(path, allow_pickle=False)
    if suffix in VOLUMES:
        from monai.data.image_reader import NibabelReader

        reader = NibabelReader()
        array = np.asarray(reader.get_data(reader.read(path))[0])
        return array.swapaxes(0, 1) if array.ndim > 1 else array  # rows first, as in pictures
    from monai.data.image_reader import PILReader

    picture_reader = PILReader(converter=_label_mode if is_mask else _plain_mode, reverse_indexing=False)
    return np.asarray(picture_reader.get_data(picture_reader.read(path))[0])


def _label_mode(picture: Any) -> Any:
    """As it is: the indices of a palette are the labels."""
    return picture.convert("L") if picture.mode == "LA" else picture


def _plain_mode(picture: Any) -> Any:
    """Colours instead of palette indices, no alpha; grey pictures as they are."""
    if picture.mode in ("P", "PA", "RGBA", "CMYK", "YCbCr"):
        return picture.convert("RGB")
    return picture.convert("L") if picture.mode == "LA" else picture


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
    article = "an" if what == "image" else "a"
    return DataError(
        f"site '{site}': {what} '{path}' of split '{split}' cannot be used: {reason}. "
        "Repair the file or take it out of the datalist",
        f"site '{site}': {article} {what} of split '{split}' cannot be read",
    )


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]} (width x height)"
