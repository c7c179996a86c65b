"""Average of the sites and the worst site: which method is beaten in neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairflare.reporting.layout import number
from fairflare.reporting.values import in_words
from fairflare_lab.page.content import Picture, Section, Table, listed
from fairflare_lab.page.material import Material, PageRow
from fairflare_lab.page.style import GRID, INK, label, legend, look, panel, rows_of_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pareto(material: Material) -> Section | None:
    """Average against the worst site, and against the worst decile where that is more than one site."""
    rows = [row for row in material.rows if math.isfinite(row.over("worst").mean)]
    if len(rows) < 2:
        return None
    deciles = any(summary.num_sites >= 20 for row in rows for summary in row.summaries)
    axes_of = [("worst", "worst site"), *([("bottom_decile", "worst decile")] if deciles else [])]
    apart = set_apart(rows)
    fair = [row for row in rows if row.label not in apart]
    fronts = {attribute: not_dominated(fair, attribute, material.higher) for attribute, _ in axes_of}
    pictures = [_picture(material, rows, attribute, called, fronts[attribute]) for attribute, called in axes_of]
    table = Table(
        "pareto",
        "Average and worst site, and who is beaten by no other row in both (by the means over seeds).",
        ["method", "average", *(name for _, called in axes_of for name in (called, f"not beaten ({called})"))],
        [
            [row.label, row.over("mean"), *(cell for attribute, front in fronts.items() for cell in (
                row.over(attribute), apart.get(row.label) or ("yes" if row.label in front else "no")
            ))]
            for row in rows
        ],
    )  # fmt: skip
    notes = [] if deciles else ["With fewer than 20 sites the worst tenth of them is the worst site."]
    notes += [f"{name}: {why}; it beats nobody and is not ranked." for name, why in apart.items()]
    return Section("pareto", "Average and worst site", notes=notes, parts=[*pictures, table])


def _picture(material: Material, rows: Sequence[PageRow], attribute: str, called: str, front: Sequence[str]) -> Picture:
    told = (
        f"{row.label} {number(row.over('mean').mean)} and {number(row.over(attribute).mean)}"
        f"{', not beaten' if row.label in front else ''}"
        for row in rows
    )
    return Picture(
        f"pareto_{attribute}",
        lambda: _scatter(material, rows, attribute, called, front),
        f"Each method's average over the sites against its {called}{material.over_seeds}"
        f"{'; thin lines are standard deviations over seeds' if material.over_seeds else ''}. A ring marks those that "
        "no other beats: none is at least as good in both and better in one (a row of one seed beside others of "
        "several, or without a value of some site, takes no part). Whether a step between two of them is more than "
        "noise, the differences say.",
        f"Average and {called}: {listed(told, '; ')}.",
    )


def set_apart(rows: Sequence[PageRow]) -> dict[str, str]:
    """Labels of rows that others are not ranked with, and why: one seed beside rows of several, or fewer sites."""
    sites = {site for row in rows for values in row.values for site, value in values.items() if math.isfinite(value)}
    found = {}
    for row in rows:
        if len(row.runs) == 1 and any(len(other.runs) > 1 for other in rows):
            found[row.label] = "one seed"
        elif any(not math.isfinite(values.get(site, math.nan)) for values in row.values for site in sites):
            found[row.label] = "fewer sites"
    return found


def not_dominated(rows: Sequence[PageRow], attribute: str, higher: bool) -> list[str]:
    """Labels of the rows that no other is at least as good as in both and better in one."""
    sign = 1 if higher else -1
    points = {row.label: (sign * row.over("mean").mean, sign * row.over(attribute).mean) for row in rows}
    return [
        name
        for name, own in points.items()
        if not any(o[0] >= own[0] and o[1] >= own[1] and o != own for o in points.values())
    ]


def _scatter(material: Material, rows: Sequence[PageRow], attribute: str, called: str, front: Sequence[str]) -> Figure:
    height = 3.3 + rows_of_legend(len(rows))
    made, axes = panel(height, f"{in_words(material.metric)}: average against {called}", material.synthetic)
    ranks = {row.label: index for index, row in enumerate(material.rows)}
    for row in rows:
        style, mean, low = look(ranks[row.label]), row.over("mean"), row.over(attribute)
        axes.errorbar(
            [mean.mean], [low.mean], xerr=[mean.sd] if math.isfinite(mean.sd) else None,
            yerr=[low.sd] if math.isfinite(low.sd) else None, color=style.colour, marker=style.marker, markersize=7,
            elinewidth=0.8, linestyle="none", label=label(row.label),
        )  # fmt: skip
        if row.label in front:
            axes.plot([mean.mean], [low.mean], "o", markersize=14, markerfacecolor="none", markeredgecolor=INK)
    better = "higher is better" if material.higher else "lower is better"
    axes.set_xlabel(f"average over the sites ({better})")
    axes.set_ylabel(f"{called} ({better})")
    axes.grid(True, color=GRID)
    axes.margins(0.15)
    legend(made, axes, len(rows))
    return made
