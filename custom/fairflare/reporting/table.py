"""The fairness table of one run: for logs and for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fairflare.base import checks
from fairflare.core.fairness import BEFORE_RECORDED, FairnessSummary, declared_as, higher_is_better, summarize
from fairflare.reporting.attendance import attendance
from fairflare.reporting.compare.no_effect import zero_everywhere
from fairflare.reporting.compare.standing import interval_cell, recall_of, shown_behind, who_is_behind
from fairflare.reporting.documents import SUPPRESSED
from fairflare.reporting.global_test import GLOBAL, global_notes, global_values
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, number, wrapped

if TYPE_CHECKING:
    from rich.console import Group

STYLES = ("text", "markdown", "csv")
SYNTHETIC_NOTE = "The data are SYNTHETIC (generated images): these figures say nothing about patients."
MAX_COLUMNS = 20  # of metrics, whose names the sites choose
MAX_HEADING = 32
BEST = "best"
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
    table = table_of(results, metric)
    if style == "csv":
        return table.csv().rstrip("\n")
    title, notes = _title(results), _table_notes(results, metric, table)
    if not table.rows:
        return "\n".join([title, *wrapped(notes, width)])
    classes = _classes(results, metric)
    if style == "markdown":
        support = [line for found in classes for line in (*found.markdown(), "")]
        return "\n".join([title, "", *table.markdown(), "", *support, *notes])
    support = [line for found in classes for line in ("", found.text(width), "")]
    return "\n".join([title, table.text(width), *support, *wrapped(notes, width)])


def rich_table(results: Mapping[str, Any], *, metric: str | None = None, width: int | None = None) -> Group:
    """:func:`fairness_table` for a terminal; a site that is shown to be behind stands out.

    Raises:
        ValueError: as there.
    """
    from rich.console import Group
    from rich.text import Text

    table = table_of(results, metric)
    behind = shown_behind(results, metric or metrics_of(results)[0]) if table.rows else []
    tables = [part for found in (table, *_classes(results, metric)) for part in found.rich(width, behind)]
    notes = wrapped(_table_notes(results, metric, table), width)
    return Group(Text(_title(results), style="bold"), *tables, Text("\n".join(notes)))


# ------------------------------------------------------------------------------------------------------------


def _table_notes(results: Mapping[str, Any], metric: str | None, table: Table) -> list[str]:
    marked = any(isinstance(cell, Shown) and cell.text.endswith(UNSURE) for row in table.totals for cell in row)
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


def worst_warnings(rounds: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, list[int], str]]:
    """What one site could do or would have done: of each site and kind the rounds, and the words of the worst."""
    found: dict[tuple[str, str], list[tuple[float, int, str]]] = {}
    for record in rounds:
        for warned in record.get("warnings") or ():  # older results have none
            far = math.inf if warned["value"] is None else abs(warned["value"])
            entry = (far, record["current_round"], warned["text"])
            found.setdefault((warned["site"], warned["kind"]), []).append(entry)
    worst = {key: max(entries, key=lambda entry: entry[0]) for key, entries in found.items()}
    return [(*key, [number for _, number, _ in found[key]], worst[key][2]) for key in sorted(found)]


def _warnings(results: Mapping[str, Any]) -> list[str]:
    lines = [
        f"  {site or 'every site'} in round{'s' * (len(numbers) > 1)} {_ranges(numbers)}: {text}"
        for site, _, numbers, text in worst_warnings(results["rounds"])
    ]
    return ["Warnings, in the words of the worst round:", *lines] if lines else []


def table_of(results: Mapping[str, Any], metric: str | None = None) -> Table:
    """A row for each site, and their average and spread; without rows where there is no test.

    Raises:
        ValueError: a metric that the run does not have.
    """
    if not results.get("test"):
        return Table("run", "", ["site"], [])
    metrics = metrics_of(results) if metric is None else [known_metric(results, metric)]
    columns = [_Column(results, name) for name in metrics]
    columns += [_Column(results, metrics[0], test, f", {heading}") for heading, test in _other_models(results)]
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
    of_all = results.get("global_test") or {}
    if of_all.get("metrics"):
        totals.append(["global test", *(column.of_all for column in columns)])
    found = results.get("inequality")
    if found and found["metric"] in metrics:
        # Behind its metric: each site's interval and cases, and what equal sites would show.
        place = 2 + metrics.index(found["metric"])
        header[place:place] = [f"{found['level']:.0%} interval", "cases"]
        names[place:place] = [["low", "high"], ["cases"]]
        for row in sites:
            row[place:place] = _own_cells(found["sites"].get(row[0]) or {}, row[0] in columns[place - 2].home)
        for row in totals:
            known = row[0] == "global test" and of_all["metric"] == found["metric"]
            row[place:place] = _own_cells(of_all, False) if known else [None, None]
        if found["test"]:
            chance: list[Cell] = ["std if equal", *[None] * (len(header) - 1)]
            chance[place - 1] = found["chance_std"]
            totals.insert(2, chance)
    return Table("run", "", header, sites, totals=totals, csv_columns=names)


def _own_cells(of_site: Mapping[str, Any], kept: bool) -> list[Cell]:
    """A site's interval and number of test cases."""
    if kept:
        return [Shown(SUPPRESSED, [SUPPRESSED] * 2), SUPPRESSED]
    cases = of_site.get("test_cases")
    ends = [of_site.get(end) for end in ("low", "high")]
    return [Shown(interval_cell(of_site), ends), None if cases is None else f"{cases:.0f}"]


