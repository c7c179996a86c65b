"""What the preparers of own files share: whose an image is, tables with columns of any name, a look at each file."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairflare.base.checks import nearest
from fairflare.data.datalist import SPLITS, DataError, suffix_of
from fairflare.data.geometry import Misfit, by_kind, fit, notes_of
from fairflare.data.image_file import image_file
from fairflare.data.preparers.common import Item, file_name
from fairflare.data.preparers.names import listing
from fairflare.data.preparers.tables import Images, read_table

log = logging.getLogger(__name__)

SPLIT_NAMES: Mapping[str, str] = {
    "train": "training", "training": "training", "val": "validation", "valid": "validation",
    "validation": "validation", "test": "test",
}  # fmt: skip
OPTIONAL = ("site", "patient", "split")
FURTHER = "column "
NOT_KNOWN = ("", "unknown", "na", "nan", "none")  # what tables have in place of a value, in small letters
VOLUMES = "`fairflare prepare volumes` takes volumes, with --slices axial as pictures"

Groups = str | Sequence[str] | Mapping[str, str] | None


def groups_by_site(given: Groups, sites: Collection[str]) -> dict[str, str | None]:
    """The expression of every site.

    Args:
        given: one for all; ``SITE=EXPRESSION`` texts, perhaps with one for all others; or by site; ``None``: none.
        sites: all that there are.

    Raises:
        ValueError: an expression that is none, or without a part in brackets; two of one site; an unknown site.
    """
    found: dict[str, str | None] = {}
    for text in [given] if isinstance(given, str) else given or ():
        site, equals, rest = text.partition("=")
        own = (text, given[text]) if isinstance(given, Mapping) else (site, rest) if equals and site in sites else None
        site, expression = own or ("", text)
        if site and site not in sites:
            raise ValueError(f"group: there is no site {site!r}{nearest(site, sites)}")
        if site in found:
            raise ValueError(f"group has two expressions {f'of site {site!r}' if site else 'without a site'}")
        try:
            parts = re.compile(expression).groups
        except re.error as error:
            raise ValueError(f"group must be a regular expression, got {expression!r}: {error}") from error
        if parts < 1:
            raise ValueError(f"group must have a part in brackets that is the patient, got {expression!r}")
        found[site] = expression
    return {site: found.get(site, found.get("")) for site in sites}


def patient_of(text: str, group: str | None, site: str, image: Path) -> str | None:
    """The patient in a text, by the expression of its site; None: there is no expression.

    Raises:
        DataError: it does not match; says the ``site`` and the ``image``.
    """
    match = re.search(group, text) if group is not None else None
    if group is not None and match is None:
        where = f"site '{site}': " if site else ""
        raise DataError(
            f"{where}'{image}' does not match group '{group}', so its patient is not known; give the site an "
            f"expression of its own (--group '{site or 'SITE'}=EXPR')"
        )
    return match.group(1) if match else None


def person_in_header(path: Path, seed: int) -> str | None:
    """A key of the patient of a DICOM file: the start of a hash; None: the header says nothing."""
    import pydicom

    try:
        header: Any = pydicom.dcmread(path, specific_tags=["PatientID"], stop_before_pixels=True)
    except Exception as error:  # pydicom raises what it likes for a damaged file
        raise DataError(f"'{path}' cannot be read: {error}; fetch the file again, or leave it out") from error
    own = str(header.get("PatientID", ""))
    return hashlib.sha256(f"{seed}/{own}".encode()).hexdigest()[:16] if own else None


def listed_item(
    source: Path, image: Path, target: int | Path, *, site: str = "", patient: str | None = None, split: str = "",
    attributes: Mapping[str, str | float] | None = None,
) -> Item:  # fmt: skip
    """An image below the source; what has no patient is its own group."""
    name = file_name(image.relative_to(source).as_posix()[: -len(suffix_of(image)) or None])
    key = f"{site}/{patient}" if patient else name
    splits = (split,) if split else ()
    return Item(name, key, image, target, patient or None, site, splits, attributes=attributes)


def table_file(source: Path, csv: str | Path) -> Path:
    """A table below the source, else as seen from the working folder.

    Raises:
        DataError: it is in neither place.
    """
    places = (source / csv, Path(csv))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"the table '{csv}' is neither below '{source}' nor below the working folder '{Path.cwd()}'")
    return found


def listed_rows(
    source: Path, file: Path, columns: Mapping[str, str], of: str, images: Images | None = None,
    more: Collection[str] = (),
) -> list[dict[str, str]]:  # fmt: skip
    """The rows of a CSV file: ``path`` of the image, what stands beside it (``of``), ``site``, ``patient``, ``split``.

    Args:
        source: folder that the images lie below.
        file: the table.
        columns: what columns are called, where not so.
        of: ``"label"``, or ``"mask"``, which becomes a path too.
        images: that it may name; default: all of the folder.
        more: further columns; their texts are in the rows with :data:`FURTHER` in front of their names.

    Raises:
        DataError: a column or an image is not there, or a split is not known.
    """
    called = called_columns(columns, ("image", of, *OPTIONAL))
    remedy = f"; where columns have other names: --columns image=COLUMN {of}=COLUMN, --attributes NAME=COLUMN"
    table = read_table(file, [called["image"], called[of], *more], remedy)
    images = images or Images(source)
    paths = images.all([row[called["image"]] for row in table], file)
    rows = []
    for number, (row, path) in enumerate(zip(table, paths, strict=True), 2):
        found = {key: row.get(called[key], "") for key in (of, *OPTIONAL)}
        found |= {FURTHER + name: row[name] for name in more}
        if not found[of]:
            raise DataError(f"'{file}', line {number}: the {of} is missing")
        rows.append({**found, "path": str(path), "split": split_name(found["split"], file, number)})
    if of == "mask":
        masks = images.all([row[of] for row in rows], file)
        rows = [{**row, of: str(mask)} for row, mask in zip(rows, masks, strict=True)]
    return rows


def columns_of(attributes: Mapping[str, str] | None) -> dict[str, tuple[str, list[float]]]:
    """Column and inner edges of the bins of each attribute; without edges it is a category.

    Raises:
        ValueError: edges that are no numbers; an attribute without a column.

    >>> columns_of({"sex": "sex", "age": "age_approx:40,60"})
    {'sex': ('sex', []), 'age': ('age_approx', [40.0, 60.0])}
    """
    found = {}
    for name, told in (attributes or {}).items():
        column, _, edges = told.partition(":")
        try:
            found[name] = (column, [float(edge) for edge in edges.split(",")] if edges else [])
        except ValueError:
            raise ValueError(f"attributes: {name}={told!r} must be COLUMN or COLUMN:EDGE,EDGE with numbers") from None
    return found


def attributes_of(
    attributes: Mapping[str, str] | None, rows: Sequence[Mapping[str, str]], file: Path, prefix: str = ""
) -> tuple[dict[str, Any], list[dict[str, str | float]]]:
    """How the attributes are declared in a datalist, and those of each row; what is not known is left out.

    Args:
        attributes: as in :func:`columns_of`.
        rows: of the table.
        file: that they are from.
        prefix: in front of the columns' names in the rows.

    Raises:
        DataError: a value that is no number where there are bins.
    """
    declared: dict[str, Any] = {}
    found: list[dict[str, str | float]] = [{} for _ in rows]
    for name, (column, edges) in columns_of(attributes).items():
        texts = [row.get(prefix + column, "") for row in rows]
        known = [None if text.lower() in NOT_KNOWN else text for text in texts]
        if not edges:
            declared[name] = {"kind": "category", "values": sorted({text for text in known if text is not None})}
        else:
            declared[name] = {"kind": "number", "bins": edges}
        for number, (own, text) in enumerate(zip(found, known, strict=True), 2):
            if text is not None:
                own[name] = _as_number(text, f"'{file}', line {number}: column '{column}'") if edges else text
        log.info("%s: %d of %d images without a value of %r", file, known.count(None), len(rows), name)
    return declared, found


def _as_number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{where} must be a number, got '{text}'") from None


def called_columns(given: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """What each known column is called in a file.

    Raises:
        ValueError: a column that is not known.
    """
    strange = [name for name in given if name not in known]
    if strange:
        raise ValueError(f"columns must be some of {', '.join(known)}, got {', '.join(strange)}")
    return {name: given.get(name, name) for name in known}


def split_name(text: str, file: Path, line: int) -> str:
    """A split by one of its usual names; nothing stays nothing."""
    if text and text.lower() not in SPLIT_NAMES:
        raise DataError(f"'{file}', line {line}: the split is '{text}'; expected one of {', '.join(SPLITS)}")
    return SPLIT_NAMES.get(text.lower(), "")


def class_names(labels: Sequence[str], given: Sequence[str] | None = None) -> list[str]:
    """The names of the classes, in the order of their numbers.

    Raises:
        DataError: there are fewer than two, or a label is none of those that are given.
    """
    found = sorted(set(labels))
    if given:
        if len(set(given)) != len(given):
            raise ValueError(f"classes must be different names, got {list(given)}")
        if strange := [label for label in found if label not in given]:
            raise DataError(f"an image has the label '{strange[0]}'; the classes are {', '.join(given)}")
        return list(given)
    if len(found) < 2:
        raise DataError(f"expected at least two classes, found {listing(found)}")
    if all(label.isdigit() for label in found):
        return [str(number) for number in range(max(map(int, found)) + 1)]
    return found


def check_pictures(items: Iterable[Item], drawn_on: str | None = None) -> list[str]:
    """Opens the header of every file, and asks how each mask lies on its image; returns what is to be said of them.

    Raises:
        DataError: some are volumes (says what takes these), cannot be opened, or do not go together; a line a kind.
    """
    bad: list[str] = []
    volumes: list[str] = []
    misfits: list[tuple[str, Misfit]] = []
    notes: list[str] = []
    for item in items:
        grids = []
        for path in (path for path in (item.image, item.mask) if isinstance(path, Path)):
            try:
                facts = image_file(path).facts()
            except Misfit as error:
                misfits.append((f"'{path}'", error))
                continue
            except Exception as error:  # the libraries raise what they like for a damaged file
                bad.append(f"'{path}' ({error})")
                continue
            if (facts.slices or 1) > 1:
                volumes.append(f"'{path}' ({facts.slices} slices)")
            grids.append(facts.grid)
        notes += [grid.note for grid in grids]
        if len(grids) == 2:
            found = fit(grids[0], grids[1], drawn_on)
            if isinstance(found, Misfit):
                misfits.append((f"'{item.mask}' of '{item.image}'", found))
            else:
                notes.append(found.note)
    if volumes:
        raise DataError(f"{len(volumes)} file(s) are volumes, not pictures, such as {volumes[0]}; {VOLUMES}")
    if bad:
        raise DataError(f"{len(bad)} file(s) cannot be opened; repair them or take them out: {listing(bad)}")
    if misfits:
        lines = "".join(f"\n- {line}" for line in by_kind(misfits))
        raise DataError(f"{len(misfits)} file(s) or pair(s) cannot be used:{lines}")
    return notes_of(notes)
