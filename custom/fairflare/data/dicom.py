"""DICOM: one file with one or more frames, or the files of a series in a folder, by pydicom.

Of a header only what follows is read, before any pixel is: the image's size and kind, how stored values become measured
ones, a window, where the slice lies. Nothing about the patient is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.stopping import check_stop
from fairflare.data.dicom_files import files_of_series, has_dicom_mark
from fairflare.data.dicom_values import (
    FLOATS,
    HEADER_TAGS,
    INVERTED,
    LOSSY,
    PALETTE,
    PIXEL_TAGS,
    Padding,
    modality_table,
    notes_of,
    padding_of,
    palette_colours,
    stored_values,
)
from fairflare.data.image_file import reading_as
from fairflare.data.intensity import between

DEFLATED = "1.2.840.10008.1.2.1.99"  # the whole file is packed: how large it becomes nobody says
TAGS = (
    "SeriesInstanceUID", "InstanceNumber", "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames",
    "PhotometricInterpretation", "BitsAllocated", "BitsStored", "PixelRepresentation", "RescaleSlope",
    "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction", "ImageOrientationPatient",
    "ImagePositionPatient", "PixelSpacing", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    *HEADER_TAGS,
)  # fmt: skip
WHOLE = ("NumberOfFrames", "SamplesPerPixel", "BitsAllocated", "BitsStored", "HighBit", "InstanceNumber")
GREY = "MONOCHROME2"
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
SMALLEST_STEP = 1e-3  # mm between slices of a series


@dataclass(frozen=True)
class Window:
    """Which values are shown between black and white: PS3.3, C.11.2.1.

    Args:
        centre, width: in measured values (after the rescaling).
        function: ``"LINEAR"``, ``"LINEAR_EXACT"`` or ``"SIGMOID"``.
    """

    centre: float
    width: float
    function: str = "LINEAR_EXACT"

    def __call__(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """In [0, 1]."""
        if self.function == "SIGMOID":
            away = (values.astype(np.float64) - self.centre) / self.width
            return np.asarray(1 / (1 + np.exp(-4 * away)), np.float32)
        centre, width = (self.centre - 0.5, self.width - 1) if self.function == "LINEAR" else (self.centre, self.width)
        if width <= 0:  # LINEAR with a width of 1 is a threshold
            return (values > centre).astype(np.float32)
        return between(values, (centre - width / 2, centre + width / 2))


@dataclass(frozen=True)
class Picture:
    """What the header of one file says.

    Attributes:
        path: of the file.
        rows, columns, frames: its size.
        colour: it has three channels.
        bytes: of a value of the array that :func:`decode` makes.
        inverted: the lowest value is white.
        rescaling: slope and intercept of each frame, or of all.
        windows: of each frame, or of all, the first that the header has.
        table: a Modality LUT gives the measured values.
        padding: between which stored values, ends included, a pixel is no part of the picture.
        eight_bits: values are 0 to 255, as stored.
        lossy: the pixels were compressed so that single values are not kept.
        notes: what is made of the values, see :func:`fairflare.data.dicom_values.notes_of`.
        across: direction in which the columns follow each other, then the rows (LPS); ``None``: it is not said.
        position: of the first pixel, mm (LPS).
        last: the same of the last frame.
        spacing: of rows and of columns, mm.
        series, number: to tell whether and in which order files belong together.
    """

    path: Path
    rows: int
    columns: int
    frames: int
    colour: bool
    bytes: int
    inverted: bool
    photometric: str
    rescaling: tuple[tuple[float, float], ...]
    windows: tuple[Window | None, ...]
    table: bool
    padding: Padding | None
    eight_bits: bool
    lossy: bool
    notes: tuple[str, ...]
    across: tuple[float, ...] | None
    position: tuple[float, ...] | None
    last: tuple[float, ...] | None
    spacing: tuple[float, float]
    series: str
    number: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its array: (rows, columns), the frames behind where there are several, 3 for colours at the end."""
        return (self.rows, self.columns, *([self.frames] if self.frames > 1 else []), *([3] if self.colour else []))

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.bytes

    @property
    def scaled(self) -> bool:
        """Whether values are not as stored: float32, NaN where the picture is padded."""
        return self.table or self.padding is not None or self.rescaled

    @property
    def rescaled(self) -> bool:
        """Whether a slope and an intercept are applied."""
        return any(each != (1.0, 0.0) for each in self.rescaling)

    @property
    def normal(self) -> npt.NDArray[np.float64]:
        """Direction of the slices of a series: to the left, the back or the head, whichever is nearest."""
        assert self.across is not None
        found = np.cross(self.across[:3], self.across[3:])
        return np.asarray(found if found[np.abs(found).argmax()] > 0 else -found, np.float64)


