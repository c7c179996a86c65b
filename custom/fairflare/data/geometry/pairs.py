"""Fit a mask to its image by the positions and orientations that both files state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fairflare.data.geometry.misfits import ACROSS, ASK, SKEW, STEP, Misfit, format_values, refuse_misfit, sides_of
from fairflare.data.orientation import PLAIN, Turn, back, turn_of, turn_view

DrawnOn = Literal["stored", "upright"]
Affine = npt.NDArray[Any]

# Largest distance between corners of two grids that count as equal: without a note, and with a note. The unit is the
# smallest side of a voxel.
TOGETHER, NEAR = 0.1, 0.5

SEGMENTS = "segments"  # value of ``Grid.of`` for a DICOM SEG: slices without a frame are empty
TWO_FORMS = "two forms that differ"
ANEW = (
    "Have the mask written anew on this very image, by a program that keeps the image's geometry (3D Slicer, ITK-SNAP, "
    "SimpleITK)"
)
RESAMPLE = "`sitk.Resample(mask, image, sitk.Transform(), sitk.sitkNearestNeighbor)`"
WITH_GEOMETRY = (
    "Write the mask with its geometry in the program that made the array: `mask.CopyInformation(image)` (SimpleITK), "
    "or `nibabel.Nifti1Image(array, image.affine)` (nibabel)"
)
CHOOSE = (
    "Set mask_drawn_on to 'stored' or 'upright' in fairflare.json (--mask-drawn-on of prepare), after a look at a pair"
)


@dataclass(frozen=True)
class Grid:
    """Represent position and orientation of an array, as its file states them.

    Attributes:
        shape: (rows, columns, slices), as the array is read.
        statements: name and affine (RAS) of each form in the file: none, one, or two forms of a NIfTI that differ.
        tag: EXIF orientation that a picture states (1 to 8), by which the array is rotated; ``None`` if none is stated.
        of: ``"series"`` or ``"frames"`` for DICOM with positions, :data:`SEGMENTS` for a DICOM SEG with positions, in
            which slices without a frame are empty; empty otherwise.
        frame: FrameOfReferenceUID.
        posture: PatientOrientation; it is only compared, and gives neither a position nor a rotation.
        note: a remark on the geometry for the user; empty for none.
    """

    shape: tuple[int, int, int]
    statements: tuple[tuple[str, Affine], ...] = ()
    tag: int | None = None
    of: str = ""
    frame: str = ""
    posture: str = ""
    note: str = ""

    @property
    def affine(self) -> Affine | None:
        """Return the (4, 4) matrix from (row, column, slice) to mm (RAS), or ``None`` if the file does not state one.

        Raises:
            Misfit: the qform and the sform of a NIfTI file state different directions of the body.
        """
        codes = {name: codes_of(affine) for name, affine in reversed(self.statements)}
        in_words = " and ".join(f"{name} {directions}" for name, directions in codes.items())
        refuse_misfit(len({*codes.values()}) > 1, TWO_FORMS, in_words.replace(" ", " says ", 1), ASK)
        return self.statements[0][1] if self.statements else None


@dataclass(frozen=True)
class Fit:
    """Describe how a mask is brought to the axes of its image.

    Attributes:
        turn: argument of :func:`fairflare.data.orientation.turn_view`: (3, 2), for each axis of the mask the number of
            the image's axis, and 1 or -1 (flipped).
        affine: affine of the image, by the form that fits the mask; ``None`` if the image states none.
        note: a remark on the pair for the user; empty for none.
        places: for a mask file that lacks empty slices, the image's slice of each slice in the file; otherwise empty.
        slices: number of the image's slices; used only with ``places``.
    """

    turn: Turn
    affine: Affine | None = None
    note: str = ""
    places: tuple[int, ...] = ()
    slices: int = 0

    def bring(self, mask: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the whole mask along the image's axes, missing slices as 0; axes after the third are unchanged."""
        if self.places:
            whole = np.zeros((*mask.shape[:2], self.slices), mask.dtype)
            whole[:, :, list(self.places)] = mask
            return turn_view(whole, self.turn)
        return turn_view(mask, self.turn)


