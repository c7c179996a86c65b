"""Find images and their labels in class folders, pairs of folders, trees of the Decathlon or BIDS, or by a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from fairflare.base.checks import first_of, group_by_key, nearest, refuse
from fairflare.base.site_data import UNLABELLED
from fairflare.data.datalist import DataError, suffix_of
from fairflare.data.dicom_files import DICOM, files_of_series, is_companion
from fairflare.data.dicom_seg import file_in
from fairflare.data.image_file import SUFFIXES
from fairflare.data.image_file import VOLUMES as NIFTI
from fairflare.data.kinds import name_first, shorten
from fairflare.data.listing.attributes import NO_VALUE, NOT_KNOWN
from fairflare.data.preparers.contents import VOLUMES_TAKEN, Contents, contents, strip_ending
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.listed import columns_of, normalise_labels, split_name
from fairflare.data.preparers.names import compose, existing_folder, file_name, key_cases, listing, naming_site, unique
from fairflare.data.preparers.tables import Images, Row, read_table

WANTED = (*NIFTI, *DICOM)
PARTICIPANTS = "participants.tsv"  # name of the table of people in a BIDS tree
NOT_TAKEN = (
    "'{0}' says {1} of the people, which is not taken over; for groups of people give --attributes {2}={2}, of a "
    "number with the edges of groups: {3}={3}:EDGE,EDGE"
)
DATASET = "dataset.json"  # name of the declaration of nnU-Net and the Decathlon
BIDS_KEY = re.compile(r"(?:sub|ses|run)-[A-Za-z0-9]+")
MASK_ENDING = re.compile(r"[-_. ]?(segmentation|seg|mask|label|labels|gt)$", re.IGNORECASE)
MASK_FOLDERS = ("masks", "labels")
OPTIONAL = ("site", "patient", "split")  # columns that a table may have
BIDS_MASK = re.compile(r"_(?:mask|dseg|seg|label|roi)$")


@dataclass
class Tree:
    """Represent the images and labels found in a source folder.

    Attributes:
        cases: images with labels; the names are paths below the folder, without the ending.
        alone: name of each file without a partner, and a description of the missing partner.
        notes: notes on files that are ignored on purpose.
        names: names of the labels by their values, where the source gives them.
    """

    cases: list[Item]
    alone: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)


def trees_of(
    source: Path, suffixes: Sequence[str], attributes: Mapping[str, str] | None, channels: Sequence[str]
) -> dict[str, Tree]:  # fmt: skip
    """Find the volumes of a source folder, which is the folder of one site or has a subfolder for each site.

    Return the volumes by the subfolder's name; the name is empty if the source is the folder of one site.

    Args:
        source: the source folder.
        suffixes: suffixes of the images of a BIDS tree, such as ``T1w``; none if the tree has one kind of images.
        attributes: attributes of the people and their columns in a BIDS tree's ``participants.tsv``.
        channels: names of the images of a case, see :func:`pairs`.

    Raises:
        DataError: there are no volumes, or a subfolder is not that of a site.
    """
    return _sites_below(
        source, lambda folder: _tree(folder, suffixes, attributes, channels), WANTED,
        "imagesTr/ and labelsTr/ (Decathlon), sub-*/ (BIDS), images/ and masks/ (or labels/), or volumes beside their "
        "masks",
        "the folders (--site) or the files (--csv)",
    )  # fmt: skip


def find_paired_sites(source: Path) -> dict[str, Tree]:
    """Find pictures with masks in a source folder, which is the folder of one site or has a subfolder for each site.

    Return the pictures by the subfolder's name; the name is empty if the source is the folder of one site.

    Raises:
        DataError: there are no pictures with masks, or a subfolder is not that of a site.
    """
    trees = _sites_below(
        source, lambda folder: _pair_in(folder, pictures=True), SUFFIXES, "images/ and masks/ (or labels/)",
        "the files in a CSV file (--csv)",
    )  # fmt: skip
    return {
        site: replace(tree, cases=[
            replace(case, text=case.name, name=f"{site}_{case.name}".lstrip("_")) for case in tree.cases
        ])
        for site, tree in trees.items()
    }  # fmt: skip


def _sites_below(
    source: Path, read: Callable[[Path], Tree | None], endings: Collection[str], expected: str, instead: str
) -> dict[str, Tree]:
    """Read a source folder as the folder of one site or, if this fails, each of its subfolders as that of a site.

    Return the trees by the subfolder's name; the name is empty if the source is the folder of one site.

    Args:
        source: the source folder.
        read: function that reads the folder of one site; it returns None if the folder has no known layout.
        endings: endings of the images that are wanted.
        expected: description of a site's folder, for messages.
        instead: description of what the user may name instead, for messages.

    Raises:
        DataError: nothing is found, or a subfolder with images is not that of a site; else a site could be overlooked.
    """
    if (whole_tree := read(existing_folder(source))) is not None:
        return {"": whole_tree}
    below = {
        compose(path.name): path for path in sorted(source.iterdir()) if path.is_dir() and not is_companion(path.name)
    }
    trees = dict[str, Tree]()
    for name, path in below.items():
        with naming_site(name):
            if (tree := read(path)) is not None:
                trees[name] = tree
    if not trees:
        unread = "".join(f"; {note}" for note in contents(source, endings).notes())
        raise DataError(
            f"'{source}': expected {expected}, in it or in a folder for each site, found "
            f"{listing(path.name for path in source.iterdir())}; or name {instead}{unread}"
        )
    if strange := [name for name in below if name not in trees]:
        inside = contents(below[strange[0]])
        held = f"{len(inside.images)} images in other places" if inside.images else inside.list_unread() or "no file"
        raise DataError(
            f"'{source}': no images and labels are found in {listing(strange)} ('{strange[0]}' has {held}); arrange "
            f"each such folder like {listing(trees)} or, if it is no site, move it away"
        )
    return trees


def _tree(
    folder: Path, suffixes: Sequence[str], attributes: Mapping[str, str] | None, channels: Sequence[str]
) -> Tree | None:  # fmt: skip
    if (folder / "imagesTr").is_dir():
        tree = pairs(folder / "imagesTr", folder / "labelsTr", channels=channels)
        tree.names = _read_dataset_json(folder / DATASET)[0]
        if (folder / "imagesTs").is_dir():
            tree.notes.append(f"the volumes of '{folder / 'imagesTs'}' have no labels and are not used")
        return tree
    if any(path.is_dir() for path in folder.glob("sub-*")):
        return _bids(folder, suffixes, attributes)
    has_own = any(suffix_of(path) in NIFTI and not is_companion(path.name) for path in folder.iterdir())
    return _pair_in(folder, channels=channels) or (pairs(folder, folder, channels=channels) if has_own else None)


def _pair_in(folder: Path, pictures: bool = False, channels: Sequence[str] = ()) -> Tree | None:
    """Return the images and masks of a folder with the subfolders ``images`` and ``masks`` or ``labels``, else None."""
    masks = next((folder / name for name in MASK_FOLDERS if (folder / name).is_dir()), None)
    if masks is None or not (folder / "images").is_dir():
        return None
    return pairs(folder / "images", masks, pictures, channels)


def _read_dataset_json(file: Path) -> tuple[dict[int, str], list[str]]:
    """Read the names of labels and channels from a ``dataset.json``.

    Labels are ``{"0": "background", ...}``, or nnU-Net's ``{"background": 0, ...}``; channels ``"channel_names"`` or
    ``"modality"``, ``{"0": "T2", ...}``.
    """
    try:
        content = json.loads(file.read_bytes())
        labels, channels = content.get("labels", {}), content.get("channel_names") or content.get("modality") or {}
        by_value = labels if all(key.isdigit() for key in labels) else {value: name for name, value in labels.items()}
        names = [str(channels[key]) for key in sorted(channels, key=int)] if isinstance(channels, dict) else []
        return {int(value): str(name) for value, name in by_value.items()}, names
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"'{file}': its labels and channels cannot be read ({error}); correct the file, or move it away"
        ) from error


def pairs(images: Path, masks: Path, pictures: bool = False, channels: Sequence[str] = ()) -> Tree:
    """Pair the images of one folder with the masks of the same names in another folder, which may be the same.

    ``_mask``, ``_label``, ``_seg`` and ``_segmentation`` at the end of a name are ignored. Volumes that differ in
    nnU-Net's ``_0000``, ``_0001``, or in the name of a channel, at the end are images of one case. The mask of a DICOM
    series may have the name of the outer folder, if that folder holds only this series.

    Args:
        images, masks: the two folders.
        pictures: whether the folders hold pictures, of any file type; else NIfTI volumes and DICOM series.
        channels: names of the images of a case, in their order; default: those that ``dataset.json`` beside ``images``
            declares.

    Raises:
        DataError: a folder does not exist, two files have one name, a series is among pictures, or the images of the
            cases have no names.
    """
    together = images == masks
    shown, notes = _files_in(images, pictures, [] if together else [masks])
    marked, more = (shown, []) if together else _files_in(masks, pictures, [images])
    if together:
        shown, marked = ([file for file in shown if (key_of(file[0]) == file[0]) == plain] for plain in (True, False))
    why = "have the same name apart from the ending; rename or remove one of them"
    partners = unique(((key_of(name), path) for name, path in marked), why)
    declared = [] if pictures else _read_dataset_json((images if together else images.parent) / DATASET)[1]
    refuse({
        f"'{images}': '{DATASET}' declares {len(declared)} images a case ({', '.join(declared)}), --channels names "
        f"{len(channels)}; name all, none is left out": channels and len(channels) < len(declared),
    }, DataError)  # fmt: skip
    names = list(channels) or declared
    by_name = key_cases(((key_of(name), path) for name, path in shown), names, partners, why, pictures)
    for key, number in [] if pictures else [one for one in by_name if one[0] not in partners]:
        outer = key.partition("/")[0]
        if outer in partners and sum(other.startswith(f"{outer}/") for other, _ in by_name) == 1:
            by_name[outer, number] = by_name.pop((key, number))
    return _match_masks(images, by_name, partners, [*notes, *more], names)


def key_of(name: str) -> str:
    """Return a name without the ending that marks a mask."""
    return MASK_ENDING.sub("", name)


def _match_masks(
    folder: Path, images: Mapping[tuple[str, int], Path], masks: Mapping[str, Path | None], notes: list[str],
    names: Sequence[str] = (),
) -> Tree:  # fmt: skip
    """Pair the images and the mask of each case, and list the files without a partner in ``alone``.

    Args:
        folder: folder of the images, for messages.
        images: images by case and number of the channel, see :func:`key_cases`.
        masks: mask of each case; ``None`` for a case without a label.
        notes: notes on files that are ignored.
        names: names of the channels.

    Raises:
        DataError: there are no files, or cases have more images than names.
    """
    most = 1 + max((number for _, number in images), default=0)
    refuse({
        "; ".join([f"'{folder}': no image that is read was found", *notes]): not images and not masks,
        f"'{folder}': the cases have {most} images, named _0000 to _{most - 1:04}, and {len(names)} names of channels "
        f"({', '.join(names)}); name all in this order (--channels T2w ADC), or in 'channel_names' of '{DATASET}'":
            most > max(len(names), 1),
    }, DataError)  # fmt: skip
    tree, whole = Tree([], notes=notes), {*range(len(names))}
    for key, pairs_of in sorted(group_by_key((key, (number, path)) for (key, number), path in images.items()).items()):
        by_channel = dict(sorted(pairs_of))
        lacking = [names[number] for number in sorted(whole - {*by_channel})]
        if problem := first_of({
            "without a mask of its name": key not in masks,
            f"without its {' and '.join(lacking)}, which 'channels' names":
                len(names) > 1 and by_channel.keys() not in ({-1}, whole),
        }):  # fmt: skip
            tree.alone += [(shorten(path), problem) for path in by_channel.values()]
        else:
            path, *more = by_channel.values()
            tree.cases.append(Item(key, key, path, masks[key], more=tuple(more), channels=tuple(names)))
    cases = {key for key, _ in images}
    tree.alone += [(shorten(x), "a mask without an image") for key, x in masks.items() if x and key not in cases]
    return tree


def _files_in(folder: Path, pictures: bool, besides: Iterable[Path] = ()) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return key (path below the folder without ending) and path of each image or DICOM series of a folder, and notes.

    Raises:
        DataError: the folder does not exist, has DICOM series among pictures, or has DICOM files of volumes that are
            not in a subfolder.
    """
    seen = contents(folder, SUFFIXES if pictures else WANTED, besides)
    series = [] if pictures else files_of_series(folder)
    refuse({
        f"'{next(iter(seen.series), '')}' is a folder of DICOM files, a volume; {VOLUMES_TAKEN}":
            pictures and seen.series,
        f"'{folder}' holds DICOM files itself; put each series into a folder of its own in it":
            any(file_in(path) is None for path in series),  # one SEG holds all slices of its mask
    }, DataError)  # fmt: skip
    files = [(seen.key(path), path) for path in seen.images if pictures or suffix_of(path) in NIFTI or path in series]
    return sorted([*files, *((seen.key(path), path) for path in seen.series)]), seen.notes()


