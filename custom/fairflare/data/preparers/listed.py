"""What the generic preparers share: images that a user lists, in folders or in a CSV file with columns of any name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairflare.base.checks import nearest
from fairflare.data.datalist import SPLITS, DataError, suffix_of
from fairflare.data.preparers.common import Item, file_name
from fairflare.data.preparers.tables import Images, read_table

SPLIT_NAMES: Mapping[str, str] = {
    "train": "training", "training": "training", "val": "validation", "valid": "validation",
    "validation": "validation", "test": "test",
}  # fmt: skip
OPTIONAL = ("site", "patient", "split")

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


class GroupOption(argparse.Action):
    """``--group``, once (a text) or for several sites (a list)."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        more = [] if before is None else before if isinstance(before, list) else [before]
        setattr(namespace, self.dest, [*more, values] if more else values)


def check_listing(csv: str | Path | None, columns: Mapping[str, str] | None) -> None:
    """Raises ``ValueError``: columns without a file."""
    if csv is None and columns:
        raise ValueError("columns are those of a CSV file; give csv, too")


def listed_item(
    source: Path, image: Path, target: int | Path, *, site: str = "", patient: str | None = None, split: str = ""
) -> Item:
    """An image below the source; what has no patient is its own group."""
    name = file_name(image.relative_to(source).as_posix()[: -len(suffix_of(image))])
    key = f"{site}/{patient}" if patient else name
    return Item(name, key, image, target, patient or None, site, (split,) if split else ())


def patient_of(text: str, group: str | None, whose: str) -> str | None:
    """The patient in a text, by the expression of its site; None: there is no expression.

    Raises:
        DataError: it does not match; ``whose``: the image, for the message.
    """
    match = re.search(group, text) if group is not None else None
    if group is not None and match is None:
        raise DataError(f"{whose} does not match group '{group}', so its patient is not known")
    return match.group(1) if match else None


def listed_rows(source: Path, file: Path, columns: Mapping[str, str], of: str) -> list[dict[str, str]]:
    """The rows of a CSV file: ``path`` of the image, what stands beside it (``of``), ``site``, ``patient``, ``split``.

    Raises:
        DataError: a column or an image is not there, or a split is not known.
    """
    called = called_columns(columns, ("image", of, *OPTIONAL))
    table = read_table(file, [called["image"], called[of]])
    paths = Images(source).all([row[called["image"]] for row in table], file)
    rows = []
    for number, (row, path) in enumerate(zip(table, paths, strict=True), 2):
        found = {key: row.get(called[key], "") for key in (of, *OPTIONAL)}
        if not found[of]:
            raise DataError(f"'{file}', line {number}: the {of} is missing")
        rows.append({**found, "path": str(path), "split": split_name(found["split"], file, number)})
    return rows


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


def parse_pairs(items: Sequence[str] | None) -> dict[str, str]:
    """``["image=id_code"]`` as a dict."""
    pairs = [item.partition("=") for item in items or ()]
    wrong = [name + equals + value for name, equals, value in pairs if not (name and equals and value)]
    if wrong:
        raise ValueError(f"expected NAME=VALUE, got {', '.join(wrong)}")
    return {name: value for name, _, value in pairs}


def add_listing_options(parser: argparse.ArgumentParser, *, of: str, example: str, place: str) -> None:
    """``--csv``, ``--columns`` and ``--group``; ``of``: what stands beside an image, ``place``: of the patient."""
    parser.add_argument(
        "--csv", metavar="FILE", help=f"below SOURCE, or absolute: columns image, {of}, perhaps site, patient, split"
    )
    parser.add_argument("--columns", nargs="+", metavar="NAME=COLUMN", help=f"what they are called, such as {example}")
    add_group_option(parser, place)


def add_group_option(parser: argparse.ArgumentParser, place: str) -> None:
    """``--group``; ``place``: of the patient."""
    parser.add_argument(
        "--group", action=GroupOption, metavar="[SITE=]EXPR",
        help=f"regular expression; its first part in brackets is the patient, in the {place} of an image; may be "
        "repeated with one for each site",
    )  # fmt: skip
