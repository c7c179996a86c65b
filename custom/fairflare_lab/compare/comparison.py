"""Runs side by side: over the seeds of one configuration, as text, Markdown or CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from fairflare.base import checks
from fairflare.core.fairness import FairnessSummary, summarize
from fairflare.reporting.documents import SUPPRESSED, Results
from fairflare.reporting.layout import STYLES, Cell, Shown, Spread, Table, printed, spread
from fairflare.reporting.values import (
    GLOBAL,
    by_site_of,
    direction_of,
    global_metrics,
    global_values,
    label_of,
    measured,
    metrics_of,
    suppressed_of,
)
from fairflare_lab.compare.comparison_notes import named, notes_of, setting_difference, settings_of
from fairflare_lab.compare.differences import Difference, differences_of

__all__ = ["compare"]

R = TypeVar("R")  # a document, or what the page makes of it


@dataclass
class Row(Generic[R]):
    """Runs of one configuration.

    Attributes:
        label: different from all others'.
        runs: documents.
        values: of a metric by site, a dict for each model that was tested: one a run, or each of its last ones.
        summaries: of each of these.
        settings: what tells it from others of the same label.
        measured: which model the values are of.
        of_all: ``{metric: values}`` of each of these models on the global test.
    """

    label: str
    runs: list[R]
    values: list[dict[str, float]] = field(default_factory=list)
    summaries: list[FairnessSummary] = field(default_factory=list)
    settings: str = ""
    measured: str = ""
    of_all: dict[str, list[float]] = field(default_factory=dict)

    def lacks(self, sites: Iterable[str]) -> dict[str, list[int]]:
        """``{site: which of the models have no value of it}``."""
        found = {site: [k for k, v in enumerate(self.values) if math.isnan(v.get(site, math.nan))] for site in sites}
        return {site: missing for site, missing in found.items() if missing}

    def at(self, site: str) -> Spread:
        """What a site gets."""
        return spread([values.get(site, math.nan) for values in self.values])

    def over(self, attribute: str) -> Spread:
        """A figure over the sites."""
        return spread([getattr(summary, attribute) for summary in self.summaries])

    @property
    def suppressed(self) -> list[str]:
        """Sites that keep their value in any of the runs, sorted."""
        return sorted({site for summary in self.summaries for site in summary.suppressed})

    def cell(self, site: str) -> Cell:
        """What a site gets, or the word for what it keeps."""
        found = self.at(site)
        return SUPPRESSED if math.isnan(found.mean) and site in self.suppressed else found


@dataclass(frozen=True)
class Comparison:
    """What every table, sentence and picture of a comparison is made of.

    Attributes:
        rows: in the order of the runs.
        metric, higher: of the figures, and its direction.
        reference: label of the row that others are compared with.
        differences: of all rows and measures, and of each site; empty with one row or no seed in common.
        problem: why there are none, where that is somebody's mistake.
        notes: what a reader must know.
        last: the figures are of the last models, not of the final one.
    """

    rows: list[Row[Results]]
    metric: str
    higher: bool
    reference: str
    differences: list[Difference]
    problem: str
    notes: list[str]
    last: bool = False

    @property
    def sites(self) -> list[str]:
        return sorted({site for row in self.rows for values in row.values for site in values})

    @property
    def of_all(self) -> list[str]:
        """Metrics of the global test that any row has."""
        return list(dict.fromkeys(name for row in self.rows for name in row.of_all))


def comparison_of(
    runs: Sequence[Results], metric: str | None = None, reference: str | None = None, *, last: bool = False
) -> Comparison:
    """Rows of runs that differ in nothing but the seed, and how they differ from one of them.

    Args:
        runs: documents as ``read_results`` returns them. Ones that did not complete are left out and counted, and so
            are repeats of the same run.
        metric: the metric to compare; the primary metric of the first complete run when None.
        reference: a label; default: the first row.
        last: of the last models that were tested (``test_last``), not of the final one.

    Raises:
        ValueError: no complete run, a run without the metric or its last models, or no row of that label.
    """
    complete = complete_runs(runs)
    chosen = metric or metrics_of(complete[0])[0]
    rows = rows_of(complete, chosen, last=last)
    labels = [row.label for row in rows]
    refers_to = labels[0] if reference is None else checks.choice("--reference", reference, labels)
    problem, found = "", []
    if len(rows) > 1:
        try:
            found = differences_of({row.label: row.runs for row in rows}, refers_to, chosen, last=last)
        except ValueError as error:
            problem = f"no differences: {error}"
    higher = direction_of(complete[0], chosen)
    notes = notes_of(runs, complete, chosen, rows, last)
    return Comparison(rows, chosen, higher, refers_to, found, problem, notes, last)


def compare(
    runs: Sequence[Results],
    *,
    metric: str | None = None,
    style: Literal["text", "markdown", "csv"] = "text",
    per_site: bool = True,
    width: int | None = None,
) -> str:
    """Methods side by side: mean ± population standard deviation over runs that differ in nothing but the seed.

    Of every run the sites' values, their average, their standard deviation and the value of the worst site are taken
    first. Runs of one label with different settings get a row each, and a note says what differs.

    Args:
        runs: documents as ``read_results`` returns them. Ones that did not complete are left out and counted, and so
            are repeats of the same run.
        metric: the metric to compare; the primary metric of the first complete run when None.
        style: aligned text, a Markdown table, or CSV with means and deviations as numbers.
        per_site: a column for each site as well.
        width: of the text; a table that is wider is cut into several, one below the other. None: as wide as it is.

    Raises:
        ValueError: no complete run, an unknown style, or a run without the metric (names it).
    """
    checks.choice("style", style, STYLES)
    return row_table(comparison_of(runs, metric), style=style, per_site=per_site, width=width)


def row_table(found: Comparison, *, style: str = "text", per_site: bool = True, width: int | None = None) -> str:
    """As :func:`compare`, of a comparison."""
    return printed([_table(found, found.sites if per_site else [])], found.notes, style, width)


def complete_runs(runs: Sequence[Results]) -> list[Results]:
    """Those that completed; the same run given twice (its folder and its file, a copy) counts once.

    Raises:
        ValueError: there is none.
    """
    found: dict[str, Results] = {}
    for run in runs:
        if run["status"] == "completed":
            found.setdefault(json.dumps([dict(run.info), run.started, run.test], sort_keys=True), run)
    if not found:
        raise ValueError(f"none of the {len(runs)} runs is complete")
    return list(found.values())


def rows_of(runs: Sequence[Results], metric: str, *, last: bool = False) -> list[Row[Results]]:
    """Runs that differ in nothing but the seed together; ``last``: values of each of their last models.

    Raises:
        ValueError: a run without the metric (names it).
    """
    groups: dict[tuple[str, str], list[Results]] = {}
    for run in runs:
        groups.setdefault((label_of(run), json.dumps(settings_of(run), sort_keys=True)), []).append(run)
    labels = [label for label, _ in groups]
    rows = []
    for index, ((label, _), group) in enumerate(groups.items()):
        tested = [(run, by_site) for run in group for by_site in _values(run, metric, last)]
        higher = direction_of(group[0], metric)
        summaries = [summarize(v, higher_is_better=higher, suppressed=suppressed_of(r, metric)) for r, v in tested]
        row = Row(label, group, [by_site for _, by_site in tested], summaries)
        row.measured = (group[0]["info"] or {}).get("measured") or ""
        names = dict.fromkeys(name for run in group for name in global_metrics(run, metric))
        row.of_all = {name: [v for run in group for v in global_values(run, name, last=last)] for name in names}
        if labels.count(label) > 1:
            row.label = f"{label} ({labels[: index + 1].count(label)})"
            row.settings = setting_difference(
                group[0], [others[0] for (other, _), others in groups.items() if other == label]
            )
        rows.append(row)
    return rows


def _values(run: Results, metric: str, last: bool) -> list[dict[str, float]]:
    if all(math.isnan(value) for value in by_site_of(run, metric).values()):
        if kept := suppressed_of(run, metric):
            raise ValueError(
                f"the run {named(run)} has no test results for metric {metric!r}: they are {SUPPRESSED} at "
                f"{', '.join(sorted(kept))} (fewer cases than min_cases)"
            )
        known = sorted({name for values in (run.get("test") or {}).values() for name in values})
        raise ValueError(
            f"the run {named(run)} has no test results for metric {metric!r}; it has {', '.join(known[:8]) or 'none'}"
            f"{' ...' if len(known) > 8 else ''}. "
            "Compare runs of one task, or choose a metric that all have with --metric"
        )
    return measured(run, metric, last=last)


# ------------------------------------------------------------------------------------------------ forms


def _table(found: Comparison, sites: Sequence[str]) -> Table:
    """A row for each row, with mean and deviation of each site's values and of what is over the sites."""
    names = [*sites, "average", "std", "worst", *(GLOBAL + name for name in found.of_all)]
    rows: list[list[Cell]] = []
    for row in found.rows:
        cells = [*map(row.cell, sites), *map(row.over, ("mean", "std", "worst"))]
        cells += [spread(row.of_all.get(name, [])) for name in found.of_all]
        rows.append([row.label, Shown(str(len(row.runs)), [found.metric, len(row.runs)]), *cells])
    heads = [["method"], ["metric", "runs"], *([f"{name} mean", f"{name} sd"] for name in names)]
    return Table("table", "", ["method", "runs", *names], rows, csv_columns=heads)