# ------------------------------------------------------------------------------------------------ headers


def headers(path: Path) -> tuple[Picture, ...]:
    """The header of a file, or those of a series in the order of its slices, from the feet, the right or the front.

    Raises:
        ValueError: no DICOM, no image, or files that are not one series.
    """
    if not path.is_dir():
        return (_header(path, path.stat().st_mtime_ns),)
    found = [_header(file, file.stat().st_mtime_ns) for file in files_of_series(path)]
    if not found:
        raise ValueError("the folder has no DICOM file")
    return tuple(_in_order(found))


@lru_cache(maxsize=4096)
def _header(path: Path, stamp: int) -> Picture:
    import pydicom

    check_stop()
    if not has_dicom_mark(path):
        raise ValueError("it is no DICOM file: the mark DICM at byte 128 is missing; export it again, with its header")
    with reading_as("DICOM file"):
        syntax = str(pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", ""))
    if syntax == DEFLATED:
        raise ValueError("the file is packed as a whole (deflated), which is not read; store it explicit little endian")
    with reading_as("DICOM file"):
        head = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=list(TAGS))
    if not syntax or "Rows" not in head or "Columns" not in head:
        raise ValueError("it is a DICOM file without an image")
    kind = str(head.get("PhotometricInterpretation", GREY)).strip()
    if kind not in (GREY, INVERTED, PALETTE, *COLOUR):
        raise ValueError(
            f"its photometric interpretation is {kind!r}; known are {GREY}, {INVERTED}, {PALETTE}, RGB, YBR"
        )
    if "AlphaPaletteColorLookupTableDescriptor" in head:
        raise ValueError("its palette has an alpha channel, which is not applied; export it without transparency")
    for name in WHOLE:
        try:
            int(head.get(name) or 0)
        except (TypeError, ValueError):
            raise ValueError(f"its header is damaged: {name} is {head.get(name)!r}, no whole number") from None
    return _picture(path, head, kind, syntax)


def _picture(path: Path, head: Any, kind: str, syntax: str) -> Picture:
    frames = int(head.get("NumberOfFrames") or 1)
    colours = 3 if kind == PALETTE else int(head.get("SamplesPerPixel") or 1)
    groups = [_groups(head, number) for number in range(frames)] if _groups(head, 0) else [[head]]
    rescaling = tuple(_rescale([head, *inner]) for inner in groups)
    rescaled, table = any(each != (1.0, 0.0) for each in rescaling), bool(head.get("ModalityLUTSequence"))
    tables = [name for name, there in (("a palette", kind == PALETTE), ("a Modality LUT", table)) if there]
    if len(tables) + rescaled > 1:
        raise ValueError(
            f"its header has {' and '.join([*tables, *(['a slope and intercept'] if rescaled else [])])}, and at most "
            "one of them can give the values; export the file again"
        )
    own, end = [head, *groups[0]], [head, *groups[-1]]
    stored = max(math.ceil(int(head.get("BitsAllocated") or 8) / 8), 2 if kind == PALETTE else 1)
    spacing = _numbers(_first(own, "PixelSpacing", None), 2)
    number = head.get("InstanceNumber")
    padding, ignored = padding_of(head)
    scaled = rescaled or table or padding is not None
    signed = bool(head.get("PixelRepresentation"))
    return Picture(
        path=path,
        rows=int(head.Rows),
        columns=int(head.Columns),
        frames=frames,
        colour=colours == 3,
        bytes=max(stored, 4) if scaled else stored,
        inverted=kind == INVERTED or head.get("PresentationLUTShape") == "INVERSE",
        photometric=kind,
        rescaling=rescaling,
        windows=tuple(_window([head, *inner]) for inner in groups),
        table=table,
        padding=padding,
        eight_bits=int(head.get("BitsAllocated") or 8) == 8 and not (rescaled or table or signed),
        lossy=syntax in LOSSY or str(head.get("LossyImageCompression")) == "01",
        notes=notes_of(head, padding is not None) + ((ignored,) if ignored else ()),
        across=_numbers(_first(own, "ImageOrientationPatient", None), 6),
        position=_numbers(_first(own, "ImagePositionPatient", None), 3),
        last=_numbers(_first(end, "ImagePositionPatient", None), 3),
        spacing=(spacing[0], spacing[1]) if spacing else (1.0, 1.0),
        series=str(head.get("SeriesInstanceUID", "")),
        number=None if number is None else int(number),
    )


