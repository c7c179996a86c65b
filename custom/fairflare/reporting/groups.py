"""Compute and show metrics by group of people (``groups`` of a run), by site and pooled, from sums of the sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from fairflare.base.checks import few, first_of, group_by_key, true_texts
from fairflare.core.cells import SUPPRESSED, Cell, Vector, pivot, value_of
from fairflare.core.statistics.areas import Ends
from fairflare.core.statistics.group_intervals import gap_intervals, intervals_of
from fairflare.core.statistics.group_metrics import (
    LABELS,
    SCALED,
    WITHIN,
    cases_of,
    find_undefined_rates,
    gap_within,
    gaps_of,
    images_of,
    metrics_of,
    worst_of,
)
from fairflare.core.statistics.group_sums import CASES, FOLDS, IMAGES, Sums, add_parts, add_sums, leave_each_out
from fairflare.core.statistics.intervals import FEW, LEVEL, degrees_of_folds, rescale_folds
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import MISSING, Shown, Table, interval, join_parts, number
from fairflare.reporting.layout import Cell as Entry
from fairflare.reporting.values import spell_metric, withheld_reason

UNKNOWN = "unknown"  # name of the last group, of images without a value, as in fairflare.data.listing.attributes
POOLED = "all sites"
IN_ALL = "all"
EQUITY = "es_"  # prefix of the name of an equity-scaled metric
MOST_TOLD = 8  # largest number of a site's names in a sentence
OVER = (
    "Of gaps between groups of people: in brackets the 95 % interval over the cases (patients, where the data name "
    "them), for all groups and classes together; one that begins at 0 may be chance, and where a group has fewer than "
    f"{FEW} cases there is none. '{WITHIN}': between the groups at each site, on average over the sites that have "
    f"both; where it is smaller, a part of a gap is one between sites. In no gap are images whose group is {UNKNOWN}, "
    "groups without images, and rates of a class of which a group has no image. At a site a group's figures are means "
    "over the site's own structures or classes: compare groups, not sites."
)
OF_BOTH = "_of_both"  # suffix of a metric: at a site, the difference between the two groups of the gap within sites
FEW_SITES = "secure sums of fewer than three sites"
PARTS = "parts"  # unit of a gap's values without each part of the cases
At: TypeAlias = Mapping[str, Mapping[str, Sums]]  # sums by site, then by group
Figures: TypeAlias = Mapping[str, Cell]  # cells by metric


def summarise_groups(sums: At, kept: Mapping[str, Sequence[str]]) -> tuple[list[Cell], list[Vector]]:
    """Return the figures by group of people (``docs/groups.md``), and the gaps without each part of the cases.

    Args:
        sums: ``{site: {"<attribute>=<group>": sums}}``, of each part of the cases or of all cases together; with secure
            sums only those of all sites together, under the name ``POOLED``.
        kept: ``{site: names}`` of groups and classes that the site withholds for too few cases.
    """
    cells, vectors = list[Cell](), list[Vector]()
    names = dict.fromkeys(name for of in sums.values() for name in of)
    for attribute, groups in group_by_key((name.partition("=")[0], name) for name in names).items():
        at = {site: {name.partition("=")[2]: own[name] for name in groups if name in own} for site, own in sums.items()}
        for site in sorted({*at} - {POOLED}):
            cells += _summarise(site, attribute, {group: add_parts(of) for group, of in at[site].items()})
        of_all, more = _pool_sites(attribute, at)
        cells, vectors = cells + of_all, vectors + more
    withheld = [(site.replace(POOLED, ""), *name.partition("/")[::2]) for site, own in kept.items() for name in own]
    return [*cells, *(Cell("", s, group=group, part=part, reason=SUPPRESSED) for s, group, part in withheld)], vectors


def _summarise(site: str, attribute: str, own: Mapping[str, Sums]) -> list[Cell]:
    """Return the figures of the groups of one site, or of all sites together."""
    whole, known = add_sums(list(own.values())), _drop_unknown(own)
    lowest, ends_of_gaps = worst_of(known), gap_intervals(known)
    return [
        *(
            Cell(metric, site, group=f"{attribute}={group}", value=value, low=low, high=high, cases=cases_of(of))
            for group, of in [*own.items(), ("", whole)] if of
            for ends in [intervals_of(of) if group else {}]
            for metric, value in {IMAGES: images_of(of), **metrics_of(of)}.items()
            for low, high in [ends.get(metric, (math.nan, math.nan))]
        ),
        *(
            _gap(site, attribute, gap, value, lowest, ends_of_gaps.get(gap))
            for gap, value in gaps_of(known, whole).items()
        ),
    ]  # fmt: skip


def _gap(site: str, attribute: str, gap: str, value: float, lowest: Mapping[str, str], ends: Ends | None) -> Cell:
    """Return the cell of a gap; ``lowest``: the group that is behind, by metric."""
    low, high = ends or (math.nan, math.nan)
    return Cell(
        gap, site, group=attribute, part=lowest.get(gap.removesuffix("_gap"), ""), value=value, low=low, high=high
    )


def _drop_unknown(own: Mapping[str, Sums]) -> dict[str, Sums]:
    return {group: of for group, of in own.items() if group != UNKNOWN}  # images without a value are no group of people


def _together(at: At) -> dict[str, Sums]:
    by_group = group_by_key(pair for groups in at.values() for pair in groups.items())
    return {group: add_sums(sums) for group, sums in by_group.items()}


def _pool_sites(attribute: str, at: At) -> tuple[list[Cell], list[Vector]]:
    """Return the figures of all sites together.

    Gaps are computed within the sites too, and all gaps again without each part of the cases in turn.
    """
    whole = {site: {group: add_parts(of) for group, of in own.items()} for site, own in at.items()}
    together = _together(whole)
    cells, (gaps, within) = _summarise("", attribute, together), _gaps(whole)
    without, parts = {}, {site: {group: leave_each_out(of) for group, of in own.items()} for site, own in at.items()}
    if parts and all(of for own in parts.values() for of in own.values()):
        each = [
            _gaps({site: {group: of[part] for group, of in own.items()} for site, own in parts.items()})[0]
            for part in range(FOLDS)
        ]
        without = {name: tuple(of_part[name] for of_part in each) for name in gaps}
    for name, (gap, lowest, differ) in within.items():
        both = _together({site: _drop_unknown(whole[site]) for site in differ})
        cells += [
            _gap("", attribute, name, gap, {name: lowest}, _ends_within(gap, without.get(name, ()), both)),
            *(Cell(name.replace(f"_gap{WITHIN}", OF_BOTH), s, group=attribute, value=one) for s, one in differ.items()),
        ]
    cells += [
        Cell(rate, group=f"{attribute}={group}", part=label, reason="undefined")
        for key, groups in find_undefined_rates(_drop_unknown(together)).items()
        for rate, _, label in [key.rpartition(" ")] for group in groups
    ]  # fmt: skip
    return cells, [Vector(name, group=attribute, unit=PARTS, values=values) for name, values in without.items()]


def _gaps(at: At) -> tuple[dict[str, float], dict[str, tuple[float, str, dict[str, float]]]]:
    """Return all gaps by name, and each gap within sites with its value, lower group and difference at each site."""
    together = _together(at)
    gaps = gaps_of(_drop_unknown(together), add_sums(list(together.values())))
    known = {
        site: {group: {CASES: cases_of(of), **metrics_of(of)} for group, of in _drop_unknown(own).items() if of}
        for site, own in at.items()
    }
    within = {
        f"{name}_gap{WITHIN}": gap_within(known, name)
        for name in SCALED if f"{name}_gap" in gaps and POOLED not in at
    }  # fmt: skip
    return gaps | {name: gap for name, (gap, _, _) in within.items()}, within


def _ends_within(gap: float, without: Sequence[float], groups: Mapping[str, Sums]) -> Ends:
    """Return the interval of a gap within the sites, computed from the gaps ``without`` each part of the cases.

    ``groups``: sums by group, over the sites between whose groups the gap was computed.
    """
    from scipy.special import stdtrit

    cases = [number for of in groups.values() if (number := cases_of(of)) > 0]
    if len(without) < FOLDS or len(cases) < 2 or not min(cases) >= FEW:
        return math.nan, math.nan
    times = stdtrit(degrees_of_folds(FOLDS, min(cases)), 1 - (1 - LEVEL) / math.comb(len(cases), 2) / 2)
    reach = float(times * np.std(rescale_folds(without), ddof=1))
    return max(0.0, gap - reach), min(1.0, gap + reach)


def attributes_of(results: RunResults) -> list[str]:
    """Return the attributes of people by which a run has figures."""
    return list(dict.fromkeys(c.group.partition("=")[0] for c in results.cells if c.group and c.metric))


def groups_at(results: RunResults, attribute: str) -> dict[str, dict[str, Figures]]:
    """Return the figures of an attribute's groups, ``{site: {group: {metric: cell}}}``; empty names: of all together.

    The metric of a group that its site withholds is empty.
    """
    start = f"{attribute}="
    found = pivot((c for c in results.cells if c.group.startswith(start) and not c.part), "site", "group", "metric")
    return {
        site: {group.removeprefix(start): of for group, of in own.items() if IMAGES in of}
        for site, own in found.items() if any(IMAGES in of for of in own.values())
    }  # fmt: skip


def gaps_at(results: RunResults, attribute: str) -> dict[str, Figures]:
    """Return the gaps between an attribute's groups, ``{site: {gap: cell}}``; no site: over all sites together."""
    return {"": {}, **pivot((c for c in results.cells if c.group == attribute and c.metric), "site", "metric")}