def fit(image: Grid, mask: Grid, drawn_on: str | None = None, orientation: str = "canonical") -> Fit | Misfit:
    """Return how a mask lies on its image, by the geometry that both files state; nothing is resampled.

    Args:
        image, mask: geometry that the two files state.
        drawn_on: rule for pairs of which only one file states a geometry: ``"stored"``: pixel on pixel as both files
            store them; ``"upright"``: pixel on pixel as both are shown, each rotated by its own statement.
        orientation: orientation to which the task brings images; it decides whether a single slice is rotated at all.
    """
    if image.frame and mask.frame and image.frame != mask.frame:
        return Misfit(
            "image and mask have different frames of reference",
            f"its FrameOfReferenceUID is {mask.frame}, the image's {image.frame}, so places cannot be compared",
            ANEW,
        )
    if image.statements and mask.statements:
        whole, places = _extend_to_slices(image, mask) if mask.of == SEGMENTS else (mask, ())
        fitting = _fit_affines(image, whole)
        return replace(fitting, places=places, slices=whole.shape[2]) if isinstance(fitting, Fit) else fitting
    if image.posture and mask.posture and image.posture != mask.posture:
        return Misfit(
            "image and mask differ in PatientOrientation",
            f"its PatientOrientation is {mask.posture}, the image's {image.posture}",
            ANEW,
        )
    if image.statements or mask.statements:
        return _half_said(image, mask, drawn_on, orientation)
    upright = Fit(
        PLAIN, note="volumes and masks that do not say how they lie: voxel on voxel" if image.shape[2] > 1 else ""
    )
    if (image.tag is None) == (mask.tag is None) or (image.tag or mask.tag) == 1:
        return _pixel_on_pixel(image, mask, upright)
    stored = Fit(_compose(np.asarray(back(tag_turn(mask.tag))), tag_turn(image.tag)))
    one, other, tag = ("picture", "mask", image.tag) if mask.tag is None else ("mask", "picture", mask.tag)
    return _fit_as_set(
        image, mask, stored, upright, drawn_on,
        Misfit(
            "only one of image and mask says that it is turned",
            f"the {one} says that it is turned (EXIF {tag}), the {other} says nothing",
            CHOOSE,
        ),
    )  # fmt: skip


def tag_turn(tag: int | None) -> Turn:
    """Return the rotation or flip of stored rows and columns that an EXIF or TIFF orientation tag asks for.

    Tags other than 1 to 8 change nothing.

    >>> turn_view(np.array([[0, 1, 2], [3, 4, 5]]), tag_turn(6)).tolist()
    [[3, 0], [4, 1], [5, 2]]
    """
    number = (tag or 1) - 1 if tag in range(1, 9) else 0
    flipped = ((), (1,), (0, 1), (0,))[number % 4]
    axes = (1, 0) if number >= 4 else (0, 1)
    return np.array([*([axis, -1 if axis in flipped else 1] for axis in axes), [2, 1]])


def codes_of(affine: Affine) -> str:
    """Return the directions of columns, rows and slices of an affine, in nibabel's letters such as ``LPS``."""
    from nibabel.orientations import aff2axcodes

    return "".join(aff2axcodes(affine[:, [1, 0, 2, 3]]))


def check_affine(affine: Affine, shape: Sequence[int], name: str) -> Affine:
    """Check an affine; return it with an axis of one voxel and length 0 replaced by the normal of the other two axes.

    Args:
        affine: matrix from (row, column, slice) to mm.
        shape: shape of the array; an axis of one voxel may have any direction.
        name: name of the form (sform, qform), for the message.

    Raises:
        Misfit: an axis has no length, or the axes are sheared.
    """
    full = _full(affine, shape)
    sides = np.linalg.norm(full[:3, :3], axis=0)
    refuse_misfit(
        not np.isfinite(full).all() or not sides.all(),
        "an affine without a size",
        f"its {name} has an axis without a length: {format_values(sides)} mm",
        ASK,
    )
    for axis in (axis for axis in (2, 0, 1) if shape[axis] != 1):
        direction, normal = full[:3, axis], _normal_to(axis, full)
        cosine = abs(float(direction @ normal)) / max(float(np.linalg.norm(direction) * np.linalg.norm(normal)), 1e-12)
        sideways = math.sqrt(max(1 - cosine**2, 0.0)) * float(np.linalg.norm(direction)) * (shape[axis] - 1)
        lean = math.degrees(math.acos(min(cosine, 1.0)))
        refuse_misfit(
            1 - cosine > SKEW and sideways > ACROSS,
            "slices stacked off their normal",
            f"its {name} is sheared: its {('rows', 'columns', 'slices')[axis]} are stacked {lean:.1f} degrees off "
            "their normal",
            ASK,
        )
    return affine if np.linalg.norm(affine[:3, :3], axis=0).all() else full


