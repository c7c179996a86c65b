"""Draw each group of people's metrics at every site, in one picture for each attribute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fairflare.core.cells import Cell
from fairflare.core.statistics.group_metrics import SCALED
from fairflare.core.statistics.group_sums import IMAGES
from fairflare.reporting.documents import RunResults
from fairflare.reporting.groups import POOLED, UNKNOWN, attributes_of, group_notes, group_tables, groups_at
from fairflare.reporting.layout import Table
from fairflare.reporting.values import sentence, spell_metric
from fairflare_lab.compare.group_gaps import gap_table, notes_of_gaps
from fairflare_lab.page.content import NOTHING, Picture, Section
from fairflare_lab.page.material import Material, name_of
from fairflare_lab.page.style import chart, label, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = (
    "A mark for each group at every site, and over all sites; lines are 95 % intervals over the cases, without one it "
    "is not known."
)


def groups(material: Material) -> Section:
    """Return the section on groups of people by site, of the run or of the first run of a comparison's reference."""
    several = bool(material.reference)
    by_label = {row.label: row.runs for row in material.rows}
    run = by_label.get(material.reference, material.runs)[0]
    if not any(cell.group for cell in run.cells):
        return NOTHING
    whose, notes, gaps = f"Of {name_of(run)}. " * several, group_notes(run), list[Table]()
    if several:
        gaps = [gap_table(by_label, material.reference)]
        notes += notes_of_gaps(by_label, material.reference)
    return Section("groups", "Groups of people", notes, [
        *(picture_of(run, attribute, material.synthetic, whose) for attribute in attributes_of(run)), *gaps,
        *(replace(table, caption=whose + table.caption) for table in group_tables(run)),
    ])  # fmt: skip


def picture_of(run: RunResults, attribute: str, synthetic: bool, whose: str) -> Picture:
    """Return a picture of the metric of each group of an attribute at every site.

    Args:
        run: results of a run with figures by group.
        attribute: name of the attribute.
        synthetic: whether the data are synthetic.
        whose: sentence before the caption.
    """
    found = groups_at(run, attribute)
    places = {**{site: of for site, of in found.items() if site}, POOLED: found[""]}
    metric = next((name for name in reversed(SCALED) if name in found[""][""]), IMAGES)
    cells = {
        group: {place: of.get(group, {}).get(metric, Cell(metric)) for place, of in places.items()}
        for group in found[""] if group not in ("", UNKNOWN)
    }  # fmt: skip
    return Picture(
        f"groups_of_{attribute}",
        partial(
            chart, partial(_dots, cells), 2.6, f"{sentence(spell_metric(metric))} of each group of {attribute}",
            synthetic, count=len(cells), grid="y", ylabel=spell_metric(metric),
        ),
        whose + MARKS,
    )  # fmt: skip


def _dots(cells: Mapping[str, Mapping[str, Cell]], axes: Axes) -> None:
    """Draw a row of dots for each group of people: the group's value at every site, and pooled."""
    places = list(next(iter(cells.values()), ()))
    for rank, (group, of) in enumerate(cells.items()):
        style = look(rank)
        across = [place + 0.5 * ((rank + 0.5) / len(cells) - 0.5) for place in range(len(places))]
        heights = [math.nan if cell.value is None else cell.value for cell in of.values()]
        axes.plot(across, heights, color=style.colour, marker=style.marker, linestyle="none", label=label(group))
        for x, cell in zip(across, of.values(), strict=True):
            if cell.low is not None and cell.high is not None:
                axes.plot([x, x], [cell.low, cell.high], color=style.colour, linewidth=1.2)
    axes.set_xticks(range(len(places)), [label(place) for place in places])
    axes.margins(0.1)
