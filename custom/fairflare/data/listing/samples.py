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
BLOCK = 4096  # bytes of each of three places of a file that its checksum is of


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
        """Return whose each sample of a split is, see :attr:`Sample.case`."""
        return [sample.case for sample in self.splits[split]]

    def fingerprint(self, split: str) -> str:
        """Return a checksum of a split's files and labels, the same in any order and any folder.

        Of a file count its name, its size, and 4 KiB each of its beginning, middle and end: reading whole volumes would
        take as long as a round.
        """
        marks = sorted(
            (sample.image.name, _mark(sample.image), sample.slice, label if isinstance(label, int) else _mark(label))
            for sample in self.splits[split]
            for label in [sample.label]
        )
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:32]


def _mark(path: Path) -> str:
    """Return a checksum of a file's size and of three blocks of it, or of all files of a series."""
    if path.is_dir():
        return " ".join(sorted(f"{file.name} {_mark(file)}" for file in path.iterdir() if file.is_file()))
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - BLOCK)):
            file.seek(start)
            found.update(file.read(BLOCK))
    return found.hexdigest()
