"""Volumes of one's own, whole for a MONAI bundle or slice by slice for 2D tasks: NIfTI files and DICOM series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import choice
from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError
from fairflare.data.dicom_files import files_of_series
from fairflare.data.image_file import MAX_IMAGE_BYTES, Facts, TooLarge, image_file
from fairflare.data.intensity import labels_of
from fairflare.data.orientation import same_turn, turn_of, turned
from fairflare.data.preparers.common import Dealing, Item, Preparer, Writing, file_name, listing, write_pool
from fairflare.data.preparers.layouts import Case, Tree, listed, pairs, trees_of
from fairflare.data.preparers.listed import Groups, class_names, groups_by_site, patient_of, person_in_header
from fairflare.data.preparers.options import COLUMNS, CSV, GROUP, option
from fairflare.data.preparers.pictures import CLASSES, sites_of
from fairflare.data.reading import HALF

Plane = Literal["axial", "coronal", "sagittal"]
MOST_LABELS = 256


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
    """

    spacing: tuple[float, ...] | None
    stored: str
    way: str
    values: tuple[int, ...] = ()
    slices: tuple[int, ...] | None = None
    empty: int = 0
    own_plane: bool = True


Judged = tuple[str, Case, Look]  # with the site


def prepare_volumes(
    out_dir: str | Path,
    *,
    source_dir: str | Path | None = None,
    folders: Mapping[str, tuple[str | Path, str | Path]] | None = None,
    csv: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    slices: Plane | None = None,
    keep_empty: bool = False,
    leave_out: bool = False,
    suffix: str | None = None,
    group: Groups = None,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Volumes with masks or classes, of one or several sites; the files are copied as they are.

    Every header is opened and every mask is read. A volume and its mask have one shape, and lie in one place (corner by
    corner, to half a voxel). Labels that are not 0, 1, ..., K-1 get these numbers in the order of their values, by
    ``mask_values`` in ``fairflare.json``. Patients are those of the table, of ``group``, of BIDS (``sub-``) or of DICOM
    headers (a hash of the key).

    Args:
        out_dir: folder to write to.
        source_dir: one tree, or a folder with one for each site: see :mod:`fairflare.data.preparers.layouts`.
        folders: instead of it folder of images, and folder of masks or table of classes, by site.
        csv, columns: a table below ``source_dir``: image, mask or label, perhaps site, patient and split.
        classes: names of the classes in the order of their numbers.
        slices: list slices of this plane instead of whole volumes.
        keep_empty: with ``slices``, also those in which the mask is 0.
        leave_out: go on without what cannot be used, and say it.
        suffix: of the images of a BIDS tree, such as ``T1w``.
        group: regular expression whose first group is the patient, searched in the path of an image below its folder.
        dealing: how volumes become those of sites; default: by the data's sites.
        writing: see :func:`fairflare.data.preparers.common.write_sites`.

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
            name: _of_site(Path(images), Path(labels), columns or {}) for name, (images, labels) in folders.items()
        }
    elif csv is None:
        trees = trees_of(Path(source_dir or ""), suffix)
    else:
        trees = {"": listed(Path(source_dir or ""), csv, columns or {})}
    notes = [note for tree in trees.values() for note in tree.notes]
    good, bad = _judged(trees, plane, keep_empty)
    if (bad and not leave_out) or not good:
        raise DataError(
            f"{len(bad)} volume(s) cannot be used; repair them, or go on without them (--leave-out): {listing(bad)}"
        )
    if bad:
        notes.append(f"{len(bad)} volume(s) are left out: {listing(bad)}")
    labels = [case.label for _, case, _ in good if isinstance(case.label, str)]
    if len(labels) not in (0, len(good)):
        raise DataError("some volumes have masks and some have classes; prepare them one by one")
    names = class_names(labels, classes) if labels else None
    values = {value for *_, look in good for value in look.values}
    task, settings = ({}, {}) if names else _labels(values, trees.values(), notes)
    if plane is not None and not all(look.own_plane for *_, look in good):
        task["orientation"] = plane
    empty, kept = sum(look.empty for *_, look in good), sum(len(look.slices or ()) for *_, look in good)
    if empty:
        notes.append(f"{empty} of {empty + kept} slices have no label and are left out (--keep-empty keeps them)")
    by_site = groups_by_site(group, {site for site, *_ in good})
    seed = writing.get("seed", 0)
    items = [_item(site, case, look, names, by_site[site], seed) for site, case, look in good if look.slices != ()]
    whole = {} if plane else {"kind": "volume_classification" if names else "volume_segmentation"}
    writing["record"] = {**writing.get("record", {}), **whole, "volumes": _in_figures(good)}
    return write_pool(
        items, out_dir, dealing, class_names=names, settings=settings, stratified=names is not None, task=task,
        notes=notes, **writing,
    )  # fmt: skip


def _of_site(images: Path, labels: Path, columns: Mapping[str, str]) -> Tree:
    return listed(images, labels.absolute(), columns) if labels.is_file() else pairs(images, labels)


def _item(site: str, case: Case, look: Look, names: list[str] | None, group: str | None, seed: int) -> Item:
    patient = case.patient or patient_of(case.path, group, site, case.image)
    if patient is None and case.image.is_dir():
        patient = person_in_header(files_of_series(case.image)[0], seed)
    name = file_name(case.path)
    label = case.label if isinstance(case.label, Path) else (names or []).index(case.label)
    splits = (case.split,) if case.split else ()
    volume = None if look.slices is None else name
    return Item(
        name, f"{site}/{patient or name}", case.image, label, patient, site, splits, volume, look.spacing,
        slices=look.slices,
    )  # fmt: skip


