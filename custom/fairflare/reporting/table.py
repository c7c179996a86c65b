"""The fairness table of one run: for logs and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fairflare.core import checks
from fairflare.core.fairness import BEFORE_RECORDED, FairnessSummary, declared_as, higher_is_better, summarize
from fairflare.reporting.attendance import attendance
from fairflare.reporting.layout import MISSING, blocks, csv_lines, cut, markdown_lines, number, wrapped

if TYPE_CHECKING:
    from rich.console import Group

STYLES = ("text", "markdown", "csv")
SYNTHETIC_NOTE = "The data are SYNTHETIC (generated images): these figures say nothing about patients."
MAX_COLUMNS = 20  # of metrics, whose names the sites choose
MAX_HEADING = 32
#: By ``measured`` in a run's ``info``.
MEASURED = {"personal": "each site's own model", "common": "the common model"}


def fairness_table(
    results: Mapping[str, Any],
    *,
    metric: str | None = None,
    style: Literal["text", "markdown", "csv"] = "text",
    width: int | None = None,
) -> str:
    """The result of a run: metrics per site, their average and spread, and who was left out.

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
    header, sites, totals = _cells(results, metric, exact=style == "csv")
    table = [header, *sites, *totals]
    if style == "csv":
        return csv_lines(table)
    title, notes = _title(results), run_notes(results, metric)
    if not sites:
        return "\n".join([title, *wrapped(notes, width)])
    if style == "markdown":
        return "\n".join([title, "", *markdown_lines(table), "", *notes])
    return "\n".join([title, blocks(table, width, rules=(1, 1 + len(sites))), *wrapped(notes, width)])


def rich_table(results: Mapping[str, Any], *, metric: str | None = None, width: int | None = None) -> Group:
    """:func:`fairness_table` for a terminal; the worst site stands out.

    Raises:
        ValueError: as there.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    header, sites, totals = _cells(results, metric)
    first = [metric or metrics_of(results)[0]] if sites else []
    worst = {_worst_site(summary) for summary in _summaries(results, first).values()}
    rows = [header, *sites, *totals]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    tables = []
    for block in cut(widths, None if width is None else width - 4, gap=3) if sites else []:
        table = Table()
        for index in block:
            table.add_column(Text(header[index]), justify="left" if index == 0 else "right", no_wrap=True)
        for row in sites:
            table.add_row(*(Text(row[i]) for i in block), style="bold red" if row[0] in worst else None)
        table.add_section()
        for row in totals:
            table.add_row(*(Text(row[i]) for i in block))
        tables.append(table)
    return Group(
        Text(_title(results), style="bold"), *tables, Text("\n".join(wrapped(run_notes(results, metric), width)))
    )


# ------------------------------------------------------------------------------------------------------------


def _title(results: Mapping[str, Any]) -> str:
    info = results["info"] or {}
    count = len(results["rounds"])
    parts = [label_of(results)]
    if info.get("experiment"):
        parts.append(f"experiment {info['experiment']}")
    if info.get("seed") is not None:
        parts.append(f"seed {info['seed']}")
    parts.append(f"{count} round{'' if count == 1 else 's'}")
    status = results["status"]
    if status == "running":
        parts.append("RUNNING, or cut off")
    elif status != "completed":
        parts.append(status.upper() + (f": {results['reason']}" if results.get("reason") else ""))
    return ", ".join(parts)


def run_notes(results: Mapping[str, Any], metric: str | None = None) -> list[str]:
    """What a reader of a run's figures must know: which model, what is missing, who was left out, warnings."""
    info = results["info"] or {}
    notes = _tested_notes(results, metric) if results.get("test") else ["No test results."]
    notes += (attended := attendance(results))
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
        done = len(results["rounds"])
        whens = {"validate": "after the last round", "check": f"before round {done}"}
        notes += [f"  {site} {whens.get(phase, f'in round {done}')}, {phase}: {why}" for site, phase, why in in_test]
    elif results["rounds"] and not attended:
        notes.append("No site was left out of a round.")
    if info.get("classes_at_home"):
        notes.append(f"Metrics by class stay at home at: {', '.join(info['classes_at_home'])}.")
    notes += _warnings(results)
    if info.get("synthetic"):
        notes.append(SYNTHETIC_NOTE)
    return notes


