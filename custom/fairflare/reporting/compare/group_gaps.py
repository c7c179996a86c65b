"""Gaps between groups of people and equity-scaled metrics of each method: over the seeds, and against a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fairflare.core.statistics.group_intervals import GAPS
from fairflare.core.statistics.group_metrics import SCALED
from fairflare.core.statistics.group_sums import EVERYBODY
from fairflare.core.statistics.intervals import estimate
from fairflare.reporting.compare.differences import BETTER, ONE_SEED, WORSE, Difference, corrected, paired
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, interval, listed, number, p_value, printed, spread

Run = Mapping[str, Any]
Ends: TypeAlias = tuple[float, float]
Key: TypeAlias = tuple[str, str, str]  # label, attribute, measure
NONE: Mapping[str, Any] = {"pooled": {}}
Values: TypeAlias = dict[int, tuple[float, Ends]]  # by seed: a measure, and its interval over the images of that run
EQUITY = "es_"  # in front of a metric: equity-scaled
MEASURES = (*GAPS, *(EQUITY + name for name in SCALED))  # gaps, smaller is better; then larger is better
HEADS = [
    "measure",
    "attribute",
    "method",
    "seeds",
    "over all sites",
    "95 %",
    "difference [95 %]",
    "p (Holm)",
    "verdict",
]


def has_groups(rows: Mapping[str, Sequence[Run]]) -> bool:
    """Whether any run asked for groups of people."""
    return any(_people(run) for runs in rows.values() for run in runs)


def _people(run: Run) -> list[str]:
    """The attributes of a run, without that of everybody."""
    return [name for name in (run.get("groups") or NONE)["pooled"] if name != EVERYBODY]


def gap_table(rows: Mapping[str, Sequence[Run]], reference: str) -> Table:
    """A row for each attribute, measure and method over all sites: gaps, and equity-scaled metrics.

    Args:
        rows: complete runs by label.
        reference: label that the others are compared with; with no such row there are no differences.
    """
    values, judged = _judged(rows, reference)
    order = sorted(values, key=lambda key: (key[1], MEASURES.index(key[2]), [*rows].index(key[0])))
    body: list[list[Cell]] = []
    for key in order:
        ends, of = over_seeds(list(values[key].values())), judged.get(key)
        told = interval(*ends)
        about = [MISSING, MISSING, MISSING]
        if of is not None:
            p = MISSING if math.isnan(of.p_holm) else p_value(of.p_holm).removeprefix("= ")
            about = [interval(of.low, of.high, of.mean), p, of.verdict]
        gaps = [gap for gap, _ in values[key].values()]
        figures = [math.nan] * 3 if of is None else [of.mean, of.low, of.high]
        label, attribute, measure = key
        body.append([
            measure, attribute, label, len(gaps), spread(gaps), Shown(told, ends), Shown(about[0], figures), *about[1:],
        ])  # fmt: skip
    heads = [[name] for name in HEADS]
    heads[4:7] = [["mean", "sd"], ["low", "high"], ["difference", "difference low", "difference high"]]
    caption = (
        f"Groups of people over all sites, and the difference to {reference}: of gaps smaller is better, of "
        f"equity-scaled metrics ({EQUITY}...) larger."
    )
    return Table("group_gaps", caption, HEADS, body, csv_columns=heads, lead=3)


def _judged(rows: Mapping[str, Sequence[Run]], reference: str) -> tuple[dict[Key, Values], dict[Key, Difference]]:
    """Each measure over the seeds, and its difference to the reference with the verdict after Holm's correction."""
    values: dict[Key, Values] = {}
    for label, runs in rows.items():
        for run in runs:
            for attribute, of in ((run.get("groups") or {}).get("pooled") or {}).items():
                for name in MEASURES:
                    if of["gaps"].get(name) is not None:
                        ends = _ends(of, name)
                        values.setdefault((label, attribute, name), {})[run["info"]["seed"]] = (of["gaps"][name], ends)
    found = {key: d for key in values if (d := _difference(key, values, reference)) is not None}
    return values, dict(zip(found, corrected(list(found.values())), strict=True))


def gap_lead(rows: Mapping[str, Sequence[Run]], reference: str) -> str:
    """Who is worst off with the reference, by how much and how sure, and whether a method has a smaller gap."""
    values, judged = _judged(rows, reference)
    return " ".join(
        _lead(rows, reference, attribute, values, judged)
        for attribute in dict.fromkeys(name for run in rows[reference] for name in _people(run))
    )


