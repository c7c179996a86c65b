"""Fairness tables of finished runs: for logs, for the terminal, and over seeds for papers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fairflare.core import checks
from fairflare.core.fairness import FairnessSummary, higher_is_better, summarize

if TYPE_CHECKING:
    from rich.table import Table

SYNTHETIC_NOTE = "The data are SYNTHETIC (generated images): these figures say nothing about patients."
MAX_COLUMNS = 20  # of metrics, whose names the sites choose
MAX_HEADING = 32
_MISSING = "-"


def fairness_table(results: Mapping[str, Any]) -> str:
    """The result of a run as aligned text: metrics per site, their average and spread, and who was left out.

    Args:
        results: a document as :func:`fairflare.reporting.results.read_results` returns it.

    Returns:
        Lines without a trailing newline. A run without test results gets its status and reason instead.
    """
    lines = [_title(results)]
    header, sites, totals = _cells(results)
    if sites:
        rows = [header, *sites, *totals]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        rule = "  ".join("-" * width for width in widths)
        text = [_aligned(row, widths) for row in rows]
        lines += [text[0], rule, *text[1 : 1 + len(sites)], rule, *text[1 + len(sites) :]]
    return "\n".join(lines + _notes(results))


def rich_table(results: Mapping[str, Any]) -> Table:
    """:func:`fairness_table` for a terminal; the worst site stands out.

    Args:
        results: a document as :func:`fairflare.reporting.results.read_results` returns it.
    """
    from rich.markup import escape
    from rich.table import Table

    header, sites, totals = _cells(results)
    table = Table(
        title=escape(_title(results)),
        caption=escape("\n".join(_notes(results))),
        title_justify="left",
        caption_justify="left",
    )
    for index, name in enumerate(header):
        table.add_column(escape(name), justify="left" if index == 0 else "right")
    worst = {summary.worst_site for summary in list(_summaries(results).values())[:1]}
    for row in sites:
        table.add_row(*map(escape, row), style="bold red" if row[0] in worst else None)
    if sites:
        table.add_section()
    for row in totals:
        table.add_row(*map(escape, row))
    return table


def compare(
    runs: Sequence[Mapping[str, Any]],
    *,
    metric: str | None = None,
    style: Literal["text", "markdown"] = "text",
    per_site: bool = True,
) -> str:
    """Methods side by side: mean ± population standard deviation over runs (seeds) of the same method.

    Runs are grouped by ``info["label"]``, or ``info["method"]`` where there is none, in the order given. Of
    every run the sites' values, their average, their standard deviation and the value of the worst site are
    taken first.

    Args:
        runs: documents as ``read_results`` returns them. Ones that did not complete are left out and counted.
        metric: the metric to compare; the primary metric of the first complete run when None.
        style: aligned text, or a Markdown table.
        per_site: a column for each site as well.

    Raises:
        ValueError: no complete run, an unknown style, or a run without the metric (names it).
    """
    checks.choice("style", style, ("text", "markdown"))
    complete = [run for run in runs if run["status"] == "completed"]
    if not complete:
        raise ValueError(f"none of the {len(runs)} runs is complete")
    chosen = metric or _metrics(complete[0])[0]

    groups: dict[str, list[FairnessSummary]] = {}
    values: dict[str, list[dict[str, float]]] = {}
    for run in complete:
        label = _label(run)
        by_site = _by_site(run, chosen)
        if all(math.isnan(value) for value in by_site.values()):
            raise ValueError(f"a run of {label!r} has no test results for metric {chosen!r}")
        groups.setdefault(label, []).append(summarize(by_site, higher_is_better=higher_is_better(chosen)))
        values.setdefault(label, []).append(by_site)

    sites = sorted({site for group in values.values() for by_site in group for site in by_site})
    sites = sites if per_site else []
    rows = [["method", "runs", *sites, "average", "std", "worst"]]
    for label, summaries in groups.items():
        columns = [[by_site.get(site, math.nan) for by_site in values[label]] for site in sites]
        columns += [[s.mean for s in summaries], [s.std for s in summaries], [s.worst for s in summaries]]
        rows.append([label, str(len(summaries)), *map(_mean_and_std, columns)])

    notes = [f"{chosen} on the test splits; ± is the population standard deviation over runs."]
    if len(complete) < len(runs):
        notes.append(f"{len(runs) - len(complete)} of {len(runs)} runs did not complete and are left out.")
    if any(run["info"].get("synthetic") for run in complete):
        notes.append(SYNTHETIC_NOTE)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if style == "text":
        body = [_aligned(row, widths) for row in rows]
        body.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(body + notes)
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    body = ["| " + " | ".join(row) + " |" for row in escaped]
    body.insert(1, "| --- |" + " ---: |" * (len(widths) - 1))
    return "\n".join([*body, "", *notes])


# ------------------------------------------------------------------------------------------------------------


def _title(results: Mapping[str, Any]) -> str:
    info = results["info"] or {}
    count = len(results["rounds"])
    parts = [_label(results)]
    if info.get("experiment"):
        parts.append(f"experiment {info['experiment']}")
    if info.get("seed") is not None:
        parts.append(f"seed {info['seed']}")
    parts.append(f"{count} round{'' if count == 1 else 's'}")
    status = results["status"]
    if status != "completed":
        parts.append(status.upper() + (f": {results['reason']}" if results.get("reason") else ""))
    return ", ".join(parts)


def _notes(results: Mapping[str, Any]) -> list[str]:
    info = results["info"] or {}
    notes = []
    if not results.get("test"):
        notes.append("No test results.")
    left_out: dict[tuple[str, str, str], list[int]] = {}
    for record in results["rounds"]:
        for left in record["left_out"]:
            key = (left["site"], left["phase"], left["reason"])
            left_out.setdefault(key, []).append(record["current_round"])
    in_test = [(left["site"], left["phase"], left["reason"]) for left in results.get("left_out") or ()]
    if left_out or in_test:
        notes.append("Left out:")
        for (site, phase, reason), numbers in sorted(left_out.items()):
            which = f"round{'' if len(numbers) == 1 else 's'} {_ranges(numbers)}"
            notes.append(f"  {site} in {which}, {phase}: {reason}")
        notes += [f"  {site} after the last round, {phase}: {reason}" for site, phase, reason in in_test]
    elif results["rounds"]:
        notes.append("No site was left out of a round.")
    if info.get("synthetic"):
        notes.append(SYNTHETIC_NOTE)
    return notes


def _cells(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Header, one row for each site, and the rows of totals."""
    if not results.get("test"):
        return ["site"], [], []
    metrics = _metrics(results)
    columns = {metric: _by_site(results, metric) for metric in metrics}
    names = sorted({site for column in columns.values() for site in column})
    sites = [[name, *(_number(columns[m].get(name, math.nan)) for m in metrics)] for name in names]
    summaries = _summaries(results)
    totals = [
        [title, *(_number(getattr(summaries[m], attribute)) for m in metrics)]
        for title, attribute in (("average", "mean"), ("std", "std"), ("worst", "worst"), ("range", "range"))
    ]
    totals.insert(3, ["worst site", *(summaries[m].worst_site or _MISSING for m in metrics)])
    return ["site", *(metric[:MAX_HEADING] for metric in metrics)], sites, totals


