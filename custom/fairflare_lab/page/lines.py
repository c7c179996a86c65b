"""Lines over the rounds: one for each method or site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairflare.reporting.documents import RoundRecord
from fairflare.reporting.layout import Cell, Spread, spread
from fairflare_lab.page.content import Picture
from fairflare_lab.page.material import Material, PageRun
from fairflare_lab.page.style import MUTED, figure, label, legend, log_scale, look, rows_of_legend, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED = 12  # lines that are told apart
MAX_BANDS = 3  # methods whose deviation over seeds is shown
NAMED_OF_MANY = 4
MAX_PANELS = 12


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: in the legend.
        rank: decides its looks.
        points: by round; NaN: a gap.
        final: the last of them is no round but the final model, and marked as such.
    """

    name: str
    rank: int
    points: Mapping[int, Spread]
    final: bool = False

    @property
    def last(self) -> float:
        """The last finite value, else NaN."""
        finite = [p.mean for p in self.points.values() if math.isfinite(p.mean)]
        return finite[-1] if finite else math.nan


def values_of(
    runs: Iterable[PageRun], by_site: Callable[[RoundRecord], Mapping[str, float | None]]
) -> dict[tuple[int, str], list[float]]:
    """By round and site the values of all runs; ``by_site``: of a round, ``None`` where a site has none."""
    found: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        for record in run.rounds:
            for site, value in by_site(record).items():
                if value is not None:
                    found.setdefault((record["current_round"], site), []).append(value)
    return found


def site_lines(
    material: Material, values: Mapping[str, Mapping[tuple[int, str], Sequence[float]]], final: bool = False
) -> tuple[dict[str, list[Series]], list[list[Cell]]]:
    """A line for each site by row, and rows of a table: row, round, site, mean over seeds.

    Args:
        material: has the sites in their order.
        values: by label of a row, what :func:`values_of` gives; rows without any are left out.
    """
    panels: dict[str, list[Series]] = {}
    cells: list[list[Cell]] = []
    for row, found in values.items():
        numbers = sorted({n for n, _ in found})
        have = {site for _, site in found}
        sites = [site for site in material.sites if site in have]
        at = {key: spread(of) for key, of in found.items()}
        lines = [
            Series(s, k, {n: at.get((n, s), Spread(math.nan)) for n in numbers}, final) for k, s in enumerate(sites)
        ]
        panels |= {row: lines} if lines else {}
        cells += [[row, n, site, at[n, site]] for n in numbers for site in sites if (n, site) in at]
    return panels, cells


def lines_picture(
    material: Material,
    name: str,
    title: str,
    panels: Mapping[str, Sequence[Series]],
    caption: str,
    alt: str,
    *,
    unit: str,
    worst_first: bool = True,
    log: bool = False,
    line_at: float | None = None,
) -> Picture:
    """Panels of lines over the rounds with one legend.

    Args:
        material: whose data they are.
        name: of the files.
        title: over the figure.
        panels: series by the panel's title.
        caption, alt: of the picture.
        unit: what stands at the vertical axis.
        worst_first: of many lines the lowest in the end are named; False: the highest.
        log: logarithmic.
        line_at: a value to be compared with.
    """
    most = max(len(series) for series in panels.values())
    if most > MAX_NAMED:
        which = "lowest" if worst_first else "highest"
        caption += f" Of more than {MAX_NAMED} lines the {NAMED_OF_MANY} {which} in the end are named, the others grey."
    if material.over_seeds and any(0 < len(series) <= MAX_BANDS for series in panels.values()):
        caption += " Shaded: one standard deviation over seeds to either side."
    if len(panels) > MAX_PANELS:
        caption += f" Drawn: the first {MAX_PANELS} of {len(panels)} methods; the table has all."
        panels = dict(list(panels.items())[:MAX_PANELS])

    def draw() -> Figure:
        columns = 1 if len(panels) <= 3 else 2
        lines = math.ceil(len(panels) / columns)
        shown = most if most <= MAX_NAMED else NAMED_OF_MANY
        made = figure(0.75 + 1.9 * lines + rows_of_legend(shown), title, material.synthetic)
        grid = made.subplots(lines, columns, squeeze=False)
        flat = list(grid.flat)
        for axes, (heading, series) in zip(flat, panels.items(), strict=False):
            _panel(axes, heading, series, worst_first, log, line_at)
            axes.set_ylabel(label(unit))
        for axes in flat[len(panels) :]:
            axes.set_axis_off()
        legend(made, flat[0], shown)
        return made

    return Picture(name, draw, caption, alt)


def _panel(
    axes: Axes, heading: str, series: Sequence[Series], worst_first: bool, log: bool, line_at: float | None
) -> None:
    named = {s.name for s in series}
    if len(series) > MAX_NAMED:
        ranked = sorted((s for s in series if math.isfinite(s.last)), key=lambda s: s.last, reverse=not worst_first)
        named = {s.name for s in ranked[:NAMED_OF_MANY]}
    for s in sorted(series, key=lambda s: s.name in named):
        at = list(s.points)
        values = [s.points[n].mean for n in at]
        if s.name not in named:
            axes.plot(at, values, color=MUTED, linewidth=0.6, alpha=0.6)
            continue
        style = look(s.rank if len(series) <= MAX_NAMED else [n.name for n in series if n.name in named].index(s.name))
        axes.plot(
            at, values, color=style.colour, linestyle=style.dashes, marker=style.marker, label=label(s.name),
            markevery=max(1, len(at) // 8),
        )  # fmt: skip
        if s.final:
            axes.plot(at[-1:], values[-1:], color=style.colour, marker="o", markersize=9, markerfacecolor="none")
        if len(series) <= MAX_BANDS and any(math.isfinite(s.points[n].sd) for n in at):
            deviations = [s.points[n].sd if math.isfinite(s.points[n].sd) else 0.0 for n in at]
            low, high = ([v + turn * d for v, d in zip(values, deviations, strict=True)] for turn in (-1, 1))
            axes.fill_between(at, low, high, color=style.colour, alpha=0.15, linewidth=0)
    if line_at is not None:
        axes.axhline(line_at, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
    if log and any(p.mean > 0 for s in series for p in s.points.values()):
        log_scale(axes)
    axes.set_title(label(heading, 40))
    axes.set_xlabel("round; in the ring the final model" if any(s.final for s in series) else "round")
    axes.grid(axis="y")
    whole_numbers(axes)
    if len(rounds := {n for s in series for n in s.points}) == 1:  # one point has no scale of its own
        axes.set_xlim(min(rounds) - 1, min(rounds) + 1)
    heights = {p.mean for s in series for p in s.points.values() if math.isfinite(p.mean)}
    if len(heights) == 1 and min(heights) >= 0 and not log and line_at is None:  # nor has one value
        axes.set_ylim(0, 2 * min(heights) or 1)
