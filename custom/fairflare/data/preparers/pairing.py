"""Images and masks that belong together by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from fairflare.data.datalist import DataError
from fairflare.data.kinds import shown
from fairflare.data.preparers.contents import VOLUMES_TAKEN, contents
from fairflare.data.preparers.listed import refuse_bad
from fairflare.data.preparers.names import listing
from fairflare.data.preparers.tables import Row

MASK_ENDING = re.compile(r"[-_. ]?(segmentation|seg|mask|label|labels|gt)$", re.IGNORECASE)
CHANNEL = re.compile(r"_0000$")  # nnU-Net's number of the first channel
MASK_FOLDERS = ("masks", "labels")
Pair = tuple[Path, Path]


def keyed(
    files: Iterable[tuple[str, Path]], only: Literal["images", "masks"] | None = None, channel: bool = False
) -> dict[str, Path]:
    """Files by their names without what marks a mask.

    Args:
        files: name without an ending, and place.
        only: of a folder that has both, those without (images) or with the mark (masks).
        channel: nnU-Net's ``_0000`` does not count either.

    Raises:
        DataError: two have one name.
    """
    found: dict[str, Path] = {}
    for name, path in files:
        key = MASK_ENDING.sub("", name)
        if only is not None and (only == "images") != (key == name):
            continue
        key = CHANNEL.sub("", key) if channel else key
        if key in found:
            raise DataError(
                f"'{found[key]}' and '{path}' have the same name apart from the ending; rename or remove one of them"
            )
        found[key] = path
    return found


def alone(images: Mapping[str, Path], masks: Mapping[str, Path]) -> list[tuple[str, str]]:
    """Name of each file without a partner, and what it lacks."""
    found = [(shown(image), "without a mask of its name") for key, image in images.items() if key not in masks]
    return found + [(shown(mask), "a mask without an image") for key, mask in masks.items() if key not in images]


def pair_in(folder: Path) -> Pair | None:
    """The folders of images and masks in a folder."""
    masks = next((folder / name for name in MASK_FOLDERS if (folder / name).is_dir()), None)
    return (folder / "images", masks) if (folder / "images").is_dir() and masks is not None else None


def pair_rows(site: str, images: Path, masks: Path, notes: list[str], leave_out: bool | None = None) -> list[Row]:
    """The pairs of two folders, which may be one: path and name of the image, and its mask.

    Args:
        site: for messages.
        images, masks: the folders.
        notes: gets what is passed over.
        leave_out: go on without files that have no partner.

    Raises:
        DataError: there is no pair, files have no partner, or a folder holds volumes.
    """
    together = images == masks
    seen = contents(images, besides=[] if together else [masks])
    marked = seen if together else contents(masks, besides=[images])
    where = f"site '{site}': " if site else ""
    if series := [*seen.series, *marked.series]:
        raise DataError(f"{where}'{series[0]}' is a folder of DICOM files, a volume; {VOLUMES_TAKEN}")
    pictures = keyed(((seen.key(path), path) for path in seen.images), "images" if together else None)
    partners = keyed(((marked.key(path), path) for path in marked.images), "masks" if together else None)
    passed = [note for found in dict.fromkeys((seen, marked)) for note in found.notes()]
    bad = alone(pictures, partners)
    if not set(pictures) & set(partners):
        raise DataError(
            f"{where}expected an image in '{images}' and a mask of the same name in '{masks}'; "
            + (f"without partner: {listing(name for name, _ in bad)}" if bad else "found no image")
            + "".join(f"; {note}" for note in passed)
        )
    what = f"image(s) of {where.removesuffix(': ') or repr(str(images))}"
    said = refuse_bad(bad, len(pictures), what, leave_out, passed)
    notes += [*passed, *([said] if said else [])]
    rows = []
    for key in sorted(set(pictures) & set(partners)):
        texts = {"path": str(pictures[key]), "mask": str(partners[key]), "site": site, "text": key}
        rows.append(Row({**texts, "patient": "", "split": ""}, where=f"'{pictures[key]}'"))
    return rows
