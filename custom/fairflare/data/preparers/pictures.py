"""Any pictures of one's own, with classes or masks: in folders, or in a CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any

from fairflare.base.checks import nearest
from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError
from fairflare.data.geometry import DrawnOn
from fairflare.data.kinds import named
from fairflare.data.preparers.contents import (
    Contents,
    sites_below,
    without_ending,
)
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.labels import labels_of
from fairflare.data.preparers.listed import (
    FURTHER,
    OPTIONAL,
    Groups,
    attributes_of,
    called_columns,
    check_pictures,
    classes_of,
    columns_of,
    groups_by_site,
    listed_rows,
    patient_of,
    refuse_empty,
    refuse_one_patient,
    split_name,
    table_file,
)
from fairflare.data.preparers.names import composed, file_name, listing
from fairflare.data.preparers.options import (
    ATTRIBUTES,
    CLASSES,
    COLUMNS,
    CSV,
    DRAWN_ON,
    GROUP,
    LEAVE_OUT,
    Preparer,
    option,
    parse_pairs,
    sites_of,
)
from fairflare.data.preparers.pairing import pair_in, pair_rows
from fairflare.data.preparers.tables import Images, Row, read_table
from fairflare.data.preparers.writing import Form, Writing, write_pool

EXPECTED = "images/ and masks/ (or labels/)"


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
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    check_columns(csv, columns or attributes)
    images = Images(source)
    if csv is None:
        rows = _class_folders(images.contents, classes)
    else:
        rows = listed_rows(source, table_file(source, csv), columns or {}, "label", images, attributes, classes)
    own: dict[str, Any] = {"attributes": attributes, "classes": classes, "group": group}
    return _written(rows, "label", images.contents.notes(), out_dir, dealing, writing, **own)


def _written(
    rows: Sequence[Row], of: str, notes: list[str], out_dir: str | Path, dealing: Dealing | None, writing: Writing,
    *, attributes: Mapping[str, str] | None, group: Groups, classes: Sequence[str] | None = None,
    leave_out: bool | None = None, mask_values: Mapping[str, int | str] | None = None,
    mask_drawn_on: DrawnOn | None = None,
) -> dict[str, Path]:  # fmt: skip
    """Look at the pictures of rows and write them.

    Args:
        rows: with the ``path`` of each picture, its ``label`` or ``mask`` (``of``), the ``text`` that patients are
            searched in, perhaps a ``name``.
        of: ``"label"`` or ``"mask"``.
        notes: of what is passed over.
        out_dir, dealing, writing: as in :func:`fairflare.data.preparers.writing.write_pool`.
        attributes, group, classes, leave_out, mask_values, mask_drawn_on: options of the commands.
    """
    declared, people = attributes_of(attributes, rows)
    names: list[str] | None = None
    targets: Sequence[Any] = [Path(row["mask"]) for row in rows if of == "mask"]
    if of == "label":
        names, targets = classes_of([row["label"] for row in rows], classes)
    elif classes:
        raise ValueError("--classes are those of a table of classes; masks have structures")
    expressions = groups_by_site(group, {row["site"] for row in rows})
    items = []
    for row, target, person in zip(rows, targets, people, strict=True):
        path, site = Path(row["path"]), row["site"]
        patient = row["patient"] or patient_of(row["text"], expressions[site], site, path, writing.get("seed", 0))
        name = file_name(row.get("name") or without_ending(row["text"]))
        splits = (row["split"],) if row["split"] else ()
        key = f"{site}/{patient}" if patient else name
        items.append(Item(name, key, path, target, patient, site, splits, attributes=person))
    items, values = check_pictures(items, leave_out, notes, mask_drawn_on)
    refuse_one_patient(items, group)
    refuse_empty({row["site"] for row in rows}, {item.site for item in items})
    task, settings = ({}, {}) if names else labels_of(values, {}, notes, mask_values)
    settings |= {} if mask_drawn_on is None else {"mask_drawn_on": mask_drawn_on}
    form = Form(names, stratified=names is not None, attributes=declared, task=task, notes=notes)
    return write_pool(items, out_dir, dealing or Dealing(), settings, form, **writing)


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
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source is not as expected.
    """
    source = Path(source_dir)
    notes: list[str] = []
    check_columns(csv, columns or attributes)
    if csv is None:
        rows = []
        for site, pair in sites_below(source, pair_in, EXPECTED, "the files in a CSV file (--csv)").items():
            for row in pair_rows(site, *pair, notes):
                row["name"] = f"{site}_{row['text']}".lstrip("_")
                rows.append(row)
    else:
        images = Images(source)
        rows = listed_rows(source, table_file(source, csv), columns or {}, "mask", images, attributes)
        notes += images.contents.notes()
    own: dict[str, Any] = {"attributes": attributes, "group": group, "mask_drawn_on": mask_drawn_on}
    return _written(rows, "mask", notes, out_dir, dealing, writing, **own, mask_values=mask_values)


