"""Define tables, and write their cells for a terminal, Markdown, CSV files and the page."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

from fairflare.base.disk.files import csv_text

MISSING = "-"
STYLES = ("text", "markdown", "csv")
MAX_LISTED = 24  # largest number of parts that a message lists
MAX_TEXT = 160  # largest number of characters of one text from the results in a table
MAX_ROWS = 400  # largest number of rows of a table in the page; the table's CSV file has all rows
MAX_COLUMNS = 32
ROUNDING = 1e-13
PLACES = 3  # largest number of decimals
SMALL, LARGE = 1e-2, 1e7  # a number outside this range has two significant digits
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # text after one of them may read backwards

Plain: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class Spread:
    """Store a mean over seeds and its population standard deviation, which is NaN with one seed."""

    mean: float
    sd: float = math.nan


def spread(values: Sequence[float]) -> Spread:
    """Return mean and population standard deviation of the finite values; of one value the deviation is NaN."""
    finite = [value for value in values if math.isfinite(value)]
    mean = statistics.fmean(finite) if finite else math.nan
    return Spread(mean, statistics.pstdev(finite) if len(finite) > 1 else math.nan)


@dataclass(frozen=True)
class Shown:
    """Represent a cell that shows a text; in CSV files the cell's values replace the text, each in its own column."""

    text: str
    values: Sequence[Plain]


Cell: TypeAlias = Plain | Spread | Shown


def printable(value: object, most: int | None = MAX_TEXT) -> str:
    """Return a value as text that any document can hold, cut to ``most`` characters.

    Characters that control a terminal or the direction of writing are replaced by U+FFFD before the cut.
    """
    text = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in TURNS else c for c in str(value))
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def decimals(half: float) -> int:
    """Return the number of decimals, at most 3, that a figure's interval or standard deviation justifies."""
    return min(PLACES, max(0, -math.floor(math.log10(half)))) if half > 0 else PLACES


def number(value: float | None, half: float = math.nan, sign: Literal["", "+"] = "") -> str:
    """Return a figure as text with as many digits as are certain, for page and terminal; files have all digits.

    Args:
        value: the figure, in any unit; ``None`` or not finite: it is missing.
        half: half the width of the figure's interval, or its standard deviation, in the same unit, which decides the
            decimals. NaN: not known; the text has three decimals, or two significant digits.
        sign: ``"+"``: positive figures have a sign too.

    Returns:
        ``0.66 ± 0.03``, or ``0.663`` alone; :data:`MISSING` for a missing figure.
    """
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if math.isfinite(half) and (half == 0 or max(size, half) >= SMALL):
        places = decimals(half)
        return f"{value:{sign}.{places}f} ± {half:.{places}f}"
    spread = "" if math.isnan(half) else f" ± {half:.1g}"
    if ROUNDING <= size < SMALL or size >= LARGE:
        return f"{value:{sign}.2g}{spread}"
    places = PLACES if size < 10 else 1 if size < 1000 else 0
    return f"{0.0 if size < ROUNDING else value:{sign}.{places}f}{spread}"


def interval(low: float | None, high: float | None, mean: float | None = None) -> str:
    """Return an interval as text: ``[0.712, 0.857]``, or ``-0.11 [-0.58, +0.37]`` with a difference before it.

    Half the interval's width decides the decimals. They are one more than in :func:`number`, so that the text shows on
    which side of 0 an end lies.

    Args:
        low, high: ends of the interval; not finite: there is no interval.
        mean: the difference; ``None`` if the interval is not that of a difference.
    """
    sign = "" if mean is None else "+"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number(mean, sign="+")
    places = min(PLACES, decimals((high - low) / 2) + 1)
    ends = f"[{low:{sign}.{places}f}, {high:{sign}.{places}f}]"
    return ends if mean is None else f"{mean:+.{places}f} {ends}"


def print_cell(cell: Cell) -> str:
    """Return the text that page, terminal and Markdown show for a cell."""
    if isinstance(cell, Shown):
        return cell.text
    if isinstance(cell, Spread):
        return number(cell.mean, cell.sd)
    return MISSING if cell is None else (number(cell) if isinstance(cell, float) else printable(cell))


def p_value(value: float) -> str:
    """Return a p-value as text: ``= 0.012`` or ``< 0.001``."""
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


