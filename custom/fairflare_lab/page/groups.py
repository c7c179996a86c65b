"""Draw each group of people's metrics at every site, in one picture for each attribute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fairflare.core.statistics.group_metrics import SCALED
from fairflare.reporting.documents import Groups
from fairflare.reporting.groups import (
    OF_IMAGES,
    POOLED,
    UNKNOWN,
    group_notes,
    group_tables,
)
from fairflare.reporting.layout import number
from fairflare.reporting.values import in_words, sentence
from fairflare_lab.compare.group_gaps import gap_table, notes_of_gaps
from fairflare_lab.page.content import NOTHING, Picture, Section, Table, extremes
from fairflare_lab.page.material import Material, PageRun
from fairflare_lab.page.style import chart, label, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = (
    "A mark for each group at every site, and over all sites; lines are 95 % intervals over the cases, without one it "
    "is not known."
)
OF_GROUPS = "groups_of_"  # prefix of a picture's name, followed by the attribute


def first_run(material: Material) -> PageRun:
    """Return the run of the page, or the first run of a comparison's reference."""
    return next((row for row in material.rows if row.label == material.reference), material.rows[0]).runs[0]


def groups(material: Material) -> Section:
    """Return the section on groups of people by site, of the run or of the first run of a comparison's reference."""
    run = first_run(material)
    found, whose = run.groups, f"Of {run.name}. " if material.reference else ""
    if not found:
        return NOTHING
    notes, gaps = group_notes(run), list[Table]()
    if whose:
        notes += [f"Tables by site are of {run.name}; each other run's page has its own."]
        rows = material.by_label
        gaps, notes = [gap_table(rows, material.reference)], notes + notes_of_gaps(rows, material.reference)
    pictures = [picture_of(found, attribute, material.synthetic, whose) for attribute in found["attributes"]]
    tables = [*gaps, *(replace(table, caption=whose + table.caption) for table in group_tables(run))]
    return Section("groups", "Groups of people", notes=notes, parts=[*pictures, *tables])


def _metric(pooled: Mapping[str, Any]) -> str:
    return next((name for name in reversed(SCALED) if name in pooled["all"]), OF_IMAGES)


def _in_figures(found: Groups, attribute: str) -> str:
    """Return figures in words: ``auc by sex: F from 0.71 (site-2) to 0.80 (site-1), 0.75 over all sites; M ...``."""
    pooled = found["pooled"][attribute]
    metric = _metric(pooled)
    told = []
    for group in found["attributes"][attribute]:
        by_site = {site: of[attribute]["groups"].get(group, {}).get(metric) for site, of in found["sites"].items()}
        if group != UNKNOWN and (ends := extremes(by_site)):
            told.append(f"{group} {ends}, {number(pooled['groups'][group].get(metric))} over all sites")
    return f"{sentence(in_words(metric))} by {attribute}: {'; '.join(told) or 'not known of any group'}."


def picture_of(found: Groups, attribute: str, synthetic: bool, whose: str) -> Picture:
    """Return a picture of the metric of each group of an attribute at every site.

    Args:
        found: metrics by group, from :func:`fairflare.reporting.groups.by_group`.
        attribute: name of the attribute.
        synthetic: whether the data are synthetic.
        whose: sentence before the caption.
    """
    places = {**{site: of[attribute] for site, of in found["sites"].items()}, POOLED: found["pooled"][attribute]}
    metric, shown = _metric(places[POOLED]), [group for group in found["attributes"][attribute] if group != UNKNOWN]
    draw = partial(
        chart, partial(_dots, places, metric, shown), 2.6, f"{sentence(in_words(metric))} of each group of {attribute}",
        synthetic, count=len(shown), grid="y", ylabel=in_words(metric),
    )  # fmt: skip
    return Picture(f"{OF_GROUPS}{attribute}", draw, whose + MARKS, _in_figures(found, attribute))


def _dots(places: Mapping[str, Any], metric: str, shown: Sequence[str], axes: Axes) -> None:
    """Draw a row of dots for each group of people: the group's value at every site, and pooled."""
    for rank, group in enumerate(shown):
        style = look(rank)
        across = [place + 0.5 * ((rank + 0.5) / len(shown) - 0.5) for place in range(len(places))]
        values = [of["groups"].get(group, {}).get(metric) for of in places.values()]
        heights = [math.nan if value is None else value for value in values]
        axes.plot(across, heights, color=style.colour, marker=style.marker, linestyle="none", label=label(group))
        for x, of in zip(across, places.values(), strict=True):
            ends = of.get("intervals", {}).get(group, {}).get(metric) or [None]
            if None not in ends:
                axes.plot([x, x], [*ends], color=style.colour, linewidth=1.2)
    axes.set_xticks(range(len(places)), [label(place) for place in places])
    axes.margins(0.1)
