"""Hold values over the rounds as frames; draw each frame as lines and write each as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from fairflare.base.checks import true_texts
from fairflare.reporting.documents import RoundRecord
from fairflare.reporting.layout import Cell, Spread, Table, spread
from fairflare_lab.page.content import Picture
from fairflare_lab.page.material import Material
from fairflare_lab.page.style import MUTED, figure, label, legend, log_scale, look, rows_of_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED, NAMED_OF_MANY = 12, 4  # most lines that are all named; number of named lines if there are more
MAX_BANDS = 3  # largest number of lines whose deviation over seeds is shown
MAX_PANELS = 12


@dataclass(frozen=True)
class LineOptions:
    """Say how lines are drawn.

    Attributes:
        worst_first: whether, of many lines, the lowest at the end are named; False: the highest.
        log: whether the vertical axis is logarithmic.
        final: names of lines whose last point is the final model in place of a round; the point is marked.
        ranks: labels of the methods, if lines are methods: a line's look follows its rank, and rounds may differ.
        along: what the horizontal axis numbers.
    """

    worst_first: bool = True
    log: bool = False
    final: Collection[str] = ()
    ranks: Sequence[str] = ()
    along: str = "round"


USUAL = LineOptions()


def frame(values: Iterable[Sequence[Any]]) -> pd.DataFrame:
    """Return a long table of Python objects; pandas' own string type cannot hold every name that JSON can."""
    return pd.DataFrame(list(values), columns=["row", "name", "round", "value"], dtype=object)


def collect_values(material: Material, of: Callable[[RoundRecord], Mapping[str, Any]]) -> pd.DataFrame:
    """Return a long table of the values by site that ``of`` returns for each round of each run, without ``None``."""
    return frame(
        (row.label, site, record.current_round, value)
        for row in material.rows
        for run in row.runs
        for record in run.rounds
        for site, value in of(record).items()
        if value is not None
    )


def panels_of(found: pd.DataFrame, order: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return for each row a table (rounds, names in ``order``) of :class:`Spread` over its runs; NaN for no value."""
    panels = {}
    for row, values in found.groupby("row", sort=False):
        cells = values.groupby(["round", "name"]).value.agg(lambda of: spread(of.tolist())).unstack()
        panels[str(row)] = cells.reindex(columns=[name for name in order if name in cells])
    return panels


def figures(panel: pd.DataFrame, attribute: str = "mean") -> pd.DataFrame:
    """Return a table of one figure, such as the mean, of each :class:`Spread` in a table."""
    return panel.map(lambda cell: getattr(cell, attribute, math.nan)).astype(float)


def lines(
    material: Material, name: str, title: str, panels: Mapping[str, pd.DataFrame], caption: str, unit: str,
    options: LineOptions = USUAL,
) -> Picture:  # fmt: skip
    """Return a picture with panels of lines over the rounds, and one legend.

    Args:
        material: material of the page.
        name: name of the picture's files.
        title: title of the figure.
        panels: tables from :func:`panels_of`, by the panel's title.
        caption: see :class:`Picture`.
        unit: label of the vertical axis.
        options: how the lines are drawn.
    """
    most = max(len(of.columns) for of in panels.values())
    which = "lowest" if options.worst_first else "highest"
    caption += "".join(true_texts({
        f" Of more than {MAX_NAMED} lines the {NAMED_OF_MANY} {which} in the end are named, the others grey.": (
            most > MAX_NAMED
        ),
        " Shaded: one standard deviation over seeds to either side.": (
            material.over_seeds and any(0 < len(of.columns) <= MAX_BANDS for of in panels.values())
        ),
        f" Drawn: the first {MAX_PANELS} of {len(panels)} methods; the table has all.": len(panels) > MAX_PANELS,
    }))  # fmt: skip
    drawn, shown = dict(list(panels.items())[:MAX_PANELS]), most if most <= MAX_NAMED else NAMED_OF_MANY

    def draw() -> Figure:
        columns = 1 if len(drawn) <= 3 else 2
        high = math.ceil(len(drawn) / columns)
        made = figure(0.75 + 1.9 * high + rows_of_legend(shown), title, material.synthetic)
        flat = list(made.subplots(high, columns, squeeze=False).flat)
        for axes, (heading, panel) in zip(flat, drawn.items(), strict=False):
            _draw_lines(axes, panel, options)
            _scale(axes, figures(panel), options.log)
            axes.set(title=label(heading, 40), ylabel=label(unit))
            axes.set_xlabel(options.along + "; in the ring the final model" * bool(options.final))
        for axes in flat[len(drawn) :]:
            axes.set_axis_off()
        legend(made, flat[0], shown)
        return made

    return Picture(name, draw, caption)


def _draw_lines(axes: Axes, panel: pd.DataFrame, options: LineOptions) -> None:
    means, deviations = figures(panel), figures(panel, "sd").fillna(0)
    named = list(panel.columns)
    if len(named) > MAX_NAMED:
        ends = means.ffill().iloc[-1].dropna().sort_values(ascending=options.worst_first, kind="stable")
        named = [name for name in panel if name in ends.index[:NAMED_OF_MANY]]
        axes.plot(means.drop(columns=named), color=MUTED, linewidth=0.6, alpha=0.6)
    for name in named:
        style = look((options.ranks if options.ranks and len(panel.columns) <= MAX_NAMED else named).index(name))
        line = means[name].dropna() if options.ranks else means[name]
        axes.plot(line, color=style.colour, linestyle=style.dashes, marker=style.marker, label=label(name),
                  markevery=max(1, len(line) // 8))  # fmt: skip
        if name in options.final:
            axes.plot(line[-1:], color=style.colour, marker="o", markersize=9, markerfacecolor="none")
        if len(panel.columns) <= MAX_BANDS and figures(panel, "sd")[name].notna().any():
            reach = deviations[name][line.index]
            axes.fill_between(line.index, line - reach, line + reach, color=style.colour, alpha=0.15, linewidth=0)


def _scale(axes: Axes, means: pd.DataFrame, log: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    if log and (means > 0).any(axis=None):
        log_scale(axes)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))  # integer ticks, for rounds
    if len(means) == 1:  # a single point gives no scale
        axes.set_xlim(means.index[0] - 1, means.index[0] + 1)
    heights = {value for value in means.to_numpy().flat if math.isfinite(value)}
    if len(heights) == 1 and min(heights) >= 0 and not log:  # a single value gives no scale either
        axes.set_ylim(0, 2 * min(heights) or 1)


def site_parts(
    material: Material, found: pd.DataFrame, name: str, title: str, caption: str, unit: str,
    names: Sequence[str] = (), options: LineOptions = USUAL,
) -> list[Picture | Table]:  # fmt: skip
    """Return a picture and a table of a value that every site has in every round; empty for no values.

    ``found`` is a long table from :func:`collect_values`, and ``names`` what the table has in place of the numbers
    along which the lines go; the other arguments are those of :func:`lines`.
    """
    panels = panels_of(found, material.sites)
    rows: list[list[Cell]] = [
        [row, names[n] if names else n, site, cell]
        for row, panel in panels.items()
        for n, line in panel.iterrows()
        for site, cell in line.items()
        if isinstance(cell, Spread)
    ]
    return [
        lines(material, name, title, panels, caption, unit, options),
        Table(name, f"{title}, by {options.along}.", ["method", options.along, "site", unit], rows, folded=True),
    ] if panels else []  # fmt: skip
