"""The figures of a run by metric and site, as tables, comparisons and pages take them from its document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base import checks
from fairflare.core.fairness import BEFORE_RECORDED, FairnessSummary, higher_is_better, summarize

GLOBAL = "global/"  # in front of metrics of the global test, wherever they stand among those of the sites
MAX_COLUMNS = 20  # of metrics, whose names the sites choose

SPELT = {"dice": "Dice", "auc": "AUC", "iou": "IoU", "ece": "ECE", "hd95": "HD95", "nsd": "NSD"}  # in sentences

Results = Mapping[str, Any]  # of fairflare.reporting.results.read_results
BySite = Mapping[str, Any]  # {site: {metric: value}}


def label_of(results: Results) -> str:
    """What a reader calls a run's method and settings."""
    info = results["info"] or {}
    return str(info.get("label") or info.get("method") or "unknown method")


def title_of(results: Results) -> str:
    """Return the method's name and, beside it, what the run was called; of older results the class at the server."""
    info, label = results["info"] or {}, label_of(results)
    rule = str(info.get("method") or "")
    told = label.replace("_", "").lower().startswith(rule.replace("_", "").lower())
    return str(info.get("title") or (label if told else f"{label} ({rule} at the server)"))


def in_words(metric: str) -> str:
    """``es_dice`` -> ``equity-scaled Dice``, ``auc_gap`` -> ``gap in AUC``: a metric's name in a sentence."""
    if metric.startswith("es_"):
        return f"equity-scaled {in_words(metric.removeprefix('es_'))}"
    if metric.endswith("_gap"):
        return f"gap in {in_words(metric.removesuffix('_gap'))}"
    return " ".join(SPELT.get(word, word) for word in metric.split("_"))


def primary_of(results: Results) -> str | None:
    """The run's primary metric."""
    return (results["info"] or {}).get("primary_metric")


def metrics_of(results: Results) -> list[str]:
    """Metrics of the test results that the task wants in tables (default: all, 20 at most), the primary one first."""
    kept = (results.get("suppressed") or {}).values()  # older results have none
    metrics = list(dict.fromkeys(name for of in (*(results.get("test") or {}).values(), *kept) for name in of))
    if not metrics:
        raise ValueError(f"{label_of(results)!r} has no test results")
    shown = (results["info"] or {}).get("shown_metrics")
    if shown:
        metrics = [metric for metric in metrics if metric in shown] or metrics
    return sorted(metrics, key=lambda metric: metric != primary_of(results))[:MAX_COLUMNS]


def known_metric(results: Results, metric: str) -> str:
    """The metric.

    Raises:
        ValueError: the run does not have it; suggests the nearest.
    """
    of = (*results["test"].values(), *(results.get("suppressed") or {}).values())
    known = sorted({name for names in of for name in names})
    known += [GLOBAL + name for name in (results.get("global_test") or {}).get("metrics") or ()]
    for part in parts_of(metric, results["test"]):
        if part not in known:
            raise ValueError(
                f"{label_of(results)!r} has no metric {part!r}{checks.unknown(part, known, 'results.json has all')}"
            )
    return metric


def parts_of(metric: str, test: BySite) -> list[str]:
    """Gives ``a`` and ``b`` of ``a+b``, the mean of two metrics; a name that is measured as it stands is whole."""
    measured = any(metric in (by_metric or ()) for by_metric in test.values())
    return [metric] if measured else metric.split("+")


def direction_of(results: Results, metric: str) -> bool:
    """Whether more of a metric is better, as the run's task declared it.

    Raises:
        ValueError: the results do not say, or it is the mean of metrics of both directions.
    """
    found = declared_direction(results, metric)
    if found is None:
        raise ValueError(
            f"the results of {label_of(results)!r} do not say whether more of {metric!r} is better; declare it in the "
            f"task's declared_metrics(), or for these results as 'higher_is_better': {{{metric!r}: true or false}} "
            "under 'info' of results.json"
        )
    return found


