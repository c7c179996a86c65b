"""Reorient an image from the axes of its file to the axes in which people view it, and back.

A NIfTI or DICOM file states the directions of its axes in the body. Images are shown as at a workstation:

======== ======================= ========================= ==============================
plane    rows from top to bottom columns from left to right slices (``axial`` and so on)
======== ======================= ========================= ==============================
axial    front to back           patient's right to left   from the feet to the head
sagittal head to feet            front to back             from the patient's right to left
coronal  head to feet            patient's right to left   from the front to the back
======== ======================= ========================= ==============================
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Orientation = Literal["canonical", "axial", "sagittal", "coronal", "stored"]
ORIENTATIONS: tuple[str, ...] = get_args(Orientation)

#: Directions of rows, columns and slices of each plane, in nibabel's letters. In this order, the slices of the planes
#: follow each other along x, y and z.
PLANES = {"sagittal": ("I", "P", "L"), "coronal": ("I", "L", "P"), "axial": ("P", "L", "S")}
Turn = npt.NDArray[Any]  # (3, 2) orientation array of nibabel: new position of each axis, and 1 or -1 (flipped)
PLAIN = np.array([[0, 1], [1, 1], [2, 1]])  # orientation array that does not change an image


def turn_of(affine: npt.NDArray[Any] | None, orientation: str, slices: int) -> Turn | None:
    """Return the rotation that brings an array with this affine to an orientation; ``None`` for no change.

    ``"canonical"`` keeps the slice axis and the order of the slices, so that a slice's number stays the same; the
    slices are shown as in the nearest of the three planes. The orientations ``"axial"``, ``"sagittal"`` and
    ``"coronal"`` change the plane of volumes only, since a single slice has no other plane.

    Args:
        affine: (4, 4) matrix from (row, column, slice) to mm (RAS); ``None`` if the file states none.
        orientation: one of ``ORIENTATIONS``.
        slices: number of slices of the file.

    Raises:
        ValueError: a plane is requested of a volume that states no orientation.
    """
    from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform

    if orientation == "stored":
        return None
    has = None if affine is None or not np.isfinite(affine).all() else io_orientation(affine)
    if has is None or np.isnan(has).any():
        if orientation == "canonical" or slices == 1:
            return None
        raise ValueError(
            f"it does not say how it lies in the body, which orientation={orientation!r} of the task needs"
        )
    if orientation == "canonical" or slices == 1:
        wanted = axcodes2ornt([*PLANES.values()][int(has[2, 0])])
        wanted[2, 1] = has[2, 1]
    else:
        wanted = axcodes2ornt(PLANES[orientation])
    return ornt_transform(has, wanted)


def turn_view(array: npt.NDArray[Any], turn: Turn | None) -> npt.NDArray[Any]:
    """Return a view of (rows, columns) or (rows, columns, slices, ...) in another orientation."""
    from nibabel.orientations import apply_orientation

    if turn is None:
        return array
    result = apply_orientation(array if array.ndim > 2 else array[:, :, None], turn)
    return np.asarray(result if array.ndim > 2 else result[:, :, 0])


def back(turn: Turn | None) -> Turn | None:
    """Return the rotation (axes and signs) that undoes a given rotation of an array."""
    from nibabel.orientations import ornt_transform

    return None if turn is None else ornt_transform(PLAIN, turn)


def orient_view(array: npt.NDArray[Any], affine: Any, codes: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """Return a view of an array (rows, columns, slices, ...) whose axes have these directions, and the view's affine.

    Args:
        array, affine: the array as stored, and where it lies; ``None`` if the file does not say it.
        codes: directions of the axes, such as ``"RAS"``; ``"stored"``: as they are.
    """
    from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

    lies = np.eye(4) if affine is None else affine
    if codes == "stored":
        return array, lies
    turn = ornt_transform(io_orientation(lies), axcodes2ornt(codes))
    return apply_orientation(array, turn), lies @ inv_ornt_aff(turn, array.shape[:3])
