"""Read the attributes of people (sex, age, scanner) that a datalist declares, and find the group of each value.

Beside the splits a datalist declares each attribute once::

    "attributes": {"sex": {"kind": "category", "values": ["F", "M"]}, "age": {"kind": "number", "bins": [40, 60]}}

and an entry may carry ``"attributes": {"sex": "F", "age": 63}``. The values of single people stay at the site: only
sums over a group leave it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from fairflare.base.checks import is_number, nearest, refuse

UNKNOWN = "unknown"  # name of the group of images without a value, which is always the last group
MOST_GROUPS = 50  # largest number of groups of one attribute
MAX_NAME = 60  # largest number of characters of the name of an attribute, a category or a class
# Words for a missing value, lower case. Words that only NOT_KNOWN has, such as "none", may be names of classes.
NO_VALUE = ("na", "nan", "n/a", "#n/a", "null", "nil", "<na>", "?", ".")  # "." is that of SAS, SPSS and Stata
NOT_KNOWN = ("", "unknown", "none", "not known", "-", *NO_VALUE)
MARKS = (-9999, -999, -99, -9, -1, 99, 999, 9999)  # numbers by which tables may mark that a number is not known
# Parts in which two spellings of a name may differ. Signs between digits, or at the end ("HER2-"), are none of them.
LEFT_OUT = r"\s+$|[\u0300-\u036f]|(?<=[^\W\d_])[\s_.-]+(?=[^\W\d_])|^0+(?=\d)|(?<=\d)\.0*$"
FORM = '{"kind": "category", "values": ["F", "M"]} or {"kind": "number", "bins": [40, 60]}'


class UndeclaredValue(ValueError):
    """Report that attributes of an image contradict the attributes that the datalist declares.

    Args:
        public: text without the attribute's value.
        value: text with the attribute's value, which follows in the site's own log only.
    """

    def __init__(self, public: str, value: str) -> None:
        super().__init__(public + value)
        self.public = public


@dataclass(frozen=True)
class Attribute:
    """Describe one attribute that a datalist declares.

    Attributes:
        name: name of the attribute, such as ``age``.
        values: values of a categorical attribute, in order; empty for an attribute that is a number.
        bins: inner edges of the bins of a numeric attribute, ascending; a value on an edge belongs to the upper bin.
    """

    name: str
    values: tuple[str, ...] = ()
    bins: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return ", ".join(self.groups[:-1])

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the names of the attribute's groups, the last one ``unknown``.

        >>> Attribute("age", bins=(40, 60)).groups
        ('<40', '40-60', '>=60', 'unknown')
        """
        if self.values:
            return (*self.values, UNKNOWN)
        edges = [f"{edge:g}" for edge in self.bins]
        return (f"<{edges[0]}", *[f"{low}-{high}" for low, high in pairwise(edges)], f">={edges[-1]}", UNKNOWN)

    def group_of(self, value: Any) -> int:
        """Return the index of the group that a value belongs to; ``None``, an empty text and NaN are ``unknown``.

        Raises:
            UndeclaredValue: the value is none of the declared categories, or is not a finite number.
        """
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            return len(self.groups) - 1
        if self.values:
            if value not in self.values:
                raise UndeclaredValue(
                    f"attribute {self.name!r} must be one of {', '.join(map(repr, self.values))}",
                    f", got {value!r:.80}",
                )
            return self.values.index(value)
        if not is_number(value):
            raise UndeclaredValue(f"attribute {self.name!r} must be a finite number", f", got {value!r:.80}")
        return sum(value >= edge for edge in self.bins)


def read_declared(given: Any) -> dict[str, Attribute]:
    """Return the attributes that a datalist declares.

    Raises:
        ValueError: a declaration does not have the form of ``FORM``; the message names attribute and value.
    """
    refuse({f"'attributes' must give each attribute as {FORM}, got {given!r:.200}": not isinstance(given, Mapping)})
    return {name: _read_declaration(name, declaration) for name, declaration in given.items()}


