"""Where images and their labels lie: class folders, pairs of folders, the Decathlon's tree, BIDS, series, a table."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairflare.base.checks import nearest
from fairflare.data.datalist import DataError, suffix_of
from fairflare.data.dicom_files import DICOM, files_of_series, is_companion
from fairflare.data.image_file import SUFFIXES
from fairflare.data.image_file import VOLUMES as NIFTI
from fairflare.data.kinds import named
from fairflare.data.preparers.contents import VOLUMES_TAKEN, Contents, contents, sites_below, without_ending
from fairflare.data.preparers.listed import NO_VALUE, OPTIONAL, by_value, called_columns, columns_of, split_name
from fairflare.data.preparers.names import composed, existing_folder, file_name, listing
from fairflare.data.preparers.pairing import alone, keyed, pair_in
from fairflare.data.preparers.tables import Images, Row, read_table

WANTED = (*NIFTI, *DICOM)
OF_PAIRS = "images/ and masks/ (or labels/)"
EXPECTED = (
    "imagesTr/ and labelsTr/ (Decathlon), sub-*/ (BIDS), images/ and masks/ (or labels/), or volumes beside their masks"
)
PARTICIPANTS = "participants.tsv"  # of BIDS
BIDS_KEY = re.compile(r"(?:sub|ses|run)-[A-Za-z0-9]+")
BIDS_MASK = re.compile(r"_(?:mask|dseg|seg|label|roi)$")


@dataclass(frozen=True)
class Case:
    """An image and what is known of it.

    Attributes:
        name: path below its folder, without the ending.
        image: a file, or the folder of a DICOM series.
        label: its mask, or the name of its class, later the number of this.
        text: what patients are searched in; empty: the name.
        patient, site, split: where the source says them.
        row: of a table, for attributes; None: there is none.
        people: attributes of the person.
    """

    name: str
    image: Path
    label: Path | str | int
    text: str = ""
    patient: str | None = None
    site: str = ""
    split: str = ""
    row: Row | None = None
    people: Mapping[str, str | float] = field(default_factory=dict)


@dataclass
class Tree:
    """What a folder holds.

    Attributes:
        cases: images with labels.
        alone: name of each file without a partner, and what it lacks.
        notes: what is not used on purpose.
        names: of the labels by their values, where the source says them.
    """

    cases: list[Case]
    alone: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)


def trees_of(source: Path, suffix: str | None, attributes: Mapping[str, str] | None = None) -> dict[str, Tree]:
    """Return the tree of a source folder (of one site without a name), else those of the folders in it, by their names.

    Args:
        source: the folder.
        suffix: of the images of a BIDS tree, such as ``T1w``; ``None``: it has one kind.
        attributes: of the people, by their columns of a BIDS tree's ``participants.tsv``.

    Raises:
        DataError: there is none, or a folder in it is none of a site.
    """
    return sites_below(
        source, lambda folder: _tree(folder, suffix, attributes), EXPECTED,
        "the folders (--site) or the files (--csv)",
        lambda: "".join(f"; {note}" for note in contents(source, WANTED).notes()),
    )  # fmt: skip


def _tree(folder: Path, suffix: str | None, attributes: Mapping[str, str] | None) -> Tree | None:
    if (folder / "imagesTr").is_dir():
        found = pairs(folder / "imagesTr", folder / "labelsTr")
        found.names = _label_names(folder / "dataset.json")
        if (folder / "imagesTs").is_dir():
            found.notes.append(f"the volumes of '{folder / 'imagesTs'}' have no labels and are not used")
        return found
    if any(path.is_dir() for path in folder.glob("sub-*")):
        return _bids(folder, suffix, attributes)
    pair = pair_in(folder)
    if pair is not None:
        return pairs(*pair)
    has_own = any(suffix_of(path) in NIFTI and not is_companion(path.name) for path in folder.iterdir())
    return pairs(folder, folder) if has_own else None


def _label_names(file: Path) -> dict[int, str]:
    """Read the labels of a ``dataset.json``: ``{"0": "background", ...}``, or nnU-Net's ``{"background": 0, ...}``."""
    try:
        labels = json.loads(file.read_bytes()).get("labels", {})
        by_value = labels if all(key.isdigit() for key in labels) else {value: name for name, value in labels.items()}
        return {int(value): str(name) for value, name in by_value.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"'{file}': its labels cannot be read ({error}); correct the file, or move it away") from error


