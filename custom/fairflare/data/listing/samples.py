"""Represent a checked datalist, its samples, and errors in a site's data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fairflare.data.listing.attributes import Attribute

if TYPE_CHECKING:
    from fairflare.data.geometry import Misfit
WHITE = 255  # value of a single structure in many masks
BLOCK = 4096  # number of bytes of each of a file's beginning, middle and end that enter a checksum


class DataError(ValueError):
    """Report data or settings of a site that cannot be used.

    Args:
        message: text for the site's own log; it names site, file and key, and tells how to correct the problem.
        public: the same text without file names, paths or values from files; it may be sent to the server.
        reason: the problem of a single file in words, without site, file name and remedy.
        misfit: the contradiction in geometry, if slices form no stack or a mask does not fit its image.
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


def shareable(text: str) -> DataError:
    """Return the error about data whose whole text names no file, so that it may leave the site."""
    return DataError(text, text)


@dataclass(frozen=True)
class Sample:
    """Represent an image with its mask (a file), its class, or 1, 0 or -1 (not known) for each finding.

    ``slice`` picks one slice when the files are volumes.

    ``label`` is ``None`` in the list ``unlabelled``.

    ``patient`` and ``volume`` are identifiers that the site gave to a person, and to a volume of which each slice is a
    file of its own; they appear in no message except the site's own log. ``spacing`` is the size of a pixel in mm.
    ``groups`` is the index of the image's group, by the name of the attribute. ``more`` are further files of the image,
    in their order, where each channel is a file.
    """

    image: Path
    label: Path | int | tuple[int, ...] | None
    slice: int | None = None
    volume: str | None = field(default=None, repr=False)
    patient: str | None = field(default=None, repr=False)
    spacing: tuple[float, ...] | None = None
    groups: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    more: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files of the image: one for each channel, or one for all."""
        return (self.image, *self.more)

    @property
    def mask(self) -> Path | None:
        """Return the file of the mask; ``None`` if the image has no label, or a class or findings."""
        return self.label if isinstance(self.label, Path) else None

    @property
    def part_of(self) -> str | None:
        """Return the identifier of the volume that the image is a slice of; ``None`` for a single picture."""
        return self.volume or (None if self.slice is None else str(self.image))

    @property
    def case(self) -> tuple[str, str]:
        """Return kind and name of the case that the image belongs to: patient, else volume, else the image itself."""
        if self.patient is not None:
            return "patient", self.patient
        return ("volume", self.part_of) if self.part_of is not None else ("image", str(self.image))


@dataclass(frozen=True)
class Datalist:
    """Represent the checked datalist of one site: samples by split, with absolute paths.

    ``doubts`` has a line, for the site alone, on each name or number that may be a mistake. ``mask_labels`` has the
    values that `prepare` found in the masks, with their names (empty: not known). ``channels`` has the names of the
    channels, in the order of an image's files, or along the fourth axis of its only file; empty: there is one.
    """

    site: str
    file: Path
    splits: Mapping[str, tuple[Sample, ...]]
    class_names: tuple[str, ...] | None = None
    class_groups: Mapping[str, tuple[int, ...]] | None = None
    synthetic: bool = False
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    mask_labels: Mapping[int, str] = field(default_factory=dict)
    channels: tuple[str, ...] = ()

    def meanings(self, coding: Mapping[int, int] | None) -> tuple[str, ...]:
        """Return what each label of the masks is in the site's files, as ``LABEL=VALUE=NAME``.

        VALUE is empty if the site's file gives the values other labels than 1, 2, ... in their order: then somebody
        decided what they mean. The white of masks of 0 and 255 counts as 1. A label of several values is left out.

        Args:
            coding: ``{value in the file: label}``; ``None`` if the values are the labels.
        """
        plain = {value: 1 if {*self.mask_labels} == {WHITE} else value for value in sorted({*self.mask_labels} - {0})}
        by_order = coding in (None, {value: label for label, value in enumerate([0, *plain])})
        labels = plain if coding is None else {value: coding.get(value, 0) for value in plain}
        return tuple(
            f"{label}={plain[value] if by_order else ''}={self.mask_labels[value]}"
            for value, label in labels.items()
            if label and list(labels.values()).count(label) == 1
        )

    def cases(self, split: str) -> list[tuple[str, str]]:
        """Return the case (patient, volume or image) of each sample of a split, see :attr:`Sample.case`."""
        return [sample.case for sample in self.splits[split]]

    def fingerprint(self, split: str) -> str:
        """Return a checksum of a split's files and labels, the same in any order and any folder.

        The checksum is of each file's name, size, and 4 KiB each of its beginning, middle and end: reading whole
        volumes would take as long as a round.
        """
        marks = sorted(
            (
                sample.image.name, _mark(sample.image), sample.slice,
                _mark(label) if isinstance(label, Path) else label, *map(_mark, sample.more),
            )
            for sample in self.splits[split]
            for label in [sample.label]
        )  # fmt: skip
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:32]


def _mark(path: Path) -> str:
    """Return a checksum of a file's size and of three of its blocks; for a folder, those of all its files."""
    if path.is_dir():
        return " ".join(sorted(f"{file.name} {_mark(file)}" for file in path.iterdir() if file.is_file()))
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - BLOCK)):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
