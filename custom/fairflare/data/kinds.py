"""Many problems of few kinds, each kind said once; and what is odd about an image and its mask as a pair."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairflare.base.checks import few
from fairflare.data.listing.samples import DataError, Sample

if TYPE_CHECKING:
    from fairflare.data.geometry import Misfit

NAMED = 3  # files of a kind that a message names
FEW = 8  # different values of a drawn mask; a photograph has more
# What differs between messages of one kind: names in quotes, and numbers.
PARTS = re.compile(r"'[^']*'|[-+]?\d[\d.,x ]*")


def kind_of_problem(text: str, *names: str) -> str:
    """The same for messages that differ in names and numbers alone.

    Args:
        text: the message.
        names: that may be in it, with quotes in them.
    """
    for name in names:
        text = text.replace(name, "")
    return PARTS.sub("#", text)


def grouped(problems: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Name of the file and message of each problem, those of one kind together, in the order of the first ones."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, text in problems:
        found.setdefault(kind_of_problem(text, name), []).append((name, text))
    return list(found.values())


def by_kind(problems: Iterable[tuple[str, str | Misfit]]) -> list[str]:
    """Return a line for each kind: how many, the first one's message, three names and the number of the rest."""
    from fairflare.data.geometry import Misfit  # numpy, which a mere TAB need not wait for
    from fairflare.data.geometry import by_kind as misfits_by_kind

    misfits: list[tuple[str, Misfit]] = []
    texts: list[tuple[str, str]] = []
    for name, found in problems:
        if isinstance(found, Misfit):
            misfits.append((f"'{name}'", found))
        else:
            texts.append((name, found))
    lines = [f"{len(own)} x {own[0][1]}: {named([name for name, _ in own])}" for own in grouped(texts)]
    return lines + misfits_by_kind(misfits)


def named(names: Sequence[str]) -> str:
    """Return three names in quotes and the number of the rest."""
    return few([f"'{name}'" for name in names], NAMED)


def shown(path: Path) -> str:
    """Return a file's name for a message: with two folders, so that sites and classes can be told apart."""
    return "/".join(path.parts[-3:])


def odd_pair(image: Path, mask: Path) -> str:
    """Return what is odd about an image and its mask as files; empty: nothing.

    Args:
        image, mask: files with one picture each.
    """
    own, other = _values(mask), _values(image)
    if other is not None and 1 < other <= FEW and (own is None or own > FEW):
        has = "colours, or is a JPEG" if own is None else f"{own} values"
        return f"image and mask look swapped: the mask has {has}, the image {other} values; exchange the two folders"
    return ""


def _values(path: Path) -> int | None:
    """Number of different values of a file, read as a mask; None: it has colours, is a JPEG, or cannot be read so."""
    from fairflare.data.reading import read_mask  # numpy, which commands that say problems need not wait for

    try:
        return len(set(read_mask(Sample(path, path), site="", split="none").ravel().tolist()))
    except (DataError, OSError):
        return None
