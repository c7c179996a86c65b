"""Load a site's images with a MONAI bundle's transforms, applied to the files of the site's own datalist."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, LoadImaged, RandomizableTrait, Transform, convert_to_contiguous

from fairflare.base import checks
from fairflare.base.site_data import shuffled
from fairflare.base.task import Batches
from fairflare.data.datalist import DataError, Datalist, Sample
from fairflare.data.geometry.pairs import NEAR, together
from fairflare.tasks.batches import load_batches
from fairflare.tasks.bundles.bundle_config import telling
from fairflare.tasks.images import PreparedData
from fairflare.tasks.placing import plain
from fairflare.tasks.scores.dice_scores import BatchOf

TRAINING = "training"
#: Modules of MONAI whose transforms keep the size of an image; transforms of other modules may cut it.
SAME_SIZE = re.compile(r"monai\.(?!transforms\.croppad)")


class BundleData(PreparedData):
    """Load the files of a site's datalist through a bundle's transforms.

    A sample is one image of the datalist, even if the bundle cuts patches. With ``augment`` the training split goes
    through all training transforms, and each image gives as many patches as they cut. Without ``augment`` a training
    image only goes through the transforms that prepare and cut it, and gives one patch, the same each time. Methods
    thus measure on the size that the network is trained on. Other splits go through the validation transforms, whole.

    Args:
        datalist: the site's datalist, with files as labels.
        train, validate: the bundle's transforms.
        keys: keys of image and label in the transforms' dicts.
        validate_batch: largest number of images in a batch outside training; images of a batch must have one size.
        cache_bytes: memory for images as they are before the first random transform.
        num_workers: threads that prepare a batch up to the first random transform.

    Raises:
        DataError: the datalist names a slice of a volume.
    """

    def __init__(
        self,
        datalist: Datalist,
        train: Compose,
        validate: Compose,
        *,
        keys: tuple[str, str],
        validate_batch: int,
        cache_bytes: int,
        num_workers: int,
    ) -> None:
        super().__init__(datalist, "images of the site's own folder, for a MONAI bundle", cache_bytes, num_workers)
        self.keys, self.validate_batch, self._validate = keys, validate_batch, validate
        self._train, self._cut, self._first_random = _split(train)
        if sliced := [split for split, samples in datalist.splits.items() if any(s.slice is not None for s in samples)]:
            raise DataError(
                f"site '{datalist.site}': split '{sliced[0]}' names slices of volumes, which a bundle's transforms do "
                "not know; list whole volumes, or pictures of the slices",
                f"site '{datalist.site}': split '{sliced[0]}' names slices, which a MONAI bundle cannot read",
            )

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int] | None:
        """Return the order of a split's samples.

        For the training split the order is not known, since an image may give several patches.
        """
        return None if self.check_split(split) == TRAINING else shuffled(self.num_samples(split), shuffle_seed)

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        """Return batches of a split, see the class.

        ``batch_size`` holds for the training split. Batches of other splits have at most ``validate_batch`` images, so
        that whole volumes fit into memory.
        """
        checks.whole("batch_size", batch_size)
        numbers = shuffled(self.num_samples(split), shuffle_seed)
        most = batch_size if split == TRAINING else min(batch_size, self.validate_batch)
        seed = checks.whole("shuffle_seed of augmented batches", shuffle_seed, low=0) if augment else None
        return load_batches(numbers, most, partial(self._batch, split, seed))

    def _batch(self, split: str, seed: int | None, indices: Sequence[int]) -> BatchOf:
        """Return images of a split as one batch; for training images, all of their patches."""
        items: list[Any] = self._items(split, indices)
        if split == TRAINING:
            items = [patch for pair in zip(indices, items, strict=True) for patch in self._patches(*pair, seed)]
        sizes = sorted({tuple(item[self.keys[0]].shape) for item in items})
        if len(sizes) > 1:
            raise DataError(
                f"site '{self.datalist.site}': images of different sizes in one {split} batch "
                f"({', '.join('x'.join(map(str, size)) for size in sizes[:4])}); let the bundle's transforms cut or "
                "pad them to one, or set batch_size=1 (validation: in the bundle)",
                f"site '{self.datalist.site}': images of '{split}' have different sizes behind the MONAI bundle's "
                "transforms; they need one, or batches of one image",
            )
        inputs, targets = (torch.stack([plain(item[key]) for item in items]) for key in self.keys)
        # MONAI's losses need numbers, not bool.
        return BatchOf(inputs, targets.float() if targets.dtype == torch.bool else targets, items=items)

    def _patches(self, index: int, item: dict[str, Any], seed: int | None) -> list[dict[str, Any]]:
        """Return all patches of an image, with random changes that depend on the seed only, not on the batch size.

        Without a seed, return one prepared and cut patch, always the same.
        """
        transform = self._cut if seed is None else self._train
        transform.set_random_state(seed=int(np.random.SeedSequence([seed or 0, index]).generate_state(1)[0]))
        with self._preparing(self.datalist.splits[TRAINING][index], TRAINING):
            transformed = transform(copy.deepcopy(item), start=self._first_random)
        patches: list[dict[str, Any]] = transformed if isinstance(transformed, list) else [transformed]
        return patches[:1] if seed is None else patches

    def prepare(self, split: str, sample: Sample) -> dict[str, Any]:
        """Return an image as it is before the first random transform, or after all transforms if none is random."""
        image = [str(file) for file in (sample.image, *sample.more)]
        label = str(sample.label) if isinstance(sample.label, Path) else np.asarray(sample.label, np.int64)
        item = dict(zip(self.keys, (image if sample.more else image[0], label), strict=True))
        with self._preparing(sample, split):
            prepared = self._train(item, end=self._first_random) if split == TRAINING else self._validate(item)
            if isinstance(sample.label, Path):
                _check_places(*(prepared[key] for key in self.keys))
        # Without that, a part that a transform cut out would hold the whole image in memory.
        return dict(convert_to_contiguous(prepared, memory_format=torch.contiguous_format))

    def _preparing(self, sample: Sample, split: str) -> AbstractContextManager[None]:
        """Turn any error of the bundle's transforms, which are code, into one that names the image."""
        site = f"site '{self.datalist.site}'"
        return telling(
            f"{site}: image '{sample.image}' (label '{sample.label}') of split '{split}' cannot be prepared by the "
            "bundle's transforms",
            partial(DataError, public=f"{site}: an image of split '{split}' cannot be prepared by the MONAI bundle's "
                    "transforms; its log says why"),
        )  # fmt: skip


