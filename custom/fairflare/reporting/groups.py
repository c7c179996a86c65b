"""Metrics by group of people (``groups`` of a run): at each site and pooled, made of the sums that leave the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base.checks import few
from fairflare.core.statistics.group_intervals import gap_intervals, intervals_of
from fairflare.core.statistics.group_metrics import LABELS, SCALED, curves_of, gaps_of, images_of, metrics_of, worst_of
from fairflare.core.statistics.group_sums import ALL_IMAGES, EVERYBODY, Sums, added
from fairflare.reporting.documents import SUPPRESSED
from fairflare.reporting.layout import MISSING, Cell, Shown, Table, counted, interval, number

UNKNOWN = "unknown"  # as fairflare.data.listing.attributes has it, the last group
POOLED = "all sites"
OF_IMAGES = "images"
IN_ALL = "all"
MOST_TOLD = 8  # names of a site in a sentence
SENTENCES: Mapping[str, tuple[str, Any]] = {
    "ece": ("the told probability is off on average (ece) by", max),
    "auc": ("the area under the ROC curve is", min),
    "dice": ("Dice is", min),
}
OVER = (
    "In brackets the 95 % interval over the images, as if each were of another patient, for all groups and classes "
    "together; one that begins at 0 may be chance."
)


def by_group(
    sums: Mapping[str, Mapping[str, Sums]], kept: Mapping[str, Sequence[str]], bins: int, calibration_bins: int
) -> dict[str, Any]:
    """Puts together what the sites sent, as ``groups`` in ``results.json`` (``docs/groups.md``).

    Args:
        sums: ``{site: {"<attribute>=<group>": sums}}``.
        kept: ``{site: names}`` of what stays there for too few cases.
        bins, calibration_bins: of the run.
    """
    names: dict[str, None] = {name: None for of in sums.values() for name in of}
    attributes: dict[str, list[str]] = {}
    for name in names:
        attribute, _, group = name.partition("=")
        attributes.setdefault(attribute, []).append(group)
    pooled = {name: added([of[name] for of in sums.values() if name in of]) for name in names}
    return {
        "attributes": attributes,
        "group_bins": bins,
        "calibration_bins": calibration_bins,
        "sites": {site: _of_attributes(of, attributes) for site, of in sorted(sums.items())},
        "pooled": _of_attributes(pooled, attributes),
        "kept": dict(kept),
    }


def _of_attributes(sums: Mapping[str, Sums], attributes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    found = {}
    for attribute, groups in attributes.items():
        own = {group: sums[f"{attribute}={group}"] for group in groups if f"{attribute}={group}" in sums}
        if not own:
            continue
        whole = added(list(own.values()))
        known = {group: of for group, of in own.items() if group != UNKNOWN}  # who is not known is no group of people
        found[attribute] = {
            "groups": {group: {OF_IMAGES: images_of(of), **metrics_of(of)} for group, of in own.items()},
            "all": {OF_IMAGES: images_of(whole), **metrics_of(whole)},
            "gaps": gaps_of(known, whole),
            "worst": worst_of(known),
            "intervals": {group: intervals_of(of) for group, of in own.items()},
            "gap_intervals": gap_intervals(known),
        }
        if attribute == EVERYBODY:
            found[attribute] |= {"gaps": {}, "worst": {}, "gap_intervals": {}, "curves": curves_of(whole)}
    return found


def group_tables(results: Mapping[str, Any]) -> list[Table]:
    """Of each attribute its groups by site and pooled, and the gaps between them; none where nobody asked."""
    found = results.get("groups") or {"attributes": {}}
    return [table for attribute in found["attributes"] for table in _tables(found, attribute)]


def _places(found: Mapping[str, Any], attribute: str) -> dict[str, Any]:
    own = {site: of[attribute] for site, of in found["sites"].items() if attribute in of}
    return {**own, POOLED: found["pooled"][attribute]}


def _tables(found: Mapping[str, Any], attribute: str) -> list[Table]:
    places = _places(found, attribute)
    of_all = places[POOLED]
    metrics = [name for name in of_all["all"] if name != OF_IMAGES]
    if attribute == EVERYBODY:
        body: list[list[Cell]] = [
            [place, *(_cell(found, place, attribute, ALL_IMAGES, of["all"], name) for name in (OF_IMAGES, *metrics))]
            for place, of in places.items()
        ]
        return [
            Table(
                "of_everybody",
                "All test images of each site; how well the told probability fits.",
                ["site", OF_IMAGES, *metrics],
                body,
            )
        ]
    rows: list[list[Cell]] = [
        [place, group, *(_cell(found, place, attribute, group, values, name) for name in (OF_IMAGES, *metrics))]
        for place, of in places.items()
        for group, values in [*of["groups"].items(), (IN_ALL, of["all"])]
        if group != UNKNOWN or values[OF_IMAGES] != 0
    ]
    gaps = list(of_all["gaps"])
    sure = [gap for gap in gaps if gap in of_all.get("gap_intervals", ())]
    heads = [["site"], *([gap, f"{gap} low", f"{gap} high"] if gap in sure else [gap] for gap in gaps)]
    return [
        Table(
            f"groups_{attribute}", f"Groups of {attribute} on the test images; {IN_ALL}: those that were told.",
            ["site", attribute, OF_IMAGES, *metrics], rows, lead=2,
        ),
        Table(
            f"gaps_{attribute}", f"Gaps between the groups of {attribute}, {UNKNOWN} in none. {OVER}", ["site", *gaps],
            [[place, *(_gap_cell(of, gap, gap in sure) for gap in gaps)] for place, of in places.items()],
            csv_columns=heads,
        ),
    ]  # fmt: skip


def _gap_cell(of: Mapping[str, Any], gap: str, sure: bool) -> Cell:
    value = of["gaps"].get(gap)
    if not sure:
        return None if value is None else float(value)
    ends = of.get("gap_intervals", {}).get(gap, (None, None))
    told = interval(*ends)
    return Shown(number(value) + ("" if told == MISSING else f" {told}"), [value, *ends])


def _cell(
    found: Mapping[str, Any], place: str, attribute: str, group: str, values: Mapping[str, Any], name: str
) -> Cell:
    if values.get(name) is not None:
        return int(values[name]) if name == OF_IMAGES else float(values[name])
    return SUPPRESSED if f"{attribute}={group}" in found["kept"].get(place, ()) else None


def caption(found: Mapping[str, Any], attribute: str) -> str:
    """Who has the lowest value of an attribute's groups, by how much, and how sure it is, in one sentence."""
    pooled = found["pooled"][attribute]
    if attribute == EVERYBODY:
        return of_everybody(found, "ece" if "ece" in pooled["all"] else "dice")
    metric = next((name for name in reversed(SCALED) if pooled["all"].get(name) is not None), "")
    worst, gap = pooled["worst"].get(metric), pooled["gaps"].get(f"{metric}_gap")
    if not worst or gap is None:
        return f"By {attribute}, fewer than two groups have a value over all sites."
    if gap == 0:
        told = f"By {attribute}, over all sites the groups have the same {metric}"
    else:
        value = number(pooled["groups"][worst][metric])
        told = f"By {attribute}, over all sites {worst} has the lowest {metric}, {value}, {number(gap)} below the best"
    told += _sure(pooled, f"{metric}_gap")
    odds = pooled["gaps"].get("equalised_odds")
    if odds is None:
        return f"{told}."
    return f"{told}; the {LABELS['equalised_odds']} is {number(odds)}{_sure(pooled, 'equalised_odds')}."


