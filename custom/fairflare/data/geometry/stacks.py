"""Order the slices of a series or the frames of a file, or report why they form no stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.geometry.misfits import ACROSS, SHOWN, SKEW, STEP, Misfit, format_values, refuse_misfit

DIRECTION = 1e-4  # largest difference in a component of two directions that count as equal
LENGTH = 1e-4  # largest difference of two spacings that count as equal, as a share of the spacing
UNIT = 1e-3  # tolerance of a direction's length from 1, and of two directions from a right angle
SAME_PLACE = 1e-3  # distance, in mm, below which two planes lie at one position
TWICE, GAP, DRIFT = 0.01, 1.5, 0.1  # limits of a double slice, a gap and a drift, in median steps between slices
LOCALISER = 5.0  # angle between two slices, in degrees, above which they are taken for a localiser

SEVERAL_SERIES, NO_ORDER, UNLIKE = "several series in one folder", "slices without an order", "slices that differ"
NO_SERIES = (SEVERAL_SERIES, NO_ORDER, UNLIKE)  # causes with which the files may be separate images, not a series
WHOLE_SERIES = "Fetch the whole series, or leave it out"
OWN_STACK = "Put each stack into a folder of its own"
OWN_FILE = "Export each stack (echo, direction) as a file of its own, or leave it out"
ONE_TIME = "Convert it with dcm2niix, then `nibabel.four_to_three` gives one file a time"


@dataclass(frozen=True)
class Plane:
    """Represent the geometry of one slice or frame, as its header states it.

    Attributes:
        name: name of the file or frame for messages.
        position: position of the first pixel, mm (LPS); ``None`` if the header states none.
        across: direction in which the columns follow each other, then that of the rows (LPS).
        spacing: distances between rows and between columns, mm.
        decimals: digits after the decimal point in the position's text.
        number: InstanceNumber.
        tilt: GantryDetectorTilt in degrees. The value is nominal (PS3.3, C.8.2.1) and used only if the header has no
            position.
        modality: modality of the image, such as ``"CT"``.
        intercept: RescaleIntercept; ``None``: the header states none.
        alike: attributes, as text, that must agree in all planes of a stack.
        apart: attributes that distinguish planes at one position.
    """

    name: str
    position: tuple[float, ...] | None = None
    across: tuple[float, ...] | None = None
    spacing: tuple[float, ...] | None = None
    decimals: int = 0
    number: int | None = None
    tilt: float = 0.0
    modality: str = ""
    intercept: Any = None
    alike: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stack:
    """Represent the order and position of the planes of a stack.

    Attributes:
        order: indices of the planes in the order of the slices.
        affine: (4, 4) matrix from (row, column, slice) to mm (RAS); ``None`` if the planes state no position.
        note: a remark on the stack for the user; empty for none.
    """

    order: tuple[int, ...]
    affine: npt.NDArray[Any] | None = None
    note: str = ""


def stack(
    planes: Sequence[Plane], what: str = "files", same: Callable[[int, int], bool] = lambda one, other: False
) -> Stack:
    """Order planes by their positions, towards the left, the back or the head, whichever is nearest to their normal.

    Args:
        planes: planes to order, at least one.
        what: ``"files"`` or ``"frames"``, for messages.
        same: returns whether two planes at one position, given by their indices, hold the same pixels.

    Raises:
        Misfit: the planes form no stack.
    """
    _check_alike(planes, what)
    for name, attribute in (
        ("ImagePositionPatient", "position"), ("ImageOrientationPatient", "across"), ("RescaleIntercept", "intercept"),
    ):  # fmt: skip
        has = sum(getattr(plane, attribute) is not None for plane in planes)
        refuse_misfit(
            0 < has < len(planes),
            f"some slices do not say {'what they measure' if attribute == 'intercept' else 'where they lie'}",
            f"{has} of {len(planes)} {what} have a usable {name}",
            WHOLE_SERIES,
        )
    first = planes[0]
    if first.position is None or first.across is None:
        return _order_unplaced(planes, what)
    down, right, normal = _directions(first.across)
    lengths, angle = np.linalg.norm([right, down], axis=1), float(right @ down)
    refuse_misfit(
        np.abs(lengths - 1).max() > UNIT or abs(angle) > UNIT,
        "rows and columns do not lie at a right angle",
        f"its rows and columns do not lie at a right angle, or are no directions (ImageOrientationPatient "
        f"{format_values(first.across)})",
        WHOLE_SERIES,
    )
    refuse_misfit(
        len(planes) > 1 and first.spacing is None,
        "PixelSpacing is missing",
        f"its {what} have no usable PixelSpacing, so a voxel has no size",
        WHOLE_SERIES,
    )
    grown = normal if normal[np.abs(normal).argmax()] > 0 else -normal
    places = np.array([plane.position for plane in planes], np.float64)
    order = np.argsort(places @ grown, kind="stable")
    step = grown
    if len(planes) > 1:
        _check_even(
            [planes[k] for k in order], places[order], grown, what, lambda k: same(int(order[k]), int(order[k + 1]))
        )
        step = (places[order[-1]] - places[order[0]]) / (len(planes) - 1)
    rows, columns = first.spacing or (1.0, 1.0)
    affine = np.eye(4)
    affine[:3] = np.stack([down * rows, right * columns, step, places[order[0]]], axis=1)
    affine[:2] *= -1  # convert the LPS coordinates of DICOM to RAS
    return Stack(tuple(order.tolist()), affine)


def _directions(across: Sequence[float]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return three directions of a plane: down a column, along a row, and the normal.

    The three are right-handed in the order: along a row, down a column, normal.
    """
    right, down = np.array(across[:3], np.float64), np.array(across[3:], np.float64)
    normal = np.cross(right, down)
    return down, right, normal / max(float(np.linalg.norm(normal)), 1e-12)


