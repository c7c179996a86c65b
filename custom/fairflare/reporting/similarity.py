"""CKA between the local models of pairs of sites as one picture: a row for each layer, a column for each pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.base.disk.files import csv_text, write_whole
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
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[a, b, layer, value] for (a, b), of in pairs.items() for layer, value in of.items()]
    made = style.drawn(NAME, lambda: draw(pairs, title, synthetic))
    text = csv_text([["site", "other", "layer", "cka"], *rows])
    for ending, content in (("csv", text.encode()), ("png", made.png), ("svg", made.svg.encode())):
        write_whole(folder / f"{NAME}.{ending}", lambda p, c=content: p.write_bytes(c), durable=False, shared=True)  # type: ignore[misc]
