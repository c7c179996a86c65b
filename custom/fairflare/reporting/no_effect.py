"""Detect that a run had no effect: steps that hardly move the model, equal weights, a metric that is 0 everywhere.

The functions are pure: they read a run's results, and return warnings or sentences for the reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fairflare.reporting.documents import Metrics, Results, RoundRecord, Warned
from fairflare.reporting.layout import listed
from fairflare.reporting.values import declared_direction, in_words, metrics_of

LEAST_STEP = 1e-2  # shortest step without a warning, in shares of the sites' mean change
SHORT, EQUAL = "short step", "same weights"  # kinds of warnings
SAME = 1e-2  # largest relative difference from 1/K at which a weight counts as equal


def short_step(step: float) -> list[Warned]:
    """Return a warning if the global model's step is below a hundredth of the sites' mean change.

    Args:
        step: length of the step, as a factor of the mean change, ``>= 0``.
    """
    if step >= LEAST_STEP:
        return []
    text = (
        f"a step of {step:.2g} of the sites' mean change: the model hardly moves; the method's page says which setting "
        "makes the step"
    )
    # A table shows a warning's round with the largest value, which is then the round with the shortest step.
    return [Warned("", SHORT, 1 - step, step, text)]


def same_weights(rounds: Iterable[RoundRecord]) -> list[Warned]:
    """Return a warning if all sites had the same weight in every round and layer, to within 1 %.

    Args:
        rounds: records of the rounds; a round with one site does not count.
    """
    number, largest = 0, 0.0
    for record in rounds:
        sets = [{site: of["weight"] for site, of in by_site.items()} for by_site in (record.layers or {}).values()]
        sets = sets or [dict(record.site_weights or {})]
        if any(len(weights) < 2 for weights in sets):
            continue
        if any(abs(weight * len(weights) - 1) > SAME for weights in sets for weight in weights.values()):
            return []
        number, largest = number + 1, max(largest, *(max(weights.values()) for weights in sets))
    if not number:
        return []
    when = "in its only round" if number == 1 else f"in all {number} rounds"
    text = f"the same weight for every site {when} (within 1 %): what the method weighs by made no difference"
    return [Warned("", EQUAL, largest, largest, text)]


def zero_everywhere(test: Metrics, metrics: Collection[str]) -> list[str]:
    """Return those of ``metrics`` that are 0 at every site that has them; pass only metrics where higher is better."""
    values = {name: {of[name] for of in test.values() if of.get(name) is not None} for name in metrics}
    return [name for name, different in values.items() if different == {0}]


def nothing_learnt(results: Results, metric: str | None = None) -> list[str]:
    """Return a sentence if a metric is 0 at every site, or all images get one class; else an empty list.

    Args:
        results: results of a run.
        metric: the only metric that is checked; default: all metrics of the tables.
    """
    if not results.test:
        return []
    names = [metric] if metric else metrics_of(results)
    zero = zero_everywhere(results.test, [name for name in names if declared_direction(results, name)])
    first = metric or results.info.primary_metric
    if first in zero:
        return [f"Nothing was learnt: {in_words(first)} is 0 at every site."]
    recalls = {name: None for of_site in results.test.values() for name in of_site if name.startswith("recall_")}
    missed = zero_everywhere(results.test, recalls)
    called = [name.removeprefix("recall_") for name in recalls if name not in missed]
    if missed and len(called) == 1:
        return [f"Nothing was learnt: every test image at every site is called {called[0]}."]
    return [f"Found nowhere, 0 at every site: {listed(map(in_words, zero), most=8)}."] if zero else []


def faults_of(results: Results, metric: str) -> list[str]:
    """Return texts on signs that a run's training had no effect (nothing learned, equal weights), for a comparison.

    Args:
        results: results of a run.
        metric: name of the metric that is compared.
    """
    kinds = [{warned.kind for warned in record.warnings} for record in results.rounds]
    short = sum(SHORT in of_round for of_round in kinds)
    faults = [f"a step below {LEAST_STEP:g} of the mean change in {short} of {len(kinds)} rounds"] if short else []
    faults += ["the same weight for every site in every round"] if any(EQUAL in of_round for of_round in kinds) else []
    return [*faults, *(text[0].lower() + text[1:].rstrip(".") for text in nothing_learnt(results, metric))]
