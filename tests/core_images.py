"""Stand in for the synthetic images of fairflare_lab where it is not installed: discs and stripes, made from a seed."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

SLICES, ATTRIBUTE, ZONES = 4, "zone", ("small", "enlarged")
TRAINING = (12, 18, 7, 11, 16, 7)  # patients of site-1, site-2, ...
Arrays = dict[str, npt.NDArray[Any]]


def _of_split(site: str, seed: int, split: str) -> np.random.Generator:
    return np.random.default_rng([seed, *f"{site}/{split}".encode()])


def patients(site: str, cases: float) -> dict[str, int]:
    """Count the patients of each split."""
    number = int("".join(filter(str.isdigit, site)) or 1)
    counts = {"training": TRAINING[(number - 1) % 6], "validation": 3, "test": 6}
    return {split: max(1, round(count * cases)) for split, count in counts.items()}


def prostate_site(
    site: str, *, image_size: Any = (64, 64), seed: int = 0, cases: float = 1.0
) -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Draw a bright disc in each image; the mask is the disc."""
    y, x = np.mgrid[: image_size[0], : image_size[1]]
    found = {}
    for split, count in patients(site, cases).items():
        rng, masks = _of_split(site, seed, split), []
        for _ in range(count * SLICES):
            cy, cx = rng.uniform(0.35, 0.65, 2) * image_size
            masks.append((y - cy) ** 2 + (x - cx) ** 2 < (rng.uniform(0.15, 0.3) * min(image_size)) ** 2)
        drawn = np.stack(masks)[:, None]
        noise = rng.normal(0, 20, drawn.shape)
        found[split] = np.clip(60 + 90 * drawn + noise, 0, 255).astype(np.uint8), drawn.astype(np.uint8)
    return found


def zones(site: str, *, seed: int = 0, cases: float = 1.0) -> Arrays:
    """Give every second patient an enlarged zone."""
    return {split: np.repeat(np.arange(count) % 2, SLICES) for split, count in patients(site, cases).items()}


def one_sided(masks: npt.NDArray[np.uint8], numbers: Any, share: float, seed: int) -> npt.NDArray[np.uint8]:
    """Outline half of the disc where the zone is enlarged."""
    found = masks.copy()
    found[np.asarray(numbers) == 1, :, :, : masks.shape[-1] // 2] = 0
    return found


def _kind(classes: int, attributes: tuple[str, ...] = (), groups: Any = None) -> SimpleNamespace:
    names = tuple(f"class-{number}" for number in range(classes))
    return SimpleNamespace(
        title="stripes", class_names=names, counts=(1,) * classes, groups=groups or {}, attributes=attributes,
        called="tone",
    )  # fmt: skip


LONG_TAIL = {"head": tuple(range(7)), "medium": tuple(range(7, 16)), "tail": tuple(range(16, 23))}
PHANTOMS = {
    "dermoscopy": _kind(8, ("light", "dark")), "dermoscopy7": _kind(7, ("light", "dark")), "fundus": _kind(5),
    "endoscopy": _kind(23, groups=LONG_TAIL),
}  # fmt: skip


class PhantomPlan(SimpleNamespace):
    """Hold settings of a synthetic federation, without checks."""

    @property
    def kind(self) -> SimpleNamespace:
        """Return the phantom's description of its classes."""
        return PHANTOMS[self.phantom]

    def has_label_noise(self, index: int) -> bool:
        """Tell that no label is wrong."""
        return False

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the lists that every site has."""
        more = [f"test_{name}" for name in self.kind.attributes] if self.attributes else []
        corrupted = ["test_clean", "test_corrupted"] if self.corrupted_sites else []
        return ("training", "validation", "test", "test_common", *corrupted, *more)


def class_site(plan: PhantomPlan, index: int) -> SimpleNamespace:
    """Give stripes whose width is the class, to each who asks a copy."""
    return copy.deepcopy(_drawn(json.dumps(vars(plan), sort_keys=True), index))


@lru_cache(maxsize=16)
def _drawn(settings: str, index: int) -> SimpleNamespace:
    """Draw them."""
    plan = PhantomPlan(**json.loads(settings))
    classes = len(plan.kind.class_names)
    each = max(classes * 4, plan.num_samples // plan.num_sites)
    counts = {"training": each - each // 10, "validation": each // 10 or 1, "test": plan.num_own_test}
    site = SimpleNamespace(images={}, labels={}, attributes={})
    x = np.arange(plan.image_size)
    for split in plan.splits:
        rng = _of_split("" if split.startswith("test_") else str(index), plan.seed, split)
        labels = np.arange(counts.get(split, plan.num_test)) % classes
        stripes = np.sin(x / (1 + labels[:, None]) + rng.uniform(0, 6, (len(labels), 1)))[:, None, :, None]
        noise = rng.normal(0, 20, (len(labels), plan.image_size, plan.image_size, 3))
        images = 128 + 60 * stripes + noise
        site.images[split], site.labels[split] = np.clip(images, 0, 255).astype(np.uint8), labels
        site.attributes[split] = np.arange(len(labels)) // classes % 2
    return site
