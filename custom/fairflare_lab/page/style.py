"""Define the look of the page's figures, and write figures as SVG, within the page and as files."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fairflare.reporting.layout import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that become CSS variables in the page, so that they follow its light or dark theme; files keep them.
INK, MUTED, GRID, PAPER = "#1a1d21", "#565d66", "#d5d9de", "#fefefe"
IN_PAGE = {  # replacements in the tags of an inline figure
    "xlink:href": "href", INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)",
}  # fmt: skip
#: Colours of lines and bars, each with a contrast of at least 3:1 to the light and the dark page. Markers, dashes and
#: hatches distinguish lines and bars too.
COLOURS = ("#0072b2", "#d55e00", "#008f6b", "#b5619c", "#a87000", "#7a68d8", "#7d858e", "#c0392b")
MARKERS = "os^DvPX*<>hd"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
HATCHES = ("", "///", "xxx", "---", "\\\\\\", "|||", "//", "++")  # without round hatches, which make large files
WIDTH = 4.4  # inches; letters of 8 points are legible where the picture fills a phone of 360 pixels
MAX_NAME = 28


@dataclass(frozen=True)
class Look:
    """Describe the look that distinguishes one line or bar of a figure from another."""

    colour: str
    marker: str
    dashes: Any
    hatch: str


def look(index: int) -> Look:
    """Return the look of a row or site by its number; the first ``len(COLOURS) * len(DASHES)`` looks differ."""
    turned = index + index // len(COLOURS)
    return Look(
        COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], DASHES[turned % len(DASHES)],
        HATCHES[turned % len(HATCHES)],
    )  # fmt: skip


def label(text: object, most: int = MAX_NAME) -> str:
    """Return a short name for an axis or a legend; matplotlib would hide a name that begins with ``_``."""
    name = printable(text)
    short = name if len(name) <= most else name[: most // 2] + "…" + name[-(most - most // 2 - 1) :]
    return f"\u200b{short}" if short.startswith("_") else short


@contextmanager
def use_style(name: str) -> Iterator[None]:
    """Set matplotlib's settings during the context, in which a figure is drawn and written."""
    import matplotlib

    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "font.size": 9, "axes.titlesize": 9,
        "axes.labelsize": 9, "legend.fontsize": 8, "legend.frameon": False, "xtick.labelsize": 8, "ytick.labelsize": 8,
        "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
        "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID, "axes.facecolor": PAPER,
        "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "hatch.linewidth": 0.6, "lines.linewidth": 1.5,
        "lines.markersize": 4.5, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied")
        yield


def figure(height: float, title: str, synthetic: bool, width: float = WIDTH) -> Figure:
    """Return an empty figure with a title, as its files may be used without the page."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, height), layout="constrained")
    shown = printable(title) + " (SYNTHETIC data)" * synthetic
    drawing.suptitle(textwrap.fill(shown, int(14.5 * width)), fontsize=9.5)
    return drawing


def chart(
    fill: Callable[..., None], height: float, title: str, synthetic: bool, *, panels: int = 1, count: int = 0,
    grid: Literal["x", "y", "both"] = "x", width: float = WIDTH, **labels: Any,
) -> Figure:  # fmt: skip
    """Return a figure with panels, one below the other, and a legend below them.

    Args:
        fill: function that draws into the panels, which are its arguments.
        height: height in inches, without the legend.
        title, synthetic: as in :func:`figure`.
        panels: number of panels.
        count: number of names in the legend, which is that of the first panel.
        grid: axes whose grid lines are drawn.
        width: width in inches.
        labels: properties of every panel, as in ``Axes.set``.
    """
    drawing = figure(height + rows_of_legend(count), title, synthetic, width)
    drawn_in = drawing.subplots(panels, 1, squeeze=False)[:, 0]
    for axes in drawn_in:
        axes.set(**labels)
        axes.grid(axis=grid)
    fill(*drawn_in)
    legend(drawing, drawn_in[0], count)
    return drawing


def log_scale(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers as labels, since :func:`use_style` turns formulas off."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(drawing: Figure, axes: Axes, count: int) -> None:
    """Draw a legend below the panels of a figure, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if count > 1 and labels:
        fit = int(drawing.get_figwidth() / (0.07 * max(map(len, labels)) + 0.75))
        drawing.legend(handles, labels, loc="outside lower center", ncols=max(1, min(count, fit, 3)), handlelength=3)


def rows_of_legend(count: int) -> float:
    """Return the height in inches of a legend with ``count`` names, see :func:`legend`."""
    return 0.17 * math.ceil(count / 2) if count > 1 else 0.0


def rows_at(axes: Axes, names: Sequence[str], above: float = 0.5, below: float = 0.5) -> None:
    """Set the names of a panel's rows at its vertical axis, the first row at the top."""
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.set_ylim(len(names) - 1 + below, -above)


# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class Drawn:
    """Store a drawn figure in two forms: SVG within the page, and an SVG file."""

    inline: str
    svg: str


def draw_forms(name: str, draw: Callable[[], Figure]) -> Drawn:
    """Draw a figure and return its forms.

    Args:
        name: name of the figure, unique in the page: letters, digits, ``_`` and ``-``.
        draw: function that draws the figure.
    """
    with use_style(name):
        text = io.StringIO()
        draw().savefig(text, format="svg", metadata={"Date": None})
    svg = _slim(text.getvalue())
    return Drawn(_inline(svg), svg)


def _slim(svg: str) -> str:
    """Return an SVG without metadata, comments, unused ids and font names."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def slim(tag: str) -> str:
        named = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", tag)
        return re.sub(r"font-family: [^;\"]*(; )?", "", named)

    named = _change_tags(svg, slim).replace("<svg ", '<svg font-family="sans-serif" ', 1)
    return re.sub(r"\s*\n\s*", "\n", named)


def _inline(svg: str) -> str:
    """Return an SVG for use within a page: with the theme's colours as CSS variables, and without name spaces."""
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    body = _change_tags(
        re.sub(r'<style type="text/css">.*?</style>', "", body, flags=re.DOTALL),
        lambda tag: re.sub("|".join(IN_PAGE), lambda match: IN_PAGE[match[0]], tag),
    )
    return f'<svg {view[0] if view else ""} aria-hidden="true" focusable="false">{body}'


def _change_tags(svg: str, change: Callable[[str], str]) -> str:
    """Return an SVG with changed tags; texts between tags, such as names of sites, are not changed."""
    return re.sub(r"<[^>]*>", lambda tag: change(tag[0]), svg)
