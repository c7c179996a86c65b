"""One table for terminal, text, Markdown, CSV and page: what is in its cells, and how each of them shows it."""

from __future__ import annotations

import math
import statistics
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fairflare.base.disk.files import csv_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MISSING = "-"
MAX_TEXT = 160  # letters of one text from the results in the page
MAX_ROWS = 400  # of a table in the page; its CSV has all
MAX_COLUMNS = 32
ROUNDING = 1e-13
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # text after one of them may read backwards

Lines: TypeAlias = Sequence[Sequence[str]]  # rows of texts, the header first
Plain: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its population standard deviation; NaN with one seed."""

    mean: float
    sd: float = math.nan


def spread(values: Sequence[float]) -> Spread:
    """Mean and population standard deviation of the finite ones; with one value no deviation."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Spread(math.nan)
    return Spread(statistics.fmean(finite), statistics.pstdev(finite) if len(finite) > 1 else math.nan)


@dataclass(frozen=True)
class Shown:
    """A cell that reads otherwise than its values, which stand in as many columns of a CSV file."""

    text: str
    values: Sequence[Plain]


Cell: TypeAlias = Plain | Spread | Shown


def printable(value: object, most: int | None = MAX_TEXT) -> str:
    """Text that any document can hold: what controls a terminal or the direction of writing is marked; then cut."""
    text = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in TURNS else c for c in str(value))
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def number(value: float) -> str:
    """Four decimals, or the sign for a missing value."""
    return f"{value:.4f}" if math.isfinite(value) else MISSING


def sure(value: float, half: float) -> str:
    """A value writes no more decimals than its interval leaves sure.

    Args:
        value: in the metric's unit.
        half: half the interval's width, same unit; not finite or not above 0: not known, two decimals.

    Returns:
        ``0.66 ± 0.03``, or the value alone; the sign for a missing value.
    """
    if not math.isfinite(value):
        return MISSING
    if not (math.isfinite(half) and half > 0):
        return f"{value:.2f}"
    places = min(6, max(0, -math.floor(math.log10(half))))
    return f"{value:.{places}f} ± {half:.{places}f}"


def digits(value: float | None) -> str:
    """Four decimals, or four significant digits of what is very large or very small; rounding errors are 0."""
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if size < ROUNDING:
        return "0.0000"
    return f"{value:.4f}" if 1e-3 <= size < 1e4 else f"{value:.4g}"


def shown(cell: Cell) -> str:
    """A cell as the page has it."""
    if isinstance(cell, Shown):
        return cell.text
    if isinstance(cell, Spread):
        return digits(cell.mean) + (f" ± {digits(cell.sd)}" if math.isfinite(cell.sd) else "")
    if cell is None:
        return MISSING
    return digits(cell) if isinstance(cell, float) else printable(cell)


