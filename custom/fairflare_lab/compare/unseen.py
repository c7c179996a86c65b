"""Models at sites that were no part of their training: the document of a run, and the table of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from pydantic import Field

from fairflare.core.fairness import summarize
from fairflare.core.statistics.intervals import Certainty, certainty
from fairflare.reporting.documents import Results
from fairflare.reporting.layout import Cell, Shown, Spread, Table, interval, listed, printed, spread
from fairflare.reporting.values import by_site_of, direction_of, in_words, label_of, metrics_of
from fairflare_lab.compare.beside import Beside
from fairflare_lab.compare.differences import Units, draws_of
from fairflare_lab.compare.group_gaps import of_left_out

Parts: TypeAlias = tuple[int, int, int]  # signs of seen, unseen and adapted in a figure
Draws: TypeAlias = tuple[Units, tuple[float, ...]]  # what a site drew, and the metric on each draw


KEPT = ("unseen", "gap", "gain")  # figures whose intervals are in the table
NOT_SURE = "how sure is not known: neither seeds nor draws of test cases scatter"


class Unseen(Beside):
    """What a run's common model is worth at a site that was not there.

    Attributes:
        site: name.
        metrics: of its test split; ``None``: undefined there.
        adapted: the same of the model with norm statistics of the site's own training images; empty: it has no such.
        best: of the model that validated best at the sites of the run; empty: there is none, or it is not common.
        best_is_last: that model is the last one.
        images: in its test split.
        resampled, adapted_resampled: the primary metric of the model and of the adapted one on draws of its test
            patients, the same draws; empty: none were made.
        unit, units: what was drawn (``patients``, ``volumes`` or ``images``), and how many of them it has.
        groups, adapted_groups: by ``<attribute>=<group>`` of people the sums of its test images
            (:mod:`fairflare.core.statistics.group_sums`), of the model and of the adapted one; empty: nobody asked.
        groups_kept: names of those that stay there.
        reason: why there is no figure; empty: there is one.
    """

    FILE: ClassVar[str] = "unseen.json"
    CALLED: ClassVar[str] = "result of a left-out site"

    site: str
    metrics: dict[str, float | None] = Field(default_factory=dict)
    adapted: dict[str, float | None] = Field(default_factory=dict)
    best: dict[str, float | None] = Field(default_factory=dict)
    best_is_last: bool = False
    images: int | None = None
    resampled: list[float | None] = Field(default_factory=list)
    adapted_resampled: list[float | None] = Field(default_factory=list)
    unit: str = ""
    units: int | None = None
    groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    adapted_groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    groups_kept: list[str] = Field(default_factory=list)
    reason: str = ""


@dataclass
class UnseenRow:
    """A method at sites that it saw and at sites that it did not.

    Attributes:
        label: of the method.
        seeds: with any figure.
        seen, unseen, worst, gap, adapted, gain, best: over the seeds that have all left-out sites; see
            :func:`unseen_table`.
        each: of each left-out site, over all seeds.
        sure: of ``seen``, ``unseen``, ``gap`` and, where there is one, ``gain``, how sure they are.
        over: what these intervals are over, in words; empty: there are none.
        personal: the seen sites are measured with models of their own.
        reason: why an unseen site gets no figure; empty: it has one.
    """

    label: str
    seeds: int
    seen: Spread
    unseen: Spread
    worst: Spread
    gap: Spread
    adapted: Spread
    gain: Spread
    best: Spread
    each: dict[str, Spread]
    sure: dict[str, Certainty]
    over: str
    personal: bool
    reason: str


@dataclass
class UnseenSites:
    """What table and page are made of."""

    metric: str
    higher: bool
    sites: list[str]
    rows: list[UnseenRow]
    notes: list[str]
    synthetic: bool
    runs: list[Results]
    groups: dict[str, list[Results]]  # of people, as :func:`.group_gaps.of_left_out` has them


def unseen_of(found: Sequence[tuple[Results, Unseen]], metric: str | None = None) -> UnseenSites:
    """The figures of :func:`unseen_table`.

    Raises:
        ValueError: no run, or no run has the metric.
    """
    if not found:
        raise ValueError("no run with a left-out site completed")
    chosen = metric or metrics_of(found[0][0])[0]
    higher = direction_of(found[0][0], chosen)
    sites = sorted({unseen.site for _, unseen in found})
    rows: list[UnseenRow] = []
    notes: list[str] = []
    for label in dict.fromkeys(label_of(run) for run, _ in found):
        by_seed: dict[int, dict[str, _Run]] = {}
        for run, unseen in found:
            if label_of(run) == label:
                of_seed = by_seed.setdefault(int(run["info"]["seed"]), {})
                of_seed[unseen.site] = _Run.of(run, unseen, chosen, higher)
        rows.append(_row(label, by_seed, sites, higher))
        if lacking := sorted(seed for seed, by in by_seed.items() if len(by) < len(sites)):
            notes.append(f"{label}: seeds {', '.join(map(str, lacking))} lack runs: in the sites' columns only.")
        notes += [f"{label} {text}." for text in nothing_anywhere(rows[-1], chosen, higher)]
        notes += _in_words(rows[-1], [one for by in by_seed.values() for one in by.values()])
    synthetic = any(run["info"].get("synthetic") for run, _ in found)
    return UnseenSites(chosen, higher, sites, rows, notes, synthetic, [run for run, _ in found], of_left_out(found))


def nothing_anywhere(row: UnseenRow, metric: str, higher: bool) -> list[str]:
    """Say of a method whose models find nothing, neither where they were trained nor elsewhere; empty: they do."""
    where = ", trained at or not" if row.unseen.mean == 0 else " that trained"
    nothing = higher and row.seen.mean == 0 and not row.unseen.mean > 0
    return [f"learnt nothing: {in_words(metric)} is 0 at every site{where}"] if nothing else []


@dataclass
class _Run:
    """One run: its figures, and those of its sites on draws of their test patients."""

    seen: float
    by_site: dict[str, float]
    unseen: float
    adapted: float
    best: float
    draws: dict[str, Draws]  # by site, the left-out one among them
    adapted_draws: tuple[float, ...]  # of the adapted model there; empty: none
    document: Unseen
    personal: bool

    @property
    def tested(self) -> list[str]:
        """Sites of its figures."""
        return [*self.by_site, self.document.site]

    @classmethod
    def of(cls, run: Results, unseen: Unseen, metric: str, higher: bool) -> _Run:
        by_site = {site: v for site, v in by_site_of(run, metric).items() if math.isfinite(v)}
        kinds = (unseen.metrics, unseen.adapted, unseen.best)
        last, adapted, best = (math.nan if (v := of.get(metric)) is None else v for of in kinds)
        at = {site: draws_of(run, site, metric) for site in by_site}
        primary = metric == run["info"]["primary_metric"]
        drawn, again = (
            tuple(math.nan if v is None else v for v in values) if primary else ()
            for values in (unseen.resampled, unseen.adapted_resampled)
        )
        if drawn:
            at[unseen.site] = ((unseen.unit, unseen.units), drawn)
        draws = {site: told for site, told in at.items() if told is not None}
        seen = summarize(by_site_of(run, metric), higher_is_better=higher).mean
        personal = run["info"].get("measured") == "personal"
        return cls(seen, by_site, last, adapted, best, draws, again, unseen, personal)


def _row(label: str, by_seed: Mapping[int, Mapping[str, _Run]], sites: Sequence[str], higher: bool) -> UnseenRow:
    whole = {seed: by for seed, by in by_seed.items() if len(by) == len(sites)}
    means = {
        name: [sum(getattr(one, name) for one in by.values()) / len(sites) for by in whole.values()]
        for name in ("seen", "unseen", "adapted", "best")
    }
    worst = [_worst([one.unseen for one in by.values()], higher) for by in whole.values()]
    gaps = [seen - unseen for seen, unseen in zip(means["seen"], means["unseen"], strict=True)]
    gains = [adapted - unseen for adapted, unseen in zip(means["adapted"], means["unseen"], strict=True)]
    each = {site: spread([by[site].unseen for by in by_seed.values() if site in by]) for site in sites}
    every = [one for by in by_seed.values() for one in by.values()]
    sure, over = _sure(list(whole.values()))
    reasons = sorted({one.document.reason for one in every if one.document.reason})
    return UnseenRow(
        label, len(by_seed), **{name: spread(of) for name, of in means.items()}, worst=spread(worst), gap=spread(gaps),
        gain=spread(gains), each=each, sure=sure, over=over, personal=any(one.personal for one in every),
        reason="; ".join(reasons),
    )  # fmt: skip


def _sure(whole: Sequence[Mapping[str, _Run]]) -> tuple[dict[str, Certainty], str]:
    """How sure seen, unseen, gap and gain are, and over what, each as a mean of terms of the sites.

    A site that is seen in some runs and unseen in another is tested on the same patients, which are in the gap once; so
    are those of a left-out site by the model and by the adapted one, which are in the gain once.
    """
    runs = [one for by in whole for one in by.values()]
    names = sorted({site for one in runs for site in one.tested})
    if not runs or not all(math.isfinite(one.unseen) for one in runs):
        return {}, ""
    units: dict[str, set[Units]] = {}
    many = set()
    for one in runs:
        for site, (unit, values) in one.draws.items():
            units.setdefault(site, set()).add(unit)
            many.add(len(values))
    same = len(many) == 1 and all(len(of) == 1 and 1 not in {n for _, n in of} for of in units.values())
    known = same and all(site in one.draws for one in runs for site in one.tested)
    counts = [n or math.inf for site in names for _, n in units[site]] if known else [math.inf] * len(names)
    found = {}
    parts_of: dict[str, Parts] = {"seen": (1, 0, 0), "unseen": (0, 1, 0), "gap": (1, -1, 0)}
    if all(math.isfinite(one.adapted) for one in runs):
        parts_of["gain"] = (0, -1, 1)
    for name, of in parts_of.items():
        terms = [_terms(by, names, of, None) for by in whole]
        here = known and (name != "gain" or all(len(one.adapted_draws) == max(many) for one in runs))
        drawn = np.stack([_terms(by, names, of, max(many)) for by in whole]) if here else None
        if drawn is not None:
            drawn = drawn[:, :, np.isfinite(drawn).all((0, 1))]
            drawn = drawn if drawn.shape[-1] > 1 else None
        found[name] = certainty(np.stack(terms), drawn, counts)
    sure = next((one for one in found.values() if math.isfinite(one.half)), Certainty(math.nan))
    kinds = sorted({kind for of in units.values() for kind, _ in of})
    parts = [f"{len(whole)} seeds"] if sure.seeds else []
    parts += [f"the test {' or '.join(kinds)}"] if sure.patients else []
    return found, " and ".join(parts) + (" of one seed" if parts and not sure.seeds else "")


def _terms(by: Mapping[str, _Run], names: Sequence[str], of: Parts, draws: int | None) -> Any:
    """What each site adds to a seed's figure, times the number of sites: (sites,), or (sites, draws)."""
    of_seen, of_unseen, of_adapted = of
    terms = np.zeros((len(names),) if draws is None else (len(names), draws))
    for one in by.values():
        for site, value in one.by_site.items():
            own = value if draws is None else np.array(one.draws[site][1])
            terms[names.index(site)] += of_seen * own * len(names) / (len(by) * len(one.by_site))
        own = one.unseen if draws is None else np.array(one.draws[one.document.site][1])
        there = of_unseen * own
        if of_adapted:
            there = there + of_adapted * (one.adapted if draws is None else np.array(one.adapted_draws))
        terms[names.index(one.document.site)] += there * len(names) / len(by)
    return terms


