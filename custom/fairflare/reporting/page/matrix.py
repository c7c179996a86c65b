"""Every model at every site: who gains from joining, and who would be better alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fairflare.reporting.compare.matrix import Line, Matrix, joining_in_words, lines_of, matrix_tables
from fairflare.reporting.layout import number
from fairflare.reporting.page.content import Picture, Section
from fairflare.reporting.page.style import COLOUR_MAP, INK, MUTED, label, panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_FIGURES = 10  # columns in which figures can be read
LIGHT, DARK = "#ffffff", "#000000"  # letters on a cell: not the page's colours, which follow its theme


def matrix(found: Matrix | None) -> Section | None:
    """Picture, tables and sentences; ``None``: the models were not tested at all sites."""
    if found is None:
        return None
    own = [
        f"{line.name} {number(line.cells[found.sites.index(line.own)].mean)} at home"
        for line in lines_of(found)
        if line.own in found.sites
    ]
    better = "lighter" if found.higher_is_better else "darker"
    figures = "" if len(found.sites) <= MOST_FIGURES else " The figures stand in the table: here are too many sites."
    picture = Picture(
        "matrix",
        lambda: draw_matrix(found),
        f"Rows are models, columns the test splits of the sites; a frame marks a site's own model at home; {better} is "
        f"better.{figures}",
        f"{found.metric} of {len(found.models)} models at {len(found.sites)} sites. {'; '.join(own)}.",
    )
    return Section(
        "matrix", "Alone or together", words=joining_in_words(found), notes=found.notes,
        parts=[picture, *matrix_tables(found)],
    )  # fmt: skip


def draw_matrix(found: Matrix) -> Figure:
    """A heat map, with a figure in each cell."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    lines = lines_of(found)
    values = np.array([[cell.mean for cell in line.cells] for line in lines])
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    norm, colours = Normalize(low, high if high > low else low + 1), colormaps[COLOUR_MAP].with_extremes(bad="#808080")
    made, axes = panel(1.3 + 0.27 * len(lines), f"{found.metric}: every model at every site", found.synthetic)
    image = axes.imshow(values, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    for row, line in enumerate(lines):
        for column, cell in enumerate(line.cells):
            if len(found.sites) <= MOST_FIGURES:
                light = math.isfinite(cell.mean) and norm(cell.mean) > 0.5
                axes.text(
                    column, row, _figure(cell.mean), ha="center", va="center", fontsize=7.5,
                    color=DARK if light else LIGHT,
                )  # fmt: skip
            if line.own == found.sites[column]:
                axes.add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, fill=False, edgecolor=DARK, lw=2.4))
                axes.add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, fill=False, edgecolor=LIGHT, lw=1))
    axes.set_yticks(range(len(lines)), [label(line.name) for line in lines])
    many = max(map(len, found.sites)) * len(found.sites) > 30
    axes.set_xticks(range(len(found.sites)), [label(site, 20) for site in found.sites], rotation=90 if many else 0)
    axes.set_xlabel("tested at")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2)
    for row in _rules(lines):
        axes.axhline(row - 0.5, color=INK, linewidth=1.2)
    bar = made.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_edgecolor(MUTED)
    return made


def _figure(value: float) -> str:
    """In so small a place: two decimals of what lies below 10."""
    return f"{value:.2f}" if math.isfinite(value) and abs(value) < 10 else number(value)


def _rules(lines: list[Line]) -> list[int]:
    """Rows at which another method, or another kind of its models, begins."""
    kinds = [(line.name.partition(":")[0] if ":" in line.name else "", bool(line.own)) for line in lines]
    return [row for row in range(1, len(lines)) if kinds[row] != kinds[row - 1]]