def _bids(folder: Path, suffixes: Sequence[str], attributes: Mapping[str, str] | None) -> Tree:
    """Read ``sub-*/[ses-*/]anat/*.nii.gz``, masks beside them or in ``derivatives``; people by ``participants.tsv``.

    Several suffixes are the channels of a case, in any folder of the examination.
    """
    images: list[tuple[tuple[str, int], Path]] = []
    masks: list[tuple[str, Path]] = []
    seen = contents(folder, WANTED)
    for path in (path for path in seen.images if path.name.startswith("sub-") and suffix_of(path) in NIFTI):
        stem = path.name[: -len(suffix_of(path))]
        key = "/".join(dict.fromkeys(BIDS_KEY.findall(stem)))
        number = next((k for k, suffix in enumerate(suffixes) if stem.endswith(f"_{suffix}")), -1)
        if BIDS_MASK.search(stem) is not None:
            masks.append((key, path))
        elif number >= 0 or not suffixes:
            images += [((key, number), path)] * (path.parent.name == "anat" or len(suffixes) > 1)
    why = (
        "are of one examination; say which images are meant (--suffix T1w), or which are its channels (--suffix T2w "
        "ADC), or name images and masks in a table (--csv)"
    )
    of_masks = "are masks of one examination; name images and masks in a table (--csv)"
    tree = _match_masks(folder, unique(images, why), unique(masks, of_masks), seen.notes(), suffixes)
    people, notes = _participants(folder / PARTICIPANTS, attributes)
    tree.cases = [
        replace(case, name=file_name(case.name), patient=patient, row=people.get(patient.removeprefix("sub-"), Row()))
        for case in tree.cases
        for patient in [case.name.partition("/")[0]]
    ]
    if people and (lacking := sorted({str(case.patient) for case in tree.cases if not case.row})):
        notes.append(f"'{folder / PARTICIPANTS}' does not have {len(lacking)} of the people: {name_first(lacking)}")
    tree.notes += notes
    return tree


