"""Read DICOM by pydicom: one file with one or more frames, or the files of a series in a folder.

The header is read before any pixel, and only for the image's size and kind, the conversion of stored values to measured
values, a display window, and the position of the slice. Header fields that identify the patient are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import refuse, true_texts
from fairflare.base.own_errors import reading_as
from fairflare.base.stopping import check_stop
from fairflare.data.dicom_files import content_of, describe_content, dicom_files, files_of_series, has_dicom_mark
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
from fairflare.data.geometry import Misfit, Plane, Stack, refuse_misfit, stack
from fairflare.data.intensity import Window

TAGS = (
    "SeriesInstanceUID", "InstanceNumber", "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames",
    "PhotometricInterpretation", "BitsAllocated", "BitsStored", "PixelRepresentation", "RescaleSlope",
    "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction", "ImageOrientationPatient",
    "ImagePositionPatient", "PixelSpacing", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
    *HEADER_TAGS,
    "SOPClassUID", "SOPInstanceUID", "Modality", "FrameOfReferenceUID", "PatientOrientation", "GantryDetectorTilt",
    "GridFrameOffsetVector", "DimensionIndexSequence", "EchoTime", "TriggerTime", "TemporalPositionIdentifier",
    "DiffusionBValue", "AcquisitionNumber", "SeriesNumber",
)  # fmt: skip
GREY = "MONOCHROME2"
FILES_APART = (  # attributes that distinguish files at one position, in this order
    "EchoTime", "TriggerTime", "TemporalPositionIdentifier", "DiffusionBValue", "AcquisitionNumber", "SeriesNumber",
)  # fmt: skip
FRAMES_APART = (
    "TemporalPositionIndex", "StackID", "ReferencedSegmentNumber", "EffectiveEchoTime", "DiffusionBValue",
    "NominalCardiacTriggerDelayTime", "ComplexImageComponent", "FrameType",
)  # fmt: skip
NO_IMAGES = {  # modalities of files without an image: name of their kind, and a tool that converts them to masks
    "SEG": (
        "DICOM SEG", "segimage2itkimage --inputDICOM FILE --outputDirectory MASKS --outputType nii (of dcmqi), or "
        "get_volume of highdicom",
    ),
    "RTSTRUCT": (
        "RT Structure Set", "plastimatch convert --input FILE --referenced-ct SERIES --output-labelmap MASK.nii.gz"
    ),
}  # fmt: skip
NO_IMAGE_CLASSES = {  # SOP classes of files without an image, each with its key in NO_IMAGES
    "1.2.840.10008.5.1.4.1.1.66.4": "SEG", "1.2.840.10008.5.1.4.1.1.66.7": "SEG",
    "1.2.840.10008.5.1.4.1.1.481.3": "RTSTRUCT",
}  # fmt: skip


@dataclass(frozen=True)
class DicomHeader:
    """Represent the header of one DICOM file.

    Attributes:
        path: path of the file.
        rows, columns, frames: size of the image.
        colour: whether the image has three channels.
        bytes: number of bytes of one value of the array that :func:`decode` returns.
        inverted: whether the lowest value is white.
        rescaling: slope and intercept, for each frame or one pair for all frames; empty if they change nothing.
        windows: first display window in the header, for each frame or one for all frames.
        scaled: whether the values differ from the stored ones: then they are float32, and NaN marks padding.
        padding: range of stored values, ends included, that mark pixels outside the picture.
        eight_bits: whether the stored values are 0 to 255 and not rescaled.
        lossy: whether the pixels were compressed with loss.
        notes: notes on how values are converted, see :func:`fairflare.data.dicom_values.notes_of`.
        plane: for a file with one frame, its position and the attributes that the files of one series share.
        stack: order and position of the frames; ``rescaling`` and ``windows`` are in this order.
        frame, posture: FrameOfReferenceUID and PatientOrientation.
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
    scaled: bool
    padding: Padding | None
    eight_bits: bool
    lossy: bool
    notes: tuple[str, ...]
    plane: Plane
    stack: Stack
    frame: str
    posture: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the decoded array: (rows, columns), then frames if several, then 3 if coloured."""
        return (self.rows, self.columns, *([self.frames] if self.frames > 1 else []), *([3] if self.colour else []))


# ------------------------------------------------------------------------------------------------ headers


def headers(path: Path) -> tuple[DicomHeader, ...]:
    """Return the header of a DICOM file, or the headers of a series.

    The headers of a series are in the order of its slices, from the feet, the right or the front.

    Raises:
        Misfit: the files or frames form no single stack, or the file is a segmentation or a structure set.
        ValueError: the file is not DICOM, has no image, or has a damaged header.
    """
    if not path.is_dir():
        return (_header(path, path.stat().st_mtime_ns),)
    heads = []
    for file in files_of_series(path) or dicom_files(path):  # without an image, the first file says so
        with _name_file(file):
            heads.append(_header(file, file.stat().st_mtime_ns))
    refuse({"the folder has no DICOM file": not heads})
    return tuple(heads[k] for k in stack_of(heads).order) if len(heads) > 1 else tuple(heads)


@contextmanager
def _name_file(file: Path) -> Iterator[None]:
    """Name the file of a series in an error about it, whose message otherwise names the folder alone."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, Misfit):
            raise Misfit(error.cause, f"of its file '{file.name}', {error.value}", error.remedy) from error
        raise ValueError(f"its file '{file.name}' cannot be read: {error}") from error


