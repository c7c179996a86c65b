"""Define the interface of one site's opened data, and of batches of these data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fairflare.base import checks

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # inputs, targets
    Device: TypeAlias = torch.device | str

#: Name of a test list of images that belong to no site alone: the common model is measured on this list once.
SPLIT_GLOBAL = "test_global"
#: Name of a list of images without labels; see ``docs/unlabelled.md``.
UNLABELLED = "unlabelled"
#: Name by which data of volumes give fixed patches of their validation volumes as batches.
VALIDATION_PATCHES = "validation patches"
#: Largest number of sliding windows of a volume with which rounds are validated on whole volumes.
MOST_WINDOWS = 64


class Batches(Protocol):
    """Represent batches of (inputs, targets) on the CPU that can be iterated any number of times."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...


class PriorNetwork(Protocol):
    """Represent a frozen image encoder, with whose features a method (Fed-MAS) compares the trained network's."""

    name: str
    width: int  # number of features of an image
    fingerprint: str  # equal on all machines for the same weights

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (n, width) features of a batch of inputs."""

    def to(self, device: Device) -> Any:
        """Return this encoder with its tensors moved to a device."""


class SiteData(ABC):
    """Define the interface of one site's opened data.

    Attributes:
        synthetic: True when the data are synthetic; the log and the results say so.
        description: one line about the data for the site's own log; no file names.
        num_classes: number of classes that the data name, else the highest class number plus 1; ``None`` if the data
            have no classes, or their number is not known.
        class_names: names of all classes, if the data have them.
        class_groups: numbers of the classes of each group (head, medium, tail), if the data have them.
        test_splits: ``"test"``, and further test lists ``"test_<name>"`` (for instance a corrupted copy, or one
            skin tone); their metrics are reported as ``<name>/<metric>``. The images of ``"test_global"`` belong to no
            site alone.
        attributes: names of the groups of people, by attribute (such as sex); the last group of each is ``unknown``.
        annotated: numbers of the structures or classes that the site's file says are annotated; ``None`` if it says
            nothing.
        mask_labels: what each label of the masks is in the site's files, as ``LABEL=VALUE=NAME``; empty if not known.
        channels: numbers of the run's channels that the site's cases have; ``None`` if the run names none.
        lists: all lists (splits) that the data have.
        known: numbers of the findings that at least one label marks as present or absent; ``None`` if the data are
            not labelled with findings.
    """

    synthetic: bool = False
    description: str = ""
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    class_groups: Mapping[str, tuple[int, ...]] | None = None
    test_splits: tuple[str, ...] = ("test",)
    attributes: Mapping[str, tuple[str, ...]] = {}
    annotated: tuple[int, ...] | None = None
    known: tuple[int, ...] | None = None
    mask_labels: tuple[str, ...] = ()
    channels: tuple[int, ...] | None = None

    @property
    def lists(self) -> tuple[str, ...]:
        return "training", "validation", *self.test_splits

    def check_split(self, split: str) -> str:
        """Return ``split``, or raise ``ValueError`` if the data have no list of this name."""
        return checks.choice("split", split, self.lists)

    @abstractmethod
    def num_samples(self, split: str) -> int:
        """Return the number of samples of a list of the site's data, one of ``lists``."""

    def class_counts(self, split: str) -> torch.Tensor | None:
        """Return the number of samples of each class, (classes,) int64; ``None`` if samples have no class."""
        return None

    def cases(self, split: str) -> Sequence[Hashable] | None:
        """Return the case key of each sample of a split.

        Samples with the same key (of a patient, of a volume) are not independent of each other.

        A key is ``(kind, name)`` with the kind patient, volume or image. Keys never leave the site. The
        result is ``None`` if each sample is its own case, or the cases are not known.
        """
        return None

    def group_numbers(self, split: str, attribute: str) -> Sequence[int]:
        """Return the number of each sample's group in ``attributes[attribute]``, in the order of the list."""
        raise ValueError(f"these data have no attribute {attribute!r}")

    def num_cases(self, split: str) -> int:
        """Return the number of different cases (patients, volumes or images) in a split of the site's data."""
        cases = self.cases(split)
        return self.num_samples(split) if cases is None else len(set(cases))

    def class_cases(self, split: str) -> torch.Tensor | None:
        """Return the number of different cases of each class, (classes,) int64.

        For a finding the number is that of the cases with it or of those without it, whichever is smaller; for a
        structure that of the cases whose mask has it. The result is ``None`` if samples have neither classes, findings
        nor structures, or the numbers of this split are not known.
        """
        return self.class_counts(split) if self.cases(split) is None else None

    def identities(self, split: str) -> Sequence[Hashable]:
        """Return a key of each sample's case that is the same in all jobs, whatever the settings of a job are."""
        return self.cases(split) or range(self.num_samples(split))

    def chosen(self, split: str, numbers: Sequence[int], shuffle_seed: int, augment: bool) -> Batches:
        """Return the samples with these numbers as one batch, prepared as by :meth:`batches`."""
        raise ValueError("these data cannot be read sample by sample")

    def enough(self, least: int) -> SiteData:
        """Return the data without records of classes with fewer than ``least`` cases; default: the data themselves.

        In each list, images of a class with fewer cases are left out, labels of a finding with fewer cases count as
        unknown, and :meth:`structures` omits a structure with fewer cases. A list that would become empty stays whole,
        with 0 cases.
        """
        return self

    def structures(self, split: str) -> tuple[int, ...] | None:
        """Return the numbers of the structures that enough cases of a list mark; ``None``: all, or uncounted."""
        return None

    def marks(self, split: str) -> Sequence[tuple[Hashable, Collection[int]]] | None:
        """Return the case of each image of a split, with the numbers of the structures or classes that its label has.

        ``None`` if this is not known.
        """
        return None

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int] | None:
        """Return the list indices of the samples of :meth:`batches` in their order for a seed; ``None`` if unknown."""
        return None

    def fingerprint(self, split: str) -> str | None:
        """Return a fingerprint of a split's list, equal at all sites with the same list; ``None`` if not known."""
        return None

    @abstractmethod
    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        """Return batches of a split, every sample exactly once, the last batch smaller if need be.

        Args:
            split: ``"training"``, ``"validation"`` or one of ``test_splits``.
            batch_size: samples in a batch, ``>= 1``.
            shuffle_seed: None keeps the order of the site's list. A number gives the order (and the augmentation) that
                belongs to this number, the same in every call; use another number for each epoch.
            augment: random flips and the like; needs a ``shuffle_seed``.

        Raises:
            DataError: the split cannot be read, or a sample of it is not usable.
        """


def shuffled(count: int, seed: int | None) -> list[int]:
    """Return the indices 0 to ``count`` - 1 in a seed's random order; in ascending order if it is ``None``."""
    import torch

    if seed is None:
        return list(range(count))
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


class Proxy:
    """Wrap a site's data, or batches of them: a subclass changes some methods, all others are those of ``inner``.

    Args:
        inner: the wrapped object.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # the attribute is not set yet, as when a copy is made
            raise AttributeError(name)
        return getattr(self._inner, name)