def pairs(images: Path, masks: Path, pictures: bool = False) -> Tree:
    """Return the images of one folder with the masks of their names in another one, which may be the same.

    ``_mask``, ``_label``, ``_seg`` and ``_segmentation`` at the end of a name do not count, nor does, of volumes,
    nnU-Net's ``_0000``. The mask of a DICOM series may have the name of the outer folder, where that holds this series
    alone.

    Args:
        images, masks: the folders.
        pictures: they hold files of any kind; else NIfTI volumes and DICOM series.

    Raises:
        DataError: a folder is not there, two files have one name, or a series is among pictures.
    """
    together = images == masks
    found = pictures_below if pictures else volumes_below
    own, notes = found(images, [] if together else [masks])
    marked, more = (own, []) if together else found(masks, [images])
    by_name = keyed(own, "images" if together else None, channel=not pictures)
    partners = keyed(marked, "masks" if together else None, channel=not pictures)
    for key in [] if pictures else [key for key in by_name if key not in partners]:
        outer = key.partition("/")[0]
        if outer in partners and sum(other.startswith(f"{outer}/") for other in by_name) == 1:
            by_name[outer] = by_name.pop(key)
    return _matched(images, by_name, partners, [*notes, *more])


def _matched(folder: Path, images: Mapping[str, Path], masks: Mapping[str, Path], notes: list[str]) -> Tree:
    if not images and not masks:
        raise DataError("; ".join([f"'{folder}': no image that is read was found", *notes]))
    cases = [Case(key, images[key], masks[key]) for key in sorted(images) if key in masks]
    return Tree(cases, alone(images, masks), notes)


def pictures_below(folder: Path, besides: Iterable[Path] = ()) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the path below the folder, without an ending, and the place of every image; notes.

    Raises:
        DataError: it is no folder, or has DICOM files in one below.
    """
    seen = contents(folder, besides=besides)
    if seen.series:
        raise DataError(f"'{seen.series[0]}' is a folder of DICOM files, a volume; {VOLUMES_TAKEN}")
    return [(seen.key(path), path) for path in seen.images], seen.notes()


def volumes_below(folder: Path, besides: Iterable[Path] = ()) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the path below the folder, without an ending, and place of every NIfTI file and DICOM series; notes.

    Raises:
        DataError: it is no folder, or holds DICOM files itself.
    """
    if files_of_series(existing_folder(folder)):
        raise DataError(f"'{folder}' holds DICOM files itself; put each series into a folder of its own in it")
    seen = contents(folder, WANTED, besides)
    files = [(seen.key(path), path) for path in seen.images if suffix_of(path) in NIFTI]
    series = [(composed(path.relative_to(folder).as_posix()), path) for path in seen.series]
    return sorted([*files, *series]), seen.notes()


def _bids(folder: Path, suffix: str | None, attributes: Mapping[str, str] | None) -> Tree:
    """Read ``sub-*/[ses-*/]anat/*.nii.gz``, masks beside them or in ``derivatives``; people by ``participants.tsv``."""
    images: dict[str, list[Path]] = {}
    masks: dict[str, list[Path]] = {}
    seen = contents(folder, WANTED)
    for path in (path for path in seen.images if path.name.startswith("sub-") and suffix_of(path) in NIFTI):
        stem = path.name[: -len(suffix_of(path))]
        key = "/".join(dict.fromkeys(BIDS_KEY.findall(stem)))
        if BIDS_MASK.search(stem):
            masks.setdefault(key, []).append(path)
        elif path.parent.name == "anat" and stem.endswith(f"_{suffix}" if suffix else ""):
            images.setdefault(key, []).append(path)
    if several := [found for own in (images, masks) for found in own.values() if len(found) > 1]:
        raise DataError(
            f"'{folder}': these are of one examination: {listing(path.name for path in several[0])}; say which images "
            "are meant (--suffix T1w), or name images and masks in a table (--csv)"
        )
    one = {key: own[0] for key, own in images.items()}
    found = _matched(folder, one, {key: own[0] for key, own in masks.items()}, seen.notes())
    people, notes = _participants(folder / PARTICIPANTS, attributes)
    cases = []
    for case in found.cases:
        patient = case.name.partition("/")[0]
        row = people.get(patient.removeprefix("sub-"))
        cases.append(replace(case, name=file_name(case.name), patient=patient, row=row))
    lacking = sorted({str(case.patient) for case in cases if case.row is None})
    if people and lacking:
        notes.append(f"'{folder / PARTICIPANTS}' does not have {len(lacking)} of the people: {named(lacking)}")
    return replace(found, cases=cases, notes=[*found.notes, *notes])