def _participants(file: Path, attributes: Mapping[str, str] | None) -> tuple[dict[str, Row], list[str]]:
    """Return the rows of a BIDS tree's table of people by the number of the subject, and notes.

    Raises:
        DataError: attributes are requested, but the table cannot be read or lacks a column.
    """
    if not file.is_file():
        return {}, []
    columns = [column for column, _ in columns_of(attributes).values()]
    try:
        rows = read_table(file, ["participant_id", *columns], "; --attributes NAME=COLUMN takes one that is there")
    except DataError as error:
        if attributes:
            raise
        return {}, [f"people are not known: {error}"]
    if not attributes:
        more = [name for name in rows[0] if name not in ("participant_id", "")]
        return {}, [NOT_TAKEN.format(file, ", ".join(more), *more[:1], *more[-1:])] if more else []
    people: dict[str, Row] = {}
    for row in rows:
        before = people.setdefault(row["participant_id"].removeprefix("sub-"), row)
        if before is not row:
            raise DataError(f"'{file}', lines {before.line} and {row.line}: both are of '{row['participant_id']}'")
    return people, []


def class_folders(seen: Contents, classes: Sequence[str] | None) -> Tree:
    """Return the images of a source folder in ``<class>/`` or ``<site>/<class>/``, with their class and site.

    Raises:
        DataError: images lie at another depth, or the folder of a class or a site has no image.
    """
    parts = [path.relative_to(seen.folder).parts[:-1] for path in seen.images]
    depths = {len(way) for way in parts}
    unread = f"; not read: {passed_over}" if (passed_over := seen.list_unread()) else ""
    if depths not in ({1}, {2}):
        shown = listing({"/".join(way) or "the folder itself" for way in parts})
        raise DataError(
            f"'{seen.folder}': expected images in <class>/ or in <site>/<class>/, all of one kind, found "
            f"{len(seen.images)} images in {shown}; move them, or name them in a CSV file (--csv){unread}"
        )
    what = "class" if depths == {1} else "site"
    tops = {folder.name for folder in seen.folders if folder.parent == seen.folder}
    if empty := sorted(tops - {way[0] for way in parts} - (set(classes or ()) if what == "class" else set())):
        raise DataError(
            f"'{seen.folder}': no image that is read is in the folder{'s' * (len(empty) > 1)} {listing(empty)}; put "
            f"images in, or move it away, if it is no {what}{unread}"
        )
    texts = [path.relative_to(seen.folder).as_posix() for path in seen.images]
    cases = [
        Item(strip_ending(text), text, path, compose(way[-1]), site=compose(way[0]) if way[1:] else "", text=text)
        for text, path, way in zip(texts, seen.images, parts, strict=True)
    ]
    return Tree(cases, notes=seen.notes())


