"""Runs side by side: over the seeds of one configuration, as text, Markdown or CSV."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fairflare.base import checks
from fairflare.base.settings import by_name
from fairflare.core.fairness import FairnessSummary, summarize
from fairflare.reporting.compare.differences import Difference, differences_of
from fairflare.reporting.compare.no_effect import faults_of
from fairflare.reporting.documents import SUPPRESSED
from fairflare.reporting.global_test import GLOBAL, global_metrics, global_notes, global_values
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, number, wrapped
from fairflare.reporting.table import (
    MEASURED,
    SYNTHETIC_NOTE,
    by_site_of,
    direction_of,
    label_of,
    measured,
    metrics_of,
    suppressed_of,
)

__all__ = ["compare"]

Run = Mapping[str, Any]
STYLES = ("text", "markdown", "csv")
TASK_SETTINGS = "the task's settings"


@dataclass
class Row:
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
    runs: list[Run]
    values: list[dict[str, float]]
    summaries: list[FairnessSummary]
    settings: str = ""
    measured: str = ""
    of_all: dict[str, list[float]] = field(default_factory=dict)

    def lacks(self, sites: Iterable[str]) -> dict[str, list[int]]:
        """``{site: which of the models have no value of it}``."""
        found = {site: [k for k, v in enumerate(self.values) if math.isnan(v.get(site, math.nan))] for site in sites}
        return {site: missing for site, missing in found.items() if missing}


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

    rows: list[Row]
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
    runs: Sequence[Run], metric: str | None = None, reference: str | None = None, *, last: bool = False
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
    runs: Sequence[Run],
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
    table = _table(found, found.sites if per_site else [])
    if style == "csv":
        return table.csv().rstrip("\n")
    if style == "markdown":
        return "\n".join([*table.markdown(), "", *found.notes])
    return "\n".join([table.text(width), *wrapped(found.notes, width)])


def complete_runs(runs: Sequence[Run]) -> list[Run]:
    """Those that completed; the same run given twice (its folder and its file, a copy) counts once.

    Raises:
        ValueError: there is none.
    """
    complete = _different([run for run in runs if run["status"] == "completed"])
    if not complete:
        raise ValueError(f"none of the {len(runs)} runs is complete")
    return complete


def _different(runs: Sequence[Run]) -> list[Run]:
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(json.dumps([run["info"], run.get("started"), run.get("test")], sort_keys=True), run)
    return list(found.values())


def rows_of(runs: Sequence[Run], metric: str, *, last: bool = False) -> list[Row]:
    """Runs that differ in nothing but the seed together; ``last``: values of each of their last models.

    Raises:
        ValueError: a run without the metric (names it).
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((label_of(run), json.dumps(_settings(run), sort_keys=True)), []).append(run)
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
            row.settings = _difference(group[0], [others[0] for (other, _), others in groups.items() if other == label])
        rows.append(row)
    return rows


def _values(run: Run, metric: str, last: bool) -> list[dict[str, float]]:
    if all(math.isnan(value) for value in by_site_of(run, metric).values()):
        if kept := suppressed_of(run, metric):
            raise ValueError(
                f"the run {_named(run)} has no test results for metric {metric!r}: they are {SUPPRESSED} at "
                f"{', '.join(sorted(kept))} (fewer cases than min_cases)"
            )
        known = sorted({name for values in (run.get("test") or {}).values() for name in values})
        raise ValueError(
            f"the run {_named(run)} has no test results for metric {metric!r}; it has {', '.join(known[:8]) or 'none'}"
            f"{' ...' if len(known) > 8 else ''}. "
            "Compare runs of one task, or choose a metric that all have with --metric"
        )
    return measured(run, metric, last=last)


def _named(run: Run) -> str:
    """A run as its user knows it."""
    info = run["info"] or {}
    begun = f", begun {run['started'][:19]}" if run.get("started") else ""
    return f"{label_of(run)!r}{begun}" + ("" if info.get("seed") is None else f", seed {info['seed']}")


def _settings(run: Run) -> dict[str, Any]:
    """Every setting by its dotted name but the seed."""
    config = dict((run["info"] or {}).get("config") or {})
    config.pop("seed", None)
    found = by_name(config)
    found.pop("task.path", None)  # the same file has another module name in a job
    return found


