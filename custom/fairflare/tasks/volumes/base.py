"""Provide the base classes of tasks on whole volumes: orientation and spacing, and the volumes of a site."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fairflare.base.settings import Positive, settings
from fairflare.base.stopping import check_stop
from fairflare.data.datalist import SPLITS, DataError, Sample
from fairflare.data.sources import source
from fairflare.data.whole_volumes import Whole, read_whole
from fairflare.tasks.images import FolderImages, ImageData, ImageTask, PreparedData

if TYPE_CHECKING:
    import numpy.typing as npt
    from monai.data import MetaTensor
    from monai.transforms import Compose

    from fairflare.base.task import Batch

#: Direction of each axis in MONAI's letters: with ``RAS`` they lead to the right, to the front and to the head.
Codes = Annotated[str, Field(pattern=r"^(stored|(?:[LR][AP][IS]|[LR][IS][AP]|[AP][LR][IS]|[AP][IS][LR]|[IS][LR][AP]|[IS][AP][LR]))$")]  # fmt: skip  # noqa: E501
Changes = tuple[Literal["flip", "affine", "intensity"], ...]


@settings
class VolumeSettings(ImageTask):
    """Define how files become volumes of one orientation and spacing, the same at all sites.

    Args:
        orientation: to which directions of the body the axes are turned, as MONAI's ``Orientation`` has it (``"RAS"``);
            ``"stored"``: as they are in the file, for files that do not say how they lie.
        spacing: size of a voxel in mm along these axes, to which volumes are resampled (MONAI's ``Spacing``: linear,
            masks by the nearest voxel); default: that of each file.
        augmentation: random changes of ``augment=True``: ``"flip"`` (left and right), ``"affine"`` (up to 9.7 degrees
            about the first axis, 10 % in size), ``"intensity"`` (gamma and scale).
    """

    in_channels: ClassVar[int] = 1  # type: ignore[misc]
    spatial_dims: ClassVar[int] = 3

    orientation: Codes = "RAS"
    spacing: tuple[Positive, Positive, Positive] | None = None
    augmentation: Changes = ()

    @abstractmethod
    def fitted(self, image: MetaTensor) -> MetaTensor:
        """Return a volume (channels, x, y, z) of the task's orientation and spacing, brought to the network's size."""

    def placed(self, volume: Whole, name: str, site: str = "predict") -> MetaTensor:
        """Return a volume as (1, x, y, z) float32 in [0, 1], in the task's orientation, spacing and size.

        Raises:
            DataError: the task needs the orientation and spacing of the file, which does not state them.
        """
        return self.fitted(self._resampled(volume.image[None], volume.affine, "bilinear", name, site)).clamp(0.0, 1.0)

    def _resampled(self, array: Any, affine: Any, mode: str, name: str, site: str) -> MetaTensor:
        import torch
        from monai.data import MetaTensor
        from monai.transforms import Orientation, Spacing

        if affine is None and (self.orientation != "stored" or self.spacing is not None):
            wanted = "orientation" if self.orientation != "stored" else "spacing"
            raise DataError(
                f"site '{site}': volume '{name}' does not say how it lies in the body (nor its voxels in mm), which "
                f"{wanted}={getattr(self, wanted)!r} of the task needs; convert the original anew, or set "
                "orientation='stored' and no spacing",
                f"site '{site}': a volume does not say how it lies, which the task needs",
                "its header does not say how it lies in the body",
            )
        turned = np.eye(4) if affine is None else affine
        found = MetaTensor(torch.from_numpy(np.ascontiguousarray(array, np.float32)), affine=torch.from_numpy(turned))
        if self.orientation != "stored":
            found = Orientation(axcodes=self.orientation, labels=None)(found)
        if self.spacing is not None:
            found = Spacing(pixdim=self.spacing, mode=mode, padding_mode="border")(found)
        return found

    def stored(self, sample: Sample, site: str, split: str, max_bytes: int) -> npt.NDArray[np.float32]:
        return read_whole(
            sample, masked=False, site=site, split=split, max_bytes=max_bytes, how=self.reading()
        ).image  # fmt: skip

    def read_volume(self, file: Path) -> tuple[MetaTensor, Whole]:
        """Read one volume for ``fairflare predict``; return the network's input, and the volume as stored."""
        whole = read_whole(Sample(file, 0), masked=False, site="predict", split="none", how=self.reading())
        return self.placed(whole, file.name), whole


class VolumeData(ImageData):
    """Define the base class of a site's volumes; an image is (1, x, y, z), ``task`` a :class:`VolumeSettings`."""

    task: Any

    @abstractmethod
    def item(self, split: str, index: int) -> Mapping[str, Any]:
        """Return a dict of tensors with ``image`` and ``label`` of one volume."""

    def read(self, split: str, indices: Sequence[int]) -> Batch:
        import torch

        items = [self.item(split, index) for index in indices]
        return torch.stack([item["image"] for item in items]), torch.stack([item["label"] for item in items])


class FolderVolumes(VolumeData, FolderImages):
    """Define the base class of the volumes of a site's folder."""

    sample_bytes = PreparedData.sample_bytes

    @abstractmethod
    def prepared(self, whole: Whole, sample: Sample, split: str) -> dict[str, Any]:
        """Return a sample's tensors in the task's orientation, spacing and size, from the volume as it was read."""

    def item(self, split: str, index: int) -> Mapping[str, Any]:
        return self._items(split, [index])[0]

    def transform(self, split: str) -> Compose:
        from monai.transforms import Compose, Lambda

        def read(sample: Sample) -> dict[str, Any]:
            whole = read_whole(
                sample, masked=isinstance(sample.label, Path), site=self.site, split=split,
                max_bytes=self.max_image_bytes, how=self.reading,
            )  # fmt: skip
            return self.prepared(whole, sample, split)

        return Compose([Lambda(read, track_meta=False)])  # MONAI's cache holds results of its own transforms only


class PhantomVolumes(VolumeData):
    """Define the base class of one site's synthetic volumes."""

    synthetic = True

    def __init__(self, task: Any, site: str, seed: int, cases: float, what: str) -> None:
        super().__init__(task, site)
        self.drawn = source("volumes").volumes_site(site, seed=seed, cases=cases)
        listed = ", ".join(f"{len(self.drawn[split])} {split}" for split in SPLITS)
        self.description = f"SYNTHETIC {what}, not patient data: {listed} volumes"
        self._kept: dict[tuple[str, int], Mapping[str, Any]] = {}

    def num_samples(self, split: str) -> int:
        return len(self.drawn[self.check_split(split)])

    @abstractmethod
    def made(self, volume: Any, whole: Whole) -> dict[str, Any]:
        """Return a dict of tensors with ``image`` and ``label`` of a synthetic volume."""

    def item(self, split: str, index: int) -> Mapping[str, Any]:
        from fairflare.data.intensity import between, bounds_of

        key = split, index
        if key not in self._kept:
            check_stop()
            volume = self.drawn[split][index]
            bounds = bounds_of(volume.image, "percentile")
            assert bounds is not None
            whole = Whole(between(volume.image, bounds), volume.label.astype(np.uint8), np.diag([*volume.voxel, 1.0]))
            self._kept[key] = self.made(volume, whole)
        return self._kept[key]
