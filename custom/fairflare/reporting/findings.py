"""Decide what is said first of a run: an ordered list of findings, which console, page and ``--json`` print.

A finding says "may be chance" of a thing only if no interval of it that is shown excludes 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairflare.base.checks import first_of, true_texts
from fairflare.core.statistics.footing import ADJUSTED
from fairflare.core.statistics.intervals import FEW, LEVEL
from fairflare.reporting.documents import Inequality, RunResults
from fairflare.reporting.groups import attributes_of, gap_sentences, gaps_at, has_interval
from fairflare.reporting.layout import format_count, interval, join_parts, number, p_value
from fairflare.reporting.no_effect import find_undetected_parts, nothing_learnt
from fairflare.reporting.notes import attendance, missing_values, private_notes
from fairflare.reporting.sites.clinical import clinical_words
from fairflare.reporting.sites.own_models import SHOULD, SHOULD_NOT, advice_sentences
from fairflare.reporting.standing import find_test, more_unequal, note_footing
from fairflare.reporting.values import (
    are_compared,
    collect_by_site,
    declared_direction,
    find_suppressed,
    metrics_of,
    missing_reason,
    rests_on,
    site_columns,
    spell_metric,
    summary_of,
)

#: Kinds of findings, in the order in which they are said.
ENDED, NOTHING, NOWHERE, FEWER, BEYOND, CHANCE, NEXT = ORDER = (
    "no end", "nothing learnt", "found nowhere", "rests on fewer", "beyond chance", "may be chance", "next",
)  # fmt: skip
SAME = 1e-12  # largest distance that is rounding


@dataclass(frozen=True)
class Finding:
    """Store a sentence about a run or a comparison.

    Attributes:
        kind: one of :data:`ORDER`.
        text: the finding in whole sentences.
        figures: figures of the finding, unrounded, for programs.
    """

    kind: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def order_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings sorted by kind, in the order of :data:`ORDER`; findings of one kind keep their order."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.kind))


def run_findings(results: RunResults, metric: str | None = None) -> list[Finding]:
    """Return what is said first of a run, in the order of saying.

    Args:
        results: results of a run.
        metric: name of the metric that is spoken of; default: the first of the tables. Groups of people, own models and
            clinical figures are spoken of with the primary metric only.
    """
    findings = _status(results)
    if site_columns(results):
        chosen = metric or metrics_of(results)[0]
        primary, nothing = chosen == results.info.primary_metric, nothing_learnt(results, chosen)
        parts = find_undetected_parts(results) if primary and not nothing else {}
        missed = f"Found nowhere, 0 at every site that has it: {join_parts(parts.values())}."
        findings += [
            *(Finding(NOTHING, text, {"metric": chosen}) for text in nothing),
            *([Finding(NOWHERE, missed, {"metrics": [*parts]})] if parts else []),
            *(Finding(FEWER, text) for text in missing_parts(results, chosen, primary)),
            *(one for one in site_findings(results, chosen) if one.kind != CHANCE or not nothing),
            *(_people(results) if primary else []),
        ]
    return order_findings([*findings, *_next_steps(results, findings)])


def _status(results: RunResults) -> list[Finding]:
    """Return a finding if a run did not complete, or has no test; else an empty list."""
    rounds = format_count(len(results.rounds), "round")
    text = " ".join(true_texts({
        f"The run FAILED after {rounds}: {(results.reason or 'no reason is recorded').rstrip('.')}.": (
            results.status == "failed"
        ),
        f"The run goes on, or was cut off, after {rounds}: nothing here is final.": results.status == "running",
        "There are no test results, so nothing is said of fairness.": not site_columns(results),
    }))  # fmt: skip
    return [Finding(ENDED, text, {"status": results.status, "rounds": len(results.rounds)})] if text else []


def missing_parts(results: RunResults, metric: str, primary: bool, sites: Collection[str] = ()) -> list[str]:
    """Return sentences on sites, rounds and labels that a run lacks, and on noise that privacy adds.

    Args:
        results: results of a run.
        metric: name of the metric.
        primary: whether it is the primary metric.
        sites: names of the sites of all runs that are compared with this one.
    """
    asked, done = results.info.num_rounds or 0, len(results.rounds)
    return [
        *attendance(results),
        *([f"The run has {done} of {asked} rounds."] if results.status == "completed" and 0 < done < asked else []),
        *missing_values(results, [metric], sites=sites),
        *(note_footing(results)[:1] if primary else []),
        *private_notes(results),
    ]


# ------------------------------------------------------------------------------------------------ sites


def site_findings(results: RunResults, metric: str) -> list[Finding]:
    """Return findings on sites behind and ahead, then on the last site and whether chance explains its place."""
    test, name = find_test(results, metric), spell_metric(metric) + rests_on(results, metric)
    if not test:
        return _find_untested(results, metric, name)
    together = f"Together the sites differ in {name} by more than chance explains (p {p_value(test.p_value)})."
    findings = [
        *(
            Finding(
                BEYOND,
                f"In {name}, {join_parts(place_in_words(test, site) for site in sites)} "
                f"{'are' if sites[1:] else 'is'} {side} by more than chance explains.",
                {"metric": metric, side: {site: _figures(test, site) for site in sites}},
            )
            for side, sites in {"behind": test.behind, "ahead": test.ahead}.items() if sites
        ),
        *([Finding(BEYOND, together, {"metric": metric, "p_value": test.p_value})] if more_unequal(test) else []),
        Finding(
            CHANCE, _last_site(test, name, lower_is_better=declared_direction(results, metric) is False),
            {"metric": metric, "site": test.gap_site, **_figures(test, test.gap_site)},
        ),
    ]  # fmt: skip
    return [one for one in findings if one.text]


def _last_site(test: Inequality, name: str, *, lower_is_better: bool) -> str:
    """Return sentences on the site furthest behind and on that with the worst value; empty if they are shown behind."""
    site = test.sites[test.gap_site]
    values = {site: standing.value for site, standing in test.sites.items() if standing.expected is not None}
    worst = (max if lower_is_better else min)(values, key=values.__getitem__)
    side, shown = "below" if site.value < site.expected else "above", test.gap_site in test.behind
    inside = site.low is None or site.low <= site.expected <= site.high
    usual = f": of equally good sites the last is about {number(test.chance_gap)} {side} it"
    return " ".join(true_texts({
        f"No site can be told from the others in {name}: each has what is expected if all were equally good.": (
            test.gap <= SAME
        ),
        f"No{' more' * bool(test.behind)} site is shown to be behind in {name}. Furthest {side} is "
        f"{place_in_words(test, test.gap_site)}.": test.gap > SAME and not shown,
        f"Its interval {interval(site.low, site.high)} leaves that out, which the test of all sites does not show.": (
            not inside and not shown and not more_unequal(test)
        ),
        # Sites of few cases are farther off by chance than the last one, so that the usual distance may be the smaller.
        f"That may be chance{usual if test.chance_gap >= test.gap else ''}.": (
            inside and test.gap > SAME and not shown and not more_unequal(test)
        ),
        f"The worst value is that of {place_in_words(test, worst)}.": (
            test.gap > SAME and worst not in (test.gap_site, *test.behind) and values[worst] != site.value
        ),
    }))  # fmt: skip


def place_in_words(test: Inequality, site: str) -> str:
    """Return a tested site with its value, its distance from what is expected of equally good sites, and p."""
    value, expected = test.sites[site].value, test.sites[site].expected
    return (
        f"{site} ({number(value)}; {number(abs(value - expected))} {'below' if value < expected else 'above'} the "
        f"{number(expected)} expected if all sites were equally good; p {p_value(test.sites[site].p_value)})"
    )


def _figures(test: Inequality, site: str) -> dict[str, Any]:
    return {key: getattr(test.sites[site], key) for key in ("value", "expected", "low", "high", "p_value")}


def _find_untested(results: RunResults, metric: str, name: str) -> list[Finding]:
    """Return a finding on the site with the worst value where no test says whether it is behind."""
    if declared_direction(results, metric) is None or not collect_by_site(results, metric):
        return []
    summary, why = summary_of(results, metric), _why_untested(results, metric)
    return [Finding(
        CHANCE,
        first_of({
            f"No site has a value of {name}: {why}.": not summary.num_sites,
            f"A single site has a value of {name}, so that none is called the worst.": summary.num_sites == 1,
            f"No structure links all sites in {name}, so that none is called the worst.": (
                not math.isfinite(summary.range)
            ),
            f"All sites have the same {name}, {number(summary.mean)}.": summary.range == 0,
            f"In {name}, {summary.worst_site} has the worst value, {number(summary.worst)}; whether chance explains "
            f"that is not known: {why}.": True,
        }),
        {"metric": metric, "site": summary.worst_site, "value": summary.worst},
    )]  # fmt: skip


def _why_untested(results: RunResults, metric: str) -> str:
    """Return the reason why no test says which site is behind in a metric."""
    info, inequality = results.info, results.inequality
    home = [f"{site} ({missing_reason(results, metric, site)})" for site in sorted(find_suppressed(results, metric))]
    return first_of({
        f"only {spell_metric(info.primary_metric)} is tested": metric != info.primary_metric,
        f"{spell_metric(metric)} stays at {join_parts(home)}": not inequality and home,
        "under differential privacy nothing is sent that is not counted": not inequality and info.privacy,
        "the task does not say how its metric is made of images (Metric.mean_of_images)": not inequality,
        "how sure an adjusted figure is is not known": (
            results.footing.how == ADJUSTED and are_compared(results, metric)
        ),
        f"fewer than two sites have what a test needs: {FEW} test cases, and figures that scatter": True,
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------ people, models


def _people(results: RunResults) -> Iterator[Finding]:
    """Yield findings on groups of people, on the sites' own models, and on the AUC of a class between sites."""
    for attribute in attributes_of(results):
        beyond, text = gap_sentences(results, attribute)
        gaps = gaps_at(results, attribute)[""]
        yield Finding(BEYOND if beyond else CHANCE, text, {
            "attribute": attribute, "gaps": {name: cell.value for name, cell in gaps.items()},
            "intervals": {name: (cell.low, cell.high) for name, cell in gaps.items() if has_interval(name)},
        })  # fmt: skip
    for advice, (text, sites) in advice_sentences(results).items():
        yield Finding(
            BEYOND if advice in (SHOULD, SHOULD_NOT) else CHANCE, text,
            {"advice": advice, "sites": {site: results.personal["sites"][site] for site in sites}},
        )  # fmt: skip
    text, p = clinical_words(results)
    if text:
        yield Finding(BEYOND if p <= 1 - LEVEL else CHANCE, text, {"metric": "auc", "p_value": p})


