"""Prepare a user's own pictures with classes or masks, given in folders or by a CSV file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fairflare.base.checks import refuse
from fairflare.data.datalist import DataError
from fairflare.data.preparers.contents import contents
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.looking import look_at_picture
from fairflare.data.preparers.options import declare_preparer
from fairflare.data.preparers.own import PrepareRequest, write_own
from fairflare.data.preparers.trees import (
    add_known,
    add_unlabelled,
    class_folders,
    find_paired_sites,
    list_table,
    read_site,
)

# Options of :class:`.own.PrepareRequest` that each command has.
IMAGES = ("csv", "columns", "attributes", "classes", "uncertain", "blank", "group", "leave_out")
MASKS = ("csv", "columns", "attributes", "group", "mask_values", "mask_drawn_on")
FOLDERS = (
    "csv", "columns", "attributes", "classes", "uncertain", "blank", "leave_out", "unlabelled", "group", "mask_values",
    "mask_drawn_on",
)  # fmt: skip


def prepare_images(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing | None = None, **options: Any
) -> dict[str, Path]:
    """Prepare images of one or several sites; each image has a class.

    Without a CSV file the images lie in ``<class>/`` or in ``<site>/<class>/`` below the source folder, all at one
    depth.

    Args:
        source_dir: folder with the images.
        out_dir, dealing: see :class:`.own.PrepareRequest`.
        options: options of ``IMAGES``, see :class:`.own.PrepareRequest`, and of :class:`.writing.Writing`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    request, source = PrepareRequest.take(IMAGES, out_dir, options, dealing), Path(source_dir)
    _check_columns(request.csv, request)
    tree = (
        class_folders(contents(source), request.classes)
        if request.csv is None
        else list_table(
            source, request.csv, request.columns or {}, "label", request.attributes, request.classes, pictures=True
        )
    )
    return write_own(request, {"": tree}, look_at_picture)


def prepare_masks(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing | None = None, **options: Any
) -> dict[str, Path]:
    """Prepare images of one or several sites; each image has a mask.

    Without a CSV file images and masks lie in ``images/`` and ``masks/`` (``labels/``) below the source folder, or
    below a folder for each site; an image and its mask have the same name, apart from the ending and from ``_mask``,
    ``_label``, ``_seg`` or ``_segmentation``.

    Args:
        source_dir: folder with the images.
        out_dir, dealing: see :class:`.own.PrepareRequest`. Only partitions that need no classes are possible: ``iid``
            and ``quantity``.
        options: options of ``MASKS``, see :class:`.own.PrepareRequest`, and of :class:`.writing.Writing`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    request, source = PrepareRequest.take(MASKS, out_dir, options, dealing), Path(source_dir)
    _check_columns(request.csv, request)
    trees = (
        find_paired_sites(source)
        if request.csv is None
        else {"": list_table(source, request.csv, request.columns or {}, "mask", request.attributes, pictures=True)}
    )
    return write_own(request, trees, partial(look_at_picture, drawn_on=request.mask_drawn_on))


def prepare_folders(
    sites: Mapping[str, tuple[str | Path, str | Path]], out_dir: str | Path, **options: Any
) -> dict[str, Path]:
    """Prepare images with masks or classes, of sites that are named one by one; the files are copied unchanged.

    An image and its mask have the same path below their folders, apart from the ending and from ``_mask``, ``_label``,
    ``_seg`` or ``_segmentation``. Files are 2D: see :mod:`fairflare.data.datalist`.

    Args:
        sites: for each site, the folder of images, and the folder of masks or a table of classes (or masks) with the
            columns ``image`` and ``label`` (``mask``). ``csv`` may have more facts on the images of all sites:
            ``image``, perhaps ``site``, ``patient``, ``split``, and the columns of ``attributes``.
        out_dir: folder to write to.
        options: options of ``FOLDERS``, see :class:`.own.PrepareRequest`, and of :class:`.writing.Writing`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the folders or tables are not as expected.
    """
    request = PrepareRequest.take(FOLDERS, out_dir, options)
    refuse({"at least one site is needed": not sites})
    places = {name: (Path(images), Path(labels)) for name, (images, labels) in sites.items()}
    tables = {name: labels for name, (_, labels) in places.items() if labels.is_file()}
    _check_columns(request.csv or next(iter(tables.values()), None), request)
    refuse({
        f"{', '.join(tables)} has a table and the others have folders; prepare them one by one":
            len(tables) not in (0, len(places)),
    }, DataError)  # fmt: skip
    called = dict(request.columns or {})
    of_each, people = called, request.attributes  # names of columns and attributes in the tables of the sites
    if request.csv is not None:
        of_each, people = {key: called[key] for key in ("image", "label", "mask") if key in called}, None
    trees = {
        name: read_site(name, images, labels, of_each, people, request.classes, pictures=True)
        for name, (images, labels) in places.items()
    }
    if request.csv is not None:
        add_known(
            trees, {name: images for name, (images, _) in places.items()}, request.csv, called, request.attributes
        )
    add_unlabelled(trees, request.unlabelled, pictures=True)
    return write_own(request, trees, partial(look_at_picture, drawn_on=request.mask_drawn_on))


def _check_columns(csv: str | Path | None, request: PrepareRequest) -> None:
    """Raise ``ValueError`` if columns are named but no CSV file is given."""
    refuse({"columns are those of a CSV file; give csv, too": csv is None and (request.columns or request.attributes)})


PREPARERS = (
    declare_preparer("images", "any images with classes: folders, or a CSV file", prepare_images, IMAGES, Dealing()),
    declare_preparer(
        "masks", "images with masks below one folder (images/ and masks/, or such for each site), or in a CSV file",
        prepare_masks, MASKS, Dealing(),
    ),
    declare_preparer(
        "folders", "images with masks or classes, in folders that are named site by site (--site)", prepare_folders,
        FOLDERS, None,
    ),
)  # fmt: skip
