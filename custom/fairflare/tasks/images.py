"""What tasks on 2D images share: settings of a task and of a site, batches in a seeded order, folders and phantoms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from fairflare.base import checks
from fairflare.base.settings import Flag, NonNegativeInt, Number, Positive, PositiveInt, field_names, settings
from fairflare.base.stopping import check_stop
from fairflare.data.datalist import DataError, Datalist, Sample, load_datalist, suggest
from fairflare.data.decoded import DECODED_BYTES, DecodedVolumes
from fairflare.data.image_file import MAX_IMAGE_BYTES
from fairflare.data.intensity import Intensity
from fairflare.data.orientation import Orientation
from fairflare.data.reading import Reading, read_image
from fairflare.tasks.adapters import Fitted
from fairflare.tasks.base import Batches, SiteData, Task

if TYPE_CHECKING:
    import torch
    from monai.data import CacheDataset
    from monai.transforms import Compose

    from fairflare.base.task import Batch
    from fairflare.tasks.scores.dice_scores import Origin

CACHE_BYTES = 2**30  # decoded images of a site that are kept in memory, all splits together
OTHER_KEYS = (  # of the site file, not the task's business
    "state_root", "checkpoint_root", "models_in_memory", "num_threads", "device", "isolate", "sites",
    "preprocess_cache", "prior", "initial_weights", "metrics_by_class", "submit_model", "examples_folder",
    "precision", "channels_last", "compile", "deterministic", "networks",
)  # fmt: skip

# Types of settings of tasks on images.
Grey = Literal[1, 3]
Size = tuple[PositiveInt, PositiveInt]
Momentum = Annotated[float, Field(strict=True, gt=0, le=1)]
Augmentations = tuple[
    Literal["flip", "affine", "intensity", "flip_vertical", "blur", "rotate", "shift", "one_move", "jitter"], ...
]  # see fairflare.tasks.batches.changes
Coding = dict[int, NonNegativeInt]  # {number in the site's files: the task's number}; JSON has text keys
Filename = Annotated[str, Field(min_length=1)]


# ------------------------------------------------------------------------------------------------ settings


@settings
class SiteSettings:
    """What tasks on images read of a site's private file.

    Args:
        data_root: folder with the data; none: made-up data, where they are wanted.
        phantom: True: made-up data, on purpose; False: never. Default: made-up data where the site file names no data
            for any site and the task allows it.
        datalist: name of the list inside it, or an absolute path; default ``datalist.json``.
        linked_roots: further folders that links in ``data_root`` may lead to.
        max_image_bytes: memory that one decoded image, mask or volume may take; a larger file is refused by its header.
        cache_bytes: memory for decoded images of this site.
        decoded_folder: folder for decoded volumes, so that a slice is read without the others; default: in the site's
            ``state_root``.
        decoded_bytes: disk space for them; 0: none is kept.
        num_workers: threads that decode the images of a batch; 0: the one that trains. The batches are the same.
        phantom_seed: seed of the synthetic data; default: the task's.
        adapter_rank: the site trains no more than this rank of a job's adapters; default: all of it.
    """

    data_root: Filename | None = None
    phantom: Flag | None = None
    datalist: Filename | None = None
    linked_roots: list[Filename] = field(default_factory=list)
    max_image_bytes: PositiveInt = MAX_IMAGE_BYTES
    cache_bytes: NonNegativeInt = CACHE_BYTES
    decoded_folder: Filename | None = None
    decoded_bytes: NonNegativeInt = DECODED_BYTES
    num_workers: NonNegativeInt = 0
    phantom_seed: NonNegativeInt | None = None
    adapter_rank: PositiveInt | None = None

    def __post_init__(self) -> None:
        for folder in self.linked_roots:
            if not Path(folder).expanduser().is_absolute():
                raise ValueError(f"linked_roots must be absolute paths of folders, got {folder!r}")
        if self.decoded_folder is not None and not Path(self.decoded_folder).expanduser().is_absolute():
            raise ValueError(f"decoded_folder must be the absolute path of a folder, got {self.decoded_folder!r}")

    def memory(self) -> dict[str, Any]:
        """Arguments of :class:`FolderImages`."""
        kept = None
        if self.decoded_folder is not None and self.decoded_bytes:
            kept = DecodedVolumes(Path(self.decoded_folder).expanduser(), self.decoded_bytes)
        same = ("cache_bytes", "num_workers", "max_image_bytes")
        return {"kept": kept, **{name: getattr(self, name) for name in same}}


def read_settings(kind: type[SiteSettings], site: str, given: Mapping[str, Any]) -> Any:
    """The settings of a site's private file as ``kind``.

    Raises:
        DataError: a key that nobody reads, a value that cannot be used, data for other sites but not for this one.
    """
    own = field_names(kind)
    known = (*own, *OTHER_KEYS)
    for key in given:
        if key not in known:
            near = checks.nearest(key, known)
            raise DataError(
                f"site '{site}': unknown key '{key}' in the site's fairflare.json{suggest(key, known)}",
                # Close to a key that exists it is a typing mistake; anything else is the site's own word.
                f"site '{site}': unknown key {f'{key:.60}'!r} in the site file{near}"
                if near
                else f"site '{site}': unknown key in the site file",
            )
    with setting_of(site):
        found = kind(**{key: value for key, value in given.items() if key in own})
    if found.data_root is None:
        _refuse_half_settings(site, given, found)
    elif found.phantom:
        raise setting_error(site, "phantom", "'phantom' is true and 'data_root' is set; take one of the two out")
    return found


@contextmanager
def setting_of(site: str, key: str | None = None) -> Iterator[None]:
    """Turns a ``ValueError`` about a key of the site file into a ``DataError``; default: its first word is the key."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise setting_error(site, key or text.split()[0].rstrip(":"), text) from error