def takes_class_numbers(transforms: Compose, label_key: str) -> bool:
    """Return whether a bundle's transforms are given a class's number as the label, not a file.

    That is so where MONAI's loader loads the image and not the label, and all transforms are MONAI's: a loader of the
    bundle's own may load whatever it likes.
    """
    steps = transforms.flatten().transforms
    loaded = [key for step in steps if isinstance(step, LoadImaged) for key in step.keys]
    return bool(loaded) and label_key not in loaded and all(type(s).__module__.startswith("monai.") for s in steps)


def _check_places(image: Any, label: Any) -> None:
    """Refuse a prepared label that does not lie voxel by voxel on its image, by their affines.

    Arrays without an affine, and labels of another size than the image, are not checked.
    """
    placed = isinstance(image, MetaTensor) and isinstance(label, MetaTensor) and image.shape[1:] == label.shape[1:]
    judged = placed and image.ndim <= 4 and {image.affine.shape, label.affine.shape} == {(4, 4)}
    if judged and not together(image.affine.numpy(), label.affine.numpy(), (*image.shape[1:], 1, 1)[:3], NEAR):
        raise ValueError(
            "behind them, the label is not where the image is, or its axes run otherwise, by their affines; "
            "`Orientationd` on both keys brings axes together"
        )


def _split(transforms: Compose) -> tuple[Compose, Compose, int]:
    """Return all transforms, those that are not random or that only cut patches, and the first random one's index."""
    steps = list(transforms.flatten().transforms)
    options = {name: getattr(transforms, name) for name in ("map_items", "unpack_items", "lazy", "overrides")}
    first = next((i for i, step in enumerate(steps) if _is_random(step)), len(steps))
    fixed = [step for step in steps if not _is_random(step) or not SAME_SIZE.match(type(step).__module__)]
    return Compose(steps, **options), Compose(fixed, **options), first


def _is_random(step: Any) -> bool:
    return isinstance(step, RandomizableTrait) or not isinstance(step, Transform)  # the rule of MONAI's CacheDataset
