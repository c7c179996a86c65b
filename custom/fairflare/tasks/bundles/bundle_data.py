"""Load a site's images with a MONAI bundle's transforms, applied to the files of the site's own datalist."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from monai.data import MetaTensor

from fairflare.base import checks
from fairflare.base.site_data import shuffled
from fairflare.base.task import Batches
from fairflare.data.datalist import DataError, Datalist
from fairflare.data.geometry.misfits import Misfit
from fairflare.data.geometry.pairs import Grid, fit
from fairflare.data.orientation import PLAIN
from fairflare.tasks.bundles.bundle_config import first_cause
from fairflare.tasks.images import ListedData, read_all
from fairflare.tasks.placing import plain
from fairflare.tasks.scores.dice_scores import BatchOf

if TYPE_CHECKING:
    from collections.abc import Callable

    from monai.transforms import Compose

    from fairflare.base.task import Batch

Item = dict[str, Any]
TRAINING = "training"


class BundleData(ListedData):
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
        keys: tuple[str, str] = ("image", "label"),
        validate_batch: int = 1,
        cache_bytes: int = 2**30,
        num_workers: int = 0,
    ) -> None:
        super().__init__(datalist, "images of the site's own folder, for a MONAI bundle")
        self.keys = keys
        self.validate_batch, self.num_workers = validate_batch, num_workers
        self._train, self._cut, self._first_random = _split(train)
        self._validate = validate
        self._kept: dict[tuple[str, int], Item] = {}
        self._left = cache_bytes
        for split, samples in datalist.splits.items():
            if any(sample.slice is not None for sample in samples):
                raise DataError(
                    f"site '{datalist.site}': split '{split}' names slices of volumes, which a bundle's transforms do "
                    "not know; list whole volumes, or pictures of the slices",
                    f"site '{datalist.site}': split '{split}' names slices, which a MONAI bundle cannot read",
                )

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int] | None:
        """Return the order of a split's samples.

        For the training split the order is not known, since an image may give several patches.
        """
        return None if self.check_split(split) == TRAINING else shuffled(self.num_samples(split), shuffle_seed)

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        """See the class. ``batch_size`` is of the training split; of the others at most ``validate_batch``, so that
        whole volumes fit into memory."""
        checks.whole("batch_size", batch_size)
        order = shuffled(self.num_samples(split), shuffle_seed)
        if split != TRAINING:
            chunks = self._of_one_size(split, order, min(batch_size, self.validate_batch))
            return _Batches(chunks, lambda chunk: self._prepared(split, chunk), self.keys)
        chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        seed = checks.whole("shuffle_seed of augmented batches", shuffle_seed, low=0) if augment else None
        return _Batches(chunks, lambda chunk: self._patches(chunk, seed), self.keys, self._different)

    # -- items

    def _of_one_size(self, split: str, order: Sequence[int], most: int) -> list[list[int]]:
        """Group neighbouring images of equal size, at most ``most`` in a group; ``most=1`` reads no file."""

        def size(index: int) -> Any:
            return self._prepared(split, [index])[0][self.keys[0]].shape if most > 1 else None

        alike = (list(group) for _, group in groupby(order, size))
        return [group[i : i + most] for group in alike for i in range(0, len(group), most)]

    def _patches(self, indices: Sequence[int], seed: int | None) -> list[Item]:
        """Return all patches of some images, with random changes from this seed, whatever the batch size.

        Without a seed, return one prepared and cut patch of each image, always the same.
        """
        transform = self._cut if seed is None else self._train
        found: list[Item] = []
        for index, item in zip(indices, self._prepared(TRAINING, indices), strict=True):
            own = np.random.SeedSequence([seed or 0, index]).generate_state(1)[0]
            transform.set_random_state(seed=int(own))
            made = self._applied(TRAINING, index, transform, copy.deepcopy(item), start=self._first_random)
            patches = made if isinstance(made, list) else [made]
            found += patches[:1] if seed is None else patches
        return found

    def _prepared(self, split: str, indices: Sequence[int]) -> list[Item]:
        """Return images as they are before the first random transform; if none is random, after all transforms."""
        missing = [index for index in indices if (split, index) not in self._kept]
        read = read_all(partial(self._read, split), missing, self.num_workers)
        for index, item in read.items():
            size = sum(value.nbytes for value in item.values() if isinstance(value, (torch.Tensor, np.ndarray)))
            if size <= self._left:
                self._left -= size
                self._kept[split, index] = item
        return [self._kept.get((split, index)) or read[index] for index in indices]

    def _read(self, split: str, index: int) -> Item:
        sample = self.datalist.splits[split][index]
        item: Item = {self.keys[0]: str(sample.image), self.keys[1]: str(sample.label)}
        if split == TRAINING:
            found = self._applied(split, index, self._train, item, end=self._first_random)
        else:
            found = self._applied(split, index, self._validate, item)
        if not isinstance(found, dict):
            raise self._refused(split, index, f"the transforms give a {type(found).__name__} where one image is wanted")
        if split != TRAINING:
            for key in self.keys:
                if not isinstance(found.get(key), (torch.Tensor, np.ndarray)):
                    raise self._refused(split, index, f"the transforms leave no array under {key!r}")
        if problem := _misplaced(*(found.get(key) for key in self.keys)):
            raise self._refused(split, index, problem)
        return found

    def _applied(self, split: str, index: int, transform: Compose, item: Item, **part: Any) -> Any:
        try:
            return transform(item, **part)
        except Exception as error:  # a bundle's transforms are code
            raise self._refused(split, index, first_cause(error)) from error

    def _refused(self, split: str, index: int, problem: str) -> DataError:
        site, sample = self.datalist.site, self.datalist.splits[split][index]
        return DataError(
            f"site '{site}': image '{sample.image}' (label '{sample.label}') of split '{split}' cannot be prepared by "
            f"the bundle's transforms: {problem}",
            f"site '{site}': an image of split '{split}' cannot be prepared by the MONAI bundle's transforms",
            problem,
        )

    def _different(self, sizes: Sequence[tuple[int, ...]]) -> DataError:
        listed = ", ".join("x".join(map(str, size)) for size in sizes[:4])
        return DataError(
            f"site '{self.datalist.site}': images of different sizes in one training batch ({listed}); let the "
            "bundle's training transforms cut or pad them to one, or set batch_size=1",
            f"site '{self.datalist.site}': the training images have different sizes behind the MONAI bundle's "
            "transforms; they need one, or batch_size=1",
        )


def _misplaced(image: Any, label: Any) -> str:
    """Explain why a prepared label does not lie voxel by voxel on its image, by their affines; empty: it does.

    Arrays without an affine, and labels of another size than the image, are not judged.
    """
    placed = isinstance(image, MetaTensor) and isinstance(label, MetaTensor) and image.shape[1:] == label.shape[1:]
    if not placed or image.ndim > 4 or {image.affine.shape, label.affine.shape} != {(4, 4)}:
        return ""
    rows, columns, slices = (*image.shape[1:], 1, 1)[:3]
    own, its = (Grid((rows, columns, slices), (("its affine", x.affine.cpu().numpy()),)) for x in (image, label))
    found = fit(own, its)
    if isinstance(found, Misfit):
        return f"behind them, {found.cause}: the label is not where the image is; {found}"
    if np.array_equal(found.turn, PLAIN):
        return ""
    return (
        "behind them, the label's axes run otherwise than the image's; `Orientationd` on both keys brings them together"
    )


class _Batches:
    """Iterate over batches, each made from a list of images when it is needed."""

    def __init__(
        self,
        chunks: Sequence[Sequence[int]],
        items: Callable[[Sequence[int]], list[Item]],
        keys: tuple[str, str],
        different: Callable[[Sequence[tuple[int, ...]]], DataError] | None = None,
    ) -> None:
        self.chunks, self.items, self.keys, self.different = chunks, items, keys, different

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Batch]:
        for chunk in self.chunks:
            items = self.items(chunk)
            sizes = sorted({tuple(item[key].shape) for item in items for key in self.keys[:1]})
            if len(sizes) > 1 and self.different is not None:
                raise self.different(sizes)
            inputs, targets = (torch.stack([plain(item[key]) for item in items]) for key in self.keys)
            if targets.dtype == torch.bool:  # MONAI's losses take numbers
                targets = targets.float()
            yield BatchOf(inputs, targets, items=items)


def _split(transforms: Compose) -> tuple[Compose, Compose, int]:
    """Return all transforms, those that are not random or that cut, and the index of the first random one."""
    from monai.transforms import Compose

    steps = list(transforms.flatten().transforms)
    options = {name: getattr(transforms, name) for name in ("map_items", "unpack_items", "lazy", "overrides")}
    first = next((i for i, step in enumerate(steps) if _is_random(step)), len(steps))
    kept = [step for step in steps if not _is_random(step) or _cuts(step)]
    return Compose(steps, **options), Compose(kept, **options), first


def _is_random(step: Any) -> bool:
    from monai.transforms import RandomizableTrait, Transform

    return isinstance(step, RandomizableTrait) or not isinstance(step, Transform)  # the rule of MONAI's CacheDataset


def _cuts(step: Any) -> bool:
    """Return whether a random transform may set the size of the training patches; one not from MONAI may."""
    places = [base.__module__ for base in type(step).__mro__]
    return not places[0].startswith("monai.") or any(place.startswith("monai.transforms.croppad") for place in places)


def item_of(batch: Any, number: int, keys: tuple[str, str]) -> Item:
    """Return the dict (key -> value) of one image of a batch, as the bundle's transforms made it.

    If the batch carries no dicts, return a new dict of the image's input and target.

    Args:
        batch: inputs and targets.
        number: index of the image in the batch.
        keys: the bundle's keys of input and target.
    """
    if items := getattr(batch, "items", ()):
        return dict(items[number])
    return {key: tensor[number] for key, tensor in zip(keys, batch, strict=True)}
