"""Implement ``fairflare show``, which prints the results of runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairflare.base.plugins import COMMANDS, load_plugins
from fairflare.cli import completion
from fairflare.cli.options import Metric
from fairflare.cli.screen import AsJson, console, one_document, one_form, user_errors

if TYPE_CHECKING:
    from fairflare.reporting.documents import RunResults


def show(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders or results.json files.", autocompletion=completion.runs)
    ],
    metric: Metric = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table in Markdown.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV, numbers in full.")] = False,
    sites: Annotated[bool, typer.Option(help="Of several runs: a column for each site.")] = True,
    as_json: AsJson = False,
) -> None:
    """Print the fairness table of a run; of several runs a comparison, with the differences to the first row."""
    from fairflare.reporting.results import find_results, read_results
    from fairflare.reporting.table import fairness_table

    with user_errors(), one_document(as_json) as put:
        one_form(as_json, markdown=markdown, csv=csv)
        style: Any = "markdown" if markdown else "csv" if csv else "text"
        documents = [read_results(find_results(path)) for path in runs]
        if len(documents) > 1:
            several = load_plugins(COMMANDS).get("show")
            if several is None:
                raise ValueError("several runs are compared by the package fairflare_lab, which is not installed here")
            several(documents, metric, sites=sites, style=style, put=put if as_json else None)
        elif as_json:
            put(run=_plain_results(documents[0], metric), comparison=None)
        else:
            typer.echo(fairness_table(documents[0], metric=metric, style=style, width=console.width))


def _plain_results(results: RunResults, metric: str | None) -> dict[str, Any]:
    """Return a run as plain values: what is said first, metrics by site and over sites, and the notes on details.

    Raises:
        ValueError: the run does not have the metric.
    """
    from fairflare.reporting.findings import run_findings
    from fairflare.reporting.table import check_metric, collect_by_site, label_of, metrics_of, run_notes, summary_of
    from fairflare.reporting.values import site_columns

    chosen = (
        (metrics_of(results) if metric is None else [check_metric(results, metric)]) if site_columns(results) else []
    )
    over = {name: summary_of(results, name).as_dict() for name in chosen}
    metrics = {
        name: {"sites": collect_by_site(results, name), "average": figures.pop("mean"), **figures}
        for name, figures in over.items()
    }
    return {
        "label": label_of(results), "seed": results.info.seed, "status": results.status, "reason": results.reason,
        "rounds": len(results.rounds), "findings": [asdict(one) for one in run_findings(results, metric)],
        "metrics": metrics, "notes": run_notes(results, metric),
    }  # fmt: skip