def stack_of(pictures: Sequence[DicomHeader]) -> Stack:
    """Return the order and position in the body of the frames of one file, or of the files of a series.

    Raises:
        Misfit: the frames or files form no single stack.
        ValueError: a file of a series has several frames, or is in colour.
    """
    if len(pictures) == 1:
        return pictures[0].stack
    refuse({
        "the series has files of several frames or in colour; name one file":
            any(picture.frames > 1 or picture.colour for picture in pictures),
    })  # fmt: skip
    return stack([p.plane for p in pictures], same=lambda i, j: _same_pixels(pictures[i].path, pictures[j].path))


def _same_pixels(*paths: Path) -> bool:
    import pydicom

    one, other = (pydicom.dcmread(path, specific_tags=["PixelData"]).get("PixelData") for path in paths)
    return bool(one == other)


@lru_cache(maxsize=4096)
def _header(path: Path, stamp: int) -> DicomHeader:
    import pydicom

    check_stop()
    if not has_dicom_mark(path):
        what = content_of(path)
        raise ValueError(
            ("by its first bytes it is " if what[:1] == "." else "it is ")
            + (
                describe_content(what)
                or "no DICOM file: the mark DICM at byte 128 is missing; export it again as a DICOM file"
            )
        )
    with reading_as("DICOM file"):
        syntax = str(pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", ""))
    refuse({
        "the file is packed as a whole (deflated), which is not read; store it explicit little endian":
            syntax == "1.2.840.10008.1.2.1.99",
    })  # fmt: skip
    with reading_as("DICOM file"):
        head = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=list(TAGS))
    kind = NO_IMAGE_CLASSES.get(str(head.get("SOPClassUID", "")), str(head.get("Modality", "")))
    if kind in NO_IMAGES:
        what, remedy = NO_IMAGES[kind]
        raise Misfit(what, f"it is a {what}, which is not read", f"Make a NIfTI mask of it: {remedy}")
    kind = str(head.get("PhotometricInterpretation", GREY)).strip()
    refuse({
        f"it is a DICOM file without an image ({getattr(head.get('SOPClassUID'), 'name', 'of no class')})":
            not syntax or "Rows" not in head or "Columns" not in head,
        f"its photometric interpretation is {kind!r}; known are {GREY}, {INVERTED}, {PALETTE}, RGB, YBR":
            kind not in (GREY, INVERTED, PALETTE, "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"),
        "its palette has an alpha channel, which is not applied; export it without transparency":
            "AlphaPaletteColorLookupTableDescriptor" in head,
    })  # fmt: skip
    for name in ("NumberOfFrames", "SamplesPerPixel", "BitsAllocated", "BitsStored", "HighBit", "InstanceNumber"):
        try:
            int(head.get(name) or 0)
        except (TypeError, ValueError):
            raise ValueError(f"its header is damaged: {name} is {head.get(name)!r}, no whole number") from None
    return _picture(path, head, kind, syntax)


