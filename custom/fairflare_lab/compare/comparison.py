"""Compare runs side by side, each row over the seeds of one configuration, as text, Markdown or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairflare.base import checks
from fairflare.core.cells import OF_ALL
from fairflare.reporting.documents import RunResults
from fairflare.reporting.findings import Finding
from fairflare.reporting.layout import STYLES, Cell, Shown, Table, format_tables, spread
from fairflare.reporting.values import direction_of, metrics_of
from fairflare_lab.compare.comparison_notes import comparison_findings, notes_of
from fairflare_lab.compare.difference_table import difference_table
from fairflare_lab.compare.differences import Difference, differences_of
from fairflare_lab.compare.rows import Row, complete_runs, rows_of


@dataclass(frozen=True)
class Comparison:
    """Store the material for every table, sentence and picture of a comparison.

    Attributes:
        rows: rows of the comparison, in the order of the runs.
        metric, higher: name of the compared metric; whether more of it is better.
        reference: label of the row that other rows are compared with.
        differences: differences of all rows and measures, and of each site; empty with one row or no common seed.
        problem: reason why differences are missing if the runs are at fault; else empty.
        findings: what is said first.
        notes: sentences that a reader of the figures must know.
    """

    rows: list[Row]
    metric: str
    higher: bool
    reference: str
    differences: list[Difference]
    problem: str
    findings: list[Finding]
    notes: list[str]

    @property
    def sites(self) -> list[str]:
        return sorted({site for row in self.rows for values in row.values for site in values})


def comparison_of(runs: Sequence[RunResults], metric: str | None = None, reference: str | None = None) -> Comparison:
    """Compare runs: runs that differ only in the seed form a row, and each row is compared with a reference row.

    Args:
        runs: documents as ``read_results`` returns them. Runs that did not complete and repeats of the same run are
            left out and counted.
        metric: the metric to compare; the primary metric of the first complete run when None.
        reference: label of the reference row; default: the first row.

    Raises:
        ValueError: no run is complete, a run lacks the metric, or no row has the label.
    """
    complete = complete_runs(runs)
    chosen = metric or metrics_of(complete[0])[0]
    rows = rows_of(complete, chosen)
    labels = [row.label for row in rows]
    refers_to = labels[0] if reference is None else checks.choice("--reference", reference, labels)
    higher = direction_of(complete[0], chosen)
    problem, found = "", []
    if len(rows) > 1:
        try:
            found = differences_of({row.label: row.runs for row in rows}, refers_to, chosen, higher)
        except ValueError as error:
            problem = f"no differences: {error}"
    findings = comparison_findings(runs, complete, rows, chosen, refers_to, found)
    return Comparison(rows, chosen, higher, refers_to, found, problem, findings, notes_of(complete, chosen, rows))


def compare(
    runs: Sequence[RunResults],
    *,
    metric: str | None = None,
    style: Literal["text", "markdown", "csv"] = "text",
    per_site: bool = True,
    width: int | None = None,
) -> str:
    """Return a table of methods side by side: mean ± population standard deviation over runs that differ in the seed.

    For every run the sites' values, their average, their standard deviation and the worst site's value are computed
    first. Runs of one label with different settings get a row each, and a note says what differs.

    Args:
        runs: documents as ``read_results`` returns them. Runs that did not complete and repeats of the same run are
            left out and counted.
        metric: the metric to compare; the primary metric of the first complete run when None.
        style: aligned text, a Markdown table, or CSV with means and deviations as numbers.
        per_site: whether the table also has a column for each site.
        width: largest width of the text; a wider table is cut into several, one below the other; ``None`` for no limit.

    Raises:
        ValueError: no run is complete, the style is unknown, or a run lacks the metric; the message names it.
    """
    checks.choice("style", style, STYLES)
    return row_table(comparison_of(runs, metric), style=style, per_site=per_site, width=width)


def row_table(found: Comparison, *, style: str = "text", per_site: bool = True, width: int | None = None) -> str:
    """Return the table of a comparison's rows as text, in the form of :func:`compare`."""
    table = rows_table(found.rows, found.metric, found.sites if per_site else [])
    return format_tables([table], found.notes, style, width, first=[finding.text for finding in found.findings])


def both_tables(found: Comparison, *, style: str = "text", per_site: bool = True, width: int | None = None) -> str:
    """Return the tables of a comparison's rows and of their differences as text, and why there are no differences."""
    tables = [row_table(found, style=style, per_site=per_site, width=width)]
    if found.differences:
        tables.append(difference_table(found.differences, found.reference, style=style, width=width))
    return "\n\n".join(filter(None, [*tables, found.problem]))


# ------------------------------------------------------------------------------------------------ forms


def rows_table(of: Sequence[Row], metric: str, sites: Sequence[str]) -> Table:
    """Return a comparison's table: for each row mean and deviation of each site's values and of figures over sites."""
    of_all = list(dict.fromkeys(name for row in of for name in row.of_all))
    names = [*sites, "average", "std", "worst", *(OF_ALL + name for name in of_all)]
    rows: list[list[Cell]] = []
    for row in of:
        cells = [*map(row.cell, sites), *map(row.summarise, ("mean", "std", "worst"))]
        cells += [spread(row.of_all.get(name, [])) for name in of_all]
        rows.append([row.label, Shown(str(len(row.runs)), [metric, len(row.runs)]), *cells])
    heads = [["method"], ["metric", "runs"], *([f"{name} mean", f"{name} sd"] for name in names)]
    return Table("table", "", ["method", "runs", *names], rows, csv_columns=heads)
