"""Attributes of people in a datalist (sex, age, scanner): how they are declared, and which group a value is of.

Beside the splits a list declares each attribute once::

    "attributes": {"sex": {"kind": "category", "values": ["F", "M"]}, "age": {"kind": "number", "bins": [40, 60]}}

and an entry may carry ``"attributes": {"sex": "F", "age": 63}``. They stay at the site: what a run asks for leaves as
sums over a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fairflare.base.checks import nearest

UNKNOWN = "unknown"  # the group of images without a value; always the last one
MOST_GROUPS = 50  # of one attribute
MAX_NAME = 60  # characters of an attribute's or a category's name
FORM = '{"kind": "category", "values": ["F", "M"]} or {"kind": "number", "bins": [40, 60]}'


class UndeclaredValue(ValueError):
    """An image's attributes do not go with what is declared.

    Args:
        message: for the site's own log.
        public: the same without the value.
    """

    def __init__(self, message: str, public: str) -> None:
        super().__init__(message)
        self.public = public


@dataclass(frozen=True)
class Attribute:
    """A declared attribute.

    Attributes:
        name: such as ``age``.
        values: of a category, in order; empty: it is a number.
        bins: inner edges of a number's bins, ascending; a value on an edge is of the upper bin.
    """

    name: str
    values: tuple[str, ...] = ()
    bins: tuple[float, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, the last one ``unknown``.

        >>> Attribute("age", bins=(40, 60)).groups
        ('<40', '40-60', '>=60', 'unknown')
        """
        if self.values:
            return (*self.values, UNKNOWN)
        edges = [f"{edge:g}" for edge in self.bins]
        inner = [f"{low}-{high}" for low, high in pairwise(edges)]
        return (f"<{edges[0]}", *inner, f">={edges[-1]}", UNKNOWN)

    def group_of(self, value: Any) -> int:
        """Return the number of the group of a value; ``None``, an empty text and NaN are ``unknown``.

        Raises:
            UndeclaredValue: outside the declared categories, or no number.
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
        ValueError: not of the form above; names attribute and value.
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
    """Return the number of an image's group, by declared attribute.

    Args:
        given: the entry's ``attributes``; ``None``: it has none.
        declared: of the list.

    Raises:
        UndeclaredValue: an attribute that is not declared, or a value that does not go with it.
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
