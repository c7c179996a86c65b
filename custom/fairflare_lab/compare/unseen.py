"""Build a comparison's table of models at sites that were no part of their training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fairflare.base.checks import group_by_key, true_texts
from fairflare.core.statistics.intervals import ROUNDING
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import Cell, Shown, Spread, Table, format_tables, interval, join_parts, spread
from fairflare.reporting.values import collect_by_site, direction_of, label_of, metrics_of, spell_metric
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.runs import Array, Contrast, Draws, Figure, Runs, draws_of

KEPT = ("unseen", "gap", "gain")  # names of figures whose intervals are in the table
FIGURES = (
    "seen", "unseen", "unseen 95 %", "worst", "gap", "gap 95 %", "adapted", "gain", "gain 95 %",
)  # fmt: skip
NOT_SURE = "none, as neither seeds nor draws of test cases scatter"
Pair: TypeAlias = tuple[RunResults, Unseen]  # a run's document, and its test at the site that was left out


@dataclass(frozen=True)
class Certainty:
    """Store the ends of a figure's interval; NaN if the figure does not vary."""

    mean: float
    low: float = math.nan
    high: float = math.nan


@dataclass
class UnseenRow:
    """Describe a method at sites that it saw in training and at sites that it did not see.

    Attributes:
        label: label of the method.
        seeds: number of seeds that have any figure.
        figures: ``seen``, ``unseen``, ``worst``, ``gap``, ``adapted`` and ``gain``, over the seeds that have
            all left-out sites; see :func:`unseen_table`.
        each: value of each left-out site, over all seeds.
        sure: certainty of ``seen``, ``unseen``, ``gap`` and, where it is known, ``gain``.
        over: sources of variation that the intervals include, in words; empty if there are no intervals.
        personal: whether the seen sites are measured with models of their own.
        reason: why an unseen site has no figure; empty if it has one.
    """

    label: str
    seeds: int
    figures: Mapping[str, Spread]
    each: dict[str, Spread]
    sure: dict[str, Certainty]
    over: str
    personal: bool
    reason: str


@dataclass
class UnseenSites:
    """Store the material for the table and the page of models at unseen sites."""

    metric: str
    higher: bool
    sites: list[str]
    rows: list[UnseenRow]
    notes: list[str]
    runs: list[RunResults]


def unseen_of(found: Sequence[Pair], metric: str | None = None) -> UnseenSites:
    """Return the figures of methods at unseen sites, for :func:`unseen_table` and the page.

    Raises:
        ValueError: no run is given, or no run has the metric.
    """
    if not found:
        raise ValueError("no run with a left-out site completed")
    chosen = metric or metrics_of(found[0][0])[0]
    higher = direction_of(found[0][0], chosen)
    sites = sorted({unseen.site for _, unseen in found})
    rows: list[UnseenRow] = []
    notes: list[str] = []
    for label, pairs in group_by_key((label_of(pair[0]), pair) for pair in found).items():
        of_seeds = group_by_key((int(run.info.seed or 0), (run, unseen)) for run, unseen in pairs)
        by_seed = {seed: {unseen.site: (run, unseen) for run, unseen in own} for seed, own in of_seeds.items()}
        rows.append(_row(label, by_seed, sites, chosen, higher))
        if lacking := sorted(seed for seed, by in by_seed.items() if len(by) < len(sites)):
            notes.append(f"{label}: seeds {', '.join(map(str, lacking))} lack runs: in the sites' columns only.")
        notes += _notes(rows[-1], chosen, higher)
    return UnseenSites(chosen, higher, sites, rows, notes, [run for run, _ in found])


