"""Gaps between groups of people and equity-scaled metrics of each method: over the seeds, and against a reference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fairflare.core.statistics.group_intervals import FEW, GAPS
from fairflare.core.statistics.group_metrics import SCALED, WITHIN
from fairflare.core.statistics.group_sums import EVERYBODY, FOLDS
from fairflare.core.statistics.intervals import LEVEL, degrees_of_folds, estimate, of_folds
from fairflare.reporting.documents import Groups, OfGroups, Results, as_json
from fairflare.reporting.groups import CALLED, OF_CASES, OF_IMAGES, UNKNOWN, by_group, how_sure
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, interval, listed, number, p_value, printed, spread
from fairflare.reporting.values import label_of
from fairflare_lab.compare.differences import (
    BETTER,
    NOT_KNOWN,
    ONE_SEED,
    WORSE,
    Difference,
    Scatter,
    corrected,
    paired,
)

if TYPE_CHECKING:
    from fairflare_lab.compare.unseen import Unseen

Run = Results
Ends: TypeAlias = tuple[float, float]
Key: TypeAlias = tuple[str, str, str]  # label, attribute, measure
NONE = Groups()


@dataclass(frozen=True)
class Value:
    """A measure of one run.

    Attributes:
        value: over all cases.
        ends: its interval over the cases; NaN: there is none.
        without: what it is without each part of the cases; empty: they are not in parts.
        cases: of the smallest group; NaN: not known.
    """

    value: float
    ends: Ends
    without: Sequence[float] = ()
    cases: float = math.nan


Values: TypeAlias = dict[int, Value]  # by seed
SEEN, ADAPTED = ", seen", ", adapted"  # behind a label, see :func:`of_left_out`
OF_LEFT_OUT = (
    f"Rows with '{SEEN.strip(', ')}' are of the sites that trained, the others of the left-out sites together, each "
    f"tested by the model that was trained without it; '{ADAPTED.strip(', ')}': with norm statistics of its own images."
)
EQUITY = "es_"  # in front of a metric: equity-scaled
#: Gaps, smaller is better; then larger is better.
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
        gaps = [of_seed.value for of_seed in values[key].values()]
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
                cases = [figures.get(OF_CASES) or 0 for figures in _people_in(of)]
                for name in MEASURES:
                    if of["gaps"].get(name) is not None:
                        without = [x for x in (of.get("without") or {}).get(name, ()) if x is not None]
                        value = Value(of["gaps"][name], _ends(of, name), without, min(cases, default=math.nan))
                        values.setdefault((label, attribute, name), {})[run["info"]["seed"]] = value
    found = {key: d for key in values if (d := difference_of(key, values, reference)) is not None}
    return values, dict(zip(found, corrected(list(found.values())), strict=True))


def _people_in(of: OfGroups | Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Figures of the groups that count in a gap."""
    groups = (of.get("groups") or {}).items()
    return [figures for group, figures in groups if group != UNKNOWN and figures.get(OF_IMAGES)]


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
        return f"With {reference}, fewer than two groups of {attribute} have a value across all sites."
    found, called = list(values[reference, attribute, f"{metric}_gap"].values()), CALLED.get(metric, metric)
    low, high = over_seeds(found)
    pooled = next(of for run in rows[reference] if (of := (run.get("groups") or NONE)["pooled"].get(attribute)))
    sure = (
        how_sure(pooled, "") if math.isnan(low) else f" ({interval(low, high)}{', which may be chance' * (low == 0)})"
    )
    mean = number(float(np.mean([of.value for of in found])))
    told = f"With {reference}, across all sites {attribute} {_lowest(rows[reference], attribute)} has the lowest "
    told += f"{called}, {mean} below the best{sure}"
    if inside := values.get((reference, attribute, f"{metric}_gap{WITHIN}")):
        told += f", and {number(float(np.mean([of.value for of in inside.values()])))} within the sites"
    others = {key[0]: of.verdict for key, of in judged.items() if key[1:] == (attribute, f"{metric}_gap")}
    if not others:
        return f"{told}."
    if set(others.values()) == {ONE_SEED}:
        return f"{told}; with one seed nothing is said of the other methods."
    if set(others.values()) <= {ONE_SEED, NOT_KNOWN}:
        return f"{told}; how sure differences of the other methods are is not known."
    shown = []
    for verdict, word in ((BETTER, "smaller"), (WORSE, "larger")):
        if labels := [label for label, of in others.items() if of == verdict]:
            shown.append(f"{_named(labels)} {'has' if len(labels) == 1 else 'have'} a {word} gap")
    return f"{told}; {', '.join(shown) or 'no other method is shown to have a smaller gap'}."


