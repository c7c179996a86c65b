"""Give each site of a synthetic federation for classification its share of the images, drawn when requested.

No site needs the images of another site: each image is a function of the seed, its own id, class and attribute.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import number
from fairflare.base.stopping import check_stop
from fairflare.data.corruptions import corrupt, image_seed
from fairflare.data.partitions import (
    apportion,
    dirichlet_partition,
    iid_partition,
    shard_partition,
    stratified_split,
    two_pool_partition,
)
from fairflare_lab.phantoms.camera import PLAIN, Camera, camera_of
from fairflare_lab.phantoms.plan import OWN_CLASS, PHANTOMS, Images, PhantomPlan

__all__ = ["PHANTOMS", "PhantomPlan", "PhantomSite", "class_site"]  # names of this module that tasks use

Labels = npt.NDArray[np.int64]

COMMON = "test"  # purpose (part of an image's id) of the common test set; a site's own test has "test/<number>"


@dataclass(frozen=True)
class PhantomSite:
    """Store one site's data by split. Images are drawn when their split is first requested; arrays are read-only."""

    images: Mapping[str, Images]  # images by split, (n, size, size, 3)
    labels: Mapping[str, Labels]  # class of each image by split, (n,)
    attributes: Mapping[str, Labels]  # number of each image's attribute by split, (n,)


def class_site(plan: PhantomPlan, index: int) -> PhantomSite:
    """Return the data of site number ``index`` (from 0) of the federation.

    The splits ``training``, ``validation`` and ``test`` have the site's own mix of classes, camera and image quality.
    ``test_common`` has the same images at every site, of all classes, taken by one camera, but corrupted if the site's
    other images are. Plans with corrupted sites also have ``test_clean`` and ``test_corrupted``, the common images in
    either quality. Plans with attributes also have ``test_<attribute>``, the part of ``test_common`` with this
    attribute. Labels are right, except those of ``training`` at sites with label noise.

    Example:
        >>> plan = PhantomPlan(num_samples=200, num_test=64, num_own_test=50)
        >>> site = class_site(plan, 4)
        >>> list(site.images)
        ['training', 'validation', 'test', 'test_common', 'test_clean', 'test_corrupted']
        >>> site.images["test"].shape, site.images["test_common"].shape
        ((50, 48, 48, 3), (64, 48, 48, 3))
    """
    number("site", index, low=0, high=plan.num_sites - 1, whole=True)
    pool, own, common = _pool(plan), _own_test(plan, index), _test(plan)
    quality = plan.is_corrupted(index)
    camera = camera_of(index, plan.camera_shift)
    training, validation = _own_split(plan, index)
    parts = {
        "training": _Part(pool, training, quality, camera),
        "validation": _Part(pool, validation, quality, camera),
        "test": _Part(own, _all(own), quality, camera),
        "test_common": _Part(common, _all(common), quality),
        "test_clean": _Part(common, _all(common), False),
        "test_corrupted": _Part(common, _all(common), True),
    }
    for position, attribute in enumerate(plan.kind.attributes):
        parts[f"test_{attribute}"] = _Part(common, np.flatnonzero(common.attributes == position), quality)
    parts = {name: parts[name] for name in plan.splits}
    labels = {name: _frozen(part.batch.labels[part.chosen]) for name, part in parts.items()}
    if plan.has_label_noise(index):
        labels["training"] = _frozen(_mislabelled(plan, index, labels["training"]))
    attributes = {name: _frozen(part.batch.attributes[part.chosen]) for name, part in parts.items()}
    images = _Drawn({name: partial(_images, plan, part) for name, part in parts.items()})
    return PhantomSite(images, MappingProxyType(labels), MappingProxyType(attributes))


@dataclass(frozen=True)
class _Batch:
    """Represent a set of images before it is drawn; ``purpose`` and position form the id of each image."""

    purpose: str
    labels: Labels
    attributes: npt.NDArray[np.int64]  # index of each image's attribute


@dataclass(frozen=True)
class _Part:
    """Represent the images of a batch that a site has, with the site's camera and corruption."""

    batch: _Batch
    chosen: npt.NDArray[np.int64]
    corrupted: bool
    camera: Camera = PLAIN


