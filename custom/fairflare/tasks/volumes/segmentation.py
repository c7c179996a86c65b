"""Define the task of segmenting whole volumes: training on 3D patches, and sliding windows in evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from fairflare.base import checks
from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import BelowOne, Fraction, PositiveInt, settings
from fairflare.base.site_data import MOST_WINDOWS, UNLABELLED, VALIDATION_PATCHES
from fairflare.data.datalist import Datalist, Sample
from fairflare.data.image_file import image_file
from fairflare.data.intensity import counts_of
from fairflare.data.orientation import orient_view
from fairflare.data.whole_volumes import Whole, read_labels
from fairflare.tasks.base import Batches, SiteData, evaluating
from fairflare.tasks.images import Widths, read_all
from fairflare.tasks.scores.dice_scores import BatchOf, Origin
from fairflare.tasks.shared.structures import SegmentationSite, StructureTask
from fairflare.tasks.volumes.base import FolderVolumes, PhantomVolumes, VolumeData, VolumeSettings

if TYPE_CHECKING:
    import torch
    from monai.data import MetaTensor
    from monai.transforms import Compose

    from fairflare.base.task import Batch, Device
    from fairflare.data.decoded import Arrays
    from fairflare.tasks.transforms import Structured
    from fairflare.tasks.volumes.prepared import Prepared

RARE = -2.0  # initial bias of the outputs, as structures cover few voxels (Lin et al., focal loss, ICCV 2017, 3.3)
CUT = ("training", UNLABELLED)  # lists whose samples are patches
FIXED, HALF = 50, 0.5  # patches of each volume where validation is on fixed ones, and the share of them in structures
STEP = 16  # divisor of a side, which the network's poolings halve four times
Edge = Annotated[int, Field(strict=True, ge=32, multiple_of=STEP)]


@settings
class VolumeSegmentationTask(VolumeSettings, StructureTask):
    """Segment structures in whole volumes.

    The defaults are a tiny U-Net on patches of 32x32x32, quick enough for a laptop. A usual setting for organs in CT is
    ``spacing=(1.5, 1.5, 2.0), intensity="window", window=(40, 400), patch_size=(96, 96, 96),
    features=(32, 32, 64, 128, 256, 32), patches=4``; for MR ``intensity="zscore"`` or ``"percentile"``.

    Args:
        network: MONAI's ``"unet"`` (BasicUNet), ``"segresnet"`` or ``"swin_unetr"`` (windows of at least 64, multiples
            of 32).
        features: widths of the U-Net.
        width: width of the first stage of the other networks, as in ``segmentation``.
        norm: norms of the U-Net. ``"instance"``: over one patch, as with small batches and sites of other scanners;
            ``"layer"``: over all channels of a patch together, so that the network can tell a patch of one tissue from
            a patch of another, as values of CT allow; ``"batch"``: over a batch, whose statistics are averaged over
            sites.
        patch_size: voxels of a training patch and of the window in evaluation; multiples of 16, at least 32.
        patches: number of patches of each volume in an epoch. Each patch counts as one training sample.
        foreground: share of the patches whose middle lies in a structure, where there is one.
        overlap: share of a window that overlaps with the next one in evaluation.
        windows: number of windows that the network gets at once in evaluation.
    """

    uncounted: ClassVar[bool] = True  # padding, up to a multiple of ``divisor``, does not count
    divisor: ClassVar[int] = STEP  # of the sides of a volume
    scaled: ClassVar[bool] = True  # whether values of images are in [0, 1]
    by_batch: ClassVar[bool] = False  # whether the last patches of each batch lie in structures, not some by chance
    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "augmentation": only_with("augment"),
        "features": only_with("network", "unet"),
        "norm": only_with("network", "unet"),
        "norm_momentum": only_with("norm", "batch"),
        "width": only_with("network", "swin_unetr", "segresnet"),
    }

    network: Literal["unet", "swin_unetr", "segresnet"] = "unet"
    features: Widths = (8, 8, 16, 32, 64, 8)
    width: PositiveInt | None = None
    norm: Literal["instance", "layer", "batch"] = "instance"
    patch_size: tuple[Edge, Edge, Edge] = (32, 32, 32)
    patches: PositiveInt = 4
    foreground: Fraction = 0.5
    overlap: BelowOne = 0.25
    windows: PositiveInt = 4

    @property
    def image_size(self) -> tuple[int, ...]:  # type: ignore[override]
        """Return the size of the patches that the network is trained on, in voxels."""
        return self.patch_size

    def build_unet(self) -> torch.nn.Module:
        import torch

        model: Any = super().build_unet()
        torch.nn.init.constant_(model.final_conv.bias, RARE)
        return model

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the Dice loss and the mean binary cross-entropy of the voxels, with equal weights.

        The Dice is that of the batch, as in nnU-Net (Isensee et al., 2021): what is found wrongly in a patch without
        the structure then counts, too.
        """
        from monai.losses.dice import DiceLoss

        return (
            DiceLoss(sigmoid=True, batch=True)(*self.select_counted(outputs, targets))
            + cross_entropies(self.chosen(outputs), self.chosen(targets)).mean()
        )

    def structure_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        import torch

        return super().structure_losses(outputs, targets) + torch.stack(
            [cross_entropies(outputs[:, [k]], targets[:, [k]]).mean() for k in self.known(range(self.num_classes))]
        )

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of Dice loss and binary cross-entropy for each patch or volume, (n,)."""
        return super().sample_losses(outputs, targets) + cross_entropies(self.chosen(outputs), self.chosen(targets))

    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs (n, structures, x, y, z) of overlapping windows, whose middle has most weight (Gaussian).

        The outputs are summed in the machine's memory if they would fill more than a quarter of a GPU's. A GPU without
        room for so many windows at a time gets half of them, until one is left.
        """
        import torch
        from monai.inferers.inferer import SlidingWindowInferer

        size = inputs[:, 0].numel() * self.num_classes * torch.float32.itemsize
        gpu = inputs.is_cuda and size > torch.cuda.get_device_properties(inputs.device).total_memory / 4
        at_once = self.windows
        while True:
            window = SlidingWindowInferer(
                self.patch_size, at_once, self.overlap, mode="gaussian", device="cpu" if gpu else None
            )
            try:
                return window(inputs, model)
            except torch.cuda.OutOfMemoryError:
                if at_once == 1:
                    raise
                torch.cuda.empty_cache()
                at_once //= 2

    def windows_in(self, shape: Sequence[float]) -> int:
        """Return the number of sliding windows of a volume with this number of voxels along each axis."""
        return math.prod(
            1 + math.ceil((by * math.ceil(max(length, edge) / by) - edge) / max(1, int(edge * (1 - self.overlap))))
            for length, edge, by in zip(shape, self.patch_size, [self.divisor] * 3, strict=True)
        )

    def costs(self, model: torch.nn.Module, data: SiteData, device: Device, samples: int) -> dict[str, Any]:
        import torch

        shapes = data.shapes("validation") if hasattr(data, "shapes") else []
        if not shapes or not data.num_samples("training"):
            return {}
        inputs, targets = next(iter(data.batches("training", batch_size=1, shuffle_seed=0)))
        seconds: list[float] = []
        for work in (
            lambda: next(iter(data.batches("training", batch_size=1, shuffle_seed=0))),
            lambda: self.loss(model(inputs.to(device)), targets.to(device)).backward(),
            lambda: self.outputs(model, inputs.to(device)).sum().item(),
        ):
            started = time.monotonic()
            with evaluating(model), torch.set_grad_enabled(len(seconds) == 1):
                work()
            seconds.append(time.monotonic() - started)
        model.zero_grad(set_to_none=True)
        windows = [self.windows_in(shape) for shape in shapes]
        validated = FIXED * len(windows) if max(windows) > MOST_WINDOWS else sum(windows)
        return {
            "windows": [max(windows), max(self.windows_in([length / 2 for length in shape]) for shape in shapes)],
            "seconds": [round(s * n, 3) for s, n in zip(seconds, (samples, samples, validated), strict=True)],
        }

    def changes(self) -> Compose:
        """Return the random changes of ``augment=True`` to a patch and its targets."""
        from fairflare.tasks.batches import changes

        return changes(self.augmentation, size=self.patch_size, with_targets=True)

    def training_settings(self, given: Collection[str] = ()) -> dict[str, Any]:
        """Return settings of local training with small batches and a larger learning rate.

        Sites have few volumes, so that a round with large batches would have few steps. With ``norm="layer"`` the rate
        falls to 0 in the last step, as nnU-Net's: with one that stays, the model of one round marked healthy tissue and
        that of the next did not.
        """
        return {"batch_size": 2, "learning_rate": 0.003} | ({"schedule": "poly"} if self.norm == "layer" else {})

    def fit_size(self, image: MetaTensor) -> MetaTensor:
        """Pad a volume at least to the size of a patch, and to a multiple of ``divisor`` voxels along each axis."""
        from monai.transforms import DivisiblePad, SpatialPad

        return cast("MetaTensor", DivisiblePad(self.divisor)(SpatialPad(self.patch_size)(image)))

    def targets(self, whole: Whole, structured: Structured, sample: Sample, site: str) -> torch.Tensor:
        """Return the targets of a volume, (structures, x, y, z) int8: 0, 1, or -1 where a voxel does not count."""
        import torch
        from monai.data import MetaTensor

        mask = np.zeros(whole.image.shape[1:], np.uint8) if whole.mask is None else whole.mask
        meaning = {} if sample.label is None else structured.meaning(counts_of(mask), str(sample.label))
        placed = self.regrid(mask[None], whole.affine, str(sample.label), site, nearest=True)
        inside = structured.inside(placed.as_tensor()[0].numpy(), meaning).to(torch.int8)
        # Padding must become -1 (ignored). Padding adds zeros, so targets are shifted by 1 before, and back afterwards.
        return self.fit_size(MetaTensor(inside.add_(1), affine=placed.affine)).as_tensor().sub_(1)

    def open_folder(self, site: str, own: SegmentationSite, datalist: Datalist) -> SiteData:
        return FolderPatches(self, datalist, self.coding_of(site, own), **own.memory())

    def open_phantom(self, site: str, own: SegmentationSite) -> SiteData:
        self.check_phantom_fits(site, "abdomen", "the structures organ and lesion", self.num_classes <= 2)
        return PhantomPatches(self, site, *self.seed_cases(own), "abdomen phantom")


