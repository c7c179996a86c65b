"""Define the task of classifying whole volumes by MONAI's ResNet-18, DenseNet121 or ViT in 3D."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import Field

from fairflare.base.settings import settings
from fairflare.data.datalist import Datalist, Sample
from fairflare.tasks.base import SiteData
from fairflare.tasks.images import Factor
from fairflare.tasks.shared.classes import ClassSite, ClassTask, LabelledImages
from fairflare.tasks.volumes.base import FolderVolumes, PhantomVolumes, VolumeSettings

if TYPE_CHECKING:
    import torch
    from monai.data import MetaTensor

    from fairflare.data.decoded import Arrays
    from fairflare.data.whole_volumes import Whole

LESION = 2  # label of lesions in the phantom's masks
Edge = Annotated[int, Field(strict=True, ge=32)]


@settings
class VolumeClassificationTask(VolumeSettings, ClassTask):
    """Classify whole volumes.

    The defaults are a narrow ResNet-18 on 32x32x32 voxels, quick enough for a laptop. The synthetic data ask whether
    there is a lesion.

    Args:
        network: MONAI's ``"resnet18"`` or ``"densenet121"``; or a vision transformer, as in ``classification``.
        patch_size: side of the patches of a vision transformer; divides ``volume_size``.
        volume_size: voxels that the network gets, at least 32 along each axis. With ``spacing`` volumes are padded and
            cut around their middle to it, else stretched.
        phantom_cases: factor on the number of synthetic patients.
    """

    drawn_classes: ClassVar[tuple[str, ...]] = ("no_lesion", "lesion")

    volume_size: tuple[Edge, Edge, Edge] = (32, 32, 32)
    phantom_cases: Factor = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sides("volume_size", self.volume_size)

    @property
    def image_size(self) -> tuple[int, ...]:  # type: ignore[override]
        """Return the size of the network's inputs, in voxels."""
        return self.volume_size

    def fit_size(self, image: MetaTensor) -> MetaTensor:
        from monai.transforms import Resize, ResizeWithPadOrCrop

        if self.spacing is None:
            return cast("MetaTensor", Resize(self.volume_size, mode="trilinear", anti_aliasing=False)(image))
        return cast("MetaTensor", ResizeWithPadOrCrop(self.volume_size)(image))

    def open_folder(self, site: str, settings: ClassSite, datalist: Datalist) -> SiteData:
        self.check_classes(site, settings, datalist)
        return FolderVolumeClasses(self, datalist, settings.class_numbers, **settings.memory())

    def open_phantom(self, site: str, settings: ClassSite) -> SiteData:
        self.check_phantom_fits(site, "abdomen", "2 classes", self.classes == len(self.drawn_classes))
        return PhantomVolumeClasses(
            self, site, settings.seed_or(self.phantom_seed), self.phantom_cases, "abdomen phantom"
        )


class FolderVolumeClasses(FolderVolumes, LabelledImages):
    """Read the volumes of a site's folder, each with the number of its class."""

    def prepare(self, split: str, sample: Sample) -> Arrays:
        return {"image": self.task.place_volume(self.read_sample(sample, split), sample.image.name, self.site).numpy()}

    def parts(self, split: str, index: int) -> Arrays:
        sample = self.datalist.splits[split][index]
        label = np.array(0 if sample.label is None else self.class_of(sample, split))
        return {**super().parts(split, index), "label": label}


class PhantomVolumeClasses(PhantomVolumes):
    """Hold the synthetic abdomens of one site, in the classes "no lesion" (0) and "lesion" (1)."""

    def class_counts(self, split: str) -> torch.Tensor:
        import torch

        sick = sum(bool((volume.label == LESION).any()) for volume in self.drawn[self.check_split(split)])
        return torch.tensor([self.num_samples(split) - sick, sick])

    def keep_arrays(self, volume: Any, whole: Whole) -> Arrays:
        image = self.task.place_volume(whole, "phantom", self.site).numpy()
        return {"image": image, "label": np.array(int((volume.label == LESION).any()))}
