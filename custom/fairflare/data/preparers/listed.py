"""Derive an image's patient, class, split and attributes from tables and names."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from fairflare.base.checks import nearest, refuse
from fairflare.base.own_errors import reading_as
from fairflare.data.datalist import SPLITS, DataError
from fairflare.data.dicom_files import files_of_series
from fairflare.data.image_file import Dicom, kind_of
from fairflare.data.listing.attributes import MOST_GROUPS, NO_VALUE, NOT_KNOWN
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.names import compose, listing, unique
from fairflare.data.preparers.tables import Row

log = logging.getLogger(__name__)

SPLIT_NAMES: Mapping[str, str] = {
    "train": "training", "training": "training", "val": "validation", "valid": "validation",
    "validation": "validation", "test": "test",
}  # fmt: skip
WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
MOST_CLASSES = 1000  # largest class number; a higher number in a label column may be a patient's number or a date
ONE_PATIENT = 3  # least number of images that can be split into training, validation and test

Uncertain = Literal["ignore", "zero", "one"]
Blank = Literal["zero", "missing"]
Groups = str | Sequence[str] | Mapping[str, str] | None


def groups_by_site(given: Groups, sites: Collection[str]) -> dict[str, str | None]:
    """Return the regular expression of every site that finds the patient in an image's name.

    Args:
        given: one expression for all sites; ``SITE=EXPRESSION`` texts, perhaps with one expression for all other sites;
            or expressions by site; ``None`` for none.
        sites: names of all sites.

    Raises:
        ValueError: an expression is invalid or has no group, a site has two expressions, or a site is unknown.
    """
    by_site: dict[str, str | None] = {}
    for text in [given] if isinstance(given, str) else given or ():
        site, equals, rest = text.partition("=")
        pair = (text, given[text]) if isinstance(given, Mapping) else (site, rest) if equals and site in sites else None
        site, expression = pair or ("", text)
        refuse({
            f"group: there is no site {site!r}{nearest(site, sites)}": bool(site) and site not in sites,
            f"group has two expressions {f'of site {site!r}' if site else 'without a site'}": site in by_site,
        })  # fmt: skip
        try:
            parts = re.compile(expression).groups
        except re.error as error:
            raise ValueError(f"group must be a regular expression, got {expression!r}: {error}") from error
        refuse({f"group must have a part in brackets that is the patient, got {expression!r}": parts < 1})
        by_site[site] = expression
    return {site: by_site.get(site, by_site.get("")) for site in sites}


def patient_of(text: str, group: str | None, site: str, image: Path, seed: int) -> str | None:
    """Return the patient of an image, found in ``text`` by the site's regular expression, or else in a DICOM header.

    Raises:
        DataError: the expression does not match; the message names the ``site`` and the ``image``.
    """
    if group is None:
        file = dicom_of(image)
        return None if file is None else person_in_header(file, seed)
    if match := re.search(group, text):
        return match.group(1)
    where = f"site '{site}': " if site else ""
    raise DataError(
        f"{where}'{image}' does not match group '{group}', so its patient is not known; give the site an "
        f"expression of its own (--group '{site or 'SITE'}=EXPR')"
    )


def dicom_of(image: Path) -> Path | None:
    """Return the image's DICOM file, or the first file of its DICOM series, or None if the image is of another type."""
    files = files_of_series(image) if image.is_dir() else [image] if kind_of(image) is Dicom else []
    return next(iter(files), None)


def person_in_header(path: Path, seed: int) -> str | None:
    """Return the start of a hash of a DICOM file's PatientID as identifier, or None if the header names no patient."""
    import pydicom

    try:
        with reading_as("DICOM file"):
            header: Any = pydicom.dcmread(path, specific_tags=["PatientID"], stop_before_pixels=True)
    except ValueError as error:
        raise DataError(f"'{path}' cannot be read: {error}; fetch the file again, or leave it out") from error
    identity = str(header.get("PatientID", "")).strip()
    return hashlib.sha256(f"{seed}/{identity}".encode()).hexdigest()[:16] if identity else None