class _Patches(VolumeData):
    """Define data of patches cut from the training volumes; other splits have whole volumes, one in each batch."""

    task: VolumeSegmentationTask
    moves_targets = True

    def volume(self, split: str, index: int) -> Prepared:
        """Return a prepared volume of a split."""
        from fairflare.tasks.volumes.prepared import Prepared

        return Prepared(**self.parts(split, index))

    def item(self, split: str, index: int) -> Mapping[str, Any]:
        volume = self.volume(split, index)
        return {"image": volume.whole("image"), "label": volume.whole("label"), "spacing": volume.origin.spacing}

    def prepare_volume(self, whole: Whole, sample: Sample, structured: Structured) -> Arrays:
        """Return a volume and its targets as the task's networks get them, as parts of :class:`Prepared`."""
        from fairflare.tasks.volumes.prepared import prepare_parts

        targets = self.task.targets(whole, structured, sample, self.site)  # first, as more is in memory after the image
        image = self.task.place_volume(whole, sample.image.name, self.site)
        return prepare_parts(image.numpy(), targets.numpy(), () if whole.affine is None else image.pixdim.tolist())

    def num_samples(self, split: str) -> int:
        return super().num_samples(split) * (self.task.patches if split in CUT else 1)  # type: ignore[safe-super]

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        from fairflare.tasks.batches import Augmented, load_batches

        checks.whole("batch_size", batch_size)
        if split == VALIDATION_PATCHES:
            return self._cut("validation", range(FIXED * self.num_samples("validation")), batch_size, 0, FIXED, HALF)
        order = self.order(self.check_split(split), shuffle_seed)
        if split not in CUT:
            return load_batches(order, 1, partial(self._whole, split))
        inside = 0.0 if split == UNLABELLED else self.task.foreground
        batches = self._cut(split, order, batch_size, shuffle_seed or 0, self.task.patches, inside)
        if not augment or not self.task.augmentation:
            return batches
        seed = checks.whole("shuffle_seed of augmented batches", shuffle_seed, low=0)
        return Augmented(batches, self.task.changes(), seed, with_targets=True, scaled=self.task.scaled)

    def _whole(self, split: str, indices: Sequence[int]) -> Batch:
        """Return a whole volume as a batch, with the size of its voxels; one, since their sizes differ."""
        (volume,) = [self.volume(split, index) for index in indices]
        return BatchOf(volume.whole("image")[None], volume.whole("label")[None].float(), [volume.origin])

    def _cut(self, split: str, order: Sequence[int], size: int, seed: int, each: int, inside: float) -> Batches:
        """Return batches of random patches, which are the same for the same seed whatever the batch size.

        Args:
            split, order, size: the list, numbers of its patches, and how many of them are a batch.
            seed: seed of their places.
            each: number of patches of each volume.
            inside: share of the patches whose middle lies in a structure.
        """
        from fairflare.tasks.batches import load_batches

        draws = np.random.default_rng(seed).random((len(order), 6))
        if self.task.by_batch:
            draws[:, 0] = np.arange(len(order)) % size < round(size * (1 - inside))
        places = [*zip((number // each for number in order), draws.tolist(), strict=True)]
        return load_batches(places, size, partial(self._patches, split, inside))

    def _patches(self, split: str, inside: float, places: Sequence[tuple[int, list[float]]]) -> Batch:
        import torch

        def patch(number: int) -> tuple[torch.Tensor, torch.Tensor, Origin]:
            index, draws = places[number]
            size, volume = self.task.patch_size, self.volume(split, index)
            start = volume.start(draws, inside, size)
            return (
                volume.cut("image", start, size), volume.cut("label", start, size),
                replace(volume.origin, volume=str(index)),
            )  # fmt: skip

        patches = read_all(patch, range(len(places)), getattr(self, "num_workers", 0))
        inputs, targets, origins = zip(*patches.values(), strict=True)
        return BatchOf(torch.stack(inputs), torch.stack(targets).float(), origins)


class FolderPatches(_Patches, FolderVolumes):
    """Read the volumes and masks of a site's folder, and cut training patches."""

    def cases(self, split: str) -> list[tuple[str, str]]:
        return self.repeat_by_sample(split, FolderVolumes.cases(self, split))

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return self.repeat_by_sample(split, FolderVolumes.group_numbers(self, split, attribute))

    def shapes(self, split: str) -> list[list[float]]:
        """Return the number of voxels along each axis of a split's volumes, in the task's spacing, by their headers."""
        found = []
        for sample in self.datalist.splits[self.check_split(split)]:
            grid, codes = image_file(sample.image).facts().grid, self.task.orientation
            view, affine = orient_view(np.broadcast_to(np.True_, grid.shape), grid.affine, codes)
            ratio = 1.0 if self.task.spacing is None else np.linalg.norm(affine[:3, :3], axis=0) / self.task.spacing
            # Rounded: what a header's float32 adds to a spacing is no further voxel.
            found.append(np.round(np.multiply(view.shape, ratio), 3).tolist())
        return found

    def list_labels(self, sample: Sample, split: str) -> list[int]:
        counts = counts_of(read_labels(sample, self.site, split, self.max_image_bytes, self.reading))
        meaning = self.task.structure_masks(self.coding, self.site, split).meaning(counts, str(sample.label))
        return [number for number, labels in enumerate(self.task.structures) if {*meaning.values()} & {*labels}]

    def repeat_by_sample(self, split: str, values: list[Any]) -> list[Any]:
        """Repeat each volume's value for its training patches; in other splits a volume is one sample."""
        return [value for value in values for _ in range(self.task.patches)] if split in CUT else values

    def prepare(self, split: str, sample: Sample) -> Arrays:
        structured = self.task.structure_masks(self.coding, self.site, split)
        return self.prepare_volume(self.read_sample(sample, split), sample, structured)


class PhantomPatches(_Patches, PhantomVolumes):
    """Hold the synthetic abdomens and masks of one site, and cut training patches."""

    def cases(self, split: str) -> list[tuple[str, str]]:
        each = self.task.patches if split == "training" else 1
        return [("patient", str(index // each)) for index in range(self.num_samples(split))]

    def keep_arrays(self, volume: Any, whole: Whole) -> Arrays:
        from fairflare.tasks.transforms import Structured

        nested = self.task.labels is None and not self.task.exclusive
        labels = [[1, 2], [2]][: self.task.num_classes] if nested else self.task.structures
        return self.prepare_volume(
            whole,
            Sample(Path("phantom"), Path("phantom")),
            Structured(labels, {0: 0, 1: 1, 2: 2}, self.site, "none", self.task.ignore),
        )


def cross_entropies(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the binary cross-entropy of each sample, (n,), the mean over the voxels that count (targets >= 0).

    The value is 0 for a sample in which no voxel counts.
    """
    from torch.nn.functional import binary_cross_entropy_with_logits

    counts = (targets >= 0).to(outputs.dtype)
    every = binary_cross_entropy_with_logits(outputs, targets.clamp(min=0), counts, reduction="none")
    return every.flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)