def together(one: Affine, other: Affine, shape: Sequence[int], within: float = TOGETHER) -> bool:
    """Return whether two affines of one array place each corner at the same position, within a share of a voxel."""
    return _apart(one, other, PLAIN, shape, shape) <= within * float(np.linalg.norm(one[:3, :3], axis=0).min())


def _fit_affines(image: Grid, mask: Grid) -> Fit | Misfit:
    """Fit a mask to an image by the affines of both; every pair of their affines, at most two each, is tried."""
    fitting: list[tuple[Fit, str]] = []
    for (name, affine), (its, other) in product(image.statements, mask.statements):
        a, b = _full(affine, image.shape), _full(other, mask.shape)
        turn = _axes_of(a, b)
        apart, side = _apart(a, b, turn, image.shape, mask.shape), float(np.linalg.norm(a[:3, :3], axis=0).min())
        if _shape_fits(image.shape, mask.shape, turn) and apart <= NEAR * side * (1 - 1e-6):
            far = f"mask and image lie up to {apart:.2g} mm apart ({apart / side:.2g} voxel)"
            fitting.append((Fit(turn, affine, far if apart > TOGETHER * side else ""), f"{name} and {its}"))
    if not fitting:
        return (None if mask.of or image.of == "frames" else _find_lost_geometry(image, mask)) or _name_misfit(
            image, mask
        )
    if len({each.turn.tobytes() for each, _ in fitting}) > 1:
        return Misfit(
            TWO_FORMS, "it lies on the image in two ways, by image's and mask's "
            f"{', or '.join(names for _, names in fitting)}", ASK,
        )  # fmt: skip
    return fitting[0][0]


def _extend_to_slices(image: Grid, mask: Grid) -> tuple[Grid, tuple[int, ...]]:
    """Extend a mask's grid to all slices of its image; return it and, for each slice of the mask, the image's slice.

    If a slice of the mask is beyond the image, or two slices of the mask are nearest to the same slice of the image,
    return the grid unchanged and no slices; the mask is then checked like any other. A slice of the mask between two
    slices of the image gets the nearest one; its distance from that slice is checked later.
    """
    a, b = _full(image.statements[0][1], image.shape), _full(mask.statements[0][1], mask.shape)
    axis, count = int(_axes_of(a, b)[2, 0]), mask.shape[2]
    step, first = np.linalg.solve(a, b)[axis, 2:]
    places = np.round(first + step * np.arange(count)).astype(int)
    if places.min() < 0 or places.max() >= image.shape[axis] or len(np.unique(places)) < count:
        return mask, ()
    b[:, 3] -= places[0] * a[:, axis]
    b[:, 2] = a[:, axis]
    shape = (*mask.shape[:2], image.shape[axis])
    return replace(mask, shape=shape, statements=((mask.statements[0][0], b),)), tuple(places.tolist())


def _full(affine: Affine, shape: Sequence[int]) -> Affine:
    """Return an affine in which a single axis of one voxel is the normal of the two other axes, 1 mm long."""
    full = np.array(affine, np.float64)
    single = [axis for axis in range(3) if shape[axis] == 1]
    if len(single) == 1:
        normal = _normal_to(single[0], full)
        length = float(np.linalg.norm(normal))
        full[:3, single[0]] = normal / length if length else full[:3, single[0]]
    return full


def _normal_to(axis: int, affine: Affine) -> npt.NDArray[Any]:
    """Return the cross product of an affine's two axes other than ``axis``."""
    return np.cross(*np.delete(affine[:3, :3], axis, axis=1).T)


def _axes_of(a: Affine, b: Affine) -> Turn:
    """Return the image's axis that is nearest to each axis of the mask, and 1 or -1 for the same or opposite way."""
    moved = np.linalg.solve(a, b)[:3, :3]
    # Compare directions in mm, not in voxels: unequal voxel sides must not change which axes match.
    shares = np.abs(moved) * np.linalg.norm(a[:3, :3], axis=0)[:, None]
    shares = shares / np.linalg.norm(shares, axis=0)
    best = max(permutations(range(3)), key=lambda order: sum(shares[order[j], j] for j in range(3)))
    return np.array([[best[j], 1 if moved[best[j], j] > 0 else -1] for j in range(3)])