def setting_error(site: str, key: str, problem: str) -> DataError:
    """A key of the site file whose value cannot be used."""
    return DataError(
        f"site '{site}': {problem}; correct it in the site's fairflare.json",
        f"site '{site}': key '{key}' in the site file is not usable",
    )


def _refuse_half_settings(site: str, given: Mapping[str, Any], own: SiteSettings) -> None:
    """Before a phantom stands in: a site file that names data, but not for this site, is a mistake."""
    if own.datalist is not None:
        raise setting_error(
            site, "data_root", "'datalist' is set but 'data_root' is not; set 'data_root' to the folder of the list"
        )
    if own.phantom is False:
        raise setting_error(site, "phantom", "'phantom' is false and 'data_root' is not set; set 'data_root'")
    blocks = given.get("sites")
    if own.phantom or not isinstance(blocks, Mapping):
        return
    with_data = [name for name, block in blocks.items() if isinstance(block, Mapping) and "data_root" in block]
    if with_data:
        near = checks.nearest(site, with_data)
        lacks = f"no 'data_root' in the block of '{site}'" if site in blocks else f"no block for '{site}'"
        others = ", ".join(repr(name) for name in sorted(with_data))
        raise DataError(
            f"site '{site}': the site's fairflare.json gives data to the sites {others}, but has {lacks}{near or '.'} "
            "Write it under 'sites', or run the job with these site names",
            f"site '{site}': the site file names data for other sites, but not for this one{near}",
        )


def one_for_each_class(name: str, values: Collection[Any], count: int, *, different: bool = False) -> None:
    """Refuses a setting that does not have one (different) entry for each of ``count`` classes."""
    if len(values) != count or (different and len(set(values)) != count):
        raise ValueError(
            f"{name} must have {count}{' different' if different else ''} entries, one for each class, got {values!r}"
        )


@settings
class Preprocessing:
    """How files become what the network gets, the same at all sites.

    Args:
        orientation: of NIfTI and DICOM: ``"canonical"``: the right way up in the plane that they are stored in;
            ``"axial"``, ``"sagittal"``, ``"coronal"``: cut in this plane; ``"stored"``: as it is in the file.
        intensity: what becomes 0 and 1: ``"auto"`` (8-bit pictures: 0 and 255; all else as ``"percentile"``),
            ``"range"`` (the file's minimum and maximum), ``"percentile"`` (minimum and 99th percentile), ``"zscore"``
            (three standard deviations below and above the mean) or ``"window"``.
        window: centre and width for ``"window"``, in the file's measured values (Hounsfield units); default: that of
            each DICOM header.
        resize: ``"stretch"`` to ``image_size``; ``"pad"``: the whole image in its own proportions, with an edge;
            ``"crop"``: in its own proportions without an edge, what is too long is cut off.
    """

    orientation: Orientation = "canonical"
    intensity: Intensity = "auto"
    window: tuple[Number, Positive] | None = None
    resize: Literal["stretch", "pad", "crop"] = "stretch"

    def __post_init__(self) -> None:
        if self.window is not None and self.intensity != "window":
            raise ValueError(f"window needs intensity='window', got intensity={self.intensity!r}")

    def reading(self, kept: DecodedVolumes | None = None) -> Reading:
        """How files are read, with what of them is kept on disk."""
        return Reading(self.orientation, self.intensity, self.window, kept)

    @property
    def intensities(self) -> str:
        """How grey values become [0, 1]; written into the model's file."""
        return self.reading().in_words()