def _classes(results: Mapping[str, Any], metric: str | None) -> list[Table]:
    """The table of the classes beside that of the primary metric, where there is one."""
    found = class_table(results) if metric in (None, primary_of(results)) else None
    return [found] if found else []


def class_table(results: Mapping[str, Any]) -> Table | None:
    """The recall of each class at each site beside the number of its test images; None: no site says them."""
    of = (results.get("inequality") or {}).get("sites") or {}
    support = {site: found["class_support"] for site, found in of.items() if found["class_support"]}
    names = list(dict.fromkeys(name for own in support.values() for name in own))[:MAX_COLUMNS]
    rows = []
    for site, own in support.items():
        values = [recall_of(results["test"].get(site) or {}, name) for name in names]
        told = [MISSING if value is None else f"{value:.2f}" for value in values]
        rows.append([site, *(f"{value} of {own.get(name, 0):.0f}" for value, name in zip(told, names, strict=True))])
    columns = ["recall, test images", *(name[:MAX_HEADING] for name in names)]
    return Table("classes", "Recall of each class, and number of its test images.", columns, rows) if rows else None


def primary_of(results: Mapping[str, Any]) -> str | None:
    """The run's primary metric."""
    return (results["info"] or {}).get("primary_metric")


class _Column:
    """A metric of one of the run's models.

    Attributes:
        heading, shown: in a file; over the column.
        values, summary: by site; over the sites.
        of_all: on the global test; NaN: not measured.
        home: sites that keep theirs.
        behind: sites that are shown to be behind.
    """

    def __init__(
        self, results: Mapping[str, Any], metric: str, test: Mapping[str, Any] | None = None, which: str = ""
    ) -> None:
        self.heading = metric + which
        unit = declared_as(metric, (results["info"] or {}).get("units") or {})
        self.shown = self.heading[:MAX_HEADING] + (f" ({unit})" if unit else "")
        self.values = by_site_of(results, metric, test)
        self.of_all = math.nan
        if not which:
            self.of_all = global_values(results, metric)[0]
        elif BEST not in which:
            self.of_all = statistics.fmean(global_values(results, metric, last=True))
        self.summary = summarize(self.values, higher_is_better=_declared(results, metric))
        self.home = suppressed_of(results, metric)
        self.behind = [] if which else shown_behind(results, metric)  # of other models nobody says how sure it is

    def cell(self, site: str) -> Cell:
        value = self.values.get(site, math.nan)
        return SUPPRESSED if math.isnan(value) and site in self.home else value

    def worst_site(self) -> Cell:
        """Nobody where several sites are all alike; marked where it may be no worse than the others."""
        of = self.summary
        name = None if of.num_sites > 1 and of.range == 0 else of.worst_site
        unsure = name is not None and of.num_sites > 1 and name not in self.behind
        return Shown((name or MISSING) + (UNSURE if unsure else ""), [name or MISSING])


def _other_models(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Test results of the best model, when that is not the last one, and of the last models on average."""
    found = []
    best, last = results.get("best"), results.get("last_rounds")
    if best and not best["is_last"] and results["test_best"] is not None:
        found.append((BEST, results["test_best"]))
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
    notes += global_notes(results)
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


def known_metric(results: Mapping[str, Any], metric: str) -> str:
    """The metric.

    Raises:
        ValueError: the run does not have it; suggests the nearest.
    """
    of = (*results["test"].values(), *(results.get("suppressed") or {}).values())
    known = sorted({name for names in of for name in names})
    known += [GLOBAL + name for name in (results.get("global_test") or {}).get("metrics") or ()]
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
    by_round = {record["current_round"]: record for record in results["rounds"]}
    before = [by_round.get(number) or {} for number in told["rounds"][:-1]]
    tests = [(record.get("test") or {}, record.get("global_test") or {}) for record in before]
    return [by_site_of(results, metric, *tested) for tested in (*tests, (results["test"], None))]


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


def by_site_of(
    results: Mapping[str, Any],
    metric: str,
    test: Mapping[str, Any] | None = None,
    of_all: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """``{site: value}``, NaN where a site of the run has none; of the last model, or of ``test`` and ``of_all``.

    A metric ``a+b`` is the mean of both at each site, as the papers' "Average" of clean and corrupted images.
    ``global/a`` is that of the global test, one value for all sites.
    """
    if of_all is None:
        of_all = (results.get("global_test") or {}).get("metrics") or {}
    test = (results.get("test") if test is None else test) or {}
    common = {GLOBAL + name: value for name, value in of_all.items()}
    names = {*((results["info"] or {}).get("sites") or ()), *test}
    parts = parts_of(metric, test)
    found = {}
    for site in sorted(names):
        own = {**common, **(test.get(site) or {})}
        values = [math.nan if (value := own.get(part)) is None else float(value) for part in parts]
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
