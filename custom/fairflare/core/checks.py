"""Checks of arguments that the formulas share: one place for the question, one wording for the answer."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from typing import Any


def number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, above: float | None = None,
    below: float | None = None, whole: bool = False,
) -> float:  # fmt: skip
    """``value`` when it is a finite number in range.

    Args:
        name: for the message; may name a site too.
        value: to check; booleans are no numbers.
        low, high: closed bounds.
        above, below: open bounds, in place of ``low`` and ``high``.
        whole: integers only.

    Raises:
        ValueError: it is not; says what is wanted and what was found.
    """
    kind = int if whole else (int, float)
    ok = isinstance(value, kind) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))
    if ok:
        ok = (value >= low if above is None else value > above) and (value <= high if below is None else value < below)
    if not ok:
        raise ValueError(f"{name} must be {in_words(low, high, above, below, whole)}, got {value!r:.80}")
    return value


def whole(name: str, value: Any, *, low: int = 1) -> int:
    """``value`` when it is an integer ``>= low``."""
    return int(number(name, value, low=low, whole=True))


def in_words(
    low: float = -math.inf, high: float = math.inf, above: float | None = None, below: float | None = None,
    whole: bool = False,
) -> str:  # fmt: skip
    """A range as a person reads it: ``finite and >= 0``, ``in (0, 1]``, ``an integer >= 1``."""
    kind = "an integer " if whole else ""
    bottom = low if above is None else above
    top = high if below is None else below
    if math.isfinite(bottom) and math.isfinite(top):
        return f"{kind}in {'[' if above is None else '('}{bottom:g}, {top:g}{']' if below is None else ')'}"
    if math.isfinite(bottom):
        return f"{kind or 'finite and '}{'>=' if above is None else '>'} {bottom:g}"
    if math.isfinite(top):
        return f"{kind or 'finite and '}{'<=' if below is None else '<'} {top:g}"
    return "an integer" if whole else "a finite number"


def choice(name: str, value: Any, known: Collection[str]) -> str:
    """``value`` when it is one of the known names.

    Raises:
        ValueError: it is not; suggests the nearest.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, known))}, got {value!r:.80}{nearest(value, known)}"
        )
    return value


def nearest(value: Any, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing."""
    near = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
