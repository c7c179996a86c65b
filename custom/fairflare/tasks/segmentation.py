"""Define the task of segmenting 2D images: MONAI's networks, Dice loss; a site's own images or a phantom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import Flag, Fraction, PositiveInt, settings
from fairflare.base.site_data import UNLABELLED
from fairflare.data.datalist import SPLITS, Datalist, Sample
from fairflare.data.listing.attributes import UNKNOWN
from fairflare.data.sources import source
from fairflare.data.whole_volumes import read_image, read_pair
from fairflare.tasks.base import SiteData
from fairflare.tasks.images import (
    Augmentations,
    FolderImages,
    Grey,
    PhantomImages,
    Preprocessing,
    Widths,
    describe_drawn,
)
from fairflare.tasks.shared.structures import SegmentationSite, StructureTask

if TYPE_CHECKING:
    import torch

    from fairflare.base.task import Batch
    from fairflare.tasks.scores.dice_scores import Origin

Side = Annotated[int, Field(strict=True, ge=32, multiple_of=16)]


@settings
class SegmentationTask(Preprocessing, StructureTask):
    """Segment structures in 2D images with a U-Net.

    The defaults are a small network on 64x64 grey images, quick enough for a laptop. The setting of the
    Fed-LWR paper is ``image_size=(384, 384), in_channels=3, features=(32, 64, 128, 256, 512, 32),
    norm_momentum=0.1``.

    Every output channel is one structure with its own sigmoid, so structures may lie inside each other.

    Args:
        image_size: height and width that images are resized to; multiples of 16, at least 32.
        in_channels: 1 (colour images become luminance) or 3 (grey images are repeated).
        mask_resize: ``"nearest"``: a pixel of the network belongs to a structure or not; ``"area"``: by the share that
            the structure covers, so that what is smaller than a pixel is not lost.
        evaluate_at: Dice at the size of the ``"network"``, or of the ``"image"``: what is found is brought back to it
            and compared with the mask as it is in the file. The loss is always that of the network's size.
        network: ``"unet"``, or MONAI's ``"swin_unetr"`` (sides of at least 64, multiples of 32) or ``"segresnet"``.
        features: widths of the U-Net, as in :class:`monai.networks.nets.BasicUNet`.
        width: width of other networks' first stage (``swin_unetr``: a multiple of 12, default 24; ``segresnet``: of
            8, default 16).
        augmentation: random changes of ``augment=True``: ``"flip"``, ``"affine"``, ``"intensity"`` (ours); the papers'
            ``"flip_vertical"``, ``"blur"``, ``"rotate"`` (10 degrees), ``"shift"`` (2 %), ``"one_move"``, ``"jitter"``.
        attributes: declare the phantom's ``zone`` (small, enlarged), which runs may ask for as ``groups``. Own images
            declare theirs in the datalist.
        attribute_noise: share of the phantom's patients with an enlarged zone of whom one half of the gland is
            outlined, in all splits: no model can tell whose.
    """

    under_dp: ClassVar[bool] = True  # the loss of an image does not depend on other images
    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "features": only_with("network", "unet"),
        "norm_momentum": only_with("network", "unet"),
        "width": only_with("network", "swin_unetr", "segresnet"),
        "attribute_noise": only_with("attributes"),
    }

    image_size: tuple[Side, Side] = (64, 64)
    in_channels: Grey = 1
    mask_resize: Literal["nearest", "area"] = "nearest"
    evaluate_at: Literal["network", "image"] = "network"
    network: Literal["unet", "swin_unetr", "segresnet"] = "unet"
    features: Widths = (16, 16, 32, 64, 128, 16)
    width: PositiveInt | None = None
    augmentation: Augmentations = ("flip", "affine", "intensity")
    attributes: Flag = False
    attribute_noise: Fraction = 0.0

    @property
    def uncounted(self) -> bool:  # type: ignore[override]
        return self.resize == "pad"

    def open_folder(self, site: str, own: SegmentationSite, datalist: Datalist) -> SiteData:
        return FolderData(self, datalist, self.coding_of(site, own), **own.memory())

    def open_phantom(self, site: str, own: SegmentationSite) -> SiteData:
        self.check_phantom_fits(site, "prostate", "one structure", self.num_classes == 1)
        return PhantomData(self, site, *self.seed_cases(own))


class FolderData(FolderImages):
    """Read the 2D images and masks of a site's folder."""

    task: SegmentationTask
    moves_targets = True

    def prepare(self, split: str, sample: Sample) -> Mapping[str, Any]:
        from fairflare.tasks.placing import masks_placed
        from fairflare.tasks.transforms import prepare_image

        task = self.task
        structured = task.structure_masks(self.coding, self.site, split)
        if sample.label is None:  # nobody reads the target of an image without a label
            image = read_image(sample, **self.read_arguments(split))
            masks = structured.inside(np.zeros(image.shape[:2], np.uint8), {})
        else:
            image, mask = read_pair(sample, **self.read_arguments(split))
            masks = structured.structures(mask, str(sample.label))  # before resizing, which could hide a wrong value
        return {
            "image": prepare_image(image, task.in_channels, task.image_size, task.resize),
            "label": masks_placed(masks, task.image_size, task.resize, task.mask_resize),
        }

    def origins(self, split: str, indices: Sequence[int]) -> Sequence[Origin] | None:
        from fairflare.tasks.scores.dice_scores import Origin

        samples = [self.datalist.splits[split][index] for index in indices]
        own_size = self.task.evaluate_at == "image"
        if split == UNLABELLED or (not own_size and all(sample.part_of is None for sample in samples)):
            return None
        # The spacing is the size of the file's pixels. It is valid at the image's own size, not at the network's.
        return [
            Origin(
                sample.part_of, partial(self._whole, split, sample) if own_size else None, self.task.resize,
                sample.spacing if own_size else None,
            ) for sample in samples
        ]  # fmt: skip

    def list_labels(self, sample: Sample, split: str) -> list[int]:
        return (self._whole(split, sample) > 0).flatten(1).any(1).nonzero().flatten().tolist()

    def _whole(self, split: str, sample: Sample) -> torch.Tensor:
        """Return the targets of a sample at the image's own size, (structures, height, width)."""
        from fairflare.data.reading import read_mask

        mask = read_mask(sample, **self.read_arguments(split))
        return self.task.structure_masks(self.coding, self.site, split).structures(mask, str(sample.label))


