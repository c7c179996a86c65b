"""Decide what is said first of a comparison, and write the notes below its rows."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fairflare.base.checks import first_of, group_by_key, true_texts
from fairflare.core.statistics.intervals import FEW
from fairflare.reporting.documents import Inequality, RunResults
from fairflare.reporting.findings import (
    BEYOND,
    CHANCE,
    FEWER,
    NOTHING,
    NOWHERE,
    Finding,
    missing_parts,
    next_steps,
    order_findings,
    site_findings,
)
from fairflare.reporting.groups import EQUITY, gap_label
from fairflare.reporting.layout import MISSING, ROUNDING, format_count, interval, join_parts, number, printable, spread
from fairflare.reporting.no_effect import EQUAL, SHORT, find_undetected_parts, nothing_learnt
from fairflare.reporting.notes import (
    MEASURED,
    SYNTHETIC_NOTE,
    global_notes,
    note_missing_parts,
)
from fairflare.reporting.standing import find_test, more_unequal, sources
from fairflare.reporting.values import guess_of, label_of, rests_on, spell_metric
from fairflare_lab.compare.differences import BETTER, MEASURES, NOT_KNOWN, ONE_SEED, OTHER_SITES, WORSE, Difference
from fairflare_lab.compare.group_gaps import average_seeds, join_labels, judge_gaps
from fairflare_lab.compare.rows import Row, setting_difference, settings_of
from fairflare_lab.compare.rows import name_run as label_and_start

TASK_SETTINGS, TASK_FILE, COMPARED = "the task's settings", "the task's file", "the structures that are compared"
MOST = 200  # largest number of characters of a line


def notes_of(complete: Sequence[RunResults], metric: str, rows: Sequence[Row]) -> list[str]:
    """Return notes below a comparison's rows, which add details to what is said first.

    Args:
        complete: the runs that completed.
        metric: as in :func:`rows_of`.
        rows: the rows that :func:`rows_of` returned.
    """
    own = [row.label for row in rows if row.measured == "personal"]
    others = "" if len(own) == len(rows) else "; of the others the common model"
    guess = number(guess_of(complete[0], metric))
    return [
        f"Figures are {spell_metric(metric)} on the test splits; ± is the population standard deviation over runs"
        f"{'' if guess == MISSING else f'; guessing gives {guess}'}.",
        *dict.fromkeys(note for run in complete for note in (*global_notes(run), *note_missing_parts(run))),
        *(f"{row.label}: {row.settings}" for row in rows if row.settings),
        *_note_chance(rows, metric),
        *([f"Measured: {MEASURED['personal']} of {', '.join(own)}{others}."] if own else []),
        *(_list_settings(complete) if TASK_SETTINGS in _differing_conditions(complete) else []),
        *_faults(complete),
        *([SYNTHETIC_NOTE] if any(run.info.synthetic for run in complete) else []),
    ]


# ------------------------------------------------------------------------------------------------ what is said first


def comparison_findings(
    runs: Sequence[RunResults],
    complete: Sequence[RunResults],
    rows: Sequence[Row],
    metric: str,
    reference: str,
    differences: Sequence[Difference],
) -> list[Finding]:
    """Return what is said first of a comparison, in the order of :data:`fairflare.reporting.findings.ORDER`.

    Args:
        runs: all runs that were given.
        complete: the runs that completed.
        rows: the rows that :func:`rows_of` returned.
        metric: name of the compared metric.
        reference: label of the row that other rows are compared with.
        differences: differences of the other rows to the reference.
    """
    name, primary = spell_metric(metric) + rests_on(complete[0], metric), metric == complete[0].info.primary_metric
    row = next(row for row in rows if row.label == reference)
    sites = {site for other in rows for values in other.values for site in values}
    everywhere = _places(rows, lambda run: [""])[""]
    parts = _places(rows, lambda run: missing_parts(run, metric, primary, sites))
    findings = [
        *_collect_texts(
            rows, NOTHING, "Nothing was learnt",
            lambda run: [text.partition(": ")[2].rstrip(".") for text in nothing_learnt(run, metric)],
        ),
        *_collect_texts(
            rows, NOWHERE, "Found nowhere, 0 at every site that has it",
            lambda run: find_undetected_parts(run).values() if primary and not nothing_learnt(run, metric) else (),
        ),
        *(Finding(FEWER, text) for text in _missing_runs(runs, complete, rows, reference)),
        *(Finding(FEWER, t if place == everywhere else f"In {place}: {t}") for t, place in parts.items()),
        *_verdicts(differences, reference),
        *_collect_texts(
            rows, BEYOND, f"Beyond what chance explains in {name}", lambda run: _apart(find_test(run, metric))
        ),
        *_people({row.label: row.runs for row in rows}, reference),
        *_last_site(row, metric),
    ]  # fmt: skip
    kinds, totals = {one.kind for one in findings}, [d for d in differences if d.measure in MEASURES]
    seeds, sparse = (
        max((len(d.values) for d in totals), default=0),
        sorted({site for d in totals if d.verdict == NOT_KNOWN for site in d.sparse_sites}),
    )
    steps = next_steps({
        "train the rows that learnt nothing until they learn, before the methods are compared": NOTHING in kinds,
        "see whether all sites label alike what was found nowhere (fairflare check-data), and train longer": (
            NOWHERE in kinds
        ),
        "look in the table by site at what a method that is fairer costs each site, before it is chosen": any(
            d.measure == "std" and d.verdict == BETTER for d in totals
        ),
        f"more test cases: a verdict takes {FEW} at each site, and {join_parts(sparse)} have fewer": sparse != [],
        f"more seeds (fairflare compare --seeds {max(5, 2 * seeds)}) or more test cases show smaller differences": (
            not sparse and any(d.verdict not in (BETTER, WORSE, OTHER_SITES) for d in totals)
        ),
    })  # fmt: skip
    return order_findings([*findings, *steps])


def _places(rows: Sequence[Row], texts_of: Callable[[RunResults], Iterable[str]]) -> dict[str, str]:
    """Return texts about runs, and in how many runs of which rows each holds: ``2 of 3 runs of fed_avg``."""
    counts = {row.label: Counter(text for run in row.runs for text in texts_of(run)) for row in rows}
    return {
        text: join_parts(
            f"{counts[row.label][text]} of {format_count(len(row.runs), 'run')} of {row.label}"
            for row in rows if counts[row.label][text]
        )
        for text in dict.fromkeys(text for count in counts.values() for text in count)
    }  # fmt: skip


def _collect_texts(
    rows: Sequence[Row], kind: str, head: str, texts_of: Callable[[RunResults], Iterable[str]]
) -> list[Finding]:
    """Return a finding with the texts that hold of some runs, those of the same runs together; none for no text."""
    texts = group_by_key((place, text) for text, place in _places(rows, texts_of).items())
    places = join_parts((f"{join_parts(of_place)} (in {place})" for place, of_place in texts.items()), "; ")
    return [Finding(kind, f"{head}: {places}.", {"runs": texts})] if texts else []


def _apart(test: Inequality) -> list[str]:
    """Return words on the sites that a run's test shows behind or ahead, or that they differ as a whole."""
    together = ["the sites differ as a whole"] * bool(test and more_unequal(test))
    return [f"{site} is {which}" for which in ("behind", "ahead") for site in getattr(test, which)] + together