def _check_alike(planes: Sequence[Plane], what: str) -> None:
    """Raise ``Misfit`` for the first attribute that differs between planes but must agree in a stack."""
    first = planes[0]
    for name in first.alike:
        plane_of_value = {plane.alike[name]: plane for plane in reversed(planes) if plane.alike.get(name)}
        if len(plane_of_value) > 1:
            raise _several(planes, name, plane_of_value, what)
    near = LENGTH * max(first.spacing or (1.0,))
    for name, attribute, apart in (("ImageOrientationPatient", "across", DIRECTION), ("PixelSpacing", "spacing", near)):
        known = [plane for plane in planes if getattr(plane, attribute) is not None]
        values = np.array([getattr(plane, attribute) for plane in known or [first]], np.float64).reshape(
            len(known) or 1, -1
        )
        odd = np.flatnonzero(np.abs(values - values[0]).max(axis=1) > apart)
        if odd.size:
            usual, its = values[0].tolist(), values[odd[0]].tolist()
            cosine = abs(float(_directions(usual)[2] @ _directions(its)[2])) if attribute == "across" else 1.0
            angle = math.degrees(math.acos(min(cosine, 1.0)))
            scout = f" ({angle:.1f} degrees apart: a localiser is no volume)" if angle > LOCALISER else ""
            raise Misfit(
                UNLIKE,
                f"{known[0].name} and {known[odd[0]].name} differ in {name}: "
                f"{format_values(usual)} and {format_values(its)}{scout}",
                OWN_STACK if what == "files" else OWN_FILE,
            )


def _several(planes: Sequence[Plane], name: str, planes_by: Mapping[str, Plane], what: str) -> Misfit:
    """Return the misfit of planes that differ in attribute ``name``; ``planes_by`` maps a value to its first plane."""
    values = sorted(planes_by)
    if name == "SeriesInstanceUID":
        return Misfit(
            SEVERAL_SERIES,
            f"the folder holds {len(values)} DICOM series",
            "Give each a folder of its own, or name one file",
        )
    if what == "frames":
        lie = len({tuple(np.round(plane.position, 3)) for plane in planes if plane.position is not None})
        count = (
            f"{len(planes)} frames lie at {lie} places"
            if 0 < lie < len(planes)
            else f"its frames are {len(values)} stacks"
        )
        return Misfit(
            "frames of several stacks",
            f"{count}; they differ in {name} ({_shortly(values)})",
            _apart_by(name, what),
        )
    one, other = sorted(planes_by.values(), key=planes.index)[:2]
    return Misfit(
        UNLIKE,
        f"{one.name} and {other.name} differ in {name}: {one.alike[name]} and {other.alike[name]}",
        OWN_STACK,
    )


def _shortly(values: Sequence[str]) -> str:
    return ", ".join(values[:SHOWN]) + (", ..." if len(values) > SHOWN else "")


def _order_unplaced(planes: Sequence[Plane], what: str) -> Stack:
    """Order planes whose headers state no position: frames as in their file, files by their InstanceNumber."""
    if len(planes) == 1:
        return Stack((0,))
    if tilt := next((plane.tilt for plane in planes if plane.tilt), 0.0):
        raise Misfit(
            "a tilted gantry without positions",
            f"its slices do not say where they lie, and were taken with a tilted gantry ({tilt:g} degrees)",
            WHOLE_SERIES,
        )
    if what == "frames":
        return Stack(tuple(range(len(planes))))
    numbers = [plane.number for plane in planes]
    refuse_misfit(
        None in numbers or len(set(numbers)) < len(numbers),
        NO_ORDER,
        "the series has no order: its files say neither where a slice lies nor a number of its own",
        "Name one file, or fetch the whole series",
    )
    return Stack(
        tuple(sorted(range(len(planes)), key=lambda k: numbers[k] or 0)),
        note="slices do not say where they lie: ordered by InstanceNumber",
    )


