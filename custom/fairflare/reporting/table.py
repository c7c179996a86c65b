"""The fairness table of one run: for logs and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fairflare.core import checks
from fairflare.core.fairness import BEFORE_RECORDED, FairnessSummary, declared_as, higher_is_better, summarize
from fairflare.reporting.attendance import attendance
from fairflare.reporting.documents import SUPPRESSED
from fairflare.reporting.layout import MISSING, blocks, csv_lines, cut, markdown_lines, number, wrapped
from fairflare.reporting.no_effect import zero_everywhere
from fairflare.reporting.standing import interval_cell, recall_of, shown_behind, who_is_behind

if TYPE_CHECKING:
    from rich.console import Group

STYLES = ("text", "markdown", "csv")
SYNTHETIC_NOTE = "The data are SYNTHETIC (generated images): these figures say nothing about patients."
MAX_COLUMNS = 20  # of metrics, whose names the sites choose
MAX_HEADING = 32
UNSURE = "?"  # behind a worst site that may be no worse than the others
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
    title, notes = _title(results), _table_notes(results, metric, totals)
    if not sites:
        return "\n".join([title, *wrapped(notes, width)])
    classes = class_rows(results) if metric in (None, primary_of(results)) else []
    if style == "markdown":
        support = [*markdown_lines(classes), ""] if classes else []
        return "\n".join([title, "", *markdown_lines(table), "", *support, *notes])
    support = ["", blocks(classes, width), ""] if classes else []
    return "\n".join([title, blocks(table, width, rules=(1, 1 + len(sites))), *support, *wrapped(notes, width)])


def rich_table(results: Mapping[str, Any], *, metric: str | None = None, width: int | None = None) -> Group:
    """:func:`fairness_table` for a terminal; a site that is shown to be behind stands out.

    Raises:
        ValueError: as there.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    header, sites, totals = _cells(results, metric)
    behind = shown_behind(results, metric or metrics_of(results)[0]) if sites else []
    tables = []
    classes = class_rows(results) if metric in (None, primary_of(results)) else []
    for head, body, last in ((header, sites, totals), *([(classes[0], classes[1:], [])] if classes else [])):
        rows = [head, *body, *last]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        for block in cut(widths, None if width is None else width - 4, gap=3) if body else []:
            table = Table()
            for index in block:
                table.add_column(Text(head[index]), justify="left" if index == 0 else "right", no_wrap=True)
            for row in body:
                table.add_row(*(Text(row[i]) for i in block), style="bold red" if row[0] in behind else None)
            table.add_section()
            for row in last:
                table.add_row(*(Text(row[i]) for i in block))
            tables.append(table)
    return Group(
        Text(_title(results), style="bold"),
        *tables,
        Text("\n".join(wrapped(_table_notes(results, metric, totals), width))),
    )


# ------------------------------------------------------------------------------------------------------------


def _table_notes(results: Mapping[str, Any], metric: str | None, totals: Sequence[Sequence[str]]) -> list[str]:
    marked = any(cell.endswith(UNSURE) for row in totals if row[0] == "worst site" for cell in row[1:])
    legend = [f"{UNSURE}: has the worst value; that the site is behind the others is not shown."] if marked else []
    return legend + run_notes(results, metric)


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
    if results.get("test") and metric in (None, primary_of(results)):
        notes += who_is_behind(results)
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
    notes += _zero_notes(results)
    if info.get("synthetic"):
        notes.append(SYNTHETIC_NOTE)
    return notes


