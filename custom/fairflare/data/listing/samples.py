"""What a checked datalist is made of, and what is wrong with one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fairflare.data.listing.attributes import Attribute

if TYPE_CHECKING:
    from fairflare.data.geometry import Misfit


class DataError(ValueError):
    """Data or settings of a site that cannot be used.

    Args:
        message: for the site's own log: names site, file and key, and says what to do.
        public: the same without file names, paths or values from files; may be sent to the server.
        reason: what is wrong with one file, without site, name and remedy, where it is about one.
        misfit: of slices, or of an image and its mask.
    """

    def __init__(
        self, message: str, public: str | None = None, reason: str | None = None, misfit: Misfit | None = None
    ) -> None:
        super().__init__(message)
        self.misfit = misfit
        self.public = public or "the data of the site cannot be used; the log of the site says why"
        self.reason = reason or message

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str, str, Misfit | None]]:
        return type(self), (str(self), self.public, self.reason, self.misfit)


@dataclass(frozen=True)
class Sample:
    """An image with its mask (a file) or its class; ``slice`` picks one slice when they are volumes.

    ``patient`` and ``volume`` (of a picture that is a slice of one, where its file is not the volume) are the site's
    own keys: they are in no message but its own log's. ``spacing`` is in mm. ``groups``: the number of its group by
    attribute.
    """

    image: Path
    label: Path | int
    slice: int | None = None
    volume: str | None = field(default=None, repr=False)
    patient: str | None = field(default=None, repr=False)
    spacing: tuple[float, ...] | None = None
    groups: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def part_of(self) -> str | None:
        """The volume that it is a slice of; ``None``: it is a picture by itself."""
        return self.volume or (None if self.slice is None else str(self.image))

    @property
    def case(self) -> tuple[str, str]:
        """Whose image it is: its patient's, where the list names patients; else of its volume, else of nothing else."""
        if self.patient is not None:
            return "patient", self.patient
        return ("volume", self.part_of) if self.part_of is not None else ("image", str(self.image))


@dataclass(frozen=True)
class Datalist:
    """The checked datalist of one site: samples by split, with absolute paths."""

    site: str
    file: Path
    splits: Mapping[str, tuple[Sample, ...]]
    class_names: tuple[str, ...] | None = None
    class_groups: Mapping[str, tuple[int, ...]] | None = None
    synthetic: bool = False
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    def cases(self, split: str) -> list[tuple[str, str]]:
        """Whose each sample of a split is, see :attr:`Sample.case`."""
        return [sample.case for sample in self.splits[split]]

    def fingerprint(self, split: str) -> str:
        """The same for lists of the same files: their names, sizes and labels, in any order and any folder."""
        told = sorted(
            (sample.image.name, _size(sample.image), sample.slice, label if isinstance(label, int) else label.name)
            for sample in self.splits[split]
            for label in [sample.label]
        )
        return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def _size(path: Path) -> int:
    """In bytes; that of a folder says nothing."""
    return 0 if path.is_dir() else path.stat().st_size
