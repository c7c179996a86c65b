"""Write notes on a comparison's rows: which runs are left out, and whether the rows can be compared at all."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fairflare.reporting.documents import SUPPRESSED, Results
from fairflare.reporting.layout import number, printable
from fairflare.reporting.no_effect import faults_of
from fairflare.reporting.notes import MEASURED, SYNTHETIC_NOTE, global_notes, private_notes, without_notes
from fairflare.reporting.standing import of_footing, tested
from fairflare.reporting.values import label_of
from fairflare_lab.compare.rows import Row, named, settings_of

TASK_SETTINGS, TASK_FILE, COMPARED = "the task's settings", "the task's file", "the structures that are compared"
MOST = 200  # largest number of characters of a line


def notes_of(
    runs: Sequence[Results], complete: Sequence[Results], metric: str, rows: Sequence[Row[Results]]
) -> list[str]:
    """Return notes on a comparison's rows: which runs are left out, and whether the rows can be compared at all.

    Args:
        runs: all runs that were given.
        complete: the runs that completed.
        metric: as in :func:`rows_of`.
        rows: the rows that :func:`rows_of` returned.
    """
    unfinished = [run for run in runs if run.status != "completed"]
    repeats = len(runs) - len(unfinished) - len(complete)
    own = [row.label for row in rows if row.measured == "personal"]
    conditions = [_conditions(run) for run in complete]
    values = {what: {json.dumps(one[what], sort_keys=True) for one in conditions} for what in conditions[0]}
    values[TASK_FILE].discard("null")  # older results do not record the file
    differing = [what for what, found in values.items() if len(found) > 1]
    footing = [(label_of(run), note) for run in complete for note in of_footing(run)[:1]]
    told: dict[str, Any] = {
        f"Measured: {MEASURED['personal']} of {', '.join(own)}"
        f"{'' if len(own) == len(rows) else '; of the others the common model'}.": own,
        f"{len(unfinished)} of {len(runs)} runs did not complete and are left out:": unfinished,
        **{f"  {named(run)}: {printable(run.reason or run.status, MOST)}": True for run in unfinished},
        f"{repeats} of {len(runs)} runs stand there twice and count once.": repeats,
        f"NOT COMPARABLE as they stand: the runs differ in {', '.join(differing)}.": differing,
    }
    return [
        f"{metric} on the test splits; ± is the population standard deviation over runs.",
        *dict.fromkeys(note for run in complete for note in (*private_notes(run), *global_notes(run))),
        *dict.fromkeys(note for run in complete for note in without_notes(run)),
        *dict.fromkeys(f"{name}: {note}" if COMPARED in differing else note for name, note in footing),
        *_without_sites(rows),
        *(f"{row.label}: {row.settings}" for row in rows if row.settings),
        *_by_chance(rows, metric),
        *(text for text, holds in told.items() if holds),
        *(_by_setting(complete) if TASK_SETTINGS in differing else []),
        *_faults(complete, metric),
        *([SYNTHETIC_NOTE] if any(run.info.synthetic for run in complete) else []),
    ]


def _by_chance(rows: Sequence[Row[Results]], metric: str) -> list[str]:
    """Return a note with each row's spread that chance alone would give equal sites, and its sites that are behind."""
    told = []
    for row in rows:
        if found := [one for run in row.runs if (one := tested(run, metric))]:
            behind = [site for one in found for site in one["behind"]]
            counts = [f"{site} in {behind.count(site)} of {len(found)}" for site in sorted(set(behind))]
            spread = number(statistics.fmean(one["chance_std"] for one in found))
            told.append(f"{row.label} {spread} (behind: {', '.join(counts) or 'no site'})")
    return [f"Standard deviation that equal sites show by sampling alone: {'; '.join(told)}."] if told else []


def _without_sites(rows: Sequence[Row[Results]]) -> list[str]:
    """Return notes on rows that lack sites, whose average, spread and worst value are over the remaining sites."""
    sites = sorted({site for row in rows for values in row.values for site in values})
    lacking = {row.label: row.lacks(sites) for row in rows}
    notes = []
    for row in rows:
        count, own = len(row.values), lacking[row.label]
        told = {site: site + f" ({len(of)} of {count} times)" * (len(of) < count) for site, of in own.items()}
        lost, kept = ([told[site] for site in own if (site in row.suppressed) == home] for home in (False, True))
        parts = [
            *[f"NO VALUE of {', '.join(lost)}: its average, std and worst are of the other sites"] * bool(lost),
            *[f"average, std and worst are without {', '.join(kept)} ({SUPPRESSED}: fewer cases than min_cases)"]
            * bool(kept),
        ]
        if parts:
            other = any(set(has) != set(own) for has in lacking.values())
            more = "; do not compare them with a row that has others" if other else ""
            notes.append(f"{row.label}: {'; '.join(parts)}{more}.")
    return notes


def _faults(runs: Sequence[Results], metric: str) -> list[str]:
    """Return a line for each sign that a row's method had no effect, with the number of its runs that show the sign."""
    of_row = Counter(map(label_of, runs))
    found = Counter((label_of(run), fault) for run in runs for fault in faults_of(run, metric))
    return [f"{label}: {fault} (in {n} of its {of_row[label]} runs)." for (label, fault), n in found.items()]


def _by_setting(runs: Sequence[Results]) -> list[str]:
    """Return a line for each task setting in which rows differ, with the rows of each value."""
    names = {name: None for run in runs for name in settings_of(run) if name.startswith("task.")}
    found = []
    for name in names:
        rows: dict[str, dict[str, None]] = {}
        for run in runs:
            rows.setdefault(repr(settings_of(run).get(name)), {})[label_of(run)] = None
        if len(rows) > 1:
            most = max(rows, key=lambda value: len(rows[value]))
            others = "; ".join(f"{value}: {', '.join(labels)}" for value, labels in rows.items() if value != most)
            found.append(f"  {name.removeprefix('task.').removeprefix('args.')}: {most}, but {others}")
    return [printable(line, MOST) for line in found]


def _conditions(run: Results) -> dict[str, Any]:
    """Return the facts about a run that must be equal in runs of different methods, so that they can be compared."""
    info = run["info"] or {}
    return {
        "their sites": info.get("sites"),
        "synthetic or real data": bool(info.get("synthetic")),
        TASK_SETTINGS: {name: value for name, value in settings_of(run).items() if name.startswith("task.")},
        TASK_FILE: (info.get("task_file") or {}).get("sha256"),
        COMPARED: run.footing.shared or run.footing.structures,  # empty: all structures, at every site
        "the number of rounds": info.get("num_rounds"),
    }
