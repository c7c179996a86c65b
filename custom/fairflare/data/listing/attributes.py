"""Read the attributes of people (sex, age, scanner) that a datalist declares, and find the group of each value.

Beside the splits a datalist declares each attribute once::

    "attributes": {"sex": {"kind": "category", "values": ["F", "M"]}, "age": {"kind": "number", "bins": [40, 60]}}

and an entry may carry ``"attributes": {"sex": "F", "age": 63}``. The values of single people stay at the site: only
sums over a group leave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fairflare.base.checks import nearest

UNKNOWN = "unknown"  # name of the group of images without a value, which is always the last group
MOST_GROUPS = 50  # largest number of groups of one attribute
MAX_NAME = 60  # largest number of characters of an attribute's or a category's name
FORM = '{"kind": "category", "values": ["F", "M"]} or {"kind": "number", "bins": [40, 60]}'


class UndeclaredValue(ValueError):
    """Report that attributes of an image contradict the attributes that the datalist declares.

    Args:
        message: text for the site's own log.
        public: the same text without the value of the attribute.
    """

    def __init__(self, message: str, public: str) -> None:
        super().__init__(message)
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

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the names of the attribute's groups, the last one ``unknown``.

        >>> Attribute("age", bins=(40, 60)).groups
        ('<40', '40-60', '>=60', 'unknown')
        """
        if self.values:
            return (*self.values, UNKNOWN)
        edges = [f"{edge:g}" for edge in self.bins]
        inner = [f"{low}-{high}" for low, high in pairwise(edges)]
        return (f"<{edges[0]}", *inner, f">={edges[-1]}", UNKNOWN)

    def group_of(self, value: Any) -> int:
        """Return the index of the group that a value belongs to; ``None``, an empty text and NaN are ``unknown``.

        Raises:
            UndeclaredValue: the value is none of the declared categories, or is not a finite number.
        """
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            return len(self.groups) - 1
        if self.values:
            if not isinstance(value, str) or value not in self.values:
                told = f"attribute {self.name!r} must be one of {', '.join(map(repr, self.values))}"
                raise UndeclaredValue(f"{told}, got {value!r:.80}", told)
            return self.values.index(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isinf(value):
            told = f"attribute {self.name!r} must be a finite number"
            raise UndeclaredValue(f"{told}, got {value!r:.80}", told)
        return sum(value >= edge for edge in self.bins)


def read_declared(given: Any) -> dict[str, Attribute]:
    """Return the attributes that a datalist declares.

    Raises:
        ValueError: a declaration does not have the form of ``FORM``; the message names attribute and value.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"'attributes' must give each attribute as {FORM}, got {given!r:.200}")
    return {name: _declared(name, told) for name, told in given.items()}


def _declared(name: str, told: Any) -> Attribute:
    if not _is_name(name) or "=" in name:
        raise ValueError(f"the name of an attribute must be a short text without '=', got {name!r:.80}")
    wrong = ValueError(f"attribute {name!r} must be declared as {FORM}, got {told!r:.200}")
    if not isinstance(told, Mapping):
        raise wrong
    kind = told.get("kind")
    listed = told.get({"category": "values", "number": "bins"}.get(str(kind), ""))
    if not isinstance(listed, list) or len(told) != 2 or not 0 < len(listed) < MOST_GROUPS:
        raise wrong
    if kind == "category":
        if not all(_is_name(value) for value in listed) or len({*listed, UNKNOWN}) <= len(listed):
            raise ValueError(f"'values' of attribute {name!r} must be different texts, none {UNKNOWN!r}: {listed!r}")
        return Attribute(name, values=tuple(listed))
    numbers = [edge for edge in listed if isinstance(edge, (int, float)) and math.isfinite(edge)]
    if len(numbers) < len(listed) or any(a >= b for a, b in pairwise(numbers)):
        raise ValueError(f"'bins' of attribute {name!r} must be ascending numbers, got {listed!r:.200}")
    return Attribute(name, bins=tuple(float(edge) for edge in numbers))


def groups_of(given: Any, declared: Mapping[str, Attribute]) -> dict[str, int]:
    """Return the index of the group that an image belongs to, by the name of each declared attribute.

    Args:
        given: the key ``attributes`` of the image's entry; ``None``: the entry has no such key.
        declared: attributes that the datalist declares, by name.

    Raises:
        UndeclaredValue: an attribute is not declared, or its value is not among the declared ones.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        told = "'attributes' must be an object"
        raise UndeclaredValue(f"{told}, got {given!r:.80}", told)
    for name in given:
        if name not in declared:
            near = nearest(name, list(declared))
            told = "an attribute is not declared in 'attributes' beside the splits"
            raise UndeclaredValue(f"{told}: {name!r:.80}{near}", told)
    return {name: attribute.group_of(given.get(name)) for name, attribute in declared.items()}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_NAME