def _row(
    label: str, by_seed: Mapping[int, Mapping[str, Pair]], sites: Sequence[str], metric: str, higher: bool
) -> UnseenRow:
    """Return a method's row; a seed that lacks a left-out site counts only in the columns of single sites."""
    whole = {seed: by for seed, by in by_seed.items() if len(by) == len(sites)}
    every = [pair for by in by_seed.values() for pair in by.values()]
    contrasts, drawn = _contrasts(whole, sites, metric)
    complete = len(contrasts["unseen"].values) == len(whole) > 0
    sure = {name: _certainty(of) for name, of in contrasts.items() if complete and len(of.values) == len(whole)}
    known = next((contrasts[name] for name, one in sure.items() if math.isfinite(one.low)), Contrast({}))
    over = true_texts({
        f"{len(whole)} seeds": len(known.values) > 1, f"the test {drawn}": math.isfinite(known.shared),
    })  # fmt: skip

    def read_values(kind: str, by: Mapping[str, Pair]) -> list[float]:
        return [_read_left_out(by[site], kind, metric)[0] for site in sites if site in by]

    worst = np.min if higher else np.max
    figures = {
        **{name: spread([*of.values.values()]) for name, of in contrasts.items()},
        "worst": spread([float(worst(read_values("metrics", by))) for by in whole.values()]),
        "adapted": spread([float(np.mean(read_values("adapted", by))) for by in whole.values()]),
    }
    return UnseenRow(
        label, len(by_seed), figures,
        each={site: spread([_read_left_out(pair, "metrics", metric)[0] for pair in every if pair[1].site == site])
              for site in sites},
        sure=sure, over=" and ".join(over) + " of one seed" * (len(known.values) == 1),
        personal=any(run.info.measured == "personal" for run, _ in every),
        reason="; ".join(sorted({unseen.reason for _, unseen in every if unseen.reason})),
    )  # fmt: skip


def _contrasts(
    whole: Mapping[int, Mapping[str, Pair]], sites: Sequence[str], metric: str
) -> tuple[dict[str, Contrast], str]:
    """Return the figures seen, unseen, gap and gain over the seeds, and the unit of the draws.

    A site is seen in some runs and unseen in another, and tested on the same patients, so draws of these patients enter
    the gap together. Likewise the model and the adapted model are tested on a left-out site's same patients, so their
    draws enter the gain together.
    """
    if not whole:
        return dict.fromkeys(("seen", "unseen", "gap", "gain"), Contrast({})), ""
    left_out, adapted = (
        [{seed: {site: _read_left_out(by[site], kind, metric)} for seed, by in whole.items()} for site in sites]
        for kind in ("metrics", "adapted")
    )
    runs = Runs.stack(
        [{seed: _read_trained(by[site][0], metric) | row[seed] for seed, by in whole.items()}
         for site, row in zip(sites, left_out, strict=True)]
    )  # fmt: skip
    both = Runs.stack([*left_out, *adapted])
    models = range(len(sites))

    def own(values: Array, names: Sequence[str] = runs.sites) -> Array:
        """Return a metric's mean over the left-out sites, each with the model that was trained without this site."""
        return np.asarray(values[models, :, [names.index(site) for site in sites]].mean(0))

    def others(values: Array) -> Array:
        """Return a metric's mean over the models, of each model's mean over the sites of its training."""
        trained_at = np.isfinite(values[..., :1])
        trained_at[models, :, [runs.sites.index(site) for site in sites]] = False
        return np.asarray(values.mean(2, where=trained_at).mean(0))

    figures: dict[str, tuple[Runs, Figure]] = {
        "seen": (runs, others),
        "unseen": (runs, own),
        "gap": (runs, lambda values: others(values) - own(values)),
        "gain": (both, lambda values: own(values[len(sites) :], both.sites) - own(values, both.sites)),
    }
    kinds = sorted({kind for kind, _ in runs.units.values()})
    return {name: of.contrast(figure) for name, (of, figure) in figures.items()}, " or ".join(kinds)


def _read_trained(run: RunResults, metric: str) -> dict[str, tuple[float, Draws | None]]:
    """Return a run's values and draws of a metric at its own sites, without sites that have no value."""
    by_site = collect_by_site(run, metric)
    return {site: (value, draws_of(run, site, metric)) for site, value in by_site.items() if math.isfinite(value)}


def _read_left_out(pair: Pair, kind: str, metric: str) -> tuple[float, Draws | None]:
    """Return value and draws of a model at its left-out site; ``kind``: ``metrics`` or ``adapted``."""
    run, unseen = pair
    value = getattr(unseen, kind).get(metric)
    drawn = {"metrics": unseen.resampled, "adapted": unseen.adapted_resampled}[kind]
    draws = [math.nan if one is None else one for one in drawn if metric == run.info.primary_metric]
    return math.nan if value is None else value, ((unseen.unit, unseen.units), draws) if draws else None