def _in_words(row: UnseenRow, runs: Sequence[_Run]) -> list[str]:
    """What an unseen site gets of a method."""
    notes = [f"{row.label}: no figure: {reason}." for reason in row.reason.split("; ") if reason]
    if row.reason and math.isfinite(row.adapted.mean):
        notes.append(
            f"{row.label}: an unseen site gets the common weights with norm statistics of its own images (adapted)."
        )
    if row.personal and not row.reason:
        notes.append(f"{row.label}: seen sites are measured with a model of their own, the unseen one with the common.")
    elif not row.reason and not math.isfinite(row.best.mean):
        notes.append(f"{row.label}: the figures are of the last models; the runs keep no best one that all share.")
    elif not row.reason and all(one.document.best_is_last for one in runs):
        notes.append(f"{row.label}: the model that validated best is the last one in every run.")
    return notes


def unseen_table(
    found: Sequence[tuple[Results, Unseen]],
    metric: str | None = None,
    *,
    style: str = "text",
    width: int | None = None,
) -> str:
    """Rows side by side at sites they saw and sites they did not: mean ± population standard deviation over the seeds.

    Of each seed, "seen" is the mean over its runs of the mean over the sites that trained; "unseen" and "unseen worst"
    are mean and worst over the left-out sites, and stand only where every left-out site has a figure; "gap" is seen
    less unseen. "adapted" is "unseen" of the same models with norm statistics of the left-out site's own training
    images, which takes no labels, and "gain" is that less "unseen"; "best" is "unseen" of the models that validated
    best at the sites that trained.
    Seeds without all of the left-out sites are left out of them and named.

    Args:
        found: documents of completed runs, each with its :class:`Unseen`.
        metric: default: the primary metric of the first run.
        style: ``"text"``, ``"markdown"`` or ``"csv"``.
        width: of the text.

    Raises:
        ValueError: no run, or no run has the metric.
    """
    of = unseen_of(found, metric)
    notes = [
        f"{of.metric} ({'higher' if of.higher else 'lower'} is better) of the last models; a site's column is of "
        "models that were trained without it, on its test split. Mean ± population standard deviation over the seeds."
    ]
    return printed([unseen_cells(of)], [*notes, *intervals_in_words(of), *of.notes], style, width)


