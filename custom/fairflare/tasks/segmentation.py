"""Segmentation of 2D images: MONAI's U-Net, Dice loss and Dice metric; own images or the phantom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fairflare.base import checks
from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import Flag, NonNegativeInt, PositiveInt, settings
from fairflare.data.datalist import SPLITS, Datalist, Sample
from fairflare.tasks.base import LOSS, Metric, SiteData, evaluating
from fairflare.tasks.images import (
    Augmentations,
    Coding,
    FolderImages,
    Grey,
    ImageTask,
    Momentum,
    PhantomImages,
    SiteSettings,
    one_for_each_class,
    setting_of,
)

if TYPE_CHECKING:
    import torch
    from monai.transforms import Compose

    from fairflare.base.task import Batch, Device, Outcomes
    from fairflare.tasks.scores.dice_scores import DiceScores, Origin
    from fairflare.tasks.transforms import Structured

THRESHOLD = 0.5
BATCH = 16  # images, where nothing depends on it
EMPTY = "of a model that finds nothing it is the share of images without the structure"
DICE = Metric(
    name="dice", doc="Dice, mean over structures and images", reveals=EMPTY, higher_is_better=True, mean_of_images=True
)
VOLUME_DICE = Metric(
    name="volume_dice", doc="Dice of the listed slices of a volume together, mean over structures and volumes",
    reveals="of a model that finds nothing it is the share of volumes without the structure",
    higher_is_better=True,
)  # fmt: skip
OF_STRUCTURE: dict[str, Any] = {
    "doc": "Dice of one structure", "reveals": EMPTY, "by_class": True, "family": "dice_<class>",
    "higher_is_better": True,
    "of_classes": (),
}  # fmt: skip

OF_STRUCTURE_IN_VOLUMES: dict[str, Any] = {
    "doc": "Dice of one structure in a volume", "reveals": VOLUME_DICE.reveals, "by_class": True,
    "family": "volume_dice_<class>", "higher_is_better": True, "of_classes": (),
}  # fmt: skip

Side = Annotated[int, Field(strict=True, ge=32, multiple_of=16)]
Widths = tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt]
Structure = Annotated[list[PositiveInt], Field(min_length=1)]
Factor = Annotated[float, Field(strict=True, gt=0, le=1000)]


@settings
class SegmentationSite(SiteSettings):
    """What segmentation reads of a site's private file.

    Args:
        mask_values: the site's ``{value in the file: label}``; default: the task's.
        phantom_cases: factor on the number of synthetic cases; default: the task's.
    """

    mask_values: Coding | None = None
    phantom_cases: Factor | None = None


@settings
class SegmentationTask(ImageTask):
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
        ignore: label of pixels that do not count, in loss and metrics (outside a field of view, not annotated).
            Default: all count.
        mask_resize: ``"nearest"``: a pixel of the network belongs to a structure or not; ``"area"``: by the share that
            the structure covers, so that what is smaller than a pixel is not lost.
        evaluate_at: Dice at the size of the ``"network"``, or of the ``"image"``: what is found is brought back to it
            and compared with the mask as it is in the file. The loss is always that of the network's size.
        network: ``"unet"``, or MONAI's ``"swin_unetr"`` (sides of at least 64, multiples of 32) or ``"segresnet"``.
        features: widths of the U-Net, as in :class:`monai.networks.nets.BasicUNet`.
        width: of the first stage of the other networks (``swin_unetr``: a multiple of 12, default 24; ``segresnet``: of
            8, default 16).
        norm_momentum: share of a new batch in the running statistics of the batch norms. With PyTorch's 0.1
            they still hold a quarter of their initial values after 12 steps, which is all that a small site
            does in a round, and 18 layers of it make the first models blind in evaluation.
        initial_weights: checkpoint of exactly this network (``.pt``, ``.pth`` or ``.safetensors``; also an
            ``FL_global_model.pt``) that the server starts from, unless the run or its own private file names another.
        augmentation: random changes of ``augment=True``: ``"flip"``, ``"affine"``, ``"intensity"`` (ours); the papers'
            ``"flip_vertical"``, ``"blur"``, ``"rotate"`` (10 degrees), ``"shift"`` (2 %), ``"one_move"``, ``"jitter"``.
        allow_phantom: a site whose file names no data, for itself or for others, trains on synthetic data; False: it is
            refused unless its own file says ``"phantom": true``.
        phantom_seed: seed of the synthetic data, used where a site has none of its own.
        phantom_cases: factor on the number of synthetic cases.
    """

    primary_metric: ClassVar[str] = "dice"

    site_settings: ClassVar[type[SiteSettings]] = SegmentationSite
    has_classes: ClassVar[bool | None] = False  # an image has all structures

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "augmentation": only_with("augment"),
        "features": only_with("network", "unet"),
        "norm_momentum": only_with("network", "unet"),
        "width": only_with("network", "swin_unetr", "segresnet"),
    }

    image_size: tuple[Side, Side] = (64, 64)
    in_channels: Grey = 1
    num_classes: PositiveInt = 1
    labels: list[Structure] | None = None
    class_names: list[str] | None = None
    mask_values: Coding | None = None
    ignore: NonNegativeInt | None = None
    mask_resize: Literal["nearest", "area"] = "nearest"
    evaluate_at: Literal["network", "image"] = "network"
    network: Literal["unet", "swin_unetr", "segresnet"] = "unet"
    features: Widths = (16, 16, 32, 64, 128, 16)
    width: PositiveInt | None = None
    norm_momentum: Momentum = 0.3
    initial_weights: str | None = None
    augmentation: Augmentations = ("flip", "affine", "intensity")
    allow_phantom: Flag = True
    phantom_seed: NonNegativeInt = 0
    phantom_cases: Factor = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network != "unet":
            from fairflare.tasks.encoders import check_segmenter

            check_segmenter(self.network, self.image_size, self.width)
        if self.labels is not None:
            one_for_each_class("labels", self.labels, self.num_classes)
        if self.class_names is not None:
            one_for_each_class("class_names", self.class_names, self.num_classes, different=True)
        _check_reachable(self.structures, self.mask_values)
        if self.ignore is not None and self.ignore in set().union(*self.structures):
            raise ValueError(f"ignore must be a label of no structure, got {self.ignore}: labels are {self.structures}")
        if self.ignore is not None and self.mask_values is not None and self.ignore not in self.mask_values.values():
            raise ValueError(f"mask_values gives no value to ignore={self.ignore}, got {dict(self.mask_values)}")

    @property
    def structures(self) -> list[list[int]]:
        """The labels of each structure."""
        return self.labels or [[index + 1] for index in range(self.num_classes)]

    def build_model(self) -> torch.nn.Module:
        if self.network != "unet":
            from fairflare.tasks.encoders import build_segmenter

            same: Any = {"in_channels": self.in_channels, "classes": self.num_classes, "image_size": self.image_size}
            return build_segmenter(self.network, width=self.width, **same)
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

    def initialise(self, model: torch.nn.Module, checkpoint: str | None = None) -> str:
        from fairflare.tasks.networks import load_network

        path = self.initial_weights if checkpoint is None else checkpoint
        if path is None:
            return super().initialise(model)
        return load_network(model, Path(path)) if self.initial_keys is None else self.load_what_fits(model, path)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Dice loss of each image and structure, then the mean."""
        from monai.losses.dice import DiceLoss

        return DiceLoss(sigmoid=True)(*self.counted(outputs, targets))

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Dice loss of each image, the mean over its structures."""
        from monai.losses.dice import DiceLoss

        return DiceLoss(sigmoid=True, reduction="none")(*self.counted(outputs, targets)).flatten(1).mean(1)

    def counted(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and targets without the pixels that do not count: there nothing is found, and nothing is to be."""
        if self.ignore is None and self.resize != "pad":
            return outputs, targets
        return outputs.masked_fill(targets < 0, -math.inf), targets.clamp(min=0)

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        """Of each structure, (n, structures, height, width) in [0, 1]."""
        return outputs.sigmoid()

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        """Dice at threshold 0.5, 1 where both are empty: mean over structures, then over images.

        Batches that do not say where their images come from (a script's own) are compared at the network's size.

        Returns:
            ``dice``, ``loss``, of slices of volumes ``volume_dice``; with several structures the same of each,
            ``dice_<class name>``.
        """
        scores, losses, counts = self._scores(model, batches, device)
        result = {"dice": 0.0, "loss": float(np.average(losses, weights=counts))}
        for name, dice in (("dice", scores.images), ("volume_dice", scores.volumes)):
            if dice is not None:
                result[name] = float(dice.mean())
            if dice is not None and self.num_classes > 1:
                by_name = zip(self.names(), dice.mean(0), strict=True)
                result.update({f"{name}_{structure}": float(value) for structure, value in by_name})
        return result

    def outcome_names(self) -> list[str]:
        """The structures."""
        return self.names()

    def outcomes(self, model: torch.nn.Module, data: SiteData, split: str, device: Device) -> Outcomes:
        """As :meth:`fairflare.base.task.Task.outcomes`: Dice of each image and structure."""
        scores, _, _ = self._scores(model, data.batches(split, batch_size=BATCH), device)
        return None, scores.images.numpy()

    def _scores(
        self, model: torch.nn.Module, batches: Iterable[Batch], device: Device
    ) -> tuple[DiceScores, list[float], list[int]]:
        """Dice of each image, and of each batch its loss and its number of images."""
        from fairflare.tasks.scores.dice_scores import DiceScores

        scores = DiceScores()
        losses: list[float] = []
        counts: list[int] = []
        with evaluating(model):
            for batch in batches:
                inputs, targets = batch
                outputs = model(inputs.to(device))
                targets = targets.to(device)
                losses.append(float(self.loss(outputs, targets)))
                counts.append(len(targets))
                found = self.probabilities(outputs) > THRESHOLD
                scores.add(found, targets, getattr(batch, "origins", None))
        checks.whole("the number of batches to evaluate on", len(counts))
        return scores, losses, counts

    def write_examples(
        self, model: torch.nn.Module, data: SiteData, folder: Path, *, batch_size: int, device: Device, title: str
    ) -> bool:
        """By the Dice of an image, with the outlines of truth and of what was found."""
        from fairflare.tasks.scores import examples

        examples.write(examples.of_segmentation(self, model, data, batch_size, device), folder, self.names(), title)
        return True

    def names(self) -> list[str]:
        """Names of the structures."""
        return self.class_names or [f"class_{index + 1}" for index in range(self.num_classes)]

    def declared_metrics(self) -> tuple[Metric, ...]:
        names = self.names() if self.num_classes > 1 else []
        return (
            DICE,
            LOSS,
            VOLUME_DICE,
            *(Metric(name=f"dice_{name}", **OF_STRUCTURE) for name in names),
            *(Metric(name=f"volume_dice_{name}", **OF_STRUCTURE_IN_VOLUMES) for name in names),
        )

    def open_folder(self, site: str, own: SegmentationSite, datalist: Datalist) -> SiteData:
        coding = self.mask_values
        if own.mask_values is not None:
            coding = own.mask_values
            with setting_of(site):
                _check_reachable(self.structures, coding)
        return FolderData(self, datalist, coding, **own.memory())

    def open_phantom(self, site: str, own: SegmentationSite) -> SiteData:
        self.check_phantom_fits(site, "prostate", "one structure", self.num_classes == 1)
        seed = self.phantom_seed if own.phantom_seed is None else own.phantom_seed
        cases = self.phantom_cases if own.phantom_cases is None else own.phantom_cases
        return PhantomData(self, site, seed, cases)


class FolderData(FolderImages):
    """Images and masks of a site's folder."""

    task: SegmentationTask
    moves_targets = True

    def target_bytes(self) -> int:
        height, width = self.task.image_size
        return self.task.num_classes * height * width * (4 if self.task.mask_resize == "area" else 1)

    def transform(self, split: str) -> Compose:
        from fairflare.tasks.transforms import Read, with_masks

        task = self.task
        read = Read(self.site, split, self.max_image_bytes, how=self.reading)
        masks = self._structured(split)
        return with_masks(read, masks, task.in_channels, task.image_size, task.resize, task.mask_resize)

    def origins(self, split: str, indices: Sequence[int]) -> Sequence[Origin] | None:
        from fairflare.tasks.scores.dice_scores import Origin

        samples = [self.datalist.splits[split][index] for index in indices]
        own_size = self.task.evaluate_at == "image"
        if not own_size and all(sample.part_of is None for sample in samples):
            return None
        return [
            Origin(sample.part_of, partial(self._whole, split, sample) if own_size else None, self.task.resize)
            for sample in samples
        ]

    def _whole(self, split: str, sample: Sample) -> torch.Tensor:
        """A sample's targets at its own size."""
        from fairflare.data.reading import read_mask

        mask = read_mask(sample, site=self.site, split=split, max_bytes=self.max_image_bytes, how=self.reading)
        return self._structured(split).structures(mask, str(sample.label))

    def _structured(self, split: str) -> Structured:
        from fairflare.tasks.transforms import Structured

        return Structured("label", self.task.structures, self.coding, self.site, split, self.task.ignore)


class PhantomData(PhantomImages):
    """The synthetic prostate images of one site."""

    moves_targets = True

    def __init__(self, task: SegmentationTask, site: str, seed: int, cases: float) -> None:
        import torch

        from fairflare.data.phantoms import prostate_site

        super().__init__(task, site)
        self._splits: dict[str, Batch] = {}
        for split, arrays in prostate_site(site, image_size=task.image_size, seed=seed, cases=cases).items():
            images, masks = (torch.from_numpy(array) for array in arrays)
            self._splits[split] = images, masks
        self.describe("prostate phantom", {split: self.num_samples(split) for split in SPLITS})

    def num_samples(self, split: str) -> int:
        return len(self._splits[self.check_split(split)][0])

    def arrays(self, split: str) -> Batch:
        return self._splits[split]

    def cases(self, split: str) -> list[tuple[str, str]]:
        from fairflare.data.phantoms.prostate import SLICES

        return [("patient", str(index // SLICES)) for index in range(self.num_samples(split))]


def _check_reachable(structures: Sequence[Sequence[int]], mask_values: Mapping[int, int] | None) -> None:
    """Every structure has a label that masks can have; otherwise it would silently be empty everywhere."""
    for structure in structures:
        if mask_values is not None and not set(structure) & set(mask_values.values()):
            raise ValueError(f"mask_values gives no value to the structure {structure}, got {dict(mask_values)}")
