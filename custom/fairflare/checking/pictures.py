"""Draw a site's data for ``fairflare check-data``: a contact sheet of images, and a histogram of intensities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.checking.images import BINS, SiteReport

TILE = 96  # side of one image on the contact sheet, in pixels
COLUMNS = 8  # number of images in a row of the contact sheet
LINE = (255, 220, 0)  # colour of the outlines of masks
COLOURS = {1: ("#444444",), 3: ("#c8382d", "#3c8c4a", "#3b6ea5")}


def contact_sheet(report: SiteReport, path: Path) -> None:
    """Write the report's ``shown`` images as one PNG with outlined masks; as patient data it must stay at the site."""
    from PIL import Image

    tiles = [_tile(picture, target) for picture, target in report.shown]
    rows = -(-len(tiles) // COLUMNS)
    sheet = np.zeros((rows * TILE, min(COLUMNS, len(tiles)) * TILE, 3), np.uint8)
    for index, tile in enumerate(tiles):
        y, x = (index // COLUMNS) * TILE, (index % COLUMNS) * TILE
        sheet[y : y + TILE, x : x + TILE] = tile
    Image.fromarray(sheet).save(path)


def _tile(picture: npt.NDArray[np.float32], target: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    from PIL import Image

    pixels = np.round(np.broadcast_to(picture, (3, *picture.shape[1:])) * 255).astype(np.uint8).transpose(1, 2, 0)
    tile = np.array(Image.fromarray(np.ascontiguousarray(pixels)).resize((TILE, TILE)))
    for structure in target if target.ndim == 3 else ():
        inside = np.array(Image.fromarray((structure > 0).astype(np.uint8)).resize((TILE, TILE), 0)) > 0
        around = [np.roll(inside, step, axis) for axis in (0, 1) for step in (-1, 1)]
        tile[inside & ~np.logical_and.reduce(around)] = LINE
    return tile


def histogram(report: SiteReport, path: Path, class_names: Sequence[str] | None = None) -> None:
    """Draw how often each intensity and each class occurs, and write the chart as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    from fairflare.reporting.pictures import save_picture

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    pixels, bars = figure.subplots(1, 2)
    counted = report.histogram if report.histogram is not None else np.zeros((1, BINS))
    middle = (np.arange(BINS) + 0.5) / BINS
    for channel, colour in zip(counted, COLOURS.get(len(counted), COLOURS[1] * len(counted)), strict=True):
        pixels.plot(middle, channel / max(1, channel.sum()), color=colour)
    pixels.set(title=f"{report.site}: intensities", xlabel="as the network gets them", ylabel="share of pixels")
    numbers = sorted({number for found in report.counts.values() for number in found if number is not None})
    width = 0.8 / max(1, len(report.counts))
    for place, (split, found) in enumerate(report.counts.items()):
        heights = [found[number] for number in numbers] or [sum(found.values())]
        bars.bar(np.arange(len(heights)) + place * width, heights, width, label=split)
    names = [class_names[n] if class_names and n < len(class_names) else str(n) for n in numbers] or ["images"]
    bars.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names, rotation=90 if len(names) > 6 else 0, fontsize=8)
    bars.set(title="images")
    bars.legend(fontsize=8)
    save_picture(figure, path)