def _picture(path: Path, head: Any, kind: str, syntax: str) -> DicomHeader:
    frames = int(head.get("NumberOfFrames") or 1)
    groups = _frame_groups(head, frames)
    planes = _planes(path, head, kind, groups, frames)
    stacked = stack(planes, "frames" if frames > 1 else "files")  # frames without positions have one plane in common
    ordered = [[*groups[k], head] for k in (stacked.order if len(groups) > 1 else (0,))]
    rescaling = tuple(map(_rescale, ordered))
    rescaled, table = any(each != (1.0, 0.0) for each in rescaling), bool(head.get("ModalityLUTSequence"))
    given = true_texts({"a palette": kind == PALETTE, "a Modality LUT": table, "a slope and intercept": rescaled})
    refuse({
        f"its header has {' and '.join(given)}, and at most one of them can give the values; export the file again":
            len(given) > 1,
    })  # fmt: skip
    stored = max(math.ceil(int(head.get("BitsAllocated") or 8) / 8), 2 if kind == PALETTE else 1)
    padding, ignored = padding_of(head)
    scaled = rescaled or table or padding is not None
    return DicomHeader(
        path=path,
        rows=int(head.Rows),
        columns=int(head.Columns),
        frames=frames,
        colour=kind == PALETTE or int(head.get("SamplesPerPixel") or 1) == 3,
        bytes=max(stored, 4) if scaled else stored,
        inverted=kind == INVERTED or head.get("PresentationLUTShape") == "INVERSE",
        photometric=kind,
        rescaling=rescaling if rescaled else (),
        windows=tuple(map(_window, ordered)),
        scaled=scaled,
        padding=padding,
        eight_bits=int(head.get("BitsAllocated") or 8) == 8
        and not (rescaled or table or head.get("PixelRepresentation")),
        lossy=syntax in LOSSY or str(head.get("LossyImageCompression")) == "01",
        notes=notes_of(head, padding is not None) + ((ignored,) if ignored else ()),
        plane=planes[0],
        stack=stacked,
        frame=str(head.get("FrameOfReferenceUID", "")),
        posture=_text(head.get("PatientOrientation")),
    )


def _rescale(places: Sequence[Any]) -> tuple[float, float]:
    values = _first(places, "RescaleSlope", 1.0), _first(places, "RescaleIntercept", 0.0)
    try:
        slope, intercept = float(values[0]), float(values[1])
    except (TypeError, ValueError):
        slope = intercept = math.nan
    refuse({
        f"its header is damaged: RescaleSlope is {values[0]}, RescaleIntercept {values[1]}":
            slope == 0 or not (math.isfinite(slope) and math.isfinite(intercept)),
    })  # fmt: skip
    return slope, intercept


def _frame_groups(head: Any, frames: int) -> list[list[Any]]:
    """Return, for each frame of an enhanced DICOM file, the header items that other files have at the top level.

    A frame's own items come before the items that all frames share. A file without per-frame functional groups has one
    entry, for all frames.
    """
    from pydicom.sequence import Sequence as Items

    per_frame, shared = head.get("PerFrameFunctionalGroupsSequence"), head.get("SharedFunctionalGroupsSequence")
    refuse_misfit(
        per_frame and len(per_frame) != frames,
        "per-frame functional groups and frames differ in number",
        f"its header has {len(per_frame or ())} functional groups for {frames} frames",
        "Fetch the file again, or leave it out",
    )
    of_all = [shared[0]] if shared else []
    outer = [[each, *of_all] for each in per_frame] if per_frame else [of_all]
    return [
        [item.value[0] for group in groups for item in group if isinstance(item.value, Items) and len(item.value)]
        for groups in outer
    ]