@dataclass(frozen=True)
class Table:
    """Represent a table as rows under columns; the first cell of a row names the row.

    Attributes:
        name: name of the table's file.
        caption: sentence about the content.
        columns: headings of the columns.
        rows: cells of each row, with unrounded numbers.
        folded: whether the page shows the table on demand only.
        totals: rows below a horizontal line.
        csv_columns: headings of each column in a CSV file, one for each value of a cell; default: ``columns``.
        lead: number of first columns that identify a row.
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
        """Return the table as CSV text with full numbers; a :class:`Spread` has columns ``X mean`` and ``X sd``."""
        rows = [*self.rows, *self.totals]
        heads = self.csv_columns or [
            [f"{name} mean", f"{name} sd"] if any(isinstance(row[k], Spread) for row in rows) else [name]
            for k, name in enumerate(self.columns)
        ]
        head = [printable(name, None) for names in heads for name in names]
        return csv_text([head, *(
            [value for cell, names in zip(row, heads, strict=True) for value in _values(cell, len(names))]
            for row in rows
        )])  # fmt: skip

    def markdown(self) -> list[str]:
        """Return the table as lines of Markdown."""
        head, *lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self._texts()]
        return [head, "| --- |" + " ---: |" * (len(self.columns) - 1), *lines]

    def text(self, width: int | None = None) -> str:
        """Return the table as aligned text, the first column to the left, the other columns to the right.

        Args:
            width: largest width of the text. A wider table is cut between columns into several tables, one below the
                other, each with the leading columns; ``None`` for one whole table.
        """
        head, *rows = self._texts()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        rule, totals = ["-" * size for size in widths], rows[len(self.rows) :]
        lines = [head, *(line for part in (rows[: len(self.rows)], totals) if part for line in (rule, *part))]
        aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines]
        blocks = cut(widths, width, lead=self.lead)
        return "\n\n".join(
            "\n".join("  ".join(row[column] for column in block).rstrip() for row in aligned) for block in blocks
        )

    def _texts(self) -> list[list[str]]:
        return [list(self.columns), *([print_cell(cell) for cell in row] for row in (*self.rows, *self.totals))]

    @property
    def shown(self) -> Sequence[Sequence[Cell]]:
        """Return the table's cells that the page shows: its first rows and columns, and the rows below a line."""
        return [row[:MAX_COLUMNS] for row in (*self.rows[:MAX_ROWS], *self.totals)]

    @property
    def cut(self) -> str:
        """Return text on how many rows and columns of the table the page leaves out; empty if it shows all."""
        sizes = (("rows", len(self.rows), MAX_ROWS), ("columns", len(self.columns), MAX_COLUMNS))
        return " and ".join(f"the first {most} of {count} {what}" for what, count, most in sizes if count > most)


def _values(cell: Cell, count: int) -> list[Plain]:
    """Return the values of a cell, filled up with ``None`` to ``count`` values, one for each CSV column."""
    of = cell.values if isinstance(cell, Shown) else (cell.mean, cell.sd) if isinstance(cell, Spread) else (cell,)
    known = [None if isinstance(value, float) and not math.isfinite(value) else value for value in of]
    return [
        *(printable(value, None) if isinstance(value, str) else value for value in known), *[None] * (count - len(of)),
    ]  # fmt: skip


def wrap_sentences(lines: Iterable[str], width: int | None) -> list[str]:
    """Return sentences wrapped to at most ``width`` characters a line; with ``None`` they are not wrapped.

    Further lines of a sentence are indented by two more spaces.
    """
    if width is None:
        return list(lines)
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line, max(width, 20), subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False, break_on_hyphens=False,
        ) or [""]
    ]  # fmt: skip


def format_tables(
    tables: Sequence[Table], notes: Iterable[str], style: str = "text", width: int | None = None, title: str = "",
    first: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return tables and their notes as one text, one below the other, without a newline at the end.

    Args:
        tables: the tables. In CSV only the first one is returned, with unrounded numbers, without title and notes.
        notes: sentences below the tables.
        style: one of :data:`STYLES`.
        width: largest width of the text.
        title: line above the tables.
        first: sentences between the title and the tables.
    """
    if style == "csv":
        return tables[0].csv().rstrip("\n")
    head = [title] if title else []
    if style == "markdown":
        blocks = [*([line] for line in (*head, *first)), *(table.markdown() for table in tables)]
        return "\n".join([*(line for block in blocks for line in (*block, "")), *notes])
    head += [*wrap_sentences(first, width), *([""] if first and tables else [])]
    further = [line for table in tables[1:] for line in ("", table.text(width), "")]
    return "\n".join([*head, *(table.text(width) for table in tables[:1]), *further, *wrap_sentences(notes, width)])


def sort_sites(sites: Iterable[str]) -> list[str]:
    """Return sites sorted by name, ``site-2`` before ``site-10``."""
    return sorted(sites, key=lambda site: re.sub(r"\d+", lambda number: number[0].zfill(20), site))


def join_parts(parts: Iterable[str], between: str = ", ", most: int = MAX_LISTED) -> str:
    """Return a text with at most ``most`` of the parts, and the number of the parts left out."""
    found = list(parts)
    return between.join(found[:most]) + (f"{between}and {len(found) - most} more" if len(found) > most else "")


def format_count(count: int, what: str) -> str:
    """Return a count with its noun in singular or plural: ``1 site``, ``2 sites``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text with ranges: 1, 2, 3, 7 as ``1-3, 7``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda place: place[1] - place[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def cut(widths: Sequence[int], width: int | None, gap: int = 2, lead: int = 1) -> list[list[int]]:
    """Cut a table into blocks of columns that stand side by side, the ``lead`` first columns in each block.

    ``gap``: width of the space between two columns.
    """
    blocks: list[list[int]] = [[*range(lead)]]
    for index in range(lead, len(widths)):
        if (
            width is not None
            and len(blocks[-1]) > lead
            and sum(widths[column] + gap for column in (*blocks[-1], index)) - gap > width
        ):
            blocks.append([*range(lead)])
        blocks[-1].append(index)
    return blocks
