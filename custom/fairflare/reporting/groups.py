"""Compute and show metrics by group of people (``groups`` of a run), by site and pooled, from sums of the sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fairflare.base.checks import few, first_of, true_texts
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
from fairflare.reporting.documents import SUPPRESSED, Groups, OfGroups, Results
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, counted, interval, listed, number
from fairflare.reporting.values import in_words, withheld_reason

UNKNOWN = "unknown"  # name of the last group, of images without a value, as in fairflare.data.listing.attributes
POOLED = "all sites"
OF_IMAGES, OF_CASES = COUNTS = (IMAGES, CASES)
IN_ALL = "all"
APART = 0.01  # least difference at which a sentence says that gaps over all sites and within sites differ
MOST_TOLD = 8  # largest number of a site's names in a sentence
OVER = (
    "In brackets the 95 % interval over the cases (patients, where the data name them), for all groups and classes "
    f"together; one that begins at 0 may be chance, and where a group has fewer than {FEW} cases there is none. "
    f"'{WITHIN}': between the groups at each site, on average over the sites that have both."
)
At: TypeAlias = Mapping[str, Mapping[str, Sums]]  # sums by site, then by group


def by_group(sums: At, kept: Mapping[str, Sequence[str]], bins: int, calibration_bins: int) -> dict[str, Any]:
    """Return ``groups`` of ``results.json``, computed from the sums that the sites sent (``docs/groups.md``).

    Args:
        sums: ``{site: {"<attribute>=<group>": sums}}``, of each part of the cases or of all cases together; with secure
            sums only those of all sites together, under the name ``POOLED``.
        kept: ``{site: names}`` of groups and classes that the site withholds for too few cases.
        bins, calibration_bins: the run's settings ``group_bins`` and ``calibration_bins``.
    """
    names: dict[str, None] = {name: None for of in sums.values() for name in of}
    attributes: dict[str, list[str]] = {}
    for name in names:
        attribute, _, group = name.partition("=")
        attributes.setdefault(attribute, []).append(group)
    sites: dict[str, dict[str, Any]] = {site: {} for site in sorted(sums) if site != POOLED}
    pooled = {}
    for attribute, groups in attributes.items():
        keys = {f"{attribute}={group}": group for group in groups}
        at = {site: {group: sums[site][key] for key, group in keys.items() if key in sums[site]} for site in sums}
        for site, own in at.items():
            if site != POOLED:
                sites[site][attribute] = _of_groups({group: in_one(of) for group, of in own.items()})
        pooled[attribute] = _pooled(at)
    return {
        "attributes": attributes,
        "group_bins": bins,
        "calibration_bins": calibration_bins,
        "sites": sites,
        "pooled": pooled,
        "kept": dict(kept),
    }


def _of_groups(own: Mapping[str, Sums]) -> dict[str, Any]:
    """Return the figures of the groups of one site, or of all sites together."""
    whole, known = added(list(own.values())), _known(own)
    return {
        "groups": {group: _figures(of) for group, of in own.items()},
        "all": _figures(whole),
        "gaps": gaps_of(known, whole),
        "worst": worst_of(known),
        "intervals": {group: intervals_of(of) for group, of in own.items()},
        "gap_intervals": gap_intervals(known),
    }


def _figures(sums: Sums) -> dict[str, float]:
    return {OF_IMAGES: images_of(sums), OF_CASES: cases_of(sums), **metrics_of(sums)} if sums else {}


def _known(own: Mapping[str, Sums]) -> dict[str, Sums]:
    return {group: of for group, of in own.items() if group != UNKNOWN}  # images without a value are no group of people


def _together(at: At) -> dict[str, Sums]:
    groups = dict.fromkeys(group for own in at.values() for group in own)
    return {group: added([own[group] for own in at.values() if group in own]) for group in groups}


def _pooled(at: At) -> dict[str, Any]:
    """Return the figures of all sites together.

    Gaps are computed within the sites too, and all gaps again without each part of the cases in turn.
    """
    whole = {site: {group: in_one(of) for group, of in own.items()} for site, own in at.items()}
    found = _of_groups(_together(whole))
    found["gaps"], within = _gaps(whole)
    found["within"] = {name: {"lowest": lowest, "sites": sites} for name, (_, lowest, sites) in within.items()}
    found["undefined_rates"] = undefined_rates(_known(_together(whole)))
    parts = {site: {group: without_each(of) for group, of in own.items()} for site, own in at.items()}
    if parts and all(of for own in parts.values() for of in own.values()):
        each = [
            _gaps({site: {group: of[part] for group, of in own.items()} for site, own in parts.items()})[0]
            for part in range(FOLDS)
        ]
        found["without"] = {name: [gaps[name] for gaps in each] for name in found["gaps"]}
    for name, (gap, _, sites) in within.items():
        own = _together({site: _known(whole[site]) for site in sites})
        found["gap_intervals"][name] = _ends_within(gap, found.get("without", {}).get(name, ()), own)
    return found


def _gaps(at: At) -> tuple[dict[str, float], dict[str, tuple[float, str, list[str]]]]:
    """Return all gaps between groups by name, and each gap within sites with its value, lower group and sites."""
    together = _together(at)
    gaps = gaps_of(_known(together), added(list(together.values())))
    known = {site: {group: _figures(of) for group, of in _known(own).items()} for site, own in at.items()}
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


def group_tables(results: Results) -> list[Table]:
    """Return tables of each attribute's groups, by site and pooled, and of the gaps; empty if the run has no groups."""
    return [table for attribute in results.groups.attributes for table in _tables(results.groups, attribute)]