def unseen_cells(found: UnseenSites) -> Table:
    """The table of :func:`unseen_table`."""
    rows: list[list[Cell]] = []
    for row in found.rows:
        ends = {name: [c.mean - c.half, c.mean + c.half] for name, c in row.sure.items()}
        shown = {name: Shown(interval(*of), of) for name in KEPT for of in [ends.get(name, [math.nan] * 2)]}
        rows.append(
            [row.label, row.seeds, row.seen, row.unseen, shown["unseen"], row.worst, row.gap, shown["gap"],
             row.adapted, row.gain, shown["gain"], row.best, *row.each.values()]
        )  # fmt: skip
    names = [
        "method", "seeds", "seen", "unseen", "unseen 95 %", "unseen worst", "gap", "gap 95 %", "adapted", "gain",
        "gain 95 %", "best",
    ]  # fmt: skip
    heads = [[f"{name} mean", f"{name} sd"] for name in (*names, *found.sites)]
    heads[:2] = [["method"], ["seeds"]]
    for name in KEPT:
        heads[names.index(f"{name} 95 %")] = [f"{name} low", f"{name} high"]
    caption = (
        f"{found.metric} where the models were trained (seen) and where not (unseen); gap: seen less unseen; gain: "
        "adapted less unseen; a site's column is of models that were trained without it. Mean ± population standard "
        "deviation over the seeds."
    )
    return Table("unseen", caption, [*names, *found.sites], rows, csv_columns=heads)


def intervals_in_words(found: UnseenSites) -> list[str]:
    """What the intervals are over, said once where it is the same for all, and which figures have none."""
    over = {row.label: row.over for row in found.rows if row.over}
    notes = [f"{label}: the 95 % intervals are over {of}." for label, of in over.items()]
    if len({*over.values()}) == 1:
        notes = [f"The 95 % intervals are over {next(iter(over.values()))}; of other hospitals they say nothing."]
    for row in found.rows:
        if without := [name for name, sure in row.sure.items() if math.isnan(sure.half)]:
            notes.append(f"{row.label}: of {listed(without)} {NOT_SURE}.")
    return notes


def _worst(values: Sequence[float], higher: bool) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return min(values) if higher else max(values)