class _Drawn(UserDict[str, Any]):
    """Map each split to its images; a function in their place is called when they are first requested."""

    def __getitem__(self, split: str) -> Images:
        if callable(self.data[split]):
            self.data[split] = self.data[split]()
        return np.asarray(self.data[split])


@lru_cache(maxsize=8)
def _pool(plan: PhantomPlan) -> _Batch:
    """Return the batch of training and validation images of all sites together."""
    counts = class_counts(plan.kind.counts, plan.num_samples, plan.min_class)
    return _batch(plan, "pool", np.arange(len(counts)), counts)


def _batch(plan: PhantomPlan, purpose: str, classes: Labels, counts: Sequence[int]) -> _Batch:
    """Return a batch with ``counts`` images of the ``classes``, in random order."""
    rng = np.random.default_rng(image_seed(purpose, plan.seed))
    labels = rng.permutation(np.repeat(classes, counts))
    attributes = _attributes(plan, len(labels), rng)
    return _Batch(purpose, _frozen(_prevalent(plan, purpose, labels, attributes)), _frozen(attributes))


def _dealt(plan: PhantomPlan) -> Labels:
    """Return the classes of all sites' training and validation images as they would be without attribute effects.

    These classes define the partition, so that ``attribute_prevalence`` changes neither the partition nor a site's
    class mix.
    """
    return _pool(replace(plan, attribute_prevalence=0.0)).labels


def _chosen(plan: PhantomPlan, what: str, attributes: Labels, share: float) -> npt.NDArray[np.bool_]:
    """Choose a share of the images of the second attribute at random; return which images are chosen."""
    second = np.flatnonzero(attributes == 1)
    rng = np.random.default_rng(image_seed(what, plan.seed))
    found = np.zeros(len(attributes), bool)
    found[rng.permutation(second)[: round(share * len(second))]] = True
    return found


def _prevalent(plan: PhantomPlan, purpose: str, labels: Labels, attributes: Labels) -> Labels:
    """Return labels with the last class more frequent among images of the second attribute."""
    if not plan.attribute_prevalence:
        return labels
    made = _chosen(plan, f"prevalence/{purpose}", attributes, plan.attribute_prevalence)
    return np.where(made, len(plan.kind.counts) - 1, labels)


