"""``fairflare show``: what finished runs give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fairflare.base.plugins import COMMANDS, plugged
from fairflare.cli import completion
from fairflare.cli.options import Metric
from fairflare.cli.screen import AsJson, console, one_document, one_form, user_errors


def show(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders or results.json files.", autocompletion=completion.runs)
    ],
    metric: Metric = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table in Markdown.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV, numbers in full.")] = False,
    sites: Annotated[bool, typer.Option(help="Of several runs: a column for each site.")] = True,
    last: Annotated[
        bool, typer.Option("--last", help="Of several runs: of their last models (test_last), not of the final one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The fairness table of a run; of several runs a comparison, with the differences to the first row."""
    from fairflare.cli.as_json import of_run
    from fairflare.reporting.results import find_results, read_results
    from fairflare.reporting.table import fairness_table, rich_table

    with user_errors(), one_document(as_json) as put:
        one_form(as_json, markdown=markdown, csv=csv)
        style: Any = "markdown" if markdown else "csv" if csv else "text"
        found = [read_results(find_results(path)) for path in runs]
        if len(found) > 1:
            several = plugged(COMMANDS).get("show")
            if several is None:
                raise ValueError("several runs are compared by the package fairflare_lab, which is not installed here")
            several(found, metric, last=last, sites=sites, style=style, put=put if as_json else None)
        elif last:
            raise ValueError("--last is for several runs; the table of one has a column for its last models")
        elif as_json:
            put(of_run(found[0], metric))
        elif style == "text":
            console.print(rich_table(found[0], metric=metric, width=console.width))
        else:
            typer.echo(fairness_table(found[0], metric=metric, style=style))
