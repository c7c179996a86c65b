"""``fairflare report``: one page about a run or a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairflare.cli import completion
from fairflare.cli.commands import app
from fairflare.cli.plan_options import Overwrite
from fairflare.cli.screen import console, user_errors

HELP = """Writes one self-contained HTML page about a run, a FLARE download of a job, or a comparison.

Beside it lie its pictures as PNG and SVG and its tables as CSV. Exit code 2 when there is nothing to report.
"""


@app.command("report", help=HELP)
def report_command(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a run, a download or a comparison.", autocompletion=completion.runs),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the report; default: report/ in the folder.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", "-m", help="Of the figures; default: the task's own.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Row that others are compared with; default: the comparison's.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    with user_errors():
        from fairflare.reporting.page.write import write_report

        beside = folder if folder.is_dir() else folder.parent
        given = {"metric": metric, "reference": reference}
        try:
            page = write_report(folder, out or beside / "report", overwrite=overwrite, **given)
        except OSError as error:
            raise ValueError(f"{error.filename or folder}: {error.strerror or error}") from error
    console.print(f"page: {page}", soft_wrap=True, highlight=False)
