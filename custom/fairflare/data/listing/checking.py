"""Check the content of a site's datalist, entry by entry."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairflare.base.checks import is_number, nearest
from fairflare.base.disk.files import lies_in
from fairflare.base.site_data import UNLABELLED
from fairflare.base.stopping import check_stop
from fairflare.data.dicom_files import files_of_series
from fairflare.data.image_file import SUFFIXES, Unknown, kind_of
from fairflare.data.listing.attributes import (
    FORM,
    MAX_NAME,
    Attribute,
    UndeclaredValue,
    groups_of,
    is_name,
    read_declared,
)
from fairflare.data.listing.samples import DataError, Sample

SPLITS = ("training", "validation", "test")
LISTS = (*SPLITS, UNLABELLED)
KEYS = ("image", "label", "patient", "volume", "slice", "spacing", "attributes")  # keys of an entry that are read
BESIDE = (
    "channels",
    "class_names",
    "class_groups",
    "mask_labels",
    "attributes",
    "synthetic",
)  # keys beside the lists of images that are read
MISTYPED = 0.77  # similarity to a known key from which an unknown key is taken for a mistake; "image_id" is below
MEANT = 0.9  # similarity to "unlabelled" from which a list of images is meant for it; "labelled" is below
EXTRA_TEST = "test_"  # prefix of the names of further test lists in a datalist
EXTRA_NAME = re.compile(EXTRA_TEST + "[A-Za-z0-9_-]+")
IDENTIFIERS = ("volume", "patient")  # keys of an entry whose values are shown in no message
LINKS = "list the folder in 'linked_roots' of the site's fairflare.json if links may lead there"


@dataclass(frozen=True)
class CheckedList:
    """Check one site's datalist, and raise or collect the problems that are found."""

    site: str
    root: Path
    file: Path
    class_labels: bool
    several: bool  # whether an image may be a list of files
    folders: tuple[Path, ...]  # folders in which the files must lie after links are resolved
    listed: dict[Path, list[Path]] = field(default_factory=dict)
    problems: list[DataError] | None = None  # list to which problems are added; None if the first problem is raised
    attributes: dict[str, Attribute] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)  # values of the attributes that are numbers
    names: list[Any] = field(default_factory=list)  # ``class_names`` of the list, perhaps not yet checked
    channels: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)  # keys of entries that nothing reads, and where each is first

    @contextmanager
    def note_problems(self) -> Iterator[None]:
        """Collect a ``DataError`` of the ``with`` block in ``problems``; raise the error if problems is ``None``."""
        try:
            yield
        except DataError as error:
            if self.problems is None:
                raise
            self.problems.append(error)

    def bad(self, problem: str, public: str) -> DataError:
        return DataError(
            f"site '{self.site}': datalist '{self.file}': {problem}",
            f"site '{self.site}': the datalist is not usable: {public}",
        )

    def need(self, holds: object, problem: str, public: str) -> None:
        """Raise ``DataError`` with the problem, and with its public words, unless a condition holds."""
        if not holds:
            raise self.bad(problem, public)

    def value(
        self,
        content: dict[str, Any],
        key: str,
        usable: Callable[[Any], object],
        wanted: str,
        public: str,
        whose: str = "",
    ) -> Any:
        """Return the value of a key, ``None`` if there is no such key; raise ``DataError`` unless it is usable.

        Args:
            content: the datalist or an entry of it.
            key: the key.
            usable: function that returns whether a value, which may be ``None``, can be used.
            wanted, public: what the value must be, and what the value is not, for the messages.
            whose: words for the entry, for the messages.
        """
        value = content.get(key)
        got = _kind(value) if key in IDENTIFIERS else f"{value!r:.200}"
        self.need(usable(value), f"'{key}'{whose} must {wanted}, got {got}", f"'{key}'{whose} {public}")
        return value

    def class_names(self, content: dict[str, Any]) -> tuple[str, ...] | None:
        names = self.value(
            content, "class_names", _may_be(_are_names),
            f"be a list of different names of at most {MAX_NAME} characters", "is not a list of different names",
        )  # fmt: skip
        return None if names is None else tuple(names)

    def class_groups(
        self, content: dict[str, Any], names: tuple[str, ...] | None
    ) -> Mapping[str, tuple[int, ...]] | None:
        groups = self.value(
            content, "class_groups",
            _may_be(lambda groups: isinstance(groups, dict) and all(
                is_name(name) and isinstance(members, list) and members
                and all(_is_count(number) and (names is None or number < len(names)) for number in members)
                for name, members in groups.items()
            )),
            'name lists of numbers of classes, such as {"head": [0, 2], "tail": [1]}',
            "does not name lists of classes",
        )  # fmt: skip
        return None if groups is None else {name: tuple(members) for name, members in groups.items()}

    def mask_labels(self, content: dict[str, Any]) -> dict[int, str]:
        names = self.value(
            content, "mask_labels",
            lambda names: not names or (isinstance(names, dict) and all(
                key.isdecimal() and (not name or is_name(name)) for key, name in names.items()
            )),
            "give the name of each value of the masks, or null where it is not known, such as "
            '{"1": "liver", "4": null}',
            "does not give names of values",
        )  # fmt: skip
        return {int(value): name or "" for value, name in (names or {}).items()}

    def splits(self, content: Any) -> dict[str, tuple[Sample, ...]]:
        self.need(
            isinstance(content, dict),
            f"the top level must be an object with the keys {_names(SPLITS)}, got {_kind(content)}",
            "it is not an object with the splits",
        )
        with self.note_problems():
            self.value(
                content, "synthetic", lambda value: isinstance(value or False, bool), "be true or false",
                "is not true or false",
            )  # fmt: skip
        with self.note_problems():
            try:
                self.attributes.update(read_declared(content.get("attributes", {})))
            except ValueError as error:
                raise self.bad(str(error), f"'attributes' must give each attribute as {FORM}") from error
        self.names.extend(named if isinstance(named := content.get("class_names"), list) else ())
        with self.note_problems():
            self.channels.extend(self.value(
                {"channels": [], **content}, "channels", _are_names,
                'be a list of different names, such as ["T2w", "ADC"]', "is not a list of different names",
            ))  # fmt: skip
        checked = dict[str, tuple[Sample, ...]]()
        images, patients = dict[Path, list[str]](), dict[str, list[str]]()
        further = sorted(key for key in content if key.startswith(EXTRA_TEST))
        for split in (*SPLITS, *further, *[UNLABELLED] * (UNLABELLED in content)):
            samples, entries = list[Sample](), list[Any]()
            with self.note_problems():
                entries = self.entries(content, split)
            for number, entry in enumerate(entries):
                with self.note_problems():
                    samples.append(sample := self.sample(entry, f"entry {number} of '{split}'", split))
                    for file in (sample.image, *sample.more):
                        self.one_split(images, file.resolve(), split, f"image '{file}'", "an image")
            for patient in dict.fromkeys(sample.patient for sample in samples if sample.patient is not None):
                with self.note_problems():
                    self.one_split(patients, patient, split, f"patient '{patient}'", "a patient")
            checked[split] = tuple(samples)
        return checked

    def unread_of(self, content: dict[str, Any]) -> Iterator[str]:
        """Yield a note on each list of images that nothing reads, and on each key that is almost a known one.

        All other keys may be there for other programs, such as ``description`` or an entry's ``fold``.

        Raises:
            DataError: a list of images is probably meant for one that is read and absent.
        """
        for key, value in ((key, content[key]) for key in content if key not in BESIDE and not _is_read(key)):
            images = isinstance(value, list) and any(isinstance(one, dict) and "image" in one for one in value)
            # A list of images may be meant for one that is absent. Beside that one it is another program's.
            absent = [name for name in (key.casefold(), UNLABELLED) if _is_read(name) and name not in content]
            known = absent if images else (*BESIDE, *LISTS) if isinstance(value, list) else BESIDE
            near = nearest(key, known, close=MEANT if images else MISTYPED)
            what = f"'{key}', a list of images ({len(value)})" if images else f"the key '{key}'"
            with self.note_problems():
                self.need(
                    not (images and near),
                    f"it has {what}, which is not read{near} Correct the name, or take the list out",
                    f"a list of images has a name that is not read{near}",
                )
            if images != bool(near):
                yield f"the datalist has {what}, which is not read{near}"
        for key, where in self.unread.items():
            if near := "; write it within 'attributes'" * (key in self.attributes) or nearest(
                key, KEYS, close=MISTYPED
            ):
                yield f"{where} has the key '{key}', which is not read{near}"

    def one_split(self, seen: dict[Any, list[str]], key: Any, split: str, what: str, public: str) -> None:
        """Raise ``DataError`` for an image or patient that is in two splits.

        Several test lists may share images and patients; ``training`` and ``unlabelled`` may share patients, and
        volumes of which they list different slices.
        """
        splits = seen.setdefault(key, [split])
        if split in splits:
            return
        splits.append(split)
        alike = "test" if split.startswith("test") else ("training", UNLABELLED) if split == UNLABELLED else split
        other = next((s for s in splits if not s.startswith(alike)), None)
        self.need(
            other is None,
            f"{what} is in both '{other}' and '{split}'; keep each image, and each patient, in one split",
            f"{public} is in both '{other}' and '{split}'",
        )

    def entries(self, content: dict[str, Any], split: str) -> list[Any]:
        self.need(
            split in (*SPLITS, UNLABELLED) or EXTRA_NAME.fullmatch(split),
            f"'{split}' must be 'test_' and a name of letters, digits, '-' and '_'",
            "the name of a further test list is not usable",
        )
        self.need(
            split in content,
            f"key '{split}' is missing; needed are {_names(SPLITS)}, found {_names(sorted(content)) or 'none'}",
            f"key '{split}' is missing",
        )
        entries: Any = content[split]
        self.need(
            isinstance(entries, list), f"'{split}' must be a list, got {_kind(entries)}", f"'{split}' is not a list"
        )
        # Without any label at the site, nothing can be validated or tested there either.
        self.need(
            entries or (split != UNLABELLED and content.get(UNLABELLED) and content.get("training") == []),
            f"split '{split}' is empty; every split needs at least one image with its label",
            f"split '{split}' is empty",
        )
        return list(entries)

    def sample(self, entry: Any, where: str, split: str) -> Sample:
        check_stop()  # checking each file can take long on a network drive
        self.need(
            isinstance(entry, dict),
            f"{where} must be an object with the keys 'image' and 'label', got {_kind(entry)}",
            f"{where} is not an object",
        )
        self.unread.update({key: where for key in entry if key not in (*KEYS, *self.unread)})
        for key in ("image",) if split == UNLABELLED else ("image", "label"):
            self.need(
                key in entry,
                f"{where} has no key '{key}'; every entry needs 'image' and 'label'{nearest(key, entry)}",
                f"{where} has no key '{key}'",
            )
        files, label = [entry["image"]], entry.get("label")
        if isinstance(entry["image"], list) and (self.channels or self.several):
            files = entry["image"]
            wanted = len(self.channels) or max(len(files), 1)
            of_channels = f", one for each of 'channels' ({', '.join(self.channels)})" * bool(self.channels)
            self.need(
                len(files) == wanted == len({*map(str, files)}),
                f"'image' of {where} must be a list of {wanted} different files{of_channels}, got {files!r:.200}",
                f"'image' of {where} is not a list of one file for each channel",
            )
        image, *more = [self.path({"image": file}, "image", where) for file in files]
        if split == UNLABELLED:
            self.need(
                label is None,
                f"{where} has a 'label'; move it to 'training', or take the label out",
                f"{where} has a 'label'",
            )
        elif not self.class_labels:
            label = self.path(entry, "label", where)
        elif isinstance(label, list) and self.names:
            label = self.findings(label, where)
        else:
            hint = {
                "str": "these labels are masks: use --task segmentation; ",
                "list": "labels of several findings need their names, 'class_names' beside the splits; ",
            }.get(type(label).__name__, "")
            self.need(
                _is_count(label),
                f"{hint}'label' of {where} must be the number of a class (a whole number >= 0), got {label!r}",
                f"{hint}'label' of {where} is not the number of a class",
            )
        whose = f" of {where}"
        number = self.value(
            entry, "slice", _may_be(_is_count), "be a whole number >= 0", "is not a whole number >= 0", whose
        )
        volume, patient = (
            self.value(
                entry, key, _may_be(lambda value: (isinstance(value, str) and value) or _is_count(value)),
                f"be a text or a whole number, the same for all images of one {key}", "is not a text", whose,
            )
            for key in IDENTIFIERS
        )  # fmt: skip
        spacing = self.value(
            entry, "spacing",
            _may_be(lambda sizes: isinstance(sizes, list) and len(sizes) in (2, 3)
                    and all(is_number(mm) and mm > 0 for mm in sizes)),
            "be the size of a pixel in mm, 2 or 3 numbers > 0 (rows, columns, slices)", "is not 2 or 3 numbers > 0",
            whose,
        )  # fmt: skip
        try:
            groups = groups_of(entry.get("attributes"), self.attributes)
        except UndeclaredValue as error:
            raise self.bad(f"{where}: {error}", f"{where}: {error.public}") from error
        for name, value in (entry.get("attributes") or {}).items():
            if isinstance(value, (int, float)) and value == value:
                self.numbers.setdefault(name, []).append(value)
        return Sample(
            image, label, number, None if volume is None else str(volume), None if patient is None else str(patient),
            spacing and tuple(map(float, spacing)), groups, tuple(more),
        )  # fmt: skip

    def findings(self, label: list[Any], where: str) -> tuple[int, ...]:
        """Return an image's label for each finding: 1, 0, or -1 where the datalist has null."""
        odd = [value for value in label if value is not None and (isinstance(value, bool) or value not in (0, 1))]
        self.need(
            not odd,
            f"'label' of {where} must hold 1 (there), 0 (not there) or null (not known) for each finding, got "
            f"{next(iter(odd), None)!r:.80}",
            f"'label' of {where} holds other values than 1, 0 and null",
        )
        self.need(
            not set(label) <= {None} and len(label) == len(self.names),
            f"'label' of {where} must say of the {len(self.names)} findings in 'class_names', at least of one, "
            f"whether they are there, got {label!r:.80}; correct it or take the entry out",
            f"'label' of {where} has no value, or not one for each finding",
        )
        return tuple(-1 if value is None else int(value) for value in label)

    def path(self, entry: dict[str, Any], key: str, where: str) -> Path:
        value = entry[key]
        of_classes = "; numbers of classes are for a job with task=classification" * (
            key == "label" and isinstance(value, int)
        ) + '; where each channel is a file, name them all once: "channels": [...] beside the splits' * (
            key == "image" and isinstance(value, list)
        )
        self.need(
            isinstance(value, str) and value,
            f"'{key}' of {where} must be the path of one file, got {_kind(value)}{of_classes}",
            f"'{key}' of {where} is not a path{of_classes}",
        )
        path = Path(os.path.normpath(self.root / value))
        self.need(
            path.is_relative_to(self.root),
            f"'{key}' of {where}, '{value}', lies outside data_root '{self.root}'; "
            "move the file into the folder, or data_root up",
            f"'{key}' of {where} lies outside the data folder",
        )
        try:
            series = self.series(path, key, where) if path.is_dir() else []
            there = path.is_file()
        except OSError as error:  # the name is too long, or a folder may not be read
            raise self.bad(
                f"'{key}' of {where}, '{str(path)[:200]}', cannot be looked at: {error.strerror}; correct the path or "
                "take the entry out",
                f"'{key}' of {where} is no path that can be opened at the site",
            ) from error
        self.need(
            there or series,
            f"'{key}' of {where}, '{path}', does not exist; "
            + (
                "write folders with '/', not with a backslash"
                if "\\" in value
                else "correct the path or take the entry out"
            ),
            f"'{key}' of {where} does not exist",
        )
        self.check_inside(path, key, where)
        self.need(
            kind_of(path, is_folder=not there) is not Unknown,
            f"'{key}' of {where}, '{path}', has an ending that is not known; convert it to one of {_names(SUFFIXES)}",
            f"'{key}' of {where} is of an unknown file type",
        )
        return path

    def series(self, path: Path, key: str, where: str) -> list[Path]:
        """Return the DICOM files of a folder; raise ``DataError`` if the folder has none."""
        if path not in self.listed:  # list a folder once for all entries that pick a slice of it
            self.listed[path] = files_of_series(path)
            for file in self.listed[path]:
                self.check_inside(file, key, where)
        self.need(
            self.listed[path],
            f"'{key}' of {where}, '{path}', is a folder without a DICOM file; name a file, or the folder of one DICOM "
            "series",
            f"'{key}' of {where} is a folder without images",
        )
        return self.listed[path]

    def check_inside(self, path: Path, key: str, where: str) -> None:
        """Raise ``DataError`` if a path is a link that leads out of the allowed folders."""
        if not lies_in(path, self.folders):
            raise self.bad(
                f"'{key}' of {where}, '{path}', is a link to '{path.resolve()}', outside data_root '{self.root}'; "
                f"{LINKS}",
                f"'{key}' of {where} leads out of the data folder",
            )


def _is_read(key: str) -> bool:
    """Return whether a datalist's key is the name of a list of images that is read."""
    return key in LISTS or key.startswith(EXTRA_TEST)


def _may_be(usable: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a function that returns whether a value can be used, or is ``None``."""
    return lambda value: value is None or usable(value)


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_name, values)) and len({*values}) == len(values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