# --- a look at a volume and its mask ------------------------------------------------------------------------


def _judged(trees: Mapping[str, Tree], plane: str | None, keep_empty: bool) -> tuple[list[Judged], list[str]]:
    """The volumes that can be used, each with its site, and those that cannot, in words."""
    found = [(case.site or site, case) for site, tree in trees.items() for case in tree.cases]
    with ThreadPoolExecutor() as threads:
        looks = list(threads.map(lambda entry: _looked_at(entry[1], plane, keep_empty), found))
    bad = [(site, words) for site, tree in trees.items() for words in tree.alone]
    good: list[Judged] = []
    for (site, case), look in zip(found, looks, strict=True):
        if isinstance(look, Look):
            good.append((site, case, look))
        else:
            bad.append((site, f"'{case.image}': {look}"))
    return good, [f"site '{site}': {words}" if site else words for site, words in bad]


def _looked_at(case: Case, plane: str | None, keep_empty: bool) -> Look | str:
    try:
        return look_at(case.image, case.label if isinstance(case.label, Path) else None, plane, keep_empty)
    except TooLarge as error:
        return f"it or its mask would take {error.size} bytes"
    except Exception as error:  # the libraries raise what they like for a damaged file
        return str(error) or type(error).__name__


def look_at(image: Path, mask: Path | None, plane: str | None, keep_empty: bool = False) -> Look:
    """A volume by its header, and its mask.

    Args:
        image: its file or folder.
        mask: None: it has a class.
        plane: of the slices that are listed; None: it is listed whole.
        keep_empty: list slices without a label, too.

    Raises:
        ValueError: it is no volume, or it and its mask do not go together.
        Exception: what the libraries raise for a damaged file.
    """
    facts = image_file(image).look()
    if len(facts.shape) != 3:
        raise ValueError(f"it has the shape {facts.shape}, expected rows, columns and slices; save channels as files")
    turn = None if plane is None else turn_of(facts.affine, plane, facts.shape[2])
    labels = None if mask is None else mask_of_volume(facts, mask)
    spacing = None if facts.affine is None else np.linalg.norm(facts.affine[:3, :3], axis=0).round(4)
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
        _way(facts),
        () if labels is None else tuple(np.unique(labels).tolist()),
        kept,
        empty,
        plane is None or same_turn(turn, turn_of(facts.affine, "canonical", facts.shape[2])),
    )


def mask_of_volume(image: Facts, mask: Path) -> npt.NDArray[np.int64]:
    """The labels of a mask that lies where its image lies.

    Raises:
        ValueError: it has another shape, lies elsewhere, or its values are not whole numbers.
    """
    told = image_file(mask).look()
    if told.shape != image.shape:
        raise ValueError(f"it has the shape {image.shape}, its mask {told.shape} (rows, columns, slices)")
    if (told.affine is None) != (image.affine is None):
        raise ValueError("of it and its mask only one says how it lies in the body; correct the other's header")
    if told.affine is not None and image.affine is not None:
        corners = np.array([[*corner, 1] for corner in product(*((0, length - 1) for length in image.shape))])
        apart = float(np.linalg.norm((corners @ (told.affine - image.affine).T)[:, :3], axis=1).max())
        if apart > HALF * np.linalg.norm(image.affine[:3, :3], axis=0).min():
            raise ValueError(f"its mask lies elsewhere, by up to {apart:.3g} mm; bring it to the image's grid")
    try:
        return labels_of(image_file(mask).decode(is_mask=True, limit=MAX_IMAGE_BYTES))
    except TooLarge:
        raise
    except ValueError as error:
        raise ValueError(f"its mask '{mask.name}': {error}") from error


def _way(facts: Facts) -> str:
    from nibabel.orientations import aff2axcodes

    return "?" if facts.affine is None else "".join(aff2axcodes(facts.affine[:, [1, 0, 2, 3]]))


# --- what is said of all ------------------------------------------------------------------------------------


def _labels(
    values: set[int], trees: Iterable[Tree], notes: list[str]
) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Settings of the task, and what ``fairflare.json`` says of every site.

    Args:
        values: of all masks.
        trees: with the names of labels.
        notes: gets what is said of the labels.

    Raises:
        DataError: they are too many, or there is no label but 0.
    """
    called = {value: name for tree in trees for value, name in tree.names.items()}
    known = [0, *sorted((values | set(called)) - {0})]
    if not values - {0} or len(known) > MOST_LABELS:
        raise DataError(f"the masks have {len(known)} values, such as {known[:5]}; expected 0 and a few labels")
    number = len(known) - 1
    task: dict[str, Any] = {} if number == 1 else {"num_classes": number}
    if number > 1 and all(value in called for value in known[1:]):
        task["class_names"] = [called[value] for value in known[1:]]
    if known == list(range(len(known))):
        return task, {}
    notes.append(
        f"the labels {', '.join(map(str, known))} are read as {', '.join(map(str, range(len(known))))} (mask_values in "
        "fairflare.json)"
    )
    return task, {"mask_values": {str(value): label for label, value in enumerate(known)}}


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
    option("leave_out", bool, "Go on without volumes that cannot be used.", False, "--leave-out"),
    option("suffix", str | None, "Of the images of a BIDS tree, such as T1w.", None),
    CSV, COLUMNS, GROUP, CLASSES,
)  # fmt: skip
TEXT = "NIfTI volumes and DICOM series with masks or classes, whole (3D) or slice by slice (--slices)"
PREPARERS = (Preparer("volumes", TEXT, prepare_volumes, OPTIONS, has_source=False, dealing=Dealing()),)
