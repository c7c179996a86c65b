"""Any pictures of one's own, with classes or masks: in folders, or in a CSV file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import Any

from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError
from fairflare.data.dicom_files import files_of_series
from fairflare.data.geometry import DrawnOn
from fairflare.data.image_file import SUFFIXES
from fairflare.data.preparers.common import (
    Dealing,
    Item,
    Preparer,
    Writing,
    check_pairs,
    existing_folder,
    file_name,
    files_by_ending,
    listing,
    write_pool,
)
from fairflare.data.preparers.listed import (
    FURTHER,
    OPTIONAL,
    VOLUMES,
    Groups,
    attributes_of,
    check_pictures,
    class_names,
    columns_of,
    groups_by_site,
    listed_item,
    listed_rows,
    patient_of,
    table_file,
)
from fairflare.data.preparers.options import ATTRIBUTES, COLUMNS, CSV, DRAWN_ON, GROUP, option, parse_pairs, words_of
from fairflare.data.preparers.tables import Images
from fairflare.data.preparers.writing import Form, write_sites

MASK_ENDING = re.compile(r"[-_. ]?(segmentation|seg|mask|label|labels|gt)$", re.IGNORECASE)
Pair = tuple[Path, Path]


def prepare_images(
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    group: Groups = None,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Images with a class each, of one or several sites.

    Without a CSV file the images lie in ``<class>/`` or in ``<site>/<class>/`` below the source folder, all at one
    depth. With one, each row has ``image`` (its path below the source folder, or its name, with or without ending) and
    ``label`` (a number or a name), and may have ``site``, ``patient`` and ``split`` (training, validation or test).

    Args:
        source_dir: folder with the images.
        out_dir: folder to write to.
        csv: the file, below the source folder, else as seen from the working folder.
        columns: what the columns are called, where not so: ``{"image": "id_code", "label": "diagnosis"}``.
        attributes: of the people, by their columns of the file: ``{"sex": "sex", "age": "age_approx:40,60"}``; numbers
            behind a colon are the inner edges of bins, without them it is a category.
        classes: their names in the order of their numbers; images of others are refused. Default: all that occur,
            numbers by size, names by the alphabet.
        group: regular expression whose first group is the patient, searched in the path of an image below the source.
        dealing: how the images become those of sites; default: by the data's sites.
        writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    rows = _class_folders(source) if csv is None else _rows(source, csv, columns, "label", attributes)
    check_columns(csv, columns or attributes)
    declared, people = attributes_of(attributes, rows, source / (csv or ""), FURTHER)
    names = class_names([row["label"] for row in rows], classes)
    by_site = groups_by_site(group, {row.get("site", "") for row in rows})
    items = []
    for row, person in zip(rows, people, strict=True):
        path, site, split = Path(row["path"]), row.get("site", ""), row.get("split", "")
        relative = path.relative_to(source)
        patient = row.get("patient") or patient_of(relative.as_posix(), by_site[site], site, relative)
        label = names.index(row["label"])
        items.append(listed_item(source, path, label, site=site, patient=patient, split=split, attributes=person))
    notes = check_pictures(items)
    return write_pool(
        items, out_dir, dealing or Dealing(), class_names=names, attributes=declared, notes=notes, **writing
    )


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
    """Images with a mask each, of one or several sites.

    Without a CSV file they lie in ``images/`` and ``masks/`` (``labels/``) below the source folder, or in these of a
    folder for each site; an image and its mask have the same name, apart from the ending and from ``_mask``,
    ``_label``, ``_seg`` or ``_segmentation``. With one, each row has ``image`` and ``mask`` (paths below the source
    folder, or names), and may have ``site``, ``patient`` and ``split``.

    Args:
        source_dir: folder with the images.
        out_dir: folder to write to.
        csv, columns, attributes, group: as in :func:`prepare_images`; the group is searched in the name of an image.
        mask_values: ``{value in the file: label}`` for ``fairflare.json``.
        mask_drawn_on: how masks lie on images where only one of both says so, for ``fairflare.json``.
        dealing: how the images become those of sites; default: by the data's sites. Of the partitions, those that need
            no classes: ``iid`` and ``quantity``.
        writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    check_columns(csv, columns or attributes)
    declared: dict[str, Any] = {}
    if csv is None:
        pairs = _sites(source)
        by_site = groups_by_site(group, pairs)
        items = [item for site, pair in pairs.items() for item in _of_site(site, source, pair, by_site[site])]
    else:
        rows = _rows(source, csv, columns, "mask", attributes)
        declared, people = attributes_of(attributes, rows, source / csv, FURTHER)
        items = [
            listed_item(
                source, Path(row["path"]), Path(row["mask"]), **{key: row[key] for key in OPTIONAL}, attributes=person
            )
            for row, person in zip(rows, people, strict=True)
        ]  # fmt: skip
    notes = check_pictures(items, mask_drawn_on)
    settings: dict[str, Any] = {} if mask_drawn_on is None else {"mask_drawn_on": mask_drawn_on}
    if mask_values:
        settings["mask_values"] = {value: int(label) for value, label in mask_values.items()}
    form: dict[str, Any] = {"settings": settings, "stratified": False, "attributes": declared, "notes": notes}
    return write_pool(items, out_dir, dealing or Dealing(), **form, **writing)


