"""Metrics by group of people (``groups`` of a run): at each site and pooled, made of the sums that leave the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.core.statistics.group_metrics import LABELS, SCALED, gaps_of, images_of, metrics_of, worst_of
from fairflare.core.statistics.group_sums import Sums, added
from fairflare.reporting.documents import SUPPRESSED
from fairflare.reporting.layout import Cell, Table, number

UNKNOWN = "unknown"  # as fairflare.data.attributes has it, the last group
POOLED = "all sites"
OF_IMAGES = "images"


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
        whole = added(list(own.values()))
        known = {group: of for group, of in own.items() if group != UNKNOWN}  # who is not known is no group of people
        found[attribute] = {
            "groups": {group: {OF_IMAGES: images_of(of), **metrics_of(of)} for group, of in own.items()},
            "all": {OF_IMAGES: images_of(whole), **metrics_of(whole)},
            "gaps": gaps_of(known, whole),
            "worst": worst_of(known),
        }
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
    rows: list[list[Cell]] = [
        [place, group, *(_cell(found, place, attribute, group, values, name) for name in (OF_IMAGES, *metrics))]
        for place, of in places.items()
        for group, values in of["groups"].items()
        if group != UNKNOWN or values[OF_IMAGES] != 0
    ]
    gaps = list(of_all["gaps"])
    return [
        Table(f"groups_{attribute}", caption(found, attribute), ["site", attribute, OF_IMAGES, *metrics], rows),
        Table(
            f"gaps_{attribute}", f"Gaps between the groups of {attribute}; {UNKNOWN} is in none.", ["site", *gaps],
            [[place, *(of["gaps"].get(gap) for gap in gaps)] for place, of in places.items()],
        ),
    ]  # fmt: skip


def _cell(
    found: Mapping[str, Any], place: str, attribute: str, group: str, values: Mapping[str, Any], name: str
) -> Cell:
    if values.get(name) is not None:
        return int(values[name]) if name == OF_IMAGES else float(values[name])
    return SUPPRESSED if f"{attribute}={group}" in found["kept"].get(place, ()) else None


def caption(found: Mapping[str, Any], attribute: str) -> str:
    """What the picture and table of an attribute say, in one sentence."""
    pooled = found["pooled"][attribute]
    metric = next((name for name in reversed(SCALED) if pooled["all"].get(name) is not None), "")
    worst, gap = pooled["worst"].get(metric), pooled["gaps"].get(f"{metric}_gap")
    if not worst or gap is None:
        return f"By {attribute}, fewer than two groups have a value over all sites."
    value = pooled["groups"][worst][metric]
    told = (
        f"By {attribute}, over all sites {worst} has the lowest {metric}, {number(value)}, {number(gap)} below the best"
    )
    odds = pooled["gaps"].get("equalised_odds")
    return f"{told}; the {LABELS['equalised_odds']} is {number(odds)}." if odds is not None else f"{told}."


def group_rows(number_of: int, found: Mapping[str, Any]) -> list[list[Any]]:
    """Rows of ``sites.csv``: phase ``groups``, metric ``<attribute>=<group>/<metric>`` and ``<attribute>/<gap>``."""
    places = {"": found["pooled"], **found["sites"]}
    rows = []
    for site, attributes in places.items():
        for attribute, of in attributes.items():
            told = {f"{attribute}={group}/{name}": v for group, m in of["groups"].items() for name, v in m.items()}
            told |= {f"{attribute}/{name}": value for name, value in of["gaps"].items()}
            rows += [[number_of, "groups", site, name, value] for name, value in told.items()]
    kept = [(site, name) for site, names in found["kept"].items() for name in names]
    return rows + [[number_of, "groups", site, name, SUPPRESSED] for site, name in kept]
