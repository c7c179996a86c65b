"""Two sites of a run on one machine with the same images: one folder would look like a perfectly fair federation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairflare.federation.site.site_file import own_settings


def refuse_shared_images(sites: Sequence[str], local: Mapping[str, Any]) -> None:
    """Compares the datalists of a run's sites by file; what only test lists share is meant (a common test set).

    The same pixels in two files are what ``fairflare check-data`` looks for; a list that cannot be read is what the
    run's own check says.

    Args:
        sites: names.
        local: the run's ``local/fairflare.json``.

    Raises:
        ValueError: two sites have an image in common (names both, and the image).
    """
    first: dict[tuple[str, Any], tuple[str, bool]] = {}  # image -> site, and whether it is for testing only
    shared: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        for image, number, tested in _images(own_settings(local, site)):
            other, only_tested = first.setdefault((image, number), (site, tested))
            if other == site:
                first[image, number] = (site, tested and only_tested)
            elif not (tested and only_tested):
                shared.setdefault((other, site), []).append(image)
    for (one, other), images in shared.items():
        raise ValueError(
            f"sites {one!r} and {other!r} have {len(images)} image(s) in common, such as {images[0]}: one hospital's "
            "data under two names; give each site its own 'data_root' or 'datalist' under 'sites' of the data file"
        )


def _images(own: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """File, slice, and whether it is for testing, of every image in a site's datalist."""
    root, named = own.get("data_root"), own.get("datalist") or "datalist.json"
    if not isinstance(root, str) or not isinstance(named, str):
        return
    folder = Path(root).expanduser()
    try:
        content = json.loads((folder / named).read_bytes())
    except (OSError, ValueError):
        return
    for split, entries in content.items() if isinstance(content, dict) else ():
        tested = split.startswith("test")
        if (tested or split in ("training", "validation")) and isinstance(entries, list):
            for entry in entries:
                if isinstance(entry, dict) and isinstance(entry.get("image"), str):
                    yield os.path.realpath(folder / entry["image"]), repr(entry.get("slice")), tested
