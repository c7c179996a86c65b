"""Images and masks that belong together by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from fairflare.data.datalist import DataError
from fairflare.data.kinds import shown

MASK_ENDING = re.compile(r"[-_. ]?(segmentation|seg|mask|label|labels|gt)$", re.IGNORECASE)
CHANNEL = re.compile(r"_0000$")  # nnU-Net's number of the first channel
MASK_FOLDERS = ("masks", "labels")
Pair = tuple[Path, Path]


def keyed(
    files: Iterable[tuple[str, Path]], only: Literal["images", "masks"] | None = None, channel: bool = False
) -> dict[str, Path]:
    """Return the files by their names without what marks a mask.

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
    """Return the name of each file without a partner, and what it lacks."""
    found = [(shown(image), "without a mask of its name") for key, image in images.items() if key not in masks]
    return found + [(shown(mask), "a mask without an image") for key, mask in masks.items() if key not in images]


def pair_in(folder: Path) -> Pair | None:
    """Return the folders of images and masks in a folder."""
    masks = next((folder / name for name in MASK_FOLDERS if (folder / name).is_dir()), None)
    return (folder / "images", masks) if (folder / "images").is_dir() and masks is not None else None
