"""Check arguments of formulas, in functions that all formulas share, so that each check has one wording."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeVar

S = TypeVar("S", bound=Sized)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SERVER = "server"  # name of the server in all jobs of FLARE
NO_SITE = "no site can be called 'server', as FLARE calls the server so; give the site another name"
SUM_TOLERANCE = 1e-6  # largest allowed difference between the sum of weights and 1
_NUMBERS, _PLAIN, _LARGEST = (int, float), {int, float}, sys.float_info.max
CLOSE, SHORTEST = 0.65, 3  # similarity from which a name is near; least letters of a name's beginning
MAX_NAMES = 3  # most names in a message: names that one of two collections lacks, or those like an unknown name
MAX_SAMPLES = 10**9  # a site that claims more samples is refused
MAX_REASON = 300  # most characters of a site's text in a message
SHORT = 12  # most names that a message lists in full; for more names it says where they are listed


class ReportError(ValueError):
    """Signal that a site's message cannot be used; the text names the site, the field and the value."""


# ------------------------------------------------------------------------------------------------ numbers


def number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, above: float | None = None,
    below: float | None = None, whole: bool = False,
) -> float:  # fmt: skip
    """Return ``value`` if it is a finite number in range; turn a scalar of NumPy or torch into a Python number.

    Args:
        name: what the value is, for the message; may name a site too.
        value: the value to check; booleans and texts are no numbers.
        low, high: bounds that are allowed values themselves.
        above, below: bounds that are not allowed themselves; each is used in place of ``low`` or ``high``.
        whole: whether only integers are allowed.

    Raises:
        ValueError: the value is no such number; the message says what is wanted and what was found.
    """
    plain_number: float = value if type(value) in _PLAIN else _plain(value)
    if not (
        is_number(plain_number)
        and (isinstance(plain_number, int) or not whole)
        and (plain_number >= low if above is None else plain_number > above)
        and (plain_number <= high if below is None else plain_number < below)
    ):
        raise ValueError(f"{name} must be {spell_range(low, high, above, below, whole)}, got {plain_number!r:.80}")
    return plain_number


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold: neither NaN nor infinite, no boolean, no text."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool) and abs(value) <= _LARGEST


def real(name: str, value: Any) -> float:
    """Return ``value`` as a float if it is a number; NaN and infinity are numbers too.

    Raises:
        ValueError: the value is a boolean, a text, or ``None``.
    """
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise ValueError(f"{name} must be a number, got {value!r:.80}")
    return float(value)


def whole(name: str, value: Any, *, low: int = 1) -> int:
    """Return ``value`` if it is an integer ``>= low``, else raise ``ValueError``."""
    return int(number(name, value, low=low, whole=True))


def numbers(name: str, values: Mapping[Any, Any], *, of: str = "site", **limits: Any) -> dict[Any, float]:
    """Return ``{key: number}`` as floats in the order given, each checked by :func:`number`.

    Args:
        name: what each value is; the message says ``NAME of OF KEY``.
        values: the numbers to check, by key; may be empty, see :func:`not_empty`.
        of: what the keys are, for the message.
        limits: range of the values, in the keyword arguments of :func:`number`.

    Raises:
        ValueError: a value is no number in range; the message names its key.
    """
    return {key: float(number(f"{name} of {of} {key!r}", value, **limits)) for key, value in values.items()}


def shares(values: Mapping[str, Any], *, of: str = "") -> dict[str, float]:
    """Check weights by site (finite, ``>= 0``, sum 1 within ``SUM_TOLERANCE``), and return them.

    Args:
        values: weight of each site; not empty.
        of: what the weights are for, in the message (``layer 'conv'``); empty: for the whole model.

    Raises:
        ValueError: there is no site, a weight is out of range (the message names the site), or the sum is not 1.
    """
    given = list(values.values())
    if plain(given) and given and min(given) >= 0 and abs(math.fsum(given) - 1.0) <= SUM_TOLERANCE:
        return dict(zip(values, map(float, given), strict=True))
    of = f" of {of}" if of else ""
    checked = numbers(f"weight{of}", not_empty(f"weights{of}", values), low=0)
    total = math.fsum(checked.values())
    refuse({f"weights{of} must sum to 1, got {total!r}": not abs(total - 1.0) <= SUM_TOLERANCE})
    return checked


def plain(values: Iterable[Any]) -> bool:
    """Return whether all values are finite Python numbers: a fast test, which saves calling :func:`number` for each."""
    known = list(values)
    return set(map(type, known)) <= _PLAIN and all(map(_LARGEST.__ge__, map(abs, known)))