def prepare_folders(
    sites: Mapping[str, tuple[str | Path, str | Path]],
    out_dir: str | Path,
    *,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    leave_out: bool = False,
    group: Groups = None,
    mask_drawn_on: DrawnOn | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Images with masks or classes, of sites that are named one by one; the files are copied as they are.

    An image and its mask have the same path below their folders, apart from the ending and from ``_mask``, ``_label``,
    ``_seg`` or ``_segmentation``. Files are 2D: see :mod:`fairflare.data.datalist`.

    Args:
        sites: by site the folder of images, and that of masks or a table of classes (or masks): ``image``, ``label``.
        out_dir: folder to write to.
        csv: a table of what else is known of the images of all sites: ``image``, perhaps ``site``, ``patient``,
            ``split``, and the columns of ``attributes``.
        columns, attributes, classes: as in :func:`prepare_images`.
        leave_out: go on without what cannot be used or has no partner, and say it.
        group: regular expression whose first group is the patient, searched in the name of the image, such as
            ``"^(p[0-9]+)_"``, or one for each site by name; without it every image is a patient of its own.
        mask_drawn_on: as in :func:`prepare_masks`.
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the folders or tables are not as expected.
    """
    if not sites:
        raise ValueError("at least one site is needed")
    places = {name: (Path(images), Path(labels)) for name, (images, labels) in sites.items()}
    tables = {name: labels for name, (_, labels) in places.items() if labels.is_file()}
    check_columns(csv or next(iter(tables.values()), None), columns or attributes)
    if len(tables) not in (0, len(places)):
        raise DataError(f"{', '.join(tables)} has a table and the others have folders; prepare them one by one")
    notes: list[str] = []
    own = dict(columns or {})
    rows: list[Row] = []
    of = "label" if tables else "mask"
    for name, (images, labels) in places.items():
        if not tables:
            rows += pair_rows(name, images, labels, notes, leave_out)
            continue
        found = Images(images)
        notes += found.contents.notes()
        of = "mask" if own.get("mask", "mask") in read_table(labels)[0] else "label"
        columns_there = {key: column for key, column in own.items() if csv is None or key in ("image", of)}
        listed = listed_rows(images, labels, columns_there, of, found, None if csv else attributes, classes)
        rows += [_of_site(row, name) for row in listed]
    if csv is not None:
        _add_known(
            rows, {name: Images(images) for name, (images, _) in places.items()}, Path(csv), own, attributes, notes
        )
    if len({"mask" in row for row in rows}) > 1:
        raise DataError("the tables of some sites have masks, those of others classes; prepare them one by one")
    options: dict[str, Any] = {"attributes": attributes, "classes": classes, "group": group, "leave_out": leave_out}
    return _written(rows, of, notes, out_dir, None, writing, **options, mask_drawn_on=mask_drawn_on)


def _of_site(row: Row, site: str) -> Row:
    """The row with its site; a table of one site may not name another.

    Raises:
        DataError: it does.
    """
    if row["site"] not in ("", site):
        raise DataError(f"{row.where}: the site is '{row['site']}', in the table of site '{site}'")
    row["site"] = site
    return row


def _add_known(
    rows: Sequence[Row], images: Mapping[str, Images], file: Path, columns: Mapping[str, str],
    attributes: Mapping[str, str] | None, notes: list[str],
) -> None:  # fmt: skip
    """Add to the rows of images what a table of all sites says of them.

    Raises:
        DataError: it names an image that is not there, is at several sites or stands in it twice.
    """
    called = called_columns(columns, ("image", *OPTIONAL))
    more = [column for column, _ in columns_of(attributes).values()]
    by_path = {row["path"]: row for row in rows}
    told: dict[str, Row] = {}
    missing = []
    for line in read_table(file, [called["image"], *(called[key] for key in columns), *more]):
        name, site = line[called["image"]], line.get(called["site"], "")
        if site and site not in images:
            raise DataError(f"{line.where}: there is no site '{site}'{nearest(site, list(images))}")
        places = [path for own, known in images.items() if site in ("", own) if (path := known.find(name)) is not None]
        if len(places) > 1:
            raise DataError(f"{line.where}: '{name}' is at several sites; name the site in a column 'site'")
        if not places:
            missing.append(name)
            continue
        before = told.setdefault(str(places[0]), line)
        if before is not line:
            raise DataError(f"'{file}', lines {before.line} and {line.line}: both name '{places[0]}'; take one out")
        if (row := by_path.get(str(places[0]))) is not None:
            row |= {key: line[called[key]] for key in ("patient",) if line.get(called[key])}
            row["split"] = row["split"] or split_name(line.get(called["split"], ""), line)
            row |= {FURTHER + column: line[column] for column in more}
            row.where = line.where
    if missing:
        raise DataError(f"'{file}': {len(missing)} images that it names are at no site: {listing(missing)}")
    if lacking := [Path(path).name for path in by_path if path not in told]:
        notes.append(f"{len(lacking)} of {len(rows)} images are not in '{file}': {named(lacking)}")


def check_columns(csv: str | Path | None, columns: Mapping[str, str] | None) -> None:
    """Raises ``ValueError``: columns without a file."""
    if csv is None and columns:
        raise ValueError("columns are those of a CSV file; give csv, too")


def _class_folders(seen: Contents, classes: Sequence[str] | None) -> list[Row]:
    """A row for each image in ``<class>/`` or ``<site>/<class>/``.

    Raises:
        DataError: images at another depth, or a folder of a class or a site without an image.
    """
    parts = [path.relative_to(seen.folder).parts[:-1] for path in seen.images]
    depths = {len(found) for found in parts}
    unread = f"; not read: {told}" if (told := seen.passed_over()) else ""
    if depths not in ({1}, {2}):
        shown = listing({"/".join(found) or "the folder itself" for found in parts})
        raise DataError(
            f"'{seen.folder}': expected images in <class>/ or in <site>/<class>/, all of one kind, found "
            f"{len(seen.images)} images in {shown}; move them, or name them in a CSV file (--csv){unread}"
        )
    what = "class" if depths == {1} else "site"
    tops = {folder.name for folder in seen.folders if folder.parent == seen.folder}
    empty = sorted(tops - {found[0] for found in parts} - (set(classes or ()) if what == "class" else set()))
    if empty:
        raise DataError(
            f"'{seen.folder}': no image that is read is in the folder{'s' * (len(empty) > 1)} {listing(empty)}; put "
            f"images in, or move it away, if it is no {what}{unread}"
        )
    rows = []
    for path, found in zip(seen.images, parts, strict=True):
        site = composed(found[0]) if len(found) == 2 else ""
        texts = {"path": str(path), "text": path.relative_to(seen.folder).as_posix(), "label": composed(found[-1])}
        rows.append(Row({**texts, "site": site, "patient": "", "split": ""}, where=f"'{path}'"))
    return rows


MASK_VALUES = option(
    "mask_values", list[str] | None, "Such as 0=0 128=1 255=2.", None, metavar="VALUE=LABEL", made=parse_pairs
)
SITE = option(
    "sites", list[str], "LABELS: a folder of masks, or a table of classes. Repeatable.", Parameter.empty, "--site",
    metavar="NAME IMAGES LABELS", made=sites_of,
)  # fmt: skip
IMAGES_TEXT = "any images with classes: folders, or a CSV file"
MASKS_TEXT = "images with masks below one folder (images/ and masks/, or such for each site), or in a CSV file"
FOLDERS_TEXT = "images with masks or classes, in folders that are named site by site (--site)"
OF_FOLDERS = (SITE, CSV, COLUMNS, ATTRIBUTES, GROUP, CLASSES, LEAVE_OUT, DRAWN_ON)
PREPARERS = (
    Preparer("images", IMAGES_TEXT, prepare_images, (CSV, COLUMNS, ATTRIBUTES, GROUP, CLASSES), dealing=Dealing()),
    Preparer(
        "masks", MASKS_TEXT, prepare_masks, (CSV, COLUMNS, ATTRIBUTES, GROUP, MASK_VALUES, DRAWN_ON), dealing=Dealing()
    ),
    Preparer("folders", FOLDERS_TEXT, prepare_folders, OF_FOLDERS, has_source=False),
)