class ImageTask(Preprocessing, Fitted, Task):
    """Base of tasks on 2D images: how a site's data are opened."""

    image_size: tuple[int, int]
    in_channels: int
    num_classes: int | None
    augmentation: tuple[str, ...]
    site_settings: ClassVar[type[SiteSettings]] = SiteSettings
    class_labels: ClassVar[bool] = False  # of a datalist: numbers, not masks
    allow_phantom: bool = True

    def open_site(self, site: str, settings: Mapping[str, Any]) -> SiteData:
        """The site's own images, or the phantom where it is asked for or no data are named anywhere.

        Args:
            site: name of the site.
            settings: the site's private file; see ``site_settings``. Under ``"sites"`` are the blocks of the file, of
                other sites too.
        """
        own = read_settings(self.site_settings, site, settings)
        if own.data_root is None:
            if not own.phantom and not self.allow_phantom:
                raise setting_error(
                    site,
                    "data_root",
                    "no data: 'data_root' is not set, and this job allows no made-up data (allow_phantom=false); set "
                    "'data_root'",
                )
            return self.open_phantom(site, own)
        more = {"class_labels": self.class_labels, "linked_roots": own.linked_roots}
        listed = load_datalist(own.data_root, own.datalist or "datalist.json", site=site, **more)
        return self.open_folder(site, own, listed)

    def read_input(self, file: Path, number: int | None = None) -> torch.Tensor:
        """One image as the network gets it in evaluation, whatever lists it: for ``fairflare predict``.

        Args:
            file: of any kind that a datalist may name.
            number: of the slice, when it is a volume.

        Returns:
            (channels, height, width) float32 in [0, 1], of the task's size.

        Raises:
            DataError: the file cannot be read.
        """
        from fairflare.tasks.transforms import as_input

        image = read_image(Sample(file, 0, number), site="predict", split="none", how=self.reading())
        item: Any = {"image": image}
        for step in as_input(self.in_channels, self.image_size, self.resize):
            item = step(item)
        picture: torch.Tensor = item["image"]
        return picture

    @abstractmethod
    def open_folder(self, site: str, own: Any, datalist: Datalist) -> SiteData:
        """The images that a datalist names."""

    @abstractmethod
    def open_phantom(self, site: str, own: Any) -> SiteData:
        """Synthetic images."""

    def check_phantom_fits(self, site: str, what: str, has: str, fits: bool) -> None:
        """Refuses synthetic data of another number of classes than the task's."""
        if not fits:
            raise DataError(
                f"site '{site}': no 'data_root' in the site's fairflare.json, and the synthetic {what} has {has} where "
                f"the task has num_classes={self.num_classes}; set 'data_root'",
                f"site '{site}': no data folder is set, and the synthetic data do not fit the task",
            )


# ------------------------------------------------------------------------------------------------ data


class ImageData(SiteData):
    """Images that can be had by number.

    Args:
        task: size, channels and augmentation of what :meth:`read` gives.
        site: name for the messages.
        moves_targets: the targets are images too, which an augmentation moves along; in batches they are float32.
    """

    moves_targets: ClassVar[bool] = False

    def __init__(self, task: ImageTask, site: str) -> None:
        self.task = task
        self.site = site

    @abstractmethod
    def read(self, split: str, indices: Sequence[int]) -> Batch:
        """Inputs (n, channels, height, width) float32 in [0, 1], and their targets."""

    def origins(self, split: str, indices: Sequence[int]) -> Sequence[Origin] | None:
        """What the images were before they got the network's size; ``None``: it does not matter."""
        return None

    def check_split(self, split: str) -> str:
        """``split``, or ``ValueError`` when these data have none of this name."""
        return checks.choice("split", split, ("training", "validation", *self.test_splits))

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int]:
        import torch

        count = self.num_samples(split)
        if shuffle_seed is None:
            return list(range(count))
        return torch.randperm(count, generator=torch.Generator().manual_seed(shuffle_seed)).tolist()

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        from fairflare.tasks.batches import Augmented, loaded

        checks.whole("batch_size", batch_size)
        batches = loaded(self, split, batch_size, self.order(split, shuffle_seed))
        if not augment:
            return batches
        seed = checks.whole("shuffle_seed of augmented batches", shuffle_seed, low=0)
        return Augmented(
            batches, self.task.augmentation, seed, size=self.task.image_size, with_targets=self.moves_targets
        )