def _shape_fits(image: Sequence[int], mask: Sequence[int], turn: Turn) -> bool:
    return all(mask[j] == image[int(turn[j, 0])] for j in range(3))


def _apart(a: Affine, b: Affine, turn: Turn, image: Sequence[int], mask: Sequence[int]) -> float:
    """Return the largest distance, in mm, of the mask's eight corners from the corners of the image they belong to."""
    wanted = np.zeros((3, 4))
    for j, (axis, flip) in enumerate(turn.astype(int)):
        wanted[axis, j], wanted[axis, 3] = flip, 0 if flip > 0 else image[axis] - 1
    corners = np.array([[*corner, 1] for corner in product(*((0, length - 1) for length in mask))])
    return float(np.linalg.norm(a[:3, :3] @ (np.linalg.solve(a, b)[:3] - wanted) @ corners.T, axis=0).max())


def _name_misfit(image: Grid, mask: Grid) -> Misfit:
    """Return the reason why a mask does not fit its image, by the first affine of both."""
    a, b = _full(image.statements[0][1], image.shape), _full(mask.statements[0][1], mask.shape)
    sides = np.linalg.norm(a[:3, :3], axis=0)
    other = np.diag([-1.0, -1.0, 1.0, 1.0]) @ b
    turn = _axes_of(a, other)
    smallest = float(sides.min())
    if _shape_fits(image.shape, mask.shape, turn) and _apart(a, other, turn, image.shape, mask.shape) < NEAR * smallest:
        return Misfit(
            "LPS taken for RAS in a mask",
            "left and right, front and back are exchanged in its header (LPS taken for RAS)",
            ANEW,
        )
    turn = _axes_of(a, b)
    axes = turn[:, 0].astype(int)
    lengths = np.linalg.norm(b[:3, :3], axis=0)
    ratios = [lengths[j] / sides[axes[j]] for j in range(3) if image.shape[axes[j]] > 1 and mask.shape[j] > 1]
    if any(abs(ratio - 1) > STEP for ratio in ratios):
        return Misfit(
            "a mask of another resolution",
            f"its voxels are {sides_of(lengths[np.argsort(axes)])} mm, the image's {sides_of(sides)}",
            "Convert the image with dcm2niix, and draw the mask on that" if image.of == "frames" else RESAMPLE,
        )
    cosines = [abs(float(b[:3, j] @ a[:3, axes[j]])) / (lengths[j] * sides[axes[j]]) for j in range(3)]
    angle = math.degrees(math.acos(min(min(cosines), 1.0)))
    if angle > 0.5:
        return Misfit("a mask that is turned", f"it is turned by {angle:.1f} degrees", RESAMPLE)
    first = np.linalg.solve(a, b)[:3, 3]  # the corner of the mask nearest to the image's first voxel, in its voxels
    first[axes] -= np.where(turn[:, 1] < 0, np.array(mask.shape) - 1, 0)
    if not _shape_fits(image.shape, mask.shape, turn):
        sizes = f"{sides_of(np.array(mask.shape)[np.argsort(axes)])} of {sides_of(image.shape)}"
        if np.abs(first - np.round(first)).max() <= 0.1:
            row, column, number = np.round(first).astype(int).tolist()
            return Misfit(
                "a mask of a part of the image",
                f"it covers a part (from row {row}, column {column}, slice {number}; {sizes})",
                f"{RESAMPLE} fills the rest with 0",
            )
        return Misfit(
            "a mask of another part", f"it covers another part, between the image's voxels ({sizes})", RESAMPLE
        )
    flipped = " (one voxel's corner taken for its centre)" if np.abs(np.abs(first) - 0.5).max() <= 0.1 else ""
    return Misfit(
        "a mask that is shifted",
        f"it is shifted by ({', '.join(f'{each:.4g}' for each in a[:3, :3] @ first + 0.0)}) mm{flipped}",
        ANEW,
    )


