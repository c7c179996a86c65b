"""Read a JSON document as a pydantic model, and describe in words what is wrong with it."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")

#: Words for the required kind of a value, by the first word of pydantic's type of the error.
_KINDS = {
    "dict": "object", "mapping": "object", "model": "object", "dataclass": "object", "list": "list", "string": "text",
    "int": "whole number", "float": "number", "finite": "number", "bool": "true or false",
}  # fmt: skip


def read_part(kind: TypeAdapter[T], raw: Any, where: str = "") -> T:
    """Return a part of a JSON document as an object of its declared class.

    Args:
        kind: type adapter of the part, such as :data:`fairflare.reporting.documents.HEAD`.
        raw: the part as read from a file; it is not changed.
        where: place of the part in the document, for messages; empty if the part is the whole document.

    Raises:
        ValueError: a value is missing or of the wrong kind; the message names the first such value's place.
    """
    try:
        return kind.validate_python(raw)
    except ValidationError as error:
        raise ValueError(_describe_fault(where, error.errors(include_url=False, include_input=False)[0])) from error


def _describe_fault(where: str, error: ErrorDetails) -> str:
    place = where
    for key in error["loc"]:
        place += f"[{key}]" if isinstance(key, int) else f".{key}" if place else str(key)
    if error["type"] == "missing":
        return f"{place} is missing"
    kind = _KINDS.get(error["type"].partition("_")[0])
    return f"{place} is no {kind}" if kind else f"{place} {error['msg'].replace('Input should be', 'must be')}"