def spell_range(
    low: float = -math.inf, high: float = math.inf, above: float | None = None, below: float | None = None,
    whole: bool = False,
) -> str:  # fmt: skip
    """Return a range as a person reads it: ``finite and >= 0``, ``in (0, 1]``, ``an integer >= 1``."""
    limits = spell_limits(low, high, above, below)
    if not limits:
        return "an integer" if whole else "a finite number"
    return f"an integer {limits}" if whole else limits if limits.startswith("in") else f"finite and {limits}"


def spell_limits(
    low: float = -math.inf, high: float = math.inf, above: float | None = None, below: float | None = None
) -> str:
    """Return the limits of a range, as :func:`spell_range` does, without the kind of number; empty for no limits."""
    bottom = low if above is None else above
    top = high if below is None else below
    if math.isfinite(bottom) and math.isfinite(top):
        return f"in {'[' if above is None else '('}{bottom:g}, {top:g}{']' if below is None else ')'}"
    if math.isfinite(bottom):
        return f"{'>=' if above is None else '>'} {bottom:g}"
    return f"{'<=' if below is None else '<'} {top:g}" if math.isfinite(top) else ""


# ------------------------------------------------------------------------------------------------ names


def choice(name: str, value: Any, known: Collection[str]) -> str:
    """Return ``value`` when it is one of the known names.

    Raises:
        ValueError: the value is no known name; the message suggests the nearest ones.
    """
    if not isinstance(value, str) or value not in known:
        names = ", ".join(map(repr, known)) if len(known) <= SHORT else f"{len(known)} names"
        raise ValueError(f"{name} must be one of {names}, got {value!r:.80}{nearest(value, known)}")
    return value


def nearest(value: Any, known: Iterable[str], *, most: int = MAX_NAMES, close: float = CLOSE, far: bool = False) -> str:
    """Return ``"; did you mean 'x'?"`` with the names nearest to an unknown name, or an empty text.

    Capitals make no difference.

    Args:
        value: the unknown name; the initials of a known name (``lr``), and its beginning (``val``), find it too.
        known: the known names.
        most: largest number of suggestions; 1 if the message leaves a site and the known names are private to it.
        close: the similarity, in [0, 1], from which a name is near.
        far: if no name is near, suggest those that have a word of it.
    """
    text, names = str(value).casefold(), {name.casefold(): name for name in known}
    short = (name for name in names if "".join(word[:1] for word in name.split("_")) == text)
    akin = (name for name in names if far and {*text.split("_")} & {*name.split("_")})
    near = (
        difflib.get_close_matches(text, names, n=most, cutoff=close)
        or [*short, *(name for name in names if len(text) >= SHORTEST and name.startswith(text))][:most]
        or difflib.get_close_matches(text, akin, n=most, cutoff=0.0)
    )
    return f"; did you mean {' or '.join(repr(names[name]) for name in near)}?" if near else ""


def unknown(value: Any, known: Iterable[str], where: str = "") -> str:
    """Return words to follow an unknown name in a message: the nearest names, then all known names or ``where``."""
    names = sorted(known)
    listed_here = len(names) <= SHORT
    rest = f"Available: {', '.join(names)}" if listed_here else where
    return f"{nearest(value, names, far=not listed_here) or ';'} {rest}".rstrip("; ")


def not_empty(name: str, values: S, of: str = "site") -> S:
    """Return ``values`` if it has at least one element.

    Raises:
        ValueError: it has none; the message is ``no OF in NAME``.
    """
    refuse({f"no {of} in {name}": len(values) == 0})
    return values


def same_names(name: str, names: Iterable[str], other: str, others: Iterable[str], *, of: str = "site") -> None:
    """Check that two collections have the same names of sites (layers, tensors).

    Args:
        name, other: what ``names`` and ``others`` belong to, for the message.
        names, others: the names to compare, in any order.
        of: what the names are, in the singular.

    Raises:
        ValueError: the names differ; the message lists those that only one of the two has.
    """
    left, right = set(names), set(others)
    if left != right:
        sides = ((name, left - right), (other, right - left))
        odd = "; ".join(f"only in {whose}: {list_names(only)}" for whose, only in sides if only)
        raise ValueError(f"{name} and {other} must have the same {of}s; {odd}")


def first_of(texts: Mapping[str, object]) -> str:
    """Return the first text whose condition is true; an empty text if no condition is true."""
    return next(iter(true_texts(texts)), "")


