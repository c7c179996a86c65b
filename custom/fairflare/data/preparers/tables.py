"""Read tables that come with data sets, as R, Excel and old systems write them, and find the images they name."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from fairflare.base.checks import group_by_key, refuse
from fairflare.data.datalist import DataError, suffix_of
from fairflare.data.image_file import SUFFIXES, VOLUMES
from fairflare.data.preparers.contents import contents, strip_ending
from fairflare.data.preparers.names import compose, listing

MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}  # byte order marks of encodings
WINDOWS = "cp1252"  # encoding that Excel writes in western Europe and America; nearly the same as latin-1
WORKBOOKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # first bytes of workbooks of Excel and LibreOffice, new and old

log = logging.getLogger(__name__)


class Row(dict[str, str]):
    """Represent a row of a table: its texts by column, without surrounding blanks.

    Attributes:
        line: line of the file in which the row begins, from 1.
        where: file and line of the row, in words.
    """

    def __init__(
        self, texts: Mapping[str, str] | Iterable[tuple[str, str]] = (), line: int = 0, where: str = ""
    ) -> None:
        super().__init__(texts)
        self.line, self.where = line, where


def read_table(
    file: Path, needed: Sequence[str] = (), remedy: str = "", notes: list[str] | None = None
) -> list[Row]:  # fmt: skip
    """Read the rows of a table with a head line: commas, semicolons or tabs; quoted or not; ``sep=;`` before the head.

    The encoding is UTF-8, UTF-16 if the file has its mark, or else Windows-1252, which is reported. Empty rows are
    skipped.

    Args:
        file: path of the table.
        needed: columns that the table must have.
        remedy: advice for the message about a missing column.
        notes: list to which notes on the table are added; None if they are logged as warnings.

    Raises:
        DataError: the table cannot be read, is empty, or lacks a column; the message names the existing columns.
    """
    text = _text_of(file, notes)
    first, _, rest = text.partition("\n")
    start = first.strip().strip('"').lower()
    delimiter, before = "", 1
    if start.startswith("sep=") and len(start) <= len("sep=;"):
        delimiter, text, before = first.strip().strip('"')[4:] or "\t", rest, 2
    head_line = next((line for line in text.split("\n") if line.strip()), "")
    delimiter = delimiter or max(",;\t|", key="".join(head_line.split('"')[::2]).count)  # outside quotes
    filled = _read_filled_rows(file, text, delimiter, before)
    refuse({f"'{file}' has no rows; give a head line and a row for each image": len(filled) < 2}, DataError)
    (head_at, head), *body = filled
    columns = [compose(name) for name in head]
    missing, twice = ([n for n in needed if columns.count(n) == 0], [n for n in needed if columns.count(n) > 1])
    refuse({
        f"expected the columns {', '.join(needed)}; missing: {', '.join(missing)}; found: "
        f"{', '.join(name or '(no name)' for name in columns)}{remedy}": bool(missing),
        f"several columns are called {', '.join(twice)}; rename one": bool(twice),
    }, lambda problem: DataError(f"'{file}', line {head_at}: {problem}"))  # fmt: skip
    columns, body = _columns(file, columns, body)
    return [Row(zip(columns, texts, strict=False), line, f"'{file}', line {line}") for line, texts in body]


def _text_of(file: Path, notes: list[str] | None) -> str:
    """Return the text of a table's file, with ``\\n`` at the ends of lines.

    Raises:
        DataError: the file cannot be read or is no text; the message names the format to save it in.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror or error}") from error
    coding = next((name for mark, name in MARKS.items() if content.startswith(mark)), "utf-8")
    refuse({
        f"'{file}' is a workbook, not a text; save the sheet as 'CSV UTF-8'": content.startswith(WORKBOOKS)
    }, DataError)  # fmt: skip
    try:
        text = content.decode(coding)
    except UnicodeDecodeError:
        text = content.decode(WINDOWS, "replace").replace("\ufffd", "\0")
        strange = next((word for word in text.split() if not word.isascii()), "")
        note = f"'{file}' is not UTF-8; it is read as Windows-1252, such as '{strange:.60}'"
        log.warning(note) if notes is None else notes.append(note)
    refuse({
        f"'{file}' is no text in UTF-8, UTF-16 or Windows-1252; save the table as 'CSV UTF-8'": "\0" in text
    }, DataError)  # fmt: skip
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_filled_rows(file: Path, text: str, delimiter: str, line: int) -> list[tuple[int, list[str]]]:
    """Return the non-empty rows of a table's text, each with its line number; ``line`` is that of the first."""
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True, strict=True)
    rows = []
    begins = line
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            rows += [(begins, cells)] if any(cells) else []
            begins = line + reader.line_num
    except csv.Error as error:
        raise DataError(f"'{file}' cannot be read: line {begins}: {error}; save the table as 'CSV UTF-8'") from error
    width = max((len(row) for _, row in rows), default=0)
    return [(begin, row + [""] * (width - len(row))) for begin, row in rows]