def _attributes(plan: PhantomPlan, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    if not plan.attributes:
        return np.zeros(count, np.int64)
    others = len(plan.kind.attributes) - 1
    shares = plan.attribute_shares or (0.75, *[0.25 / others] * others)
    return rng.choice(len(shares), count, p=np.asarray(shares) / sum(shares))


def _own_test(plan: PhantomPlan, index: int) -> _Batch:
    """Return the batch of a site's own test set, with the class proportions of its training and validation images."""
    has = np.bincount(_dealt(plan)[_partition(plan)[index]], minlength=len(plan.kind.counts))
    present = np.flatnonzero(has)
    counts = class_counts(has[present].tolist(), plan.num_own_test, OWN_CLASS)
    return _batch(plan, f"test/{index}", present, counts)


@lru_cache(maxsize=8)
def _test(plan: PhantomPlan) -> _Batch:
    """Return the batch of the common test set; within each class, the attributes alternate."""
    counts = class_counts(plan.kind.counts, plan.num_test, plan.min_class_test)
    order = np.random.default_rng(image_seed("test", plan.seed)).permutation(sum(counts))
    labels = np.repeat(np.arange(len(counts)), counts)
    turns = np.concatenate([np.arange(n) for n in counts]) if plan.attributes else np.zeros(len(labels), np.int64)
    return _Batch(COMMON, _frozen(labels[order]), _frozen(turns[order] % max(1, len(plan.kind.attributes))))


@lru_cache(maxsize=8)
def _partition(plan: PhantomPlan) -> list[npt.NDArray[np.int64]]:
    labels, sites, seed = _dealt(plan), plan.num_sites, plan.seed
    if plan.partition == "iid":
        return iid_partition(labels, sites, seed=seed)
    if plan.partition == "dirichlet":
        return dirichlet_partition(labels, sites, plan.alpha, seed=seed, min_size=plan.min_site)
    if plan.partition == "two_pool":
        return two_pool_partition(labels, sites, plan.corrupted_sites, plan.alpha, seed=seed, min_size=plan.min_site)
    parts = shard_partition(labels, sites, plan.eta, seed=seed, mode=plan.shard_mode)
    for site, part in enumerate(parts):
        if len(part) < plan.min_site:
            raise ValueError(
                f"site {site} gets {len(part)} images with eta={plan.eta:g} and shard_mode={plan.shard_mode!r}, "
                f"fewer than min_site={plan.min_site}; use another seed, more images or a smaller min_site"
            )
    return parts


def _own_split(plan: PhantomPlan, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split a site's images into training and validation.

    Both splits get an image if there are at least two images and the validation fraction is above 0.
    """
    mine = _partition(plan)[index]
    labels = _pool(plan).labels[mine]
    fraction = plan.validation_fraction
    training, validation = stratified_split(
        labels, (1 - fraction, fraction), seed=image_seed(f"split/{index}", plan.seed)
    )
    if fraction and not len(validation) and len(training) > 1:  # move one image of the largest class to validation
        validation = training[labels[training] == np.bincount(labels).argmax()][-1:]
        training = np.setdiff1d(training, validation)
    return mine[training], mine[validation]


def _mislabelled(plan: PhantomPlan, index: int, labels: Labels) -> Labels:
    rng = np.random.default_rng(image_seed(f"labels/{index}", plan.seed))
    classes, count = len(plan.kind.counts), len(labels)
    wrong = rng.permutation(count) < round(plan.label_noise * count)
    further = rng.integers(1, classes, count) if plan.label_noise_kind == "symmetric" else np.ones(count, np.int64)
    return np.where(wrong, (labels + further) % classes, labels)


def class_counts(proportions: Sequence[int], total: int, least: int) -> tuple[int, ...]:
    """Return ``total`` images in the given proportions, but at least ``least`` of each class.

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


def _all(batch: _Batch) -> npt.NDArray[np.int64]:
    return np.arange(len(batch.labels))


def _images(plan: PhantomPlan, part: _Part) -> Images:
    """Return the images of a part; those of the common test set are drawn once for all sites."""
    if part.batch.purpose != COMMON:
        return _render(plan, part)
    images = _test_images(plan, part.corrupted)
    return images if len(part.chosen) == len(images) else _frozen(images[part.chosen])


def _render(plan: PhantomPlan, part: _Part) -> Images:
    size, kind, batch = plan.image_size, plan.kind, part.batch
    images = np.empty((len(part.chosen), size, size, 3), np.uint8)
    drawn = batch.labels
    if plan.attribute_noise:
        noisy = _chosen(plan, f"noise/{batch.purpose}", batch.attributes, plan.attribute_noise)
        drawn = np.where(noisy, (drawn + 1) % len(kind.class_names), drawn)
    for row, place in enumerate(part.chosen.tolist()):
        check_stop()
        rng = np.random.default_rng(image_seed(f"{plan.phantom}/{batch.purpose}/{place}", plan.seed))
        attribute = kind.attributes[int(batch.attributes[place])] if kind.attributes else None
        images[row] = kind.draw(int(drawn[place]), rng, size, attribute)
    images = part.camera.take(images)
    if part.corrupted:
        _corrupt_all(plan, part, images)
    return _frozen(images)


def _corrupt_all(plan: PhantomPlan, part: _Part, images: Images) -> None:
    for row, place in enumerate(part.chosen.tolist()):
        check_stop()
        seed = image_seed(f"{plan.corruption}/{part.batch.purpose}/{place}", plan.seed)
        images[row] = corrupt(images[row], plan.corruption, plan.severity, seed)


@lru_cache(maxsize=2)
def _test_images(plan: PhantomPlan, corrupted: bool) -> Images:
    """Return all images of the common test set, cached because several sites and splits of a process use them."""
    test = _test(plan)
    part = _Part(test, _all(test), corrupted)
    if not corrupted:
        return _render(plan, part)
    images = _test_images(plan, False).copy()
    _corrupt_all(plan, part, images)
    return _frozen(images)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
