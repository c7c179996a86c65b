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


def patients(
    site: str, *, size: Any, seed: int = 0, cases: float = 1.0, halved: float = 0.0, channels: int = 1
) -> dict[str, list[SimpleNamespace]]:
    """Draw a bright disc in each slice, which is the mask; every second patient is of the second group."""
    number = int("".join(filter(str.isdigit, site)) or 1)
    counts = {"training": TRAINING[(number - 1) % 6], "validation": 3, "test": 6}
    x, y = np.mgrid[: size[0], : size[1]]
    found = {}
    for split, count in counts.items():
        rng, found[split] = _of_split(site, seed, split), []
        for i in range(max(1, round(count * cases))):
            masks = []
            for _ in range(size[2]):
                cx, cy = rng.uniform(0.35, 0.65, 2) * size[:2]
                masks.append((y - cy) ** 2 + (x - cx) ** 2 < (rng.uniform(0.15, 0.3) * min(size[:2])) ** 2)
            drawn = np.stack(masks, -1)
            image = np.clip(60 + 90 * drawn + rng.normal(0, 20, drawn.shape), 0, 255).astype(np.uint8)
            if halved and i % 2:
                drawn[: size[0] // 2] = False
            found[split].append(
                SimpleNamespace(image=np.stack([image] * channels), label=drawn.astype(np.uint8), group=i % 2)
            )
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
