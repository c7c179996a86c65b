"""Hold a prepared volume as arrays that can lie on disk, and cut patches of it that touch little more than a patch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from monai.data import MetaTensor
from monai.data.utils import compute_shape_offset, zoom_affine
from monai.transforms import Spacing

from fairflare.tasks.scores.dice_scores import Origin

BRICK = 16  # side of the cubes in which volumes are stored, in voxels
DRAWN = 10_000  # number of voxels of each structure that are kept as middles of patches
SEED = 20_000  # of their choice, the same for every volume


@dataclass(frozen=True)
class Prepared:
    """Represent a volume and its targets as the network gets them.

    Attributes:
        image, label: (channels, x, y, z) float32 and (structures, x, y, z) int8 in bricks, see :func:`bricks`.
        size: number of voxels along each axis.
        voxels: (n, 3) places of voxels inside structures, structure after structure.
        ends: for each structure, the number of ``voxels`` up to its last one.
        spacing: size of a voxel in mm along each axis; empty if the file does not state it.
    """

    image: npt.NDArray[np.float32]
    label: npt.NDArray[np.int8]
    voxels: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.int64]
    spacing: npt.NDArray[np.float64]
    size: npt.NDArray[np.int64]

    @property
    def origin(self) -> Origin:
        """Return the size of a voxel for the evaluation."""
        return Origin(None, None, "pad", tuple(self.spacing.tolist()) or None)

    def whole(self, name: str) -> torch.Tensor:
        """Return the whole ``"image"`` or ``"label"``."""
        return self.cut(name, (0, 0, 0), self.size.tolist())

    def cut(self, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Return the part of the ``"image"`` or ``"label"`` that begins at a voxel and has a size, as a copy."""
        touched = tuple(slice(a // BRICK, -(-(a + n) // BRICK)) for a, n in zip(start, size, strict=True))
        block = getattr(self, name)[touched]
        x, y, z, channels = block.shape[:4]
        lined = block.transpose(3, 0, 4, 1, 5, 2, 6).reshape(channels, x * BRICK, y * BRICK, z * BRICK)
        inner = (slice(None), *(slice(a % BRICK, a % BRICK + n) for a, n in zip(start, size, strict=True)))
        return torch.from_numpy(np.array(lined[inner], order="C"))

    def start(self, draws: Sequence[float], foreground: float, size: Sequence[int]) -> tuple[int, ...]:
        """Return where a patch begins, by six numbers drawn evenly from [0, 1).

        With probability ``foreground`` the middle of the patch is a kept voxel, of a structure drawn evenly among those
        present; else it is drawn evenly from the volume. A patch that would reach out of the volume is moved into it.
        """
        inside, which, voxel, *place = draws
        sizes = np.diff(self.ends, prepend=0)
        present = np.flatnonzero(sizes)
        lengths = self.size.tolist()
        middle = [int(part * length) for part, length in zip(place, lengths, strict=True)]
        if inside < foreground and len(present):
            structure = present[int(which * len(present))]
            middle = self.voxels[self.ends[structure] - sizes[structure] + int(voxel * sizes[structure])].tolist()
        return tuple(min(max(m - n // 2, 0), length - n) for m, n, length in zip(middle, size, lengths, strict=True))


def bricks(volume: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Cut a zero-padded array (channels, x, y, z) into bricks: (x / 16, y / 16, z / 16, channels, 16, 16, 16)."""
    lacking = [-side % BRICK for side in volume.shape[1:]]
    volume = np.pad(volume, [(0, 0), *((0, more) for more in lacking)]) if any(lacking) else volume
    x, y, z = (side // BRICK for side in volume.shape[1:])
    return volume.reshape(-1, x, BRICK, y, BRICK, z, BRICK).transpose(1, 3, 5, 0, 2, 4, 6)


def prepare_parts(image: npt.NDArray[Any], label: npt.NDArray[Any], spacing: Sequence[float]) -> dict[str, Any]:
    """Return the parts of :class:`Prepared` of an image and its targets, by name."""
    rng = np.random.default_rng(SEED)
    drawn = [_draw_voxels(target > 0, rng) for target in label]
    return {
        "image": bricks(image), "label": bricks(label),
        "voxels": np.concatenate(drawn).astype(np.promote_types(np.uint16, np.min_scalar_type(max(image.shape)))),
        "ends": np.cumsum([len(voxels) for voxels in drawn]), "spacing": np.array(spacing, np.float64),
        "size": np.array(image.shape[1:]),
    }  # fmt: skip


def _draw_voxels(inside: npt.NDArray[np.bool_], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw up to 10,000 of the voxels that are inside, each with the same probability; return (n, 3) places.

    The voxels are counted plane by plane, since a list of all would take 24 bytes a voxel.
    """
    ends = np.cumsum([np.count_nonzero(plane) for plane in inside])
    ranks = np.sort(rng.choice(ends[-1], min(DRAWN, ends[-1]), replace=False))
    firsts = [0, *ends[:-1].tolist()]
    ranks_by_plane = np.split(ranks, np.searchsorted(ranks, firsts[1:]))
    return np.concatenate([
        np.insert(np.argwhere(plane)[in_plane - first], 0, x, axis=1)
        for x, (plane, in_plane, first) in enumerate(zip(inside, ranks_by_plane, firsts, strict=True))
    ])  # fmt: skip


def zoom_volume(volume: MetaTensor, spacing: Sequence[float], nearest: bool) -> MetaTensor:
    """Resample a volume (channels, x, y, z) to voxels of this size, as MONAI's ``Spacing`` does, axis after axis.

    MONAI brings a volume and the place of each new voxel to 64 bits, which for a CT takes gigabytes. Only a volume
    whose axes are not at right angles (a tilted gantry) needs that.

    Args:
        volume: the volume, of any type.
        spacing: size of the new voxels along each axis in mm.
        nearest: whether a new voxel gets the value of the nearest old one; else values are interpolated linearly.
    """
    affine = np.asarray(volume.affine, np.float64)
    wanted = np.asarray(zoom_affine(affine, np.asarray(spacing), diagonal=False))
    shape, offset = compute_shape_offset(volume.shape[1:], affine, wanted, scale_extent=False)
    wanted[:3, 3] = offset[:3]
    step = np.linalg.solve(affine, wanted)
    if not np.allclose(step[:3, :3], np.diag(np.diag(step)[:3]), atol=ANGLE):
        mode = "nearest" if nearest else "bilinear"
        new = cast("MetaTensor", Spacing(pixdim=spacing, mode=mode, padding_mode="border")(volume))
        return MetaTensor(new.as_tensor().to(volume.dtype), affine=new.affine) if nearest else new
    values = volume.as_tensor()
    for axis in sorted(range(3), key=lambda k: shape[k] / volume.shape[k + 1]):
        places = step[axis, axis] * torch.arange(int(shape[axis])).double() + step[axis, 3]
        places = places.clamp(0, values.shape[axis + 1] - 1)
        if nearest:
            values = values.index_select(axis + 1, places.round().long())
        else:
            weight = (places - places.floor()).float().view([-1 if k == axis + 1 else 1 for k in range(4)])
            lower = values.index_select(axis + 1, places.floor().long())
            values = lower.lerp_(values.index_select(axis + 1, places.ceil().long()), weight)
    return MetaTensor(values, affine=torch.from_numpy(wanted))


ANGLE = 1e-4  # largest share of a voxel by which axes may lean against each other and count as at right angles
