"""Give each site of a synthetic federation for classification its share of the images, drawn when requested.

No site needs the images of another site: each image is a function of the seed, its own id, class and attribute.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import number, refuse
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
    pool, common, (training, validation) = _pool(plan), _test(plan), _own_split(plan, index)
    camera, corrupted = camera_of(index, plan.camera_shift), plan.is_corrupted(index)
    own = {"training": pool.only(training), "validation": pool.only(validation), "test": _own_test(plan, index)}
    of_attributes = {
        f"test_{attribute}": common.only(common.attributes == place)
        for place, attribute in enumerate(plan.kind.attributes if plan.attributes else ())
    }
    batches = dict.fromkeys(plan.splits, common) | own | of_attributes
    noisy = {"test_clean": False, "test_corrupted": True}
    images = {
        split: partial(_draw_batch, plan, batches[split], corrupted, camera)
        if split in own
        else partial(_common_images, plan, noisy.get(split, corrupted), batches[split])
        for split in plan.splits
    }
    labels = {split: batches[split].labels for split in plan.splits}
    if plan.has_label_noise(index):
        labels["training"] = _freeze(_mislabel(plan, index, labels["training"]))
    return PhantomSite(
        _Drawn(images),
        MappingProxyType(labels),
        MappingProxyType({split: batches[split].attributes for split in plan.splits}),
    )


@dataclass(frozen=True)
class _Batch:
    """Represent images before they are drawn; the purpose and an image's place form its id. Arrays are (n,).

    Attributes:
        purpose: part of the images' ids.
        places: number of each image.
        dealt: class by which an image is dealt to a site: its label as it would be without attribute effects.
        labels: class of each image.
        shown: class as which it is drawn.
        attributes: number of each image's attribute.
    """

    purpose: str
    places: Labels
    dealt: Labels
    labels: Labels
    shown: Labels
    attributes: Labels

    def only(self, chosen: npt.NDArray[Any]) -> _Batch:
        """Return the chosen images."""
        purpose, *arrays = astuple(self)
        return _Batch(purpose, *(_freeze(array[chosen]) for array in arrays))


class _Drawn(UserDict[str, Any]):
    """Map each split to its images; a function in their place is called when they are first requested."""

    def __getitem__(self, split: str) -> Images:
        if callable(self.data[split]):
            self.data[split] = self.data[split]()
        return np.asarray(self.data[split])


def _batch(plan: PhantomPlan, purpose: str, dealt: Labels, attributes: Labels, prevalence: float) -> _Batch:
    """Return a batch, with the effects that the plan gives to the second attribute."""
    classes, second = len(plan.kind.counts), np.flatnonzero(attributes == 1)

    def choose(what: str, share: float) -> npt.NDArray[np.bool_]:
        rng = np.random.default_rng(image_seed(f"{what}/{purpose}", plan.seed))
        return np.isin(np.arange(len(dealt)), rng.permutation(second)[: round(share * len(second))])

    labels = np.where(choose("prevalence", prevalence), classes - 1, dealt)
    shown = np.where(choose("noise", plan.attribute_noise), (labels + 1) % classes, labels)
    return _Batch(purpose, np.arange(len(dealt)), dealt, labels, shown, attributes).only(np.arange(len(dealt)))


def _mix_batch(plan: PhantomPlan, purpose: str, classes: Labels, counts: Sequence[int]) -> _Batch:
    """Return a batch with ``counts`` images of the ``classes``, in random order, with random attributes."""
    rng = np.random.default_rng(image_seed(purpose, plan.seed))
    dealt = rng.permutation(np.repeat(classes, counts))
    attributes = np.zeros(len(dealt), np.int64)
    if plan.attributes:
        others = len(plan.kind.attributes) - 1
        shares = np.asarray(plan.attribute_shares or (0.75, *[0.25 / others] * others))
        attributes = rng.choice(len(shares), len(dealt), p=shares / shares.sum())
    return _batch(plan, purpose, dealt, attributes, plan.attribute_prevalence)


@lru_cache(maxsize=8)
def _pool(plan: PhantomPlan) -> _Batch:
    """Return the batch of training and validation images of all sites together."""
    counts = class_counts(plan.kind.counts, plan.num_samples, plan.min_class)
    return _mix_batch(plan, "pool", np.arange(len(counts)), counts)


def _own_test(plan: PhantomPlan, index: int) -> _Batch:
    """Return the batch of a site's own test set, with the class proportions of its training and validation images."""
    has = np.bincount(_pool(plan).dealt[_partition(plan)[index]], minlength=len(plan.kind.counts))
    present = np.flatnonzero(has)
    return _mix_batch(
        plan, f"test/{index}", present, class_counts(has[present].tolist(), plan.num_own_test, OWN_CLASS)
    )  # fmt: skip


