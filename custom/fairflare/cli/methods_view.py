"""``fairflare list`` in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fairflare.federation.plan.describe import Listed, overview

WIDE = 110  # columns that the sources need beside the rest
WIDEST_TITLE, WIDEST_SOURCE = 14, 36


def print_methods(console: Console) -> None:
    """The methods in groups by what they can learn; on a wide screen with their sources."""
    groups: dict[frozenset[str], list[Listed]] = {}
    for method in overview():
        groups.setdefault(frozenset(method.learns), []).append(method)
    members = [method for group in groups.values() for method in group]
    names = max(len(method.name) for method in members)
    titles = min(max(len(method.title) + 1 for method in members), WIDEST_TITLE)
    sources = max(len(method.source) for method in members)
    for kinds in sorted(groups, key=lambda kinds: (-len(kinds), sorted(kinds))):
        console.print(f"[bold]{' or '.join(sorted(kinds, reverse=True)).capitalize()}[/bold]")
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=names, no_wrap=True)
        table.add_column(width=titles)
        table.add_column(ratio=1)
        if console.width >= WIDE:
            table.add_column(width=min(sources, WIDEST_SOURCE))
        for m in groups[kinds]:
            cells = (m.name, m.title + ("*" if m.phases > 1 else ""), m.summary, m.source)
            table.add_row(*map(escape, cells[: len(table.columns)]))
        console.print(Padding(table, (0, 0, 1, 0)))
    console.print("* asks every site twice a round", markup=False, highlight=False)
    console.print("Settings: fairflare describe JOB. Sources and pages: fairflare list --markdown", highlight=False)