def refuse_one_patient(items: Iterable[Item], group: Groups) -> None:
    """Raise ``DataError`` for a site that has one patient only, or whose patients' identifiers cannot be trusted.

    A site with one patient cannot be split, and this patient's name is often a placeholder. Identifiers cannot be
    trusted if one patient is spelled in two ways, or if a spreadsheet shortened a number (``1.2E+10``).

    Raises:
        DataError: the message names the site, the source of the patient's name, and how to correct it.
    """
    for site, items_of_site in groupby(sorted(items, key=lambda item: item.site), lambda item: item.site):
        images = {item.image: item.patient for item in items_of_site if isinstance(item.image, Path)}
        where = f" of site '{site}'" if site else ""
        refuse_two_spellings((patient for patient in images.values() if patient), f"patients{where}")
        if short := next((text for text in images.values() if re.fullmatch(r"\d[.,]\d+E\+\d+", text or "")), None):
            raise DataError(
                f"patient '{short}'{where} is a number as spreadsheets shorten it, which several people may have; save "
                "the column as text"
            )
        if len(images) < ONE_PATIENT or len({*images.values()}) != 1 or None in images.values():
            continue
        image, patient = next(iter(images.items()))
        source = f"'{patient}' by " + ("--group" if group else "the column or folder of patients")
        how = "name another column (--columns patient=COLUMN), or give --group an expression that tells them apart"
        if not group and dicom_of(image) is not None:
            source = "the one PatientID in their DICOM headers, perhaps an anonymised one"
            how = (
                "where each image is of another patient: --group '^(.*)$'; else name the patients by --group or a table"
            )
        raise DataError(
            f"all {len(images)} images{where} are of one patient ({source}), who can be in one split alone; {how}"
        )


def refuse_two_spellings(values: Iterable[str], what: str) -> None:
    """Raise ``DataError`` if two values are the same number, or differ only in capitals or in composed letters.

    >>> refuse_two_spellings(["0012", "12.0"], "patients")
    Traceback (most recent call last):
    fairflare.data.listing.samples.DataError: '0012' and '12.0' would be two patients; write them alike
    """
    unique(
        ((normalise_labels([compose(text).casefold()])[0], text) for text in values),
        f"would be two {what}; write them alike",
    )


