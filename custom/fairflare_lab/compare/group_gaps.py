"""Compare methods by gaps between groups of people and equity-scaled metrics, over seeds and to a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from fairflare.base.checks import group_by_key, true_texts
from fairflare.core.cells import Cell
from fairflare.core.statistics.group_intervals import GAPS
from fairflare.core.statistics.group_metrics import SCALED, WITHIN
from fairflare.core.statistics.group_sums import FOLDS, IMAGES
from fairflare.core.statistics.intervals import FEW, LEVEL, degrees_of_folds, rescale_folds
from fairflare.reporting.documents import RunResults, encode_value
from fairflare.reporting.groups import (
    EQUITY,
    PARTS,
    POOLED,
    UNKNOWN,
    attributes_of,
    gaps_at,
    groups_at,
    summarise_groups,
)
from fairflare.reporting.layout import MISSING, Shown, Table, format_tables, interval, join_parts, spread
from fairflare.reporting.layout import Cell as Entry
from fairflare.reporting.values import label_of
from fairflare_lab.compare.difference_table import show_p
from fairflare_lab.compare.differences import NOT_KNOWN, Difference, compare_pairs, correct_p_values
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.runs import Contrast
from fairflare_lab.statistics.seed_intervals import estimate

Run = RunResults
Ends: TypeAlias = tuple[float, float]
Key: TypeAlias = tuple[str, str, str]  # label, attribute, measure


@dataclass(frozen=True)
class Value:
    """Describe a measure of one run.

    Attributes:
        value: the measure over all cases.
        ends: ends of its interval over the cases; NaN if it has no interval.
        without: the measure without each part of the cases in turn; empty if the cases are not in parts.
        cases: number of cases of the smallest group; NaN if not known.
        lowest: group with the lowest value of the metric; empty for no single one.
    """

    value: float
    ends: Ends
    without: Sequence[float] = ()
    cases: float = math.nan
    lowest: str = ""


Values: TypeAlias = dict[int, Value]  # a measure by seed
OF_LEFT_OUT = "The groups are of the left-out sites together, each tested by the model that was trained without it."
#: Names of gaps between groups (smaller is better), then of equity-scaled metrics (larger is better).
MEASURES = (*GAPS, *(f"{name}_gap{WITHIN}" for name in SCALED), *(EQUITY + name for name in SCALED))
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
    "lowest",
]


def has_groups(rows: Mapping[str, Sequence[Run]]) -> bool:
    """Return whether any run asked for groups of people."""
    return any(attributes_of(run) for runs in rows.values() for run in runs)


def gap_table(rows: Mapping[str, Sequence[Run]], reference: str) -> Table:
    """Return gaps and equity-scaled metrics over all sites, a row for each attribute, measure and method.

    Args:
        rows: complete runs by label.
        reference: label of the row that other rows are compared with; without such a row differences are empty.
    """
    values, differ = judge_gaps(rows, reference)
    body: list[list[Entry]] = []
    for key in sorted(values, key=lambda key: (key[1], MEASURES.index(key[2]), [*rows].index(key[0]))):
        label, attribute, measure = key
        found = list(values[key].values())
        ends = average_seeds(found)
        body.append([
            measure, attribute, label, len(found), spread([of.value for of in found]), Shown(interval(*ends), ends),
            *_entries(differ.get(key)), ", ".join(sorted({of.lowest for of in found} - {""})),
        ])  # fmt: skip
    heads = [[name] for name in HEADS]
    heads[4:7] = [["mean", "sd"], ["low", "high"], ["difference", "difference low", "difference high"]]
    caption = (
        f"Groups of people over all sites, and the difference to {reference}: of gaps smaller is better, of "
        f"equity-scaled metrics ({EQUITY}...) larger."
    )
    return Table("group_gaps", caption, HEADS, body, folded=True, csv_columns=heads, lead=3)


def _entries(of: Difference | None) -> list[Entry]:
    """Return cells of a difference: interval, p-value and verdict, or ``None`` if the row is the reference itself."""
    if of is None:
        return [Shown(MISSING, [math.nan] * 3), MISSING, MISSING]
    return [Shown(interval(of.low, of.high, of.mean), [of.mean, of.low, of.high]), show_p(of.p_holm), of.verdict]


def judge_gaps(rows: Mapping[str, Sequence[Run]], reference: str) -> tuple[dict[Key, Values], dict[Key, Difference]]:
    """Return each gap or metric by seed, and its difference to the reference with a verdict after Holm's correction."""
    each = group_by_key(
        ((label, attribute, name), (run.info.seed or 0, _value(run, attribute, name)))
        for label, runs in rows.items() for run in runs for attribute in attributes_of(run) for name in MEASURES
    )  # fmt: skip
    known = {key: {seed: value for seed, value in own if math.isfinite(value.value)} for key, own in each.items()}
    values = {key: found for key, found in known.items() if found}
    differ = {key: d for key in values if (d := difference_of(key, values, reference)) is not None}
    return values, dict(zip(differ, correct_p_values(list(differ.values())), strict=True))


