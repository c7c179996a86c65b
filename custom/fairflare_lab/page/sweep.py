"""Average and worst site against a setting that a comparison goes through."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairflare.reporting.layout import number
from fairflare.reporting.values import in_words
from fairflare_lab.page.content import Picture, Section, Spread, Table, listed
from fairflare_lab.page.material import Material, PageRow
from fairflare_lab.page.style import GRID, figure, label, legend, log_scale, look, rows_of_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SWEPT = re.compile(r"(.+), ([\w.]+)=(-?\d[\d.e+-]*)")  # as fairflare.federation.plan.series calls the rows of a sweep
PANELS = (("mean", "average"), ("worst", "worst site"))
Lines = dict[str, list[tuple[float, PageRow]]]


def sweep(material: Material) -> Section | None:
    """A figure and a table for each setting that rows are swept over; ``None``: there is none."""
    swept: dict[str, Lines] = {}
    for row in material.rows:
        if (found := SWEPT.fullmatch(row.label)) and row.summaries:
            points = swept.setdefault(found[2], {}).setdefault(found[1], [])
            points.append((float(json.loads(found[3])), row))
    several = {name: lines for name, lines in swept.items() if max(map(len, lines.values())) > 1}
    if not several:
        return None
    inside = {id(row) for lines in several.values() for points in lines.values() for _, row in points}
    others = [row for row in material.rows if id(row) not in inside and row.summaries]
    parts = [part for name, lines in several.items() for part in _parts(material, name, lines, others)]
    return Section("sweep", "Against a setting", parts=parts)


def _parts(material: Material, name: str, lines: Lines, others: Sequence[PageRow]) -> list[Picture | Table]:
    rows = [(line, value, row) for line, points in lines.items() for value, row in sorted(points, key=lambda p: p[0])]
    told = (f"{line} {value:g}: {number(row.over('mean').mean)}" for line, value, row in rows)
    file = f"sweep_{re.sub(r'[^a-z0-9]+', '_', name.lower())}"
    return [
        Picture(
            file,
            lambda: _draw(material, name, lines, others),
            f"{in_words(material.metric)} over the sites against {name}: their average and the worst one"
            f"{material.over_seeds}. "
            "Bars are 95 % intervals of the mean over seeds (Student's t), where there are several; a dashed line is a "
            "row without the setting.",
            f"Average against {name}: {listed(told, '; ')}.",
        ),
        Table(
            file,
            f"{in_words(material.metric)} against {name}.",
            ["method", name, *(called for _, called in PANELS)],
            [[line, value, *(row.over(attribute) for attribute, _ in PANELS)] for line, value, row in rows],
        ),
    ]


def half_width(found: Spread, runs: int) -> float:
    """Of the 95 % interval of a mean over so many runs, from their population standard deviation; NaN of one run."""
    from scipy.stats import t

    return float(t.ppf(0.975, runs - 1)) * found.sd / math.sqrt(runs - 1) if runs > 1 else math.nan


def _draw(material: Material, name: str, lines: Lines, others: Sequence[PageRow]) -> Figure:
    height = 4.6 + rows_of_legend(len(lines) + len(others))
    made = figure(height, f"{in_words(material.metric)} against {name}", material.synthetic)
    panels = made.subplots(2, 1)
    values = [value for points in lines.values() for value, _ in points]
    wide = min(values) > 0 and max(values) >= 10 * min(values)
    for axes, (attribute, called) in zip(panels, PANELS, strict=True):
        for index, (line, points) in enumerate(lines.items()):
            style, ordered = look(index), sorted(points, key=lambda point: point[0])
            found = [row.over(attribute) for _, row in ordered]
            bars = [half_width(one, len(row.summaries)) for one, (_, row) in zip(found, ordered, strict=True)]
            axes.errorbar(
                [value for value, _ in ordered], [one.mean for one in found], bars, color=style.colour,
                marker=style.marker, elinewidth=0.8, capsize=2, label=label(line),
            )  # fmt: skip
        for index, row in enumerate(others, len(lines)):
            style = look(index)
            axes.axhline(row.over(attribute).mean, color=style.colour, linestyle="--", label=label(row.label))
        if wide:
            log_scale(axes, x=True)
        axes.set_xlabel(name)
        axes.set_ylabel(called)
        axes.grid(True, color=GRID)
    legend(made, panels[0], len(lines) + len(others))
    return made
