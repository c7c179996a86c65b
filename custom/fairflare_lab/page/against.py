"""Draw methods against two figures at once: the average over the sites and the worst site."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fairflare.reporting.layout import number
from fairflare.reporting.values import in_words
from fairflare_lab.page.content import NOTHING, Picture, Section, Table, listed
from fairflare_lab.page.material import Material, PageRow
from fairflare_lab.page.style import INK, chart, label, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def pareto(material: Material) -> Section:
    """Return the section that shows methods by average and worst site, and by worst decile with 20 sites or more."""
    rows = [row for row in material.rows if math.isfinite(row.over("worst").mean)]
    if len(rows) < 2:
        return NOTHING
    deciles = any(summary.num_sites >= 20 for row in rows for summary in row.summaries)
    axes_of = {"worst": "worst site", **({"bottom_decile": "worst decile"} if deciles else {})}
    apart = set_apart(rows)
    ranked = [row for row in rows if row.label not in apart]
    fronts = {name: not_dominated(ranked, name, material.higher) for name in axes_of}
    parts: list[Picture | Table] = []
    for name, called in axes_of.items():
        told = (
            f"{row.label} {number(row.over('mean').mean)} and {number(row.over(name).mean)}"
            f"{', not beaten' if row.label in fronts[name] else ''}"
            for row in rows
        )
        deviations = "; thin lines are standard deviations over seeds" if material.over_seeds else ""
        parts.append(Picture(
            f"pareto_{name}", scatter(material, rows, name, called, fronts[name]),
            f"Each method's average over the sites against its {called}{material.over_seeds}{deviations}. A ring marks "
            "those that no other beats: none is at least as good in both and better in one (a row of one seed beside "
            "others of several, or without a value of some site, takes no part). Whether a step between two of them is "
            "more than noise, the differences say.",
            f"Average and {called}: {listed(told, '; ')}.",
        ))  # fmt: skip
    cells = [
        [row.label, row.over("mean"), *(cell for name, front in fronts.items() for cell in (
            row.over(name), apart.get(row.label) or ("yes" if row.label in front else "no")
        ))]
        for row in rows
    ]  # fmt: skip
    text = "Average and worst site, and who is beaten by no other row in both (by the means over seeds)."
    heads = ["method", "average", *(name for called in axes_of.values() for name in (called, f"not beaten ({called})"))]
    notes = [] if deciles else ["With fewer than 20 sites the worst tenth of them is the worst site."]
    notes += [f"{name}: {why}; it beats nobody and is not ranked." for name, why in apart.items()]
    return Section("pareto", "Average and worst site", notes=notes, parts=[*parts, Table("pareto", text, heads, cells)])


def set_apart(rows: Sequence[PageRow]) -> dict[str, str]:
    """Return the rows that are not ranked, with the reason: one seed where others have several, or fewer sites."""
    sites = {site for row in rows for values in row.values for site, value in values.items() if math.isfinite(value)}
    seeds = max(len(row.runs) for row in rows)
    single = {row.label: "one seed" for row in rows if len(row.runs) == 1 < seeds}
    return {row.label: "fewer sites" for row in rows if row.lacks(sites)} | single


def not_dominated(rows: Sequence[PageRow], attribute: str, higher: bool) -> list[str]:
    """Return the labels of rows that no other row dominates, in the average and in the figure ``attribute``."""
    sign = 1 if higher else -1
    points = {row.label: (sign * row.over("mean").mean, sign * row.over(attribute).mean) for row in rows}
    return [
        name
        for name, own in points.items()
        if not any(o[0] >= own[0] and o[1] >= own[1] and o != own for o in points.values())
    ]


def scatter(
    material: Material, rows: Sequence[PageRow], attribute: str, called: str, front: Collection[str]
) -> Callable[[], Figure]:
    """Return a function that draws a mark for each of ``rows``, and a ring around the rows of ``front``."""
    better = "higher is better" if material.higher else "lower is better"
    return partial(
        chart, partial(_marks, material, rows, attribute, front), 3.3,
        f"{in_words(material.metric)}: average against {called}", material.synthetic, count=len(rows), grid="both",
        xlabel=f"average over the sites ({better})", ylabel=f"{called} ({better})",
    )  # fmt: skip


def _marks(material: Material, rows: Sequence[PageRow], attribute: str, front: Collection[str], axes: Axes) -> None:
    for row in rows:
        style, mean, low = look(material.rows.index(row)), row.over("mean"), row.over(attribute)
        x_error, y_error = ([of.sd] if math.isfinite(of.sd) else None for of in (mean, low))
        axes.errorbar([mean.mean], [low.mean], xerr=x_error, yerr=y_error, color=style.colour, marker=style.marker,
                      markersize=7, elinewidth=0.8, linestyle="none", label=label(row.label))  # fmt: skip
        if row.label in front:
            axes.plot([mean.mean], [low.mean], "o", markersize=14, markerfacecolor="none", markeredgecolor=INK)
    axes.margins(0.15)