def _places(found: Groups, attribute: str) -> dict[str, OfGroups]:
    sites = {site: of[attribute] for site, of in found.sites.items() if attribute in of}
    return sites | {POOLED: found.pooled[attribute]}


def _tables(found: Groups, attribute: str) -> list[Table]:
    places = _places(found, attribute)
    of_all = places[POOLED]
    names = [*COUNTS, *(name for name in of_all.all if name not in COUNTS)]

    def cells(place: str, group: str, values: Mapping[str, float]) -> list[Cell]:
        otherwise = SUPPRESSED if f"{attribute}={group}" in found.kept.get(place, ()) else None
        known = {name: int(v) if name in COUNTS else float(v) for name, v in values.items() if v is not None}
        return [known.get(name, otherwise) for name in names]

    rows = [
        [place, group, *cells(place, group, values)]
        for place, of in places.items()
        for group, values in [*of.groups.items(), (IN_ALL, of.all)]
        if group != UNKNOWN or values.get(OF_IMAGES) != 0
    ]
    gaps, sure = list(of_all.gaps), of_all.gap_intervals
    heads = [["site"], *([gap, f"{gap} low", f"{gap} high"] if gap in sure else [gap] for gap in gaps)]
    return [
        Table(
            f"groups_{attribute}", f"Groups of {attribute} on the test images; {IN_ALL}: those that were told.",
            ["site", attribute, *names], rows, lead=2,
        ),
        Table(
            f"gaps_{attribute}", f"Gaps between the groups of {attribute}, {UNKNOWN} in none. {OVER}", ["site", *gaps],
            [[place, *(_gap_cell(of, gap, gap in sure) for gap in gaps)] for place, of in places.items()],
            folded=True, csv_columns=heads,
        ),
    ]  # fmt: skip


def _gap_cell(of: OfGroups, gap: str, sure: bool) -> Cell:
    value = of.gaps.get(gap)
    ends = of.gap_intervals.get(gap, (None, None))
    text = f"{number(value)} {interval(*ends)}".removesuffix(f" {MISSING}")
    return Shown(text, [value, *ends]) if sure else value


def gap_sentences(found: Groups, attribute: str) -> tuple[bool, str]:
    """Return whether the interval of any gap between the groups of an attribute excludes 0, and sentences on the gaps.

    The first sentence names every such gap, over all sites and at single sites. Only where there is none may the gaps
    be chance. The next ones are on the group with the lowest value: its gap, interval, and gap within sites.
    """
    pooled, places = found.pooled[attribute], {POOLED: found.pooled[attribute], **_places(found, attribute)}
    intervals = {
        (place, gap): ends for place, of in places.items() for gap in of.gap_intervals if (ends := _ends(of, gap))
    }
    beyond = [_gap_in_words(place, places[place], gap) for (place, gap), ends in intervals.items() if ends[0] > 0]
    metric = next((name for name in reversed(SCALED) if pooled.all.get(name) is not None), "")
    worst, gap, odds = pooled.worst.get(metric), pooled.gaps.get(f"{metric}_gap"), pooled.gaps.get("equalised_odds")
    sentences = true_texts({
        f"The groups of {attribute} differ, with 95 % intervals that exclude 0: {listed(beyond, '; ')}.": beyond,
        f"Across all sites, fewer than two groups of {attribute} have a value.": (
            not beyond and (not worst or gap is None)
        ),
    })  # fmt: skip
    if worst and gap is not None:
        values = {group: of[metric] for group, of in pooled.groups.items() if of.get(metric) is not None}
        best = max((group for group in values if group != UNKNOWN), key=lambda group: values[group], default="")
        lowest = (
            f'{attribute} "{worst}" has the lowest {in_words(metric)}: {number(values.get(worst))}, '
            f'{number(gap)} below {attribute} "{best}"'
        )
        if number(gap) == number(0):  # equal as shown: differences by rounding do not count
            lowest = f"the groups of {attribute} have the same {in_words(metric)}"
        inside = len(found.sites) > 1 and "within" in pooled.model_fields_set
        sentences += true_texts({
            f"Across all sites, {lowest}{how_sure(pooled, f'{metric}_gap')}.": True,
            _within_words(pooled, attribute, f"{metric}_gap", worst): inside,
            f"The {LABELS['equalised_odds']} is {number(odds)}{how_sure(pooled, 'equalised_odds')}.": odds is not None,
            "No interval of a gap excludes 0, so that all of them may be chance.": intervals and not beyond,
        })  # fmt: skip
    return bool(beyond), " ".join(sentences)