def _value(run: Run, attribute: str, name: str) -> Value:
    """Return a measure of a run, NaN where undefined; ``cases`` are of the smallest known group that has images."""
    images = [of[IMAGES] for group, of in groups_at(run, attribute)[""].items() if group not in ("", UNKNOWN)]
    cases = min((cell.cases or 0 for cell in images if cell.value), default=math.nan)
    cell = gaps_at(run, attribute)[""].get(name, Cell(name))
    gap, low, high = (math.nan if x is None else float(x) for x in (cell.value, cell.low, cell.high))
    without = [v.values for v in run.vectors if v.unit == PARTS and v.metric == name and v.group == attribute]
    return Value(gap, (low, high), [x for values in without for x in values if x is not None], cases, cell.part)


def join_labels(labels: Sequence[str]) -> str:
    """Return labels as a list in words, with semicolons between labels that contain commas."""
    return join_parts(labels, "; " if any(", " in one for one in labels) else ", ")


def notes_of_gaps(rows: Mapping[str, Sequence[Run]], reference: str) -> list[str]:
    """Return notes on how to read the table, on withheld groups, and on runs without groups."""
    notes = [
        "Of gaps between groups of people smaller is better, of equity-scaled metrics larger (the metric over all "
        f"images, divided by 1 plus its distances to the groups'). '{WITHIN}': between the groups at each site, on "
        "average over the sites that have both. 95 %: over the test cases (patients, where the data name them) and "
        "over the seeds where there are several; one that begins at 0 may be chance. Differences to "
        f"{reference} are paired by seed and by test case, their interval is over both; '{NOT_KNOWN}' where a group "
        f"has fewer than {FEW} cases, or nothing says how far the cases move a difference."
    ]
    by_row = {label: [run for run in runs if attributes_of(run)] for label, runs in rows.items()}
    for label, asked in by_row.items():
        withheld = sorted({c.site or POOLED for run in asked for c in run.cells if c.group and not c.metric})
        notes += true_texts({
            f"{label}: {len(rows[label]) - len(asked)} of {len(rows[label])} runs did not ask for groups.": (
                len(asked) < len(rows[label])
            ),
            f"{label}: groups or classes of them stay at {join_parts(withheld)} and are in no figure.": withheld,
        })  # fmt: skip
    return notes


def gaps_in_words(
    rows: Mapping[str, Sequence[Run]], reference: str, *more: str, style: str = "text", width: int | None = None
) -> str:
    """Return :func:`gap_table` as text with the notes ``more`` and :func:`notes_of_gaps`; CSV has no notes."""
    return format_tables([gap_table(rows, reference)], [*more, *notes_of_gaps(rows, reference)], style, width)