def add_unlabelled(trees: dict[str, Tree], given: Sequence[str] | None, pictures: bool = False) -> None:
    """Add the images of folders without labels to their sites; add sites that have only such images.

    Args:
        trees: images of each site.
        given: ``SITE=FOLDER`` of each folder, or ``FOLDER`` if there is only one site.
        pictures: whether the images are pictures; else NIfTI volumes and DICOM series.

    Raises:
        ValueError: a folder is given without a site, although there is not exactly one site.
        DataError: a folder does not exist or has no image.
    """
    for text in given or ():
        site, equals, place = text.partition("=")
        if not equals:
            if len(trees) != 1:
                raise ValueError(f"--unlabelled takes SITE=FOLDER where there are {len(trees)} sites, got {text!r:.80}")
            site, place = next(iter(trees)), text
        folder = existing_folder(Path(place))
        paths, notes = _files_in(folder, pictures)
        tree = trees.setdefault(site, Tree([]))
        names = next((case.channels for case in tree.cases), ())
        by_name = key_cases(paths, names, (), "have one name apart from the channel; rename one", pictures)
        more = _match_masks(folder, by_name, {key: None for key, _ in by_name}, notes, names)
        tree.cases += [replace(c, name=f"unlabelled/{c.name}", text=c.name, splits=(UNLABELLED,)) for c in more.cases]
        tree.alone += more.alone
        tree.notes += notes


