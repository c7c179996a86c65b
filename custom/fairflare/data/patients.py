"""Guess from names of files and folders which images are of one patient, if no list names the patients."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

#: Regular expressions for ``fairflare prepare --group``, searched in each image's path: group 1 is the patient.
EXPRESSIONS = (
    r"(?i)([^/]+)[-_ ](?:left|right|od|os|l|r)\b[^/]*$",
    r"([^/]+)[-_ ]\d+[^/]*$",
    r"([^/]+)/[^/]+$",  # each patient has a folder
)
LEAST_GROUPS = 3  # least number of groups; fewer groups are more likely kinds of images than patients
LARGEST = 1 / 3  # largest share of all images in one group; a larger group is hardly one patient


def suggest_groups(names: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """Find an expression by which names of images form groups, perhaps patients; return it and each name's group.

    Return ``None`` if no expression does. The result is a guess from names alone, to be reported and not acted on.

    Args:
        names: names of files, perhaps with their folders.

    Example:
        >>> found = suggest_groups(["p1_0.png", "p1_1.png", "p2_0.png", "p3_0.png", "p3_1.png", "p4_0.png", "p4_1.png"])
        >>> found[1]["p3_1.png"]
        'p3'
    """
    for expression in EXPRESSIONS:
        matches = {name: re.search(expression, name) for name in names}
        groups = {name: match[1] for name, match in matches.items() if match is not None}
        sizes = Counter(groups.values())
        if (
            len(groups) == len(matches)
            and len(sizes) >= LEAST_GROUPS
            and 2 * sum(size for size in sizes.values() if size > 1) >= len(names)
            and max(sizes.values()) <= max(LARGEST * len(names), 2)
        ):
            return expression, groups
    return None


def find_shared_groups(lists: Mapping[str, Sequence[str]]) -> tuple[str, list[str], int] | None:
    """Find groups by :func:`suggest_groups` that occur in several splits of one site.

    Return the expression, these groups, and the number of all groups; ``None`` if there are no such groups.

    Args:
        lists: names of the images of each split (training, validation and test).
    """
    if (pattern := suggest_groups([name for names in lists.values() for name in names])) is None:
        return None
    expression, groups = pattern
    splits = Counter(group for names in lists.values() for group in {groups[name] for name in names})
    both = sorted(group for group, count in splits.items() if count > 1)
    return (expression, both, len(splits)) if both else None