def _certainty(found: Contrast) -> Certainty:
    """Return the certainty of a figure; it is unknown where all values are equal, as with a model that guesses."""
    mean = float(np.mean([*found.values.values()]))
    if len(found.values) == 1 and math.isnan(found.shared):
        return Certainty(mean)
    of = found.estimate
    return Certainty(mean, *map(float, of.ends)) if of.error > ROUNDING else Certainty(mean)


def _notes(row: UnseenRow, metric: str, higher: bool) -> list[str]:
    """Return notes on a method whose models find nothing at any site, and on which of them an unseen site can use."""
    seen, unseen = row.figures["seen"].mean, row.figures["unseen"].mean
    where = ", trained at or not" if unseen == 0 else " that trained"
    texts = true_texts({
        f" learnt nothing: {spell_metric(metric)} is 0 at every site{where}": (
            higher and seen == 0 and not unseen > 0
        ),
        **{f": no figure: {reason}": reason for reason in row.reason.split("; ")},
        ": an unseen site gets the common weights with norm statistics of its own images (adapted)": (
            row.reason and math.isfinite(row.figures["adapted"].mean)
        ),
        ": seen sites are measured with a model of their own, the unseen one with the common": (
            row.personal and not row.reason
        ),
    })  # fmt: skip
    return [f"{row.label}{text}." for text in texts]


def unseen_table(
    found: Sequence[Pair],
    metric: str | None = None,
    *,
    style: str = "text",
    width: int | None = None,
) -> str:
    """Return a table of methods at seen and unseen sites: mean ± population standard deviation over the seeds.

    For each seed, "seen" is the mean over its runs of the mean over the sites that trained. "unseen" and "unseen worst"
    are mean and worst over the left-out sites, where every left-out site has a figure. "gap" is seen minus unseen.
    "adapted" is "unseen" of the same models with norm statistics of the left-out site's own training images, without
    labels, and "gain" is adapted minus unseen. Seeds that lack a left-out site are left out of these figures, and a
    note names them.

    Args:
        found: documents of completed runs, each with its :class:`Unseen`.
        metric: name of the metric; default: the primary metric of the first run.
        style: ``"text"``, ``"markdown"`` or ``"csv"``.
        width: largest width of the text.

    Raises:
        ValueError: no run is given, or no run has the metric.
    """
    of = unseen_of(found, metric)
    about = (
        f"{of.metric} ({'higher' if of.higher else 'lower'} is better) of the last models; a site's column is of "
        "models that were trained without it, on its test split. Mean ± population standard deviation over the seeds."
    )
    return format_tables([unseen_cells(of)], [about, *intervals_in_words(of), *of.notes], style, width)


def unseen_cells(found: UnseenSites) -> Table:
    """Return the figures of methods at seen and unseen sites as a table, for :func:`unseen_table` and the page."""
    rows: list[list[Cell]] = []
    for row in found.rows:
        sure = {name: row.sure.get(name, Certainty(math.nan)) for name in KEPT}
        ends = {f"{name} 95 %": [of.low, of.high] for name, of in sure.items()}
        cells: dict[str, Cell] = {**row.figures, **{name: Shown(interval(*of), of) for name, of in ends.items()}}
        rows.append([row.label, row.seeds, *(cells[name] for name in FIGURES), *row.each.values()])
    names = [{"worst": "unseen worst"}.get(name, name) for name in (*FIGURES, *found.sites)]
    heads = [["method"], ["seeds"], *([f"{name} mean", f"{name} sd"] for name in names)]
    for name in KEPT:
        heads[2 + FIGURES.index(f"{name} 95 %")] = [f"{name} low", f"{name} high"]
    caption = (
        f"{found.metric} where the models were trained (seen) and where not (unseen); gap: seen less unseen; gain: "
        "adapted less unseen; a site's column is of models that were trained without it. Mean ± population standard "
        "deviation over the seeds."
    )
    return Table("unseen", caption, ["method", "seeds", *names], rows, csv_columns=heads)


def intervals_in_words(found: UnseenSites) -> list[str]:
    """Return a sentence on what variation each method's intervals include; of other hospitals they say nothing."""
    rows = group_by_key(
        (f"over {row.over}; of other hospitals they say nothing" if row.over else NOT_SURE, row.label)
        for row in found.rows
    )
    return [f"95 % intervals ({join_parts(labels)}): {over}." for over, labels in rows.items()]
