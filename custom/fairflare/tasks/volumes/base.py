"""Provide the base classes of tasks on whole volumes: orientation and spacing, and the volumes of a site."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field

from fairflare.base.machine.memory import workers
from fairflare.base.settings import Positive, settings
from fairflare.base.stopping import check_stop
from fairflare.data.datalist import SPLITS, DataError, Sample
from fairflare.data.image_file import image_file
from fairflare.data.orientation import orient_view
from fairflare.data.reading import Reading, every_channel, reading_takes
from fairflare.data.sources import source
from fairflare.data.whole_volumes import Whole, read_whole
from fairflare.tasks.images import FolderImages, ImageData, ImageTask, describe_drawn

if TYPE_CHECKING:
    import numpy.typing as npt
    from monai.data import MetaTensor

    from fairflare.base.task import Batch
    from fairflare.data.decoded import Arrays
    from fairflare.data.intensity import Bounds

#: Direction of each axis in MONAI's letters: with ``RAS`` they lead to the right, to the front and to the head.
Codes = Annotated[str, Field(pattern=r"^(stored|(?:[LR][AP][IS]|[LR][IS][AP]|[AP][LR][IS]|[AP][IS][LR]|[IS][LR][AP]|[IS][AP][LR]))$")]  # fmt: skip  # noqa: E501
#: Settings of tasks that decide what a prepared volume is.
AS_PREPARED = (
    "orientation", "spacing", "intensity", "window", "patch_size", "volume_size", "num_classes", "labels", "ignore",
    "plan",
)  # fmt: skip
DRAWN_SIZE = (32, 32, 24)  # number of voxels of synthetic volumes along each axis
PREPARED = 14  # bytes a voxel to prepare a volume: its values in 32 bits, turned, resampled and padded, and its targets
#: Locks by sample: threads that need parts of one volume wait while the first of them prepares it.
_TURNS = tuple(threading.Lock() for _ in range(64))
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

    spatial_dims: ClassVar[int] = 3

    orientation: Codes = "RAS"
    spacing: tuple[Positive, Positive, Positive] | None = None
    augmentation: Changes = ()

    @property
    def in_channels(self) -> int:  # type: ignore[override]
        """Return the number of channels of the network's input."""
        return len(self.channels or "1")

    @property
    def of_ct(self) -> tuple[int, ...]:  # type: ignore[override]
        """Return the numbers of the channels called CT; a single unnamed one is CT if it is read by a window."""
        if not self.channels:
            return (0,) * (self.intensity == "window")
        return tuple(number for number, name in enumerate(self.channels) if name == "CT")

    @abstractmethod
    def fit_size(self, image: MetaTensor) -> MetaTensor:
        """Return a volume (channels, x, y, z) of the task's orientation and spacing, brought to the network's size."""

    def place_volume(self, volume: Whole, name: str, site: str = "predict") -> MetaTensor:
        """Return a volume as (channels, x, y, z) float32 in [0, 1], in the task's orientation, spacing and size.

        Raises:
            DataError: the task needs the orientation and spacing of the file, which does not state them.
        """
        return self.fit_size(self.regrid(volume.image, volume.affine, name, site)).clamp_(0.0, 1.0)

    def regrid(self, array: Any, affine: Any, name: str, site: str, nearest: bool = False) -> MetaTensor:
        """Return an array (channels, rows, columns, slices) in the task's orientation and spacing, in its own type."""
        import torch
        from monai.data import MetaTensor

        if affine is None and (self.orientation != "stored" or self.spacing is not None):
            wanted = "orientation" if self.orientation != "stored" else "spacing"
            raise DataError(
                f"site '{site}': volume '{name}' does not say how it lies in the body (nor its voxels in mm), which "
                f"{wanted}={getattr(self, wanted)!r} of the task needs; convert the original anew, or set "
                "orientation='stored' and no spacing",
                f"site '{site}': a volume does not say how it lies, which the task needs",
                "its header does not say how it lies in the body",
            )
        turned, lies = orient_view(np.moveaxis(array, 0, -1), affine, self.orientation)
        turned = np.moveaxis(turned, -1, 0)
        turned = turned if min(turned.strides) >= 0 else turned.copy()  # torch knows no mirrored views, even of a voxel
        turned_image = MetaTensor(torch.from_numpy(turned), affine=torch.from_numpy(lies))
        return turned_image if self.spacing is None else self.zoom(turned_image, nearest)

    def zoom(self, image: MetaTensor, nearest: bool) -> MetaTensor:
        """Return a volume in the task's spacing."""
        from fairflare.tasks.volumes.prepared import zoom_volume

        return zoom_volume(image, cast("Sequence[float]", self.spacing), nearest)

    def read_stored(self, sample: Sample, site: str, split: str, max_bytes: int) -> npt.NDArray[np.float32]:
        every = every_channel(sample, site, split)
        how = replace(self.reading().channel_reading(0), channels=every, width=len(every))
        return read_whole(sample, masked=False, site=site, split=split, max_bytes=max_bytes, how=how).image[0]

    def read_volume(self, file: Path, more: tuple[Path, ...] = ()) -> tuple[MetaTensor, Whole]:
        """Read the channels of a case for ``fairflare predict``; return the network's input, and them as stored."""
        whole = read_whole(Sample(file, 0, more=more), masked=False, site="predict", split="none", how=self.reading())
        return self.place_volume(whole, file.name), whole


