"""Draw synthetic volumes of several sites: an abdomen-like body with an organ and a lesion, without patient data.

Every "patient" has their own anatomy (body, organ, two other bright structures and, in most patients, a lesion in the
organ), drawn in mm. Every site has its own scanner (size of the voxels, contrast between tissues, bias field, noise)
and its own share of patients with a lesion. The volumes are for tasks that learn whole volumes, such as a MONAI bundle
(``docs/bundles.md``).

``site-1`` to ``site-4`` are fixed; any other name gets one of their scanners, by the number at its end or by the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import number, whole
from fairflare.base.stopping import check_stop
from fairflare.data.datalist import SPLITS
from fairflare_lab.phantoms.prostate import entropy

Array = npt.NDArray[np.float32]

LEVELS = 1000.0  # stored value of the brightest tissue in the file


@dataclass(frozen=True)
class VolumeScanner:
    """Describe a site's scanner and population. Lengths are in mm, intensities relative to the brightest tissue."""

    patients: tuple[int, int, int]  # number of patients for training, validation and test
    voxel: tuple[float, float, float]
    body: float
    organ: float
    lesion: float
    others: float
    noise: float
    bias: float  # change of the brightness across the body
    lesions: float  # share of patients with a lesion


SCANNERS: Mapping[str, VolumeScanner] = {
    "site-1": VolumeScanner((6, 2, 3), (3.0, 3.0, 4.0), 0.35, 0.62, 0.85, 0.50, 0.02, 0.10, 0.8),
    # thin slices, lesions dark
    "site-2": VolumeScanner((8, 2, 3), (3.2, 3.2, 3.2), 0.30, 0.60, 0.42, 0.75, 0.03, 0.20, 0.7),
    # thick slices, low contrast, an old receiver
    "site-3": VolumeScanner((4, 2, 3), (2.8, 2.8, 5.0), 0.45, 0.58, 0.72, 0.50, 0.05, 0.45, 0.6),
    # inverted contrast, wide field of view
    "site-4": VolumeScanner((5, 2, 3), (3.6, 3.6, 4.4), 0.75, 0.45, 0.20, 0.60, 0.04, 0.25, 0.9),
}


@dataclass(frozen=True)
class Volume:
    """Represent the volume of one synthetic patient.

    Attributes:
        image: (x, y, z) int16 intensities.
        label: (x, y, z) uint8 labels: 0 (background), 1 (organ), 2 (lesion, inside the organ).
        voxel: size of a voxel in mm along x, y, z.
    """

    image: npt.NDArray[np.int16]
    label: npt.NDArray[np.uint8]
    voxel: tuple[float, float, float]

    def write(self, image: Path, label: Path) -> None:
        """Write image and label as NIfTI, with x to the patient's right, y to the front, z to the head (RAS)."""
        import nibabel

        affine = np.diag([*self.voxel, 1.0])
        for path, array in ((image, self.image), (label, self.label)):
            path.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, affine), path)


def volumes_site(
    site: str, *, size: Sequence[int] = (32, 32, 24), seed: int = 0, cases: float = 1.0
) -> dict[str, list[Volume]]:
    """Return all volumes of one site.

    Args:
        site: name of the site; any name is possible.
        size: number of voxels along x, y and z, at least 16 each.
        seed: random seed of the patients; the scanners do not depend on the seed.
        cases: factor on the number of patients of each split (at least one remains).

    Returns:
        Volumes by split. Every label has an organ; the first patient of each split has a lesion.
    """
    shape = tuple(whole("each of size", edge, low=16) for edge in size)
    if len(shape) != 3:
        raise ValueError(f"size must be 3 numbers of voxels, got {size!r}")
    whole("seed", seed, low=0)
    number("cases", cases, above=0, high=1000)
    machine = scanner(site)
    found: dict[str, list[Volume]] = {}
    for split, patients in zip(SPLITS, machine.patients, strict=True):
        rng = np.random.default_rng([seed, *entropy(split, site)])
        count = max(1, round(patients * cases))
        found[split] = [_volume(machine, shape, rng, sure=index == 0) for index in range(count)]
    return found


def scanner(site: str) -> VolumeScanner:
    """Return the scanner of a site; a name other than the four fixed ones gets the scanner of one of these."""
    if site in SCANNERS:
        return SCANNERS[site]
    ending = re.search(r"(\d+)$", site)
    index = int(ending.group(1)) - 1 if ending else entropy("scanner", site)[0]
    return list(SCANNERS.values())[index % len(SCANNERS)]


def _volume(machine: VolumeScanner, shape: tuple[int, ...], rng: np.random.Generator, *, sure: bool) -> Volume:
    check_stop()
    # Coordinates are in mm from the middle of the volume, so that the anatomy does not depend on the voxels.
    axes = [(np.arange(n) - (n - 1) / 2) * side for n, side in zip(shape, machine.voxel, strict=True)]
    place = np.stack(np.meshgrid(*axes, indexing="ij")).astype(np.float32)
    body = _ellipsoid(place, rng.normal(0, 1.5, 3), rng.uniform((38, 30, 55), (42, 34, 65)))
    centre = np.array([12.0, 4.0, 0.0]) + rng.normal(0, 2.5, 3)
    organ = _ellipsoid(place, centre, rng.uniform((13, 11, 16), (18, 15, 22)), turn=float(rng.uniform(-0.5, 0.5)))
    tissue = machine.body * (body <= 1) + (machine.organ - machine.body) * ((organ <= 1) & (body <= 1))
    for side in ((-18.0, -8.0, 0.0), (-6.0, 14.0, 0.0)):
        other = _ellipsoid(place, np.array(side) + rng.normal(0, 2, 3), rng.uniform((5, 5, 10), (8, 8, 16))) <= 1
        tissue = np.where(other & (organ > 1) & (body <= 1), machine.others, tissue)
    label = ((organ <= 1) & (body <= 1)).astype(np.uint8)
    towards = centre + rng.uniform(-5, 5, 3)
    radius = float(rng.uniform(5, 8))
    if rng.random() < machine.lesions or sure:
        lesion = (_ellipsoid(place, towards, np.full(3, radius)) <= 1) & (label == 1)
        label[lesion] = 2
        tissue = np.where(lesion, machine.lesion, tissue)
    slope = rng.normal(0, 1, 3)
    field = 1 + machine.bias * np.tensordot(slope / np.linalg.norm(slope), place / 60.0, axes=1)
    noisy = tissue * field + rng.normal(0, machine.noise, shape)
    return Volume(np.clip(noisy * LEVELS, -LEVELS, 4 * LEVELS).astype(np.int16), label, machine.voxel)


def _ellipsoid(
    place: Array, centre: npt.NDArray[np.float64], radii: npt.NDArray[np.float64], turn: float = 0.0
) -> Array:
    """Return a map that is at most 1 inside an ellipsoid; ``turn`` is about the z axis, in radians."""
    x, y, z = (place[axis] - centre[axis] for axis in range(3))
    x, y = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
    found: Array = (x / radii[0]) ** 2 + (y / radii[1]) ** 2 + (z / radii[2]) ** 2
    return found
