"""A file of a datalist as one array: how large it would be is read from its header before anything is decoded.

A few megabytes of ``.nii.gz`` or PNG can hold gigabytes of zeros, and a header can say more, or less, than its file
holds. Neither costs memory here.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.datalist import ARRAYS, VOLUMES, is_dicom, suffix_of

#: Of one decoded image or volume. A CT of 512x512x2000 in 16 bits, or one of 512x512x512 that the file scales (64 bits
#: a value), passes; the four that may be kept at once take 4 GiB at most.
MAX_IMAGE_BYTES = 2**30
SCALED = 8  # bytes of a value that a NIfTI header scales: nibabel gives float64


class TooLarge(ValueError):
    """A file would take more memory than the site allows.

    Args:
        size: bytes, decoded.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


def decode(path: Path, *, is_mask: bool, limit: int) -> npt.NDArray[Any]:
    """What a file holds: (height, width), (height, width, channels) or, of volumes, (height, width, slices).

    Args:
        path: a picture, ``.npy``, ``.nii`` or ``.nii.gz``, a DICOM file or the folder of a series.
        is_mask: a palette's indices are the values, not its colours.
        limit: bytes that the array may take.

    Raises:
        TooLarge: it would take more, by its header.
        Exception: what the libraries raise for a damaged file; ``ValueError`` when an array or volume is longer or
            shorter than its header says. Of pictures Pillow finds only what is missing.
    """
    suffix = suffix_of(path)
    if suffix in ARRAYS:
        return _array(path, limit)
    if suffix in VOLUMES:
        return _volume(path, limit)
    if is_dicom(path):
        return _dicom(path, is_mask, limit)
    return _picture(path, is_mask, limit)


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(size)


def _check_length(said: int, found: int) -> None:
    if said != found:
        raise ValueError(f"the file is damaged: its header describes {said} bytes, it has {found}")


# --- arrays ---------------------------------------------------------------------------------------------


def _array(path: Path, limit: int) -> npt.NDArray[Any]:
    """MONAI's NumpyReader runs pickled objects before version 1.6."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        readers: dict[Any, Callable[[Any], Any]] = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"it is a .npy file of version {version}, which holds records, not numbers")
        shape, _, dtype = readers[version](file)
        size = _count(shape) * dtype.itemsize
        _check(size, limit)
        if not dtype.hasobject:
            _check_length(file.tell() + size, path.stat().st_size)
    return np.load(path, allow_pickle=False)


def _count(shape: tuple[int, ...]) -> int:
    if any(length < 0 for length in shape):
        raise ValueError(f"the file is damaged: its header describes the shape {shape}")
    return math.prod(shape)


# --- volumes --------------------------------------------------------------------------------------------


def _volume(path: Path, limit: int) -> npt.NDArray[Any]:
    """By nibabel from one stream, so that a compressed file is unpacked once, and no further than its header says."""
    from nibabel.fileholders import FileHolder
    from nibabel.nifti1 import Nifti1Image
    from nibabel.nifti2 import Nifti2Image

    packed = suffix_of(path) == ".nii.gz"
    with gzip.open(path, "rb") if packed else path.open("rb") as stream:
        head = stream.read(Nifti2Image.header_class.sizeof_hdr)
        kind = next((k for k in (Nifti2Image, Nifti1Image) if k.header_class.may_contain_header(head)), None)
        if kind is None:
            raise ValueError("it is no NIfTI file")
        header = kind.header_class(head[: kind.header_class.sizeof_hdr], check=False)
        offset, values = int(header["vox_offset"]), _count(header.get_data_shape())
        stored = values * header.get_data_dtype().itemsize
        scaled = header.get_slope_inter() not in ((None, None), (1.0, 0.0))
        # nibabel reads what lies before the volume too.
        _check(max(offset, stored, values * SCALED if scaled else 0), limit)
        if not packed:
            _check_length(offset + stored, path.stat().st_size)
        image = kind.from_file_map({"image": FileHolder(fileobj=stream)}, mmap=False)
        array = np.asanyarray(image.dataobj)
        stream.seek(offset + stored)
        if stream.read(1):  # at its end gzip compares the checksum as well
            raise ValueError(f"the file is damaged: its header describes {offset + stored} bytes, it has more")
    return array.swapaxes(0, 1) if array.ndim > 1 else array  # rows first, as in pictures


# --- DICOM ----------------------------------------------------------------------------------------------


def _dicom(path: Path, is_mask: bool, limit: int) -> npt.NDArray[Any]:
    from fairflare.data import dicom

    pictures = dicom.headers(path)
    each = max(picture.bytes for picture in pictures)  # of a series with one scaled file all become float32
    _check(sum(picture.size // picture.bytes * each for picture in pictures), limit)
    return dicom.decode(pictures, is_mask)


# --- pictures -------------------------------------------------------------------------------------------


def _picture(path: Path, is_mask: bool, limit: int) -> npt.NDArray[Any]:
    from PIL import Image
    from PIL.ImageMode import getmode
    from PIL.ImageOps import exif_transpose

    # Open: by its name Pillow 13 reads an uncompressed TIFF that is to be turned with its sides exchanged.
    with path.open("rb") as file, Image.open(file) as picture:  # opened, not decoded
        mode = _mask_mode(picture.mode) if is_mask else _plain_mode(picture.mode)
        sizes = [len(m.bands) * np.dtype(m.typestr).itemsize for m in (getmode(picture.mode), getmode(mode))]
        _check(picture.width * picture.height * max(sizes), limit)
        exif_transpose(picture, in_place=True)  # what a camera wrote about how it was held
        return np.asarray(picture if mode == picture.mode else picture.convert(mode))


def _mask_mode(mode: str) -> str:
    """As it is: the indices of a palette are the labels."""
    return "L" if mode == "LA" else mode


def _plain_mode(mode: str) -> str:
    """Colours instead of palette indices, no alpha; grey pictures as they are."""
    if mode in ("P", "PA", "RGBA", "CMYK", "YCbCr"):
        return "RGB"
    return "L" if mode == "LA" else mode
