"""Bring a channel of a case to the grid of another one, by the positions that both files state."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.geometry.misfits import Misfit
from fairflare.data.geometry.pairs import Affine, Fit, Grid, fit

OVERLAP = 0.9  # least share of the label's box that a channel must cover to be resampled
PROBES = 24  # number of places along each axis of the box that are looked at
#: Kinds of misfit after which places can still be compared, so that values can be resampled.
ELSEWHERE = (
    "a mask of another resolution", "a mask that is turned", "a mask of a part of the image",
    "a mask of another part", "a mask that is shifted",
)  # fmt: skip


def resample(
    grid: Grid, channel: Grid, values: npt.NDArray[Any], box: tuple[slice, ...] | None = None
) -> npt.NDArray[Any]:
    """Return a channel's values on another grid: voxel on voxel where it lies on it, else interpolated linearly.

    A voxel outside the channel's field of view becomes 0.

    Args:
        grid, channel: geometry that the two files state; ``grid`` is the one to which values are brought.
        values: (rows, columns, slices) of the channel.
        box: the part of the grid in which the label lies; ``None``: the whole grid.

    Raises:
        Misfit: a file does not say where it lies, the two lie in different frames of reference, or the channel covers
            less than 90 % of the box.
    """
    from scipy.ndimage import affine_transform

    fitting = fit(grid, channel)
    if isinstance(fitting, Fit):
        return fitting.bring(values)
    places = None
    if fitting.cause in ELSEWHERE and grid.affine is not None and channel.affine is not None:
        step = np.linalg.solve(channel.affine, grid.affine)
        sides = box or tuple(slice(0, length) for length in grid.shape)
        lattice = [np.linspace(side.start - 0.5, side.stop - 0.5, 2 * PROBES + 1)[1::2] for side in sides]
        places = np.stack([*np.meshgrid(*lattice, indexing="ij"), np.ones([PROBES] * 3)]).reshape(4, -1)
        inside = (step @ places)[:3].T
        covered = float(((inside >= -0.5) & (inside <= np.array(channel.shape) - 0.5)).all(1).mean())
        if covered >= OVERLAP:
            return np.asarray(affine_transform(
                values, step[:3, :3], step[:3, 3], grid.shape, np.float32, order=1, mode="constant"
            ))  # fmt: skip
        seen, wanted = _box(channel.affine, [slice(0, length) for length in channel.shape]), _box(grid.affine, sides)
        where = f"; it lies at {seen} mm and covers {covered:.0%} of the label's box, {wanted} mm"
    raise Misfit(
        fitting.cause.replace("mask", "channel"),
        fitting.value.replace("mask", "channel") + ("" if places is None else where),
        "Channels of a case are images of one examination that say where they lie; take the file of this case, or "
        "register the images first",
    )


def _box(affine: Affine, sides: Any) -> str:
    """Return the edges of a box of voxels in mm, along the axes of the body."""
    ends = [[side.start - 0.5, side.stop - 0.5] for side in sides]
    corners = affine @ np.stack([*np.meshgrid(*ends, indexing="ij"), np.ones((2, 2, 2))]).reshape(4, -1)
    return " x ".join(
        f"{low:.0f}..{high:.0f}" for low, high in zip(corners.min(1)[:3], corners.max(1)[:3], strict=True)
    )
