"""Compute and show metrics by group of people (``groups`` of a run), by site and pooled, from sums of the sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from fairflare.base.checks import few, first_of, gathered, true_texts
from fairflare.core.cells import Cell, Vector, pivot, value_of
from fairflare.core.statistics.group_intervals import Ends, gap_intervals, intervals_of
from fairflare.core.statistics.group_metrics import (
    LABELS,
    SCALED,
    WITHIN,
    cases_of,
    gap_within,
    gaps_of,
    images_of,
    metrics_of,
    undefined_rates,
    worst_of,
)
from fairflare.core.statistics.group_sums import (
    CASES,
    FOLDS,
    IMAGES,
    Sums,
    added,
    in_one,
    without_each,
)
from fairflare.core.statistics.intervals import FEW, LEVEL, degrees_of_folds, of_folds
from fairflare.reporting.documents import SUPPRESSED, Results
from fairflare.reporting.layout import MISSING, Shown, Table, counted, interval, listed, number
from fairflare.reporting.layout import Cell as Entry
from fairflare.reporting.values import in_words, withheld_reason

UNKNOWN = "unknown"  # name of the last group, of images without a value, as in fairflare.data.listing.attributes
POOLED = "all sites"
IN_ALL = "all"
EQUITY = "es_"  # prefix of the name of an equity-scaled metric
APART = 0.01  # least difference at which a sentence says that gaps over all sites and within sites differ
MOST_TOLD = 8  # largest number of a site's names in a sentence
OVER = (
    "In brackets the 95 % interval over the cases (patients, where the data name them), for all groups and classes "
    f"together; one that begins at 0 may be chance, and where a group has fewer than {FEW} cases there is none. "
    f"'{WITHIN}': between the groups at each site, on average over the sites that have both."
)
OF_BOTH = "_of_both"  # suffix of a metric: at a site, the difference between the two groups of the gap within sites
FEW_SITES = "secure sums of fewer than three sites"
PARTS = "parts"  # unit of a gap's values without each part of the cases
At: TypeAlias = Mapping[str, Mapping[str, Sums]]  # sums by site, then by group
Figures: TypeAlias = Mapping[str, Cell]  # cells by metric


def by_group(sums: At, kept: Mapping[str, Sequence[str]]) -> tuple[list[Cell], list[Vector]]:
    """Return the figures by group of people (``docs/groups.md``), and the gaps without each part of the cases.

    Args:
        sums: ``{site: {"<attribute>=<group>": sums}}``, of each part of the cases or of all cases together; with secure
            sums only those of all sites together, under the name ``POOLED``.
        kept: ``{site: names}`` of groups and classes that the site withholds for too few cases.
    """
    names = dict.fromkeys(name for of in sums.values() for name in of)
    cells, vectors = list[Cell](), list[Vector]()
    for attribute, groups in gathered((name.partition("=")[0], name) for name in names).items():
        at = {site: {name.partition("=")[2]: own[name] for name in groups if name in own} for site, own in sums.items()}
        for site in sorted({*at} - {POOLED}):
            cells += _of_groups(site, attribute, {group: in_one(of) for group, of in at[site].items()})
        of_all, more = _pooled(attribute, at)
        cells, vectors = cells + of_all, vectors + more
    withheld = [(site.replace(POOLED, ""), *name.partition("/")[::2]) for site, own in kept.items() for name in own]
    return [*cells, *(Cell("", s, group=group, part=part, reason=SUPPRESSED) for s, group, part in withheld)], vectors


def _of_groups(site: str, attribute: str, own: Mapping[str, Sums]) -> list[Cell]:
    """Return the figures of the groups of one site, or of all sites together."""
    whole, known = added(list(own.values())), _known(own)
    figures = [
        Cell(metric, site, group=f"{attribute}={group}", value=value, low=low, high=high, cases=cases_of(of))
        for group, of in [*own.items(), ("", whole)] if of
        for ends in [intervals_of(of) if group else {}]
        for metric, value in {IMAGES: images_of(of), **metrics_of(of)}.items()
        for low, high in [ends.get(metric, (math.nan, math.nan))]
    ]  # fmt: skip
    gaps, lowest, ends = gaps_of(known, whole), worst_of(known), gap_intervals(known)
    return figures + [_gap(site, attribute, gap, value, lowest, ends.get(gap)) for gap, value in gaps.items()]


def _gap(site: str, attribute: str, gap: str, value: float, lowest: Mapping[str, str], ends: Ends | None) -> Cell:
    """Return the cell of a gap; ``lowest``: the group that is behind, by metric."""
    low, high = ends or (math.nan, math.nan)
    part = lowest.get(gap.removesuffix("_gap"), "")
    return Cell(gap, site, group=attribute, part=part, value=value, low=low, high=high)


def _known(own: Mapping[str, Sums]) -> dict[str, Sums]:
    return {group: of for group, of in own.items() if group != UNKNOWN}  # images without a value are no group of people


def _together(at: At) -> dict[str, Sums]:
    groups = dict.fromkeys(group for own in at.values() for group in own)
    return {group: added([own[group] for own in at.values() if group in own]) for group in groups}


def _pooled(attribute: str, at: At) -> tuple[list[Cell], list[Vector]]:
    """Return the figures of all sites together.

    Gaps are computed within the sites too, and all gaps again without each part of the cases in turn.
    """
    whole = {site: {group: in_one(of) for group, of in own.items()} for site, own in at.items()}
    together = _together(whole)
    cells, (gaps, within) = _of_groups("", attribute, together), _gaps(whole)
    without, parts = {}, {site: {group: without_each(of) for group, of in own.items()} for site, own in at.items()}
    if parts and all(of for own in parts.values() for of in own.values()):
        each = [
            _gaps({site: {group: of[part] for group, of in own.items()} for site, own in parts.items()})[0]
            for part in range(FOLDS)
        ]
        without = {name: tuple(of_part[name] for of_part in each) for name in gaps}
    for name, (gap, lowest, differ) in within.items():
        both = _together({site: _known(whole[site]) for site in differ})
        ends = _ends_within(gap, without.get(name, ()), both)
        cells += [
            _gap("", attribute, name, gap, {name: lowest}, ends),
            *(Cell(name.replace(f"_gap{WITHIN}", OF_BOTH), s, group=attribute, value=one) for s, one in differ.items()),
        ]
    for key, groups in undefined_rates(_known(together)).items():
        rate, _, label = key.rpartition(" ")
        cells += [Cell(rate, group=f"{attribute}={group}", part=label, reason="undefined") for group in groups]
    return cells, [Vector(name, group=attribute, unit=PARTS, values=values) for name, values in without.items()]


def _gaps(at: At) -> tuple[dict[str, float], dict[str, tuple[float, str, dict[str, float]]]]:
    """Return all gaps by name, and each gap within sites with its value, lower group and difference at each site."""
    together = _together(at)
    gaps = gaps_of(_known(together), added(list(together.values())))
    known = {
        site: {group: {CASES: cases_of(of), **metrics_of(of)} for group, of in _known(own).items() if of}
        for site, own in at.items()
    }
    found = [name for name in SCALED if f"{name}_gap" in gaps and POOLED not in at]
    within = {f"{name}_gap{WITHIN}": gap_within(known, name) for name in found}
    return gaps | {name: gap for name, (gap, _, _) in within.items()}, within


def _ends_within(gap: float, without: Sequence[float], groups: Mapping[str, Sums]) -> Ends:
    """Return the interval of a gap within the sites, computed from the gaps ``without`` each part of the cases.

    ``groups``: sums by group, over the sites between whose groups the gap was computed.
    """
    from scipy.special import stdtrit

    cases = [number for of in groups.values() if (number := cases_of(of)) > 0]
    if len(without) < FOLDS or len(cases) < 2 or not min(cases) >= FEW:
        return math.nan, math.nan
    error = (1 - LEVEL) / math.comb(len(cases), 2)
    half = float(stdtrit(degrees_of_folds(FOLDS, min(cases)), 1 - error / 2) * np.std(of_folds(without), ddof=1))
    return max(0.0, gap - half), min(1.0, gap + half)


def attributes_of(results: Results) -> list[str]:
    """Return the attributes of people by which a run has figures."""
    return list(dict.fromkeys(c.group.partition("=")[0] for c in results.cells if c.group and c.metric))


def groups_at(results: Results, attribute: str) -> dict[str, dict[str, Figures]]:
    """Return the figures of an attribute's groups, ``{site: {group: {metric: cell}}}``; empty names: of all together.

    The metric of a group that its site withholds is empty.
    """
    start = f"{attribute}="
    found = pivot((c for c in results.cells if c.group.startswith(start) and not c.part), "site", "group", "metric")
    figures = {
        site: {group.removeprefix(start): of for group, of in own.items() if IMAGES in of}
        for site, own in found.items()
    }
    return {site: own for site, own in figures.items() if own}


def gaps_at(results: Results, attribute: str) -> dict[str, Figures]:
    """Return the gaps between an attribute's groups, ``{site: {gap: cell}}``; no site: over all sites together."""
    return {"": {}, **pivot((c for c in results.cells if c.group == attribute and c.metric), "site", "metric")}