@lru_cache(maxsize=8)
def _test(plan: PhantomPlan) -> _Batch:
    """Return the batch of the common test set; within each class, the attributes alternate."""
    counts = class_counts(plan.kind.counts, plan.num_test, plan.min_class_test)
    order = np.random.default_rng(image_seed(COMMON, plan.seed)).permutation(sum(counts))
    attributes = np.concatenate([np.arange(n) for n in counts]) % (len(plan.kind.attributes) if plan.attributes else 1)
    return _batch(plan, COMMON, np.repeat(np.arange(len(counts)), counts)[order], attributes[order], 0.0)


@lru_cache(maxsize=8)
def _partition(plan: PhantomPlan) -> list[npt.NDArray[np.int64]]:
    way: Any = {
        "iid": iid_partition,
        "dirichlet": partial(dirichlet_partition, alpha=plan.alpha, min_size=plan.min_site),
        "two_pool": partial(
            two_pool_partition, num_corrupted=plan.corrupted_sites, alpha=plan.alpha, min_size=plan.min_site
        ),
        "shards": partial(shard_partition, eta=plan.eta, mode=plan.shard_mode),
    }[plan.partition]
    parts: list[npt.NDArray[np.int64]] = way(_pool(plan).dealt, plan.num_sites, seed=plan.seed)
    refuse({
        f"site {site} gets {len(part)} images with eta={plan.eta:g} and shard_mode={plan.shard_mode!r}, fewer than "
        f"min_site={plan.min_site}; use another seed, more images or a smaller min_site":
            plan.partition == "shards" and len(part) < plan.min_site
        for site, part in enumerate(parts)
    })  # fmt: skip
    return parts


def _own_split(plan: PhantomPlan, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split a site's images into training and validation.

    Both splits get an image if there are at least two images and the validation fraction is above 0.
    """
    mine, fraction = _partition(plan)[index], plan.validation_fraction
    labels = _pool(plan).labels[mine]
    training, validation = stratified_split(
        labels, (1 - fraction, fraction), seed=image_seed(f"split/{index}", plan.seed)
    )
    if fraction and not len(validation) and len(training) > 1:  # move one image of the largest class to validation
        validation = training[labels[training] == np.bincount(labels).argmax()][-1:]
        training = np.setdiff1d(training, validation)
    return mine[training], mine[validation]


def _mislabel(plan: PhantomPlan, index: int, labels: Labels) -> Labels:
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
    refuse({
        f"{total} images are too few for {len(proportions)} classes of at least {least}":
            total < least * len(proportions),
    })  # fmt: skip
    raised = np.zeros(len(proportions), bool)
    while True:
        share = np.where(raised, least, apportion(np.where(raised, 0, proportions), total - int(raised.sum()) * least))
        if not (share < least).any():
            return tuple(share.tolist())
        raised |= share < least


@lru_cache(maxsize=2)
def _test_images(plan: PhantomPlan, corrupted: bool) -> Images:
    """Return all images of the common test set, cached because several sites and splits of a process use them."""
    return _draw_batch(plan, _test(plan), corrupted, PLAIN)


def _common_images(plan: PhantomPlan, corrupted: bool, batch: _Batch) -> Images:
    images = _test_images(plan, corrupted)
    return images if len(batch.places) == len(images) else _freeze(images[batch.places])


def _draw_batch(plan: PhantomPlan, batch: _Batch, corrupted: bool, camera: Camera) -> Images:
    """Draw the images of a batch as a camera takes them, (n, size, size, 3), and corrupt them after that."""
    size, kind = plan.image_size, plan.kind
    images = np.empty((len(batch.places), size, size, 3), np.uint8)
    for row, (place, shown, attribute) in enumerate(zip(batch.places, batch.shown, batch.attributes, strict=True)):
        check_stop()
        name = f"{batch.purpose}/{place}"
        rng = np.random.default_rng(image_seed(f"{plan.phantom}/{name}", plan.seed))
        drawn = kind.draw(int(shown), rng, size, kind.attributes[attribute] if kind.attributes else None)
        images[row] = camera.take(drawn[None])[0]
        if corrupted:
            seed = image_seed(f"{plan.corruption}/{name}", plan.seed)
            images[row] = corrupt(images[row], plan.corruption, plan.severity, seed)
    return _freeze(images)


def _freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