def _rescale(places: Sequence[Any]) -> tuple[float, float]:
    found = _first(places, "RescaleSlope", 1.0), _first(places, "RescaleIntercept", 0.0)
    try:
        slope, intercept = float(found[0]), float(found[1])
    except (TypeError, ValueError):
        slope = intercept = math.nan
    if slope == 0 or not (math.isfinite(slope) and math.isfinite(intercept)):
        raise ValueError(f"its header is damaged: RescaleSlope is {found[0]}, RescaleIntercept {found[1]}")
    return slope, intercept


def _groups(head: Any, frame: int) -> list[Any]:
    """Where an enhanced file keeps what others have at the top, for one frame; its own go before those of all."""
    each, shared = head.get("PerFrameFunctionalGroupsSequence"), head.get("SharedFunctionalGroupsSequence")
    outer = [*([each[frame]] if each and frame < len(each) else []), *([shared[0]] if shared else [])]
    return [item[0] for group in outer for item in (element.value for element in group) if _is_items(item)]


def _is_items(value: Any) -> bool:
    from pydicom.sequence import Sequence as Items

    return isinstance(value, Items) and len(value) > 0


def _first(places: Sequence[Any], name: str, default: Any) -> Any:
    found = (place.get(name) for place in reversed(places))
    return next((value for value in found if value is not None and value != ""), default)


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    if value is None or len(value) != count:
        return None
    try:
        found = tuple(float(each) for each in value)
    except ValueError:
        raise ValueError(f"its header is damaged: {list(value)} are no {count} numbers") from None
    return found if all(map(math.isfinite, found)) else None


def _window(places: Sequence[Any]) -> Window | None:
    centre, width = _first(places, "WindowCenter", None), _first(places, "WindowWidth", None)
    if centre is None or width is None:
        return None
    first = [value if isinstance(value, (int, float, str)) else value[0] for value in (centre, width)]
    function = str(_first(places, "VOILUTFunction", "LINEAR"))
    found = _numbers(first, 2)
    usable = found and found[1] > 0 and function in ("LINEAR", "LINEAR_EXACT", "SIGMOID")
    return Window(found[0], found[1], function) if found and usable else None


def _in_order(found: list[Picture]) -> list[Picture]:
    first = found[0]
    series = {picture.series for picture in found}
    if len(series) > 1:
        raise ValueError(
            f"the folder holds {len(series)} DICOM series; give each a folder of its own, or name one file"
        )
    for picture in found[1:]:
        if picture.shape != first.shape or picture.photometric != first.photometric or picture.across != first.across:
            raise ValueError(
                f"'{picture.path.name}' and '{first.path.name}' of the series differ in size, kind or direction; a "
                "series of a localiser or of several stacks is no volume: name one file"
            )
    if len(found) > 1 and (first.frames > 1 or first.colour):
        raise ValueError("the series has files of several frames or in colour; name one file")
    if len(found) == 1:
        return found
    if first.across is not None and all(picture.position is not None for picture in found):
        places = [float(np.dot(picture.position or (), first.normal)) for picture in found]
        apart, remedy = (
            SMALLEST_STEP,
            "several slices lie at one place (echoes, phases); give each stack its own folder",
        )
    else:
        places = [math.nan if picture.number is None else float(picture.number) for picture in found]
        apart, remedy = 0.5, "its files say neither where a slice lies nor its number; name one file"
    order = sorted(range(len(found)), key=places.__getitem__)
    steps = np.diff(np.array(places)[order])
    if not (steps > apart).all():  # also where one is not a number
        raise ValueError(f"the series has no order: {remedy}")
    return [found[place] for place in order]