def _warnings(results: Mapping[str, Any]) -> list[str]:
    """What one site could do or would have done: a line a site and kind, in the words of its worst round."""
    found: dict[tuple[str, str], list[tuple[float, int, str]]] = {}
    for record in results["rounds"]:
        for warned in record.get("warnings") or ():  # older results have none
            far = math.inf if warned["value"] is None else abs(warned["value"])
            entry = (far, record["current_round"], warned["text"])
            found.setdefault((warned["site"], warned["kind"]), []).append(entry)
    lines = []
    for (site, _), entries in sorted(found.items()):
        _, _, text = max(entries, key=lambda entry: entry[0])
        which = f"round{'' if len(entries) == 1 else 's'} {_ranges([number for _, number, _ in entries])}"
        lines.append(f"  {site or 'every site'} in {which}: {text}")
    return ["Warnings, in the words of the worst round:", *lines] if lines else []


def _cells(
    results: Mapping[str, Any], metric: str | None = None, *, exact: bool = False
) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Header, one row for each site, and the rows of totals; ``exact``: numbers in full."""
    if not results.get("test"):
        return ["site"], [], []
    metrics = metrics_of(results) if metric is None else [_known(results, metric)]
    columns = [_Column(name, by_site_of(results, name)) for name in metrics]
    for heading, test in _other_models(results):
        columns.append(_Column(metrics[0], by_site_of(results, metrics[0], test), f"{metrics[0]}, {heading}"))
    names = sorted({site for column in columns for site in column.values})
    shown = _exact if exact else number
    sites = [[site, *(shown(column.values.get(site, math.nan)) for column in columns)] for site in names]
    summaries = [summarize(c.values, higher_is_better=_declared(results, c.metric)) for c in columns]
    totals = [
        [title, *(shown(getattr(summary, attribute)) for summary in summaries)]
        for title, attribute in (("average", "mean"), ("std", "std"), ("worst", "worst"), ("range", "range"))
    ]
    totals.insert(3, ["worst site", *(_worst_site(summary) or MISSING for summary in summaries)])
    headings = [column.heading or column.metric for column in columns]
    if not exact:
        units = (results["info"] or {}).get("units") or {}
        found = [declared_as(column.metric, units) for column in columns]
        headings = [h[:MAX_HEADING] + (f" ({unit})" if unit else "") for h, unit in zip(headings, found, strict=True)]
    return ["site", *headings], sites, totals


@dataclass
class _Column:
    """A metric of one of the run's models, by site."""

    metric: str
    values: dict[str, float]
    heading: str = ""  # default: the metric