class PhantomData(PhantomImages):
    """Hold the synthetic prostate images and masks of one site."""

    moves_targets = True

    def __init__(self, task: SegmentationTask, site: str, seed: int, cases: float) -> None:
        import torch

        super().__init__(task, site)
        phantom, (height, width) = source("prostate"), task.image_size
        self._splits: dict[str, Batch] = {}
        self._zones: dict[str, list[int]] = {}
        self.attributes = {phantom.ATTRIBUTE: (*phantom.ZONES, UNKNOWN)} if task.attributes else {}
        drawn = phantom.patients(
            site, size=(width, height, phantom.SLICES), seed=seed, cases=cases, halved=task.attribute_noise,
            channels=len(task.channels or "1"),
        )  # fmt: skip
        for split, patients in drawn.items():
            volumes = ([patient.image for patient in patients], [patient.label[None] for patient in patients])
            images, masks = (
                torch.from_numpy(np.concatenate([np.moveaxis(v.T, 3, 1) for v in part])) for part in volumes
            )
            self._splits[split] = images, masks
            self._zones[split] = np.repeat([patient.group for patient in patients], phantom.SLICES).tolist()
        self.description = describe_drawn("prostate phantom", {split: self.num_samples(split) for split in SPLITS})

    def num_samples(self, split: str) -> int:
        return len(self._splits[self.check_split(split)][0])

    def arrays(self, split: str) -> Batch:
        return self._splits[split]

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return self._zones[self.check_split(split)]

    def cases(self, split: str) -> list[tuple[str, str]]:
        return [("patient", str(index // source("prostate").SLICES)) for index in range(self.num_samples(split))]
