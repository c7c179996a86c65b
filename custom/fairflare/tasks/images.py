"""What tasks on 2D images share: a site's settings, batches in a seeded order, resizing, augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from fairflare.data.datalist import DataError, Datalist, Sample, load_datalist, read_image, suggest
from fairflare.tasks.base import Batches, SiteData

if TYPE_CHECKING:
    import torch

CACHE_BYTES = 2**30  # decoded images of a site that are kept in memory, all splits together
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's conversion to grey
FOLDER_KEYS = ("data_root", "datalist", "cache_bytes")  # of the site file, whatever the task
OTHER_KEYS = (  # of the site file, not the task's business
    "state_root", "checkpoint_root", "num_threads", "device", "isolate", "sites", "preprocess_cache",
    "prior", "initial_weights",
)  # fmt: skip
AUGMENTATIONS = ("flip", "affine", "intensity")
Change = Callable[["torch.Tensor", "torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]]


class ImageTask(Protocol):
    """What the data of a task on images need to know of it."""

    image_size: tuple[int, ...]
    in_channels: int
    augmentation: tuple[str, ...]


class ImageData(SiteData):
    """Images that can be had by number.

    Args:
        task: size, channels and augmentation of what :meth:`read` gives.
        site: name for the messages.
        moves_targets: the targets are images too, which an augmentation moves along.
    """

    moves_targets: ClassVar[bool] = False

    def __init__(self, task: ImageTask, site: str) -> None:
        self.task = task
        self.site = site

    def read(self, split: str, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (n, channels, height, width) float32 in [0, 1], and their targets."""
        raise TypeError(f"{type(self).__name__} does not implement read()")

    def check_split(self, split: str) -> str:
        """``split``, or ``ValueError`` when these data have none of this name."""
        if split not in (known := ("training", "validation", *self.test_splits)):
            raise ValueError(f"unknown split '{split}'{suggest(split, known)}")
        return split

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int]:
        import torch

        count = self.num_samples(split)
        if shuffle_seed is None:
            return list(range(count))
        return torch.randperm(count, generator=torch.Generator().manual_seed(shuffle_seed)).tolist()

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        self.check_split(split)
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        if augment and shuffle_seed is None:
            raise ValueError("augment=True needs a shuffle_seed")
        return _ImageBatches(self, split, batch_size, shuffle_seed, augment)