def _missing_runs(
    runs: Sequence[RunResults],
    complete: Sequence[RunResults],
    rows: Sequence[Row],
    reference: str,
) -> list[str]:
    """Return sentences on runs that are missing, or that cannot be compared."""
    unfinished = [run for run in runs if run.status != "completed"]
    repeats, differing = len(runs) - len(unfinished) - len(complete), _differing_conditions(complete)
    why = join_parts(
        (f"{label_and_start(run)}: {printable(run.reason or run.status, MOST)}" for run in unfinished), "; "
    )
    seeds = {row.label: {run.info.config.get("seed") for run in row.runs} - {None} for row in rows}
    sites = {
        row.label: {site for site in row.values[0] if math.isfinite(row.summarise_site(site).mean)} for row in rows
    }
    at_other_seeds = [label for label, own in seeds.items() if label != reference and not own & seeds[reference]]
    at_other_sites = [label for label, own in sites.items() if label != reference and not own & sites[reference]]
    return true_texts({
        f"NOT COMPARABLE as they stand: the runs differ in {', '.join(differing)}.": differing,
        f"{len(unfinished)} of {len(runs)} runs did not complete and are left out: {why}.": unfinished,
        f"{repeats} of {len(runs)} runs stand there twice and count once.": repeats,
        f"No seed in common with {reference}, so not compared: {join_labels(at_other_seeds)}.": at_other_seeds,
        f"No site in common with {reference}, so not compared: {join_labels(at_other_sites)}.": at_other_sites,
    })  # fmt: skip