def in_text(cell: Cell) -> str:
    """A cell in a table of text: texts as they are, numbers with four decimals."""
    if isinstance(cell, (str, float)):
        return cell if isinstance(cell, str) else number(cell)
    return shown(cell)


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first cell of a row names it.

    Attributes:
        name: of its file.
        caption: what it holds, a sentence.
        columns: headings.
        rows: cells, numbers in full.
        folded: shown on demand only.
        totals: rows below a rule.
        csv_columns: for each column its headings in a file, as many as its cells have values; default: the same.
        lead: how many of the first columns it takes to tell the rows apart.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False
    totals: Sequence[Sequence[Cell]] = ()
    csv_columns: Sequence[Sequence[str]] = ()
    lead: int = 1

    def csv(self) -> str:
        """All cells, numbers in full; a :class:`Spread` is two columns, ``X mean`` and ``X sd``."""
        rows = [*self.rows, *self.totals]
        heads = self.csv_columns or [_heads(name, [row[k] for row in rows]) for k, name in enumerate(self.columns)]
        lines: list[list[Plain]] = [[printable(name, None) for names in heads for name in names]]
        for row in rows:
            cells = zip(row, heads, strict=True)
            lines.append([_plain(value) for cell, names in cells for value in _values(cell, len(names))])
        return csv_text(lines)

    def markdown(self) -> list[str]:
        """The lines of a Markdown table."""
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self._texts()]
        lines.insert(1, "| --- |" + " ---: |" * (len(self.columns) - 1))
        return lines

    def text(self, width: int | None = None) -> str:
        """Aligned text: the first column to the left, the others to the right.

        Args:
            width: a wider table is cut between columns into several, one below the other, each with the first ones.
                None: it stays whole.
        """
        texts, rules = self._texts(), {1, *([1 + len(self.rows)] if self.totals else [])}
        widths = _widths(texts)
        parts = []
        for block in cut(widths, width, lead=self.lead):
            lines = []
            for index, row in enumerate(texts):
                if index in rules:
                    lines.append("  ".join("-" * widths[i] for i in block))
                first, *others = block
                cells = [row[first].ljust(widths[first]), *(row[i].rjust(widths[i]) for i in others)]
                lines.append("  ".join(cells).rstrip())
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def rich(self, width: int | None = None, bold: Collection[str] = ()) -> list[RichTable]:
        """For a terminal, as :meth:`text`; rows of these names stand out."""
        from rich.table import Table as RichTable
        from rich.text import Text

        head, *body = self._texts()
        found = []
        for block in cut(_widths([head, *body]), None if width is None else width - 4, gap=3) if body else []:
            table = RichTable()
            for index in block:
                table.add_column(Text(head[index]), justify="left" if index == 0 else "right", no_wrap=True)
            for k, row in enumerate(body):
                if k == len(self.rows):
                    table.add_section()
                style = "bold red" if k < len(self.rows) and row[0] in bold else None
                table.add_row(*(Text(row[i]) for i in block), style=style)
            found.append(table)
        return found

    def _texts(self) -> list[list[str]]:
        return [list(self.columns), *([in_text(cell) for cell in row] for row in (*self.rows, *self.totals))]

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


def _heads(name: str, cells: Sequence[Cell]) -> Sequence[str]:
    return [f"{name} mean", f"{name} sd"] if any(isinstance(cell, Spread) for cell in cells) else [name]


def _values(cell: Cell, count: int) -> list[Plain]:
    """As many as there are columns."""
    of = cell.values if isinstance(cell, Shown) else (cell.mean, cell.sd) if isinstance(cell, Spread) else (cell,)
    return [*of, *[None] * (count - len(of))]


def _plain(value: Plain) -> Plain:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return printable(value, None) if isinstance(value, str) else value


def _widths(lines: Lines) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def wrapped(lines: Iterable[str], width: int | None) -> list[str]:
    """Sentences of at most ``width`` characters a line; what goes on is indented by two more. None: as they are."""
    if width is None:
        return list(lines)
    found = []
    for line in lines:
        rest = line[: len(line) - len(line.lstrip())] + "  "
        options: Any = {"subsequent_indent": rest, "break_long_words": False, "break_on_hyphens": False}
        found += textwrap.wrap(line, max(width, 20), **options) or [""]
    return found


def csv_lines(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV, numbers in full; no newline at the end."""
    return csv_text(rows).rstrip("\n")


def cut(widths: Sequence[int], width: int | None, gap: int = 2, lead: int = 1) -> list[list[int]]:
    """Which columns stand side by side, the ``lead`` first in each of the blocks; ``gap``: between two columns."""
    found: list[list[int]] = [[*range(lead)]]
    taken = first = sum(widths[:lead]) + gap * (lead - 1)
    for index, own in enumerate(widths[lead:], start=lead):
        if width is not None and len(found[-1]) > lead and taken + gap + own > width:
            found.append([*range(lead)])
            taken = first
        found[-1].append(index)
        taken += gap + own
    return found