def _planes(path: Path, head: Any, kind: str, groups: Sequence[Sequence[Any]], frames: int) -> list[Plane]:
    """Return the plane of each frame from its functional groups, or without these from the top of the header.

    The frames of a dose grid lie at offsets along the normal (PS3.3, C.8.8.3). If a file without functional groups has
    several frames without such offsets, the result is a single plane without a position.
    """
    from pydicom.datadict import keyword_for_tag

    number, offsets = head.get("InstanceNumber"), head.get("GridFrameOffsetVector")
    usual = Plane(
        f"'{path.name}'",
        number=None if number is None else int(number),
        tilt=float(head.get("GantryDetectorTilt") or 0),
        modality=_text(head.get("Modality")),
        alike={
            "SeriesInstanceUID": str(head.get("SeriesInstanceUID", "")),
            "size": f"{head.Rows} x {head.Columns}",
            "PhotometricInterpretation": kind,
            "SOPClassUID": str(head.get("SOPClassUID", "")),
            "FrameOfReferenceUID": str(head.get("FrameOfReferenceUID", "")),
        },
        apart={name: _text(head.get(name)) for name in FILES_APART},
    )
    if not any(groups):  # the file has no functional groups
        top = replace(usual, **_place([head]))
        if frames == 1:
            return [top]
        if not offsets or len(offsets) != frames or top.position is None or top.across is None:
            return [usual]
        refuse_misfit(
            float(offsets[0]) != 0,
            "offsets of frames that are not relative",
            f"its GridFrameOffsetVector begins with {float(offsets[0]):g}, not with 0",
            "Fetch the file again, or leave it out",
        )
        normal = np.cross(top.across[:3], top.across[3:])
        behind = (np.array(top.position) + float(offset) * normal for offset in offsets)
        return [replace(top, name=f"frame {k}", position=tuple(place)) for k, place in enumerate(behind)]
    pointers = (each.get("DimensionIndexPointer") or 0 for each in head.get("DimensionIndexSequence") or ())
    dimensions = [keyword_for_tag(pointer) or str(pointer) for pointer in pointers]
    planes = []
    for k, places in enumerate(groups):
        values = _first(places, "DimensionIndexValues", None)
        values = [values] if isinstance(values, int) else values or ()
        differing = {name: _text(_first(places, name, None)) for name in FRAMES_APART}
        differing |= {
            f"dimension {n}": str(v)
            for n, v in zip(dimensions, values, strict=False)
            if n not in ("ImagePositionPatient", "InStackPositionNumber")  # these give positions
        }
        alike = {name: differing[name] for name in ("TemporalPositionIndex", "StackID")}
        of_frame: dict[str, Any] = {"name": f"frame {k}", "alike": alike, "apart": differing} if frames > 1 else {}
        planes.append(replace(usual, **_place(places), **of_frame))
    return planes


def _place(places: Sequence[Any]) -> dict[str, Any]:
    position = _first(places, "ImagePositionPatient", None)
    return {
        "position": _numbers(position, 3),
        "across": _numbers(_first(places, "ImageOrientationPatient", None), 6),
        "spacing": _numbers(_first(places, "PixelSpacing", None), 2),
        "decimals": max((_decimals(value) for value in position or ()), default=0),
        "intercept": _first(places, "RescaleIntercept", None),
    }


def _decimals(value: Any) -> int:
    """Return the number of digits after the decimal point of a number, as the header writes it."""
    exponent = Decimal(str(value)).as_tuple().exponent
    return max(-exponent, 0) if isinstance(exponent, int) else 0


def _text(value: Any) -> str:
    r"""Return the value of a header element as text; several values are joined as in the header: ``L\P``."""
    return "" if value is None else str(value) if isinstance(value, (str, int, float)) else "\\".join(map(str, value))


