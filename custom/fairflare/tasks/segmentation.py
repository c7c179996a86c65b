"""Segmentation of 2D images: MONAI's U-Net, Dice loss and Dice metric; own images or the phantom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflare.data.datalist import SPLITS, DataError, Datalist, Sample, read_pair
from fairflare.tasks.base import SiteData, Task, evaluating
from fairflare.tasks.images import (
    CACHE_BYTES,
    FolderImages,
    ImageData,
    cache_bytes,
    channels_first,
    check_augmentation,
    check_settings,
    refuse_half_settings,
    resize,
    setting_error,
    site_datalist,
    whole_numbers,
)

if TYPE_CHECKING:
    import torch

THRESHOLD = 0.5
SITE_KEYS = ("mask_values", "phantom_seed", "phantom_cases")  # of the site file


class SegmentationTask(Task):
    """Segment structures in 2D images with a U-Net.

    The defaults are a small network on 64x64 grey images, quick enough for a laptop. The setting of the
    Fed-LWR paper is ``image_size=(384, 384), in_channels=3, features=(32, 64, 128, 256, 512, 32),
    norm_momentum=0.1``.

    Every output channel is one structure with its own sigmoid, so structures may lie inside each other.

    Args:
        image_size: height and width that images are resized to; multiples of 16, at least 32.
        in_channels: 1 (colour images become luminance) or 3 (grey images are repeated).
        num_classes: number of structures, that is of output channels.
        labels: for each structure the labels that belong to it, for example ``[[1, 2], [2]]`` for whole cell
            and nucleus of masks with 1 cytoplasm and 2 nucleus. Default: ``[[1], [2], ...]``.
        class_names: names of the structures for the metrics ``dice_<name>``; only with several structures.
            Default: ``class_1``, ``class_2``, ...
        mask_values: ``{value in the file: label}``, every value that a mask may hold. Default: the labels
            themselves and 0 for background; masks of 0 and 255 are also understood where 1 is the only label.
            A site whose masks are coded otherwise sets the same key in its own file.
        features: widths of the U-Net, as in :class:`monai.networks.nets.BasicUNet`.
        norm_momentum: share of a new batch in the running statistics of the batch norms. With PyTorch's 0.1
            they still hold a quarter of their initial values after 12 steps, which is all that a small site
            does in a round, and 18 layers of it make the first models blind in evaluation.
        augmentation: ``"flip"``, ``"affine"``, ``"intensity"``: which random changes ``augment=True`` makes.
        phantom_seed: seed of the synthetic data, used where a site has none of its own.
        phantom_cases: factor on the number of synthetic cases.
    """

    primary_metric: ClassVar[str] = "dice"

    def __init__(
        self,
        image_size: Sequence[int] = (64, 64),
        in_channels: int = 1,
        num_classes: int = 1,
        labels: Sequence[Sequence[int]] | None = None,
        class_names: Sequence[str] | None = None,
        mask_values: Mapping[Any, int] | None = None,
        features: Sequence[int] = (16, 16, 32, 64, 128, 16),
        norm_momentum: float = 0.3,
        augmentation: Sequence[str] = ("flip", "affine", "intensity"),
        phantom_seed: int = 0,
        phantom_cases: float = 1.0,
    ) -> None:
        self.image_size = whole_numbers("image_size", image_size, 2)
        if any(n < 32 or n % 16 for n in self.image_size):
            raise ValueError(f"image_size must be two multiples of 16, each at least 32, got {list(image_size)}")
        if in_channels not in (1, 3):
            raise ValueError(f"in_channels must be 1 or 3, got {in_channels!r}")
        self.in_channels = in_channels
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
            raise ValueError(f"num_classes must be a whole number >= 1, got {num_classes!r}")
        self.num_classes = num_classes
        self.labels = None if labels is None else [_labels(item) for item in labels]
        if self.labels is not None and len(self.labels) != num_classes:
            raise ValueError(f"labels must have one entry for each of num_classes={num_classes}, got {labels!r}")
        self.class_names = None if class_names is None else [str(name) for name in class_names]
        if self.class_names is not None and len(set(self.class_names)) != num_classes:
            raise ValueError(f"class_names must be {num_classes} different names (num_classes), got {class_names!r}")
        self.mask_values = None if mask_values is None else _mask_values(mask_values, "mask_values")
        self.features = whole_numbers("features", features, 6)
        if isinstance(norm_momentum, bool) or not 0 < norm_momentum <= 1:
            raise ValueError(f"norm_momentum must be in (0, 1], got {norm_momentum!r}")
        self.norm_momentum = norm_momentum
        self.augmentation = check_augmentation(augmentation)
        _check_phantom(phantom_seed, phantom_cases)
        self.phantom_seed = phantom_seed
        self.phantom_cases = phantom_cases
        _check_reachable(self.structures, self.mask_values)

    @property
    def structures(self) -> list[list[int]]:
        """The labels of each structure."""
        return self.labels or [[index + 1] for index in range(self.num_classes)]

    def build_model(self) -> torch.nn.Module:
        from monai.networks.nets.basic_unet import BasicUNet

        return BasicUNet(
            spatial_dims=2,
            in_channels=self.in_channels,
            out_channels=self.num_classes,
            features=self.features,
            act=("relu", {"inplace": True}),
            norm=("batch", {"momentum": self.norm_momentum}),
            bias=False,
        )

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Dice loss of each image and structure, then the mean."""
        from monai.losses.dice import DiceLoss

        return DiceLoss(sigmoid=True)(outputs, targets)

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Dice loss of each image, the mean over its structures."""
        from monai.losses.dice import DiceLoss

        return DiceLoss(sigmoid=True, reduction="none")(outputs, targets).flatten(1).mean(1)

    def evaluate(
        self,
        model: torch.nn.Module,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device | str,
    ) -> dict[str, float]:
        """Dice at threshold 0.5, 1 where both are empty: mean over structures, then over images.

        Returns:
            ``dice``, ``loss`` and, with several structures, ``dice_<class name>``.
        """
        import torch
        from monai.metrics.meandice import compute_dice

        scores: list[torch.Tensor] = []
        losses: list[float] = []
        counts: list[int] = []
        with evaluating(model):
            for inputs, targets in batches:
                outputs = model(inputs.to(device))
                targets = targets.to(device)
                losses.append(float(self.loss(outputs, targets)))
                counts.append(len(targets))
                found = torch.sigmoid(outputs) > THRESHOLD
                scores.append(compute_dice(found, targets > 0, ignore_empty=False).to("cpu", torch.float64))
        if not counts:
            raise ValueError("evaluate needs at least one batch")
        dice = torch.cat(scores)
        result = {"dice": float(dice.mean()), "loss": float(np.average(losses, weights=counts))}
        if self.num_classes > 1:
            names = self.class_names or [f"class_{index + 1}" for index in range(self.num_classes)]
            result.update({f"dice_{name}": float(value) for name, value in zip(names, dice.mean(0), strict=True)})
        return result

    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        """The site's own images, or the phantom when its settings have no ``data_root``.

        Args:
            site: name of the site.
            settings: the site's private file: ``data_root``, ``datalist`` (default ``datalist.json``),
                ``mask_values``, ``cache_bytes``, ``phantom_seed``, ``phantom_cases``.
        """
        check_settings(site, settings, SITE_KEYS)
        if settings.get("data_root") is None:
            return _phantom(self, site, settings)
        mask_values = self.mask_values
        if settings.get("mask_values") is not None:
            try:
                mask_values = _mask_values(settings["mask_values"], "mask_values")
                _check_reachable(self.structures, mask_values)
            except ValueError as error:
                raise setting_error(site, "mask_values", str(error)) from error
        return FolderData(self, site_datalist(site, settings), mask_values, cache_bytes(site, settings))


class FolderData(FolderImages):
    """Images and masks of a site's folder."""

    moves_targets = True

    def __init__(
        self,
        task: SegmentationTask,
        datalist: Datalist,
        mask_values: Mapping[int, int] | None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(task, datalist, cache_bytes)
        self.labels = task.structures
        self.mask_values = mask_values

    def read(self, split: str, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, masks = super().read(split, indices)
        return inputs, masks.float()

    def prepare(self, sample: Sample, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        image, mask = read_pair(sample, site=self.site, split=split)
        # before the resizing, which could lose a stray value
        targets = _structures(mask, self.labels, self.mask_values, self.site, split, str(sample.label))
        picture = channels_first(image, self.task.in_channels, sample, self.site, split)
        return resize(picture, self.task.image_size), _resize_masks(torch.from_numpy(targets), self.task.image_size)


class PhantomData(ImageData):
    """The synthetic prostate images of one site."""

    synthetic = True
    moves_targets = True

    def __init__(self, task: SegmentationTask, site: str, seed: int, cases: float) -> None:
        import torch

        from fairflare.data.phantoms import prostate_site as phantom_site

        super().__init__(task, site)
        height, width = task.image_size
        self._splits: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for split, (images, masks) in phantom_site(site, image_size=(height, width), seed=seed, cases=cases).items():
            inputs = torch.from_numpy(images).float().div_(255)
            self._splits[split] = (inputs, torch.from_numpy(masks))
        sizes = ", ".join(f"{self.num_samples(split)} {split}" for split in SPLITS)
        self.description = f"SYNTHETIC prostate phantom, not patient data: {sizes}"

    def num_samples(self, split: str) -> int:
        return len(self._splits[self.check_split(split)][0])

    def read(self, split: str, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._splits[split]
        chosen = list(indices)
        return inputs[chosen].expand(-1, self.task.in_channels, -1, -1).contiguous(), targets[chosen].float()


def _phantom(task: SegmentationTask, site: str, settings: Mapping[str, Any]) -> PhantomData:
    refuse_half_settings(site, settings)
    if task.num_classes != 1:
        raise DataError(
            f"site '{site}': no 'data_root' in the site's fairflare.json, and the synthetic prostate has one "
            f"structure where the task has num_classes={task.num_classes}; set 'data_root'",
            f"site '{site}': no data folder is set, and the synthetic data do not fit the task",
        )
    seed = settings.get("phantom_seed", task.phantom_seed)
    cases = settings.get("phantom_cases", task.phantom_cases)
    try:
        _check_phantom(seed, cases)
    except ValueError as error:
        raise setting_error(site, str(error).split()[0], str(error)) from error
    return PhantomData(task, site, seed, cases)


def _check_phantom(seed: Any, cases: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"phantom_seed must be a whole number >= 0, got {seed!r}")
    if isinstance(cases, bool) or not isinstance(cases, (int, float)) or not 0 < cases <= 1000:
        raise ValueError(f"phantom_cases must be a number in (0, 1000], got {cases!r}")


def _check_reachable(structures: Sequence[Sequence[int]], mask_values: Mapping[int, int] | None) -> None:
    """Every structure has a label that masks can have; otherwise it would silently be empty everywhere."""
    if mask_values is None:
        return
    for structure in structures:
        if not set(structure) & set(mask_values.values()):
            raise ValueError(f"mask_values gives no value to the structure {structure}, got {dict(mask_values)}")


def _structures(
    mask: npt.NDArray[np.int64],
    labels: Sequence[Sequence[int]],
    mask_values: Mapping[int, int] | None,
    site: str,
    split: str,
    file: str,
) -> npt.NDArray[np.uint8]:
    """(structures, height, width) of 0 and 1 from the values of a mask file."""
    found = np.unique(mask).tolist()
    if mask_values is None:
        known = sorted({0}.union(*labels))
        coding = {value: value for value in known}
        if known == [0, 1] and 255 in found and 1 not in found:
            coding = {0: 0, 255: 1}
    else:
        coding = dict(mask_values)
        known = sorted(coding)
    strange = [value for value in found if value not in coding]
    if strange:
        shown = ", ".join(map(str, strange[:5])) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
        lossy = "; JPEG changes values, use PNG for masks" if file.lower().endswith((".jpg", ".jpeg")) else ""
        also = " (or 0 and 255)" if mask_values is None and known == [0, 1] else ""
        raise DataError(
            f"site '{site}': mask '{file}' of split '{split}' has the values {shown}; expected are "
            f"{', '.join(map(str, known))}{also}. Correct the mask, or say with 'mask_values' in the site's "
            f'fairflare.json what they mean, such as {{"0": 0, "{strange[0]}": 1}}{lossy}',
            f"site '{site}': a mask of split '{split}' has values that are not expected",
        )
    meaning = np.zeros_like(mask)
    for value, label in coding.items():
        meaning[mask == value] = label
    return np.stack([np.isin(meaning, list(item)) for item in labels]).astype(np.uint8)


def _resize_masks(targets: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Nearest, so that a structure stays a structure."""
    from torch.nn.functional import interpolate

    return targets if tuple(targets.shape[1:]) == size else interpolate(targets[None], size, mode="nearest-exact")[0]


def _labels(item: Sequence[int]) -> list[int]:
    if (
        isinstance(item, str)
        or not isinstance(item, Sequence)
        or not item
        or any(isinstance(label, bool) or not isinstance(label, int) or label < 1 for label in item)
    ):
        raise ValueError(f"labels must be lists of whole numbers >= 1 (0 is background), got {item!r}")
    return list(item)


def _mask_values(values: Mapping[Any, int], name: str) -> dict[int, int]:
    """Keys to int: JSON has only text keys."""
    try:
        return {int(value): int(label) for value, label in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f'{name} must be like {{"0": 0, "255": 1}}, got {values!r}') from error