def _summaries(results: Mapping[str, Any]) -> dict[str, FairnessSummary]:
    if not results.get("test"):
        return {}
    return {
        metric: summarize(_by_site(results, metric), higher_is_better=higher_is_better(metric))
        for metric in _metrics(results)
    }


def _metrics(results: Mapping[str, Any]) -> list[str]:
    """Metrics of the test results that the task wants in tables (default: all, 20 at most), the primary one first."""
    metrics: list[str] = []
    for by_metric in (results.get("test") or {}).values():
        metrics += [metric for metric in by_metric if metric not in metrics]
    if not metrics:
        raise ValueError(f"{_label(results)!r} has no test results")
    info = results["info"] or {}
    shown = info.get("shown_metrics")
    if shown:
        metrics = [metric for metric in metrics if metric in shown] or metrics
    return sorted(metrics, key=lambda metric: metric != info.get("primary_metric"))[:MAX_COLUMNS]


def _by_site(results: Mapping[str, Any], metric: str) -> dict[str, float]:
    """``{site: value}``, NaN where a site of the run has none."""
    test = results.get("test") or {}
    names = {*((results["info"] or {}).get("sites") or ()), *test}
    found = {site: (test.get(site) or {}).get(metric) for site in sorted(names)}
    return {site: math.nan if value is None else float(value) for site, value in found.items()}


def _label(results: Mapping[str, Any]) -> str:
    info = results["info"] or {}
    return str(info.get("label") or info.get("method") or "unknown method")


def _mean_and_std(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _MISSING
    mean = _number(statistics.fmean(finite))
    return mean if len(values) == 1 else f"{mean} ± {_number(statistics.pstdev(finite))}"


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else _MISSING


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as ``1-3, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
