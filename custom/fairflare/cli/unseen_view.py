"""What a comparison says of sites that were left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fairflare.cli.provenance import sessions_of
from fairflare.cli.screen import console, user_errors
from fairflare.reporting.compare.comparison_page import comparison_page
from fairflare.reporting.compare.unseen import unseen_table

if TYPE_CHECKING:
    from fairflare.cli.compare_runs import Runner


def report_unseen(runner: Runner, command: list[str], metric: str | None, failed: bool) -> int:
    """What models are worth where they were trained and where they were not, on the screen and as files."""
    with user_errors():
        found, runs = runner.unseen(), runner.results()
        typer.echo(unseen_table(found, metric, width=console.width))
        in_page = unseen_table(found, metric, style="markdown")
        (runner.folder / "unseen.md").write_text(in_page + "\n", encoding="utf-8")
        (runner.folder / "unseen.csv").write_text(unseen_table(found, metric, style="csv") + "\n", encoding="utf-8")
        page = comparison_page(command, runs, in_page, "", sessions=sessions_of(runner.folder))
        (runner.folder / "comparison.md").write_text(page + "\n", encoding="utf-8")
    console.print(f"tables: {runner.folder}", soft_wrap=True, highlight=False)
    return int(failed)