def _check_even(
    planes: Sequence[Plane], places: npt.NDArray[Any], grown: npt.NDArray[Any], what: str, copied: Callable[[int], bool]
) -> None:
    """Raise ``Misfit`` if ordered planes have a duplicate, a gap, uneven steps, drift, shear or a shifted slice."""
    along = places @ grown
    steps = np.diff(along)
    usual, count = float(np.median(steps)), len(planes)
    twice = np.flatnonzero(steps <= max(SAME_PLACE, TWICE * usual))
    if twice.size:
        raise _twice(planes, along, twice, what, copied)
    decimals = max(plane.decimals for plane in planes)
    rounding = 10.0**-decimals if decimals >= 2 else 0.0
    gaps = np.flatnonzero(steps > GAP * usual)
    if gaps.size:
        k = int(gaps[0])
        missing = sum(round(float(step) / usual) - 1 for step in steps[gaps])
        whole = np.abs(steps[gaps] / usual - np.round(steps[gaps] / usual)).max() <= 0.1
        lacks = f": {missing} {'slice is' if missing == 1 else 'slices are'} missing" if whole else ""
        raise Misfit(
            "slices are missing",
            f"{steps[k]:.4g} mm lie between slices {k} and {k + 1} ({planes[k].name}, {planes[k + 1].name}), "
            f"{usual:.4g} mm between the others{f', as in {len(gaps) - 1} more places' * (len(gaps) > 1)}{lacks}",
            WHOLE_SERIES,
        )
    off = np.flatnonzero(np.abs(steps - usual) > max(STEP * usual, rounding) + 1e-9)
    drift = np.abs(along - (along[0] + np.arange(count) * (along[-1] - along[0]) / (count - 1)))
    if off.size or drift.max() > DRIFT * usual:
        k = int(off[0]) if off.size else int(drift.argmax()) - 1
        value = (
            f"its steps are uneven: from {steps.min():.4g} to {steps.max():.4g} mm, mostly {usual:.4g}, first "
            f"between slices {k} and {k + 1} ({planes[k].name}, {planes[k + 1].name})"
            if off.size
            else f"its steps drift: slice {k + 1} lies {drift.max():.3g} mm off even steps of {usual:.4g} mm"
        )
        raise Misfit("uneven steps between slices", value, WHOLE_SERIES)
    whole = places[-1] - places[0]
    length = float(np.linalg.norm(whole))
    sideways = math.sqrt(max(length**2 - float(whole @ grown) ** 2, 0.0))
    cosine = abs(float(whole @ grown)) / length
    tilt, step = math.degrees(math.acos(min(cosine, 1.0))), length / (count - 1)
    refuse_misfit(
        1 - cosine > SKEW and sideways > ACROSS,
        "slices stacked off their normal",
        f"its slices are stacked {tilt:.1f} degrees off their normal (tilted gantry): {step * cosine:.4g} mm from "
        f"plane to plane, {step:.4g} from place to place",
        "Convert it with dcm2niix, take its _Tilt file, draw the mask on that"
        if planes[0].modality == "CT"
        else "Fetch the series as the scanner made it, or leave it out",
    )
    beside = places - places[0] - np.arange(count)[:, None] * whole / (count - 1)
    beside = np.linalg.norm(beside - np.outer(beside @ grown, grown), axis=1)
    k = int(beside.argmax())
    refuse_misfit(
        beside[k] > max(min(planes[0].spacing or (1.0,)) / 2, ACROSS),
        "slices are shifted",
        f"slice {k} ({planes[k].name}) is shifted by {beside[k]:.3g} mm beside the others",
        WHOLE_SERIES,
    )


def _twice(
    planes: Sequence[Plane], along: npt.NDArray[Any], twice: npt.NDArray[Any], what: str, copied: Callable[[int], bool]
) -> Misfit:
    k = int(twice[0])
    one, other = planes[k], planes[k + 1]
    place = f"{one.name} and {other.name}, at {along[k]:.4g} mm"
    if copied(k):
        return Misfit(
            "a slice is there twice",
            f"a file was copied: {place}, hold the same slice",
            "Fetch the series again, into an empty folder",
        )
    differ = next((name for name in one.apart if one.apart[name] != other.apart.get(name, "")), None)
    values = sorted({plane.apart.get(differ or "", "nothing") for plane in planes})
    why = f"the first are {place}" if differ is None else f"they differ in {differ} ({_shortly(values)})"
    return Misfit(
        "several slices at one place",
        f"{len(planes)} {what} lie at {len(planes) - len(twice)} places; {why}",
        _apart_by(differ, what),
    )


def _apart_by(name: str | None, what: str) -> str:
    """Return the remedy that separates mixed stacks by an attribute; for frames, dcm2niix can only separate times."""
    return OWN_STACK if what == "files" else ONE_TIME if name == "TemporalPositionIndex" else OWN_FILE
