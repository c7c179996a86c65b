"""Synthetic federations for classification: which phantoms there are, and what a site of one gets.

A :class:`PhantomPlan` fixes everything; :func:`phantom_site` gives the images and labels of one site of it.
No site needs the images of another: each image is a function of the seed, its own id, class and attribute.

``python -m fairflare.data.phantoms.classes dermoscopy --out sheet.png`` draws a contact sheet, a row for each class.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, image_seed
from fairflare.data.partitions import (
    SHARD_MODES,
    apportion,
    dirichlet_partition,
    iid_partition,
    shard_partition,
    stratified_split,
    two_pool_partition,
)
from fairflare.data.phantoms.dermoscopy import (
    ISIC2018,
    ISIC2018_COUNTS,
    ISIC2019,
    ISIC2019_COUNTS,
    TONES,
    draw_dermoscopy,
    draw_dermoscopy7,
)
from fairflare.data.phantoms.endoscopy import HYPERKVASIR, HYPERKVASIR_COUNTS, HYPERKVASIR_GROUPS, draw_endoscopy
from fairflare.data.phantoms.fundus import GRADE_COUNTS, GRADES, draw_fundus

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Draw = Callable[[int, np.random.Generator, int, "str | None"], Images]

PARTITIONS = ("iid", "dirichlet", "two_pool", "shards")
MIN_SIZE = 32  # pixels; below, the patterns vanish


@dataclass(frozen=True)
class ClassPhantom:
    """One kind of synthetic image."""

    name: str
    title: str
    class_names: tuple[str, ...]
    counts: tuple[int, ...]  # of the real data set, by class; only their proportions matter
    groups: Mapping[str, tuple[int, ...]]  # classes by frequency, such as head, medium, tail; empty if none
    attributes: tuple[str, ...]  # of the person, such as skin tones; empty if none
    draw: Draw  # (label, rng, size, attribute) -> (size, size, 3) uint8


PHANTOMS: Mapping[str, ClassPhantom] = MappingProxyType(
    {
        phantom.name: phantom
        for phantom in (
            ClassPhantom(
                "dermoscopy", "dermoscopy-like skin lesions, classes of ISIC 2019",
                ISIC2019, ISIC2019_COUNTS, MappingProxyType({}), TONES, draw_dermoscopy,
            ),
            ClassPhantom(
                "dermoscopy7", "dermoscopy-like skin lesions, classes of ISIC 2018",
                ISIC2018, ISIC2018_COUNTS, MappingProxyType({}), TONES, draw_dermoscopy7,
            ),
            ClassPhantom(
                "fundus", "fundus-like images, five grades of diabetic retinopathy as in Messidor-2",
                GRADES, GRADE_COUNTS, MappingProxyType({}), (), draw_fundus,
            ),
            ClassPhantom(
                "endoscopy", "gastrointestinal-endoscopy-like images, classes of HyperKvasir",
                HYPERKVASIR, HYPERKVASIR_COUNTS, MappingProxyType(HYPERKVASIR_GROUPS), (), draw_endoscopy,
            ),
        )
    }
)  # fmt: skip


@dataclass(frozen=True)
class PhantomPlan:
    """Everything that fixes a synthetic federation. The defaults are a small FedISM setting.

    Args:
        phantom: a name in :data:`PHANTOMS`.
        seed: of images, class counts and partition, at least 0.
        image_size: height and width, at least 32.
        num_sites: sites of the federation, at least 1.
        num_samples: images for training and validation, all sites together; the classes in the proportions of
            the real data set.
        num_test: images of the common test set.
        partition: ``"iid"``, ``"dirichlet"`` (with ``alpha``), ``"two_pool"`` (FedISM; with ``alpha`` and
            ``corrupted_sites``) or ``"shards"`` (FedMRL; with ``eta`` and ``shard_mode``).
        alpha: concentration of the Dirichlet distribution.
        eta: 0 to 1, weight of a site's dominant class.
        shard_mode: ``"literal"``, ``"complement"`` or ``"authors"``.
        corrupted_sites: how many sites, the last ones, have corrupted images.
        corruption: ``"gaussian_noise"`` or ``"motion_blur"``.
        severity: of the corruption, 1 to 5.
        validation_fraction: share of a site's images that it keeps for validation, in [0, 1).
        min_site: images that every site must have (Dirichlet partitions draw again until it is so).
        min_class: images of every class in ``num_samples``; rarer classes are raised to it.
        min_class_test: the same for the test set.
        attributes: draw images of the phantom's attributes (skin tones) and add test splits by attribute.
            Without, all images have the first one.
        attribute_shares: share of each attribute among the training and validation images; empty: the first
            attribute has 3/4, the others the rest. The test set has them in equal parts.
    """

    phantom: str = "dermoscopy"
    seed: int = 0
    image_size: int = 48
    num_sites: int = 5
    num_samples: int = 2000
    num_test: int = 400
    partition: str = "two_pool"
    alpha: float = 1.0
    eta: float = 1.0
    shard_mode: str = "literal"
    corrupted_sites: int = 1
    corruption: str = "gaussian_noise"
    severity: int = 3
    validation_fraction: float = 0.1
    min_site: int = 10
    min_class: int = 4
    min_class_test: int = 8
    attributes: bool = False
    attribute_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        choices = (
            ("phantom", tuple(PHANTOMS)),
            ("partition", PARTITIONS),
            ("shard_mode", SHARD_MODES),
            ("corruption", tuple(CORRUPTIONS)),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}. Available: {', '.join(known)}")
        whole = (
            ("seed", 0),
            ("image_size", MIN_SIZE),
            ("num_sites", 1),
            ("num_samples", 1),
            ("num_test", 1),
            ("corrupted_sites", 0),
            ("severity", 1),
            ("min_site", 1),
            ("min_class", 1),
            ("min_class_test", 1),
        )
        for name, least in whole:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        numbers = (("alpha", 1e-6, 1e9), ("eta", 0.0, 1.0), ("validation_fraction", 0.0, 0.9))
        for name, low, high in numbers:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity must be a whole number from 1 to 5, got {self.severity}")
        if self.corrupted_sites > self.num_sites:
            raise ValueError(f"corrupted_sites must be at most num_sites={self.num_sites}, got {self.corrupted_sites}")
        classes = len(self.kind.class_names)
        for name, least in (
            ("num_samples", max(classes * self.min_class, self.num_sites * self.min_site)),
            ("num_test", classes * self.min_class_test),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be at least {least} for {classes} classes and {self.num_sites} sites "
                    f"(see min_class, min_class_test, min_site), got {getattr(self, name)}"
                )
        self._check_attributes()

    def _check_attributes(self) -> None:
        known = self.kind.attributes
        if not isinstance(self.attributes, bool):
            raise ValueError(f"attributes must be True or False, got {self.attributes!r}")
        if self.attributes and not known:
            having = [name for name, phantom in PHANTOMS.items() if phantom.attributes]
            raise ValueError(f"phantom {self.phantom!r} has no attributes; these have: {', '.join(having)}")
        object.__setattr__(self, "attribute_shares", tuple(self.attribute_shares))  # a list from JSON
        shares = self.attribute_shares
        if not shares:
            return
        if not self.attributes:
            raise ValueError("attribute_shares is set, but attributes is False")
        if len(shares) != len(known) or not all(s >= 0 for s in shares) or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"attribute_shares must be {len(known)} shares of sum 1 ({known}), got {shares}")

    @property
    def kind(self) -> ClassPhantom:
        return PHANTOMS[self.phantom]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that every site has."""
        names = ["training", "validation", "test"]
        if self.corrupted_sites:
            names += ["test_clean", "test_corrupted"]
        if self.attributes:
            names += [f"test_{attribute}" for attribute in self.kind.attributes]
        return tuple(names)

    def is_corrupted(self, index: int) -> bool:
        """Whether site number ``index`` (from 0) has corrupted images."""
        return index >= self.num_sites - self.corrupted_sites