def _verdicts(differences: Sequence[Difference], reference: str) -> Iterator[Finding]:
    """Yield findings on methods that are fairer, better or worse than the reference, or that none is."""
    totals = [d for d in differences if d.measure in MEASURES]
    lost = {d.label for d in totals if d.measure != "std" and d.verdict == WORSE}
    fairer = [d for d in totals if d.measure == "std" and d.verdict == BETTER]
    excluded = [d for d in totals if d.verdict not in (BETTER, WORSE) and (d.low > ROUNDING or d.high < -ROUNDING)]
    every: dict[str, tuple[str, list[Difference]]] = {
        f"Fairer than {reference} on these data": (BEYOND, [d for d in fairer if d.label not in lost]),
        f"With a smaller spread than {reference}, but a worse average or worst site": (
            BEYOND, [d for d in fairer if d.label in lost],
        ),
        f"Better than {reference}, beyond noise": (
            BEYOND, [d for d in differences if d.verdict == BETTER and d not in fairer],
        ),
        f"Worse than {reference}, beyond noise": (BEYOND, [d for d in differences if d.verdict == WORSE]),
        f"The interval of a difference to {reference} excludes 0, but that is not shown (the table says why)": (
            CHANCE, excluded,
        ),
    }  # fmt: skip
    for head, (kind, chosen) in every.items():
        if chosen:
            yield Finding(kind, f"{head}: {_describe_differences(chosen)}.", {
                "differences": [{"label": d.label, "measure": d.measure, "mean": d.mean} for d in chosen],
            })  # fmt: skip
    if totals and not fairer:
        unknown = f"Whether a method is fairer than {reference} cannot be said of these runs"
        text = first_of({
            f"{unknown}: the rows have different sites.": all(d.verdict == OTHER_SITES for d in totals),
            f"{unknown}: there is one seed only, so that nothing can be said of noise.": all(
                d.verdict == ONE_SEED for d in totals
            ),
            f"{unknown}.": not any(math.isfinite(d.low) for d in totals if d.measure == "std"),
            f"No method was shown to be fairer than {reference} on these data.": True,
        })  # fmt: skip
        yield Finding(CHANCE, text, {"reference": reference})


def _describe_differences(differences: Iterable[Difference]) -> str:
    return join_parts(f"{d.label} ({d.measure} {interval(d.low, d.high, d.mean)})" for d in differences)