class VolumeData(ImageData):
    """Define the base class of a site's volumes, (channels, x, y, z); ``task`` is a :class:`VolumeSettings`."""

    task: Any

    @abstractmethod
    def parts(self, split: str, index: int) -> Arrays:
        """Return the prepared arrays of a volume, which may be mapped from disk."""

    def fingerprints(self, split: str, of_ct: Collection[int]) -> list[Any]:
        """Return what a plan needs of each volume, see :func:`fairflare.tasks.volumes.fingerprint.fingerprints`."""
        from fairflare.tasks.volumes.fingerprint import fingerprints

        return fingerprints(self, split, of_ct)

    def item(self, split: str, index: int) -> Mapping[str, Any]:
        """Return a dict of tensors with ``image`` and ``label`` of one volume."""
        import torch

        return {name: torch.from_numpy(part.copy()) for name, part in self.parts(split, index).items()}

    def read(self, split: str, indices: Sequence[int]) -> Batch:
        import torch

        items = [self.item(split, index) for index in indices]
        return torch.stack([item["image"] for item in items]), torch.stack([item["label"] for item in items])


class FolderVolumes(VolumeData, FolderImages):
    """Define the base class of the volumes of a site's folder.

    Volumes are prepared once: on disk, where the site keeps decoded volumes, from which parts are mapped into memory;
    else in memory, while they fit into ``cache_bytes``.
    """

    def __init__(self, *args: Any, **memory: Any) -> None:
        super().__init__(*args, **memory)
        # No key can stand for a user's code.
        self._on_disk = (
            None if self.task.is_overridden("fit_size", "place_volume", "regrid", "targets") else self.reading.kept
        )
        if self.num_workers > 1:
            self.num_workers = min(self.num_workers, workers(self.takes()))

    def takes(self) -> int:
        """Return the memory that reading and preparing one volume of the site takes, at most."""
        return reading_takes(chain.from_iterable(self.datalist.splits.values()), PREPARED)

    def parts(self, split: str, index: int) -> Arrays:
        sample = self.datalist.splits[split][index]
        with _TURNS[hash(sample) % len(_TURNS)]:
            if self._on_disk is None:
                return self.keep_in_memory(split, sample)
            how = [
                *(getattr(self.task, name, None) for name in AS_PREPARED), self.coding, self.task.annotated,
                self.reading.drawn_on, self.max_image_bytes, sample.spacing, self.reading.channels, self.reading.width,
            ]  # fmt: skip
            return self._on_disk.arrays(
                repr(how), [image_file(path) for path in (*sample.files, sample.mask) if path is not None],
                partial(self.prepare, split, sample),
            )  # fmt: skip

    def _pixels(self, sample: Sample, split: str) -> bytes:
        # Without the job's settings: every job must find the same.
        how = Reading(channels=self.reading.channels, width=self.reading.width)
        return read_whole(sample, masked=False, **self.read_arguments(split, how)).image.tobytes()

    def read_sample(self, sample: Sample, split: str, how: Reading | None = None) -> Whole:
        """Read the volume of a sample, with its mask if it has one."""
        check_stop()
        return read_whole(sample, masked=sample.mask is not None, **self.read_arguments(split, how))

    num_volumes = FolderImages.num_samples  # whatever a subclass cuts them into

    def original(self, split: str, number: int) -> tuple[Hashable, Whole]:
        """Return the patient and a volume with its mask, neither scaled nor resampled."""
        sample = self.datalist.splits[split][number]
        return sample.case, self.read_sample(sample, split, replace(self.reading, intensity="raw", once=True))


class PhantomVolumes(VolumeData):
    """Define the base class of one site's synthetic volumes."""

    synthetic = True

    def __init__(self, task: Any, site: str, seed: int, cases: float, what: str) -> None:
        super().__init__(task, site)
        self.drawn = source("volumes").patients(
            site, size=DRAWN_SIZE, seed=seed, cases=cases, channels=task.in_channels
        )
        self.description = f"{describe_drawn(what, {split: len(self.drawn[split]) for split in SPLITS})} volumes"
        self._held: dict[tuple[str, int], Arrays] = {}

    def num_samples(self, split: str) -> int:
        return len(self.drawn[self.check_split(split)])

    num_volumes = num_samples  # whatever a subclass cuts them into

    def takes(self) -> int:
        """Return the memory that one volume takes beside those that are in memory already."""
        return 0

    def original(self, split: str, number: int) -> tuple[Hashable, Whole]:
        """Return the patient and a volume with its mask, neither scaled nor resampled."""
        return number, _whole(volume := self.drawn[split][number], volume.image)

    @abstractmethod
    def keep_arrays(self, volume: Any, whole: Whole) -> Arrays:
        """Return the arrays that stay of a synthetic volume."""

    def parts(self, split: str, index: int) -> Arrays:
        from fairflare.data.intensity import bounds_of, rescale

        if (split, index) not in self._held:
            check_stop()
            volume = self.drawn[split][index]
            images = [rescale(image, cast("Bounds", bounds_of(image, "percentile"))) for image in volume.image]
            self._held[split, index] = self.keep_arrays(volume, _whole(volume, np.stack(images)))
        return self._held[split, index]


def _whole(volume: Any, images: npt.NDArray[np.float32]) -> Whole:
    """Return a synthetic volume, whose channels have these values, with its mask and affine."""
    return Whole(images, volume.label, np.diag([*volume.voxel, 1.0]))