def _first(places: Sequence[Any], name: str, default: Any) -> Any:
    return next((value for place in places if (value := place.get(name)) is not None and value != ""), default)


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    if value is None or len(value) != count:
        return None
    try:
        numbers = tuple(float(each) for each in value)
    except ValueError:
        raise ValueError(f"its header is damaged: {list(value)} are no {count} numbers") from None
    return numbers if all(map(math.isfinite, numbers)) else None


def _window(places: Sequence[Any]) -> Window | None:
    centre, width = _first(places, "WindowCenter", None), _first(places, "WindowWidth", None)
    if centre is None or width is None:
        return None
    function = str(_first(places, "VOILUTFunction", "LINEAR"))
    numbers = _numbers([value if isinstance(value, (int, float, str)) else value[0] for value in (centre, width)], 2)
    if numbers is None or numbers[1] <= 0 or function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        return None
    return Window(numbers[0], numbers[1], function)


# ------------------------------------------------------------------------------------------------ pixels


def decode(pictures: Sequence[DicomHeader], is_mask: bool) -> npt.NDArray[Any]:
    """Return the measured values: (rows, columns), then slices or frames as third axis, and three colours as last axis.

    Args:
        pictures: headers, as :func:`headers` returns them.
        is_mask: whether the files are a mask: then a palette's indices are the values.

    Returns:
        Array of the stored type where nothing is rescaled, else float32; padding is NaN in an image and 0 in a mask.

    Raises:
        ValueError: a file is damaged, or compressed in a way that this machine cannot read; the message names a package
            that can.
    """
    first = _pixels(pictures[0], is_mask)
    if len(pictures) == 1:
        return first
    scaled = any(picture.scaled for picture in pictures)
    whole = np.empty((*first.shape, len(pictures)), np.float32 if scaled else first.dtype)
    for number, picture in enumerate(pictures):
        check_stop()
        with _name_file(picture.path):
            plane = _pixels(picture, is_mask) if number else first
        refuse({"the files of the series hold values of different types": not scaled and plane.dtype != whole.dtype})
        whole[:, :, number] = plane
    return whole


def _pixels(picture: DicomHeader, is_mask: bool) -> npt.NDArray[Any]:
    import pydicom

    with reading_as("DICOM file"):
        dataset = pydicom.dcmread(picture.path, specific_tags=list(PIXEL_TAGS))
    refuse({
        "it is a DICOM file without an image: its header describes one, the pixels are missing":
            not any(name in dataset for name in ("PixelData", *FLOATS)),
    })  # fmt: skip
    stored = stored_values(dataset)
    values, shape = stored, picture.shape
    if picture.photometric == PALETTE and is_mask:
        shape = shape[:-1]
    elif picture.photometric == PALETTE:
        values = palette_colours(dataset, stored)
    elif dataset.get("ModalityLUTSequence"):
        values = modality_table(dataset, stored)
    if picture.frames > 1:
        order = list(picture.stack.order) if len(picture.stack.order) == picture.frames else slice(None)
        values, stored = (np.moveaxis(each, 0, 2)[:, :, order] for each in (values, stored))
    refuse({f"the file is damaged: its header describes {shape}, it has {values.shape}": values.shape != shape})
    if is_mask and picture.lossy:
        raise ValueError(
            "it is compressed with loss, which changes labels: it holds "
            f"{len(np.unique(values))} different values; store the mask again from its source, without loss"
        )
    if picture.rescaling:
        slopes, intercepts = (np.array(values, np.float32) for values in zip(*picture.rescaling, strict=True))
        values = values.astype(np.float32) * slopes + intercepts  # slope and intercept by frame (last axis)
    if picture.padding is None:
        return values
    outside = (stored >= picture.padding[0]) & (stored <= picture.padding[1])
    if is_mask:
        return np.where(outside, 0, values).astype(values.dtype)
    return np.where(outside, np.float32(np.nan), values.astype(np.float32))