def has_interval(gap: str) -> bool:
    """Return whether a gap has an interval, where its groups have enough cases."""
    return not gap.startswith(EQUITY)


def group_tables(results: Results) -> list[Table]:
    """Return tables of each attribute's groups, by site and pooled, and of the gaps; empty if the run has no groups."""
    return [table for attribute in attributes_of(results) for table in _tables(results, attribute)]


def _tables(results: Results, attribute: str) -> list[Table]:
    places, between = groups_at(results, attribute), gaps_at(results, attribute)
    names = [name for name in places[""][""] if name != IMAGES]
    order = [*(site for site in places if site), ""]

    def entries(of: Figures) -> list[Entry]:
        images, otherwise = of.get(IMAGES, Cell(IMAGES)), SUPPRESSED if "" in of else None
        counts = [otherwise if count is None else int(count) for count in (images.value, images.cases)]
        values = [of[name].value if name in of else None for name in names]
        return [*counts, *(otherwise if value is None else value for value in values)]

    rows = [
        [site or POOLED, group or IN_ALL, *entries(of)]
        for site in order for group, of in places[site].items()
        if group != UNKNOWN or of.get(IMAGES, Cell(IMAGES)).value != 0
    ]  # fmt: skip
    gaps = list(between[""])
    heads = [["site"], *([gap, f"{gap} low", f"{gap} high"] if has_interval(gap) else [gap] for gap in gaps)]
    return [
        Table(
            f"groups_{attribute}", f"Groups of {attribute} on the test images; {IN_ALL}: those that were told.",
            ["site", attribute, IMAGES, CASES, *names], rows, lead=2,
        ),
        Table(
            f"gaps_{attribute}", f"Gaps between the groups of {attribute}, {UNKNOWN} in none. {OVER}", ["site", *gaps],
            [[site or POOLED, *(_gap_entry(between.get(site, {}).get(gap, Cell(gap))) for gap in gaps)]
             for site in order],
            folded=True, csv_columns=heads,
        ),
    ]  # fmt: skip


