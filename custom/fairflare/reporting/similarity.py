"""CKA between the local models of pairs of sites as one picture: a row for each layer, a column for each pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.reporting.page import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "similarity"


def draw(pairs: Mapping[tuple[str, str], Mapping[str, float]], title: str, synthetic: bool) -> Figure:
    """A map from 0 (dark) to 1, the same scale for every run.

    Args:
        pairs: CKA by pair of sites and layer; NaN where it is not defined.
        title: over the picture.
        synthetic: some images are made up.
    """
    from matplotlib import colormaps

    layers = list(next(iter(pairs.values())))
    figure = style.figure(0.17 * len(layers) + 1.6, title, synthetic, width=max(4.5, 0.34 * len(pairs) + 3.0))
    axes: Any = figure.subplots()
    values = [[of[layer] for of in pairs.values()] for layer in layers]
    colours = colormaps[style.COLOUR_MAP].with_extremes(bad=style.GRID)
    shown = axes.imshow(values, vmin=0, vmax=1, cmap=colours, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(layers)), [style.label(layer) for layer in layers], fontsize=6)
    names = [f"{style.label(a)} / {style.label(b)}" for a, b in pairs]
    axes.set_xticks(range(len(pairs)), names, rotation=90, fontsize=6)
    figure.colorbar(shown, ax=axes, shrink=0.9).set_label("CKA")
    return figure


def write(folder: Path, pairs: Mapping[tuple[str, str], Mapping[str, float]], title: str, synthetic: bool) -> None:
    """Writes ``similarity.csv`` and the picture as PNG and SVG; what is there is replaced.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = [[a, b, layer, value] for (a, b), of in pairs.items() for layer, value in of.items()]
    head = ["site", "other", "layer", "cka"]
    style.write_files(folder, NAME, lambda: draw(pairs, title, synthetic), [head, *rows])
