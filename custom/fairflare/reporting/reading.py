"""What can be used of a results document, whatever is missing or of the wrong kind in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fairflare.reporting.documents import HEAD, ROUND, Results, RoundRecord

MAX_PROBLEMS = 20
T = TypeVar("T")


def read_part(kind: TypeAdapter[T], raw: Any, where: str, problems: list[str]) -> T | None:
    """Return what can be used of a part of a document, whatever is missing or of the wrong kind in it.

    Args:
        kind: :data:`HEAD`, :data:`ROUND` or the like.
        raw: of a file; not changed.
        where: its place, for the messages; empty: the whole.
        problems: gets a line for everything that was left out.

    Returns:
        ``None``: nothing can be used.
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
    """Return all but the rounds, as :func:`read_part`."""
    raw = {key: part for key, part in document.items() if key != "rounds"}
    return read_part(HEAD, raw, "", problems) or Results()


def read_rounds(document: Mapping[str, Any], problems: list[str]) -> Iterator[RoundRecord]:
    """Yield each round, as :func:`read_part`; one at a time, since the values by layer and site may be millions."""
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
        ValueError: a part is not (names file and place).
    """
    problems: list[str] = []
    results = read_head(document, problems)
    results.rounds = list(read_rounds(document, problems))
    if problems:
        raise ValueError(f"{file}: {problems[0]}; what is left of it: fairflare report")
    return results


def cut(problems: Sequence[str]) -> list[str]:
    """Return the first :data:`MAX_PROBLEMS`, with a last line where there are more."""
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]


#: By the first word of pydantic's types of errors.
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
    """Return a copy without what lies at these places."""
    below: dict[int | str, list[tuple[int | str, ...]]] = {}
    for first, *rest in places:
        below.setdefault(first, []).append(tuple(rest))
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    kept = {k: _without(part, below[k]) if k in below else part for k, part in items if () not in below.get(k, ())}
    return kept if isinstance(value, Mapping) else list(kept.values())