def _other_models(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Test results of the best model, when that is not the last one, and of the last models on average."""
    found = []
    best, last = results.get("best"), results.get("last_rounds")
    if best and not best["is_last"] and results["test_best"] is not None:
        found.append(("best", results["test_best"]))
    if last:
        found.append((f"last {len(last['rounds'])}", last["test"]))
    return found


def _tested_notes(results: Mapping[str, Any], metric: str | None) -> list[str]:
    """Which models the columns are of, the metrics' directions, and over which sites the totals are."""
    metrics = metrics_of(results) if metric is None else [metric]
    lower = [name[:MAX_HEADING] for name in metrics if _declared(results, name) is False]
    unknown = [name[:MAX_HEADING] for name in metrics if _declared(results, name) is None]
    notes = [f"Lower is better: {_listed(lower)}." if lower else "Higher is better."]
    if lower and len(lower) < len(metrics):
        notes = [f"Higher is better, but for: {_listed(lower)}."]
    if unknown:
        notes.append(f"Not declared whether more is better, so no site is the worst: {_listed(unknown)}.")
    best, last = results.get("best"), results.get("last_rounds")
    if best and best["is_last"]:
        notes.append("The best model by the validation splits is the last one.")
    elif best:
        value = "" if best["value"] is None else f" {number(best['value'])}, {_sites(len(best['sites']))}"
        notes.append(f"best: model of round {best['round']}, by the validation splits ({best['by']}{value}).")
        if results["test_best"] is None:
            notes[-1] += " It was not tested: what the sites had of their own then is not kept."
    if measured := MEASURED.get((results["info"] or {}).get("measured", "")):
        notes.append(f"Measured: {measured}.")
    if last:
        notes.append(f"last {len(last['rounds'])}: mean over the models of rounds {_ranges(last['rounds'])}.")
    tables = [("", results["test"]), *((f", {heading}", test) for heading, test in _other_models(results))]
    for heading, test in tables:
        notes += _missing(results, metrics[:1] if heading else metrics, heading, test)
    return notes


def _missing(results: Mapping[str, Any], metrics: Sequence[str], heading: str, test: Mapping[str, Any]) -> list[str]:
    """A line for each set of sites that some metrics are without."""
    found: dict[tuple[str, ...], list[str]] = {}
    count = 0
    for name in metrics:
        values = by_site_of(results, name, test)
        count = len(values)
        without = [
            f"{site} ({'not finite' if name in (test.get(site) or {}) else 'no value'})"
            for site, value in values.items()
            if math.isnan(value)
        ]
        if without:
            found.setdefault(tuple(without), []).append(name[:MAX_HEADING] + heading)
    return [
        f"{_listed(names)}: average and spread over {count - len(without)} of {_sites(count)}, without "
        f"{', '.join(without)}."
        for without, names in found.items()
    ]


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _sites(count: int) -> str:
    return f"{count} site{'' if count == 1 else 's'}"


def _worst_site(summary: FairnessSummary) -> str | None:
    """None where several sites are all alike."""
    return None if summary.num_sites > 1 and summary.range == 0 else summary.worst_site


def _exact(value: float) -> str:
    return repr(value) if math.isfinite(value) else ""


def _known(results: Mapping[str, Any], metric: str) -> str:
    known = sorted({name for values in results["test"].values() for name in values})
    if metric not in known:
        hint = checks.nearest(metric, known)
        raise ValueError(f"{label_of(results)!r} has no metric {metric!r}{hint or ';'} it has {', '.join(known)}")
    return metric


def _summaries(results: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, FairnessSummary]:
    return {
        metric: summarize(by_site_of(results, metric), higher_is_better=_declared(results, metric))
        for metric in metrics
    }


def direction_of(results: Mapping[str, Any], metric: str) -> bool:
    """Whether more of a metric is better, as the run's task declared it.

    Raises:
        ValueError: the results do not say.
    """
    found = _declared(results, metric)
    if found is None:
        raise ValueError(
            f"the results of {label_of(results)!r} do not say whether more of {metric!r} is better; declare it in the "
            f"task's declared_metrics(), or for these results as 'higher_is_better': {{{metric!r}: true or false}} "
            "under 'info' of results.json"
        )
    return found


def _declared(results: Mapping[str, Any], metric: str) -> bool | None:
    declared = (results["info"] or {}).get("higher_is_better")
    return higher_is_better(metric, declared or BEFORE_RECORDED)


def metrics_of(results: Mapping[str, Any]) -> list[str]:
    """Metrics of the test results that the task wants in tables (default: all, 20 at most), the primary one first."""
    metrics: list[str] = []
    for by_metric in (results.get("test") or {}).values():
        metrics += [metric for metric in by_metric if metric not in metrics]
    if not metrics:
        raise ValueError(f"{label_of(results)!r} has no test results")
    info = results["info"] or {}
    shown = info.get("shown_metrics")
    if shown:
        metrics = [metric for metric in metrics if metric in shown] or metrics
    return sorted(metrics, key=lambda metric: metric != info.get("primary_metric"))[:MAX_COLUMNS]


def by_site_of(results: Mapping[str, Any], metric: str, test: Mapping[str, Any] | None = None) -> dict[str, float]:
    """``{site: value}``, NaN where a site of the run has none; of the last model, or of ``test``."""
    test = (results.get("test") if test is None else test) or {}
    names = {*((results["info"] or {}).get("sites") or ()), *test}
    found = {site: (test.get(site) or {}).get(metric) for site in sorted(names)}
    return {site: math.nan if value is None else float(value) for site, value in found.items()}


def label_of(results: Mapping[str, Any]) -> str:
    info = results["info"] or {}
    return str(info.get("label") or info.get("method") or "unknown method")


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as ``1-3, 7``."""
    parts: list[list[int]] = []
    for this in numbers:
        if parts and this == parts[-1][-1] + 1:
            parts[-1].append(this)
        else:
            parts.append([this])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
