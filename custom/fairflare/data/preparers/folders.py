"""Any folders of images with masks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import Unpack

from fairflare.data.datalist import DataError
from fairflare.data.image_file import SUFFIXES
from fairflare.data.preparers.common import (
    Item,
    Preparer,
    Writing,
    check_pairs,
    file_name,
    files_by_ending,
    write_sites,
)
from fairflare.data.preparers.listed import Groups, add_group_option, groups_by_site, patient_of

MASK_ENDING = re.compile(r"[-_. ]?(segmentation|seg|mask|label|labels|gt)$", re.IGNORECASE)


def prepare_folders(
    sites: Mapping[str, tuple[str | Path, str | Path]],
    out_dir: str | Path,
    *,
    group: Groups = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Any images with masks; the files are copied as they are.

    An image and its mask have the same file name, apart from the ending and from ``_mask``, ``_label``,
    ``_seg`` or ``_segmentation``. Files are 2D: see :mod:`fairflare.data.datalist`.

    Args:
        sites: folders by site.
        group: regular expression whose first group is the patient, searched in the name of the image, such as
            ``"^(p[0-9]+)_"``, or one for each site by name; without it every image is a patient of its own.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.
    """
    by_site = groups_by_site(group, sites)
    items = {
        name: folder_items(name, Path(images), Path(masks), by_site[name]) for name, (images, masks) in sites.items()
    }
    return write_sites(items, out_dir, **writing)


def folder_items(site: str, images: Path, masks: Path, group: str | None = None) -> Iterator[Item]:
    """The pairs of two folders.

    Args:
        site: for messages.
        images, masks: the folders; may be one.
        group: as in :func:`prepare_folders`.

    Raises:
        DataError: a file without partner, or whose patient is not known.
    """
    together = images == masks
    pictures = _by_name(site, images, skip="masks" if together else None)
    partners = _by_name(site, masks, skip="images" if together else None)
    check_pairs(site, images, pictures, partners, f"an image in '{images}' and a mask of the same name in '{masks}'")
    for stem, path in pictures.items():
        patient = patient_of(stem, group, f"site '{site}': '{path}'")
        yield Item(file_name(stem), patient or stem, path, partners[stem], patient)


def _by_name(site: str, folder: Path, skip: str | None) -> dict[str, Path]:
    """Files by their name without what marks a mask; ``skip``: the ``"masks"`` or the ``"images"`` of the folder."""
    found: dict[str, Path] = {}
    for name, path in files_by_ending(folder, SUFFIXES):
        stem = MASK_ENDING.sub("", name)
        if skip == ("images" if stem == name else "masks"):
            continue
        if stem in found:
            raise DataError(
                f"site '{site}': '{found[stem]}' and '{path}' have the same name apart from the ending; "
                "rename or remove one of them"
            )
        found[stem] = path
    return found


def _from_command(
    sites: Sequence[Sequence[str]], out_dir: str, *, group: Groups, **writing: Unpack[Writing]
) -> dict[str, Path]:
    given = {name: (images, masks) for name, images, masks in sites}
    if len(given) != len(sites):
        raise ValueError(f"--site names a site twice: {', '.join(name for name, _, _ in sites)}")
    return prepare_folders(given, out_dir, group=group, **writing)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site", dest="sites", nargs=3, action="append", required=True, metavar=("NAME", "IMAGES", "MASKS"),
        help="repeatable",
    )  # fmt: skip
    add_group_option(parser, "name")


TEXT = "images with masks in two folders for each site, wherever they are (--site)"
PREPARERS = (Preparer("folders", TEXT, _from_command, _add_options, has_source=False),)
