"""Loss landscapes as one picture with one scale of colours, so that runs can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairflare.reporting.page import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "landscape"
LEVELS = 17
WIDE = 20.0  # largest through smallest loss: from here on the colours are logarithmic
PANEL = 2.3  # inches


def draw(
    losses: Mapping[tuple[str, str], npt.NDArray[np.float64]], places: Sequence[float], title: str, synthetic: bool
) -> Figure:
    """A panel for each run (column) and site (row), contours of the loss, a cross at the model itself.

    Args:
        losses: by (run, site), each (places, places), the row along the first direction.
        places: along both directions.
        title: over the picture.
        synthetic: some data are made up.
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    runs, sites = (list(dict.fromkeys(key[place] for key in losses)) for place in (0, 1))
    values = np.concatenate([found[np.isfinite(found)] for found in losses.values()])
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1
    wide = low > 0 and high / low > WIDE
    levels = np.geomspace(low, high, LEVELS) if wide else np.linspace(low, high, LEVELS)
    norm: Any = (LogNorm if wide else Normalize)(low, high)
    colours = colormaps[style.COLOUR_MAP].with_extremes(bad=style.GRID)
    figure = style.figure(PANEL * len(sites) + 1.1, title, synthetic, width=max(4.5, PANEL * len(runs) + 1.6))
    panels: Any = figure.subplots(len(sites), len(runs), squeeze=False, sharex=True, sharey=True)
    filled: Any = None
    for (run, site), found in losses.items():
        axes = panels[sites.index(site)][runs.index(run)]
        shown = np.ma.masked_invalid(found.T)  # the first direction goes to the right
        axes.set_facecolor(style.GRID)
        filled = axes.contourf(places, places, shown, levels=levels, cmap=colours, norm=norm, extend="neither")
        axes.contour(places, places, shown, levels=levels[::2], colors=style.PAPER, linewidths=0.5)
        axes.plot(0, 0, marker="+", color=style.PAPER, markersize=8)
        axes.set_aspect("equal")
    for column, run in enumerate(runs):
        panels[0][column].set_title(style.label(run))
    for row, site in enumerate(sites):
        panels[row][0].set_ylabel(style.label(site))
    bar = figure.colorbar(filled, ax=panels, shrink=0.9, format="%.3g")
    bar.set_label("loss (logarithmic)" if wide else "loss")
    bar.ax.minorticks_off()
    return figure


def write(
    folder: Path,
    losses: Mapping[tuple[str, str], npt.NDArray[np.float64]],
    places: Sequence[float],
    title: str,
    synthetic: bool,
) -> None:
    """Writes :func:`rows` as ``landscape.csv`` and :func:`draw` as PNG and SVG; what is there is replaced.

    Raises:
        OSError: the folder cannot be written.
    """
    style.write_files(folder, NAME, lambda: draw(losses, places, title, synthetic), rows(losses, places))


def rows(losses: Mapping[tuple[str, str], npt.NDArray[np.float64]], places: Sequence[float]) -> list[list[Any]]:
    """Every loss for a CSV file: run, site, places along both directions, loss; empty where it is not finite."""
    found: list[list[Any]] = [["run", "site", "first", "second", "loss"]]
    for (run, site), values in losses.items():
        for a, line in zip(places, values.tolist(), strict=True):
            for b, loss in zip(places, line, strict=True):
                found.append([run, site, repr(a), repr(b), repr(loss) if math.isfinite(loss) else None])
    return found
