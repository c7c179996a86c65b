"""Read the usable parts of a results document, even where parts are missing or of the wrong kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fairflare.reporting.documents import HEAD, ROUND, Results, RoundRecord

MAX_PROBLEMS = 20
T = TypeVar("T")


def read_part(kind: TypeAdapter[T], raw: Any, where: str, problems: list[str]) -> T | None:
    """Return the usable content of a part of a document, without values that are missing or of the wrong kind.

    Args:
        kind: type adapter of the part, such as :data:`HEAD` or :data:`ROUND`.
        raw: the part as read from a file; it is not changed.
        where: place of the part in the document, for messages; empty: the part is the whole document.
        problems: list to which a line is appended for each value that is left out.

    Returns:
        The part; ``None``: nothing in it can be used.
    """
    while True:
        try:
            return kind.validate_python(raw)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            problems += [_in_words(where, one) for one in errors]
            places = [one["loc"][:-1] if one["type"] == "missing" else one["loc"] for one in errors]
            # A site whose ``resampled_units`` cannot be read loses ``resampled`` too: nobody knows what was drawn.
            places += [("resampled", *place[1:2]) for place in places if place[:1] == ("resampled_units",)]
            if () in places:
                return None
            raw = _without(raw, places)


def read_head(document: Mapping[str, Any], problems: list[str]) -> Results:
    """Return the usable content of a results document without its rounds, see :func:`read_part`."""
    raw = {key: part for key, part in document.items() if key != "rounds"}
    return read_part(HEAD, raw, "", problems) or Results()


def read_rounds(document: Mapping[str, Any], problems: list[str]) -> Iterator[RoundRecord]:
    """Yield a document's usable rounds, see :func:`read_part`; singly, as values by layer and site may be millions."""
    rounds = document.get("rounds") or ()
    if not isinstance(rounds, (list, tuple)):
        problems.append("rounds is no list")
        return
    for index, raw in enumerate(rounds):
        if (record := read_part(ROUND, raw, f"rounds[{index}]", problems)) is not None:
            yield record


def read_whole(document: Mapping[str, Any], file: object) -> Results:
    """Read a results document of which every part must be of the right kind.

    Raises:
        ValueError: a part is of the wrong kind; the message names file and place.
    """
    problems: list[str] = []
    results = read_head(document, problems)
    results.rounds = list(read_rounds(document, problems))
    if problems:
        raise ValueError(f"{file}: {problems[0]}; what is left of it: fairflare report")
    return results


def cut(problems: Sequence[str]) -> list[str]:
    """Return the first :data:`MAX_PROBLEMS` problems, with a last line that counts further problems."""
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]


#: Words for the required kind of a value, by the first word of pydantic's type of the error.
_KINDS = {
    "dict": "object", "mapping": "object", "model": "object", "dataclass": "object", "list": "list", "string": "text",
    "int": "whole number", "float": "number", "finite": "number", "bool": "true or false",
}  # fmt: skip


def _in_words(where: str, error: ErrorDetails) -> str:
    place = where
    for key in error["loc"]:
        place += f"[{key}]" if isinstance(key, int) else f".{key}" if place else str(key)
    if error["type"] == "missing":
        return f"{place} is missing"
    kind = _KINDS.get(error["type"].partition("_")[0])
    return f"{place} is no {kind}" if kind else f"{place} {error['msg'].replace('Input should be', 'must be')}"


def _without(value: Any, places: Collection[tuple[int | str, ...]]) -> Any:
    """Return a copy of a nested value without its parts at the given places."""
    below: dict[int | str, list[tuple[int | str, ...]]] = {}
    for first, *rest in places:
        below.setdefault(first, []).append(tuple(rest))
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    kept = {k: _without(part, below[k]) if k in below else part for k, part in items if () not in below.get(k, ())}
    return kept if isinstance(value, Mapping) else list(kept.values())
