"""Groups of the prostate phantom's patients, and a gap between them that can be put in. No patient in it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairflare_lab.phantoms.prostate import SLICES, Pelvis, patients_of, scanner

ATTRIBUTE, ZONES = "zone", ("small", "enlarged")
SIDE = 4  # pixels: the anatomy does not depend on them


def zones(site: str, *, seed: int = 0, cases: float = 1.0) -> dict[str, npt.NDArray[np.int64]]:
    """By split the number in :data:`ZONES` of each image: how large the patient's transition zone is.

    It is drawn with the anatomy: an enlarged one fills the gland, which is larger, and sites differ in how often it
    occurs (``Scanner.enlarged``).

    Args:
        site, seed, cases: as in :func:`fairflare_lab.phantoms.prostate.prostate_site`.
    """
    return {
        split: Pelvis(scanner(site), generators, SIDE, SIDE).enlarged[:, 0, 0].astype(np.int64)
        for split, generators in patients_of(site, seed, cases).items()
    }


def one_sided(
    masks: npt.NDArray[np.uint8], numbers: npt.NDArray[np.int64], share: float, seed: int
) -> npt.NDArray[np.uint8]:
    """Masks in which, of this share of the patients with an enlarged zone, only one half of the gland is outlined.

    Whose is drawn by lot, so no model can tell: of a perfect outline the Dice of these images is about 2/3.

    Args:
        masks: (n, 1, height, width), the slices of a patient next to each other.
        numbers: (n,) of :func:`zones`.
        share: from 0 to 1, of the patients.
        seed: of the lot.
    """
    of_group = np.flatnonzero(numbers[::SLICES] == 1)
    chosen = np.random.default_rng([seed, 1]).permutation(of_group)[: round(share * len(of_group))]
    found = masks.copy()
    for index in (chosen[:, None] * SLICES + np.arange(SLICES)).ravel():
        columns = np.flatnonzero(masks[index, 0].any(0))
        found[index, 0, :, (columns[0] + columns[-1] + 1) // 2 :] = 0
    return found