@dataclass(frozen=True)
class PhantomSite:
    """What one site has, by split. Images are drawn when their split is first asked for; arrays are read-only."""

    images: Mapping[str, Images]  # (n, size, size, 3)
    labels: Mapping[str, Labels]  # (n,)


def phantom_site(plan: PhantomPlan, index: int) -> PhantomSite:
    """The data of site number ``index`` (from 0) of the federation.

    Splits: ``training`` and ``validation`` are the site's own; ``test`` is the common test set in the site's
    own quality, so corrupted where its other images are. For every site the same, and only where the plan has
    corrupted sites: ``test_clean`` and ``test_corrupted``, the whole test set in either quality. With
    attributes: ``test_<attribute>``, that part of ``test``.

    Example:
        >>> plan = PhantomPlan(num_samples=200, num_test=64)
        >>> site = phantom_site(plan, 4)
        >>> list(site.images)
        ['training', 'validation', 'test', 'test_clean', 'test_corrupted']
        >>> site.images["test"].shape
        (64, 48, 48, 3)
    """
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)) or not 0 <= index < plan.num_sites:
        raise ValueError(f"site must be a whole number from 0 to {plan.num_sites - 1}, got {index!r}")
    pool, test = _pool(plan), _test(plan)
    own = plan.is_corrupted(int(index))
    training, validation = _own_split(plan, int(index))
    everything = np.arange(len(test.labels))
    parts: dict[str, tuple[_Batch, npt.NDArray[np.int64], bool]] = {
        "training": (pool, training, own),
        "validation": (pool, validation, own),
        "test": (test, everything, own),
        "test_clean": (test, everything, False),
        "test_corrupted": (test, everything, True),
    }
    for number, attribute in enumerate(plan.kind.attributes):
        parts[f"test_{attribute}"] = (test, np.flatnonzero(test.attributes == number), own)
    parts = {name: parts[name] for name in plan.splits}
    images = {name: (plan, *part) for name, part in parts.items()}
    labels = {name: _frozen(batch.labels[chosen]) for name, (batch, chosen, _) in parts.items()}
    return PhantomSite(_Drawn(images), MappingProxyType(labels))