def _gap_entry(cell: Cell) -> Entry:
    text = f"{number(cell.value)} {interval(cell.low, cell.high)}".removesuffix(f" {MISSING}")
    return Shown(text, [cell.value, cell.low, cell.high]) if has_interval(cell.metric) else cell.value


def gap_sentences(results: Results, attribute: str) -> tuple[bool, str]:
    """Return whether the interval of any gap between the groups of an attribute excludes 0, and sentences on the gaps.

    The first sentence names every such gap, over all sites and at single sites. Only where there is none may the gaps
    be chance. The next ones are on the group with the lowest value: its gap, interval, and gap within sites.
    """
    groups, between = groups_at(results, attribute).get("", {}), gaps_at(results, attribute)
    sure = [gap for of in between.values() for gap in of.values() if gap.low is not None and gap.high is not None]
    beyond = [_gap_in_words(gap) for gap in sure if gap.low and gap.low > 0]
    values = {name: {group: value_of(of, name) for group, of in groups.items()} for name in SCALED}
    metric = next((name for name in reversed(SCALED) if values[name].get("") is not None), "")
    gap, odds = between[""].get(f"{metric}_gap", Cell("")), value_of(between[""], "equalised_odds")
    there = gap.part and gap.value is not None
    sentences = true_texts({
        f"The groups of {attribute} differ, with 95 % intervals that exclude 0: {listed(beyond, '; ')}.": beyond,
        f"Across all sites, fewer than two groups of {attribute} have a value.": not beyond and not there,
    })  # fmt: skip
    if there:
        of_groups = {g: value for g, value in values[metric].items() if g not in ("", UNKNOWN) and value is not None}
        best = max(of_groups, key=of_groups.__getitem__, default="")
        lowest = (
            f'{attribute} "{gap.part}" has the lowest {in_words(metric)}: {number(of_groups.get(gap.part))}, '
            f'{number(gap.value)} below {attribute} "{best}"'
        )
        if number(gap.value) == number(0):  # equal as shown: differences by rounding do not count
            lowest = f"the groups of {attribute} have the same {in_words(metric)}"
        within = between[""].get(f"{metric}_gap{WITHIN}")
        sites = [site for site, of in between.items() if f"{metric}{OF_BOTH}" in of]
        sentences += true_texts({
            f"Across all sites, {lowest}{how_sure(groups, gap)}.": True,
            _within_words(groups, gap, within, sites) if within else "": within and len(between) > 2,
            f"The {LABELS['equalised_odds']} is {number(odds)}"
            f"{how_sure(groups, between[''].get('equalised_odds', gap))}.": odds is not None,
            "No interval of a gap excludes 0, so that all of them may be chance.": sure and not beyond,
        })  # fmt: skip
    return bool(beyond), " ".join(sentences)