def of_everybody(found: Mapping[str, Any], metric: str) -> str:
    """One metric of all images, over all sites and at the worst one, in a sentence."""
    places = _places(found, EVERYBODY)
    values = {place: of["all"].get(metric) for place, of in places.items()}
    known = {place: value for place, value in values.items() if value is not None and place != POOLED}
    if values[POOLED] is None or not known:
        return f"No site tells its {metric}."
    what, worst = SENTENCES[metric]
    at = worst(known, key=lambda place: known[place])
    return f"Over all sites {what} {number(values[POOLED])}; at {at}, the worst, it is {number(known[at])}."


def captions(results: Mapping[str, Any]) -> list[str]:
    """:func:`caption` of each attribute; none where nobody asked."""
    found = results.get("groups") or {"attributes": {}}
    return [caption(found, attribute) for attribute in found["attributes"]]


def _sure(pooled: Mapping[str, Any], gap: str) -> str:
    """Behind a gap: its interval, and whether it may be chance."""
    low, high = pooled.get("gap_intervals", {}).get(gap) or (None, None)
    if low is None or high is None:
        return " (how sure is not known)"
    return f" ({interval(low, high)}{', which may be chance' if low == 0 else ''})"


def group_notes(results: Mapping[str, Any]) -> list[str]:
    """What is in no figure of groups: without a value, without images, and what stays at a site; nothing: all is."""
    found = results.get("groups") or {"attributes": {}, "kept": {}}
    notes = []
    for attribute in found["attributes"]:
        images = {group: of.get(OF_IMAGES) for group, of in found["pooled"][attribute]["groups"].items()}
        kept = {name for names in found["kept"].values() for name in names}
        if without := images.pop(UNKNOWN, 0):
            notes.append(f"{attribute} of {counted(int(without), 'test image')} is {UNKNOWN}: in no gap.")
        if empty := [group for group, count in images.items() if count == 0 and f"{attribute}={group}" not in kept]:
            notes.append(f"No test image at any site is of {attribute} {', '.join(empty)}: in no figure.")
    if stays := [f"{site}: {few(names, MOST_TOLD)}" for site, names in found["kept"].items() if names]:
        why = "fewer cases than min_cases, or needed to hide one with fewer"
        notes.append(f"Groups of people that stay at a site and are in no figure ({why}): {'; '.join(stays)}.")
    return notes


def group_rows(number_of: int, found: Mapping[str, Any]) -> list[list[Any]]:
    """Rows of ``sites.csv``: phase ``groups``, metric ``<attribute>=<group>/<metric>`` and ``<attribute>/<gap>``."""
    places = {"": found["pooled"], **found["sites"]}
    rows = []
    for site, attributes in places.items():
        for attribute, of in attributes.items():
            told = {f"{attribute}={group}/{name}": v for group, m in of["groups"].items() for name, v in m.items()}
            told |= {f"{attribute}/{name}": value for name, value in of["gaps"].items()}
            for name, ends in of.get("gap_intervals", {}).items():
                told |= {f"{attribute}/{name}/{end}": v for end, v in zip(("low", "high"), ends, strict=True)}
            rows += [[number_of, "groups", site, name, value] for name, value in told.items()]
    kept = [(site, name) for site, names in found["kept"].items() for name in names]
    return rows + [[number_of, "groups", site, name, SUPPRESSED] for site, name in kept]
