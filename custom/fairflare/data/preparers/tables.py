"""CSV files that come with data sets, and the images that they name."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fairflare.data.datalist import DataError, suffix_of
from fairflare.data.image_file import SUFFIXES
from fairflare.data.preparers.names import existing_folder, listing

Row = Mapping[str, str]

log = logging.getLogger(__name__)


def read_table(file: Path, needed: Sequence[str] = (), remedy: str = "") -> list[Row]:
    """The rows of a CSV file with a head line; commas, semicolons or tabs, as the head has them.

    Args:
        file: the table.
        needed: columns that it must have.
        remedy: what to do where one is missing.

    Raises:
        DataError: it cannot be read, is empty, or lacks a column; names what is there.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{file}' cannot be read: {getattr(error, 'strerror', None) or error}") from error
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    rows = list(csv.DictReader(text.splitlines(), delimiter=delimiter))
    columns = [name.strip() for name in head.strip().split(delimiter)]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(
            f"'{file}': expected the columns {', '.join(needed)}; missing: {', '.join(missing)}; found: {head}{remedy}"
        )
    if not rows:
        raise DataError(f"'{file}' has no rows")
    return [{(k or "").strip(): (v or "").strip() for k, v in row.items() if isinstance(v, str | None)} for row in rows]


def find_table(source: Path, names: Sequence[str]) -> Path:
    """The file of one of these names (``/`` for folders) in the source folder.

    Raises:
        DataError: there is none; names what was expected and what is there.
    """
    for name in names:
        if (source / name).is_file():
            return source / name
    raise DataError(f"'{existing_folder(source)}': expected {' or '.join(names)}; found {_content(source)}")


def find_below(source: Path, name: str) -> Path | None:
    """The file of this name, small or capital, anywhere below a folder, the one that lies highest; None: there is none.

    Of tables that come by themselves, and lie where the one who fetched them put them.
    """
    found = [path for path in existing_folder(source).rglob("*.*") if path.name.lower() == name.lower()]
    return min(found, key=lambda path: (len(path.parts), path), default=None)


def find_folder(source: Path, names: Sequence[str]) -> Path:
    """The folder of one of these names; where it holds nothing but a folder of the same name, that one."""
    for name in names:
        folder = source / name
        if folder.is_dir():
            inner = folder / folder.name
            return inner if inner.is_dir() else folder
    raise DataError(f"'{existing_folder(source)}': expected the folder {' or '.join(names)}; found {_content(source)}")


def _content(source: Path) -> str:
    return listing(path.name + "/" * path.is_dir() for path in source.iterdir())


class Images:
    """The images of a folder by their name, with or without the ending, however deep they lie.

    Args:
        folder: to look in.
        endings: of images; default: all that a datalist may name.
        folders: paths below it that are images as well: of DICOM series.
    """

    def __init__(self, folder: Path, endings: Iterable[str] = SUFFIXES, folders: Iterable[Path] = ()) -> None:
        self.folder = existing_folder(folder)
        self.endings = tuple(endings)
        files = (path for path in folder.rglob("*") if suffix_of(path) in self.endings and path.is_file())
        self.paths = sorted([*files, *folders])
        self._known: dict[str, list[Path]] = {}
        for path in self.paths:
            names = [key for name in (path.relative_to(folder).as_posix(), path.name) for key in self._spellings(name)]
            for name in dict.fromkeys(names):
                self._known.setdefault(name, []).append(path)

    def _spellings(self, name: str) -> list[str]:
        """A name, with a small ending, and without one that is an image's: tables and disks differ in these."""
        ending = suffix_of(Path(name))
        stem = name[: len(name) - len(ending)] if ending in self.endings else name
        return [name, *([stem + ending, stem] if stem != name else [])]

    def find(self, name: str) -> Path | None:
        """The image of this path below the folder, or of this name if only one has it; None: there is none.

        The ending may be written otherwise, in capitals, or be missing.

        Raises:
            DataError: several have this name.
        """
        for key in dict.fromkeys([*self._spellings(name), *self._spellings(Path(name).name)]):
            found = self._known.get(key, [])
            if len(found) > 1:
                raise DataError(f"'{self.folder}': several images are called '{name}': {listing(map(str, found))}")
            if found:
                return found[0]
        return None

    def all(self, names: Sequence[str], named_by: Path) -> list[Path]:
        """The image of each name.

        Raises:
            DataError: some are not there; says which, and how many.
        """
        found = [self.find(name) for name in names]
        missing = [name for name, path in zip(names, found, strict=True) if path is None]
        if missing:
            raise DataError(
                f"'{self.folder}': {len(missing)} of {len(names)} images that '{named_by}' names are not there: "
                f"{listing(missing)}; the folder has {len(self.paths)} images, such as "
                f"{listing(path.name for path in self.paths[:3])}"
            )
        return [path for path in found if path is not None]


def one_hot(file: Path, rows: Sequence[Row], names: Sequence[str]) -> list[int]:
    """The class of each row from columns of 0 and 1, one for each class.

    Raises:
        DataError: a row has none or several.
    """
    found = []
    for number, row in enumerate(rows, 2):
        chosen = [index for index, name in enumerate(names) if _is_one(row[name])]
        if len(chosen) != 1:
            raise DataError(
                f"'{file}', line {number}: expected a 1 in one of the columns {', '.join(names)}, got {dict(row)}"
            )
        found.append(chosen[0])
    return found


def _is_one(text: str) -> bool:
    try:
        return float(text) == 1.0
    except ValueError:
        return False


def say_counts(what: str, found: Sequence[object], expected: Sequence[int]) -> None:
    """A warning in the log where a data set has other numbers of images than the published one.

    Args:
        what: the data set.
        found: class (site) of each image.
        expected: images of each class.
    """
    counts = [sum(number == place for number in found) for place in range(len(expected))]
    if counts != list(expected):
        text = "%s: expected %s (sum %d), found %s (sum %d); it goes on with these"
        log.warning(text, what, list(expected), sum(expected), counts, len(found))
