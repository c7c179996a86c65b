"""Provide the base classes of tasks on images: settings, seeded batches, images of a folder, synthetic images."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import Field

from fairflare.base import checks
from fairflare.base.cases.census import KEYS, Marked
from fairflare.base.own_errors import describe_error
from fairflare.base.settings import NonNegativeInt, Number, Positive, PositiveInt, Text, settings
from fairflare.base.site_data import shuffled
from fairflare.base.stopping import check_stop
from fairflare.base.task import evaluating
from fairflare.core.features.adapting import outline_of
from fairflare.data.datalist import DataError, Datalist, Sample, load_datalist, shareable
from fairflare.data.decoded import DecodedVolumes
from fairflare.data.geometry import DrawnOn
from fairflare.data.image_file import MAX_IMAGE_BYTES
from fairflare.data.intensity import Intensity
from fairflare.data.orientation import Orientation
from fairflare.data.reading import Reading, every_channel
from fairflare.data.whole_volumes import read_image
from fairflare.tasks.adapters import Fitted
from fairflare.tasks.base import Batches, SiteData, Task
from fairflare.tasks.shared.site_settings import CACHE_BYTES, SiteSettings, read_settings, setting_error, setting_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from fairflare.base.task import Batch, Device
    from fairflare.tasks.scores.dice_scores import Origin

T = TypeVar("T")
_COUNTING = threading.Lock()  # held while a sample is counted as in memory
log = logging.getLogger(__name__)
# Types of the settings that tasks on images have.
Grey = Annotated[int, Field(strict=True, ge=1)]  # 1 or 3, or the number of the channels
Size = tuple[PositiveInt, PositiveInt]
Momentum = Annotated[float, Field(strict=True, gt=0, le=1)]
Augmentations = tuple[
    Literal["flip", "affine", "intensity", "flip_vertical", "blur", "rotate", "shift", "one_move", "jitter"], ...
]  # names of random changes, see fairflare.tasks.batches.changes
Factor = Annotated[float, Field(strict=True, gt=0, le=1000)]
Widths = tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt]  # of MONAI's BasicUNet
Coding = dict[int, NonNegativeInt]  # {number in the site's files: the task's number}; JSON has text keys


def one_for_each_class(name: str, values: Collection[Any] | None, count: int, *, different: bool = False) -> None:
    """Raise ``ValueError`` for a given setting that lacks one (different) entry for each of ``count`` classes."""
    if values is not None and (len(values) != count or (different and len(set(values)) != count)):
        raise ValueError(
            f"{name} must have {count}{' different' if different else ''} entries, one for each class, got {values!r}"
        )


@settings
class Intensities:
    """Define how grey values of image files become values in [0, 1], the same at all sites.

    Args:
        intensity: what becomes 0 and 1: ``"auto"`` (8-bit pictures: 0 and 255; all else as ``"percentile"``),
            ``"range"`` (the file's minimum and maximum), ``"percentile"`` (minimum and 99th percentile), ``"zscore"``
            (three standard deviations below and above the mean) or ``"window"``.
        window: centre and width for ``"window"``, in the file's measured values (Hounsfield units); default: that of
            each DICOM header. With ``channels`` also a list with both for each of them.
        channels: names of the channels where a case has several images (T2w and ADC), in the order of the network's
            input; default: one image, without a name.
    """

    intensity: Intensity = "auto"
    window: tuple[Number, Positive] | tuple[tuple[Number, Positive], ...] | None = None
    channels: tuple[Text, ...] | None = None
    #: In a site's copy of the task: for each image of a case, its channel of the input; -1: not used.
    placed_in: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        names, windows = list(self.channels or ()), cast("Any", self.window or ())
        checks.refuse({
            f"window needs intensity='window', got intensity={self.intensity!r}":
                self.window is not None and self.intensity != "window",
            f"channels must be different names, got {names}": len({*names}) < len(names),
            f"window must be one, or one for each of channels={names}, got {self.window}":
                isinstance((*windows, 0)[0], tuple) and len(windows) != len(names),
        })  # fmt: skip

    def reading(self, decoded: DecodedVolumes | None = None) -> Reading:
        """Return the settings for reading image files; ``decoded`` is a cache of decoded volumes on disk, if any."""
        width = len(self.channels or "1")
        return Reading(
            "stored", self.intensity, self.window, decoded,
            channels=self.placed_in or tuple(range(width)), width=width,
        )  # fmt: skip

    @property
    def intensities(self) -> str:
        """Describe in words how grey values become values in [0, 1]; the text is written into the model's file."""
        return self.reading().describe()


@settings
class Preprocessing(Intensities):
    """Define how image files become pictures of one size with values in [0, 1], the same at all sites.

    Args:
        orientation: of NIfTI and DICOM: ``"canonical"``: the right way up in the plane that they are stored in;
            ``"axial"``, ``"sagittal"``, ``"coronal"``: cut in this plane; ``"stored"``: as it is in the file.
        resize: ``"stretch"`` to ``image_size``; ``"pad"``: the whole image in its own proportions, with an edge;
            ``"crop"``: in its own proportions without an edge, what is too long is cut off.
    """

    orientation: Orientation = "canonical"
    resize: Literal["stretch", "pad", "crop"] = "stretch"

    def __post_init__(self) -> None:
        super().__post_init__()
        task: Any = self
        if self.channels:
            task.in_channels = len(self.channels)
        elif task.in_channels not in (1, 3):
            raise ValueError(f"in_channels must be one of 1, 3, got {task.in_channels}")

    def reading(self, decoded: DecodedVolumes | None = None) -> Reading:
        return replace(super().reading(decoded), orientation=self.orientation)

    def read_input(self, file: Path, number: int | None = None, more: tuple[Path, ...] = ()) -> torch.Tensor:
        """Read one image without a datalist, and prepare it as for evaluation; ``fairflare predict`` uses this.

        Args:
            file: an image file of any kind that a datalist may name.
            number: number of the slice, if the file is a volume.
            more: files of further channels.

        Returns:
            (channels, height, width) float32 in [0, 1], of the task's size.

        Raises:
            DataError: the file cannot be read.
        """
        from fairflare.tasks.transforms import prepare_image

        task: Any = self
        image = read_image(Sample(file, 0, number, more=more), site="predict", split="none", how=self.reading())
        return prepare_image(image, task.in_channels, task.image_size, self.resize)


class ImageTask(Intensities, Fitted, Task):
    """Define the base class of tasks on images; it opens a site's data and checks networks of users."""

    image_size: tuple[int, ...]
    in_channels: int
    num_classes: int | None
    augmentation: tuple[str, ...]
    network: str
    width: int | None
    site_settings: ClassVar[type[SiteSettings]] = SiteSettings
    class_labels: ClassVar[bool] = False  # whether the labels of a datalist are class numbers, not masks
    spatial_dims: ClassVar[int] = 2
    #: In a site's copy of the task: numbers of the structures or classes that the site annotates; ``None`` if all.
    annotated: ClassVar[tuple[int, ...] | None] = None
    allow_phantom: bool = True

    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return the network's outputs for whole images or volumes, in evaluation."""
        return model(inputs)

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the task's classes or structures."""

    @property
    def structures(self) -> list[list[int]]:
        """Return, for each structure or class, the labels that belong to it."""
        return [[number] for number in range(self.classes or 0)]

    def known(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the annotated structures or classes, given one value for each structure or class."""
        return list(values) if self.annotated is None else [values[number] for number in self.annotated]

    def annotating(self, numbers: tuple[int, ...] | None) -> Any:
        """Return the task for a site that annotates only some structures or classes (``None`` if all, or not known).

        Raises: ValueError: the task has exclusive outputs, or a loss or metrics of its own, which would take a
            structure that is not annotated for one that is absent.
        """
        if numbers is None or len(numbers) == len(self.structures):
            return self
        if self.exclusive or self.is_overridden("loss", "sample_losses", "evaluate"):
            raise ValueError(
                f"{KEYS[self.class_labels]} does not name all, and task ({type(self).__name__}) has "
                f"{'output=softmax' if self.exclusive else 'its own loss or metrics'}, which may take those that are "
                "not annotated for absent ones; leave the site out"
            )
        return replace_attributes(self, annotated=numbers)

    def read_annotated(self, site: str, settings: SiteSettings) -> tuple[int, ...] | None:
        """Return the numbers of the structures or classes that a site's file calls annotated; ``None`` if it has none.

        Raises: DataError: the site's file names a label that the task does not have, or only some labels of a
            structure.
        """
        key = KEYS[self.class_labels]
        if (declared := getattr(settings, key, None)) in (None, "all"):
            return None if declared is None else tuple(range(len(self.structures)))
        numbers = tuple(k for k, labels in enumerate(self.structures) if {*labels} <= {*declared})
        if strange := sorted({*declared}.difference(*(self.structures[k] for k in numbers))):
            raise setting_error(
                site, key, f"{key}: {strange} make no whole one of {self.structures}; name all labels of one, or none"
            )
        with setting_of(site, key):
            self.annotating(numbers)
        return numbers

    def outcome_names(self) -> list[str]:
        return self.names()

    def output_tensors(self) -> Sequence[str]:
        """Return the names of the output layer's tensors; none for exclusive classes, or without such a layer."""
        if self.class_labels and not self.findings:
            return ()
        from fairflare.core.features.layers import output_tensors

        try:
            return output_tensors(*self._outline(), len(self.names()))
        except Exception as error:  # a user's network may raise any error, and on the meta device it has no numbers
            log.info("the output layer is unknown: %s", describe_error(error))
            return ()

    def input_tensors(self) -> Sequence[str]:
        from fairflare.core.features.layers import input_tensors

        return input_tensors(*self._outline())

    def _outline(self) -> tuple[torch.nn.Module, torch.Tensor]:
        """Return the network, as a rule without numbers, and an input of zeros."""
        import torch

        model = outline_of(self)
        return model, torch.zeros(1, self.in_channels, *self.image_size, device=next(model.parameters()).device)

    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        """Return the site's own images, or synthetic ones if the site's file asks for them or names no data.

        Args:
            site: name of the site.
            settings: content of the site's private file; its class is ``site_settings``. Under ``"sites"`` are all
                blocks of the file, including those of other sites.
        """
        chosen = read_settings(self.site_settings, site, settings)
        if chosen.data_root is None:
            if not chosen.phantom and not self.allow_phantom:
                raise setting_error(
                    site,
                    "data_root",
                    "no data: 'data_root' is not set, and this job allows no made-up data (allow_phantom=false); set "
                    "'data_root'",
                )
            return self.open_phantom(site, chosen)
        listed = load_datalist(
            chosen.data_root, chosen.datalist or "datalist.json", site=site, class_labels=self.class_labels,
            linked_roots=chosen.linked_roots,
        )  # fmt: skip
        for line in listed.doubts:
            log.warning("site '%s': %s", site, line)  # written to the site's own log only
        return self.open_listed(site, chosen, listed)

    def open_listed(self, site: str, settings: SiteSettings, listed: Datalist) -> SiteData:
        """Return the images of a datalist, labelled as the site's file says."""
        annotated, places = self.read_annotated(site, settings), settings.places_of(self.channels or (), site, listed)
        task = self.annotating(annotated)
        if self.channels:
            task = replace_attributes(task, placed_in=places)
        data = task.open_folder(site, settings, listed)
        data.annotated = annotated
        data.channels = tuple(sorted({*places} - {-1})) if self.channels else None
        vain = [name for name, place in zip(listed.channels, places, strict=False) if place < 0]
        data.description += f"; channels {', '.join(listed.channels)}" * bool(listed.channels)
        data.description += f", of which {', '.join(vain)} is not used" * bool(vain)
        data.mask_labels = listed.meanings(getattr(data, "coding", None))
        return data

    def suited_to(self, data: SiteData) -> Task:
        return self.annotating(data.annotated)

    def read_stored(self, sample: Sample, site: str, split: str, max_bytes: int) -> npt.NDArray[np.float32]:
        """Return the image of a sample as its file stores it, without resizing.

        The shape is (height, width, 1 or 3, or channels), or for a volume (rows, columns, slices).

        Raises:
            DataError: the image cannot be read.
        """
        every = every_channel(sample, site, split) if self.channels else (0,)
        # The orientation determines which slice a number means.
        how = Reading(orientation=self.reading().orientation, channels=every, width=len(every))
        return read_image(sample, site=site, split=split, max_bytes=max_bytes, how=how)

    def check_site(self, model: torch.nn.Module, data: SiteData, device: Device) -> None:
        """Check a user's own network on one training image of the site; see :meth:`check_outputs`."""
        if self.is_overridden("build_model", "build_unet"):
            inputs, _ = next(iter(data.batches("training", batch_size=1)))
            self.check_outputs(model, inputs.to(device))

    def check_outputs(self, model: torch.nn.Module, inputs: torch.Tensor | None = None) -> None:
        """Raise an error for a network whose outputs do not fit the loss and the metrics of the task.

        Args:
            model: the network.
            inputs: images, (n, channels, height, width) or (n, channels, x, y, z); ``None`` for one image of zeros.

        Raises:
            DataError: the network fails, its outputs have another shape than (n, classes) or (n, structures, ...), or
                one of its buffers changes its size.
        """
        import torch

        if inputs is None:
            inputs = torch.zeros(1, self.in_channels, *self.image_size)
        named = f"the network of the task ({type(self).__name__}), given {tuple(inputs.shape)},"
        sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        try:
            with evaluating(model):
                outputs = model(inputs)
        except (torch.cuda.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise shareable(f"{named} fails: {describe_error(error)}") from error
        odd = next((name for name, tensor in model.state_dict().items() if sizes.get(name) != tensor.shape), None)
        number = self.classes if self.class_labels else (self.num_classes or 0) + self.exclusive
        needed = (len(inputs), number, *(() if self.class_labels else inputs.shape[2:]))
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
        checks.refuse({
            f"{named} changes the size of {odd!r}; register_buffer(..., persistent=False) keeps it at the site":
                odd is not None,
            f"{named} gives {shape}, and {needed} is needed for num_classes={(number or 0) - self.exclusive}":
                shape != needed and not self.is_overridden("loss"),  # a user's loss may need outputs of another form
        }, shareable)  # fmt: skip

    @abstractmethod
    def open_folder(self, site: str, settings: Any, datalist: Datalist) -> SiteData:
        """Return the data of the images that a site's datalist names."""

    @abstractmethod
    def open_phantom(self, site: str, settings: Any) -> SiteData:
        """Return the task's synthetic images for a site."""

    def check_phantom_fits(self, site: str, what: str, has: str, fits: bool) -> None:
        """Raise ``DataError`` if the synthetic data have another number of classes than the task."""
        if not fits:
            raise DataError(
                f"site '{site}': no 'data_root' in the site's fairflare.json, and the synthetic {what} has {has} where "
                f"the task has num_classes={self.num_classes}"
                f"{f' and channels={list(self.channels)}' if self.channels else ''}; set 'data_root'",
                f"site '{site}': no data folder is set, and the synthetic data do not fit the task",
            )


def replace_attributes(task: Any, **values: Any) -> Any:
    """Return a copy of a task that has other values of these attributes."""
    altered = copy.copy(task)
    vars(altered).update(values)
    return altered


# ------------------------------------------------------------------------------------------------ data


class ImageData(SiteData):
    """Define the base class of a site's data that are images, which are read by their number in a split.

    Args:
        task: the task, which defines size, channels and augmentation of the images.
        site: name of the site, for messages.
        moves_targets: whether the targets are images as well: an augmentation then moves them with the inputs, and
            batches hold them as float32. This is an attribute of the class.
    """

    moves_targets: ClassVar[bool] = False

    def __init__(self, task: ImageTask, site: str) -> None:
        self.task = task
        self.site = site

    @abstractmethod
    def read(self, split: str, indices: Sequence[int]) -> Batch:
        """Read images of a split by number: (n, channels, height, width) float32 in [0, 1], and their targets."""

    def origins(self, split: str, indices: Sequence[int]) -> Sequence[Origin] | None:
        """Return each image's size before resizing, and the volume it is a slice of; ``None`` if neither is needed."""
        return None

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int]:
        return shuffled(self.num_samples(split), shuffle_seed)

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        checks.whole("batch_size", batch_size)
        return self._batches(split, self.order(split, shuffle_seed), batch_size, shuffle_seed, augment)

    def chosen(self, split: str, numbers: Sequence[int], shuffle_seed: int, augment: bool) -> Batches:
        return self._batches(split, numbers, len(numbers), shuffle_seed, augment)

    def _batches(self, split: str, order: Sequence[int], size: int, seed: int | None, augment: bool) -> Batches:
        from fairflare.tasks.batches import Augmented, changes, load_batches, read_batch

        batches = load_batches(order, size, partial(read_batch, self, split))
        if not augment:
            return batches
        seed = checks.whole("shuffle_seed of augmented batches", seed, low=0)
        return Augmented(
            batches, changes(self.task.augmentation, size=self.task.image_size, with_targets=self.moves_targets), seed,
            with_targets=self.moves_targets,
        )  # fmt: skip


def read_all(read: Callable[[int], T], indices: Sequence[int], workers: int) -> dict[int, T]:
    """Return the result of ``read`` for each index; with more than one worker, several threads call ``read``."""
    if workers > 1 and len(indices) > 1:
        check_stop()
        with ThreadPool(workers) as threads:
            return dict(zip(indices, threads.map(read, indices), strict=True))
    results = {}
    for index in indices:
        check_stop()
        results[index] = read(index)
    return results


class PreparedData(SiteData):
    """Define data of a site's datalist, whose prepared samples stay in memory while they fit into ``cache_bytes``.

    Args:
        datalist: the site's datalist.
        what: description of the data for the log.
        cache_bytes, num_workers: see :class:`SiteSettings`.
    """

    def __init__(self, datalist: Datalist, what: str, cache_bytes: int, num_workers: int) -> None:
        self.datalist = datalist
        self.synthetic = datalist.synthetic
        self.test_splits = tuple(split for split in datalist.splits if split.startswith("test"))
        sizes = ", ".join(f"{len(samples)} {split}" for split, samples in datalist.splits.items())
        self.description = f"{'SYNTHETIC, not patient data: ' * datalist.synthetic}{what}: {sizes}"
        self.num_workers = num_workers
        self._left = cache_bytes
        self._held: dict[tuple[str, Sample], Mapping[str, Any]] = {}

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(self.datalist.splits)

    def num_samples(self, split: str) -> int:
        return len(self.datalist.splits[self.check_split(split)])

    def cases(self, split: str) -> list[tuple[str, str]]:
        return self.datalist.cases(self.check_split(split))

    def fingerprint(self, split: str) -> str | None:
        return self.datalist.fingerprint(self.check_split(split))

    @abstractmethod
    def prepare(self, split: str, sample: Sample) -> Mapping[str, Any]:
        """Return what stays in memory of a sample: arrays or tensors by name."""

    def keep_in_memory(self, split: str, sample: Sample) -> Mapping[str, Any]:
        """Return what :meth:`prepare` returns for a sample; it stays in memory while it fits into ``cache_bytes``."""
        if (item := self._held.get((split, sample))) is None:
            item = self.prepare(split, sample)
            size = sum(getattr(part, "nbytes", 0) for part in item.values())
            with _COUNTING:
                if size <= self._left and (split, sample) not in self._held:
                    self._left -= size
                    self._held[split, sample] = item
        return item

    def _items(self, split: str, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        samples = self.datalist.splits[split]
        missing = [index for index in indices if (split, samples[index]) not in self._held]
        items = read_all(lambda index: self.keep_in_memory(split, samples[index]), missing, self.num_workers)
        return [items.get(index) or self._held[split, samples[index]] for index in indices]


class FolderImages(Marked, PreparedData, ImageData):
    """Read the images of a site's folder; decoded images stay in memory while they fit into ``cache_bytes``.

    Args:
        task: see :class:`ImageData`.
        datalist: the site's datalist.
        coding: ``{number in the site's files: the task's number}``; ``None`` if the numbers are the same.
        cache_bytes, num_workers, max_image_bytes: see :class:`SiteSettings`.
        kept: cache of decoded volumes on disk; ``None`` if a volume is decoded each time it is needed.
        mask_drawn_on: the site's setting, see :class:`fairflare.tasks.shared.structures.SegmentationSite`.
    """

    def __init__(
        self, task: ImageTask, datalist: Datalist, coding: Mapping[int, int] | None = None, *,
        cache_bytes: int = CACHE_BYTES, num_workers: int = 0, max_image_bytes: int = MAX_IMAGE_BYTES,
        kept: DecodedVolumes | None = None, mask_drawn_on: DrawnOn | None = None,
    ) -> None:  # fmt: skip
        ImageData.__init__(self, task, datalist.site)
        PreparedData.__init__(self, datalist, "images of the site's own folder", cache_bytes, num_workers)
        self.coding = coding
        self.max_image_bytes = max_image_bytes
        self.reading = replace(task.reading(kept), drawn_on=mask_drawn_on)
        self._marks: dict[str, list[tuple[Hashable, Collection[int]]]] = {}
        self._identities: dict[str, list[Hashable]] = {}
        self.attributes = {name: attribute.groups for name, attribute in datalist.attributes.items()}
        for name, groups in self.attributes.items():
            lacking = sum(sample.groups[name] == len(groups) - 1 for sample in chain(*datalist.splits.values()))
            self.description += f"; {lacking} without {name!r} (group 'unknown')" if lacking else ""

    @abstractmethod
    def list_labels(self, sample: Sample, split: str) -> Collection[int]:
        """Return the numbers of the structures or classes that a sample's label has."""

    def all_marks(self, split: str) -> list[tuple[Hashable, Collection[int]]]:
        if split not in self._marks:
            samples = self.datalist.splits[self.check_split(split)]
            marks = read_all(lambda k: self.list_labels(samples[k], split), range(len(samples)), self.num_workers)
            self._marks[split] = [(sample.case, marks[k]) for k, sample in enumerate(samples)]
        return self._marks[split]

    def identities(self, split: str) -> list[Hashable]:
        """Return the patient of each image, else the checksum of its pixels, which is the same in a renamed file."""
        if split not in self._identities:
            self._identities[split] = [
                sample.case if sample.patient is not None else hashlib.sha256(self._pixels(sample, split)).hexdigest()
                for sample in self.datalist.splits[self.check_split(split)]
            ]
        return self._identities[split]

    def read_arguments(self, split: str, how: Reading | None = None) -> dict[str, Any]:
        """Return the arguments of the functions that read files; ``how``: in place of the task's way of reading."""
        return {"site": self.site, "split": split, "max_bytes": self.max_image_bytes, "how": how or self.reading}

    def _pixels(self, sample: Sample, split: str) -> bytes:
        # Without the job's settings: every job must find the same.
        how = Reading(kept=self.reading.kept, channels=self.reading.channels, width=self.reading.width)
        return read_image(sample, **self.read_arguments(split, how)).tobytes()

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return [sample.groups[attribute] for sample in self.datalist.splits[self.check_split(split)]]

    def read(self, split: str, indices: Sequence[int]) -> Batch:
        import torch

        items = self._items(split, indices)
        return torch.stack([item["image"] for item in items]), torch.stack([item["label"] for item in items])


def describe_drawn(what: str, sizes: Mapping[str, int]) -> str:
    """Return one line for the log about synthetic data with this number of samples in each split."""
    return f"SYNTHETIC {what}, not patient data: {', '.join(f'{size} {split}' for split, size in sizes.items())}"


class PhantomImages(ImageData):
    """Define the base class of one site's synthetic images, which are arrays in memory."""

    synthetic = True

    @abstractmethod
    def arrays(self, split: str) -> Batch:
        """Return all images of a split, (n, 1 or the task's channels, height, width) uint8, and their targets."""

    def read(self, split: str, indices: Sequence[int]) -> Batch:
        pictures, targets = self.arrays(split)
        inputs = pictures[list(indices)].float().div_(255)
        return inputs.expand(-1, self.task.in_channels, -1, -1).contiguous(), targets[list(indices)]
