"""Draw a site's test patients or images with replacement: the same draws in every run, so that runs can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairflare.base import checks
from fairflare.base.checks import group_by_key

MOST = 10_000  # largest number of bootstrap draws that a site makes
PATIENTS, VOLUMES, IMAGES, CASES = "patients", "volumes", "images", "cases"
#: Units that the bootstrap draws. `cases`: an image's patient if the data name it, else its volume or the image itself.
UNITS = (PATIENTS, VOLUMES, IMAGES, CASES)
KINDS = {"patient": PATIENTS, "volume": VOLUMES, "image": IMAGES}  # unit, by the kind of a case

Drawn = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Store the independent units of a split, each of which is drawn as a whole: patients, volumes or images.

    Attributes:
        kind: one of :data:`UNITS`.
        members: indices of the images of each unit, in the order of the split; each image in one unit.
    """

    kind: str
    members: tuple[Drawn, ...]

    def draw(self, site: str, count: int) -> list[Drawn]:
        """Return the indices of the images of each draw; if a unit is drawn twice, its images are in the draw twice.

        Args:
            site: name of the site, which decides the draws.
            count: number of draws, from 1 to :data:`MOST`.

        Raises:
            ValueError: ``count`` is out of range, or there is no unit.
        """
        drawn_units = draws(site, len(self.members), count)
        if len(self.members) == sum(map(len, self.members)):
            return list(drawn_units)  # each unit is one image: unit indices are image indices
        return [np.concatenate([self.members[unit] for unit in one]) for one in drawn_units]


def units_of(cases: Sequence[Hashable] | None, num_images: int) -> Units:
    """Group a split's images by the patient or volume that they show.

    Args:
        cases: the case ``(kind, name)`` of each image of a split, see :meth:`fairflare.base.task.SiteData.cases`;
            ``None`` if each image is its own unit.
        num_images: number of images of the split; used if ``cases`` is ``None``.
    """
    whose = [("image", index) for index in range(num_images)] if cases is None else cases
    members = group_by_key((key, index) for index, key in enumerate(whose))
    kinds = {KINDS.get(key[0], CASES) if isinstance(key, tuple) and key else CASES for key in members}
    kind = kinds.pop() if len(kinds) == 1 else CASES
    return Units(kind, tuple(np.array(indices, np.int64) for indices in members.values()))


def draws(site: str, num_units: int, count: int) -> Drawn:
    """Draw bootstrap samples of a site's units.

    Args:
        site: name of the site. The three arguments alone decide the draws, whatever the method and the run's seed.
        num_units: number of units (patients, volumes or images) of the test split, ``>= 1``.
        count: number of draws, from 1 to :data:`MOST`.

    Returns:
        (count, num_units), indices of units in the order of the split.

    Raises:
        ValueError: ``num_units`` or ``count`` is out of range.

    Source:
        Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 1979. Drawing
        whole clusters: Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8.
    """
    checks.whole(f"site {site!r}: number of test {PATIENTS} or {IMAGES}", num_units)
    checks.number("number of draws", count, low=1, high=MOST, whole=True)
    return seed_generator(site, num_units).integers(0, num_units, (count, num_units))


def seed_generator(site: str, num_units: int) -> np.random.Generator:
    """Return the random generator that draws a site's units; it is the same in every run."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(f"{site}/{num_units}".encode()).digest()[:8], "little"))
