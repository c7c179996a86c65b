"""Where volumes and their labels lie: the Decathlon's tree, BIDS, plain folders, folders of DICOM series, a table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fairflare.data.datalist import DataError, suffix_of
from fairflare.data.dicom_files import files_of_series
from fairflare.data.image_file import VOLUMES as NIFTI
from fairflare.data.preparers.listed import called_columns, listed_rows, table_file
from fairflare.data.preparers.names import existing_folder, file_name, listing
from fairflare.data.preparers.pictures import MASK_ENDING, pair_in
from fairflare.data.preparers.tables import Images, read_table

CHANNEL = re.compile(r"_0000$")  # nnU-Net's number of the first channel
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
    """

    path: str
    image: Path
    label: Path | str
    patient: str | None = None
    site: str = ""
    split: str = ""


@dataclass
class Tree:
    """What a folder holds.

    Attributes:
        cases: volumes with labels.
        alone: files without a partner, in words.
        notes: what is not used on purpose.
        names: of the labels by their values, where the source says them.
    """

    cases: list[Case]
    alone: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)


def trees_of(source: Path, suffix: str | None) -> dict[str, Tree]:
    """The tree of a source folder (of one site without a name), else those of the folders in it, by their names.

    Args:
        source: the folder.
        suffix: of the images of a BIDS tree, such as ``T1w``; ``None``: it has one kind.

    Raises:
        DataError: there is none.
    """
    own = _tree(existing_folder(source), suffix)
    if own is not None:
        return {"": own}
    below = {path.name: _tree(path, suffix) for path in sorted(source.iterdir()) if path.is_dir()}
    found = {name: tree for name, tree in below.items() if tree is not None}
    if not found:
        raise DataError(
            f"'{source}': expected imagesTr/ and labelsTr/ (Decathlon), sub-*/ (BIDS), images/ and masks/ (or "
            f"labels/), or volumes beside their masks, in it or in a folder for each site, found "
            f"{listing(path.name for path in source.iterdir())}; or name the folders (--site) or the files (--csv)"
        )
    return found


def _tree(folder: Path, suffix: str | None) -> Tree | None:
    if (folder / "imagesTr").is_dir():
        found = pairs(folder / "imagesTr", folder / "labelsTr")
        found.names = _label_names(folder / "dataset.json")
        if (folder / "imagesTs").is_dir():
            found.notes.append(f"the volumes of '{folder / 'imagesTs'}' have no labels and are not used")
        return found
    if any(path.is_dir() for path in folder.glob("sub-*")):
        return _bids(folder, suffix)
    pair = pair_in(folder)
    if pair is not None:
        return pairs(*pair)
    has_own = any(suffix_of(path) in NIFTI for path in folder.iterdir())
    return pairs(folder, folder) if has_own else None


def _label_names(file: Path) -> dict[int, str]:
    """Of a Decathlon's ``dataset.json``: ``{"0": "background", ...}``, or nnU-Net's ``{"background": 0, ...}``."""
    try:
        labels = json.loads(file.read_text(encoding="utf-8")).get("labels", {})
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
    pictures = _by_key(images, lambda marked: not marked or not together)
    partners = _by_key(masks, lambda marked: marked or not together)
    for key in [key for key in pictures if key not in partners]:
        outer = key.partition("/")[0]
        if outer in partners and sum(other.startswith(f"{outer}/") for other in pictures) == 1:
            pictures[outer] = pictures.pop(key)
    return _matched(pictures, partners)


def _matched(images: Mapping[str, Path], masks: Mapping[str, Path]) -> Tree:
    alone = [f"'{image}' has no mask" for key, image in images.items() if key not in masks]
    alone += [f"'{mask}' has no image" for key, mask in masks.items() if key not in images]
    return Tree([Case(key, images[key], masks[key]) for key in sorted(images) if key in masks], alone)


def volumes_below(folder: Path) -> list[tuple[str, Path]]:
    """Path below the folder, without an ending, and place of every NIfTI file and every folder of a DICOM series.

    Raises:
        DataError: it is no folder, or holds DICOM files itself.
    """
    if files_of_series(existing_folder(folder)):
        raise DataError(f"'{folder}' holds DICOM files itself; put each series into a folder of its own in it")
    found = []
    for path in sorted(folder.rglob("[!.]*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and files_of_series(path):
            found.append((name, path))
        elif path.is_file() and suffix_of(path) in NIFTI:
            found.append((name[: -len(suffix_of(path))], path))
    return found


def _by_key(folder: Path, wanted: Any) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, path in volumes_below(folder):
        key = MASK_ENDING.sub("", name)
        if not wanted(key != name):
            continue
        key = CHANNEL.sub("", key)
        if key in found:
            raise DataError(f"'{found[key]}' and '{path}' have the same name apart from the ending; rename one")
        found[key] = path
    return found


def _bids(folder: Path, suffix: str | None) -> Tree:
    """``sub-*/[ses-*/]anat/*.nii.gz``, with masks beside them or in ``derivatives``."""
    images: dict[str, list[Path]] = {}
    masks: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("sub-*.nii*")):
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
    cases = [replace(case, path=file_name(case.path), patient=case.path.partition("/")[0]) for case in found.cases]
    return replace(found, cases=cases)


def listed(source: Path, csv: str | Path, columns: Mapping[str, str]) -> Tree:
    """The volumes of a table: ``image`` with ``mask`` or ``label`` (its class), and perhaps site, patient, split.

    Raises:
        DataError: as :func:`fairflare.data.preparers.listed.listed_rows`.
    """
    file = table_file(source, csv)
    mask = called_columns(columns, [*columns, "mask"])["mask"]
    of = "mask" if mask in read_table(file)[0] else "label"
    series = [path for _, path in volumes_below(source) if path.is_dir()]
    cases = []
    for row in listed_rows(source, file, columns, of, Images(source, NIFTI, series)):
        image = Path(row["path"])
        name = image.relative_to(source).as_posix()
        name = name if image.is_dir() else name[: -len(suffix_of(image))]
        label = Path(row[of]) if of == "mask" else row[of]
        cases.append(Case(name, image, label, row["patient"] or None, row["site"], row["split"]))
    return Tree(cases)
