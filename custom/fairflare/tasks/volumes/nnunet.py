"""Define the task of segmenting whole volumes as nnU-Net does, by one plan for all sites."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fairflare.base.checks import refuse
from fairflare.base.settings import BelowOne, Fraction, settings
from fairflare.core.plans.rules import resampled_size
from fairflare.tasks.volumes.fingerprint import crop_zeros
from fairflare.tasks.volumes.plan_file import NnUNetPlan, read_plan
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask, cross_entropies

if TYPE_CHECKING:
    import torch
    from monai.data import MetaTensor
    from monai.transforms import Compose

    from fairflare.data.datalist import Sample
    from fairflare.data.decoded import DecodedVolumes
    from fairflare.data.reading import Reading
    from fairflare.data.whole_volumes import Whole
    from fairflare.tasks.transforms import Structured

SMOOTH = 1e-5  # added to both parts of the Dice
LEAST_DEVIATION = 1e-8  # smallest standard deviation by which an image is divided
STEPS = 25  # optimizer steps of a quick round; an epoch of nnU-Net has 250
FLAT = 3  # ratio of a patch's sides from which volumes are turned and scaled in the plane alone


@settings
class NnUNetTask(VolumeSegmentationTask):
    """Segment structures in whole volumes with nnU-Net's network, intensities, patches, augmentation and loss.

    Args:
        plan: a plan of `fairflare plan`, or nnU-Net's ``nnUNetPlans.json``: the file's path, or its content.
        output: ``"sigmoid"``: each structure by itself, so that structures may lie inside each other, and sites may
            annotate different ones; ``"softmax"``: of the background and structures, which exclude each other.

    Source:
        Isensee et al., Nature Methods 18 (2021), and nnU-Net 2.8; what differs: ``docs/nnunet.md``.
    """

    if not TYPE_CHECKING:  # what the plan decides is no setting
        network: ClassVar[str] = "unet"
        features: ClassVar[tuple[int, ...]] = ()
        width: ClassVar[None] = None
        norm: ClassVar[str] = "instance"
        norm_momentum: ClassVar[float] = 0.1
        intensity: ClassVar[str] = "auto"
        window: ClassVar[None] = None
        augmentation: ClassVar[tuple[str, ...]] = ("nnunet",)
        patch_size: ClassVar[Any] = property(lambda self: self.planned.full.patch_size)
        spacing: ClassVar[Any] = property(lambda self: self.planned.full.spacing)
        orientation: ClassVar[Any] = property(lambda self: self.planned.axes)
        exclusive: ClassVar[Any] = property(lambda self: self.output == "softmax")

    divisor: ClassVar[int] = 1
    scaled: ClassVar[bool] = False
    by_batch: ClassVar[bool] = True
    acts: ClassVar[dict[str, Any]] = {
        name: beside for name, beside in VolumeSegmentationTask.acts.items() if name == "tolerance"
    }

    plan: dict[str, Any] | str
    output: Literal["sigmoid", "softmax"] = "sigmoid"
    foreground: Fraction = 1 / 3
    overlap: BelowOne = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.plan, str):
            try:
                self.plan = json.loads(Path(self.plan).read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(f"plan {self.plan!r} cannot be read as JSON: {error}") from None
        channels = len(self.planned.full.normalization_schemes)
        super().__post_init__()
        refuse({
            f"plan is for {channels} channel(s), and the run has channels={list(self.channels or ())}; name as many":
                channels != self.in_channels,
            f"output=softmax needs structures without a common label, got labels={self.structures}; name each "
            "label once, or set output=sigmoid":
                self.exclusive and len(set().union(*self.structures)) < sum(len({*one}) for one in self.structures),
        })  # fmt: skip

    @cached_property
    def planned(self) -> NnUNetPlan:
        """Return the plan."""
        return read_plan(self.plan)

    @property
    def intensities(self) -> str:
        return f"each channel as the plan says: {', '.join(self.planned.full.normalization_schemes)}"

    def reading(self, kept: DecodedVolumes | None = None) -> Reading:
        return replace(super().reading(kept), intensity="raw", window=None)

    def definition(self) -> dict[str, Any]:
        raise ValueError("nnU-Net's network is none of MONAI's; write the model as nnunet, torchscript or onnx")

    def build_unet(self) -> torch.nn.Module:
        from fairflare.tasks.volumes.plain_unet import PlainUNet

        return PlainUNet(self.in_channels, self.num_classes + self.exclusive, **self.planned.full.network)

    def output_tensors(self) -> Sequence[str]:
        """Return the names of the tensors of all outputs, one layer for each resolution."""
        heads = range(len(self.planned.full.network["strides"]) - 1)
        return [f"decoder.seg_layers.{head}.{kind}" for head in heads for kind in ("weight", "bias")]

    def training_settings(self, given: Collection[str] = ()) -> dict[str, Any]:
        """Return nnU-Net's settings of training; a round has 25 steps, where its epoch has 250."""
        return {
            "optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.99, "weight_decay": 3e-5, "max_grad_norm": 12.0,
            "schedule": "poly", "batch_size": self.planned.full.batch_size, "local_epochs": 1, "local_steps": STEPS,
            "augment": True,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------ volumes

    def place_volume(self, volume: Whole, name: str, site: str = "predict") -> MetaTensor:
        """Return a volume (channels, x, y, z) without its edge of zeros, standardised and on the plan's grid."""
        from scipy.ndimage import binary_fill_holes

        volume = crop_zeros(volume)
        inside = binary_fill_holes((volume.image != 0).any(0))
        image = np.stack([self._standardise(number, values, inside) for number, values in enumerate(volume.image)])
        return self.fit_size(self.regrid(image, volume.affine, name, site))

    def zoom(self, image: MetaTensor, nearest: bool) -> MetaTensor:
        """Return a volume with nnU-Net's number of voxels, which fill the same space."""
        import torch
        from monai.data import MetaTensor
        from torch.nn.functional import interpolate

        size = resampled_size(image.shape[1:], image.pixdim.tolist(), self.planned.full.spacing)
        how: Any = {"mode": "nearest-exact"} if nearest else {"mode": "trilinear", "align_corners": False}
        step = torch.tensor(image.shape[1:]).double() / torch.tensor(size)
        lies = torch.eye(4).double()
        lies[:3] = torch.cat([step.diag(), (step[:, None] - 1) / 2], 1)
        values = interpolate(image.as_tensor()[None].float(), size, **how)[0].to(image.dtype)
        return MetaTensor(values, affine=image.affine @ lies)

    def extent(self, whole: Whole) -> MetaTensor:
        """Return 1 where the network's input is of the volume, and 0 where it is padded, (1, x, y, z)."""
        volume = crop_zeros(whole)
        return self.fit_size(self.regrid(np.ones_like(volume.image[:1]), volume.affine, "", "predict"))

    def targets(self, whole: Whole, structured: Structured, sample: Sample, site: str) -> torch.Tensor:
        return super().targets(crop_zeros(whole), structured, sample, site)

    def _standardise(
        self, number: int, values: np.ndarray[Any, Any], inside: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        of = self.planned.foreground.get(number)
        if of is not None:
            clipped = np.clip(values, of.percentile_00_5, of.percentile_99_5)
            return (clipped - np.float32(of.mean)) / np.float32(max(of.std, LEAST_DEVIATION))
        counts = inside if self.planned.full.use_mask_for_norm[number] else np.ones((1, 1, 1), bool)
        if not inside.any():
            return np.zeros_like(values)
        mean, spread = (float(of(values, where=counts, dtype=np.float64)) for of in (np.mean, np.std))
        return np.where(counts, (values - np.float32(mean)) / np.float32(max(spread, LEAST_DEVIATION)), np.float32(0))

    def changes(self) -> Compose:
        """Return nnU-Net's random changes of a patch; where slices are thick, a patch is turned in their plane alone.

        Source:
            Isensee et al. (2021), supplementary note 4, by MONAI's transforms.
        """
        from math import radians

        from monai.transforms import (
            Compose,
            RandAdjustContrastd,
            RandAffined,
            RandFlipd,
            RandGaussianNoised,
            RandGaussianSmoothd,
            RandScaleIntensityd,
            RandScaleIntensityFixedMeand,
            RandSimulateLowResolutiond,
        )

        both: Any = {"keys": ("image", "label"), "mode": ("bilinear", "nearest"), "padding_mode": "zeros"}
        flat, turn, scale = max(self.patch_size) / self.patch_size[0] > FLAT, radians(30), (-0.3, 0.4)
        return Compose([
            RandAffined(prob=0.2, rotate_range=[radians(180), 0, 0] if flat else [turn] * 3, cache_grid=False, **both),
            RandAffined(prob=0.2, scale_range=[(0, 0) if flat else scale, scale, scale], cache_grid=False, **both),
            RandGaussianNoised("image", prob=0.1, std=0.1**0.5),
            RandGaussianSmoothd("image", prob=0.2, sigma_x=(0.5, 1.0), sigma_y=(0.5, 1.0), sigma_z=(0.5, 1.0)),
            RandScaleIntensityd("image", prob=0.15, factors=0.25),
            RandScaleIntensityFixedMeand("image", prob=0.15, factors=0.25, preserve_range=True),
            RandSimulateLowResolutiond("image", prob=0.25, zoom_range=(0.5, 1.0)),
            RandAdjustContrastd("image", prob=0.1, gamma=(0.7, 1.5), invert_image=True, retain_stats=True),
            RandAdjustContrastd("image", prob=0.3, gamma=(0.7, 1.5), retain_stats=True),
            *(RandFlipd(keys=both["keys"], prob=0.5, spatial_axis=axis) for axis in range(3)),
        ])  # fmt: skip

    # ------------------------------------------------------------------------------------------------ the loss

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean of Dice loss and cross-entropy over the resolutions, each with half the weight.

        The Dice is that of the whole batch where the plan says so; the coarsest resolution does not count.
        """
        dims = [0, 2, 3, 4] if self.planned.full.batch_dice else [2, 3, 4]
        return sum(
            weight * (self._dice_losses(head, aims, dims).mean() + self._entropies(head, aims).mean())
            for weight, head, aims in resolutions(outputs, targets)
        )  # type: ignore[return-value]

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each patch, (n,), with the Dice of each patch alone."""
        return sum(
            weight * (self._dice_losses(head, aims, [2, 3, 4]).mean(1) + self._entropies(head, aims))
            for weight, head, aims in resolutions(outputs, targets)
        )  # type: ignore[return-value]

    def structure_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        import torch

        entropies = [
            (
                self._entropies(outputs, targets)
                if self.exclusive
                else cross_entropies(outputs[:, [k]], targets[:, [k]])
            ).mean()
            for k in self.known(range(self.num_classes))
        ]
        return self._dice_losses(outputs, targets, [2, 3, 4]).mean(0) + torch.stack(entropies)

    def _entropies(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        entropies = entropies_of_classes if self.exclusive else cross_entropies
        return entropies(self.chosen(outputs), self.chosen(targets))

    def _dice_losses(self, outputs: torch.Tensor, targets: torch.Tensor, dims: list[int]) -> torch.Tensor:
        """Return 1 - Dice of the annotated structures, summed over the given axes."""
        probable, targets = self.chosen(self.probabilities(outputs)), self.chosen(targets)
        probable, targets = probable.masked_fill(targets < 0, 0), targets.clamp(min=0)
        return 1 - (2 * (probable * targets).sum(dims) + SMOOTH) / (probable.sum(dims) + targets.sum(dims) + SMOOTH)


def entropies_of_classes(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each sample, (n,), the mean over the voxels that count (targets >= 0).

    Args:
        outputs: (n, 1 + structures, x, y, z), of the background first.
        targets: (n, structures, x, y, z).
    """
    from torch.nn.functional import cross_entropy, pad

    # Beside a background of 0 the largest target is that of the structure; what does not count is -1 in all of them.
    labels = pad(targets, (0, 0, 0, 0, 0, 0, 1, 0)).argmax(1).masked_fill(targets[:, 0] < 0, -1)
    each = cross_entropy(outputs, labels, ignore_index=-1, reduction="none")
    return each.flatten(1).sum(1) / (labels >= 0).flatten(1).sum(1).clamp(min=1)


def resolutions(outputs: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[float, torch.Tensor, torch.Tensor]]:
    """Yield weight, outputs and targets of each resolution that counts; targets are brought down by nearest voxels."""
    from torch.nn.functional import interpolate

    heads = [outputs, *vars(outputs).get("coarser", ())]
    heads = heads[:-1] or heads
    weights = [0.5**number for number in range(len(heads))]
    for weight, head in zip(weights, heads, strict=True):
        size = head.shape[2:]
        aims = targets if size == targets.shape[2:] else interpolate(targets, size, mode="nearest-exact")
        yield weight / sum(weights), head, aims