def _gap_in_words(gap: Cell) -> str:
    """Return a gap in words: its place, name, value, interval and, of a metric, the group with the lowest value."""
    lowest = f' (lowest: "{gap.part}")' if gap.part else ""
    where = f"at {gap.site}, " if gap.site else ""
    return f"{where}{gap_label(gap.metric)} {number(gap.value)} {interval(gap.low, gap.high)}{lowest}"


def gap_label(gap: str) -> str:
    """Return the name of a gap in words: ``gap in accuracy within the sites``."""
    metric, _, within = gap.partition("_gap")
    return LABELS.get(gap) or f"gap in {in_words(metric)}{' within the sites' * bool(within)}"


def _within_words(groups: Mapping[str, Figures], gap: Cell, within: Cell, sites: Sequence[str]) -> str:
    """Return a sentence on the gap within sites, and on how it differs from the gap over all sites."""
    inside, of_all = within.value, gap.value
    if inside is None or of_all is None or not sites:
        return "No site has two of these groups, so this may be a difference between the sites."
    where = f"the {len(sites)} sites that have both" if len(sites) > 1 else f"{sites[0]}, the only site with both"
    sure = how_sure(groups, within) if gap.low is not None and gap.high is not None else ""  # else the reason is given
    ending = first_of({
        "": abs(inside - of_all) < APART,
        f', and there {gap.group} "{within.part}" has the lower value: the sites differ, too': (
            inside and within.part != gap.part
        ),
        ": a part of the difference may be one between the sites": inside < of_all,
        ": differences between the sites may hide a part of it": True,
    })  # fmt: skip
    return f"Within {where}, the gap is {number(inside)}{sure}{ending}."


def how_sure(groups: Mapping[str, Figures], gap: Cell) -> str:
    """Return text about a gap between groups: its interval, or why it has none."""
    if (ends := interval(gap.low, gap.high)) != MISSING:
        return f" ({ends})"
    counts = {group: of[IMAGES].cases for group, of in groups.items() if group not in ("", UNKNOWN)}
    few = [f'"{group}" has {counted(int(n), "case")}' for group, n in counts.items() if n and n < FEW]
    return f" (how sure is not known{': ' if few else ''}{listed(few)})"


def group_notes(results: Results) -> list[str]:
    """Return notes on what the figures by group leave out or cannot tell.

    These are test images whose group is unknown, groups without a test image, rates of equalised odds without images to
    compute them, and groups whose figures a site withholds for too few cases, or to hide a group with too few.
    """
    notes, attributes = list[str](), attributes_of(results)
    withheld = [cell for cell in results.cells if cell.group and not cell.metric]
    for attribute in attributes:
        images = {g: value_of(of, IMAGES) for g, of in groups_at(results, attribute).get("", {}).items() if g}
        without = int(images.pop(UNKNOWN, 0) or 0)
        home = {cell.group for cell in withheld}
        empty = [group for group, count in images.items() if count == 0 and f"{attribute}={group}" not in home]
        notes += true_texts({
            f"{attribute} of {counted(without, 'test image')} is {UNKNOWN}: in no gap.": without,
            f"No test image at any site is of {attribute} {', '.join(empty)}: in no figure.": empty,
        })  # fmt: skip
        many = sum(1 for count in images.values() if count)
        lacking = gathered(
            ((c.metric, c.part), c.group.partition("=")[2])
            for c in results.cells if c.reason == "undefined" and c.group.partition("=")[0] == attribute
        )  # fmt: skip
        notes += [_one_rate(attribute, *key, groups, many) for key, groups in lacking.items()]
    own = "A group's figures at a site are means over its own structures or classes: compare groups, not sites."
    names = gathered((cell.site, cell.group + f"/{cell.part}" * bool(cell.part)) for cell in withheld)
    stays = [
        f"{site or POOLED}: {few(of_site, MOST_TOLD)} "
        f"({withheld_reason(site, results.info.privacy, results.info.said) if site else FEW_SITES})"
        for site, of_site in names.items()
    ]
    kept_back = (
        f"Groups of people that stay at a site and are in no figure: {'; '.join(stays)}. Some are kept back only to "
        "hide another one."
    )
    return notes + [own] * bool(results.footing.how and attributes) + [kept_back] * bool(stays)


def _one_rate(attribute: str, rate: str, label: str, groups: Sequence[str], many: int) -> str:
    """Return a sentence on groups that lack a rate of equalised odds; ``many``: number of groups with images."""
    other = "false positives" if rate == "sensitivity" else "sensitivity"
    images = f"no image {'of' if rate == 'sensitivity' else 'without'} class {label}"
    if many - len(groups) < 2:
        return f"Equalised odds by {attribute} rest on {other} alone for class {label}: {listed(groups)}: {images}."
    return f"In equalised odds by {attribute}, {listed(groups)} count by {other} alone for class {label}: {images}."