def _zero_notes(results: Mapping[str, Any]) -> list[str]:
    """Metrics that no site has anything of, which is seldom a result and mostly a model that has learned nothing."""
    test = results.get("test") or {}
    if not test:
        return []
    names = [name for name in metrics_of(results) if direction_of(results, name)]
    found = zero_everywhere(test, names)
    return (
        [f"0 at EVERY site: {_listed(found)}. Nothing of it was found anywhere: look at the training first."]
        if found
        else []
    )


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
    behind = [shown_behind(results, name) for name in metrics]
    for heading, test in _other_models(results):
        columns.append(_Column(metrics[0], by_site_of(results, metrics[0], test), f"{metrics[0]}, {heading}"))
    names = sorted({site for column in columns for site in column.values})
    shown = _exact if exact else number
    home = {name: suppressed_of(results, name) for name in metrics}
    sites = [[site, *(_shown(column, site, home[column.metric], shown) for column in columns)] for site in names]
    summaries = [summarize(c.values, higher_is_better=_declared(results, c.metric)) for c in columns]
    totals = [
        [title, *(shown(getattr(summary, attribute)) for summary in summaries)]
        for title, attribute in (("average", "mean"), ("std", "std"), ("worst", "worst"), ("range", "range"))
    ]
    behind += [[] for _ in columns[len(metrics) :]]  # of other models nobody says how sure it is
    worst = [_worst_site(summary) for summary in summaries]
    unsure = [s.num_sites > 1 and s.worst_site not in known for s, known in zip(summaries, behind, strict=True)]
    unsure = [un and bool(name) for un, name in zip(unsure, worst, strict=True)]
    cells = [(name or MISSING) + (UNSURE if un and not exact else "") for name, un in zip(worst, unsure, strict=True)]
    totals.insert(3, ["worst site", *cells])
    headings = [column.heading or column.metric for column in columns]
    if not exact:
        units = (results["info"] or {}).get("units") or {}
        of_unit = [declared_as(column.metric, units) for column in columns]
        headings = [h[:MAX_HEADING] + (f" ({unit})" if unit else "") for h, unit in zip(headings, of_unit, strict=True)]
    header = ["site", *headings]
    found = results.get("inequality")
    if not found or found["metric"] not in metrics:
        return header, sites, totals
    # Behind its metric: each site's interval and cases, and what equal sites would show.
    place, of = 2 + metrics.index(found["metric"]), found["sites"]
    header[place:place] = ["low", "high", "cases"] if exact else [f"{found['level']:.0%} interval", "cases"]
    for row in sites:
        kept = row[0] in home[found["metric"]]
        own = [SUPPRESSED] * (3 if exact else 2) if kept else _own_cells(of.get(row[0]) or {}, exact)
        row[place:place] = own
    for row in totals:
        row[place:place] = [MISSING if not exact else ""] * (len(header) - len(row))
    if found["test"]:
        chance = [MISSING if not exact else ""] * len(header)
        chance[0], chance[place - 1] = "std if equal", shown(found["chance_std"])
        totals.insert(2, chance)
    return header, sites, totals


def _own_cells(of_site: Mapping[str, Any], exact: bool) -> list[str]:
    ends = [math.nan if of_site.get(end) is None else float(of_site[end]) for end in ("low", "high")]
    cases = of_site.get("test_cases")
    count = ("" if exact else MISSING) if cases is None else f"{cases:.0f}"
    return [*map(_exact, ends), count] if exact else [interval_cell(of_site), count]


def class_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """The recall of each class at each site beside the number of its test images, the header first; or nothing."""
    of = (results.get("inequality") or {}).get("sites") or {}
    support = {site: found["class_support"] for site, found in of.items() if found["class_support"]}
    names = list(dict.fromkeys(name for own in support.values() for name in own))[:MAX_COLUMNS]
    rows = []
    for site, own in support.items():
        recalls = results["test"].get(site) or {}
        values = [recall_of(recalls, name) for name in names]
        told = [MISSING if value is None else f"{value:.2f}" for value in values]
        rows.append([site, *(f"{value} of {own.get(name, 0):.0f}" for value, name in zip(told, names, strict=True))])
    return [["recall, test images", *(name[:MAX_HEADING] for name in names)], *rows] if rows else []


def primary_of(results: Mapping[str, Any]) -> str | None:
    """The run's primary metric."""
    return (results["info"] or {}).get("primary_metric")


@dataclass
class _Column:
    """A metric of one of the run's models, by site."""

    metric: str
    values: dict[str, float]
    heading: str = ""  # default: the metric


def _shown(column: _Column, site: str, home: Collection[str], shown: Callable[[float], str]) -> str:
    value = column.values.get(site, math.nan)
    return SUPPRESSED if math.isnan(value) and site in home else shown(value)


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
        without = [f"{site} ({_why(results, name, site, test)})" for site, value in values.items() if math.isnan(value)]
        if without:
            found.setdefault(tuple(without), []).append(name[:MAX_HEADING] + heading)
    return [
        f"{_listed(names)}: average and spread over {count - len(without)} of {_sites(count)}, without "
        f"{', '.join(without)}."
        for without, names in found.items()
    ]


