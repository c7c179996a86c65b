"""Tables of text cells as aligned lines or Markdown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from fairflare.core.files import csv_text

MISSING = "-"
Table = Sequence[Sequence[str]]  # rows of cells, the header first


def number(value: float) -> str:
    """Four digits, or the sign for a missing value."""
    return f"{value:.4f}" if math.isfinite(value) else MISSING


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


def blocks(table: Table, width: int | None = None, rules: Sequence[int] = (1,), lead: int = 1) -> str:
    """Aligned text: the first column to the left, the others to the right.

    Args:
        table: cells.
        width: a wider table is cut between columns into several, one below the other, each with the first ones.
            None: it stays whole.
        rules: before which rows a line is drawn.
        lead: how many of the first columns it takes to tell the rows apart.
    """
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n\n".join(
        "\n".join(_lines([[row[i] for i in block] for row in table], [widths[i] for i in block], rules))
        for block in cut(widths, width, lead=lead)
    )


def markdown_lines(table: Table) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    lines.insert(1, "| --- |" + " ---: |" * (len(table[0]) - 1))
    return lines


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


def _lines(table: Table, widths: Sequence[int], rules: Sequence[int]) -> list[str]:
    lines = []
    for index, (first, *others) in enumerate(table):
        if index in rules:
            lines.append("  ".join("-" * width for width in widths))
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
