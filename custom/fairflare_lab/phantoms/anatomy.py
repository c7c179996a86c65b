"""Draw synthetic patients of several sites from a table of ellipsoids, without patient data.

An anatomy is a table of parts (tissues) and of scanners, one a site. Every "patient" has parts of their own place and
size, drawn in mm; every site has its own scanner (field of view, contrast of the tissues, bias field, coil, noise,
blur) and its own population. Patients are never shared between splits. A patient is the same at every number of voxels,
except for the noise.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import number, whole
from fairflare.base.stopping import check_stop
from fairflare.data.datalist import SPLITS
from fairflare_lab.phantoms.canvas import Canvas, Map, ramp

Point = tuple[float, float, float]  # along the axes x, y, z, in mm
GRAIN = 7.0  # mm between the dots of the tissues' texture
GOLDEN = 0.618  # multiples of it, modulo 1, are far apart: brightness of tissues in further channels
VARIED = ("gamma", "bias", "noise", "blur", "size")  # what differs at a site that is like one of the fixed ones


@dataclass(frozen=True)
class Part:
    """Describe an ellipsoid of one tissue.

    Args:
        tissue: name of the tissue, which is also the name of the part.
        centre, radii: where it lies, from the middle of the view, and its half axes.
        shift, spread: how much these vary from patient to patient: standard deviation in mm, and largest share.
        turn: angle about the z axis in radians.
        sides: ``(1, -1)`` for a part that lies on both sides.
        within: an earlier part that it does not leave; empty for none.
        label: number of the structure in the mask; 0: it is not outlined.
        share: share of the patients who have it; None: the scanner's share of patients with a lesion.
        grown: factor on its half axes in patients of the second group.
    """

    tissue: str
    centre: Point
    radii: Point
    shift: float = 2.0
    spread: float = 0.12
    turn: float = 0.0
    sides: tuple[int, ...] = (1,)
    within: str = ""
    label: int = 0
    share: float | None = 1.0
    grown: float = 1.0


@dataclass(frozen=True)
class Scanner:
    """Describe a site's scanner and population. Lengths are in mm, intensities relative to the brightest tissue.

    Args:
        patients: number of patients for training, validation and test.
        view: what the image's shorter edge shows, and what all slices show together.
        tissues: brightness of tissues that differ from the anatomy's.
        gamma, bias, noise, blur: exponent of the contrast curve, change of brightness across the view, standard
            deviation of the noise, and of a blur in mm within slices.
        coil: brightness beside an endorectal coil; 0: there is none.
        size: factor on the size of outlined structures and of what is within others.
        second: share of patients of the second group (those with an enlarged zone).
        lesions: share of patients with a lesion.
    """

    patients: tuple[int, int, int]
    view: tuple[float, float]
    tissues: Mapping[str, float] = field(default_factory=dict)
    gamma: float = 1.0
    bias: float = 0.15
    noise: float = 0.03
    blur: float = 0.3
    coil: float = 0.0
    size: float = 1.0
    second: float = 0.0
    lesions: float = 0.4


@dataclass(frozen=True)
class Patient:
    """Represent the images of one synthetic patient.

    Attributes:
        image: (channels, x, y, z) intensities.
        label: (x, y, z) uint8, 0 or the number of a structure.
        voxel: size of a voxel along x, y, z in mm.
        group: 0 or 1, the patient's group.
    """

    image: npt.NDArray[Any]
    label: npt.NDArray[np.uint8]
    voxel: Point
    group: int

    def write(self, image: Path, label: Path) -> None:
        """Write image and label as NIfTI (RAS); several channels become the last of four axes."""
        import nibabel

        channels = np.moveaxis(self.image, 0, -1) if len(self.image) > 1 else self.image[0]
        for path, array in ((image, channels), (label, self.label)):
            path.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, np.diag([*self.voxel, 1.0])), path)


@dataclass(frozen=True)
class Anatomy:
    """Hold the parts of a body, from back to front, and the scanners of the sites.

    Args:
        parts: what is painted, one over the other.
        tissues: brightness of each tissue.
        scanners: the fixed sites. Any other name gets a variation of one of them: the number at the end of the name
            chooses which one, the name itself the variation.
        levels: stored value of the brightest tissue.
        dtype: type of the stored values.
        coil: where an endorectal coil lies.
    """

    parts: Sequence[Part]
    tissues: Mapping[str, float]
    scanners: Mapping[str, Scanner]
    levels: float
    dtype: type[np.integer[Any]]
    coil: Point = (0.0, 0.0, 0.0)

    def scanner(self, site: str) -> Scanner:
        """Return the scanner of ``site``, always the same one."""
        if site in self.scanners:
            return self.scanners[site]
        draw = np.random.default_rng(entropy("scanner", site))
        ending = re.search(r"(\d+)$", site)
        index = int(ending.group(1)) - 1 if ending else int(draw.integers(len(self.scanners)))
        base = list(self.scanners.values())[index % len(self.scanners)]
        return replace(base, **{name: getattr(base, name) * float(draw.uniform(0.85, 1.15)) for name in VARIED})

    def patients(
        self, site: str, *, size: Sequence[int], seed: int = 0, cases: float = 1.0, halved: float = 0.0,
        channels: int = 1, shows: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[str, list[Patient]]:  # fmt: skip
        """Return all patients of one site by split.

        Args:
            site: name of the site; any name is possible.
            size: number of voxels along x and y, at least 16 each, and along z.
            seed: random seed of the patients; the scanners do not depend on the seed.
            cases: factor on the number of patients of each split (at least one remains).
            halved: share of the patients of the second group of whom one half is outlined. They are chosen at random,
                so no model can predict them: a perfect outline has a Dice of about 2/3 on their images.
            channels: number of images of each patient, which show the tissues in other brightness.
            shows: channels, from 0, in which a structure shows, by its label; a structure not named shows in all.

        Returns:
            Patients by split. The first one of each split has a lesion.
        """
        x, y, z = (whole("each of size", edge, low=low) for edge, low in zip(size, (16, 16, 1), strict=True))
        whole("phantom_seed", seed, low=0)
        number("phantom_cases", cases, above=0, high=1000)
        whole("channels", channels)
        shown = np.ones((1 + max(part.label for part in self.parts), channels), bool)
        for label, those in (shows or {}).items():
            number("structure of shows", label, low=1, high=len(shown) - 1, whole=True)
            for channel in those:
                number("channel of shows", channel, low=0, high=channels - 1, whole=True)
            shown[label] = np.isin(range(channels), list(those))
        scanner, by_split = self.scanner(site), {}
        for split, patients in zip(SPLITS, scanner.patients, strict=True):
            rng = np.random.default_rng([seed, *entropy(split, site)])
            drawn = [
                self._draw(scanner, (x, y, z), patient, first=place == 0, shown=shown)
                for place, patient in enumerate(rng.spawn(max(1, round(patients * cases))))
            ]
            second = [patient for patient in drawn if patient.group]
            for place in rng.permutation(len(second))[: round(halved * len(second))]:
                label = second[place].label
                label[round(np.nonzero(label)[0].mean()) :] = 0
            by_split[split] = drawn
        return by_split

    def _draw(
        self, scanner: Scanner, size: tuple[int, int, int], rng: np.random.Generator, *, first: bool,
        shown: npt.NDArray[np.bool_],
    ) -> Patient:  # fmt: skip
        check_stop()
        rng, grains = rng.spawn(2)
        pixel = scanner.view[0] / min(size[:2])
        voxel = pixel, pixel, scanner.view[1] / size[2]
        places = np.ix_(
            *((np.arange(n, dtype=np.float32) - (n - 1) / 2) * side for n, side in zip(size, voxel, strict=True))
        )
        canvas = Canvas(places, grains, shown.shape[1])
        # The patient's position, and long waves that deform the whole body smoothly.
        canvas.places = [
            place
            + np.float32(rng.normal(0, away))
            + 2 * np.sin(across / np.float32(20) + np.float32(rng.uniform(0, 6)))
            for place, across, away in zip(places, (places[1], places[2], places[0]), (4, 4, 1), strict=True)
        ]
        second = bool(rng.random() < scanner.second)
        tissues = {**self.tissues, **scanner.tissues}
        label, regions = np.zeros(size, np.uint8), dict[str, Map]()
        for rank, part in enumerate(self.parts):
            grown = (part.grown if second else 1.0) * (scanner.size if part.label or part.within else 1.0)
            colour = [tissues[part.tissue], *(0.15 + 0.8 * (GOLDEN * rank * k % 1) for k in range(1, canvas.channels))]
            share = scanner.lesions if part.share is None else part.share
            has = rng.random() < share or (first and part.share is None)
            for side in part.sides:
                centre = np.array(part.centre) * (side, 1, 1) + rng.normal(0, part.shift, 3)
                radii = np.array(part.radii) * grown * rng.uniform(1 - part.spread, 1 + part.spread, 3)
                region = canvas.ellipse(centre, radii, side * part.turn)
                region = np.maximum(region, regions[part.within]) if part.within else region
                if has:
                    soft = pixel / 2 / min(radii[:2])
                    canvas.paint(shown[part.label].reshape(-1, 1, 1, 1) * ramp(region, 1 + soft, 1 - soft), colour)
                    label[region < 1] = part.label or label[region < 1]
            regions[part.tissue] = region
        return Patient(self._acquire(canvas, scanner, voxel), label, voxel, int(second))

    def _acquire(self, canvas: Canvas, scanner: Scanner, voxel: Point) -> npt.NDArray[Any]:
        """Apply the tissues' texture and the scanner's contrast curve, bias field, coil, blur and Rician noise."""
        from scipy.ndimage import gaussian_filter

        cells = [max(1, round(side * n / GRAIN)) for side, n in zip(voxel, canvas.shape, strict=True)]
        image = np.clip(canvas.image * (1 + 0.1 * canvas.noise(cells)), 0, 1.4) ** np.float32(scanner.gamma)
        image *= np.exp(np.float32(scanner.bias) * canvas.noise([1, 1, 1]))
        if scanner.coil:
            image *= 0.55 + scanner.coil * np.exp(-(canvas.ellipse(self.coil, (24, 24, 40)) ** 2) / 2)
        image = gaussian_filter(image, (0, scanner.blur / voxel[0], scanner.blur / voxel[1], 0))
        real, other = scanner.noise * canvas.rng.standard_normal((2, *image.shape), np.float32)
        limits = np.iinfo(self.dtype)
        return np.clip(self.levels * np.hypot(image + real, other), limits.min, limits.max).astype(self.dtype)


def entropy(purpose: str, site: str) -> list[int]:
    """Return numbers that seed a random generator for a purpose and a site, from a hash of both."""
    return np.frombuffer(hashlib.sha256(f"{purpose}/{site}".encode()).digest()[:16], dtype="<u4").tolist()