def has_interval(gap: str) -> bool:
    """Return whether a gap has an interval, where its groups have enough cases."""
    return not gap.startswith(EQUITY)


def group_tables(results: RunResults) -> list[Table]:
    """Return tables of each attribute's groups, by site and pooled, and of the gaps; empty if the run has no groups."""
    return [table for attribute in attributes_of(results) for table in _tables(results, attribute)]


def _tables(results: RunResults, attribute: str) -> list[Table]:
    places, between = groups_at(results, attribute), gaps_at(results, attribute)
    names = [name for name in places[""][""] if name != IMAGES]
    order = [*(site for site in places if site), ""]

    def entries(of: Figures) -> list[Entry]:
        images = of.get(IMAGES, Cell(IMAGES))
        counts = [None if count is None else int(count) for count in (images.value, images.cases)]
        values = [*counts, *(value_of(of, name) for name in names)]
        return [SUPPRESSED if value is None and "" in of else value for value in values]

    rows = [
        [site or POOLED, group or IN_ALL, *entries(of)]
        for site in order for group, of in places[site].items()
        if group != UNKNOWN or of.get(IMAGES, Cell(IMAGES)).value != 0
    ]  # fmt: skip
    gaps = list(between[""])
    return [
        Table(
            f"groups_{attribute}", f"Groups of {attribute} on the test images; {IN_ALL}: those that were told.",
            ["site", attribute, IMAGES, CASES, *names], rows, lead=2,
        ),
        Table(
            f"gaps_{attribute}", f"Gaps between the groups of {attribute}.", ["site", *gaps],
            [[site or POOLED, *(_gap_entry(between.get(site, {}).get(gap, Cell(gap))) for gap in gaps)]
             for site in order],
            folded=True, csv_columns=[
                ["site"], *([gap, f"{gap} low", f"{gap} high"] if has_interval(gap) else [gap] for gap in gaps),
            ],
        ),
    ]  # fmt: skip


