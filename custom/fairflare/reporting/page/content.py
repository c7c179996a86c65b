"""What a page is made of, before it becomes HTML, PNG, SVG or CSV."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairflare.reporting.layout import MISSING, csv_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TEXT = 160  # letters of one text from the results in the page
MAX_ROWS = 400  # of a table in the page; its CSV has all
MAX_COLUMNS = 32
MAX_LISTED = 24  # of a message in words
ROUNDING = 1e-13
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # text after one of them may read backwards


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its population standard deviation; NaN with one seed."""

    mean: float
    sd: float = math.nan


Cell = str | int | float | Spread | None


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first cell of a row names it.

    Attributes:
        name: of its file.
        caption: what it holds, a sentence.
        columns: headings.
        rows: cells, numbers in full.
        folded: shown on demand only.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False

    def csv(self) -> str:
        """All cells; a :class:`Spread` is two columns, ``X mean`` and ``X sd``."""
        spread = [any(isinstance(row[i], Spread) for row in self.rows) for i in range(len(self.columns))]
        head: list[str] = []
        for name, two in zip(self.columns, spread, strict=True):
            head += [f"{name} mean", f"{name} sd"] if two else [name]
        rows: list[list[str | int | float]] = [[printable(name, None) for name in head]]
        for row in self.rows:
            line: list[str | int | float] = []
            for cell, two in zip(row, spread, strict=True):
                parts = (cell.mean, cell.sd) if isinstance(cell, Spread) else (cell, None) if two else (cell,)
                line += [_plain(part) for part in parts]
            rows.append(line)
        return csv_lines(rows) + "\n"

    @property
    def shown(self) -> Sequence[Sequence[Cell]]:
        """The rows of the page, with the columns of the page."""
        return [row[:MAX_COLUMNS] for row in self.rows[:MAX_ROWS]]

    @property
    def numeric(self) -> Sequence[bool]:
        """Which columns of the page hold numbers."""
        return [any(not isinstance(row[i], (str, type(None))) for row in self.rows) for i in range(len(self.columns))]

    @property
    def cut(self) -> str:
        """What the page leaves out of it; empty: nothing."""
        parts = []
        if len(self.rows) > MAX_ROWS:
            parts.append(f"the first {MAX_ROWS} of {len(self.rows)} rows")
        if len(self.columns) > MAX_COLUMNS:
            parts.append(f"the first {MAX_COLUMNS} of {len(self.columns)} columns")
        return " and ".join(parts)


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn when it is needed.

    Attributes:
        name: of its files.
        draw: makes the figure.
        caption: how to read it, and what it shows.
        alt: the message in numbers, for who does not see it.
    """

    name: str
    draw: Callable[[], Figure]
    caption: str
    alt: str


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; pictures and tables in this order."""

    name: str
    title: str
    words: Sequence[str] = ()
    notes: Sequence[str] = ()
    parts: Sequence[Picture | Table] = field(default_factory=tuple)


@dataclass(frozen=True)
class Page:
    """The whole of it.

    Attributes:
        title: heading.
        subtitle: below it.
        synthetic: which of the data are generated, a sentence; empty: none is known to be.
        summary: sentences.
        problems: what was wrong with the files.
    """

    title: str
    subtitle: str
    synthetic: str
    summary: Sequence[str]
    sections: Sequence[Section]
    problems: Sequence[str] = ()


def printable(value: object, most: int | None = MAX_TEXT) -> str:
    """Text that any document can hold: what controls a terminal or the direction of writing is marked; then cut."""
    text = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in TURNS else c for c in str(value))
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def listed(parts: Iterable[str], between: str = ", ", most: int = MAX_LISTED) -> str:
    """At most so many, and how many more there are."""
    found = list(parts)
    more = f"{between}and {len(found) - most} more" if len(found) > most else ""
    return between.join(found[:most]) + more


def shown(cell: Cell) -> str:
    """A cell as the page has it."""
    if isinstance(cell, Spread):
        return digits(cell.mean) + (f" ± {digits(cell.sd)}" if math.isfinite(cell.sd) else "")
    if cell is None:
        return MISSING
    return digits(cell) if isinstance(cell, float) else printable(cell)


def digits(value: float | None) -> str:
    """Four decimals, or four significant digits of what is very large or very small; rounding errors are 0."""
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if size < ROUNDING:
        return "0.0000"
    return f"{value:.4f}" if 1e-3 <= size < 1e4 else f"{value:.4g}"


def _plain(cell: str | int | float | None) -> str | int | float:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    return printable(cell, None) if isinstance(cell, str) else cell
