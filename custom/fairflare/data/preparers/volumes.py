"""Volumes of one's own, whole for a MONAI bundle or slice by slice for 2D tasks: NIfTI files and DICOM series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import choice
from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError, suffix_of
from fairflare.data.geometry import DrawnOn, Fit, Misfit, codes_of, fit, notes_of
from fairflare.data.image_file import MAX_IMAGE_BYTES, Facts, TooLarge, image_file
from fairflare.data.intensity import labels_of as whole_labels
from fairflare.data.kinds import shown
from fairflare.data.orientation import same_turn, turn_of, turned
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.labels import labels_of
from fairflare.data.preparers.layouts import PARTICIPANTS, Case, Tree, listed, pairs, trees_of
from fairflare.data.preparers.listed import (
    Groups,
    attributes_of,
    classes_of,
    groups_by_site,
    patient_of,
    refuse_bad,
    refuse_empty,
    refuse_one_patient,
)
from fairflare.data.preparers.names import file_name
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
    sites_of,
)
from fairflare.data.preparers.tables import Row
from fairflare.data.preparers.writing import Form, Writing, write_pool

GZIP = b"\x1f\x8b"
Plane = Literal["axial", "coronal", "sagittal"]


@dataclass(frozen=True)
class Look:
    """What the headers of a volume and its mask say, and what is in the mask.

    Attributes:
        spacing: mm between rows, columns and slices, as they are listed; None: the file does not say.
        stored: the same as they are in the file, in words.
        way: where the axes of the file point to, such as RAS; ``?``: it does not say.
        values: of the mask.
        slices: those to be listed; None: the volume is listed whole.
        empty: slices that are left out.
        own_plane: slices are in the plane and in the order of the file.
        notes: what is to be said of it.
    """

    spacing: tuple[float, ...] | None
    stored: str
    way: str
    values: tuple[int, ...] = ()
    slices: tuple[int, ...] | None = None
    empty: int = 0
    own_plane: bool = True
    notes: tuple[str, ...] = ()


Judged = tuple[str, Case, Look]  # with the site


def prepare_volumes(
    out_dir: str | Path,
    *,
    source_dir: str | Path | None = None,
    folders: Mapping[str, tuple[str | Path, str | Path]] | None = None,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    slices: Plane | None = None,
    keep_empty: bool = False,
    leave_out: bool = False,
    suffix: str | None = None,
    mask_drawn_on: DrawnOn | None = None,
    group: Groups = None,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Volumes with masks or classes, of one or several sites; the files are copied as they are.

    Every header is opened and every mask is read. A mask lies on its volume, corner by corner to half a voxel,
    whichever way both are stored (:func:`fairflare.data.geometry.fit`). Labels that are not 0, 1, ..., K-1 get these
    numbers in the order of their values, by ``mask_values`` in ``fairflare.json``. Patients are those of the table, of
    ``group``, of BIDS (``sub-``) or of DICOM headers (a hash of the key).

    Args:
        out_dir: folder to write to.
        source_dir: one tree, or a folder with one for each site: see :mod:`fairflare.data.preparers.layouts`.
        folders: instead of it folder of images, and folder of masks or table of classes, by site.
        csv, columns: a table below ``source_dir``: image, mask or label, perhaps site, patient and split.
        attributes: of the people, by their columns of the table or of a BIDS tree's ``participants.tsv``; see
            :func:`fairflare.data.preparers.listed.columns_of`.
        classes: names of the classes in the order of their numbers.
        slices: list slices of this plane instead of whole volumes.
        keep_empty: with ``slices``, also those in which the mask is 0.
        leave_out: go on without what cannot be used, and say it.
        suffix: of the images of a BIDS tree, such as ``T1w``.
        mask_drawn_on: how masks lie on images where only one of both says so, for ``fairflare.json``.
        group: regular expression whose first group is the patient, searched in the path of an image below its folder.
        dealing: how volumes become those of sites; default: by the data's sites.
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source is not as expected, or volumes cannot be used; names all of them.
        ValueError: arguments that do not go together.
    """
    if (source_dir is None) == (not folders):
        raise ValueError("give either --source or --site")
    if csv is not None and source_dir is None:
        raise ValueError("--csv goes with --source; with --site a table takes the place of the folder of masks")
    if slices is None and keep_empty:
        raise ValueError("--keep-empty is of --slices")
    dealing = dealing or Dealing()
    if dealing.edge:
        raise ValueError("--size and --corrupt are of pictures, not of volumes")
    plane = None if slices is None else choice("slices", slices, get_args(Plane))
    if folders:
        trees = {
            name: _of_site(Path(images), Path(labels), columns or {}, attributes, classes)
            for name, (images, labels) in folders.items()
        }
    elif csv is None:
        trees = trees_of(Path(source_dir or ""), suffix, attributes)
    else:
        trees = {"": listed(Path(source_dir or ""), csv, columns or {}, attributes, classes)}
    notes = list(dict.fromkeys(note for tree in trees.values() for note in tree.notes))
    for site, tree in trees.items():
        if not tree.cases and not tree.alone:
            where = f"site '{site}'" if site else f"'{source_dir}'"
            raise DataError("; ".join([f"{where}: no volume that is read was found", *tree.notes]))
    good, bad = _judged(trees, plane, keep_empty, mask_drawn_on)
    if said := refuse_bad(bad, len(good) + len(bad), "volume(s)", leave_out and bool(good), notes):
        notes.append(said)
    refuse_empty(
        {case.site or site for site, tree in trees.items() for case in tree.cases}, {site for site, *_ in good}
    )
    notes += notes_of(note for *_, look in good for note in look.notes)
    labels = [case.label for _, case, _ in good if isinstance(case.label, str)]
    if len(labels) not in (0, len(good)):
        raise DataError("some volumes have masks and some have classes; prepare them one by one")
    if classes and not labels:
        raise ValueError("--classes are those of a table of classes; masks have structures")
    names, numbers = classes_of(labels, classes) if labels else (None, [])
    rows = [case.row or Row() for _, case, _ in good]
    if attributes and not any(rows):
        raise ValueError(f"--attributes are columns of a table (--csv, or {PARTICIPANTS} of BIDS), and there is none")
    declared, people = attributes_of(attributes, rows, "")
    values = {value for *_, look in good for value in look.values}
    called = {value: name for tree in trees.values() for value, name in tree.names.items()}
    task, settings = ({}, {}) if names else labels_of(values, called, notes)
    if plane is not None and not all(look.own_plane for *_, look in good):
        task["orientation"] = plane
    empty, kept = sum(look.empty for *_, look in good), sum(len(look.slices or ()) for *_, look in good)
    if empty:
        notes.append(f"{empty} of {empty + kept} slices have no label and are left out (--keep-empty keeps them)")
    by_site = groups_by_site(group, {site for site, *_ in good})
    seed = writing.get("seed", 0)
    items = []
    for index, ((site, case, look), person) in enumerate(zip(good, people, strict=True)):
        label = numbers[index] if names else case.label
        if look.slices != ():
            items.append(_item(site, case, look, label, by_site[site], seed, person))
    refuse_one_patient(items, group)
    whole = {} if plane else {"kind": "volume_classification" if names else "volume_segmentation"}
    if mask_drawn_on is not None:
        settings["mask_drawn_on"] = mask_drawn_on
    writing["record"] = {**writing.get("record", {}), **whole, "volumes": _in_figures(good)}
    form = Form(names, stratified=names is not None, task=task, attributes=declared, notes=notes)
    return write_pool(items, out_dir, dealing, settings, form, **writing)


