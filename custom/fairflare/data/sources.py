"""Load sources of synthetic images, which other packages offer by entry points of the group ``fairflare.sources``.

``classes`` (pictures with classes), ``prostate`` (pictures with masks) and ``volumes`` are modules of fairflare_lab.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fairflare.base.plugins import load_object
from fairflare.data.datalist import DataError

SOURCES = "fairflare.sources"


@cache
def source(kind: str) -> Any:
    """Load the module that draws synthetic images of a kind, which an installed package provides by an entry point.

    Raises:
        DataError: no installed package offers this kind.
    """
    if not (points := [point for point in entry_points(group=SOURCES) if point.name == kind]):
        text = f"the phantom {kind!r} is in the package fairflare_lab, which is not installed here; set 'data_root'"
        raise DataError(f"{text} to own images", text)
    return load_object(points[0])