def _participants(file: Path, attributes: Mapping[str, str] | None) -> tuple[dict[str, Row], list[str]]:
    """Return the rows of a BIDS tree's table of people by the number of the subject, and notes.

    Raises:
        DataError: attributes are asked for, and it cannot be read or lacks a column.
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
    people: dict[str, Row] = {}
    for row in rows:
        before = people.setdefault(row["participant_id"].removeprefix("sub-"), row)
        if before is not row and attributes:
            raise DataError(f"'{file}', lines {before.line} and {row.line}: both are of '{row['participant_id']}'")
    more = [name for name in rows[0] if name not in ("participant_id", "")]
    if attributes or not more:
        return people if attributes else {}, []
    return {}, [
        f"'{file}' says {', '.join(more)} of the people, which is not taken over; for groups of people give "
        f"--attributes {more[0]}={more[0]}, of a number with the edges of groups: {more[-1]}={more[-1]}:EDGE,EDGE"
    ]


def paired_sites(source: Path) -> dict[str, Tree]:
    """Return the pictures with masks of a source folder (of one site without a name), else of the folders in it.

    Raises:
        DataError: there are none, or a folder in it is none of a site.
    """
    trees = {}
    for site, places in sites_below(source, pair_in, OF_PAIRS, "the files in a CSV file (--csv)").items():
        tree = pairs(*places, pictures=True)
        named_by_site = [replace(case, text=case.name, name=f"{site}_{case.name}".lstrip("_")) for case in tree.cases]
        trees[site] = replace(tree, cases=named_by_site)
    return trees


def class_folders(seen: Contents, classes: Sequence[str] | None) -> Tree:
    """Return the images in ``<class>/`` or ``<site>/<class>/``.

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
    if empty := sorted(tops - {found[0] for found in parts} - (set(classes or ()) if what == "class" else set())):
        raise DataError(
            f"'{seen.folder}': no image that is read is in the folder{'s' * (len(empty) > 1)} {listing(empty)}; put "
            f"images in, or move it away, if it is no {what}{unread}"
        )
    cases = []
    for path, found in zip(seen.images, parts, strict=True):
        text = path.relative_to(seen.folder).as_posix()
        site = composed(found[0]) if len(found) == 2 else ""
        cases.append(Case(without_ending(text), path, composed(found[-1]), text, site=site))
    return Tree(cases, notes=seen.notes())


# ------------------------------------------------------------------------------------------------------ tables


def listed(
    source: Path, csv: str | Path, columns: Mapping[str, str], of: str = "",
    attributes: Mapping[str, str] | None = None, classes: Collection[str] | None = None, pictures: bool = False,
) -> Tree:  # fmt: skip
    """Return the images of a table: ``image`` with ``mask`` or ``label``, and perhaps ``site``, ``patient``, ``split``.

    A row that says again what an earlier one says is passed over, and a note counts them; another one counts the
    images that no row names.

    Args:
        source: folder that the images lie below.
        csv: the table, below the source, else as seen from the working folder.
        columns: what columns are called, where not so.
        of: ``"label"`` or ``"mask"``; empty: the mask where the table has such a column.
        attributes: as in :func:`fairflare.data.preparers.listed.columns_of`.
        classes: their names, where they are given.
        pictures: it names files of any kind; else NIfTI volumes and DICOM series.

    Raises:
        DataError: a column or an image is not there, a label is missing, a split is not known, or two rows say
            different things of one image.
    """
    file = _table_file(source, csv)
    of = of or ("mask" if columns.get("mask", "mask") in read_table(file, notes=[])[0] else "label")
    called = called_columns(columns, ("image", of, *OPTIONAL))
    more = [column for column, _ in columns_of(attributes).values()]
    remedy = f"; where columns have other names: --columns image=COLUMN {of}=COLUMN, --attributes NAME=COLUMN"
    needed = dict.fromkeys([called["image"], called[of], *(called[key] for key in columns), *more])
    notes: list[str] = []
    table = read_table(file, list(needed), remedy, notes)
    series = [] if pictures else [path for _, path in volumes_below(source)[0] if path.is_dir()]
    images = Images(source, SUFFIXES if pictures else NIFTI, series)
    paths = images.all([row[called["image"]] for row in table], file)
    texts = [row[called[of]] for row in table]
    for row, label in zip(table, texts, strict=True):
        if not label:
            raise DataError(f"{row.where}: the {of} is missing")
        if of == "label" and label.lower() in NO_VALUE and label not in (classes or ()):
            raise DataError(
                f"{row.where}: the label is '{label}', which mostly means that there is none; take such rows out "
                f"or, where it is a class, name all classes (--classes {label} ...)"
            )
    labels: Sequence[Path | str] = images.all(texts, file) if of == "mask" else texts
    cases = []
    for row, path, target in zip(table, paths, labels, strict=True):
        text = path.relative_to(source).as_posix()
        name = text if path.is_dir() else without_ending(text)
        patient, site, split = (row.get(called[key], "") for key in ("patient", "site", "split"))
        searched = text if pictures else name
        cases.append(Case(name, path, target, searched, patient or None, composed(site), split_name(split, row), row))
    notes = [*images.contents.notes(), *notes]
    taken = {*paths, *labels}
    if others := [path.name for path in images.paths if path not in taken]:
        notes.append(
            f"{len(others)} of {len(images.paths)} images in '{source}' are not in the table '{file}' and are left "
            f"out: {named(others)}"
        )
    return Tree(_once(cases, file, of, more, notes), notes=notes)