def _difference(run: Run, alike: Sequence[Run]) -> str:
    """The settings that are not the same in all of ``alike``, as ``run`` has them; at most six."""
    own, others = _settings(run), [_settings(other) for other in alike]
    names = {name for other in others for name in other}
    differing = sorted(name for name in names if len({json.dumps(other.get(name)) for other in others}) > 1)
    shown = [f"{name} {own[name]!r}" if name in own else f"no {name}" for name in differing[:6]]
    return ", ".join(shown) + (f", and {len(differing) - 6} more" if len(differing) > 6 else "")


def _shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def notes_of(
    runs: Sequence[Run], complete: Sequence[Run], metric: str, rows: Sequence[Row], last: bool = False
) -> list[str]:
    """What a reader must know of the rows: which were left out, and whether they can be compared at all.

    Args:
        runs: all that were given.
        complete, metric, rows, last: as :func:`rows_of` has them.
    """
    notes = [f"{metric} on the test splits; ± is the population standard deviation over runs."]
    if last:
        counts = sorted({len(run["last_rounds"]["rounds"]) for run in complete})
        notes = [
            f"{metric} on the test splits, of the models of each run's last {' or '.join(map(str, counts))} rounds: "
            "mean ± population standard deviation over the pooled values of all runs and rounds."
        ]
    notes += dict.fromkeys(note for run in complete for note in global_notes(run))
    notes += _without_sites(rows)
    notes += [f"{row.label}: {row.settings}" for row in rows if row.settings]
    notes += [] if last else _by_chance(rows, metric)  # which is of the final model
    own = [row.label for row in rows if row.measured == "personal"]
    if own:
        others = "" if len(own) == len(rows) else "; of the others the common model"
        notes.append(f"Measured: {MEASURED['personal']} of {', '.join(own)}{others}.")
    unfinished = [run for run in runs if run["status"] != "completed"]
    if unfinished:
        notes.append(f"{len(unfinished)} of {len(runs)} runs did not complete and are left out:")
        notes += [f"  {_named(run)}: {_shortened(run['reason'] or run['status'])}" for run in unfinished]
    repeats = len(runs) - len(unfinished) - len(complete)
    if repeats:
        notes.append(f"{repeats} of {len(runs)} runs stand there twice and count once.")
    differing = [what for what, found in _conditions(complete).items() if len(found) > 1]
    if differing:
        notes.append(f"NOT COMPARABLE as they stand: the runs differ in {', '.join(differing)}.")
        if TASK_SETTINGS in differing:
            notes += _by_setting(complete)
    notes += _faults(complete, metric)
    if any((run["info"] or {}).get("synthetic") for run in complete):
        notes.append(SYNTHETIC_NOTE)
    return notes


def _by_chance(rows: Sequence[Row], metric: str) -> list[str]:
    """The spread that equal sites show by sampling alone, and who is shown to be behind in how many runs."""
    told = []
    for row in rows:
        found = [run.get("inequality") or {} for run in row.runs]
        found = [one for one in found if one.get("metric") == metric and one["test"]]
        if found:
            behind = [site for one in found for site in one["behind"]]
            counts = [f"{site} in {behind.count(site)} of {len(found)}" for site in sorted(set(behind))]
            spread = number(statistics.fmean(one["chance_std"] for one in found))
            told.append(f"{row.label} {spread} (behind: {', '.join(counts) or 'no site'})")
    return [f"Standard deviation that equal sites show by sampling alone: {'; '.join(told)}."] if told else []


def _without_sites(rows: Sequence[Row]) -> list[str]:
    """Of rows that lack sites: whose average, spread and worst are of others than the table says."""
    sites = sorted({site for row in rows for values in row.values for site in values})
    lacking = [row.lacks(sites) for row in rows]
    notes = []
    for row, of in zip(rows, lacking, strict=True):
        kept = suppressed_in(row)
        told = {site: f"{site}{'' if len(k) == len(row.values) else f' ({len(k)} of {len(row.values)} times)'}"
                for site, k in of.items()}  # fmt: skip
        parts = []
        if lost := [text for site, text in told.items() if site not in kept]:
            parts.append(f"NO VALUE of {', '.join(lost)}: its average, std and worst are of the other sites")
        if home := [text for site, text in told.items() if site in kept]:
            parts.append(f"average, std and worst are without {', '.join(home)} ({SUPPRESSED}: fewer cases than "
                         "min_cases)")  # fmt: skip
        if parts:
            other = any(set(has) != set(of) for has in lacking)
            more = "; do not compare them with a row that has others" if other else ""
            notes.append(f"{row.label}: {'; '.join(parts)}{more}.")
    return notes