# ------------------------------------------------------------------------------------------------------ tables


def _rows(
    file: Path, columns: Mapping[str, str], known: Sequence[str], attributes: Mapping[str, str] | None,
    notes: list[str], remedy: str = "",
) -> tuple[list[Row], dict[str, str]]:  # fmt: skip
    """Return the rows of a table, and the name in the table of each ``known`` or optional column.

    Raises:
        ValueError: ``columns`` gives a name to an unknown column.
        DataError: the table lacks a column.
    """
    if strange := [name for name in columns if name not in (*known, *OPTIONAL)]:
        raise ValueError(f"columns must be some of {', '.join((*known, *OPTIONAL))}, got {', '.join(strange)}")
    called = {name: columns.get(name, name) for name in (*known, *OPTIONAL)}
    needed = [called[name] for name in (*known, *columns)] + [column for column, _ in columns_of(attributes).values()]
    return read_table(file, list(dict.fromkeys(needed)), remedy, notes), called


def _read_row(row: Row, called: Mapping[str, str]) -> dict[str, Any]:
    """Return the patient, site and split of an image by its row of a table, and the row itself."""
    split = split_name(row.get(called["split"], ""), row)
    patient, site = row.get(called["patient"], ""), compose(row.get(called["site"], ""))
    return {
        "patient": None if patient.lower() in NOT_KNOWN else patient, "site": site,
        "splits": (split,) if split else (), "row": row,
    }  # fmt: skip


