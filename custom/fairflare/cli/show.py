"""``fairflare show`` and ``report``: what finished runs give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fairflare.cli import completion
from fairflare.cli.options import Metric, Overwrite
from fairflare.cli.screen import AsJson, console, one_document, one_form, say, user_errors


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
    from fairflare.cli.as_json import ShowDocument, of_comparison, of_run
    from fairflare.reporting.results import find_results, read_results
    from fairflare.reporting.table import fairness_table, rich_table
    from fairflare_lab.compare.comparison import comparison_of, row_table
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
                put(ShowDocument(comparison=of_comparison(several)))
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
            put(of_run(found[0], metric))
        elif style == "text":
            console.print(rich_table(found[0], metric=metric, width=console.width))
        else:
            typer.echo(fairness_table(found[0], metric=metric, style=style))


def _write_picture(found: Sequence[Mapping[str, Any]], path: Path, metric: str | None) -> None:
    """Draws what every site of one run gets, as a PNG.

    Raises:
        ValueError: several runs, another kind of file, no matplotlib, or the run has no final test.
    """
    if len(found) != 1:
        raise ValueError(f"--picture is of one run, got {len(found)}")
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise ValueError(f"--picture must be a .png file in a folder that exists, got {path}")
    from fairflare_lab.page.pictures import picture_of_sites

    try:
        path.write_bytes(picture_of_sites(found[0], metric))
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