def true_texts(texts: Mapping[str, object]) -> list[str]:
    """Return the texts whose conditions are true, in their order."""
    return [text for text, holds in texts.items() if holds]


def refuse(problems: Mapping[str, object], kind: Callable[[str], Exception] = ValueError) -> None:
    """Raise an error of a ``kind`` with the first problem whose condition is true.

    Args:
        problems: whether something has a problem, by the text that describes the problem.
        kind: class of the error, or a function that makes it from the text.
    """
    for text, holds in problems.items():
        if holds:
            raise kind(text)


def refuse_if(site: str, problems: Mapping[str, bool]) -> None:
    """Raise an error with the first problem of a site's reply whose condition is true.

    Args:
        site: name of the site that sent the reply.
        problems: whether the reply has a problem, by the text that describes the problem.

    Raises:
        ReportError: a condition is true (names the site).
    """
    refuse(problems, lambda text: ReportError(f"site {site!r}: {text}"))


def printable(text: str, most: int = MAX_REASON) -> str:
    """Return a site's text cut to ``most`` characters, with a space for each character that cannot be printed."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 2 * most])
    return clean if len(clean) <= most else clean[: most - 3] + "..."


def group_by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return each key once, in the order of the pairs, with all values that it came with."""
    by_key: dict[K, list[V]] = {}
    for key, value in pairs:
        by_key.setdefault(key, []).append(value)
    return by_key


def different(name: str, names: Collection[Any]) -> tuple[str, ...]:
    """Return names as a tuple of texts, if there is at least one name and no name comes twice.

    Raises:
        ValueError: there is no name, or a name comes twice; the message lists the names.
    """
    texts = tuple(str(entry) for entry in names)
    refuse({f"{name} must be one or more different names, got {list(texts)}": not texts or len({*texts}) < len(texts)})
    return texts


def site_names(names: Collection[Any]) -> tuple[str, ...]:
    """Return the names of sites as a tuple of texts, if there is at least one and no two are the same.

    Raises:
        ValueError: there is no name, a name comes twice, or a site has the name of FLARE's server.
    """
    refuse({NO_SITE: SERVER in names})
    return different("sites", names)


def same_settings(what: str, stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that a stored state belongs to an object with these settings.

    Raises:
        ValueError: a setting differs; the message names the first such setting, with both values.
    """
    refuse({
        f"state is of {what} with {name} {stored.get(name)!r}, this one has {value!r}": stored.get(name) != value
        for name, value in current.items()
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------ arrays


def shape(name: str, value: Any, *dims: str | int) -> None:
    """Check the shape of an array or tensor.

    Args:
        name: what the value is, for the message.
        value: anything with a ``shape``.
        dims: each dimension: a number for its size, or a letter for any size. If the first dimension is a letter,
            its size must be at least 1. No ``dims``: the value must be a scalar.

    Raises:
        ValueError: the value has another shape.
    """
    sizes = tuple(value.shape)
    fits = len(sizes) == len(dims) and all(isinstance(d, str) or d == n for d, n in zip(dims, sizes, strict=True))
    if fits and not (dims and isinstance(dims[0], str) and sizes[0] == 0):
        return
    if not dims:
        raise ValueError(f"{name} must be a scalar, got shape {sizes}")
    wanted = f"({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"
    some = f" with {dims[0]} >= 1" if isinstance(dims[0], str) else ""
    raise ValueError(f"{name} must have shape {wanted}{some}, got {sizes}")


def same_shape(name: str, value: Any, other: str, like: Any) -> None:
    """Check that two arrays or tensors have the same shape.

    Raises:
        ValueError: the shapes differ; the message is ``NAME has shape ..., OTHER has ...``.
    """
    if value.shape != like.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, {other} has {tuple(like.shape)}")


def indices(name: str, values: Any, count: int) -> None:
    """Check that every integer in an array or tensor is in [0, ``count``); the array may be empty.

    Raises:
        ValueError: an integer is below 0 or not below ``count``.
    """
    if math.prod(values.shape):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= count:
            raise ValueError(f"{name} must be in [0, {count}), got {low if low < 0 else high}")


# ------------------------------------------------------------------------------------------------ pieces


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def list_names(names: Collection[str], most: int = MAX_NAMES) -> str:
    """Return names for a message, quoted and sorted; of more than ``most``, the first ones and how many more exist."""
    return few(list(map(repr, sorted(names))), most)


def few(names: Sequence[str], most: int = MAX_NAMES, between: str = ", ") -> str:
    """Return the names joined by commas, without quotes; if more than ``most``, the first ones and how many more."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
