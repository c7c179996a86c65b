"""Format names of files, folders and sites for messages, and make them valid for file systems and FLARE."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fairflare.base.checks import NO_SITE, SERVER, few, refuse
from fairflare.data.datalist import DataError

K = TypeVar("K")
CHANNEL = re.compile(r"(.+)_(\d{4})")  # names of files in nnU-Net, with the number of the channel
SITE_NAME = re.compile(r"[A-Za-z0-9_-]+")  # pattern of site names that FLARE accepts


def existing_folder(folder: Path) -> Path:
    """Return the path of a folder; raise ``DataError`` if the folder does not exist."""
    refuse({f"'{folder}' is not a folder; give the folder that holds the source files": not folder.is_dir()}, DataError)
    return folder


@contextmanager
def naming_site(site: str) -> Iterator[None]:
    """Name the site in an error about its files."""
    try:
        yield
    except DataError as error:
        raise DataError(f"site '{site}': {error}") from error


def listing(names: Iterable[str]) -> str:
    """Return names as text for a message: the first twelve, and the number of the others."""
    return few(sorted(names), 12) or "nothing"


def compose(name: str) -> str:
    """Return a name with composed letters (NFC): macOS writes an umlaut as two characters, other systems as one."""
    return unicodedata.normalize("NFC", name)


def file_name(name: str) -> str:
    """Return a name in which every character but letters, digits, ``.``, ``_`` and ``-`` is replaced by ``_``."""
    return "".join(c if c in "._-" or unicodedata.category(c)[0] in "LMN" else "_" for c in compose(name))


def unique(pairs: Iterable[tuple[K, Any]], why: str) -> dict[K, Any]:
    """Return pairs of a key and a value (a path or a text) as a dict; refuse a key that comes twice.

    Raises:
        DataError: two values have one key; the message names both values and ends with ``why``.
    """
    by_key: dict[K, Any] = {}
    for key, value in pairs:
        if by_key.setdefault(key, value) != value:
            raise DataError(f"'{by_key[key]}' and '{value}' {why}")
    return by_key


def key_cases(
    files: Iterable[tuple[str, Path]], names: Sequence[str], partners: Collection[str], why: str, pictures: bool = False
) -> dict[tuple[str, int], Path]:  # fmt: skip
    """Return images by case and number of the channel, which the end of a name says; -1: it says none.

    Args:
        files: name and path of each image.
        names: names of the channels.
        partners: names of the masks; nnU-Net's number is one only where a mask has the name without it.
        why: reason to refuse two files of one name.
        pictures: whether the files are pictures, which have no channels.
    """
    several = len(names) > 1
    endings = re.compile(rf"(.+?)[-_. /]({'|'.join(map(re.escape, names))})")

    def key(name: str) -> tuple[str, int]:
        numbered, called = CHANNEL.fullmatch(name), endings.fullmatch(name) if several else None
        if numbered and not pictures and name not in partners and (several or numbered[1] in partners):
            return numbered[1], int(numbered[2])
        return (called[1], [*names].index(called[2])) if called else (name, -1)

    return unique(((key(name), path) for name, path in files), why)


def site_names(sites: Iterable[str], numbered: bool) -> Mapping[str, str]:
    """Return each site's name for FLARE and its folder; all but letters, digits, ``-`` and ``_`` becomes ``_``.

    Args:
        sites: names of the sites in the source.
        numbered: call the sites ``site-1``, ``site-2``, ... instead.

    Raises:
        DataError: a name has letters that FLARE does not accept, or is that of its server, or two sites would have
            the same name.
    """
    if numbered:
        return {site: f"site-{number}" for number, site in enumerate(sites, 1)}
    names = {site: file_name(site).replace(".", "_") for site in sites}
    plain = {site: name.casefold() for site, name in names.items()}
    same = sorted(site for site, name in plain.items() if [*plain.values()].count(name) > 1)
    strange = [site for site, name in names.items() if not SITE_NAME.fullmatch(name)]
    numbers = "have all called site-1, site-2, ... (--number)"
    refuse({
        f"{NO_SITE}, or {numbers}": SERVER in names.values(),
        f"site '{''.join(strange[:1])}': FLARE takes names of A-Z, a-z, 0-9, '-' and '_'; rename the site, or "
        f"{numbers}": strange,
        f"two sites would have the same folder, or differ in capitals alone: {', '.join(same)}; rename one, or "
        f"{numbers}": same,
    }, DataError)  # fmt: skip
    return names