# ------------------------------------------------------------------------------------------------ pixels


def decode(pictures: Sequence[Picture], is_mask: bool) -> npt.NDArray[Any]:
    """The measured values: (rows, columns), with the slices or frames behind, and three colours at the end.

    Args:
        pictures: of :func:`headers`.
        is_mask: a palette's indices are the values.

    Returns:
        the stored type where nothing is rescaled, else float32; of an image NaN, of a mask 0 where it is padded.

    Raises:
        ValueError: damaged, or compressed in a way that this machine cannot read; says which package would.
    """
    if len(pictures) == 1:
        return _pixels(pictures[0], is_mask)
    scaled = any(picture.scaled for picture in pictures)
    whole: npt.NDArray[Any] | None = None
    for number, picture in enumerate(pictures):
        check_stop()
        plane = _pixels(picture, is_mask)
        if whole is None:
            whole = np.empty((*plane.shape, len(pictures)), np.float32 if scaled else plane.dtype)
        if whole.dtype != np.float32 and plane.dtype != whole.dtype:
            raise ValueError("the files of the series hold values of different types")
        whole[:, :, number] = plane
    assert whole is not None
    return whole


def _pixels(picture: Picture, is_mask: bool) -> npt.NDArray[Any]:
    import pydicom

    with reading_as("DICOM file"):
        dataset = pydicom.dcmread(picture.path, specific_tags=list(PIXEL_TAGS))
    if "PixelData" not in dataset and not any(name in dataset for name in FLOATS):
        raise ValueError("it is a DICOM file without an image: its header describes one, the pixels are missing")
    stored = stored_values(dataset)
    found, shape = stored, picture.shape
    if picture.photometric == PALETTE and is_mask:
        shape = shape[:-1]
    elif picture.photometric == PALETTE:
        found = palette_colours(dataset, stored)
    elif picture.table:
        found = modality_table(dataset, stored)
    if picture.frames > 1:
        found, stored = np.moveaxis(found, 0, 2), np.moveaxis(stored, 0, 2)
    if found.shape != shape:
        raise ValueError(f"the file is damaged: its header describes {shape}, it has {found.shape}")
    if is_mask and picture.lossy:
        raise ValueError(
            "it is compressed with loss, which changes labels: it holds "
            f"{len(np.unique(found))} different values; store the mask again from its source, without loss"
        )
    if picture.rescaled:
        slopes, intercepts = (np.array(values, np.float32) for values in zip(*picture.rescaling, strict=True))
        found = found.astype(np.float32) * slopes + intercepts  # of each frame, the last axis
    if picture.padding is None:
        return found
    low, high = picture.padding
    outside = (stored >= low) & (stored <= high)
    return np.where(outside, 0, found).astype(found.dtype) if is_mask else _padded(found, outside)


def _padded(found: npt.NDArray[Any], outside: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    values = found.astype(np.float32)
    values[outside] = np.nan
    return values


# ------------------------------------------------------------------------------------------------ where it lies


def affine_of(pictures: Sequence[Picture]) -> npt.NDArray[np.float64] | None:
    """From (row, column, slice) to mm to the right, front and head (RAS), (4, 4); ``None``: it is not said."""
    first = pictures[0]
    if first.across is None:
        return None
    across, down = np.array(first.across[:3]), np.array(first.across[3:])
    count = len(pictures) if len(pictures) > 1 else first.frames
    start = np.array(first.position or (0.0, 0.0, 0.0))
    end = pictures[-1].position if len(pictures) > 1 else first.last
    step = first.normal
    if count > 1 and end is not None and np.linalg.norm(end - start) > SMALLEST_STEP:
        step = (np.array(end) - start) / (count - 1)
    found = np.eye(4)
    found[:3] = np.stack([down * first.spacing[0], across * first.spacing[1], step, start], axis=1)
    found[:2] *= -1  # from LPS
    return found