def _gap_in_words(place: str, of: OfGroups, gap: str) -> str:
    """Return a gap at a place in words: its name, value, interval and, of a metric, the group with the lowest value."""
    lowest = of.within[gap].lowest if gap in of.within else of.worst.get(gap.removesuffix("_gap"))
    where = "" if place == POOLED else f"at {place}, "
    return f"{where}{gap_label(gap)} {number(of.gaps[gap])} {interval(*of.gap_intervals[gap])}" + (
        f' (lowest: "{lowest}")' if lowest else ""
    )


def gap_label(gap: str) -> str:
    """Return the name of a gap in words: ``gap in accuracy within the sites``."""
    metric, _, within = gap.partition("_gap")
    return LABELS.get(gap) or f"gap in {in_words(metric)}{' within the sites' * bool(within)}"


def _within_words(pooled: OfGroups, attribute: str, name: str, worst: str) -> str:
    """Return a sentence on the gap within sites, and on how it differs from the gap over all sites."""
    inside, of = pooled.gaps.get(f"{name}{WITHIN}"), pooled.within.get(f"{name}{WITHIN}")
    if inside is None or not of or not of.sites:
        return "No site has two of these groups, so this may be a difference between the sites."
    several, gap = len(of.sites) > 1, pooled.gaps[name]
    where = f"the {len(of.sites)} sites that have both" if several else f"{of.sites[0]}, the only site with both"
    sure = how_sure(pooled, f"{name}{WITHIN}") if _ends(pooled, name) else ""  # else the reason is already given
    ending = first_of({
        "": abs(inside - gap) < APART,
        f', and there {attribute} "{of.lowest}" has the lower value: the sites differ, too': (
            inside and of.lowest != worst
        ),
        ": a part of the difference may be one between the sites": inside < gap,
        ": differences between the sites may hide a part of it": True,
    })  # fmt: skip
    return f"Within {where}, the gap is {number(inside)}{sure}{ending}."


def _ends(pooled: OfGroups, gap: str) -> Ends | None:
    ends = pooled.gap_intervals.get(gap, (None, None))
    return None if None in ends else ends


def how_sure(pooled: OfGroups, gap: str) -> str:
    """Return text about a gap between groups: its interval, or why it has none."""
    if ends := _ends(pooled, gap):
        return f" ({interval(*ends)})"
    few = [
        f'"{group}" has {counted(int(of[OF_CASES]), "case")}'
        for group, of in pooled.groups.items()
        if group != UNKNOWN and 0 < (of.get(OF_CASES) or 0) < FEW
    ]
    return f" (how sure is not known{': ' if few else ''}{listed(few)})"


def group_notes(results: Results) -> list[str]:
    """Return notes on what the figures by group leave out or cannot tell.

    These are test images whose group is unknown, groups without a test image, rates of equalised odds without images to
    compute them, and groups whose figures a site withholds for too few cases, or to hide a group with too few.
    """
    found, notes = results.groups, []
    kept = {name for names in found.kept.values() for name in names}
    for attribute in found.attributes:
        pooled = found.pooled[attribute]
        images = {group: of.get(OF_IMAGES) for group, of in pooled.groups.items()}
        without = int(images.pop(UNKNOWN, 0) or 0)
        empty = [group for group, count in images.items() if count == 0 and f"{attribute}={group}" not in kept]
        notes += true_texts({
            f"{attribute} of {counted(without, 'test image')} is {UNKNOWN}: in no gap.": without,
            f"No test image at any site is of {attribute} {', '.join(empty)}: in no figure.": empty,
        })  # fmt: skip
        many = sum(1 for count in images.values() if count)
        notes += [_one_rate(attribute, key, groups, many) for key, groups in pooled.undefined_rates.items()]
    own = "A group's figures at a site are means over its own structures or classes: compare groups, not sites."
    of_sums = {POOLED: "secure sums of fewer than three sites"}
    stays = [
        f"{site}: {few(names, MOST_TOLD)} "
        f"({of_sums.get(site) or withheld_reason(site, results.info.privacy, results.info.said)})"
        for site, names in found.kept.items() if names
    ]  # fmt: skip
    kept_back = (
        f"Groups of people that stay at a site and are in no figure: {'; '.join(stays)}. Some are kept back only to "
        "hide another one."
    )
    return notes + [own] * bool(results.footing.how and found.attributes) + [kept_back] * bool(stays)


def _one_rate(attribute: str, key: str, groups: Sequence[str], many: int) -> str:
    """Return a sentence on groups that lack one of the rates of equalised odds.

    ``key``: a key of :func:`undefined_rates`; ``many``: number of groups with images.
    """
    rate, _, label = key.rpartition(" ")
    other = "false positives" if rate == "sensitivity" else "sensitivity"
    images = f"no image {'of' if rate == 'sensitivity' else 'without'} class {label}"
    if many - len(groups) < 2:
        return f"Equalised odds by {attribute} rest on {other} alone for class {label}: {listed(groups)}: {images}."
    return f"In equalised odds by {attribute}, {listed(groups)} count by {other} alone for class {label}: {images}."
