"""Where volumes and their labels lie: the Decathlon's tree, BIDS, plain folders, folders of DICOM series, a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairflare.data.datalist import DataError, suffix_of
from fairflare.data.dicom_files import DICOM, files_of_series, is_companion
from fairflare.data.image_file import VOLUMES as NIFTI
from fairflare.data.kinds import named
from fairflare.data.preparers.contents import contents, sites_below, without_ending
from fairflare.data.preparers.listed import FURTHER, called_columns, columns_of, listed_rows, table_file
from fairflare.data.preparers.names import composed, existing_folder, file_name, listing
from fairflare.data.preparers.pairing import alone, keyed, pair_in
from fairflare.data.preparers.tables import Images, Row, read_table

WANTED = (*NIFTI, *DICOM)
EXPECTED = (
    "imagesTr/ and labelsTr/ (Decathlon), sub-*/ (BIDS), images/ and masks/ (or labels/), or volumes beside their masks"
)
PARTICIPANTS = "participants.tsv"  # of BIDS
BIDS_KEY = re.compile(r"(?:sub|ses|run)-[A-Za-z0-9]+")
BIDS_MASK = re.compile(r"_(?:mask|dseg|seg|label|roi)$")


@dataclass(frozen=True)
class Case:
    """A volume and what is known of it.

    Attributes:
        path: of the image below its folder, without the ending: its name, in which patients are looked for.
        image: a NIfTI file, or the folder of a DICOM series.
        label: its mask, or the name of its class.
        patient, site, split: where the source says them.
        row: of a table, for attributes; None: there is none.
    """

    path: str
    image: Path
    label: Path | str
    patient: str | None = None
    site: str = ""
    split: str = ""
    row: Row | None = None


@dataclass
class Tree:
    """What a folder holds.

    Attributes:
        cases: volumes with labels.
        alone: name of each file without a partner, and what it lacks.
        notes: what is not used on purpose.
        names: of the labels by their values, where the source says them.
    """

    cases: list[Case]
    alone: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)


def trees_of(source: Path, suffix: str | None, attributes: Mapping[str, str] | None = None) -> dict[str, Tree]:
    """The tree of a source folder (of one site without a name), else those of the folders in it, by their names.

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
    """Of a Decathlon's ``dataset.json``: ``{"0": "background", ...}``, or nnU-Net's ``{"background": 0, ...}``."""
    try:
        labels = json.loads(file.read_bytes()).get("labels", {})
        by_value = labels if all(key.isdigit() for key in labels) else {value: name for name, value in labels.items()}
        return {int(value): str(name) for value, name in by_value.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"'{file}': its labels cannot be read ({error}); correct the file, or move it away") from error


def pairs(images: Path, masks: Path) -> Tree:
    """The volumes of one folder with the masks of their names in another one, which may be the same.

    ``_mask``, ``_label``, ``_seg`` and ``_segmentation`` at the end of a name do not count, nor does nnU-Net's
    ``_0000``. The mask of a DICOM series may have the name of the outer folder, where that holds this series alone.

    Raises:
        DataError: a folder is not there, or two files have one name.
    """
    together = images == masks
    own, notes = volumes_below(images, [] if together else [masks])
    marked, more = (own, []) if together else volumes_below(masks, [images])
    pictures = keyed(own, "images" if together else None, channel=True)
    partners = keyed(marked, "masks" if together else None, channel=True)
    for key in [key for key in pictures if key not in partners]:
        outer = key.partition("/")[0]
        if outer in partners and sum(other.startswith(f"{outer}/") for other in pictures) == 1:
            pictures[outer] = pictures.pop(key)
    return replace(_matched(pictures, partners), notes=[*notes, *more])


def _matched(images: Mapping[str, Path], masks: Mapping[str, Path]) -> Tree:
    return Tree([Case(key, images[key], masks[key]) for key in sorted(images) if key in masks], alone(images, masks))


def volumes_below(folder: Path, besides: Iterable[Path] = ()) -> tuple[list[tuple[str, Path]], list[str]]:
    """Path below the folder, without an ending, and place of every NIfTI file and DICOM series; notes.

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
    """``sub-*/[ses-*/]anat/*.nii.gz``, with masks beside them or in ``derivatives``; people by ``participants.tsv``."""
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
    several = [found for own in (images, masks) for found in own.values() if len(found) > 1]
    if several:
        raise DataError(
            f"'{folder}': these are of one examination: {listing(path.name for path in several[0])}; say which images "
            "are meant (--suffix T1w), or name images and masks in a table (--csv)"
        )
    found = _matched({key: own[0] for key, own in images.items()}, {key: own[0] for key, own in masks.items()})
    people, notes = _participants(folder / PARTICIPANTS, attributes)
    cases = []
    for case in found.cases:
        patient = case.path.partition("/")[0]
        row = people.get(patient.removeprefix("sub-"))
        cases.append(replace(case, path=file_name(case.path), patient=patient, row=row))
    lacking = sorted({str(case.patient) for case in cases if case.row is None})
    if people and lacking:
        notes.append(f"'{folder / PARTICIPANTS}' does not have {len(lacking)} of the people: {named(lacking)}")
    return replace(found, cases=cases, notes=[*seen.notes(), *notes])


def _participants(file: Path, attributes: Mapping[str, str] | None) -> tuple[dict[str, Row], list[str]]:
    """The rows of a BIDS tree's table of people by the number of the subject, and notes.

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


def listed(
    source: Path, csv: str | Path, columns: Mapping[str, str], attributes: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
) -> Tree:  # fmt: skip
    """The volumes of a table: ``image`` with ``mask`` or ``label`` (its class), and perhaps site, patient, split.

    Raises:
        DataError: as :func:`fairflare.data.preparers.listed.listed_rows`.
    """
    file = table_file(source, csv)
    mask = called_columns(columns, [*columns, "mask"])["mask"]
    of = "mask" if mask in read_table(file)[0] else "label"
    found, notes = volumes_below(source)
    images = Images(source, NIFTI, [path for _, path in found if path.is_dir()])
    cases = []
    for row in listed_rows(source, file, columns, of, images, attributes, classes):
        image = Path(row["path"])
        name = row["text"] if image.is_dir() else without_ending(row["text"])
        label = Path(row[of]) if of == "mask" else row[of]
        bare = Row({k.removeprefix(FURTHER): v for k, v in row.items() if k.startswith(FURTHER)}, where=row.where)
        cases.append(Case(name, image, label, row["patient"] or None, row["site"], row["split"], bare))
    return Tree(cases, notes=notes)