def collect_left_out(found: Sequence[tuple[Run, Unseen]]) -> dict[str, list[Run]]:
    """Return groups of people at left-out sites as rows for :func:`gap_table`; empty if no run asked for groups.

    A row has a document for each seed that has all left-out sites, with the sums of these sites together, each by the
    model that was trained without it.
    """
    sites = {unseen.site for _, unseen in found}
    rows: dict[str, list[Run]] = {}
    by_seed = group_by_key(((label_of(run), int(run.info.seed or 0)), (run, unseen)) for run, unseen in found)
    for (label, seed), each in sorted(by_seed.items(), key=lambda one: one[0][1]):
        sums = {unseen.site: _arrays(unseen.groups) for _, unseen in each}
        if {*sums} == sites and all(sums.values()):
            cells, vectors = summarise_groups(sums, {unseen.site: unseen.groups_kept for _, unseen in each})
            found_of_seed = {"info": {"seed": seed, "label": label}, "cells": cells, "vectors": vectors}
            rows.setdefault(label, []).append(RunResults.model_validate(encode_value(found_of_seed, "groups")))
    return rows


def _arrays(told: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {kind: np.array(values, float) for kind, values in of.items()} for name, of in told.items()}


def average_seeds(found: Sequence[Value]) -> Ends:
    """Return the interval of a gap's mean over the seeds; NaN if the gap is known at no seed.

    All seeds are tested on the same cases, so more seeds do not reduce the scatter over cases. Therefore the mean
    distances of the ends are added to Student's interval over the seeds, by squares.
    """
    gaps = np.array([of.value for of in found])
    mean, ends = float(gaps.mean()), np.array([of.ends for of in found])
    below, above = np.abs(gaps[:, None] - ends).mean(0)
    of_seeds = float(np.nan_to_num(estimate(gaps).ends[1] - mean)) if len(gaps) > 1 else 0.0
    low, high = np.clip([mean - np.hypot(below, of_seeds), mean + np.hypot(above, of_seeds)], 0, 1)
    return float(low), float(high)


def difference_of(key: Key, values: Mapping[Key, Values], reference: str) -> Difference | None:
    """Return a method's difference to the reference in a measure, over seeds and cases; ``None`` for no common seed."""
    label, *what = key
    against = values.get((reference, what[0], what[1]), {})
    seeds = sorted({*values[key]} & {*against})
    if label == reference or not seeds:
        return None
    found = _contrast({seed: (values[key][seed], against[seed]) for seed in seeds})
    of = compare_pairs(label, " ".join(what), found, higher_is_better=what[1].startswith(EQUITY), limit=1.0)
    if math.isfinite(found.shared):
        return of
    return replace(of, low=math.nan, high=math.nan, p=math.nan)  # seeds alone do not justify a verdict


def _contrast(pairs: Mapping[int, tuple[Value, Value]]) -> Contrast:
    """Return the differences by seed, and how far the choice of cases moves them.

    The latter is computed from the parts of the cases, which are the same for both methods and all seeds. Without
    parts it is computed from both intervals, as if the methods were tested on different cases, which overestimates it.
    """
    differ = {seed: own.value - other.value for seed, (own, other) in pairs.items()}
    both = [of for pair in pairs.values() for of in pair]
    fewest = float(np.min([of.cases for of in both]))
    if not fewest >= FEW:
        return Contrast(differ)
    if all(len(of.without) == FOLDS for of in both):
        drawn = np.stack([rescale_folds(own.without) - rescale_folds(other.without) for own, other in pairs.values()])
        # So few parts do not show how skewed the mean is.
        return Contrast.measure(differ, drawn, degrees_of_folds(FOLDS, fewest))._replace(skew=0.0)
    halves = [[np.abs(of.value - np.array(of.ends)).max() for of in pair] for pair in pairs.values()]
    shared = float(np.square(halves).sum(1).mean()) / NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    return Contrast(differ, shared, fewest - 1)