def _why(results: Mapping[str, Any], metric: str, site: str, test: Mapping[str, Any]) -> str:
    """A site has no value of a metric."""
    if site in suppressed_of(results, metric):
        said = ((results["info"] or {}).get("said") or {}).get(site) or {}
        return f"{SUPPRESSED}: fewer than {said.get('min_cases') or 'its min_cases'} cases"
    return "not finite" if metric in (test.get(site) or {}) else "no value"


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
    of = (*results["test"].values(), *(results.get("suppressed") or {}).values())
    known = sorted({name for names in of for name in names})
    for part in parts_of(metric, results["test"]):
        if part not in known:
            hint = checks.nearest(part, known)
            raise ValueError(f"{label_of(results)!r} has no metric {part!r}{hint or ';'} it has {', '.join(known)}")
    return metric


def direction_of(results: Mapping[str, Any], metric: str) -> bool:
    """Whether more of a metric is better, as the run's task declared it.

    Raises:
        ValueError: the results do not say, or it is the mean of metrics of both directions.
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
    declared = (results["info"] or {}).get("higher_is_better") or BEFORE_RECORDED
    found = {part: higher_is_better(part, declared) for part in parts_of(metric, results.get("test") or {})}
    if {True, False} <= {*found.values()}:
        higher = ", ".join(part for part in found if found[part])
        raise ValueError(f"{metric!r} cannot be a mean: of {higher} more is better, of the others less")
    return None if None in found.values() else all(found.values())


def parts_of(metric: str, test: Mapping[str, Any]) -> list[str]:
    """Gives ``a`` and ``b`` of ``a+b``, the mean of two metrics; a name that is measured as it stands is whole."""
    measured = any(metric in (by_metric or ()) for by_metric in test.values())
    return [metric] if measured else metric.split("+")


def measured(results: Mapping[str, Any], metric: str, *, last: bool = False) -> list[dict[str, float]]:
    """Gives ``{site: value}`` of the run's final model, or of each of its last models.

    Args:
        results: of a run.
        metric: also the mean of several, ``a+b``.
        last: of each model that ``last_rounds`` is the mean of, the final one at the end.

    Raises:
        ValueError: the last models were not tested.
    """
    if not last:
        return [by_site_of(results, metric)]
    if not (told := results.get("last_rounds")):
        raise ValueError(f"{label_of(results)!r} has no test of its last models; run it with test_last=5")
    by_round = {record["current_round"]: record.get("test") for record in results["rounds"]}
    tests = [by_round.get(number) or {} for number in told["rounds"][:-1]]
    return [by_site_of(results, metric, test) for test in (*tests, results["test"])]


def metrics_of(results: Mapping[str, Any]) -> list[str]:
    """Metrics of the test results that the task wants in tables (default: all, 20 at most), the primary one first."""
    metrics: list[str] = []
    kept = (results.get("suppressed") or {}).values()  # older results have none
    for by_metric in (*(results.get("test") or {}).values(), *kept):
        metrics += [metric for metric in by_metric if metric not in metrics]
    if not metrics:
        raise ValueError(f"{label_of(results)!r} has no test results")
    info = results["info"] or {}
    shown = info.get("shown_metrics")
    if shown:
        metrics = [metric for metric in metrics if metric in shown] or metrics
    return sorted(metrics, key=lambda metric: metric != info.get("primary_metric"))[:MAX_COLUMNS]


def by_site_of(results: Mapping[str, Any], metric: str, test: Mapping[str, Any] | None = None) -> dict[str, float]:
    """``{site: value}``, NaN where a site of the run has none; of the last model, or of ``test``.

    A metric ``a+b`` is the mean of both at each site, as the papers' "Average" of clean and corrupted images.
    """
    test = (results.get("test") if test is None else test) or {}
    names = {*((results["info"] or {}).get("sites") or ()), *test}
    parts = parts_of(metric, test)
    found = {}
    for site in sorted(names):
        values = [math.nan if (value := (test.get(site) or {}).get(part)) is None else float(value) for part in parts]
        found[site] = sum(values) / len(values)
    return found


def suppressed_of(results: Mapping[str, Any], metric: str) -> set[str]:
    """Gives the sites that keep their value of a metric of the test splits, too few cases being behind it."""
    parts = {*parts_of(metric, results.get("test") or {})}
    return {site for site, names in (results.get("suppressed") or {}).items() if parts & {*names}}


def summary_of(results: Mapping[str, Any], metric: str) -> FairnessSummary:
    """Summarizes the last model's test metric over the sites of the run."""
    return summarize(
        by_site_of(results, metric),
        higher_is_better=direction_of(results, metric),
        suppressed=suppressed_of(results, metric),
    )


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