class _ImageBatches:
    def __init__(self, data: ImageData, split: str, batch_size: int, shuffle_seed: int | None, augment: bool) -> None:
        self.data = data
        self.split = split
        self.batch_size = batch_size
        self.shuffle_seed = shuffle_seed
        self.augment = augment

    def __len__(self) -> int:
        return -(-self.data.num_samples(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = self.data.order(self.split, self.shuffle_seed)
        change: Change | None = None
        if self.augment:
            change = augmentation(
                self.data.task.augmentation, self.shuffle_seed or 0, with_targets=self.data.moves_targets
            )
        for start in range(0, len(order), self.batch_size):
            inputs, targets = self.data.read(self.split, order[start : start + self.batch_size])
            yield (inputs, targets) if change is None else change(inputs, targets)


class FolderImages(ImageData):
    """Images of a site's folder; decoded ones stay in memory while they fit into ``cache_bytes``."""

    def __init__(self, task: ImageTask, datalist: Datalist, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__(task, datalist.site)
        self.datalist = datalist
        self.cache_bytes = cache_bytes
        self._cache: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._cached = 0
        self.test_splits = tuple(split for split in datalist.splits if split.startswith("test"))
        sizes = ", ".join(f"{len(samples)} {split}" for split, samples in datalist.splits.items())
        self.description = f"images of the site's own folder: {sizes}"

    def prepare(self, sample: Sample, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """One image of the task's size with its target."""
        raise TypeError(f"{type(self).__name__} does not implement prepare()")

    def num_samples(self, split: str) -> int:
        return len(self.datalist.splits[self.check_split(split)])

    def read(self, split: str, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        pairs = [self._sample(split, index) for index in indices]
        return torch.stack([image for image, _ in pairs]), torch.stack([target for _, target in pairs])

    def _sample(self, split: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._cache.get((split, index))
        if pair is None:
            pair = self.prepare(self.datalist.splits[split][index], split)
            size = sum(tensor.numel() * tensor.element_size() for tensor in pair)
            if self._cached + size <= self.cache_bytes:
                self._cached += size
                self._cache[split, index] = pair
        return pair


# ------------------------------------------------------------------------------------------------ images


def channels_first(
    image: npt.NDArray[np.float32], channels: int, sample: Sample, site: str, split: str
) -> torch.Tensor:
    """(height, width, 1 or 3) as (channels, height, width): colour becomes luminance, grey is repeated.

    Raises:
        DataError: the image has another number of channels.
    """
    import torch

    picture = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    found = picture.shape[0]
    if found not in (1, 3):
        raise DataError(
            f"site '{site}': image '{sample.image}' of split '{split}' has {found} channels; "
            "1 (grey) or 3 (colour) are understood: convert the file",
            f"site '{site}': an image of split '{split}' has {found} channels",
        )
    if found == 3 and channels == 1:
        return torch.einsum("chw,c->hw", picture, torch.tensor(LUMINANCE))[None]
    return picture.expand(channels, -1, -1)


def resize(picture: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Bilinear, with a low-pass filter where it shrinks; (channels, height, width) in [0, 1]."""
    from torch.nn.functional import interpolate

    if tuple(picture.shape[1:]) == size:
        return picture.contiguous()
    return interpolate(picture[None], size, mode="bilinear", antialias=True, align_corners=False)[0].clamp(0.0, 1.0)


def augmentation(names: Sequence[str], seed: int, *, with_targets: bool) -> Change:
    """Random changes of a batch, the same for the same seed.

    Args:
        names: of ``AUGMENTATIONS``.
        seed: of the epoch.
        with_targets: the targets are images that move along.
    """
    import torch
    from monai.transforms import Compose, RandAdjustContrastd, RandAffined, RandFlipd, RandScaleIntensityd

    moved = ("image", "label") if with_targets else ("image",)
    modes = ("bilinear", "nearest") if with_targets else ("bilinear",)
    steps: list[Any] = []
    if "flip" in names:
        steps.append(RandFlipd(keys=moved, prob=0.5, spatial_axis=1))
    if "affine" in names:
        steps.append(
            RandAffined(
                keys=moved, prob=0.5, rotate_range=0.17, scale_range=(0.1, 0.1), mode=modes,
                padding_mode="border", cache_grid=False,
            )
        )  # fmt: skip
    if "intensity" in names:
        steps.append(RandAdjustContrastd(keys="image", prob=0.3, gamma=(0.8, 1.25)))
        steps.append(RandScaleIntensityd(keys="image", prob=0.3, factors=0.1))
    transform = Compose(steps)
    transform.set_random_state(seed=seed % 2**32)

    def plain(items: list[Any], key: str) -> torch.Tensor:
        return torch.stack([torch.as_tensor(item[key]).as_subclass(torch.Tensor) for item in items])

    def change(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        items = [transform({"image": a, "label": b}) for a, b in zip(inputs, targets, strict=True)]
        return plain(items, "image").clamp(0.0, 1.0), plain(items, "label") if with_targets else targets

    return change


# ------------------------------------------------------------------------------------------------ a site's settings


def check_settings(site: str, settings: Mapping[str, Any], own_keys: Sequence[str]) -> None:
    """Refuses a key of the site file that nobody reads."""
    known = (*FOLDER_KEYS, *own_keys, *OTHER_KEYS)
    for key in settings:
        if key not in known:
            raise DataError(
                f"site '{site}': unknown key '{key}' in the site's fairflare.json{suggest(key, known)}",
                f"site '{site}': unknown key in the site file",
            )


def setting_error(site: str, key: str, problem: str) -> DataError:
    """A key of the site file whose value cannot be used."""
    return DataError(
        f"site '{site}': {problem}; correct it in the site's fairflare.json",
        f"site '{site}': key '{key}' in the site file is not usable",
    )


def site_datalist(site: str, settings: Mapping[str, Any], *, class_labels: bool = False) -> Datalist:
    """The datalist that a site's settings name; see :func:`fairflare.data.datalist.load_datalist`."""
    for key in ("data_root", "datalist"):
        value = settings.get(key, "datalist.json")
        if not isinstance(value, str) or not value:
            raise setting_error(site, key, f"{key} must be a path, got {value!r}")
    return load_datalist(
        settings["data_root"], settings.get("datalist", "datalist.json"), site=site, class_labels=class_labels
    )


def cache_bytes(site: str, settings: Mapping[str, Any]) -> int:
    """The site's limit for decoded images in memory."""
    value = settings.get("cache_bytes", CACHE_BYTES)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise setting_error(site, "cache_bytes", f"cache_bytes must be a whole number >= 0, got {value!r}")
    return value


def refuse_half_settings(site: str, settings: Mapping[str, Any]) -> None:
    """Before a phantom stands in: a site file that names data, but not for this site, is a mistake."""
    if settings.get("datalist") is not None:
        raise setting_error(
            site,
            "data_root",
            "'datalist' is set but 'data_root' is not; set 'data_root' to the folder of the list",
        )
    blocks = settings.get("sites")
    if isinstance(blocks, Mapping) and site not in blocks:
        with_data = [name for name, block in blocks.items() if isinstance(block, Mapping) and "data_root" in block]
        if with_data:
            raise DataError(
                f"site '{site}': the site's fairflare.json gives data to the sites "
                f"{', '.join(repr(name) for name in sorted(with_data))}, but has no block for '{site}'; "
                "add one under 'sites', or run the job with these site names",
                f"site '{site}': the site file names data for other sites, but not for this one",
            )


def sample_image(sample: Sample, task: ImageTask, site: str, split: str) -> torch.Tensor:
    """The image of a sample, of the task's channels and size."""
    image = read_image(sample, site=site, split=split)
    return resize(channels_first(image, task.in_channels, sample, site, split), task.image_size)


def whole_numbers(name: str, values: Sequence[int], length: int) -> tuple[int, ...]:
    """``values`` as a tuple of ``length`` integers >= 1, or ``ValueError``."""
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != length:
        raise ValueError(f"{name} must be {length} whole numbers, got {values!r}")
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
        raise ValueError(f"{name} must be {length} whole numbers >= 1, got {values!r}")
    return tuple(values)


def check_augmentation(names: Sequence[str]) -> tuple[str, ...]:
    """``names`` as a tuple, or ``ValueError`` for one that does not exist."""
    unknown = sorted(set(names) - set(AUGMENTATIONS))
    if unknown:
        raise ValueError(f"augmentation: unknown '{unknown[0]}'{suggest(unknown[0], AUGMENTATIONS)}")
    return tuple(names)
