"""``fairflare show`` and ``report``: what finished runs give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairflare.cli import completion
from fairflare.cli.options import Metric, Overwrite
from fairflare.cli.screen import AsJson, console, one_document, one_form, say, user_errors

if TYPE_CHECKING:
    from fairflare.reporting.documents import Results


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
    picture: Annotated[
        Path | None, typer.Option(help="Of one run: a PNG of what every site gets; replaced if there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The fairness table of a run; of several runs a comparison, with the differences to the first row."""
    from fairflare.reporting.results import find_results, read_results
    from fairflare.reporting.table import fairness_table, rich_table
    from fairflare_lab.compare.comparison import comparison_of, row_table
    from fairflare_lab.compare.comparison_json import comparison_json
    from fairflare_lab.compare.difference_table import difference_table

    with user_errors(), one_document(as_json) as put:
        one_form(as_json, markdown=markdown, csv=csv)
        style: Any = "markdown" if markdown else "csv" if csv else "text"
        found = [read_results(find_results(path)) for path in runs]
        if picture is not None:
            _write_picture(found, picture, metric)
        if len(found) > 1:
            several = comparison_of(found, metric, last=last)
            if as_json:
                put(run=None, comparison=comparison_json(several))
                return
            parts = [row_table(several, style=style, per_site=sites, width=console.width)]
            if not csv:
                if differ := several.differences:
                    parts.append(difference_table(differ, several.reference, style=style, width=console.width))
                parts.append(several.problem)
            typer.echo("\n\n".join(filter(None, parts)))
        elif last:
            raise ValueError("--last is for several runs; the table of one has a column for its last models")
        elif as_json:
            put(run=_as_json(found[0], metric), comparison=None)
        elif style == "text":
            console.print(rich_table(found[0], metric=metric, width=console.width))
        else:
            typer.echo(fairness_table(found[0], metric=metric, style=style))


def _as_json(results: Results, metric: str | None) -> dict[str, Any]:
    """Return one run with its metrics at its sites and over them; ``notes`` are the sentences under its table.

    Raises:
        ValueError: a metric that the run does not have.
    """
    from fairflare.reporting.table import by_site_of, known_metric, label_of, metrics_of, run_notes, summary_of

    names = []
    if results.test:
        names = metrics_of(results) if metric is None else [known_metric(results, metric)]
    over = {name: summary_of(results, name) for name in names}
    metrics = {
        name: {
            "sites": by_site_of(results, name), "suppressed": of.suppressed, "higher_is_better": of.higher_is_better,
            "average": of.mean, "std": of.std, "worst": of.worst, "worst_site": of.worst_site, "range": of.range,
        }
        for name, of in over.items()
    }  # fmt: skip
    return {
        "label": label_of(results), "seed": results.info.seed, "status": results.status, "reason": results.reason,
        "rounds": len(results.rounds), "metrics": metrics, "notes": run_notes(results, metric),
    }  # fmt: skip


def _write_picture(found: Sequence[Results], path: Path, metric: str | None) -> None:
    """Draws what every site of one run gets, as a PNG.

    Raises:
        ValueError: several runs, another kind of file, no matplotlib, or the run has no final test.
    """
    if len(found) != 1:
        raise ValueError(f"--picture is of one run, got {len(found)}")
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise ValueError(f"--picture must be a .png file in a folder that exists, got {path}")
    from fairflare.reporting.pictures import draw_sites, save_picture

    try:
        save_picture(draw_sites(found[0], metric), path)
    except ImportError as error:
        raise ValueError("--picture needs matplotlib: pip install 'fairflare[page]'") from error


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
    """Writes one self-contained HTML page about a run, a FLARE download of a job, or a comparison.

    Beside it lie its pictures as PNG and SVG and its tables as CSV. Exit code 2 when there is nothing to report.
    """
    with user_errors(out or folder):
        from fairflare_lab.page.write import write_report

        beside = folder if folder.is_dir() else folder.parent
        page = write_report(folder, out or beside / "report", metric=metric, reference=reference, overwrite=overwrite)
    say(f"page: {page}", console)
