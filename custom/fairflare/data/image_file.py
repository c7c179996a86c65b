"""Represent an image file of a datalist: find its kind, decode it, and read further facts from its header.

The decoded size of a file is read from its header before anything is decoded. A few megabytes of ``.nii.gz`` or PNG can
hold gigabytes of zeros, and a header can state more, or less, than its file holds. Neither case costs memory here.
"""

from __future__ import annotations

import gzip
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING, Any, ClassVar

from fairflare.base.checks import first_of, refuse, true_texts
from fairflare.base.own_errors import reading_as
from fairflare.data.dicom_files import DICOM, content_of, describe_content, has_dicom_mark
from fairflare.data.picture_values import (
    check_end,
    check_mask,
    check_opaque,
    check_parts,
    convert_to_rgb,
    is_misread,
    is_reduced,
    min_is_white,
    npy_header,
    pictures_in,
    plain_mode,
    white_high,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

    from fairflare.data.geometry import Grid
    from fairflare.data.intensity import Window

TIFFS = (".tif", ".tiff")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", *TIFFS)
ARRAYS = (".npy",)
VOLUMES = (".nii", ".nii.gz")
SUFFIXES = (*PICTURES, *ARRAYS, *VOLUMES, *DICOM)
#: Limit of one decoded image or volume. A CT of 512x512x2000 in 16 bits, or one of 512x512x512 that the file scales
#: (64 bits a value), is accepted. :func:`fairflare.data.reading._decode` keeps the last four decoded files, which take
#: 4 GiB at most.
MAX_IMAGE_BYTES = 2**30
PLAIN_GAMMA = 1 / 2.2  # gamma of a PNG in sRGB
# TIFF tags of orientation (also in EXIF), height, width, and GDAL's value of no data.
ORIENTATION, IMAGE_LENGTH, IMAGE_WIDTH, NO_DATA = 0x0112, 257, 256, 42113
IMPORTING = threading.RLock()  # held while the packages of readers are imported


class TooLarge(ValueError):
    """Report that a decoded file would take more memory than the site allows.

    Args:
        size: bytes that the decoded file would take.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


@dataclass(frozen=True)
class Facts:
    """Describe an image by its file's header, besides the pixel values.

    Attributes:
        grid: position and orientation of the array.
        slices: number of slices in the file; None if the file is one picture.
        inverted: whether the lowest value is white.
        windows: first display window in the header, for each slice or one for all slices.
        padded: whether NaN in the array marks pixels that are no part of the picture.
        eight_bits: whether values are 0 to 255, whatever the type of the array.
        volumes: number of volumes in the file, which a fourth axis counts.
    """

    grid: Grid
    slices: int | None = None
    inverted: bool = False
    windows: tuple[Window | None, ...] = (None,)
    padded: bool = False
    eight_bits: bool = False
    volumes: int = 1


@dataclass(frozen=True)
class ImageFile(ABC):
    """Represent one state of an image file or DICOM series, made by :func:`image_file`; each kind is a subclass.

    Attributes:
        path: path of the file, or of the folder of a series.
        stamp: time of the last change in ns; for a series the latest of all its files.
        size: size in bytes; for a series the sum of all its files.
        may_be_volume: whether files of this kind may hold several slices.
    """

    path: Path
    stamp: int
    size: int

    may_be_volume: ClassVar[bool] = False

    @abstractmethod
    def decode(self, *, is_mask: bool, limit: int) -> npt.NDArray[Any]:
        """Return the values of the file as an array.

        The shape is (height, width), (height, width, channels) or, for volumes, (height, width, slices).

        Args:
            is_mask: whether the file is a mask: then a palette's indices are the values, not its colours.
            limit: largest number of bytes that the array may take.

        Raises:
            TooLarge: by its header, the array would take more than ``limit``.
            ValueError: the file is damaged, of another kind, or has content that cannot be used (alpha, several
                pages, a mask's colours). In damaged pictures Pillow finds only missing data.
            OSError: the file cannot be opened.
        """

    def count_decoded_bytes(self, is_mask: bool) -> int:
        """Return the number of bytes that :meth:`decode` would need, by the header; nothing is decoded."""
        try:
            return self.decode(is_mask=is_mask, limit=-1).nbytes
        except TooLarge as error:
            return error.size

    @abstractmethod
    def facts(self, is_mask: bool = False) -> Facts:
        """Return the facts that the header states besides the pixel values; no pixels are decoded.

        Raises:
            Misfit: the slices form no stack, or the header states an impossible position.
            ValueError: the file is not of this kind.
        """

    def notes(self, is_mask: bool) -> tuple[str, ...]:
        """Return notes on how the file's values are converted or what is ignored, in the same words for all files."""
        return ()

    def names(self) -> dict[int, str]:
        """Return the names that a mask's file gives its values: of segments, or the palette's colours (``#rrggbb``)."""
        return {}


class Picture(ImageFile):
    """Read a picture by Pillow, or by tifffile if it is a TIFF that Pillow refuses or misreads (64 bits, signed 8)."""

    def decode(self, *, is_mask: bool, limit: int) -> npt.NDArray[Any]:
        import numpy as np
        from PIL.ImageMode import getmode

        from fairflare.data.geometry import tag_turn
        from fairflare.data.orientation import turn_view

        with self.open_picture() as picture:
            if picture is None or picture.format == "TIFF":
                check_parts(self.path)
            if picture is None:
                return _tiff(self.path, limit, is_mask)
            mode = plain_mode(picture.mode, is_mask)
            alpha = "A" in picture.getbands() or "transparency" in picture.info
            most = max(
                len(each.bands) * np.dtype(each.typestr).itemsize
                for each in map(getmode, (picture.mode, mode, *["RGBA"] * alpha))
            )
            check_size(picture.width * picture.height * most, limit)
            reduced = is_reduced(picture)  # whether values were reduced cannot be known after decoding
            tag = None if picture.format == "TIFF" else _tag_of(picture)  # Pillow itself rotates TIFFs by their tag
            check_end(picture)
            with reading_as("picture"):
                # A mask's palette indices are its values, so transparency of the palette does not matter.
                clear = 255 - np.asarray(picture.convert("RGBA").getchannel("A")) if alpha else np.zeros(1)
                array = np.asarray(convert_to_rgb(picture) if picture.mode == "LAB" else picture.convert(mode))
            if not (is_mask and picture.mode == "P"):
                check_opaque(clear, array, is_mask)
            if is_mask:
                check_mask(picture, array, reduced)
            # Pillow itself inverts pictures of these two modes.
            array = white_high(array) if min_is_white(picture) and picture.mode not in ("1", "L") else array
            return turn_view(array, tag_turn(tag))  # rotate by the orientation tag that a camera wrote

    def notes(self, is_mask: bool) -> tuple[str, ...]:
        with self.open_picture() as picture:
            if picture is None:
                return ()
            colours = bytes(((picture.mode == "P" and picture.getpalette()) or [])[:12]).hex("#", 3).replace("#", " #")
            return tuple(true_texts({
                f"its palette's indices are the labels (0, 1, ... are #{colours} ...)": is_mask and picture.mode == "P",
                "its one bit is read as 0 and 1, not as 0 and 255": is_mask and picture.mode == "1",
                f"its colours are converted from {picture.mode} to RGB": picture.mode in ("CMYK", "YCbCr", "LAB"),
                "its 16 bits are read with 8": not is_mask and is_reduced(picture),
                "its lowest value is white, and it is inverted": min_is_white(picture),
                "its ICC profile is not applied": "icc_profile" in picture.info and picture.mode != "LAB",
                "its gamma is not applied": abs(picture.info.get("gamma", PLAIN_GAMMA) - PLAIN_GAMMA) > 1e-3,
                "its value of no data (GDAL_NODATA) is not applied": NO_DATA in getattr(picture, "tag_v2", {}),
                "further pictures in it (a preview, or the other eye) are passed over": picture.format == "MPO",
            }))  # fmt: skip

    def names(self) -> dict[int, str]:
        with self.open_picture() as picture:
            colours = bytes((picture.getpalette() or []) if picture is not None and picture.mode == "P" else [])
            used: Any = picture.getcolors() if picture is not None and colours else []  # (number of pixels, index)
            return {index: f"#{colours[3 * index : 3 * index + 3].hex()}" for _, index in used}

    def facts(self, is_mask: bool = False) -> Facts:
        from fairflare.data.geometry import Grid, tag_turn

        with self.open_picture() as picture:
            if picture is None:
                import tifffile

                with tifffile.TiffFile(self.path) as tiff:
                    _check_pages(len(tiff.pages))
                    page = tiff.pages.first
                    height, width, tag = page.imagelength, page.imagewidth, page.tags.valueof("Orientation", None)
            else:
                # For a TIFF, Pillow 13 returns the size after rotation.
                stored: Any = getattr(picture, "tag_v2", {IMAGE_LENGTH: picture.height, IMAGE_WIDTH: picture.width})
                height, width, tag = int(stored[IMAGE_LENGTH]), int(stored[IMAGE_WIDTH]), _tag_of(picture)
        note = "" if tag in (None, *range(1, 9)) else "an orientation tag that is none of 1 to 8 counts as 1"
        sizes = (height, width) if tag_turn(tag)[0, 0] == 0 else (width, height)
        return Facts(Grid((*sizes, 1), tag=1 if note else tag, note=note))

    @contextmanager
    def open_picture(self) -> Iterator[Image.Image | None]:
        """Open the picture without decoding it; yield ``None`` if tifffile has to read the file."""
        from PIL import Image, UnidentifiedImageError

        # Pass an open file: given a path, Pillow 13 swaps the sides of an uncompressed TIFF that has to be rotated.
        with self.path.open("rb") as file, ExitStack() as files:
            picture = None
            with reading_as("picture"):
                try:
                    picture = files.enter_context(Image.open(file))
                    listed = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
                    pages = pictures_in(listed, getattr(picture, "tag_v2", {}).get)
                except UnidentifiedImageError:
                    if suffix_of(self.path) not in TIFFS:
                        raise
            if picture is not None:
                _check_pages(pages)
            yield None if picture is None or is_misread(picture) else picture


class Unknown(Picture):
    """Read a file without a known ending or DICOM mark by Pillow, which may recognise its content."""


class Array(ImageFile):
    """Read a ``.npy`` file by numpy, because MONAI's NumpyReader runs pickled objects before version 1.6."""

    def decode(self, *, is_mask: bool, limit: int) -> npt.NDArray[Any]:
        import numpy as np

        with self.path.open("rb") as file:
            shape, dtype = npy_header(file)
            size = _count(shape) * dtype.itemsize
            check_size(size, limit)
            _check_length(file.tell() + size, self.path.stat().st_size)
        with reading_as(".npy file"):
            return np.load(self.path, allow_pickle=False)

    def facts(self, is_mask: bool = False) -> Facts:
        from fairflare.data.geometry import Grid

        with self.path.open("rb") as file:
            shape, _ = npy_header(file)
        plane = shape[1:] if len(shape) == 3 and shape[2] > 4 and shape[0] <= 4 else shape  # has channels first
        rows, columns = (*plane, 1, 1)[:2]
        return Facts(Grid((rows, columns, plane[2] if len(plane) == 3 and plane[2] > 4 else 1)))


class Volume(ImageFile):
    """Read a NIfTI file by nibabel."""

    may_be_volume = True

    def decode(self, *, is_mask: bool, limit: int) -> npt.NDArray[Any]:
        # Use one stream for header and voxels: a compressed file is unpacked once, and no further than its header says.
        import numpy as np
        from nibabel.fileholders import FileHolder

        from fairflare.data.geometry import three_axes

        with self.open_stream() as stream:
            kind, header = _nifti_header(stream)
            axes = three_axes(header.get_data_shape())
            values = _count(header.get_data_shape())
            with reading_as("NIfTI file"):
                offset, slope = int(header["vox_offset"]), header.get_slope_inter()
                stored = values * header.get_data_dtype().itemsize
            # The bytes in front of the voxel data are limited too, because nibabel also reads them. Where the header
            # scales the values, nibabel returns float64, of 8 bytes.
            check_size(max(offset, stored, values * 8 if slope not in ((None, None), (1.0, 0.0)) else 0), limit)
            if suffix_of(self.path) != ".nii.gz":
                _check_length(offset + stored, self.path.stat().st_size)
            with reading_as("NIfTI file"):
                image = kind.from_file_map({"image": FileHolder(fileobj=stream)}, mmap=False)
                array = np.asanyarray(image.dataobj).reshape(axes)
                stream.seek(offset + stored)
                more = stream.read(1)  # reading to the end makes gzip compare the checksum
            refuse({f"the file is damaged: its header describes {offset + stored} bytes, it has more": more})
        return array.swapaxes(0, 1)  # swap axes to have rows first, as in pictures

    def open_stream(self) -> Any:
        """Open the NIfTI file as a stream of uncompressed bytes."""
        return gzip.open(self.path, "rb") if suffix_of(self.path) == ".nii.gz" else self.path.open("rb")

    def facts(self, is_mask: bool = False) -> Facts:
        from fairflare.data.geometry import nifti_grid, three_axes

        with self.open_stream() as stream:
            header = _nifti_header(stream)[1]
        grid, axes = nifti_grid(header), three_axes(header.get_data_shape())
        return Facts(grid, grid.shape[2] if len(axes) > 2 else None, volumes=math.prod(axes[3:]))


class Dicom(ImageFile):
    """Read one DICOM file, or the folder of a DICOM series, by :mod:`fairflare.data.dicom`."""

    may_be_volume = True

    def decode(self, *, is_mask: bool, limit: int) -> npt.NDArray[Any]:
        from fairflare.data import dicom, dicom_seg

        file = dicom_seg.file_in(self.path) if is_mask else None
        if file is not None:
            check_size(math.prod(dicom_seg.grid_of(file).shape), limit)
            return dicom_seg.labels_of(file)
        pictures = dicom.headers(self.path)
        # If one file is scaled, the whole series becomes float32.
        check_size(sum(math.prod(one.shape) for one in pictures) * max(one.bytes for one in pictures), limit)
        return dicom.decode(pictures, is_mask)

    def facts(self, is_mask: bool = False) -> Facts:
        from fairflare.data import dicom, dicom_seg
        from fairflare.data.geometry import Grid

        file = dicom_seg.file_in(self.path) if is_mask else None
        if file is not None:
            grid = dicom_seg.grid_of(file)
            return Facts(grid, grid.shape[2] if grid.statements else None)
        pictures = dicom.headers(self.path)
        first, stacked = pictures[0], dicom.stack_of(pictures)
        frames = max(len(pictures), first.frames)
        statements = () if stacked.affine is None else (("header", stacked.affine),)
        unit = ("series" if len(pictures) > 1 else "frames") if statements and frames > 1 else ""
        return Facts(
            Grid((first.rows, first.columns, frames), statements, None, unit, first.frame, first.posture, stacked.note),
            frames if frames > 1 or self.path.is_dir() else None,
            first.inverted,
            tuple(window for picture in pictures for window in picture.windows),
            any(picture.padding is not None for picture in pictures),
            all(picture.eight_bits for picture in pictures),
        )

    def notes(self, is_mask: bool) -> tuple[str, ...]:
        from fairflare.data import dicom, dicom_seg

        pictures = () if is_mask and dicom_seg.file_in(self.path) else dicom.headers(self.path)
        return tuple(dict.fromkeys(note for picture in pictures for note in picture.notes))

    def names(self) -> dict[int, str]:
        from fairflare.data import dicom_seg

        file = dicom_seg.file_in(self.path)
        return {} if file is None else dicom_seg.names_of(file)


KINDS: dict[str, type[ImageFile]] = {
    suffix: kind
    for suffixes, kind in ((PICTURES, Picture), (ARRAYS, Array), (VOLUMES, Volume), (DICOM, Dicom))
    for suffix in suffixes
}


def image_file(path: Path) -> ImageFile:
    """Return the :class:`ImageFile` of a path, from the cache unless the file has changed.

    A cached object is of one size and modification time, so a file's format is detected once for each version of it.

    Raises:
        OSError: the file's status cannot be read.
    """
    status = path.stat()
    is_folder = S_ISDIR(status.st_mode)
    states = [file.stat() for file in path.iterdir()] if is_folder else [status]
    return _image_file(
        path, is_folder, max((state.st_mtime_ns for state in states), default=0), sum(state.st_size for state in states)
    )


@lru_cache(maxsize=4096)
def _image_file(path: Path, is_folder: bool, stamp: int, size: int) -> ImageFile:
    kind = kind_of(path, is_folder)
    load_readers(kind)
    return kind(path, stamp, size)


@lru_cache
def load_readers(kind: type[ImageFile]) -> None:
    """Import all that reads a kind of file, in one thread: others could see modules that are half imported."""
    with IMPORTING, suppress(ModuleNotFoundError):  # reading names a package that is missing, where a file needs it
        import nibabel  # noqa: F401

        if issubclass(kind, Picture):
            import PIL.Image

            PIL.Image.init()  # imports the modules of all formats
            import tifffile  # noqa: F401
        if issubclass(kind, Dicom):
            import pydicom.pixels  # noqa: F401

            import fairflare.data.dicom_seg  # noqa: F401

            # isort: split
            import highdicom.seg  # noqa: F401


def kind_of(path: Path, is_folder: bool | None = None) -> type[ImageFile]:
    """Return the class that reads a path: by its ending, as a folder (a series), or by the DICOM mark in the file.

    Args:
        path: path of a file or folder.
        is_folder: whether the path is a folder, if the caller knows, which saves an access to a network drive;
            ``None`` if the path is checked here.
    """
    if path.is_dir() if is_folder is None else is_folder:
        return Dicom
    return KINDS.get(suffix_of(path)) or (Dicom if has_dicom_mark(path) else Unknown)


def describe_misnamed(path: Path) -> str:
    """Return a clause if a file is empty or, by its first bytes, of another kind than it is read as; else nothing."""
    what, kind = content_of(path) if path.is_file() else "", kind_of(path)
    other = KINDS.get(what)
    return first_of({
        f"'{path.name}' is {'not ' * (what == '.nii')}packed: rename it to {what}":
            kind is other is Volume and what != suffix_of(path),
        f"it is {what}": bool(what) and other is None,
        f"by its first bytes it is {describe_content(what)}":
            other is not None and not issubclass(kind, other),
    }) or ""  # fmt: skip


def suffix_of(path: Path) -> str:
    """Return the ending of a file's name in small letters; for ``.nii.gz`` both parts."""
    name = path.name.lower()
    return ".nii.gz" if name.endswith(".nii.gz") else Path(name).suffix


def _nifti_header(stream: Any) -> tuple[Any, Any]:
    """Return nibabel's image class and the unchecked header of a NIfTI file, read from the beginning of a stream."""
    from nibabel.nifti1 import Nifti1Image
    from nibabel.nifti2 import Nifti2Image

    with reading_as("NIfTI file"):
        head = stream.read(Nifti2Image.header_class.sizeof_hdr)
    kind: Any = next((k for k in (Nifti2Image, Nifti1Image) if k.header_class.may_contain_header(head)), None)
    refuse({"it is no NIfTI file": kind is None})
    header = kind.header_class(head[: kind.header_class.sizeof_hdr], check=False)
    refuse({
        "it is a CIFTI file, which holds surfaces or connections, no volume":
            int(header["intent_code"]) in range(3000, 3100),
    })  # fmt: skip
    return kind, header


def _tiff(path: Path, limit: int, is_mask: bool) -> npt.NDArray[Any]:
    """Return the only page of a TIFF, read by tifffile.

    The shape is (height, width) or (height, width, samples), without alpha, rotated by its orientation tag.
    """
    import numpy as np
    import tifffile

    from fairflare.data.geometry import tag_turn
    from fairflare.data.orientation import turn_view

    with ExitStack() as files:
        with reading_as("TIFF"):
            tiff = files.enter_context(tifffile.TiffFile(path))
            page = tiff.pages.first
            pages = pictures_in(len(tiff.pages), page.tags.valueof)
        _check_pages(pages)
        white_low = page.photometric == 0
        if page.photometric not in (0, 1, 2) or (
            white_low and (is_mask or page.dtype is None or page.dtype.kind == "f")
        ):
            kind = getattr(page.photometric, "name", page.photometric)
            raise ValueError(f"its values are stored as {kind} (PhotometricInterpretation); save it as grey or RGB")
        check_size(page.nbytes, limit)
        try:
            with reading_as("TIFF"):
                array = page.asarray()
        except ValueError as error:
            if "imagecodecs" in str(error.__cause__):
                raise ValueError(f"it is packed as {page.compression.name} (pip install 'fairflare[tiff]')") from error
            raise
        array = np.moveaxis(array, 0, 2) if page.axes == "SYX" else array
        alpha = sum(kind in (1, 2) for kind in page.extrasamples)  # alpha channels, premultiplied and not
        if alpha and array.ndim == 3:
            array, over = array[:, :, :-alpha], array[:, :, -alpha:]
            check_opaque((np.iinfo(over.dtype).max if over.dtype.kind in "iu" else 1) - over, array, is_mask)
        return turn_view(white_high(array) if white_low else array, tag_turn(page.tags.valueof("Orientation", None)))


def _tag_of(picture: Any) -> int | None:
    """Return the EXIF orientation of a picture without decoding its pixels, or ``None`` if the picture states none."""
    from PIL import Image

    exif = Image.Image.getexif(picture)  # used because PngImageFile.getexif would decode the pixels first
    if picture.format == "PNG" and ORIENTATION not in exif:  # the eXIf chunk of a PNG may follow the pixels
        position = picture.fp.tell()
        picture.fp.seek(8)
        while len(head := picture.fp.read(8)) == 8 and head[4:] != b"eXIf":
            picture.fp.seek(int.from_bytes(head[:4], "big") + 4, 1)
        if head[4:] == b"eXIf":
            exif = Image.Exif()
            exif.load(picture.fp.read(int.from_bytes(head[:4], "big")))
        picture.fp.seek(position)
    tag = exif.get(ORIENTATION)
    return tag if isinstance(tag, int) else None


def _check_pages(pages: int) -> None:
    refuse({f"it holds {pages} pictures (pages); save each as a file of its own, or a volume as NIfTI": pages > 1})


def check_size(size: int, limit: int) -> None:
    """Raise :class:`TooLarge` if a decoded file takes more bytes than the limit."""
    if size > limit:
        raise TooLarge(size)


def _check_length(announced: int, actual: int) -> None:
    refuse({f"the file is damaged: its header describes {announced} bytes, it has {actual}": announced != actual})


def _count(shape: tuple[int, ...]) -> int:
    refuse({f"the file is damaged: its header describes the shape {shape}": any(length < 0 for length in shape)})
    return math.prod(shape)
