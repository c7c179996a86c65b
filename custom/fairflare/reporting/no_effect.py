"""What a method did not do: steps that hardly move the model, weights that never differ, a metric that is 0 everywhere.

Pure functions of what a run writes; each gives what its reader is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fairflare.reporting.documents import Warned
from fairflare.reporting.layout import listed
from fairflare.reporting.values import Results, declared_direction, in_words, metrics_of, primary_of

LEAST_STEP = 1e-2  # of the sites' mean change
SHORT, EQUAL = "short step", "same weights"  # kinds of warnings
SAME = 1e-2  # how far, in parts of it, a weight may be from 1/K and count as the same


def short_step(step: float) -> list[Warned]:
    """Warns where the model went less than a hundredth of the way that the sites' changes have on average.

    Args:
        step: as a factor of the mean change, ``>= 0``.
    """
    if step >= LEAST_STEP:
        return []
    text = (
        f"a step of {step:.2g} of the sites' mean change: the model hardly moves; the method's page says which setting "
        "makes the step"
    )
    return [Warned("", SHORT, 1 - step, step, text)]  # of several rounds the shortest step is shown


def same_weights(rounds: Iterable[Mapping[str, Any]]) -> list[Warned]:
    """Warns where every site had the same weight in every round and layer, within a hundredth of it.

    Args:
        rounds: with ``site_weights`` and ``layers`` as the results have them; rounds of one site do not count.
    """
    number, largest = 0, 0.0
    for record in rounds:
        layers = record["layers"] or {}
        sets = [{site: of["weight"] for site, of in by.items()} for by in layers.values()]
        sets = sets or [record["site_weights"] or {}]
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


def zero_everywhere(test: Mapping[str, Mapping[str, Any]], metrics: Collection[str]) -> list[str]:
    """Gives those of ``metrics``, for which more is better, that are 0 at every site that has them.

    Args:
        test: ``{site: {metric: value}}``; ``None`` or NaN: the site has none.
    """
    found = {name: [values[name] for values in test.values() if values.get(name) is not None] for name in metrics}
    return [name for name, values in found.items() if values and all(value == 0 for value in values)]


def nothing_learnt(results: Results, metric: str | None = None) -> list[str]:
    """Say where a model finds nothing anywhere or calls every image the same; empty: neither.

    Args:
        results: as they are read.
        metric: looked at alone; default: all of the tables.
    """
    test = results.get("test") or {}
    if not test:
        return []
    names = [metric] if metric else metrics_of(results)
    zero = zero_everywhere(test, [name for name in names if declared_direction(results, name)])
    first = primary_of(results) if metric is None else metric
    if first in zero:
        return [f"Nothing was learnt: {in_words(first)} is 0 at every site."]
    recalls = {name: None for of in test.values() for name in of if name.startswith("recall_")}
    missed = zero_everywhere(test, recalls)
    told = [name.removeprefix("recall_") for name in recalls if name not in missed]
    if missed and len(told) == 1:
        return [f"Nothing was learnt: every test image at every site is called {told[0]}."]
    return [f"Found nowhere, 0 at every site: {listed(map(in_words, zero), most=8)}."] if zero else []


def faults_of(results: Results, metric: str) -> list[str]:
    """Say the same of a whole run, for a line in a comparison.

    Args:
        results: as they are read.
        metric: that is compared.
    """
    kinds = [{warned["kind"] for warned in record.get("warnings") or ()} for record in results["rounds"]]
    short = sum(SHORT in found for found in kinds)
    found = [f"a step below {LEAST_STEP:g} of the mean change in {short} of {len(kinds)} rounds"] if short else []
    found += ["the same weight for every site in every round"] if any(EQUAL in of_round for of_round in kinds) else []
    return [*found, *(text[0].lower() + text[1:].rstrip(".") for text in nothing_learnt(results, metric))]