def _gap_entry(cell: Cell) -> Entry:
    text = f"{number(cell.value)} {interval(cell.low, cell.high)}".removesuffix(f" {MISSING}")
    return Shown(text, [cell.value, cell.low, cell.high]) if has_interval(cell.metric) else cell.value


def gap_sentences(results: RunResults, attribute: str) -> tuple[bool, str]:
    """Return whether the interval of any gap between the groups of an attribute excludes 0, and a sentence on the gaps.

    The sentence names every such gap, over all sites and at single sites; where there is none, the gaps of metrics
    over all sites.
    """
    between = gaps_at(results, attribute)
    sure = [gap for of in between.values() for gap in of.values() if gap.low is not None and gap.high is not None]
    beyond = [_gap_in_words(gap) for gap in sure if gap.low and gap.low > 0]
    gaps = join_parts(
        (_gap_in_words(g) for n, g in between[""].items() if n.endswith("_gap") and g.value is not None), "; "
    )
    return bool(beyond), first_of({
        f"The groups of {attribute} differ, with 95 % intervals that exclude 0: {join_parts(beyond, '; ')}.": beyond,
        f"Across all sites, fewer than two groups of {attribute} have a value.": not gaps,
        f"No interval of a gap between groups of {attribute} excludes 0, so that all may be chance: {gaps}.": sure,
        f"Between groups of {attribute}, of which one has fewer than {FEW} cases, how sure is not known: {gaps}.": True,
    })  # fmt: skip


def _gap_in_words(gap: Cell) -> str:
    """Return a gap in words: its place, name, value, interval and, of a metric, the group with the lowest value."""
    lowest = f' (lowest: "{gap.part}")' if gap.part else ""
    where = f"at {gap.site}, " if gap.site else ""
    ends = interval(gap.low, gap.high)
    return f"{where}{gap_label(gap.metric)} {number(gap.value)}{f' {ends}' * (ends != MISSING)}{lowest}"


def gap_label(gap: str) -> str:
    """Return the name of a gap in words: ``gap in accuracy within the sites``."""
    metric, _, within = gap.partition("_gap")
    return LABELS.get(gap) or f"gap in {spell_metric(metric)}{' within the sites' * bool(within)}"


def group_notes(results: RunResults) -> list[str]:
    """Return notes on how to read the figures by group, and on the groups and classes that sites withhold."""
    names = group_by_key(
        (cell.site, cell.group + f"/{cell.part}" * bool(cell.part))
        for cell in results.cells if cell.group and not cell.metric
    )  # fmt: skip
    stays = [
        f"{site or POOLED}: {few(of_site, MOST_TOLD)} "
        f"({withheld_reason(site, results.info.privacy, results.info.said) if site else FEW_SITES})"
        for site, of_site in names.items()
    ]
    return true_texts({
        OVER: attributes_of(results),
        f"Groups of people that stay at a site, some only to hide another one: {'; '.join(stays)}.": stays,
    })  # fmt: skip
