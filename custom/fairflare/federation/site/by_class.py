"""What a site has measured by class, beside its images of each, as a picture for the site's own folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.reporting.page import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "by_class"


def write(folder: Path, kept: Mapping[str, Any], names: Sequence[str] | None, title: str) -> None:
    """Writes ``by_class.csv`` and ``by_class.png``: class, images, w (before) and w^ (while training).

    Args:
        folder: of the site.
        kept: ``counts``, ``before``, ``during``: a number for each class; classes without an image are left out.
        names: of the classes; ``None``: their numbers.
        title: over the picture.

    Raises:
        OSError: the folder cannot be written.
    """
    counts, before, during = (kept[name].tolist() for name in ("counts", "before", "during"))
    of = names or [str(number) for number in range(len(counts))]
    rows = [row for row in zip(of, counts, before, during, strict=True) if row[1]]
    head = ["class", "images", "before", "during"]
    style.write_files(folder, NAME, lambda: _draw(rows, title), [head, *rows], svg=False, shared=False)


def _draw(rows: Sequence[Sequence[Any]], title: str) -> Figure:
    figure = style.figure(3.6, title, synthetic=False, width=7.0)
    for axes, column, called in zip(
        figure.subplots(1, 2, sharex=True), (2, 3), ("w, received model", "w^, while training"), strict=True
    ):
        axes.semilogx([row[1] for row in rows], [row[column] for row in rows], "o", color=style.INK, markersize=4)
        for row in rows:
            axes.annotate(style.label(row[0]), (row[1], row[column]), fontsize=6)
        axes.set_title(called)
        axes.set_xlabel("images of the class")
        axes.set_ylabel("weight of the class")
    return figure
