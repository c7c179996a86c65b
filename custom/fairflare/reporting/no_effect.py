"""Detect that a run had no effect: steps that hardly move the model, equal weights, a metric that is 0 everywhere.

The functions are pure: they read a run's results, and return warnings or sentences for the reader.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from fairflare.base.checks import true_texts
from fairflare.base.metric import metric_name
from fairflare.core.cells import CLINICAL, pivot
from fairflare.core.statistics.footing import OF_PART
from fairflare.reporting.documents import RoundRecord, RunResults, Warned
from fairflare.reporting.layout import format_count, join_parts
from fairflare.reporting.values import (
    collect_by_site,
    declared_direction,
    list_answering_sites,
    metrics_of,
    parts_of,
    site_columns,
    spell_metric,
)

LEAST_STEP = 1e-2  # shortest step without a warning, in shares of the sites' mean change
SHORT, EQUAL = "short step", "same weights"  # kinds of warnings
SAME = 1e-2  # largest relative difference from 1/K at which a weight counts as equal


def short_step(step: float) -> list[Warned]:
    """Return a warning if the global model's step is below a hundredth of the sites' mean change.

    Args:
        step: length of the step, as a factor of the mean change, ``>= 0``.
    """
    text = (
        f"a step of {step:.2g} of the sites' mean change: the model hardly moves; the method's page says which setting "
        "makes the step"
    )
    # A table shows a warning's round with the largest value, which is then the round with the shortest step.
    return [] if step >= LEAST_STEP else [Warned("", SHORT, 1 - step, step, text)]


def same_weights(rounds: Iterable[RoundRecord]) -> list[Warned]:
    """Return a warning if all sites had the same weight in every round and layer, to within 1 %.

    Args:
        rounds: records of the rounds; a round with one site does not count.
    """
    of_rounds = (
        [[entry["weight"] for entry in by_site.values()] for by_site in (record.layers or {}).values()]
        or [list((record.site_weights or {}).values())]
        for record in rounds
    )
    counted = [sets for sets in of_rounds if min(map(len, sets)) > 1]
    if not counted or any(abs(w * len(weights) - 1) > SAME for sets in counted for weights in sets for w in weights):
        return []
    largest = max(weight for sets in counted for weights in sets for weight in weights)
    when = "in its only round" if len(counted) == 1 else f"in all {len(counted)} rounds"
    text = f"the same weight for every site {when} (within 1 %): what the method weighs by made no difference"
    return [Warned("", EQUAL, largest, largest, text)]


def zero_everywhere(results: RunResults, metrics: Collection[str]) -> list[str]:
    """Return those of ``metrics`` that are 0 at every site that has them; pass only metrics where higher is better."""
    return [name for name in metrics if values_of(results, name) == {0}]


def values_of(results: RunResults, metric: str) -> set[float]:
    """Return the different values of a test metric at the sites that have one."""
    return {cell.value for cell in site_columns(results).get(metric, {}).values() if cell.value is not None}


def nothing_learnt(results: RunResults, metric: str | None = None) -> list[str]:
    """Return a sentence if a metric is 0 at every site, or all images get one class; else an empty list.

    Args:
        results: results of a run.
        metric: the metric that is checked; default: the primary metric.
    """
    first = metric or results.info.primary_metric
    if declared_direction(results, first) and zero_everywhere(results, parts_of(results, first)):
        return [f"Nothing was learnt: {spell_metric(first)} is 0 at every site."]
    recalls = [name for name in site_columns(results) if name.startswith("recall_") and values_of(results, name)]
    missed = zero_everywhere(results, recalls)
    called = [name for name in recalls if name not in missed]
    if not missed or len(called) != 1 or values_of(results, called[0]) != {1.0}:
        return []
    return [f"Nothing was learnt: every test image at every site is called {called[0].removeprefix('recall_')}."]


def find_undetected_parts(results: RunResults) -> dict[str, str]:
    """Return the structures, classes and findings that the model found at no site, and other metrics that are 0.

    Returns:
        ``{metric: words}``, with the number of test images that have the structure or class, and the sites that have
        a value where not all have.
    """
    first, shown = results.info.primary_metric, metrics_of(results)
    families = ("recall_", f"{OF_PART.get(first, first)}_")
    supports = {
        site: {
            metric_name(part): int(n) for part, n in (support.class_support or support.structure_support or {}).items()
        }
        for site, support in results.inequality.sites.items()
    }
    words = dict[str, str]()
    for name in (name for name in site_columns(results) if name in shown or name.startswith(families)):
        values = {site: value for site, value in collect_by_site(results, name).items() if math.isfinite(value)}
        if {*values.values()} == {0.0} and declared_direction(results, name):
            part = max(
                (part for support in supports.values() for part in support if name.endswith(f"_{part}")),
                key=len,
                default="",
            )
            count = sum(supports.get(site, {}).get(part, 0) for site in values)
            about = ", ".join(true_texts({
                f"{format_count(count, 'test image')} of it": count,
                f"measured at {join_parts(values)}": len(values) < len(list_answering_sites(results)),
            }))  # fmt: skip
            words[name] = spell_metric(name) + (f" ({about})" if about else "")
    of_sites = (cell for cell in results.cells if cell.split == CLINICAL and cell.site)
    for part, of_part in pivot(of_sites, "part", "metric", "site").items():  # findings, by counts
        tp, fn = (sum(cell.value or 0 for cell in of_part.get(key, {}).values()) for key in ("tp", "fn"))
        if not tp and fn and f"recall_{metric_name(part)}" not in words:
            words[part] = f"{part} ({format_count(int(fn), 'test image')} of it)"
    return words