def _people(rows: Mapping[str, Sequence[RunResults]], reference: str) -> Iterator[Finding]:
    """Yield findings on gaps between groups of people over the seeds, and on methods with smaller or larger ones."""
    values, differ = judge_gaps(rows, reference)
    for attribute in dict.fromkeys(key[1] for key in values):
        intervals = {key: average_seeds([*by_seed.values()]) for key, by_seed in values.items()
                     if key[1] == attribute and not key[2].startswith(EQUITY)}  # fmt: skip
        beyond = [
            f"{gap_label(key[2])} {number(spread([one.value for one in values[key].values()]).mean)} {interval(*ends)} "
            f"with {key[0]}"
            for key, ends in intervals.items() if ends[0] > 0
        ]  # fmt: skip
        text = first_of({
            f"The groups of {attribute} differ, with 95 % intervals over cases and seeds that exclude 0: "
            f"{join_parts(beyond, '; ')}.": beyond,
            f"No gap between groups of {attribute} has an interval over cases and seeds that excludes 0.": any(
                math.isfinite(low) for low, _ in intervals.values()
            ),
        })  # fmt: skip
        if text:
            yield Finding(BEYOND if beyond else CHANCE, text, {
                "attribute": attribute,
                "gaps": [{"label": key[0], "gap": key[2], "interval": ends} for key, ends in intervals.items()],
            })  # fmt: skip
    for verdict in (BETTER, WORSE):
        if chosen := [d for d in differ.values() if d.verdict == verdict]:
            yield Finding(
                BEYOND,
                f"Between groups of people {verdict} than {reference}, beyond noise: {_describe_differences(chosen)}.",
                {"verdict": verdict, "labels": [d.label for d in chosen]},
            )


def _last_site(row: Row, metric: str) -> list[Finding]:
    """Return what the first of those runs of the reference that agree on the last site says of it."""
    learnt = [run for run in row.runs if not nothing_learnt(run, metric)]
    last = [one for run in learnt for one in site_findings(run, metric) if one.kind == CHANCE]
    sites = Counter(one.figures["site"] for one in last).most_common(1)
    return [
        Finding(CHANCE, f"In {alike} of {row.label}, here the first: {first.text}", first.figures)
        for site, count in sites
        for first in [next(one for one in last if one.figures["site"] == site)]
        for alike in [f"{count} of {format_count(len(row.runs), 'run')}"]
    ]


# ------------------------------------------------------------------------------------------------ notes


def _note_chance(rows: Sequence[Row], metric: str) -> list[str]:
    """Return a note with each row's spread that equally good sites would have, and what it comes from."""
    tests = {row.label: [test for run in row.runs if (test := find_test(run, metric))] for row in rows}
    spreads = [
        f"{label} {number(statistics.fmean(test.chance_std for test in known))} by {sources(known[0])}"
        for label, known in tests.items() if known
    ]  # fmt: skip
    return [f"Standard deviation between equally good sites: {'; '.join(spreads)}."] if spreads else []


def _faults(runs: Sequence[RunResults]) -> list[str]:
    """Return a line for each sign that a row's method had no effect, with the number of its runs that show the sign."""
    of_row = Counter(map(label_of, runs))
    kinds = ((label_of(run), {w.kind for record in run.rounds for w in record.warnings}) for run in runs)
    found = Counter((label, kind) for label, of_run in kinds for kind in (SHORT, EQUAL) if kind in of_run)
    return [f"{label}: {kind} (in {n} of its {of_row[label]} runs)." for (label, kind), n in found.items()]


def _list_settings(runs: Sequence[RunResults]) -> list[str]:
    """Return a line for each row, with those of its task's settings in which rows differ."""
    rows = group_by_key((label_of(run), run) for run in runs)
    return [printable(f"  {label}: {setting_difference(own[0], runs, 'task.')}", MOST) for label, own in rows.items()]


def _differing_conditions(complete: Sequence[RunResults]) -> list[str]:
    """Return the facts that must be equal in runs of different methods, and that differ between these runs."""
    conditions = [_conditions(run) for run in complete]
    values = {what: {json.dumps(one[what], sort_keys=True) for one in conditions} for what in conditions[0]}
    values[TASK_FILE].discard("null")  # older results do not record the file
    return [what for what, found in values.items() if len(found) > 1]


def _conditions(run: RunResults) -> dict[str, Any]:
    """Return the facts about a run that must be equal in runs of different methods, so that they can be compared."""
    return {
        "their sites": run.info.sites,
        "synthetic or real data": run.info.synthetic,
        TASK_SETTINGS: {name: value for name, value in settings_of(run).items() if name.startswith("task.")},
        TASK_FILE: run.info.task_file.get("sha256"),
        COMPARED: run.footing.shared or run.footing.structures,  # empty: all structures, at every site
        "the number of rounds": run.info.num_rounds,
    }
