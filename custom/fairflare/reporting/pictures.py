"""Provide helpers for pictures: sites in order, short names of sites, and PNG files.

Pictures need matplotlib (``pip install 'fairflare[page]'``), which is imported only when a picture is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def short_name(site: str, most: int) -> str:
    """Return a site's name without its middle if it is too long; names of hospitals often differ at the end."""
    return site if len(site) <= most else site[: most // 2] + "…" + site[-(most - most // 2 - 1) :]


def in_order(sites: Iterable[str]) -> list[str]:
    """Return sites sorted by name, ``site-2`` before ``site-10``."""
    return sorted(sites, key=lambda site: re.sub(r"\d+", lambda number: number[0].zfill(20), site))


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture as a PNG file with the Agg backend, without a display or matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(path)
