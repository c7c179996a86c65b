"""Any images with masks: folders of sites, or a CSV file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import Unpack

from fairflare.data.datalist import DataError
from fairflare.data.preparers.common import Dealing, Item, Preparer, Writing, listing, write_pool
from fairflare.data.preparers.folders import folder_items
from fairflare.data.preparers.listed import (
    OPTIONAL,
    Groups,
    add_listing_options,
    check_listing,
    groups_by_site,
    listed_item,
    listed_rows,
    parse_pairs,
)
from fairflare.data.preparers.tables import Images


def prepare_masks(
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    group: Groups = None,
    mask_values: Mapping[str, int] | None = None,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Images with a mask each, of one or several sites.

    Without a CSV file they lie in ``images/`` and ``masks/`` (``labels/``) below the source folder, or in these of a
    folder for each site; an image and its mask have the same name, apart from the ending and from ``_mask``,
    ``_label``, ``_seg`` or ``_segmentation``. With one, each row has ``image`` and ``mask`` (paths below the source
    folder, or names), and may have ``site``, ``patient`` and ``split``.

    Args:
        source_dir: folder with the images.
        out_dir: folder to write to.
        csv, columns, group: as in :func:`fairflare.data.preparers.images.prepare_images`; the group is searched in the
            name of an image.
        mask_values: ``{value in the file: label}`` for ``fairflare.json``.
        dealing: how the images become those of sites; default: by the data's sites. Of the partitions, those that need
            no classes: ``iid`` and ``quantity``.
        writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    check_listing(csv, columns)
    if csv is None:
        folders = _sites(source)
        by_site = groups_by_site(group, folders)
        items = [item for site, folder in folders.items() for item in _of_site(site, folder, by_site[site])]
    else:
        items = _from_table(source, source / csv, columns or {})
    settings = None if mask_values is None else {"mask_values": dict(mask_values)}
    return write_pool(items, out_dir, dealing or Dealing(), settings=settings, stratified=False, **writing)


def _pair(folder: Path) -> tuple[Path, Path] | None:
    masks = next((folder / name for name in ("masks", "labels") if (folder / name).is_dir()), None)
    return (folder / "images", masks) if (folder / "images").is_dir() and masks is not None else None


def _sites(source: Path) -> dict[str, Path]:
    """The folder of each site; one without a name: the source itself."""
    if not source.is_dir():
        raise DataError(f"'{source}' is not a folder; give the folder that holds the images")
    if _pair(source) is not None:
        return {"": source}
    found = {path.name: path for path in sorted(source.iterdir()) if path.is_dir() and _pair(path) is not None}
    if not found:
        raise DataError(
            f"'{source}': expected images/ and masks/ (or labels/), in it or in a folder for each site, found "
            f"{listing(path.name for path in source.iterdir())}; or name the files in a CSV file (--csv)"
        )
    return found


def _of_site(site: str, folder: Path, group: str | None) -> list[Item]:
    pair = _pair(folder)
    assert pair is not None
    items = folder_items(site or folder.name, *pair, group)
    return [
        replace(item, site=site, group=f"{site}/{item.group}", name=f"{site}_{item.name}".lstrip("_")) for item in items
    ]


def _from_table(source: Path, file: Path, columns: Mapping[str, str]) -> list[Item]:
    rows = listed_rows(source, file, columns, "mask")
    masks = Images(source).all([row["mask"] for row in rows], file)
    return [
        listed_item(source, Path(row["path"]), mask, **{key: row[key] for key in OPTIONAL})
        for row, mask in zip(rows, masks, strict=True)
    ]


def _from_command(
    source_dir: str, out_dir: str, *, columns: Sequence[str] | None, csv: str | None, group: Groups,
    mask_values: Sequence[str] | None, dealing: Dealing, **writing: Unpack[Writing],
) -> dict[str, Path]:  # fmt: skip
    values = {value: int(label) for value, label in parse_pairs(mask_values).items()} or None
    given = parse_pairs(columns)
    return prepare_masks(
        source_dir, out_dir, csv=csv, columns=given, group=group, mask_values=values, dealing=dealing, **writing
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_listing_options(parser, of="mask", example="mask=label", place="name")
    parser.add_argument("--mask-values", nargs="+", metavar="VALUE=LABEL", help="such as 0=0 128=1 255=2")


TEXT = "images with masks below one folder (images/ and masks/, or such for each site), or in a CSV file"
PREPARERS = (Preparer("masks", TEXT, _from_command, _add_options, dealing=Dealing()),)
