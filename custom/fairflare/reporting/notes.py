"""Write notes on a run's figures: the models that they describe, missing values, sites left out, warnings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from fairflare.base.checks import group_by_key, true_texts
from fairflare.core.cells import BEST, GLOBAL, LAST, TEST
from fairflare.reporting.documents import RoundRecord, RunResults
from fairflare.reporting.layout import format_count, join_parts, number, ranges
from fairflare.reporting.sites.own_models import personal_notes
from fairflare.reporting.standing import standing_notes
from fairflare.reporting.values import (
    collect_by_site,
    declared_direction,
    metrics_of,
    missing_reason,
    site_columns,
    sites_of,
    spell_metric,
)

SYNTHETIC_NOTE = "The data are SYNTHETIC (generated images): these figures say nothing about patients."
MAX_HEADING = 32
MAX_NAMED = 8  # largest number of names in a sentence
NOT_VALIDATED = "No model was compared, as no site told a validation figure; the last one is used."
#: Words for the measured models, by ``measured`` in a run's ``info``.
MEASURED = {"personal": "each site's own model", "common": "the common model"}


def run_notes(results: RunResults, metric: str | None = None) -> list[str]:
    """Return the sentences below a run's table, which add details to what is said first, in the order of printing.

    Args:
        results: results of a run.
        metric: name of the table's only metric; ``None`` if the table has all metrics that the task shows.
    """
    info = results.info
    tested = []
    if site_columns(results):
        tested = _note_models(results, metrics_of(results) if metric is None else [metric])
        if metric in (None, info.primary_metric):
            tested += [*standing_notes(results), *channel_notes(results), *personal_notes(results)]
    absent = _note_left_out(results) or ["No site was left out of a round."] * bool(
        results.rounds and not attendance(results)
    )
    warned = [
        f"  {site or 'every site'} in round{'s' * (len(numbers) > 1)} {ranges(numbers)}: {text}"
        for site, _, numbers, text in worst_warnings(results.rounds)
    ]
    return [
        *([f"{info.sums}."] if info.sums else []),
        *note_missing_parts(results),
        *(f"{text}." for text in info.in_vain),
        *tested,
        *absent,
        *(f"Resumed: {text}." for text in info.resumed_with),
        *([f"Metrics by class stay at home at: {', '.join(info.classes_at_home)}."] if info.classes_at_home else []),
        *(["Warnings (worst round):", *warned] if warned else []),
        *([SYNTHETIC_NOTE] if info.synthetic else []),
    ]


def channel_notes(results: RunResults) -> list[str]:
    """Return sentences on sites whose images lack a channel: means by set of channels, and who is behind so."""
    info, values = results.info, collect_by_site(results, results.info.primary_metric)
    by_set = group_by_key(
        (tuple(c for c, having in info.channels.items() if site in having), site) for site in sorted(values)
    )
    means = "; ".join(
        f"{', '.join(names) or 'none'}: {number(statistics.fmean(values[site] for site in sites))} ({', '.join(sites)})"
        for names, sites in by_set.items()
    )
    fewer = [site for names, sites in by_set.items() if len(names) < len(info.channels) for site in sites]
    behind = [site for site in fewer if site in results.inequality.behind]
    return true_texts(
        {
            f"Not all sites' images have all channels, and each site is compared on what it has. Mean "
            f"{spell_metric(info.primary_metric)} by channels: {means}.": fewer,
            f"Behind with fewer channels than others have: {', '.join(behind)}.": behind,
        }
    )


def note_missing_parts(results: RunResults) -> list[str]:
    """Return sentences on a run that went without the method's own loss, or in some rounds without its own weights.

    A resumed run may have rounds of both kinds.
    """
    by_text = group_by_key(
        (str(text), record.current_round) for record in results.rounds if (text := record.details.get("without"))
    )
    return [
        *([f"{results.info.without}."] if results.info.without else []),
        *(f"Round{'s' * (len(n) > 1)} {ranges(n)}: {text}." for text, n in by_text.items()),
    ]


def private_notes(results: RunResults) -> list[str]:
    """Return a sentence on the sites with differential privacy: target epsilon, spent epsilon, and what it covers."""
    sites = [
        f"{site} (epsilon {number(line.get('epsilon'))} of at most {line['target']:g}, delta {line['delta']:.3g}, "
        f"unit {line['unit']}; {line['mechanism']}; covers {line['covers']})"
        for site, line in sorted(results.info.privacy.items())
    ]
    open_ = sorted({site for record in results.rounds for site in record.train} - {*results.info.privacy})
    clear = f" Updates, metrics and reports of {', '.join(open_)} are in the clear." if open_ else ""
    return [f"Differential privacy at {', '.join(sites)}.{clear}"] if sites else []


def attendance(results: RunResults) -> list[str]:
    """Return sentences on sites that missed rounds or never connected; empty if all sites were in every round."""
    expected, rounds = results.info.sites, results.rounds
    connected = expected if results.info.connected is None else results.info.connected
    missing = [site for site in expected if site not in connected]
    counts = {site: sum(site in record.accepted for record in rounds) for site in expected}
    return true_texts({
        f"Expected, and not connected: {', '.join(missing)} ({len(missing)} of {len(expected)}).": missing,
        f"Took part in rounds: {', '.join(f'{site} {n}/{len(rounds)}' for site, n in counts.items())}.": any(
            count < len(rounds) for count in counts.values()
        ),
    })  # fmt: skip


def worst_warnings(rounds: Iterable[RoundRecord]) -> list[tuple[str, str, list[int], str]]:
    """Return a tuple for each site and kind of warning: site, kind, rounds, and the text of the worst round."""
    by_kind = group_by_key(
        (
            (warned.site, warned.kind),
            (math.inf if warned.value is None else abs(warned.value), record.current_round, warned.text),
        )
        for record in rounds
        for warned in record.warnings
    )
    return [
        (*key, [number for _, number, _ in warned], max(warned, key=lambda one: one[0])[2])
        for key, warned in sorted(by_kind.items(), key=lambda one: one[0])
    ]


def other_models(results: RunResults) -> list[str]:
    """Return the further models of the table: the best (if it is not the last one), and the last ones on average."""
    return list(dict.fromkeys(c.model for c in results.cells if c.model != LAST and c.split == TEST))


def _note_left_out(results: RunResults) -> list[str]:
    """Return lines on sites that were left out, by site, phase and reason; lines on rounds come first."""
    left_out = group_by_key(
        ((left.site, left.phase, left.reason), record.current_round)
        for record in results.rounds
        for left in record.left_out
    )
    done = len(results.rounds)
    whens = {**dict.fromkeys(("validate", "groups"), "after the last round"), "check": f"before round {done}"}
    lines = [
        *(
            f"  {site} in round{'' if len(numbers) == 1 else 's'} {ranges(numbers)}, {phase}: {reason}"
            for (site, phase, reason), numbers in sorted(left_out.items())
        ),
        *(
            f"  {left.site} {whens.get(left.phase, f'in round {done}')}, {left.phase}: {left.reason}"
            for left in results.left_out
        ),
    ]
    return ["Left out:", *lines] if lines else []


def _note_models(results: RunResults, metrics: Sequence[str]) -> list[str]:
    """Return sentences on a table's models, on its metrics' directions, and on the sites that its totals are over."""
    lower, unknown = (
        [name[:MAX_HEADING] for name in metrics if declared_direction(results, name) is known]
        for known in (False, None)
    )
    best, last, every = results.best, results.last_rounds, len(lower) == len(metrics)
    untested = " It was not tested: what the sites had of their own then is not kept."
    value = f" {number(best.value)}, {format_count(len(best.sites), 'site')}"
    return [
        *true_texts({
            "Higher is better.": not lower,
            f"Lower is better: {join_parts(lower, most=MAX_NAMED)}.": lower and every,
            f"Higher is better, except for {join_parts(lower, most=MAX_NAMED)}.": lower and not every,
            "Not declared whether more is better, so no site is the worst: "
            f"{join_parts(unknown, most=MAX_NAMED)}.": unknown,
            NOT_VALIDATED: best and best.value is None,
            "The best model by the validation splits is the last one.": best.value is not None and best.is_last,
            f"best: model of round {best.round}, by the validation splits ({best.by}{value})."
            f"{untested if BEST not in results.columns else ''}": best.value is not None and not best.is_last,
        }),
        *([f"Measured: {MEASURED[results.info.measured]}."] if results.info.measured in MEASURED else []),
        *global_notes(results),
        *_describe_unlabelled(results),
        *([f"last {len(last)}: mean over the models of rounds {ranges(last)}."] if last else []),
        *missing_values(results, metrics[1:]),  # of the first metric it is said first
        *(line for name in other_models(results) for line in missing_values(results, metrics[:1], f", {name}", name)),
    ]  # fmt: skip


def _describe_unlabelled(results: RunResults) -> list[str]:
    """Return a sentence on the sites that learned from unlabelled images, and on the share of used pseudo-labels."""
    sites = [
        f"{site} ({figures['kept']:.0%} of its pseudo-labels counted"
        f"{', alone: it has no label' if figures.get('without_labels') else ''})"
        for site, figures in sorted(results.rounds[-1].train.items() if results.rounds else ())
        if figures.get("kept") is not None
    ]
    return [f"Unlabelled images were learned from, in the last round by {', '.join(sites)}."] if sites else []


def missing_values(
    results: RunResults, metrics: Sequence[str], heading: str = "", model: str = LAST, sites: Iterable[str] = ()
) -> list[str]:
    """Return a sentence for each set of sites without a value, with the metrics that these sites lack and the reasons.

    Args:
        results: results of a run.
        metrics: names of the metrics.
        heading: text after a metric's name.
        model: name of the model in the cells.
        sites: names of sites that other runs have, and that this run lacks if it does not have them, too.
    """
    lacking = group_by_key(
        (
            tuple(
                f"{site} ({missing_reason(results, name, site, model)})"
                for site, value in (dict.fromkeys(sites, math.nan) | collect_by_site(results, name, model)).items()
                if math.isnan(value)
            ),
            spell_metric(name)[:MAX_HEADING] + heading,
        )
        for name in metrics
    )
    count = len({*sites, *sites_of(results)})
    return [
        f"Average and spread of {join_parts(names, most=MAX_NAMED)} are over {count - len(lost)} of "
        f"{format_count(count, 'site')}, without {', '.join(lost)}."
        for lost, names in lacking.items()
        if lost
    ]


def global_notes(results: RunResults) -> list[str]:
    """Return a sentence on the lists of a run's global test, or on why the test has no figures."""
    tested = results.global_test
    if not tested or not any(cell.split == GLOBAL for cell in results.cells):
        return [f"No global test: {tested.reason}."] if tested else []
    measured_at, sites = [one.measured_at for one in tested.lists], tested.lists[0].sites
    how = (
        f"of {len(measured_at)} lists, pooled: {', '.join(measured_at)}"
        if len(measured_at) > 1
        else f"that {', '.join(sites)} {'have' if len(sites) > 1 else 'has'}, measured once"
    )
    counts = [one.images for one in tested.lists]
    images = "images" if None in counts else f"{sum(counts):.0f} images"
    return [f"Global test: the common model on {images} {how}{f'; without: {tested.reason}' * bool(tested.reason)}."]
