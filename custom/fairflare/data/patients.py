"""Whose image is it? What names of files and folders suggest where nobody said it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

#: Regular expressions for ``fairflare prepare --group``, searched in each image's path: group 1 is the patient.
EXPRESSIONS = (
    r"(?i)([^/]+)[-_ ](?:left|right|od|os|l|r)\b[^/]*$",
    r"([^/]+)[-_ ]\d+[^/]*$",
    r"([^/]+)/[^/]+$",  # a folder for each patient
)
LEAST_GROUPS = 3  # of fewer, the names are rather those of kinds than of people
LARGEST = 1 / 3  # of all images in one group: likewise


def suggested(names: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """Find an expression under which the names fall into groups of several, and each one's group; ``None``: none does.

    A guess from names alone, to be told and not to be acted on.

    Args:
        names: of files, perhaps with their folders.

    Example:
        >>> found = suggested(["p1_0.png", "p1_1.png", "p2_0.png", "p3_0.png", "p3_1.png", "p4_0.png", "p4_1.png"])
        >>> found[1]["p3_1.png"]
        'p3'
    """
    for expression in EXPRESSIONS:
        matches = {name: re.search(expression, name) for name in names}
        groups = {name: match[1] for name, match in matches.items() if match is not None}
        sizes = Counter(groups.values())
        together = sum(size for size in sizes.values() if size > 1)
        if len(groups) < len(matches) or len(sizes) < LEAST_GROUPS or 2 * together < len(names):
            continue
        if max(sizes.values()) <= max(LARGEST * len(names), 2):
            return expression, groups
    return None


def on_both_sides(lists: Mapping[str, Sequence[str]]) -> tuple[str, list[str], int] | None:
    """Find groups of :func:`suggested` in several lists of one site: expression, these groups, number of all.

    Args:
        lists: names of the images of training, validation and test.
    """
    found = suggested([name for names in lists.values() for name in names])
    if found is None:
        return None
    expression, groups = found
    sides: dict[str, set[str]] = {}
    for split, names in lists.items():
        for name in names:
            sides.setdefault(groups[name], set()).add(split)
    both = sorted(group for group, splits in sides.items() if len(splits) > 1)
    return (expression, both, len(sides)) if both else None
