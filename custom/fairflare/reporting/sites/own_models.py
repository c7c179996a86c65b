"""Advise each site whether to use its own fine-tuned model or the common one, and show the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from fairflare.base.checks import first_of
from fairflare.base.task import Metric
from fairflare.core.statistics.intervals import LEVEL, holm
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import MISSING, Table, interval, number

SHOULD, SHOULD_NOT, UNSURE, NO_STEP = "should use it", "should not", "cannot tell", "no step helped"
#: Sentences about the sites with the same advice.
WORDS = {
    SHOULD: "Own models: better than the common one at the own site, and to be used there: {}.",
    SHOULD_NOT: "Own models: worse than the common one at the own site, and not to be used: {}.",
    UNSURE: "Own models: the test cannot tell whether to use them: {}.",
    NO_STEP: "Own models: no step helped on the validation split, or it has fewer than 10 cases; the common one stays: "
    "{}.",
}


def personal(
    metric: Metric,
    told: Mapping[str, Mapping[str, Any]],
    common: Mapping[str, Mapping[str, float]],
    cases: Mapping[str, int | None],
    at_others: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return the gains of the sites' own fine-tuned models, as ``personal`` in ``results.json``.

    Args:
        metric: the primary metric.
        told: what each site reported of its fine-tuning, by field; a gain above 0 is for the better.
        common: the test metrics of the common model.
        cases: number of test cases of each site.
        at_others: primary metric of each site's own model at the other sites, by the site whose model it is.
    """
    gains = {site: stats["own_gain"] or [math.nan] * 7 for site, stats in sorted(told.items())}
    tested = {site: gain[5] for site, gain in gains.items() if math.isfinite(gain[5])}
    corrected = dict(zip(tested, holm([*tested.values()]).tolist(), strict=True))
    sign, sites = 1 if metric.higher_is_better else -1, {}
    for site, (before, own, gain, low, high, p, error) in gains.items():
        steps, p_holm = told[site]["tuned_steps"], corrected.get(site, math.nan)
        advice = verdict(steps, low, high, p_holm)
        sites[site] = {
            "steps": steps, "passes": told[site]["tuned_passes"], "common": before, "own": own,
            "validation": [told[site]["tuned_before"], told[site]["tuned_after"]],
            "gain": gain, "low": low, "high": high, "p": p, "p_holm": p_holm, "advice": advice,
            "enough": cases_needed(gain, error, cases.get(site)) if advice == UNSURE else None,
            "others": {
                other: sign * (value - common.get(other, {}).get(metric.name, math.nan))
                for other, value in at_others.get(site, {}).items()
            },
        }  # fmt: skip
    return {"metric": metric.name, "level": LEVEL, "sites": sites}


def verdict(steps: float | None, low: float, high: float, p: float) -> str:
    """Return the advice to a site, by the interval of the gain and its p-value after Holm's correction."""
    sure = p < 1 - LEVEL
    return first_of({NO_STEP: steps == 0, SHOULD: sure and low > 0, SHOULD_NOT: sure and high < 0, UNSURE: True})


def cases_needed(gain: float, error: float, cases: int | None) -> int | None:
    """Return how many test cases make such a gain significant, given its error with ``cases``; ``None``: not known."""
    if not cases or not gain or not math.isfinite(gain + error):
        return None
    return max(cases + 1, math.ceil(cases * (NormalDist().inv_cdf((1 + LEVEL) / 2) * error / gain) ** 2))


def advice_sentences(results: RunResults) -> dict[str, tuple[str, list[str]]]:
    """Return, for each advice that is given, a sentence that names the sites with their gains, and these sites.

    The advices are in the order of :data:`WORDS`.
    """
    groups: dict[str, dict[str, str]] = {}
    every = results.personal.get("sites", {})
    tests = sum(of["own"] is not None for of in every.values())
    for site, of in every.items():
        ends, tested = interval(of["low"], of["high"]), of["own"] is not None
        sure = "no interval" if ends == MISSING else f"95 % {ends}"
        more = f"; about {of['enough']} test cases would" if of["enough"] else ""
        if of["advice"] == UNSURE and ends != MISSING and (of["low"] > 0 or of["high"] < 0):
            more = f", which excludes 0, but not after the correction for {tests} sites{more}"
        groups.setdefault(of["advice"], {})[site] = (
            f"{site} ({number(of['gain'], sign='+')}, {sure}{more})" if tested else site
        )
    return {
        advice: (words.format(", ".join(groups[advice].values())), [*groups[advice]])
        for advice, words in WORDS.items() if advice in groups
    }  # fmt: skip


def personal_notes(results: RunResults) -> list[str]:
    """Return sentences on sites without an own model, and on models that were not tested at the other sites."""
    alone = [s for s, of in results.personal.get("sites", {}).items() if of["own"] is not None and not of["others"]]
    untested = f"Own models that the other sites did not test, as submit_model is not true at {', '.join(alone)}."
    return [
        *(f"No own model of {site}: {why}." for site, why in results.personal.get("left_out", {}).items()),
        *[untested] * bool(alone),
    ]


def personal_tables(results: RunResults) -> list[Table]:
    """Return tables of the own models beside the common one, and of their gains at every other site."""
    found = results.personal.get("sites", {})
    places = sorted({other for of in found.values() for other in of["others"]})
    heads = ["site", "steps", "common", "own", "gain", "low", "high", "advice", *(f"gain at {p}" for p in places)]
    rows = [
        [
            site, str(int(of["steps"] or 0)), *(of[head] for head in heads[2:8]),
            *(of["others"].get(place) for place in places),
        ]
        for site, of in found.items()
    ]  # fmt: skip
    caption = f"Models fine-tuned at each site ({results.personal.get('part')}): {results.personal.get('metric')}."
    return [Table("own_models", caption, heads, rows)] if rows else []
