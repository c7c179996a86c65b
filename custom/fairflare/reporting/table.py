"""The fairness table of one run: for logs and for the terminal."""

from __future__ import annotations

import math
import statistics
from typing import Literal

from fairflare.base import checks
from fairflare.core.fairness import declared_as, summarize
from fairflare.reporting.documents import SUPPRESSED, GlobalTest, Metrics, Results, SiteStanding
from fairflare.reporting.groups import captions, group_notes, group_tables
from fairflare.reporting.layout import MISSING, STYLES, Cell, Shown, Table, counted, interval, printed
from fairflare.reporting.notes import BEST, MAX_HEADING, SYNTHETIC_NOTE, other_models, run_notes
from fairflare.reporting.standing import recall_of, shown_behind
from fairflare.reporting.values import (
    MAX_COLUMNS,
    by_site_of,
    declared_direction,
    direction_of,
    global_values,
    known_metric,
    label_of,
    metrics_of,
    summary_of,
    suppressed_of,
    title_of,
)

__all__ = [
    "SYNTHETIC_NOTE", "by_site_of", "class_table", "direction_of", "fairness_table", "known_metric", "label_of",
    "metrics_of", "run_notes", "summary_of", "table_of",
]  # fmt: skip

UNSURE = "?"  # behind a worst site that may be no worse than the others


def fairness_table(
    results: Results,
    *,
    metric: str | None = None,
    style: Literal["text", "markdown", "csv"] = "text",
    width: int | None = None,
) -> str:
    """Return the result of a run: metrics per site, their average and spread, and who was left out.

    Args:
        results: a document as :func:`fairflare.reporting.results.read_results` returns it.
        metric: only this one; None: those that the task wants in tables.
        style: aligned text, a Markdown table, or CSV with the numbers in full and without the notes.
        width: of the text; a wider table is cut into several, one below the other. None: as wide as it is.

    Returns:
        Lines without a trailing newline. A run without test results gets its status and reason instead.

    Raises:
        ValueError: an unknown style, or a metric that the run does not have (names it).
    """
    checks.choice("style", style, STYLES)
    table = table_of(results, metric)
    classes = class_table(results) if metric in (None, results.info.primary_metric) else None
    marked = any(isinstance(cell, Shown) and cell.text.endswith(UNSURE) for row in table.totals for cell in row)
    notes = [f"{UNSURE}: has the worst value; that the site is behind the others is not shown."] if marked else []
    tables = [table, *([classes] if classes else [])] if table.rows or style == "csv" else []
    if metric is None:
        tables += group_tables(results) if tables else []
        notes += [*captions(results), *group_notes(results)]
    return printed(tables, notes + run_notes(results, metric), style, width, _title(results))


def _title(results: Results) -> str:
    info, status = results.info, results.status
    reason = f": {results.reason}" if results.reason else ""
    parts = {
        title_of(results): True,
        f"experiment {info.experiment}": info.experiment,
        f"seed {info.seed}": info.seed is not None,
        counted(len(results.rounds), "round"): True,
        "RUNNING, or cut off": status == "running",
        status.upper() + reason: status == "failed",
    }
    return ", ".join(part for part, told in parts.items() if told)


