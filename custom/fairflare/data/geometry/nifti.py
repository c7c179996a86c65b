"""Read the position of voxels from the header of a NIfTI file: its sform, its qform, both or neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import refuse, true_texts
from fairflare.data.geometry.misfits import ASK, Misfit, refuse_misfit
from fairflare.data.geometry.pairs import Grid, check_affine, together

UNITS = {1: ("metres", 1e3), 3: ("microns", 1e-3)}  # key: xyzt_units & 7; 2 is mm, 0 is unknown, taken as mm


def three_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a NIfTI array without axes of length 1 after the third, or with four axes.

    Raises:
        Misfit: the file has more axes.
        ValueError: the shape has only one axis.
    """
    lengths = tuple(int(length) for length in shape)
    if any(length != 1 for length in lengths[4:]):
        raise describe_several(lengths)
    refuse({f"it has the shape {lengths}, which is no picture": len(lengths) < 2})
    return lengths[: 3 + (lengths[3:4] not in ((), (1,)))]


def describe_several(shape: Sequence[int], wanted: int = 1) -> Misfit:
    """Return the misfit of a file with another number of volumes than is wanted."""
    problem = f"it holds {math.prod(shape[3:])} volume{'s' * (math.prod(shape[3:]) != 1)} (its shape is {tuple(shape)})"
    if wanted == 1:
        return Misfit(
            "several volumes in one file",
            problem,
            "`nibabel.four_to_three` gives one file a volume; or, where they are channels and not times, name them: "
            "'channels' in the datalist",
        )
    return Misfit(
        "another number of channels",
        f"{problem}, and 'channels' names {wanted}",
        "Correct 'channels', or save the volumes of the case as one file, or as a file a channel",
    )


def nifti_grid(header: Any) -> Grid:
    """Return shape and affines of the array of a NIfTI file, rows first.

    The sform comes first; a qform that agrees with the sform to a tenth of a voxel is left out. Units of metres and
    microns are converted to mm, as ITK does and nibabel does not.

    Args:
        header: nibabel's header, not checked, because nibabel's check replaces a voxel size of 0 by 1.

    Raises:
        Misfit: the file has more than four axes, or a form that cannot be used.
    """
    columns, rows, slices = (*three_axes(header.get_data_shape()), 1)[:3]
    shape = (rows, columns, slices)
    unit, factor = UNITS.get(int(header["xyzt_units"]) & 7, ("mm", 1.0))
    forms = {"sform": header.get_sform, "qform": lambda: _qform(header, (columns, rows, slices))}
    affines = {name: np.asarray(form()) for name, form in forms.items() if int(header[f"{name}_code"]) > 0}
    statements = [
        (name, check_affine(np.diag([factor] * 3 + [1.0]) @ form[:, [1, 0, 2, 3]], shape, name))
        for name, form in affines.items()
    ]
    if len(statements) > 1 and together(statements[0][1], statements[1][1], shape):
        statements = statements[:1]
    notes = true_texts({
        f"voxels are given in {unit}; they are read in mm": affines and factor != 1,
        "qform and sform differ: the sform is read, unless the mask fits the qform alone": len(statements) > 1,
    })  # fmt: skip
    return Grid(shape, tuple(statements), note="; ".join(notes))


def _qform(header: Any, axes: Sequence[int]) -> npt.NDArray[Any]:
    header = header.copy()
    for axis, length in enumerate(axes, 1):
        if length == 1 and header["pixdim"][axis] == 0:
            header["pixdim"][axis] = 1  # the size of an axis of one voxel does not matter
        size = float(header["pixdim"][axis])
        refuse_misfit(
            not size > 0, "a voxel without a size", f"pixdim[{axis}] is {size:g}, and its qform needs it", ASK
        )
    if header["pixdim"][0] == 0:
        header["pixdim"][0] = 1
    return np.asarray(header.get_qform())