def _of_site(
    images: Path, labels: Path, columns: Mapping[str, str], attributes: Mapping[str, str] | None,
    classes: Sequence[str] | None,
) -> Tree:  # fmt: skip
    if labels.is_file():
        return listed(images, labels.absolute(), columns, attributes, classes)
    return pairs(images, labels)


def _item(
    site: str, case: Case, look: Look, label: Any, group: str | None, seed: int, person: Mapping[str, str | float]
) -> Item:
    patient = case.patient or patient_of(case.path, group, site, case.image, seed)
    name = file_name(case.path)
    splits = (case.split,) if case.split else ()
    volume = None if look.slices is None else name
    return Item(
        name, f"{site}/{patient or name}", case.image, label, patient, site, splits, volume, look.spacing,
        slices=look.slices, attributes=person,
    )  # fmt: skip


# --- a look at a volume and its mask ------------------------------------------------------------------------


def _judged(
    trees: Mapping[str, Tree], plane: str | None, keep_empty: bool, drawn_on: DrawnOn | None
) -> tuple[list[Judged], list[tuple[str, str | Misfit]]]:
    """The volumes that can be used, each with its site; name and fault of those that cannot."""
    cases = [(case.site or site, case) for site, tree in trees.items() for case in tree.cases]
    with ThreadPoolExecutor() as threads:
        looks = list(threads.map(lambda entry: _looked_at(entry[1], plane, keep_empty, drawn_on), cases))
    bad: list[tuple[str, str | Misfit]] = [found for tree in trees.values() for found in tree.alone]
    good: list[Judged] = []
    for (site, case), look in zip(cases, looks, strict=True):
        if isinstance(look, Look):
            good.append((site, case, look))
        else:
            bad.append((shown(case.image), look))
    return good, bad


def _looked_at(case: Case, plane: str | None, keep_empty: bool, drawn_on: DrawnOn | None) -> Look | Misfit | str:
    try:
        mask = case.label if isinstance(case.label, Path) else None
        return look_at(case.image, mask, plane, keep_empty, drawn_on)
    except TooLarge as error:
        return f"it or its mask would take {error.size} bytes"
    except Misfit as error:
        return error
    except Exception as error:  # the libraries raise what they like for a damaged file
        names = (path for path in (case.image, case.label) if isinstance(path, Path) and path.is_file())
        return next(filter(None, map(_misnamed, names)), "") or str(error) or type(error).__name__