def _find_lost_geometry(image: Grid, mask: Grid) -> Misfit | None:
    """Return a misfit if a program that did not know the geometry wrote the mask or the image.

    Such an affine follows the body's axes from the origin, mostly in steps of 1 mm. It is no geometry if the mask has
    the image's shape, or lies elsewhere. A mask of the image's shape may also have kept the image's first voxel alone.
    """
    of_mask, of_image = (_full(grid.statements[0][1], grid.shape) for grid in (mask, image))
    same = image.shape == mask.shape
    middles = [each[:3] @ [*(np.array(g.shape) - 1) / 2, 1] for each, g in ((of_image, image), (of_mask, mask))]
    apart = same or np.linalg.norm(middles[0] - middles[1]) > np.linalg.norm(of_image[:3, :3], axis=0).max()
    same_place = same and np.allclose(of_image[:3, 3], of_mask[:3, 3], atol=1e-3)
    for whose, affine in (("its", of_mask), ("the image's", of_image)):
        sides, first, is_mask = np.abs(affine[:3, :3]).max(0), affine[:3, 3], affine is of_mask
        if (
            np.allclose(np.linalg.norm(affine[:3, :3], axis=0), sides, rtol=1e-6)
            and ((is_mask and same_place) or not first.any())
            and ((is_mask and same) or (apart and (sides == 1).all()))
        ):
            what, remedy = ("a mask", WITH_GEOMETRY if same else ANEW) if is_mask else ("an image", ASK)
            return Misfit(
                f"{what} without its geometry",
                f"{whose} geometry was lost: {whose} voxels are {sides_of(sides)} mm along the body's axes, from "
                f"{format_values(first)}",
                remedy,
            )
    return None


def _half_said(image: Grid, mask: Grid, drawn_on: str | None, orientation: str) -> Fit | Misfit:
    """Fit a mask to an image if only one of the two files states a geometry."""
    known, other = (image, "mask") if image.statements else (mask, "image")
    try:
        affine, slices = known.affine, known.shape[2]
    except Misfit as two_forms:
        return two_forms
    shown = turn_of(affine, orientation if known is image else "canonical", 1)
    affine_of_image = affine if known is image else None
    if slices == 1 and np.array_equal(PLAIN if shown is None else shown, PLAIN):
        note = f"pixel on pixel, since the {other} says nothing of how it lies"
        return _pixel_on_pixel(image, mask, Fit(PLAIN, affine_of_image, note))
    turn = turn_of(affine, "canonical", slices)
    upright = PLAIN if turn is None else np.asarray(back(turn)) if known is image else turn
    misfit = Misfit(
        "only one of image and mask says how it lies",
        f"the {'image' if other == 'mask' else 'mask'} says how it lies, the {other} says nothing",
        f"{WITH_GEOMETRY}. Or: {CHOOSE}",
    )
    if known.of:
        misfit = Misfit(
            "a mask of a DICOM volume without geometry",
            f"the {other} says nothing of how it lies, and DICOM slices may be numbered from either end",
            WITH_GEOMETRY,
        )
    return _fit_as_set(
        image, mask, Fit(PLAIN, affine_of_image), Fit(upright, affine_of_image), None if known.of else drawn_on, misfit
    )


def _fit_as_set(
    image: Grid, mask: Grid, stored: Fit, upright: Fit, drawn_on: str | None, misfit: Misfit
) -> Fit | Misfit:
    """Fit a mask by the site's setting of how its masks were drawn (``drawn_on``).

    Without the setting, return ``misfit``; if the sizes of image and mask fit neither as stored nor as shown upright,
    return a misfit about the sizes.
    """
    ways = {"stored": stored, "upright": upright}
    if drawn_on is None and any(_shape_fits(image.shape, mask.shape, way.turn) for way in ways.values()):
        return misfit
    return _pixel_on_pixel(image, mask, ways[drawn_on or "stored"])


def _pixel_on_pixel(image: Grid, mask: Grid, fitting: Fit) -> Fit | Misfit:
    if _shape_fits(image.shape, mask.shape, fitting.turn):
        return fitting
    flat = image.shape[2] == mask.shape[2] == 1
    sizes = [f"{grid.shape[1]}x{grid.shape[0]}" if flat else sides_of(grid.shape) for grid in (mask, image)]
    unit = "(width x height)" if flat else "voxels (rows, columns, slices)"
    return Misfit(
        "image and mask differ in size",
        f"it is {sizes[0]} {unit}, its image {sizes[1]}",
        "Take the mask that was drawn on this very image, in its own size" if flat else ANEW,
    )


def _compose(first: Turn, second: Turn) -> Turn:
    """Return the rotation that has the effect of ``first`` followed by ``second``."""
    return np.array([[second[int(axis), 0], flip * second[int(axis), 1]] for axis, flip in first])