def prepare_folders(
    sites: Mapping[str, tuple[str | Path, str | Path]],
    out_dir: str | Path,
    *,
    group: Groups = None,
    mask_drawn_on: DrawnOn | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Any images with masks; the files are copied as they are.

    An image and its mask have the same file name, apart from the ending and from ``_mask``, ``_label``,
    ``_seg`` or ``_segmentation``. Files are 2D: see :mod:`fairflare.data.datalist`.

    Args:
        sites: folders by site.
        group: regular expression whose first group is the patient, searched in the name of the image, such as
            ``"^(p[0-9]+)_"``, or one for each site by name; without it every image is a patient of its own.
        mask_drawn_on: as in :func:`prepare_masks`.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.
    """
    by_site = groups_by_site(group, sites)
    items = {
        name: list(folder_items(name, Path(images), Path(masks), by_site[name]))
        for name, (images, masks) in sites.items()
    }
    notes = check_pictures((item for own in items.values() for item in own), mask_drawn_on)
    settings = None if mask_drawn_on is None else {"mask_drawn_on": mask_drawn_on}
    return write_sites(items, out_dir, settings, Form(notes=notes), **writing)


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
        patient = patient_of(stem, group, site, path)
        yield Item(file_name(stem), patient or stem, path, partners[stem], patient)


def check_columns(csv: str | Path | None, columns: Mapping[str, str] | None) -> None:
    """Raises ``ValueError``: columns without a file."""
    if csv is None and columns:
        raise ValueError("columns are those of a CSV file; give csv, too")


def _rows(
    source: Path,
    csv: str | Path,
    columns: Mapping[str, str] | None,
    of: str,
    attributes: Mapping[str, str] | None = None,
) -> list[dict[str, str]]:
    more = [column for column, _ in columns_of(attributes).values()]
    return listed_rows(source, table_file(source, csv), columns or {}, of, more=more)


def _class_folders(source: Path) -> list[dict[str, str]]:
    images = Images(source)
    parts = [path.relative_to(source).parts[:-1] for path in images.paths]
    depths = {len(found) for found in parts}
    if depths not in ({1}, {2}):
        shown = listing({"/".join(found) or "the folder itself" for found in parts})
        raise DataError(
            f"'{source}': expected images in <class>/ or in <site>/<class>/, all of one kind, found "
            f"{len(images.paths)} images in {shown}; move them, or name them in a CSV file (--csv)"
        )
    return [
        {"path": str(path), "label": found[-1], "site": found[0] if len(found) == 2 else ""}
        for path, found in zip(images.paths, parts, strict=True)
    ]


def pair_in(folder: Path) -> Pair | None:
    """The folders of images and masks in a folder."""
    masks = next((folder / name for name in ("masks", "labels") if (folder / name).is_dir()), None)
    return (folder / "images", masks) if (folder / "images").is_dir() and masks is not None else None


def _sites(source: Path) -> dict[str, Pair]:
    """The two folders of each site; one without a name: those of the source itself."""
    own = pair_in(existing_folder(source))
    if own is not None:
        return {"": own}
    below = {path.name: pair_in(path) for path in sorted(source.iterdir()) if path.is_dir()}
    found = {name: pair for name, pair in below.items() if pair is not None}
    if not found:
        raise DataError(
            f"'{source}': expected images/ and masks/ (or labels/), in it or in a folder for each site, found "
            f"{listing(path.name for path in source.iterdir())}; or name the files in a CSV file (--csv)"
        )
    return found


def _of_site(site: str, source: Path, pair: Pair, group: str | None) -> Iterator[Item]:
    for item in folder_items(site or source.name, *pair, group):
        yield replace(item, site=site, group=f"{site}/{item.group}", name=f"{site}_{item.name}".lstrip("_"))


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
    series = next((path for path in folder.rglob("*") if path.is_dir() and files_of_series(path)), None)
    if series is not None:
        raise DataError(f"site '{site}': '{series}' is a folder of DICOM files, a volume; {VOLUMES}")
    return found


def sites_of(values: Sequence[str] | None) -> dict[str, tuple[Path, Path]]:
    """The folders of each ``--site``.

    Raises:
        ValueError: one has not three words, or a name is there twice.
    """
    sites = [words_of(value) for value in values or ()]
    if wrong := [words for words in sites if len(words) != 3]:
        raise ValueError(f"--site takes NAME and two places, got {' '.join(wrong[0])}")
    given = {name: (Path(images), Path(masks)) for name, images, masks in sites}
    if len(given) != len(sites):
        raise ValueError(f"--site names a site twice: {', '.join(name for name, _, _ in sites)}")
    return given


CLASSES = option("classes", list[str] | None, "In the order of their numbers.", None, metavar="NAME")
MASK_VALUES = option(
    "mask_values", list[str] | None, "Such as 0=0 128=1 255=2.", None, metavar="VALUE=LABEL", made=parse_pairs
)
SITE = option("sites", list[str], "Repeatable.", Parameter.empty, "--site", metavar="NAME IMAGES MASKS", made=sites_of)
IMAGES_TEXT = "any images with classes: folders, or a CSV file"
MASKS_TEXT = "images with masks below one folder (images/ and masks/, or such for each site), or in a CSV file"
FOLDERS_TEXT = "images with masks in two folders for each site, wherever they are (--site)"
PREPARERS = (
    Preparer("images", IMAGES_TEXT, prepare_images, (CSV, COLUMNS, ATTRIBUTES, GROUP, CLASSES), dealing=Dealing()),
    Preparer(
        "masks", MASKS_TEXT, prepare_masks, (CSV, COLUMNS, ATTRIBUTES, GROUP, MASK_VALUES, DRAWN_ON), dealing=Dealing()
    ),
    Preparer("folders", FOLDERS_TEXT, prepare_folders, (SITE, GROUP, DRAWN_ON), has_source=False),
)