def _table_file(source: Path, csv: str | Path) -> Path:
    """Return a table below the source, else as seen from the working folder.

    Raises:
        DataError: it is in neither place.
    """
    places = (source / csv, Path(csv))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"the table '{csv}' is neither below '{source}' nor below the working folder '{Path.cwd()}'")
    return found


def _once(cases: Sequence[Case], file: Path, of: str, columns: Sequence[str], notes: list[str]) -> list[Case]:
    """Return the cases without those whose row repeats an earlier one.

    Raises:
        DataError: two name one image, and say different things.
    """
    labels = [str(case.label) for case in cases]
    values = dict(zip(labels, by_value(labels), strict=True))
    first: dict[Path, tuple[Case, dict[str, str]]] = {}
    again = []
    for case in cases:
        row = case.row or Row()
        said = {of: str(case.label), "site": case.site, "patient": case.patient or "", "split": case.split}
        said |= {column: row[column] for column in columns}
        before, known = first.setdefault(case.image, (case, said))
        if before is case:
            continue
        again.append(row.line)
        for key, text in said.items():
            if text != known[key] and not (key == "label" and values[text] == values[known[key]]):
                raise DataError(
                    f"'{file}', lines {before.row.line if before.row else 0} and {row.line}: both name '{case.image}', "
                    f"with the {key} '{known[key]}' and '{text}'; take one out"
                )
    if again:
        notes.append(f"'{file}': {len(again)} rows repeat an earlier one, such as line {again[0]}")
    return [case for case, _ in first.values()]


def of_site(
    site: str, images: Path, labels: Path, columns: Mapping[str, str], attributes: Mapping[str, str] | None,
    classes: Sequence[str] | None, pictures: bool = False,
) -> Tree:  # fmt: skip
    """Return the images of a site that is named, with a folder of masks or a table.

    Raises:
        DataError: the table names another site.
    """
    if not labels.is_file():
        return pairs(images, labels, pictures)
    found = listed(images, labels.absolute(), columns, "", attributes, classes, pictures)
    for case in found.cases:
        if case.site not in ("", site):
            where = case.row.where if case.row else labels
            raise DataError(f"{where}: the site is '{case.site}', in the table of site '{site}'")
    return found


def add_known(
    trees: Mapping[str, Tree], folders: Mapping[str, Path], csv: str | Path, columns: Mapping[str, str],
    attributes: Mapping[str, str] | None,
) -> dict[str, Tree]:  # fmt: skip
    """Add to the images of all sites what one table says of them.

    Raises:
        DataError: it names an image that is not there, is at several sites or stands in it twice.
    """
    file = Path(csv)
    called = called_columns(columns, ("image", *OPTIONAL))
    more = [column for column, _ in columns_of(attributes).values()]
    images = {site: Images(folder) for site, folder in folders.items()}
    told: dict[Path, Row] = {}
    notes: list[str] = []
    missing = []
    for line in read_table(file, [called["image"], *(called[key] for key in columns), *more], notes=notes):
        name, site = line[called["image"]], line.get(called["site"], "")
        if site and site not in images:
            raise DataError(f"{line.where}: there is no site '{site}'{nearest(site, list(images))}")
        places = [path for own, known in images.items() if site in ("", own) if (path := known.find(name)) is not None]
        if len(places) > 1:
            raise DataError(f"{line.where}: '{name}' is at several sites; name the site in a column 'site'")
        missing += [] if places else [name]
        before = told.setdefault(places[0], line) if places else line
        if before is not line:
            raise DataError(f"'{file}', lines {before.line} and {line.line}: both name '{places[0]}'; take one out")
    if missing:
        raise DataError(f"'{file}': {len(missing)} images that it names are at no site: {listing(missing)}")
    all_cases = [case for tree in trees.values() for case in tree.cases]
    if lacking := [case.image.name for case in all_cases if case.image not in told]:
        notes.append(f"{len(lacking)} of {len(all_cases)} images are not in '{file}': {named(lacking)}")
    found = {}
    for site, tree in trees.items():
        cases = []
        for case in tree.cases:
            if (row := told.get(case.image)) is not None:
                patient = row.get(called["patient"]) or case.patient
                split = case.split or split_name(row.get(called["split"], ""), row)
                case = replace(case, patient=patient, split=split, row=row)
            cases.append(case)
        found[site] = replace(tree, cases=cases, notes=[*tree.notes, *notes])
    return found
