"""Group many problems of files by kind, so that each kind is reported once; and find swapped images and masks."""

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

NAMED = 3  # number of files of one kind of problem that a message names
FEW = 8  # largest number of different values of a drawn mask; a photograph has more
# Parts in which messages of one kind differ: names in quotes, and numbers.
PARTS = re.compile(r"'[^']*'|[-+]?\d[\d.,x ]*")


def grouped(problems: Iterable[tuple[str, P]]) -> list[list[tuple[str, P]]]:
    """Group pairs of file name and problem by the kind of the problem, in the order of each kind's first pair.

    Args:
        problems: name of each file, and its problem: a message or a :class:`fairflare.data.geometry.Misfit`.
    """
    from fairflare.data.geometry import Misfit  # here, as numpy's import is slow for shell completion

    found: dict[object, list[tuple[str, P]]] = {}
    for name, problem in problems:
        text = PARTS.sub("#", str(problem).replace(name.strip("'"), ""))  # equal for messages of one kind
        kind = (problem.cause, problem.remedy) if isinstance(problem, Misfit) else text
        found.setdefault(kind, []).append((name, problem))
    return list(found.values())


def by_kind(problems: Iterable[tuple[str, str | Misfit]]) -> list[str]:
    """Return a line for each kind of problem: number of files, the problem, three of the files, and a known remedy.

    Args:
        problems: name of each file, in quotes, and its problem.
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
    """Return the first three names, in quotes, and the number of the remaining names, as text for a message."""
    return few([f"'{name}'" for name in names], NAMED)


def shown(path: Path) -> str:
    """Return a file's name for a message, with its two innermost folders, which often name site and class."""
    return "/".join(path.parts[-3:])


def odd_pair(image: Path, mask: Path) -> str:
    """Return a message if an image and its mask look swapped by their number of values; an empty text otherwise.

    Args:
        image, mask: paths of files with one picture each.
    """
    own, other = _values(mask), _values(image)
    if other is not None and 1 < other <= FEW and (own is None or own > FEW):
        has = "colours, or is a JPEG" if own is None else f"{own} values"
        return f"image and mask look swapped: the mask has {has}, the image {other} values; exchange the two folders"
    return ""


def _values(path: Path) -> int | None:
    """Return the number of different values of a file read as a mask, or None if the file cannot be read as a mask."""
    from fairflare.data.reading import read_mask  # here, as the import of numpy is slow

    try:
        return len(set(read_mask(Sample(path, path), site="", split="none").ravel().tolist()))
    except (DataError, OSError):
        return None