def table_of(results: Results, metric: str | None = None) -> Table:
    """Make a row for each site, and their average and spread; without rows where there is no test.

    Raises:
        ValueError: a metric that the run does not have.
    """
    if not results.test:
        return Table("run", "", ["site"], [])
    metrics = metrics_of(results) if metric is None else [known_metric(results, metric)]
    columns = [_Column(results, name) for name in metrics]
    columns += [_Column(results, metrics[0], test, f", {heading}") for heading, test in other_models(results)]
    header = ["site", *(column.shown for column in columns)]
    names = [["site"], *([column.heading] for column in columns)]
    sites: list[list[Cell]] = [
        [site, *(column.cell(site) for column in columns)] for site in sorted({s for c in columns for s in c.values})
    ]
    totals: list[list[Cell]] = [
        [title, *(getattr(column.summary, attribute) for column in columns)]
        for title, attribute in (("average", "mean"), ("std", "std"), ("worst", "worst"), ("range", "range"))
    ]
    totals.insert(3, ["worst site", *(column.worst_site() for column in columns)])
    of_all, standing = results.global_test, results.inequality
    if of_all.metrics:
        totals.append(["global test", *(column.of_all for column in columns)])
    if standing.metric in metrics:
        # Behind its metric: each site's interval and cases, and what equal sites would show.
        place = 2 + metrics.index(standing.metric)
        header[place:place] = [f"{standing.level:.0%} interval", "cases"]
        names[place:place] = [["low", "high"], ["cases"]]
        for row in sites:
            kept = row[0] in columns[place - 2].home
            row[place:place] = KEPT_CELLS if kept else _interval_cells(standing.sites.get(str(row[0]), SiteStanding()))
        for row in totals:
            known = row[0] == "global test" and of_all.metric == standing.metric
            row[place:place] = _interval_cells(of_all) if known else [None, None]
        if standing.test:
            chance: list[Cell] = ["std if equal", *[None] * (len(header) - 1)]
            chance[place - 1] = standing.chance_std
            totals.insert(2, chance)
    return Table("run", "", header, sites, totals=totals, csv_columns=names)


#: In place of a site's interval and number of test cases, where it withholds them.
KEPT_CELLS: list[Cell] = [Shown(SUPPRESSED, [SUPPRESSED] * 2), SUPPRESSED]


def _interval_cells(of: SiteStanding | GlobalTest) -> list[Cell]:
    """Return an interval and the number of test cases."""
    cases = None if of.test_cases is None else f"{of.test_cases:.0f}"
    return [Shown(interval(of.low, of.high), [of.low, of.high]), cases]


def class_table(results: Results) -> Table | None:
    """Set the recall of each class at each site beside the number of its test images; None: no site says them."""
    support = {site: found.class_support for site, found in results.inequality.sites.items() if found.class_support}
    names = list(dict.fromkeys(name for own in support.values() for name in own))[:MAX_COLUMNS]
    rows = []
    for site, own in support.items():
        values = [recall_of(results.test.get(site, {}), name) for name in names]
        told = [MISSING if value is None else f"{value:.2f}" for value in values]
        rows.append([site, *(f"{value} of {own.get(name, 0):.0f}" for value, name in zip(told, names, strict=True))])
    columns = ["recall, test images", *(name[:MAX_HEADING] for name in names)]
    return Table("classes", "Recall of each class, and number of its test images.", columns, rows) if rows else None


class _Column:
    """A metric of one of the run's models.

    Attributes:
        heading, shown: in a file; over the column.
        values, summary: by site; over the sites.
        of_all: on the global test; NaN: not measured.
        home: sites that keep theirs.
        behind: sites that are shown to be behind.
    """

    def __init__(self, results: Results, metric: str, test: Metrics | None = None, which: str = "") -> None:
        self.heading = metric + which
        unit = declared_as(metric, results.info.units)
        self.shown = self.heading[:MAX_HEADING] + (f" ({unit})" if unit else "")
        self.values = by_site_of(results, metric, test)
        of_all = [math.nan] if BEST in which else global_values(results, metric, last=bool(which))
        self.of_all = statistics.fmean(of_all)
        self.summary = summarize(self.values, higher_is_better=declared_direction(results, metric))
        self.home = suppressed_of(results, metric)
        self.behind = [] if which else shown_behind(results, metric)  # of other models nobody says how sure it is

    def cell(self, site: str) -> Cell:
        """Return a site's value, or the word for one that it withholds."""
        value = self.values.get(site, math.nan)
        return SUPPRESSED if math.isnan(value) and site in self.home else value

    def worst_site(self) -> Cell:
        """Name the worst site, or nothing if all sites tie; marked where the test does not show that it is behind."""
        of = self.summary
        name = None if of.num_sites > 1 and of.range == 0 else of.worst_site
        unsure = name is not None and of.num_sites > 1 and name not in self.behind
        return Shown((name or MISSING) + (UNSURE if unsure else ""), [name or MISSING])