def declared_direction(results: Results, metric: str) -> bool | None:
    """As :func:`direction_of`; ``None``: the results do not say."""
    declared = (results["info"] or {}).get("higher_is_better") or BEFORE_RECORDED
    found = {part: higher_is_better(part, declared) for part in parts_of(metric, results.get("test") or {})}
    if {True, False} <= {*found.values()}:
        higher = ", ".join(part for part in found if found[part])
        raise ValueError(f"{metric!r} cannot be a mean: of {higher} more is better, of the others less")
    return None if None in found.values() else all(found.values())


def by_site_of(
    results: Results, metric: str, test: BySite | None = None, of_all: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """``{site: value}``, NaN where a site of the run has none; of the last model, or of ``test`` and ``of_all``.

    A metric ``a+b`` is the mean of both at each site, as the papers' "Average" of clean and corrupted images.
    ``global/a`` is that of the global test, one value for all sites.
    """
    (final, common), *_ = _tests(results)
    test, common = final if test is None else test, common if of_all is None else of_all
    every = {GLOBAL + name: value for name, value in common.items()}
    sites = sorted({*((results["info"] or {}).get("sites") or ()), *test})
    parts = parts_of(metric, test)
    return {site: _mean({**every, **(test.get(site) or {})}, parts) for site in sites}


def measured(results: Results, metric: str, *, last: bool = False) -> list[dict[str, float]]:
    """Gives ``{site: value}`` of the run's final model, or of each of its last models.

    Args:
        results: of a run.
        metric: also the mean of several, ``a+b``.
        last: of each model that ``last_rounds`` is the mean of, the final one at the end.

    Raises:
        ValueError: the last models were not tested.
    """
    return [by_site_of(results, metric, *tested) for tested in _tests(results, last)]


def global_values(results: Results, metric: str, *, last: bool = False) -> list[float]:
    """As :func:`measured`, on the global test: a value for each model, NaN where it has none."""
    tests = (of_all for _, of_all in _tests(results, last))
    return [_mean(of_all, [metric] if metric in of_all else metric.split("+")) for of_all in tests]


def global_metrics(results: Results, metric: str) -> list[str]:
    """Metrics of the global test for tables: the given one, then those that the task shows."""
    known = (results.get("global_test") or {}).get("metrics") or {}
    shown = (results["info"] or {}).get("shown_metrics") or ()
    first = [metric] if all(part in known for part in metric.split("+")) or metric in known else []
    return [*first, *(name for name in shown if name in known and name != metric)]


def suppressed_of(results: Results, metric: str) -> set[str]:
    """Gives the sites that keep their value of a metric of the test splits, too few cases being behind it."""
    parts = {*parts_of(metric, results.get("test") or {})}
    return {site for site, names in (results.get("suppressed") or {}).items() if parts & {*names}}


def summary_of(results: Results, metric: str) -> FairnessSummary:
    """Summarizes the last model's test metric over the sites of the run."""
    by_site, higher = by_site_of(results, metric), direction_of(results, metric)
    return summarize(by_site, higher_is_better=higher, suppressed=suppressed_of(results, metric))


def _tests(results: Results, last: bool = False) -> list[tuple[BySite, Mapping[str, Any]]]:
    """By site and on the global test: of the final model, or of each of the last ones."""
    final = (results.get("test") or {}, (results.get("global_test") or {}).get("metrics") or {})
    if not last:
        return [final]
    if not (told := results.get("last_rounds")):
        raise ValueError(f"{label_of(results)!r} has no test of its last models; run it with test_last=5")
    by_round = {record["current_round"]: record for record in results["rounds"]}
    before = [by_round.get(number) or {} for number in told["rounds"][:-1]]
    return [*((record.get("test") or {}, record.get("global_test") or {}) for record in before), final]


def _mean(values: Mapping[str, Any], parts: Sequence[str]) -> float:
    """NaN where one of them has no value."""
    found = [math.nan if (value := values.get(part)) is None else float(value) for part in parts]
    return sum(found) / len(found)