def _misnamed(path: Path) -> str:
    """That a NIfTI file has the other ending than it should, in words; empty: it has not."""
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
    if packed == (suffix_of(path) == ".nii.gz"):
        return ""
    return f"'{path.name}' is {'' if packed else 'not '}packed: rename it to {'.nii.gz' if packed else '.nii'}"


def look_at(
    image: Path, mask: Path | None, plane: str | None, keep_empty: bool = False, drawn_on: str | None = None
) -> Look:
    """A volume by its header, and its mask.

    Args:
        image: its file or folder.
        mask: None: it has a class.
        plane: of the slices that are listed; None: it is listed whole.
        keep_empty: list slices without a label, too.
        drawn_on: see :func:`fairflare.data.geometry.fit`.

    Raises:
        ValueError: it is no volume, or it and its mask do not go together.
        Exception: what the libraries raise for a damaged file.
    """
    facts = image_file(image).facts()
    if len(facts.shape) != 3:
        raise ValueError(f"it has the shape {facts.shape}, expected rows, columns and slices; save channels as files")
    found, labels = (None, None) if mask is None else labels_on(facts, mask, drawn_on)
    affine = facts.affine if found is None else found.affine
    turn = None if plane is None else turn_of(affine, plane, facts.shape[2])
    spacing = None if affine is None else np.linalg.norm(affine[:3, :3], axis=0).round(4)
    stored = "?" if spacing is None else " x ".join(f"{length:g}" for length in spacing)
    kept, empty = None, 0
    if plane is not None:
        shown = turned(np.broadcast_to(np.True_, facts.shape) if labels is None else labels != 0, turn)
        filled = shown.any(axis=(0, 1)) | (labels is None or keep_empty)
        kept, empty = tuple(np.flatnonzero(filled).tolist()), int((~filled).sum())
        if spacing is not None and turn is not None:
            spacing = spacing[np.argsort(turn[:, 0])]
    return Look(
        None if spacing is None else tuple(spacing.tolist()),
        stored,
        "?" if affine is None else codes_of(affine),
        () if labels is None else tuple(np.unique(labels).tolist()),
        kept,
        empty,
        plane is None or same_turn(turn, turn_of(affine, "canonical", facts.shape[2])),
        (facts.grid.note, "" if found is None else found.note),
    )


def labels_on(image: Facts, mask: Path, drawn_on: str | None) -> tuple[Fit, npt.NDArray[np.int64]]:
    """The labels of a mask along the axes of its image, and how it lies on it.

    Raises:
        Misfit: it does not lie on its image.
        ValueError: its values are not whole numbers.
    """
    file = image_file(mask)
    found = fit(image.grid, file.facts().grid, drawn_on)
    if isinstance(found, Misfit):
        raise Misfit(found.cause, found.place, f"its mask '{mask.name}': {found.value}", found.remedy)
    try:
        values = whole_labels(file.decode(is_mask=True, limit=MAX_IMAGE_BYTES))
    except (TooLarge, Misfit):
        raise
    except ValueError as error:
        raise ValueError(f"its mask '{mask.name}': {error}") from error
    return found, found.bring(values).reshape(image.grid.shape)


# --- what is said of all ------------------------------------------------------------------------------------


def _in_figures(good: Iterable[Judged]) -> dict[str, Any]:
    """By site of the source: number of volumes, and of those of each spacing, orientation and label."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for site, _, look in good:
        own = found.setdefault(site or "site-1", {key: Counter() for key in ("spacing", "orientation", "label")})
        own["spacing"][look.stored] += 1
        own["orientation"][look.way] += 1
        own["label"].update(map(str, look.values))
    return {site: {"volumes": own["orientation"].total(), **own} for site, own in found.items()}


OPTIONS = (
    option(
        "source_dir", str | None, "A tree (Decathlon, BIDS, images/ and masks/), or a folder with one for each site.",
        None, "--source", metavar="SOURCE",
    ),
    option(
        "folders", list[str] | None, "Instead of it; LABELS: a folder of masks, or a table of classes. Repeatable.",
        None, "--site", metavar="NAME IMAGES LABELS", made=sites_of,
    ),
    option("slices", Plane | None, "List slices of this plane, for 2D tasks; default: whole volumes.", None),
    option("keep_empty", bool, "With --slices: also those without a label.", False, "--keep-empty"),
    option("suffix", str | None, "Of the images of a BIDS tree, such as T1w.", None),
    CSV, COLUMNS, ATTRIBUTES, GROUP, CLASSES, LEAVE_OUT, DRAWN_ON,
)  # fmt: skip
TEXT = "NIfTI volumes and DICOM series with masks or classes, whole (3D) or slice by slice (--slices)"
PREPARERS = (Preparer("volumes", TEXT, prepare_volumes, OPTIONS, has_source=False, dealing=Dealing()),)
