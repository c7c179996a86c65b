"""What the generic preparers share: images that a user lists, in folders or in a CSV file with columns of any name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairflare.data.datalist import SPLITS, DataError, suffix_of
from fairflare.data.preparers.common import Item, file_name

SPLIT_NAMES: Mapping[str, str] = {
    "train": "training", "training": "training", "val": "validation", "valid": "validation",
    "validation": "validation", "test": "test",
}  # fmt: skip


def check_listing(csv: str | Path | None, columns: Mapping[str, str] | None, group: str | None) -> None:
    """Raises ``ValueError``: a pattern without a part in brackets, columns without a file."""
    if group is not None and re.compile(group).groups < 1:
        raise ValueError(f"group must have a part in brackets that is the patient, got {group!r}")
    if csv is None and columns:
        raise ValueError("columns are those of a CSV file; give csv, too")


def listed_item(
    source: Path, image: Path, target: int | Path, *, site: str = "", patient: str | None = None, split: str = ""
) -> Item:
    """An image below the source; what has no patient is its own group."""
    name = file_name(image.relative_to(source).as_posix()[: -len(suffix_of(image))])
    key = f"{site}/{patient}" if patient else name
    return Item(name, key, image, target, patient or None, site, (split,) if split else ())


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
    parser.add_argument("--csv", metavar="FILE", help=f"columns image, {of} and perhaps site, patient, split")
    parser.add_argument("--columns", nargs="+", metavar="NAME=COLUMN", help=f"what they are called, such as {example}")
    parser.add_argument(
        "--group", help=f"regular expression; its first group is the patient, in the {place} of an image"
    )