def _columns(
    file: Path, columns: list[str], body: list[tuple[int, list[str]]]
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the names of a table's columns, and its rows with one text for each column.

    R's ``write.table`` gives the column of row numbers no name: rows then have one cell more than the head, in front.

    Raises:
        DataError: a row has more cells than the head has names.
    """
    named = max((number for number, name in enumerate(columns, 1) if name), default=0)
    longest = max((n for _, row in body for n, text in enumerate(row, 1) if text), default=0)
    first = int(longest == named + 1 and columns[0] != "" and all(row[named] and row[0].isdigit() for _, row in body))
    if over := [line for line, row in body if any(row[first + named :])]:
        raise DataError(
            f"'{file}', line {over[0]}: it has more cells than the head has names; put cells with a comma, semicolon "
            "or tab in quotes"
        )
    return columns[:named], [(line, row[first : first + named]) for line, row in body]


class Images:
    """Find images at any depth below a folder by their names, with or without the ending.

    Args:
        folder: folder to search.
        endings: endings of images; default: all that a datalist may name.
        folders: folders of DICOM series, which count as images too.
    """

    def __init__(self, folder: Path, endings: Iterable[str] = SUFFIXES, folders: Collection[Path] = ()) -> None:
        self.folder = folder
        self.contents = contents(folder, tuple(endings))
        self.paths = sorted(  # in the folder of a series a DICOM file is no image of its own
            {path for path in self.contents.images if path.parent not in folders or suffix_of(path) in VOLUMES}
            | {*folders}
        )
        self._known = group_by_key((name, path) for path in self.paths for name in _spellings(path.name))

    def find(self, name: str) -> Path | None:
        """Return the path of the image that a table names by this path or name, or None if there is no such image.

        The folders in ``name`` and in the image's path must agree as far as both name any. The ending may be in
        capitals or missing; letters may be composed or not.

        Raises:
            DataError: several images have this name.
        """
        asked = _parts(name)
        for key in _spellings(asked[-1]) if asked else ():
            near = [
                path
                for path in self._known.get(key, [])
                if all(a == b for a, b in zip(self._parents(path), asked[-2::-1], strict=False))
            ]
            exact = [path for path in near if path.name == asked[-1]]
            matches = exact if len(exact) == 1 else near
            if len(matches) > 1:
                raise DataError(f"'{self.folder}': several images are called '{name}': {listing(map(str, matches))}")
            if matches:
                return matches[0]
        return None

    def _parents(self, path: Path) -> list[str]:
        """Return the folders of an image below the searched one, from the innermost outwards."""
        return _parts(path.relative_to(self.folder).as_posix())[-2::-1]

    def all(self, names: Sequence[str], named_by: Path) -> list[Path]:
        """Return the path of the image of each name.

        Raises:
            DataError: some images do not exist; the message gives their number and names some.
        """
        paths = [self.find(name) for name in names]
        if missing := [name for name, path in zip(names, paths, strict=True) if path is None]:
            unread = self.contents.list_unread()
            raise DataError(
                f"'{self.folder}': {len(missing)} of {len(names)} images that '{named_by}' names are not there: "
                f"{listing(missing)}; the folder has {len(self.paths)} images, such as "
                f"{listing(path.name for path in self.paths[:3])}" + (f"; not read: {unread}" if unread else "")
            )
        return [path for path in paths if path is not None]


def _spellings(name: str) -> list[str]:
    """Return the spellings by which an image is known: the name, with its ending in small letters, and without it."""
    name = compose(name)
    stem = strip_ending(name)
    return list(dict.fromkeys([name, stem + suffix_of(Path(name)), stem] if stem != name else [name]))


def _parts(name: str) -> list[str]:
    """Return the parts of a path written with slashes or backslashes."""
    return [part for part in PurePosixPath(compose(name).replace("\\", "/")).parts if part not in ("/", ".")]
