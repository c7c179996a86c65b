"""Build the fairness table of one run, for logs and for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fairflare.base import checks
from fairflare.base.metric import metric_name
from fairflare.core.cells import BEST, LAST, OF_ALL, SUPPRESSED
from fairflare.core.cells import Cell as Figure
from fairflare.core.fairness import declared_as
from fairflare.reporting.documents import Inequality, RunResults
from fairflare.reporting.findings import run_findings
from fairflare.reporting.groups import group_notes, group_tables
from fairflare.reporting.layout import (
    MISSING,
    STYLES,
    Cell,
    Shown,
    Table,
    format_count,
    format_tables,
    interval,
    join_parts,
)
from fairflare.reporting.notes import MAX_HEADING, SYNTHETIC_NOTE, other_models, run_notes
from fairflare.reporting.sites.clinical import HOW, MOST_ROWS, clinical_table
from fairflare.reporting.sites.own_models import personal_tables
from fairflare.reporting.standing import find_test
from fairflare.reporting.values import (
    MAX_COLUMNS,
    check_metric,
    collect_by_site,
    direction_of,
    extra_list_metrics,
    find_suppressed,
    global_values,
    guess_of,
    label_of,
    list_answering_sites,
    metrics_of,
    missing_reason,
    rests_on,
    sentence,
    site_columns,
    spell_metric,
    summary_of,
    title_of,
)

__all__ = [
    "SYNTHETIC_NOTE", "check_metric", "class_table", "collect_by_site", "direction_of", "fairness_table", "label_of",
    "metrics_of", "run_notes", "summary_of", "table_of",
]  # fmt: skip

UNSURE = "?"  # mark after the name of a worst site that may be no worse than the other sites


def fairness_table(
    results: RunResults,
    *,
    metric: str | None = None,
    style: Literal["text", "markdown", "csv"] = "text",
    width: int | None = None,
) -> str:
    """Return a run's fairness table with notes as text: metrics per site, their average and spread, sites left out.

    Args:
        results: a document as :func:`fairflare.reporting.results.read_results` returns it.
        metric: the only metric of the table; ``None`` for all metrics that the task shows in tables.
        style: aligned text, a Markdown table, or CSV with unrounded numbers and without notes.
        width: largest width of the text; a wider table is cut into several, one below the other; ``None`` for no limit.

    Returns:
        Lines without a trailing newline. A run without test results gets its status and reason instead.

    Raises:
        ValueError: the style is unknown, or the run does not have the metric; the message names it.
    """
    checks.choice("style", style, STYLES)
    short = style == "text" and metric is None
    table = table_of(results, metric, short=short)
    classes = class_table(results) if metric in (None, results.info.primary_metric) else None
    marked = any(
        isinstance(cell, Shown) and cell.text.endswith(UNSURE)
        for one in (table, classes) if one for row in one.totals for cell in row
    )  # fmt: skip
    notes = [
        f"{UNSURE}: has the worst value of its column; that it is behind in it is not tested, or not shown."
    ] * marked
    tables = [table, *([classes] if classes else [])] if table.rows or style == "csv" else []
    if metric is None and tables:
        clinical, people = clinical_table(results), group_tables(results)
        few = 0 < len(clinical.rows) <= MOST_ROWS
        tables += [*personal_tables(results), *([clinical] if few else [])]
        tables += [one for one in people if not (short and one.folded)]
        hidden = [*extra_list_metrics(results), *(one.name for one in people if one.folded)] if short else []
        notes += checks.true_texts({
            f"Not shown: {join_parts(hidden)} (the page has them, and fairflare show --markdown).": hidden, HOW: few,
        })  # fmt: skip
        notes += group_notes(results)
    return format_tables(
        tables, notes + run_notes(results, metric), style, width, _title(results),
        [finding.text for finding in run_findings(results, metric)],
    )  # fmt: skip


def _title(results: RunResults) -> str:
    info = results.info
    return ", ".join(checks.true_texts({
        title_of(results): True,
        f"experiment {info.experiment}": info.experiment,
        f"seed {info.seed}": info.seed is not None and info.num_rounds != 0,
        format_count(len(results.rounds), "round"): info.num_rounds != 0,
    }))  # fmt: skip


def table_of(results: RunResults, metric: str | None = None, *, short: bool = False, tests: bool = False) -> Table:
    """Return a table of test metrics, with a row for each site, average and spread; no rows without test results.

    Args:
        results: results of a run.
        metric: the only metric; default: all metrics that the task shows in tables.
        short: whether to leave out metrics that are :func:`extra_list_metrics`.
        tests: whether to add what is expected of each site, and its p-value.

    Raises:
        ValueError: the run does not have the metric.
    """
    if not site_columns(results):
        return Table("run", "", ["site"], [])
    metrics = metrics_of(results) if metric is None else [check_metric(results, metric)]
    metrics = [name for name in metrics if not (short and name in extra_list_metrics(results))]
    columns = [
        *(_metric(results, name) for name in metrics),
        *(_metric(results, metrics[0], model) for model in other_models(results)),
    ]
    sites = sorted({site for column in columns for site in column.sites})
    if results.inequality.metric in metrics:
        behind = 1 + metrics.index(results.inequality.metric)
        columns[behind:behind] = _certainty(results, tests)
    has = {title for column in columns for title, cell in column.totals.items() if cell is not None}
    return Table(
        "run", "", ["site", *(column.head for column in columns)],
        [[site, *(column.sites.get(site) for column in columns)] for site in sites],
        totals=[[title, *(column.totals.get(title) for column in columns)] for title in TOTALS if title in has],
        csv_columns=[["site"], *(column.names for column in columns)],
    )  # fmt: skip


#: Titles of the rows below the rows of sites.
TOTALS = ("average", "guessing", "std", "std if equal", "worst", "worst site", "range", "global test")
TOTALS_OF_STRUCTURES = ("average", "std", "worst", "worst site")


@dataclass(frozen=True)
class _Column:
    """Describe a column of a run's table.

    Attributes:
        head: heading of the column.
        names: headings in a CSV file, one for each value of a cell.
        sites: cells of the column by site; the cell of any other site is empty.
        totals: cells of the column below the sites, by the titles of :data:`TOTALS`.
    """

    head: str
    names: Sequence[str]
    sites: Mapping[str, Cell]
    totals: Mapping[str, Cell]


def _metric(results: RunResults, metric: str, model: str = LAST) -> _Column:
    """Return the column of a metric for one of the models in the cells."""
    home, of = find_suppressed(results, metric), summary_of(results, metric, model)
    which = "" if model == LAST else f", {model}"
    # If all sites have the same value, none is the worst.
    worst = MISSING if not of.worst_site or (of.num_sites > 1 and of.range == 0) else of.worst_site
    test = Inequality() if which else find_test(results, metric)  # only the last model is tested for chance
    unsure = UNSURE if worst != MISSING and of.num_sites > 1 and worst not in test.behind else ""
    guess = guess_of(results, metric)
    has_global = any(name.startswith(OF_ALL) for name in results.columns.get(LAST, {}))
    of_all = [math.nan] if model == BEST or not has_global else global_values(results, metric, last=bool(which))
    totals: dict[str, Cell] = {
        "average": of.mean, "std": of.std, "worst": of.worst, "range": of.range,
        "worst site": Shown(worst + unsure, [worst]), "guessing": guess if math.isfinite(guess) else None,
        "global test": statistics.fmean(of_all) if has_global else None, "std if equal": test.chance_std,
    }  # fmt: skip
    unit = declared_as(metric, results.info.units)
    head = (metric + which)[:MAX_HEADING] + (f" ({unit})" if unit else "") + rests_on(results, metric)
    cells: dict[str, Cell] = {
        site: SUPPRESSED if math.isnan(value) and site in home else value
        for site, value in collect_by_site(results, metric, model).items()
    }
    return _Column(head, [metric + which], cells, totals)


def _certainty(results: RunResults, tests: bool) -> list[_Column]:
    """Return the columns of intervals and test cases, which follow the column of their metric.

    ``tests``: whether to add what is expected of each site if all were equally good, and its p-value.
    """
    found, columns = results.inequality, results.columns.get(LAST, {})
    sites = {
        site: (*_interval_cells(columns[found.metric][site]), of.expected, of.p_value)
        for site, of in found.sites.items()
    }
    sites |= dict.fromkeys(
        find_suppressed(results, found.metric),
        (Shown(SUPPRESSED, [SUPPRESSED] * 2), SUPPRESSED, SUPPRESSED, SUPPRESSED),
    )
    of_all = columns.get(OF_ALL + found.metric)
    totals = {"global test": (*_interval_cells(of_all[""]), None, None)} if of_all else {}
    heads = {f"{found.level:.0%} interval": ["low", "high"], "cases": ["cases"], "expected": ["expected"], "p": ["p"]}
    return [
        _Column(head, names, *({row: cells[k] for row, cells in of.items()} for of in (sites, totals)))
        for k, (head, names) in enumerate(heads.items()) if tests or k < 2
    ]  # fmt: skip


def _interval_cells(of: Figure) -> tuple[Cell, Cell]:
    """Return an interval and the number of test cases."""
    return Shown(interval(of.low, of.high), [of.low, of.high]), None if of.cases is None else f"{of.cases:.0f}"


def class_table(results: RunResults) -> Table | None:
    """Return a table of each class or structure: metric by site and number of its test images; ``None`` if not known.

    Average, spread and worst site of a structure are over the sites that annotate it and mark it.
    """
    metric, sites, footing = results.inequality.metric, results.inequality.sites, results.footing
    of_classes = {site: of.class_support for site, of in sites.items() if of.class_support}
    support = of_classes or {
        site: sites[site].structure_support or {} if site in sites else {} for site in list_answering_sites(results)
    }
    name, what, first = ("classes", "class", "recall") if of_classes else ("structures", "structure or finding", metric)
    parts = list(dict.fromkeys(
        part for of in (support, footing.structures, footing.empty) for own in of.values() for part in own
    ))[:MAX_COLUMNS]  # fmt: skip
    known, metrics = site_columns(results), {part: metric_name(f"{first}_{part}") for part in parts}
    if len(parts) == 1 and metrics[parts[0]] not in known and not of_classes:
        metrics = {parts[0]: metric}  # a task with one structure has no metrics by structure
    found = {part: {site: known.get(of, {}).get(site, Figure(of)) for site in support} for part, of in metrics.items()}
    absent = dict.fromkeys(
        missing_reason(results, metrics[part], site)
        for part, cells in found.items() for site, cell in cells.items() if cell.value is None
    )  # fmt: skip
    rows = [
        [site, *(_mark_cell(found[part][site], "empty masks" if part in footing.empty.get(site, ()) else own.get(part))
                 for part in parts)]
        for site, own in support.items()
    ]  # fmt: skip
    columns = [_metric(results, of) for of in metrics.values()]
    totals = [[title, *(column.totals[title] for column in columns)] for title in TOTALS_OF_STRUCTURES]
    return Table(
        name,
        f"{sentence(spell_metric(first))} of each {what}, and number of test images that have it"
        f"{f'; {MISSING}: ' if absent else ''}{' or '.join(absent)}.",
        [spell_metric(first), *(part[:MAX_HEADING] for part in parts)], rows, totals=totals,
        csv_columns=[["site"], *([part, f"{part} test images"] for part in parts)],
    ) if parts else None  # fmt: skip


def _mark_cell(cell: Figure, images: float | str | None) -> Cell:
    """Return a part's value at a site with the number of test images that have it; ``None`` if it is not known."""
    of = "?" if images is None else images if isinstance(images, str) else f"{images:.0f}"
    return Shown(MISSING if cell.value is None else f"{cell.value:.2f} of {of}", [cell.value, of])
