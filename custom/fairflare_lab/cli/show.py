"""Implement ``fairflare show`` for several runs, and ``fairflare report``, which writes a page about runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fairflare.cli import completion
from fairflare.cli.options import Metric, Overwrite
from fairflare.cli.screen import console, say, user_errors

if TYPE_CHECKING:
    from fairflare.reporting.documents import RunResults


def show_several(
    runs: Sequence[RunResults],
    metric: str | None,
    *,
    sites: bool,
    style: Literal["text", "markdown", "csv"],
    put: Callable[..., None] | None,
) -> None:
    """Print the comparison of several runs, with the differences to the first row.

    Args:
        runs: documents of the runs.
        metric: name of the metric; default: the task's primary metric.
        sites: whether to print a column for each site.
        style: form of the tables.
        put: function that prints the comparison as one JSON document; ``None`` if tables are printed.
    """
    from fairflare_lab.compare.comparison import both_tables, comparison_of, row_table
    from fairflare_lab.compare.comparison_json import comparison_json

    several = comparison_of(runs, metric)
    if put is not None:
        put(run=None, comparison=comparison_json(several))
        return
    tables = row_table if style == "csv" else both_tables
    typer.echo(tables(several, style=style, per_site=sites, width=console.width))


def report(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a run, a download or a comparison.", autocompletion=completion.runs),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the report; default: report/ in the folder.")
    ] = None,
    metric: Metric = None,
    reference: Annotated[
        str | None, typer.Option(help="Row that others are compared with; default: the comparison's.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write one self-contained HTML page about a run, a FLARE download of a job, or a comparison.

    Beside it lie its pictures as SVG and its tables as CSV. Exit code 2 when there is nothing to report.
    """
    with user_errors(out or folder):
        from fairflare_lab.page.write import write_report

        beside = folder if folder.is_dir() else folder.parent
        page = write_report(folder, out or beside / "report", metric=metric, reference=reference, overwrite=overwrite)
    say(f"page: {page}", console)