def normalise_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels of images unchanged, or without leading zeros and decimals if all are whole numbers.

    >>> normalise_labels(["00", "1.0", "2"]), normalise_labels(["00", "x"])
    (['0', '1', '2'], ['00', 'x'])
    """
    return (
        [str(int(text.partition(".")[0])) for text in labels]
        if all(WHOLE.fullmatch(text) for text in labels)
        else list(labels)
    )


def columns_of(attributes: Mapping[str, str] | None) -> dict[str, tuple[str, list[float]]]:
    """Return the column and inner bin edges of each attribute; an attribute without edges is a category.

    Raises:
        ValueError: edges are no numbers, or an attribute has no column.

    >>> columns_of({"sex": "sex", "age": "age_approx:40,60"})
    {'sex': ('sex', []), 'age': ('age_approx', [40.0, 60.0])}
    """
    columns = {}
    for name, description in (attributes or {}).items():
        column, _, edges = description.partition(":")
        try:
            columns[name] = (column, [float(edge) for edge in edges.split(",")] if edges else [])
        except ValueError:
            raise ValueError(
                f"attributes: {name}={description!r} must be COLUMN or COLUMN:EDGE,EDGE with numbers"
            ) from None
    return columns


def attributes_of(
    attributes: Mapping[str, str] | None, rows: Sequence[Row]
) -> tuple[dict[str, Any], list[dict[str, str | float]]]:
    """Return the declaration of the attributes for a datalist, and the attributes of each row without unknown values.

    Args:
        attributes: attributes and their columns, as in :func:`columns_of`.
        rows: rows of the table.

    Raises:
        DataError: a value of an attribute with bins is no number, or a category has too many values.
    """
    declared: dict[str, Any] = {}
    by_row: list[dict[str, str | float]] = [{} for _ in rows]
    for name, (column, edges) in columns_of(attributes).items():
        texts = [row.get(column, "") for row in rows]
        plain = dict(
            zip(
                filled := [text for text in texts if text.lower() not in NOT_KNOWN],
                normalise_labels(filled),
                strict=True,
            )
        )
        values = sorted(set(plain.values()))
        refuse_two_spellings([] if edges else values, f"groups (column '{column}')")
        refuse({
            f"column '{column}' has {len(values)} different values, such as {listing(values[:3])}; of numbers give the "
            f"edges of groups (--attributes {name}={column}:EDGE,EDGE)": not edges and len(values) >= MOST_GROUPS,
        }, DataError)  # fmt: skip
        declared[name] = {"kind": "number", "bins": edges} if edges else {"kind": "category", "values": values}
        for row, attributes_of_row, text in zip(rows, by_row, texts, strict=True):
            if text in plain:
                attributes_of_row[name] = (
                    _read_number(text, f"{row.where}: column '{column}'") if edges else plain[text]
                )
        log.info("%d of %d images without a value of %r", sum(text not in plain for text in texts), len(rows), name)
    return declared, by_row


def _read_number(text: str, where: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise DataError(f"{where} must be a number, got '{text}'{'; write it with a decimal point' * (',' in text)}")


def split_name(text: str, row: Row) -> str:
    """Return the split that a cell of a table names (``train``, ``val``, ...); an empty text for an empty cell."""
    if text and text.lower() not in SPLIT_NAMES:
        raise DataError(f"{row.where}: the split is '{text}'; expected one of {', '.join(SPLITS)}")
    return SPLIT_NAMES.get(text.lower(), "")


def labels_of_cells(item: Item, uncertain: Uncertain | None = None, blank: Blank | None = None) -> tuple[int, ...]:
    """Return 1, 0 or -1 (not known) for each finding, from the cells of an image's row.

    An uncertain label that is to become 0 or 1 is -2 or -3, until it is known whether the image is for the test.

    Args:
        item: the image, with the cells by finding as its mask.
        uncertain: what -1 becomes, ``"ignore"`` (not known), ``"zero"`` or ``"one"``; always not known in test images.
        blank: what an empty cell becomes, ``"zero"`` or ``"missing"`` (not known).

    Raises:
        DataError: a cell is not 1, 0, -1 or empty, or the user did not say how such a cell is to be read.
    """
    return tuple(
        _label_of_cell(f"{item.row.where}: column '{name}'", text, uncertain, blank) for name, text in item.mask.items()
    )


def _label_of_cell(where: str, text: str, uncertain: Uncertain | None, blank: Blank | None) -> int:
    plain = normalise_labels([text])[0]
    if plain in ("0", "1"):
        return int(plain)
    empty = not text or text.lower() in NO_VALUE
    answer = blank if empty else uncertain
    asked = "--blank zero (looked for, not there) or missing" if empty else "--uncertain ignore, zero or one"
    refuse({
        f"{where} has '{text}'; a finding is 1 (there), 0 (not there), -1 (uncertain) or empty. Correct it, or take "
        "the column out of --classes": not empty and plain != "-1",
        f"{where} has '{text}', and what that means is not said: {asked}": answer is None,
    }, DataError)  # fmt: skip
    return {"zero": 0 if empty else -2, "one": -3}.get(str(answer), -1)


def classes_of(labels: Sequence[str], given: Sequence[str] | None = None) -> tuple[list[str], list[int]]:
    """Return the names of the classes, in the order of their numbers, and the number of each image's class.

    Raises:
        DataError: there are fewer than two classes, a label is none of those given, or numbers cannot be classes.
    """
    plain = normalise_labels([*labels, *(given or ())])
    classes, names = plain[: len(labels)], plain[len(labels) :]
    refuse({f"classes must be different names or numbers, got {list(given or ())}": len(set(names)) != len(names)})
    if names:
        if strange := [label for label, name in zip(labels, classes, strict=True) if name not in names]:
            raise DataError(f"an image has the label '{strange[0]}'; the classes are {', '.join(given or ())}")
        return list(given or ()), [names.index(label) for label in classes]
    names = sorted(set(classes))
    refuse_two_spellings(names, "classes")
    refuse({f"expected at least two classes, found {listing(names)}": len(names) < 2}, DataError)
    if all(WHOLE.fullmatch(name) for name in names):
        numbers = sorted(map(int, names))
        refuse({
            f"the labels are numbers from {numbers[0]} to {numbers[-1]}; those of classes begin at 0 and end below "
            f"{MOST_CLASSES}: take other rows out, or name them (--classes {' '.join(map(str, numbers[:3]))} ...)":
                numbers[0] < 0 or numbers[-1] >= MOST_CLASSES,
        }, DataError)  # fmt: skip
        return [str(number) for number in range(numbers[-1] + 1)], [int(label) for label in classes]
    return names, [names.index(label) for label in classes]