def _named(labels: Sequence[str]) -> str:
    """Labels side by side; those of settings and of left-out sites have commas of their own."""
    return listed(labels, "; " if any(", " in one for one in labels) else ", ")


def _lowest(runs: Sequence[Run], attribute: str) -> str:
    """Which group is the worst one, and in how many runs where there are several; empty: none is."""
    asked = [run for run in runs if run.get("groups")]
    worst = [(run["groups"]["pooled"].get(attribute) or {}).get("worst") or {} for run in asked]
    metric = next((name for one in worst for name in reversed(one)), "")
    of = [one[metric] for one in worst if metric in one]
    found = sorted(Counter(of).items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f'"{group}"' + f" (in {n} of {len(asked)} runs)" * (len(asked) > 1) for group, n in found)


def notes_of_gaps(rows: Mapping[str, Sequence[Run]], reference: str) -> list[str]:
    """How to read the table, who has the lowest values, and which runs say nothing of groups."""
    notes = [
        "Of gaps between groups of people smaller is better, of equity-scaled metrics larger (the metric over all "
        f"images, divided by 1 plus its distances to the groups'). '{WITHIN}': between the groups at each site, on "
        "average over the sites that have both. 95 %: over the test cases (patients, where the data name them) and "
        "over the seeds where there are several; one that begins at 0 may be chance. Differences to "
        f"{reference} are paired by seed and by test case, their interval is over both; '{NOT_KNOWN}' where a group "
        f"has fewer than {FEW} cases, or nothing says how far the cases move a difference."
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
    return notes + [f"{_named(labels)}: {text}" for text, labels in lowest.items()]


def gaps_in_words(
    rows: Mapping[str, Sequence[Run]], reference: str, *more: str, style: str = "text", width: int | None = None
) -> str:
    """The table with its notes, ``more`` in front of them; in CSV without."""
    return printed([gap_table(rows, reference)], [*more, *notes_of_gaps(rows, reference)], style, width)


def of_left_out(found: Sequence[tuple[Run, Unseen]]) -> dict[str, list[Run]]:
    """Groups of people where models were not trained, in the rows of :func:`gap_table`; empty: nobody asked for them.

    A method has up to three rows with a document for each seed that has all left-out sites: ``<label>, seen``, the mean
    over its runs of their gaps at the sites that trained; ``<label>``, the sums of all left-out sites together, each by
    the model that was trained without it; ``<label>, adapted``, the same with norm statistics of the site's own.
    """
    sites = {unseen.site for _, unseen in found}
    by_seed: dict[tuple[str, int], list[tuple[Run, Unseen]]] = {}
    for run, unseen in found:
        by_seed.setdefault((label_of(run), int(run["info"]["seed"])), []).append((run, unseen))
    rows: dict[str, list[Run]] = {}
    for (label, seed), each in sorted(by_seed.items(), key=lambda one: one[0][1]):
        asked = [run["groups"] for run, _ in each if run.get("groups")]
        if {unseen.site for _, unseen in each} != sites or len(asked) < len(each):
            continue
        made: dict[str, Any] = {label + SEEN: _mean_of(asked)}
        for name, kind in ((label, "groups"), (label + ADAPTED, "adapted_groups")):
            sums = {unseen.site: _arrays(getattr(unseen, kind)) for _, unseen in each}
            if all(sums.values()):
                kept = {unseen.site: unseen.groups_kept for _, unseen in each}
                groups = by_group(sums, kept, asked[0]["group_bins"], asked[0]["calibration_bins"])
                made[name] = groups
        for name, groups in made.items():
            rows.setdefault(name, []).append(_document(name, seed, groups))
    order = [*dict.fromkeys(label_of(run) for run, _ in found)]
    names = [f"{label}{ending}" for label in order for ending in (SEEN, "", ADAPTED)]
    return {name: rows[name] for name in names if name in rows}


def _document(label: str, seed: int, groups: Mapping[str, Any]) -> Run:
    """Read figures of groups as results have them: what is not defined is None."""
    return Results.model_validate({"info": {"seed": seed, "label": label}, "groups": as_json(groups, "groups")})


def first_left_out(rows: Mapping[str, Sequence[Run]]) -> str:
    """The row of :func:`of_left_out` that others are compared with: the first method's at sites that were not there;
    empty: no method hands a model over.
    """
    return next((name for name in rows if not name.endswith(SEEN)), "")


def _arrays(told: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {kind: np.array(values, float) for kind, values in of.items()} for name, of in told.items()}


def _mean_of(asked: Sequence[Groups]) -> dict[str, Any]:
    """Gaps of several runs of a seed on average, and the ends of their intervals; who is worst is of no one run."""
    pooled: dict[str, Any] = {}
    for attribute in asked[0]["pooled"]:
        each = [groups["pooled"].get(attribute) or {"gaps": {}} for groups in asked]
        gaps = {name: [of["gaps"].get(name) for of in each] for name in MEASURES}
        ends = {name: np.mean([_ends(of, name) for of in each], 0).tolist() for name in MEASURES}
        parts = {name: [(of.get("without") or {}).get(name) or () for of in each] for name in MEASURES}
        fewest = [min((g.get(OF_CASES) or 0 for g in _people_in(of)), default=0) for of in each]
        pooled[attribute] = {
            "gaps": {name: float(np.mean(values)) for name, values in gaps.items() if None not in values},
            "gap_intervals": {name: of for name, of in ends.items() if not np.isnan(of).any()},
            "without": {
                name: np.mean(of, 0).tolist()
                for name, of in parts.items()
                if all(len(one) == FOLDS and None not in one for one in of)
            },
            "groups": {"": {OF_IMAGES: min(fewest), OF_CASES: min(fewest)}},
        }
    return {"pooled": pooled, "kept": {site: names for groups in asked for site, names in groups["kept"].items()}}


def over_seeds(found: Sequence[Value]) -> Ends:
    """Interval of the mean of a gap over the seeds; NaN: none is known.

    All seeds are tested on the same cases, so that the scatter over these shrinks with no seed: the mean distances of
    the ends are added to Student's interval over the seeds, by squares.
    """
    gaps = np.array([of.value for of in found])
    mean, ends = float(gaps.mean()), np.array([of.ends for of in found])
    below, above = np.abs(gaps[:, None] - ends).mean(0)
    of_seeds = float(np.nan_to_num(estimate(gaps).half)) if len(gaps) > 1 else 0.0
    low, high = np.clip([mean - np.hypot(below, of_seeds), mean + np.hypot(above, of_seeds)], 0, 1)
    return float(low), float(high)


def _ends(of: OfGroups | Mapping[str, Any], gap: str) -> Ends:
    low, high = (of.get("gap_intervals") or {}).get(gap) or (None, None)
    return (math.nan if low is None else low, math.nan if high is None else high)


def difference_of(key: Key, values: Mapping[Key, Values], reference: str) -> Difference | None:
    """Compare a measure of a method with the reference's over seeds and cases; ``None``: no seed in common."""
    label, *what = key
    against = values.get((reference, what[0], what[1]))
    if label == reference or against is None:
        return None
    seeds = sorted({*values[key]} & {*against})
    if not seeds:
        return None
    pairs = [(values[key][seed], against[seed]) for seed in seeds]
    differ = {seed: own.value - other.value for seed, (own, other) in zip(seeds, pairs, strict=True)}
    higher = what[1].startswith(EQUITY)
    scatter = _scatter(pairs)
    found = paired(label, " ".join(what), differ, higher_is_better=higher, scatter=scatter, limit=1.0)
    if scatter is not None or len(seeds) == 1:
        return found
    nan = math.nan  # from seeds alone nothing is said
    return replace(found, low=nan, high=nan, p=nan, p_holm=nan, smallest=nan, verdict=NOT_KNOWN, of=None)


def _scatter(pairs: Sequence[tuple[Value, Value]]) -> Scatter | None:
    """How far the cases move the differences; ``None``: not known.

    By the parts of the cases, the same for both methods and all seeds. Where there are none, by both intervals: as if
    the methods were tested on different cases, which is farther.
    """
    fewest = min(of.cases for pair in pairs for of in pair)
    if not fewest >= FEW:
        return None
    if all(len(of.without) == FOLDS for pair in pairs for of in pair):
        drawn = np.stack([of_folds(own.without) - of_folds(other.without) for own, other in pairs])
        return Scatter(drawn, degrees_of_folds(FOLDS, fewest))
    halves = [[np.abs(of.value - np.array(of.ends)).max() for of in pair] for pair in pairs]
    shared = float(np.square(halves).sum(1).mean()) / NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    return Scatter(df=fewest - 1, shared=shared) if math.isfinite(shared) else None