def _lead(
    rows: Mapping[str, Sequence[Run]], reference: str, attribute: str, values: Mapping[Key, Values],
    judged: Mapping[Key, Difference],
) -> str:  # fmt: skip
    metric = next((name for name in reversed(SCALED) if (reference, attribute, f"{name}_gap") in values), None)
    if metric is None:
        return f"By {attribute} fewer than two groups have a value over all sites with {reference}."
    found = list(values[reference, attribute, f"{metric}_gap"].values())
    low, high = over_seeds(found)
    sure = "how sure is not known" if math.isnan(low) else interval(low, high) + (", which may be chance" * (low == 0))
    mean = number(float(np.mean([gap for gap, _ in found])))
    told = f"By {attribute}, the lowest {metric} with {reference} is that of {_lowest(rows[reference], attribute)}, "
    told += f"{mean} below the best ({sure})"
    others = {key[0]: of.verdict for key, of in judged.items() if key[1:] == (attribute, f"{metric}_gap")}
    if not others:
        return f"{told}."
    if set(others.values()) == {ONE_SEED}:
        return f"{told}; with one seed nothing is said of the other methods."
    shown = []
    for verdict, word in ((BETTER, "smaller"), (WORSE, "larger")):
        if labels := [label for label, of in others.items() if of == verdict]:
            shown.append(f"{listed(labels)} {'has' if len(labels) == 1 else 'have'} a {word} gap")
    return f"{told}; {', '.join(shown) or 'no other method is shown to have a smaller gap'}."


def _lowest(runs: Sequence[Run], attribute: str) -> str:
    """Which group is the worst one, and in how many runs where there are several; empty: none is."""
    asked = [run for run in runs if run.get("groups")]
    worst = [(run["groups"]["pooled"].get(attribute) or {}).get("worst") or {} for run in asked]
    metric = next((name for one in worst for name in reversed(one)), "")
    of = [one[metric] for one in worst if metric in one]
    told = [f"{group} in {of.count(group)}" for group in sorted(set(of), key=lambda g: (-of.count(g), g))]
    return f"{', '.join(told)} of {len(asked)} runs" if len(asked) > 1 and told else "".join(of[:1])


def notes_of_gaps(rows: Mapping[str, Sequence[Run]], reference: str) -> list[str]:
    """How to read the table, who has the lowest values, and which runs say nothing of groups."""
    notes = [
        "Of gaps between groups of people smaller is better, of equity-scaled metrics larger (the metric over all "
        "images, divided by 1 plus its distances to the groups'). 95 %: over the test images, as if each were of "
        "another patient, and over the seeds where there are several; one that begins at 0 may be chance. "
        f"Differences to {reference} are paired by seed, their interval is over the seeds alone."
    ]
    lowest: dict[str, list[str]] = {}
    for label, runs in rows.items():
        asked = [run for run in runs if run.get("groups")]
        if len(asked) < len(runs):
            notes.append(f"{label}: {len(runs) - len(asked)} of {len(runs)} runs did not ask for groups.")
        if kept := sorted({site for run in asked for site, names in run["groups"]["kept"].items() if names}):
            notes.append(f"{label}: groups or classes of them stay at {listed(kept)} and are in no figure.")
        for attribute in dict.fromkeys(name for run in asked for name in run["groups"]["pooled"]):
            pooled = [run["groups"]["pooled"].get(attribute) or {} for run in asked]
            metric = next((name for one in pooled for name in reversed(one.get("worst") or {})), "")
            if metric:
                lowest.setdefault(f"lowest {metric} by {attribute}: {_lowest(asked, attribute)}.", []).append(label)
    return notes + [f"{listed(labels)}: {text}" for text, labels in lowest.items()]


def gaps_in_words(
    rows: Mapping[str, Sequence[Run]], reference: str, *, style: str = "text", width: int | None = None
) -> str:
    """The table with its notes; in CSV without."""
    return printed([gap_table(rows, reference)], notes_of_gaps(rows, reference), style, width)


def over_seeds(found: Sequence[tuple[float, Ends]]) -> Ends:
    """Interval of the mean of a gap over the seeds; NaN: none is known.

    All seeds are tested on the same images, so that the scatter over these shrinks with no seed: the mean distances of
    the ends are added to Student's interval over the seeds, by squares.

    Args:
        found: of each seed the gap, and its interval over the images.
    """
    gaps = np.array([gap for gap, _ in found])
    mean, ends = float(gaps.mean()), np.array([ends for _, ends in found])
    below, above = np.abs(gaps[:, None] - ends).mean(0)
    of_seeds = float(estimate(gaps).half) if len(gaps) > 1 else 0.0
    low, high = np.clip([mean - np.hypot(below, of_seeds), mean + np.hypot(above, of_seeds)], 0, 1)
    return float(low), float(high)


def _ends(of: Mapping[str, Any], gap: str) -> Ends:
    low, high = (of.get("gap_intervals") or {}).get(gap) or (None, None)
    return (math.nan if low is None else low, math.nan if high is None else high)


def _difference(key: Key, values: Mapping[Key, Values], reference: str) -> Difference | None:
    label, *what = key
    against = values.get((reference, what[0], what[1]))
    if label == reference or against is None:
        return None
    seeds = sorted({*values[key]} & {*against})
    differ = {seed: values[key][seed][0] - against[seed][0] for seed in seeds}
    higher = what[1].startswith(EQUITY)
    return paired(label, " ".join(what), differ, higher_is_better=higher, limit=1.0) if differ else None