def list_table(
    source: Path, csv: str | Path, columns: Mapping[str, str], of: str = "",
    attributes: Mapping[str, str] | None = None, classes: Collection[str] | None = None, pictures: bool = False,
    site: str = "", channels: Sequence[str] = (),
) -> Tree:  # fmt: skip
    """Return the images of a table: ``image`` with ``mask`` or ``label``, and perhaps ``site``, ``patient``, ``split``.

    A row that repeats an earlier row is skipped, and a note counts such rows; another note counts the images that no
    row names.

    Args:
        source: folder below which the images lie.
        csv: path of the table, relative to the source, or else to the working folder.
        columns: names of columns that differ from those above.
        of: ``"label"`` or ``"mask"``; empty: the mask if the table has such a column.
        attributes: attributes of people, as in :func:`fairflare.data.preparers.listed.columns_of`.
        classes: names of the classes, where they are given.
        pictures: whether the table names pictures, of any file type; else NIfTI volumes and DICOM series.
        site: name of the site of the table; empty if each row names its site.
        channels: names of the images of a case, each of which has a column in place of ``image``.

    Raises:
        DataError: the table, a column or an image does not exist, a label is missing, a split is unknown, a row is of
            another site, or two rows contradict each other about one image.
    """
    file = next((place for place in (source / csv, Path(csv)) if place.is_file()), None)
    if file is None:
        raise DataError(f"the table '{csv}' is neither below '{source}' nor below the working folder '{Path.cwd()}'")
    notes: list[str] = []
    there = read_table(file, notes=[])[0]
    of = of or ("mask" if columns.get("mask", "mask") in there else "label")
    remedy = f"; where columns have other names: --columns image=COLUMN {of}=COLUMN, --attributes NAME=COLUMN"
    findings = of == "label" and columns.get(of, of) not in there and {*(classes or ())} & {*there}
    if absent := sorted({*(classes or ())}.difference(there)) if findings else ():
        raise DataError(f"'{file}' has no column for the finding {listing(absent)}; --classes names the columns")
    named_by = tuple(channels) or ("image",)
    table, called = _rows(file, columns, named_by if findings else (*named_by, of), attributes, notes, remedy)
    series = set() if pictures else {path for _, path in _files_in(source, pictures)[0] if path.is_dir()}
    images = Images(source, SUFFIXES if pictures else WANTED, series)
    bad = [
        (row.where, f"without its {column}, which 'channels' names")
        for row in table for column in channels if row[called[column]].lower() in NOT_KNOWN
    ]  # fmt: skip
    table = [row for row in table if row.where not in dict(bad)]
    paths, *others_of = (images.all([row[called[column]] for row in table], file) for column in named_by)
    texts = [row[called[of]] for row in table if not findings]
    for row, label in zip(table, texts, strict=False):
        site_of_row = row.get(called["site"], "")
        if problem := first_of({
            f"the {of} is missing": not label,
            f"the label is '{label}', which mostly means that there is none; take such rows out or, where it is a "
            f"class, name all classes (--classes {label} ...)":
                of == "label" and label.lower() in NO_VALUE and label not in (classes or ()),
            f"the site is '{site_of_row}', in the table of site '{site}'": bool(site) and site_of_row not in ("", site),
        }):  # fmt: skip
            raise DataError(f"{row.where}: {problem}")
    cells = [{name: row[name] for name in classes or ()} for row in table] if findings else []
    labels: Sequence[Any] = images.all(texts, file) if of == "mask" else cells or texts
    cases = []
    for row, path, target, *more in zip(table, paths, labels, *others_of, strict=True):
        text = path.relative_to(source).as_posix()
        name = text if path.is_dir() else strip_ending(text)
        cases.append(Item(
            name, text, path, target, text=text if pictures else name, more=tuple(more), channels=tuple(channels),
            **_read_row(row, called),
        ))  # fmt: skip
    silent = {
        "the split, and are for training, as others say the validation":
            any("validation" in case.splits for case in cases) * sum(not case.splits for case in cases),
        "the patient, and are of one each, unless --group or a header tells": sum(not case.patient for case in cases),
    }  # fmt: skip
    notes = [
        *images.contents.notes(), *notes,
        *(f"'{file}': {number} of {len(cases)} rows do not say {what}"
          for what, number in silent.items() if 0 < number < len(cases)),
    ]  # fmt: skip
    taken = {*paths, *chain(*others_of), *(label for label in labels if isinstance(label, Path))}
    if others := [path.name for path in images.paths if path not in taken]:
        notes.append(
            f"{len(others)} of {len(images.paths)} images in '{source}' are not in the table '{file}' and are left "
            f"out: {name_first(others)}"
        )
    return Tree(_once(cases, file, of, attributes, notes), bad, notes)


