"""Refuse a run on one machine in which two sites have the same images.

Two sites with one folder of images would look like a perfectly fair federation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from fairflare.data.image_file import MAX_IMAGE_BYTES, image_file
from fairflare.federation.site.site_file import own_settings

BEGINNING = 4096  # bytes at the beginning of two files that are compared before the whole files are


def refuse_shared_images(sites: Sequence[str], local: Mapping[str, Any]) -> None:
    """Raise an error when two sites of a run have an image in common; images in test lists alone may be shared.

    Equal pixels in files that differ are not found here, but by ``fairflare check-data``. A datalist that cannot be
    read is skipped here, and reported by the run's own check.

    Args:
        sites: names of the sites.
        local: content of the run's ``local/fairflare.json``.

    Raises:
        ValueError: two sites have an image, or a copy of its file, in common (names both, and the image).
    """
    listed = [(site, *image) for site in sites for image in _images(own_settings(local, site))]
    copies = _copies({site: {image for name, image, *_ in listed if name == site} for site in sites})
    first: dict[tuple[str, Any], tuple[str, bool]] = {}  # {image: (its site, whether it is for testing only)}
    shared: dict[tuple[str, str], list[str]] = {}
    for site, image, number, tested in listed:
        key = copies.get(image, image), number
        other, only_tested = first.setdefault(key, (site, tested))
        if other == site:
            first[key] = (site, tested and only_tested)
        elif not (tested and only_tested):
            shared.setdefault((other, site), []).append(image)
    for (one, other), images in shared.items():
        raise ValueError(
            f"sites {one!r} and {other!r} have {len(images)} image(s) in common, such as {images[0]}: one hospital's "
            "data under two names; give each site its own 'data_root' or 'datalist' under 'sites' of the data file"
        )


def _copies(files: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the checksum of each image file that has the same size and beginning as a file of another site.

    Images whose pixels all have the same value are left out: equal ones need not be copies.
    """
    alike: dict[tuple[int, bytes], dict[str, str]] = {}
    for site, paths in files.items():
        for path in paths:
            with suppress(OSError), Path(path).open("rb") as file:
                alike.setdefault((os.fstat(file.fileno()).st_size, file.read(BEGINNING)), {})[path] = site
    checksums = {}
    for group in alike.values():
        for path in group if len(set(group.values())) > 1 else ():
            with suppress(OSError, ValueError):  # the run's own check reports unreadable images
                pixels = image_file(Path(path)).decode(is_mask=False, limit=MAX_IMAGE_BYTES)
                if (pixels != pixels.flat[0]).any():
                    checksums[path] = sha256(Path(path).read_bytes()).hexdigest()
    return checksums


def _images(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield for every image in a site's datalist its file, its slice, and whether the image is for testing only."""
    root, named = settings.get("data_root"), settings.get("datalist") or "datalist.json"
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