def _read_declaration(name: str, declaration: Any) -> Attribute:
    refuse({
        f"the name of an attribute must be a short text without '=', got {name!r:.80}":
            not is_name(name) or "=" in name,
    })  # fmt: skip
    match declaration:
        case {"kind": "category", "values": [*values]} if len(declaration) == 2 and 0 < len(values) < MOST_GROUPS:
            refuse({
                f"'values' of attribute {name!r} must be different texts, none {UNKNOWN!r}: {values!r}":
                    not all(map(is_name, values)) or len({*values, UNKNOWN}) <= len(values),
            })  # fmt: skip
            return Attribute(name, values=tuple(values))
        case {"kind": "number", "bins": [*edges]} if len(declaration) == 2 and 0 < len(edges) < MOST_GROUPS:
            refuse({
                f"'bins' of attribute {name!r} must be ascending numbers, got {edges!r:.200}":
                    not all(map(is_number, edges)) or any(a >= b for a, b in pairwise(edges)),
            })  # fmt: skip
            return Attribute(name, bins=tuple(map(float, edges)))
    raise ValueError(f"attribute {name!r} must be declared as {FORM}, got {declaration!r:.200}")


def groups_of(given: Any, declared: Mapping[str, Attribute]) -> dict[str, int]:
    """Return the index of the group that an image belongs to, by the name of each declared attribute.

    Args:
        given: the key ``attributes`` of the image's entry; ``None`` if the entry has no such key.
        declared: attributes that the datalist declares, by name.

    Raises:
        UndeclaredValue: an attribute is not declared, or its value is not among the declared ones.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise UndeclaredValue("'attributes' must be an object", f", got {given!r:.80}")
    if strange := [name for name in given if name not in declared]:
        raise UndeclaredValue(
            "an attribute is not declared in 'attributes' beside the splits",
            f": {strange[0]!r:.80}{nearest(strange[0], list(declared))}",
        )
    return {name: attribute.group_of(given.get(name)) for name, attribute in declared.items()}


def doubts_of(
    attributes: Mapping[str, Attribute], numbers: Mapping[str, Sequence[float]], class_names: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a line on each two names that may mean the same, and on names and values that may mean "not known".

    Args:
        attributes: the declared attributes, by name.
        numbers: values of each attribute that is a number, one for each image.
        class_names: names of the classes.
    """
    for what, names, words in [
        *((f"attribute '{name}'", attribute.values, NOT_KNOWN) for name, attribute in attributes.items()),
        ("classes", class_names, NO_VALUE),
    ]:
        yield from (
            f"{what}: '{a}' and '{b}' may be one; write them alike" for a, b in combinations(names, 2) if _alike(a, b)
        )
        if any(map(str.isdigit, names)) and any(map(str.isalpha, names)):
            yield f"{what}: numbers beside words ({', '.join(names)}); write what the numbers mean"
        yield from (f"{what}: '{name}' may mean that nothing is known" for name in names if name.lower() in words)
    for name, values in numbers.items():
        rest = [value for value in values if value not in MARKS] or [0.0]
        if odd := sorted(
            mark for mark in {*values} - {*rest} if mark < 0 <= min(rest) or mark > max(rest) + (max(rest) - min(rest))
        ):
            in_words = ", ".join(f"{mark:g} of {values.count(mark)} image(s)" for mark in odd)
            yield f"attribute '{name}': {in_words} may mean that nothing is known; leave the value out there"


def bare(name: str) -> str:
    """Return a name in a form that all its spellings share: without capitals, accents, blanks and leading zeros.

    >>> bare("0012 "), bare("Ann Müller")
    ('12', 'annmuller')
    """
    return re.sub(LEFT_OUT, "", unicodedata.normalize("NFKD", name).casefold())


def _alike(*names: str) -> bool:
    """Return whether two names differ in capitals, accents, blanks or zeros alone, or one abbreviates the other."""
    short, long = sorted(map(bare, names), key=len)
    return short == long or (len(short) == 1 and len(long) > 2 and f"{short}{long}".isalpha() and long[0] == short)


def is_name(value: Any) -> bool:
    """Return whether a value can be the name of an attribute, a category or a class: a short printable text."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_NAME