# ------------------------------------------------------------------------------------------------ what to do


def next_steps(steps: Mapping[str, object]) -> list[Finding]:
    """Return findings on what to do next, of those ``steps`` whose condition is true."""
    return [Finding(NEXT, f"Next: {step}.") for step in true_texts(steps)]


def _next_steps(results: RunResults, findings: Sequence[Finding]) -> list[Finding]:
    """Return what to do next, by what is said of a run."""
    kinds = {one.kind for one in findings}
    beyond = {key: figures for one in findings if one.kind == BEYOND for key, figures in one.figures.items()}
    own = next((one.figures["sites"] for one in findings if one.figures.get("advice") == SHOULD), ())
    return next_steps({
        "mend what the reason names, and run it again": results.status == "failed",
        "wait for its end or, if it was cut off, run it again": results.status == "running",
        "train longer or with another learning rate, and look for wrong labels (fairflare check-data), before anything "
        "is compared": NOTHING in kinds,
        "see whether all sites label alike what was found nowhere (fairflare check-data), and train longer; averages "
        "do not show that it is missing": NOWHERE in kinds,
        f"use the own model at {join_parts(own)}, and the common one elsewhere": own,
        "see over several seeds whether another method has smaller gaps between these groups (fairflare compare, with "
        "the same groups)": "gaps" in beyond,
        f"see over several seeds whether another method serves {join_parts(beyond.get('behind', ()))} "
        "better (docs/which_method.md, fairflare compare)": "behind" in beyond,
        "this is one run, which cannot say how much of it is luck of the seed (fairflare compare --seeds 3)": (
            results.status == "completed" and results.info.num_rounds != 0
        ),
    })  # fmt: skip
