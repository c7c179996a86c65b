"""Prepare a user's own pictures with classes or masks, given in folders or by a CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError
from fairflare.data.geometry import DrawnOn
from fairflare.data.preparers.contents import contents
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.listed import Blank, CellMeanings, Groups, Uncertain
from fairflare.data.preparers.looking import look_at_picture
from fairflare.data.preparers.options import of_function
from fairflare.data.preparers.own import write_own
from fairflare.data.preparers.trees import add_known, add_unlabelled, class_folders, listed, of_site, paired_sites
from fairflare.data.preparers.writing import Writing


def prepare_images(
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    uncertain: Uncertain | None = None,
    blank: Blank | None = None,
    group: Groups = None,
    leave_out: bool = False,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Prepare images of one or several sites; each image has a class.

    Without a CSV file the images lie in ``<class>/`` or in ``<site>/<class>/`` below the source folder, all at one
    depth. In a CSV file, each row has ``image`` (a path below the source folder, or a name, with or without ending) and
    ``label`` (a number or a name), and may have ``site``, ``patient`` and ``split`` (training, validation or test).

    Args:
        source_dir: folder with the images.
        out_dir: folder to write to.
        csv: path of the CSV file, relative to the source folder, or else to the working folder.
        columns: names of columns that differ from those above: ``{"image": "id_code", "label": "diagnosis"}``.
        attributes: attributes of the people and their columns: ``{"sex": "sex", "age": "age_approx:40,60"}``; numbers
            after a colon are the inner edges of bins; an attribute without edges is a category.
        classes: names of the classes in the order of their numbers; images of other classes are refused. Default: all
            that occur, numbers by size, names by the alphabet.
        uncertain, blank: what -1 and an empty cell of a finding become, see :class:`.listed.CellMeanings`. A table has
            findings if it lacks the column ``label`` and has a column for each name in ``classes``.
        leave_out: skip images that cannot be used, or of which no finding is known, and report them.
        group: regular expression whose first group is the patient, searched in the path of an image below the source.
        dealing: rule by which the images are dealt to sites; default: the sites that the source names.
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    _check_columns(csv, columns or attributes)
    if csv is None:
        tree = class_folders(contents(source), classes)
    else:
        tree = listed(source, csv, columns or {}, "label", attributes, classes, pictures=True)
    return write_own(
        {"": tree}, look_at_picture, out_dir, dealing or Dealing(), writing, attributes=attributes, classes=classes,
        group=group, leave_out=leave_out, answers=CellMeanings(uncertain, blank),
    )  # fmt: skip


def prepare_masks(
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    group: Groups = None,
    mask_values: Mapping[str, int | str] | None = None,
    mask_drawn_on: DrawnOn | None = None,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Prepare images of one or several sites; each image has a mask.

    Without a CSV file images and masks lie in ``images/`` and ``masks/`` (``labels/``) below the source folder, or
    below a folder for each site; an image and its mask have the same name, apart from the ending and from ``_mask``,
    ``_label``, ``_seg`` or ``_segmentation``. In a CSV file, each row has ``image`` and ``mask`` (paths below the
    source folder, or names), and may have ``site``, ``patient`` and ``split``.

    Args:
        source_dir: folder with the images.
        out_dir: folder to write to.
        csv, columns, attributes, group: as in :func:`prepare_images`; ``group`` is searched in the name of an image.
        mask_values: ``{value in the file: label}`` for ``fairflare.json``.
        mask_drawn_on: rule for pairs of which only one file states a geometry, for ``fairflare.json``.
        dealing: rule by which the images are dealt to sites; default: the sites that the source names. Only partitions
            that need no classes are possible: ``iid`` and ``quantity``.
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    _check_columns(csv, columns or attributes)
    if csv is None:
        trees = paired_sites(source)
    else:
        trees = {"": listed(source, csv, columns or {}, "mask", attributes, pictures=True)}
    return write_own(
        trees, partial(look_at_picture, drawn_on=mask_drawn_on), out_dir, dealing or Dealing(), writing,
        attributes=attributes, group=group, mask_values=mask_values, mask_drawn_on=mask_drawn_on,
    )  # fmt: skip


def prepare_folders(
    sites: Mapping[str, tuple[str | Path, str | Path]],
    out_dir: str | Path,
    *,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    uncertain: Uncertain | None = None,
    blank: Blank | None = None,
    leave_out: bool = False,
    unlabelled: Sequence[str] | None = None,
    group: Groups = None,
    mask_values: Mapping[str, int | str] | None = None,
    mask_drawn_on: DrawnOn | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Prepare images with masks or classes, of sites that are named one by one; the files are copied unchanged.

    An image and its mask have the same path below their folders, apart from the ending and from ``_mask``, ``_label``,
    ``_seg`` or ``_segmentation``. Files are 2D: see :mod:`fairflare.data.datalist`.

    Args:
        sites: for each site, the folder of images, and the folder of masks or a table of classes (or masks) with the
            columns ``image`` and ``label`` (``mask``).
        out_dir: folder to write to.
        csv: table with more facts on the images of all sites: ``image``, perhaps ``site``, ``patient``, ``split``, and
            the columns of ``attributes``.
        columns, attributes, classes, uncertain, blank: as in :func:`prepare_images`.
        unlabelled: folders of images without labels, see :func:`fairflare.data.preparers.trees.add_unlabelled`.
        leave_out: skip files that cannot be used or have no partner, and report them.
        group: regular expression whose first group is the patient, searched in the name of the image, such as
            ``"^(p[0-9]+)_"``, or one for each site by name; without it every image is a patient of its own.
        mask_values, mask_drawn_on: as in :func:`prepare_masks`.
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the folders or tables are not as expected.
    """
    if not sites:
        raise ValueError("at least one site is needed")
    places = {name: (Path(images), Path(labels)) for name, (images, labels) in sites.items()}
    tables = {name: labels for name, (_, labels) in places.items() if labels.is_file()}
    _check_columns(csv or next(iter(tables.values()), None), columns or attributes)
    if len(tables) not in (0, len(places)):
        raise DataError(f"{', '.join(tables)} has a table and the others have folders; prepare them one by one")
    called = dict(columns or {})
    of_each, people = called, attributes  # names of columns and attributes in the tables of the sites
    if csv is not None:
        of_each, people = {key: called[key] for key in ("image", "label", "mask") if key in called}, None
    trees = {
        name: of_site(name, images, labels, of_each, people, classes, pictures=True)
        for name, (images, labels) in places.items()
    }
    if csv is not None:
        add_known(trees, {name: images for name, (images, _) in places.items()}, csv, called, attributes)
    add_unlabelled(trees, unlabelled, pictures=True)
    return write_own(
        trees, partial(look_at_picture, drawn_on=mask_drawn_on), out_dir, Dealing(), writing, attributes=attributes,
        classes=classes, group=group, leave_out=leave_out, mask_values=mask_values, mask_drawn_on=mask_drawn_on,
        answers=CellMeanings(uncertain, blank),
    )  # fmt: skip


def _check_columns(csv: str | Path | None, columns: Mapping[str, str] | None) -> None:
    """Raise ``ValueError`` if columns are named but no CSV file is given."""
    if csv is None and columns:
        raise ValueError("columns are those of a CSV file; give csv, too")


PREPARERS = (
    of_function("images", "any images with classes: folders, or a CSV file", prepare_images, Dealing()),
    of_function(
        "masks", "images with masks below one folder (images/ and masks/, or such for each site), or in a CSV file",
        prepare_masks, Dealing(),
    ),
    of_function(
        "folders", "images with masks or classes, in folders that are named site by site (--site)", prepare_folders,
        None,
    ),
)  # fmt: skip