def _once(
    cases: Sequence[Item], file: Path, of: str, attributes: Mapping[str, str] | None, notes: list[str]
) -> list[Item]:
    """Return the cases of a table without those whose row repeats an earlier row.

    Raises:
        DataError: two rows of one image contradict each other.
    """
    columns = [column for column, _ in columns_of(attributes).values()]
    first: dict[Path, tuple[Item, dict[str, Any]]] = {}
    for case, label in zip(cases, normalise_labels([str(case.mask) for case in cases]), strict=True):
        fields = {
            of: label, "site": case.site, "patient": case.patient or "", "split": "".join(case.splits),
            **{column: case.row[column] for column in columns},
        }  # fmt: skip
        before, known = first.setdefault(case.image, (case, fields))
        if (key := next((key for key in fields if fields[key] != known[key]), None)) is not None:
            raise DataError(
                f"'{file}', lines {before.row.line} and {case.row.line}: both name '{case.image}', with the {key} "
                f"'{known[key]}' and '{fields[key]}'; take one out"
            )
    if again := [case.row.line for case in cases if first[case.image][0] is not case]:
        notes.append(f"'{file}': {len(again)} rows repeat an earlier one, such as line {again[0]}")
    return [case for case, _ in first.values()]


def read_site(
    site: str, images: Path, labels: Path, columns: Mapping[str, str], attributes: Mapping[str, str] | None,
    classes: Sequence[str] | None, pictures: bool = False, channels: Sequence[str] = (),
) -> Tree:  # fmt: skip
    """Return the images of one site given by name, whose labels are a folder of masks or a table."""
    with naming_site(site):
        if not labels.is_file():
            return pairs(images, labels, pictures, channels)
        return list_table(images, labels.absolute(), columns, "", attributes, classes, pictures, site, channels)


def add_known(
    trees: Mapping[str, Tree], folders: Mapping[str, Path], csv: str | Path, columns: Mapping[str, str],
    attributes: Mapping[str, str] | None,
) -> None:  # fmt: skip
    """Add the facts of one table (patient, split, attributes) to the images of all sites.

    Raises:
        DataError: the table names an image that does not exist or is at several sites, or two rows contradict each
            other.
    """
    file, notes = Path(csv), list[str]()
    table, called = _rows(file, columns, ("image",), attributes, notes)
    images = {site: Images(folder) for site, folder in folders.items()}
    items, missing = [], []
    for row in table:
        name, site = row[called["image"]], row.get(called["site"], "")
        if site and site not in images:
            raise DataError(f"{row.where}: there is no site '{site}'{nearest(site, list(images))}")
        places = [path for one, known in images.items() if site in ("", one) if (path := known.find(name)) is not None]
        if len(places) > 1:
            raise DataError(f"{row.where}: image '{name}' is at several sites; add a column 'site'")
        missing += [] if places else [name]
        items += [Item(name, name, path, "", **_read_row(row, called)) for path in places]
    refuse({
        f"'{file}': {len(missing)} images that it names are at no site: {listing(missing)}": missing
    }, DataError)  # fmt: skip
    known = {item.image: item for item in _once(items, file, "label", attributes, notes)}
    cases = [case for tree in trees.values() for case in tree.cases]
    if lacking := [case.image.name for case in cases if case.image not in known]:
        notes.append(f"{len(lacking)} of {len(cases)} images are not in '{file}': {name_first(lacking)}")
    for tree in trees.values():
        tree.notes += notes
        tree.cases = [
            replace(case, patient=row.patient or case.patient, splits=case.splits or row.splits, row=row.row)
            for case, row in ((case, known.get(case.image, case)) for case in tree.cases)
        ]