def _faults(runs: Sequence[Run], metric: str) -> list[str]:
    """What a row's method did not do, a line each, with the number of its runs."""
    found: dict[tuple[str, str], int] = {}
    of_row: dict[str, int] = {}
    for run in runs:
        label = label_of(run)
        of_row[label] = of_row.get(label, 0) + 1
        for fault in faults_of(run, metric, higher_is_better=direction_of(run, metric)):
            found[label, fault] = found.get((label, fault), 0) + 1
    return [f"{label}: {fault} (in {n} of its {of_row[label]} runs)." for (label, fault), n in found.items()]


def _by_setting(runs: Sequence[Run]) -> list[str]:
    """Which rows have which value of each setting of the task that differs; a method may need one (a head, a neck)."""
    names = {name: None for run in runs for name in _settings(run) if name.startswith("task.")}
    found = []
    for name in names:
        rows: dict[str, dict[str, None]] = {}
        for run in runs:
            rows.setdefault(repr(_settings(run).get(name)), {})[label_of(run)] = None
        if len(rows) > 1:
            most = max(rows, key=lambda value: len(rows[value]))
            others = "; ".join(f"{value}: {', '.join(labels)}" for value, labels in rows.items() if value != most)
            found.append(f"  {name.removeprefix('task.').removeprefix('args.')}: {most}, but {others}")
    return [_shortened(line) for line in found]


def _conditions(runs: Sequence[Run]) -> dict[str, set[str]]:
    """What must be equal between runs of different methods, and the values it has."""
    found: dict[str, set[str]] = {}
    for run in runs:
        info = run["info"] or {}
        task = {name: value for name, value in _settings(run).items() if name.startswith("task.")}
        values = {
            "their sites": info.get("sites"),
            "synthetic or real data": bool(info.get("synthetic")),
            TASK_SETTINGS: task,
            "the task's file": (info.get("task_file") or {}).get("sha256"),
            "the number of rounds": info.get("num_rounds"),
        }
        for what, value in values.items():
            if value is not None or what != "the task's file":  # older results do not say it
                found.setdefault(what, set()).add(json.dumps(value, sort_keys=True))
    return found


# ------------------------------------------------------------------------------------------------ forms


def _table(found: Comparison, sites: Sequence[str]) -> Table:
    """A row for each row, with mean and deviation of each site's values and of what is over the sites."""
    names = [*sites, "average", "std", "worst", *(GLOBAL + name for name in found.of_all)]
    rows: list[list[Cell]] = []
    for row in found.rows:
        columns = [[values.get(site, math.nan) for values in row.values] for site in sites]
        columns += [[getattr(s, attribute) for s in row.summaries] for attribute in ("mean", "std", "worst")]
        columns += [row.of_all.get(name, [math.nan]) for name in found.of_all]
        home = [site in suppressed_in(row) for site in sites] + [False] * (len(names) - len(sites))
        cells = [_cell(values, kept) for values, kept in zip(columns, home, strict=True)]
        rows.append([row.label, Shown(str(len(row.runs)), [found.metric, len(row.runs)]), *cells])
    heads = [["method"], ["metric", "runs"], *([f"{name} mean", f"{name} sd"] for name in names)]
    return Table("table", "", ["method", "runs", *names], rows, csv_columns=heads)


def suppressed_in(row: Row) -> list[str]:
    """Sites that keep their value of the row's metric in any of its runs, sorted."""
    return sorted({site for summary in row.summaries for site in summary.suppressed})


def _cell(values: Sequence[float], kept: bool) -> Shown:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Shown(SUPPRESSED, [SUPPRESSED]) if kept else Shown(MISSING, [None])
    mean, sd = statistics.fmean(finite), statistics.pstdev(finite)
    return Shown(number(mean) + (f" ± {number(sd)}" if len(values) > 1 else ""), [mean, sd])