class FolderImages(ImageData):
    """Images of a site's folder; decoded ones stay in memory while they fit into ``cache_bytes``.

    Args:
        task: see :class:`ImageData`.
        datalist: of the site.
        coding: the task's numbers for those in the files; ``None``: the same.
        cache_bytes, num_workers, max_image_bytes: see :class:`SiteSettings`.
        kept: decoded volumes on disk; ``None``: volumes are decoded as often as they are needed.
    """

    def __init__(
        self, task: ImageTask, datalist: Datalist, coding: Mapping[int, int] | None = None, *,
        cache_bytes: int = CACHE_BYTES, num_workers: int = 0, max_image_bytes: int = MAX_IMAGE_BYTES,
        kept: DecodedVolumes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(task, datalist.site)
        self.datalist = datalist
        self.coding = coding
        self.cache_bytes = cache_bytes
        self.num_workers = num_workers
        self.max_image_bytes = max_image_bytes
        self.reading = task.reading(kept)
        self._left = cache_bytes
        self._datasets: dict[str, CacheDataset] = {}
        self.test_splits = tuple(split for split in datalist.splits if split.startswith("test"))
        sizes = ", ".join(f"{len(samples)} {split}" for split, samples in datalist.splits.items())
        self.synthetic = datalist.synthetic
        made_up = "SYNTHETIC, not patient data: " if datalist.synthetic else ""
        self.description = f"{made_up}images of the site's own folder: {sizes}{self._unknown(datalist)}"
        self.attributes = {name: attribute.groups for name, attribute in datalist.attributes.items()}

    @abstractmethod
    def target_bytes(self) -> int:
        """Memory of one sample's target."""

    @abstractmethod
    def transform(self, split: str) -> Compose:
        """From a :class:`fairflare.data.datalist.Sample` to ``{"image": tensor, "label": tensor}``."""

    @staticmethod
    def _unknown(datalist: Datalist) -> str:
        """How many images lack a declared attribute, in words."""
        last = {name: len(attribute.groups) - 1 for name, attribute in datalist.attributes.items()}
        listed = [sample for samples in datalist.splits.values() for sample in samples]
        lacks = {name: sum(sample.groups[name] == number for sample in listed) for name, number in last.items()}
        return "".join(f"; {count} without {name!r} (group 'unknown')" for name, count in lacks.items() if count)

    def group_numbers(self, split: str, attribute: str) -> list[int]:
        return [sample.groups[attribute] for sample in self.datalist.splits[self.check_split(split)]]

    def num_samples(self, split: str) -> int:
        return len(self.datalist.splits[self.check_split(split)])

    def cases(self, split: str) -> list[tuple[str, str]]:
        return self.datalist.cases(self.check_split(split))

    def fingerprint(self, split: str) -> str | None:
        return self.datalist.fingerprint(self.check_split(split))

    def read(self, split: str, indices: Sequence[int]) -> Batch:
        import torch

        items = self._items(split, indices)
        return torch.stack([item["image"] for item in items]), torch.stack([item["label"] for item in items])

    def _items(self, split: str, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        dataset = self._dataset(split)
        # MONAI's way to a kept item takes longer than the rest of a batch of small images.
        kept = dataset._cache
        found = {i: kept[i] for i in indices if i < len(kept) and kept[i] is not None}
        missing = [i for i in indices if i not in found]
        try:
            if self.num_workers > 1 and len(missing) > 1:
                with ThreadPool(self.num_workers) as threads:
                    found.update(zip(missing, threads.map(dataset.__getitem__, missing), strict=True))
            else:
                for i in missing:
                    check_stop()
                    found[i] = dataset[i]
        except RuntimeError as error:  # MONAI's words around ours
            if isinstance(error.__cause__, DataError):
                raise error.__cause__ from None
            raise
        return [found[i] for i in indices]

    def _dataset(self, split: str) -> CacheDataset:
        """The samples of a split, with its part of the cache: what the splits that were read before left over."""
        if split not in self._datasets:
            from monai.data import CacheDataset

            samples = self.datalist.splits[split]
            height, width = self.task.image_size
            each = self.task.in_channels * height * width * 4 + self.target_bytes()
            number = min(len(samples), self._left // each)
            self._left -= number * each
            self._datasets[split] = CacheDataset(
                samples, self.transform(split), cache_num=number, runtime_cache=True, copy_cache=False, progress=False
            )
        return self._datasets[split]


class PhantomImages(ImageData):
    """Synthetic images of one site, as arrays in memory."""

    synthetic = True

    def describe(self, what: str, sizes: Mapping[str, int]) -> None:
        """Sets the line for the log."""
        listed = ", ".join(f"{size} {split}" for split, size in sizes.items())
        self.description = f"SYNTHETIC {what}, not patient data: {listed}"

    @abstractmethod
    def arrays(self, split: str) -> Batch:
        """All images of a split, (n, 1 or the task's channels, height, width) uint8, and their targets."""

    def read(self, split: str, indices: Sequence[int]) -> Batch:
        pictures, targets = self.arrays(split)
        chosen = list(indices)
        inputs = pictures[chosen].float().div_(255)
        return inputs.expand(-1, self.task.in_channels, -1, -1).contiguous(), targets[chosen]
