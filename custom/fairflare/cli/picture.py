"""The picture of a run, for ``fairflare show --picture``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_picture(found: Sequence[Mapping[str, Any]], path: Path, metric: str | None) -> None:
    """Draws what every site of one run gets, as a PNG.

    Raises:
        ValueError: several runs, another kind of file, no matplotlib, or the run has no final test.
    """
    if len(found) != 1:
        raise ValueError(f"--picture is of one run, got {len(found)}")
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise ValueError(f"--picture must be a .png file in a folder that exists, got {path}")
    from fairflare.reporting.pictures import draw_sites, save_picture

    try:
        save_picture(draw_sites(found[0], metric), path)
    except ImportError as error:
        raise ValueError("--picture needs matplotlib: pip install 'fairflare[plots]'") from error