@dataclass(frozen=True)
class _Batch:
    """A set of images before it is drawn. ``purpose`` and the position make the id of an image."""

    purpose: str
    labels: Labels
    attributes: npt.NDArray[np.int64]  # index of the attribute


class _Drawn(Mapping[str, Images]):
    """Images by split, drawn on first use."""

    def __init__(self, parts: Mapping[str, tuple[PhantomPlan, _Batch, npt.NDArray[np.int64], bool]]) -> None:
        self._parts = parts
        self._done: dict[str, Images] = {}

    def __getitem__(self, split: str) -> Images:
        if split not in self._done:
            plan, batch, chosen, corrupted = self._parts[split]
            if batch.purpose == "test":
                images = _test_images(plan, corrupted)
                self._done[split] = images if len(chosen) == len(images) else _frozen(images[chosen])
            else:
                self._done[split] = _render(plan, batch, chosen, corrupted)
        return self._done[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@lru_cache(maxsize=8)
def _pool(plan: PhantomPlan) -> _Batch:
    """Training and validation images of all sites."""
    counts = class_counts(plan.kind.counts, plan.num_samples, plan.min_class)
    rng = np.random.default_rng(image_seed("pool", plan.seed))
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    attributes = np.zeros(len(labels), np.int64)
    if plan.attributes:
        others = len(plan.kind.attributes) - 1
        shares = plan.attribute_shares or (0.75, *[0.25 / others] * others)
        attributes = rng.choice(len(shares), len(labels), p=np.asarray(shares) / sum(shares))
    return _Batch("pool", _frozen(labels), _frozen(attributes))


@lru_cache(maxsize=8)
def _test(plan: PhantomPlan) -> _Batch:
    """The common test set; the attributes take turns within each class."""
    counts = class_counts(plan.kind.counts, plan.num_test, plan.min_class_test)
    order = np.random.default_rng(image_seed("test", plan.seed)).permutation(sum(counts))
    labels = np.repeat(np.arange(len(counts)), counts)
    turns = np.concatenate([np.arange(n) for n in counts]) if plan.attributes else np.zeros(len(labels), np.int64)
    return _Batch("test", _frozen(labels[order]), _frozen(turns[order] % max(1, len(plan.kind.attributes))))


@lru_cache(maxsize=8)
def _partition(plan: PhantomPlan) -> list[npt.NDArray[np.int64]]:
    labels, sites, seed = _pool(plan).labels, plan.num_sites, plan.seed
    if plan.partition == "iid":
        return iid_partition(labels, sites, seed=seed)
    if plan.partition == "dirichlet":
        return dirichlet_partition(labels, sites, plan.alpha, seed=seed, min_size=plan.min_site)
    if plan.partition == "two_pool":
        return two_pool_partition(labels, sites, plan.corrupted_sites, plan.alpha, seed=seed, min_size=plan.min_site)
    parts = shard_partition(labels, sites, plan.eta, seed=seed, mode=plan.shard_mode)
    for number, part in enumerate(parts):
        if len(part) < plan.min_site:
            raise ValueError(
                f"site {number} gets {len(part)} images with eta={plan.eta:g} and shard_mode={plan.shard_mode!r}, "
                f"fewer than min_site={plan.min_site}; use another seed, more images or a smaller min_site"
            )
    return parts


def _own_split(plan: PhantomPlan, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Training and validation images of a site. Both get an image where there are two and a fraction above 0."""
    mine = _partition(plan)[index]
    labels = _pool(plan).labels[mine]
    fraction = plan.validation_fraction
    training, validation = stratified_split(
        labels, (1 - fraction, fraction), seed=image_seed(f"split/{index}", plan.seed)
    )
    if fraction and not len(validation) and len(training) > 1:  # all classes too small: one of the largest
        largest = np.bincount(labels).argmax()
        validation = training[labels[training] == largest][-1:]
        training = np.setdiff1d(training, validation)
    return mine[training], mine[validation]


def class_counts(proportions: Sequence[int], total: int, least: int) -> tuple[int, ...]:
    """``total`` images in the given proportions, but at least ``least`` of each class.

    >>> class_counts([900, 90, 10], 100, 5)
    (86, 9, 5)
    """
    if total < least * len(proportions):
        raise ValueError(f"{total} images are too few for {len(proportions)} classes of at least {least}")
    counts = np.full(len(proportions), least)
    raised = np.zeros(len(proportions), bool)
    while not raised.all():
        share = apportion(np.where(raised, 0, proportions), total - int(raised.sum()) * least)
        low = ~raised & (share < least)
        if not low.any():
            counts = np.where(raised, least, share)
            break
        raised |= low
    return tuple(int(n) for n in counts)


def _render(plan: PhantomPlan, batch: _Batch, chosen: npt.NDArray[np.int64], corrupted: bool) -> Images:
    size, kind = plan.image_size, plan.kind
    images = np.empty((len(chosen), size, size, 3), np.uint8)
    for row, number in enumerate(chosen.tolist()):
        rng = np.random.default_rng(image_seed(f"{plan.phantom}/{batch.purpose}/{number}", plan.seed))
        attribute = kind.attributes[int(batch.attributes[number])] if kind.attributes else None
        images[row] = kind.draw(int(batch.labels[number]), rng, size, attribute)
    if corrupted:
        _corrupt_all(plan, batch, chosen, images)
    return _frozen(images)


def _corrupt_all(plan: PhantomPlan, batch: _Batch, chosen: npt.NDArray[np.int64], images: Images) -> None:
    for row, number in enumerate(chosen.tolist()):
        seed = image_seed(f"{plan.corruption}/{batch.purpose}/{number}", plan.seed)
        images[row] = corrupt(images[row], plan.corruption, plan.severity, seed)


@lru_cache(maxsize=2)
def _test_images(plan: PhantomPlan, corrupted: bool) -> Images:
    """The whole test set; kept, since a process may serve several sites and several splits of it."""
    test = _test(plan)
    everything = np.arange(len(test.labels))
    if not corrupted:
        return _render(plan, test, everything, False)
    images = _test_images(plan, False).copy()
    _corrupt_all(plan, test, everything, images)
    return _frozen(images)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def contact_sheet(
    path: str | Path,
    phantom: str,
    *,
    columns: int = 12,
    image_size: int = 96,
    seed: int = 0,
    attribute: str | None = None,
) -> Path:
    """Write a picture: a row of images for each class of a phantom."""
    from PIL import Image

    if phantom not in PHANTOMS:
        raise ValueError(f"unknown phantom {phantom!r}. Available: {', '.join(PHANTOMS)}")
    kind = PHANTOMS[phantom]
    rows = []
    for label in range(len(kind.class_names)):
        generators = np.random.default_rng([seed, label]).spawn(columns)
        tiles = [kind.draw(label, rng, image_size, attribute) for rng in generators]
        rows.append(np.concatenate([np.pad(tile, ((1, 1), (1, 1), (0, 0))) for tile in tiles], axis=1))
    Image.fromarray(np.concatenate(rows)).save(path)
    return Path(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fairflare.data.phantoms.classes",
        description="Contact sheet of a classification phantom, a row for each class.",
    )
    parser.add_argument("phantom", choices=list(PHANTOMS))
    parser.add_argument("--out", required=True, help="picture to write, such as sheet.png")
    parser.add_argument("--columns", type=int, default=12, help="images of each class (default 12)")
    parser.add_argument("--size", type=int, default=96, help="height and width of an image (default 96)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attribute", default=None, help="such as dark; default: the first one")
    options = parser.parse_args(arguments)
    if options.columns < 1 or options.size < MIN_SIZE:
        parser.error(f"--columns must be at least 1 and --size at least {MIN_SIZE}")
    try:
        path = contact_sheet(
            options.out,
            options.phantom,
            columns=options.columns,
            image_size=options.size,
            seed=options.seed,
            attribute=options.attribute,
        )
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    kind = PHANTOMS[options.phantom]
    print(f"{path}: synthetic {kind.title}, no patient data; rows: {', '.join(kind.class_names)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
