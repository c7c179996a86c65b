"""Many problems of few kinds, each kind said once; and what is odd about an image and its mask as a pair."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fairflare.base.checks import few
from fairflare.data.listing.samples import DataError, Sample

if TYPE_CHECKING:
    from fairflare.data.geometry import Misfit

P = TypeVar("P")

NAMED = 3  # files of a kind that a message names
FEW = 8  # different values of a drawn mask; a photograph has more
# What differs between messages of one kind: names in quotes, and numbers.
PARTS = re.compile(r"'[^']*'|[-+]?\d[\d.,x ]*")


def kind_of_problem(text: str, *names: str) -> str:
    """Return the same for messages that differ in names and numbers alone.

    Args:
        text: the message.
        names: that may be in it, with quotes in them.
    """
    for name in names:
        text = text.replace(name, "")
    return PARTS.sub("#", text)


def grouped(problems: Iterable[tuple[str, P]]) -> list[list[tuple[str, P]]]:
    """Put name and problem of files together where the problems are of one kind, in the order of the first ones.

    Args:
        problems: by name of the file a message or a :class:`fairflare.data.geometry.Misfit`.
    """
    from fairflare.data.geometry import Misfit  # numpy, which a mere TAB need not wait for

    found: dict[object, list[tuple[str, P]]] = {}
    for name, problem in problems:
        kind: object = kind_of_problem(str(problem), name.strip("'"))
        if isinstance(problem, Misfit):
            kind = (problem.cause, problem.remedy)
        found.setdefault(kind, []).append((name, problem))
    return list(found.values())


def by_kind(problems: Iterable[tuple[str, str | Misfit]]) -> list[str]:
    """Return a line for each kind of problem: how many, what it is, three of the files, a remedy where one is known.

    Args:
        problems: name of each file, in quotes, and what is wrong with it.
    """
    from fairflare.data.geometry import Misfit

    lines = []
    for own in grouped(problems):
        what, between, remedy = str(own[0][1]), ", ", ""
        files = [name for name, _ in own]
        if isinstance(first := own[0][1], Misfit):
            what, between, remedy = first.cause, "; ", f". {first.remedy}"
            files = [f"{name}: {misfit.value}" for name, misfit in own if isinstance(misfit, Misfit)]
        different = list(dict.fromkeys(files))
        more = f" and {len(different) - NAMED} more" if len(different) > NAMED else ""
        lines.append(f"{len(different)} x {what}: {between.join(different[:NAMED])}{more}{remedy}")
    return lines


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
    """Return how many values a file has, read as a mask; None: it has colours, is a JPEG, or cannot be read so."""
    from fairflare.data.reading import read_mask  # numpy, which commands that say problems need not wait for

    try:
        return len(set(read_mask(Sample(path, path), site="", split="none").ravel().tolist()))
    except (DataError, OSError):
        return None
