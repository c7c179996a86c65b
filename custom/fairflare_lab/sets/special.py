"""Read published data sets that no layout fits: prostate volumes, haemorrhage on CT, skin tones, cells by type."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import choice, number, refuse, whole
from fairflare.base.own_errors import reading_as
from fairflare.data.corruptions import image_seed
from fairflare.data.datalist import PICTURES, DataError, Sample
from fairflare.data.image_file import Dicom, load_readers
from fairflare.data.intensity import TOP_PERCENTILE
from fairflare.data.partitions import apportion, iid_partition
from fairflare.data.preparers.items import Item, Pixels
from fairflare.data.preparers.listed import person_in_header
from fairflare.data.preparers.names import file_name, listing
from fairflare.data.preparers.splitting import group_labels
from fairflare.data.preparers.tables import Images, read_table
from fairflare.data.reading import Reading, read_image
from fairflare_lab.sets.layouts import all_pairs, compare_counts, find, site_folders

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------- prostate MRI

PROSTATE_SITES: Mapping[str, tuple[str, ...]] = {  # folder names of each site that are in use
    "BIDMC": ("bidmc", "SiteE"), "BMC": ("bmc", "ISBI_1.5", "SiteB"), "HK": ("hk", "SiteF"),
    "I2CVB": ("i2cvb", "SiteC"), "RUNMC": ("runmc", "ISBI", "SiteA"), "UCL": ("ucl", "SiteD"),
}  # fmt: skip
CASES = {"BIDMC": 12, "BMC": 30, "HK": 12, "I2CVB": 19, "RUNMC": 30, "UCL": 13}  # published number of cases by site
PROSTATE_UNITS = ("patient", "slice")
WINDOWS, ORDERS = ("volume", "slice"), ("drawn", "file")
FILE_ORDER_SHARE = 0.8  # share of a site's cases for training and validation, with ``order="file"``


def prostate(
    source: Path, seed: int, folds: bool, *, sites: Sequence[str] | None, split_unit: str, neighbours: bool,
    window: str, order: str,
) -> dict[str, Iterator[Item]]:  # fmt: skip
    """Return the slices with some prostate (mask > 0) of each site of the six-site prostate MRI set.

    The files are ``CaseNN.nii.gz`` and ``CaseNN_segmentation.nii.gz``. A slice is clipped to [minimum, 99th percentile]
    of its volume and scaled to 8 bits.

    Args:
        source: folder with a folder for each site.
        seed, folds: not used.
        sites: names of the sites to use; default all six, which must then exist.
        split_unit: ``"patient"``, or ``"slice"`` as in some published figures, where slices of one patient
            may be in training and test at once.
        neighbours: whether images have three channels: the slice before, the slice itself and the slice after.
        window: ``"volume"``: as above; ``"slice"``: as Fed-LWR's authors, each slice is clipped at its own 99th
            percentile and divided by its maximum (values below 0 are black).
        order: ``"drawn"``: cases are drawn for the splits; ``"file"``: as Fed-LWR's authors, the first 80 % of a site's
            cases in the order of their names are for training (their last quarter for validation: the paper's 6:2:2),
            the remaining cases for the test.
    """
    choice("split_unit", split_unit, PROSTATE_UNITS)
    choice("window", window, WINDOWS)
    refuse({
        "order='file' is of whole cases; it needs split_unit='patient'":
            choice("order", order, ORDERS) == "file" and split_unit != "patient",
    })  # fmt: skip
    wanted = PROSTATE_SITES if sites is None else {s: PROSTATE_SITES[choice("site", s, PROSTATE_SITES)] for s in sites}
    folders = site_folders(source, wanted, ". Name the sites that you have with 'sites' (--sites)")
    cases = {site: all_pairs(site, folder, folder) for site, folder in folders.items()}
    if sites is None:
        items = [replace(case, site=site) for site, cases_of_site in cases.items() for case in cases_of_site]
        compare_counts(items, title=f"cases of {', '.join(CASES)}", counts=CASES, of=lambda case: case.site)
    return {
        site: _slices(site, pairs, split_unit == "patient", neighbours, window == "volume", order == "file")
        for site, pairs in cases.items()
    }


def _slices(
    site: str, pairs: Sequence[Item], by_patient: bool, neighbours: bool, of_volume: bool, in_order: bool
) -> Iterator[Item]:
    trained = int(FILE_ORDER_SHARE * len(pairs))
    validated = max(1, round(trained / 4))
    cases = {case.name.lower(): case for case in pairs}
    for place, stem in enumerate(sorted(cases)):
        split = "training" if place < trained - validated else "validation" if place < trained else "test"
        volume, inside, spacing = _volumes(site, cases[stem])
        low, scale = _window(volume, of_volume)
        pictures = np.round(np.clip((volume - low) * scale, 0, 255)).astype(np.uint8).transpose(2, 1, 0)
        for index in np.flatnonzero(inside.any(axis=(0, 1))).tolist():
            around = pictures[[max(index - 1, 0), index, min(index + 1, len(pictures) - 1)]]
            picture = np.moveaxis(around, 0, -1) if neighbours else pictures[index]
            name = f"{file_name(stem)}_{index:03d}"
            yield Item(
                name, stem if by_patient else name, picture, inside[:, :, index].T.astype(np.uint8),
                patient=stem if by_patient else None, splits=(split,) if in_order else (), volume=stem, spacing=spacing,
            )  # fmt: skip


def _window(volume: npt.NDArray[np.float32], of_volume: bool) -> tuple[float, float | npt.NDArray[np.float32]]:
    """Return the value that becomes 0, and the factor that maps the 99th percentile of the volume or slice to 255."""
    if of_volume:
        low, high = float(volume.min()), float(np.percentile(volume, TOP_PERCENTILE))
        return low, 255.0 / (high - low) if high > low else 0.0
    top = np.percentile(volume, TOP_PERCENTILE, (0, 1), keepdims=True).astype(np.float32)
    return 0.0, np.divide(255.0, top, out=np.zeros_like(top), where=top > 0)


def _volumes(site: str, case: Item) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], tuple[float, ...]]:
    """Return intensities and prostate (columns, rows, slices), and the spacing of rows, columns and slices in mm."""
    import nibabel

    where = f"site '{site}': '{case.image}'"
    try:
        with reading_as("NIfTI file"):
            opened = nibabel.load(case.image)
            volume = np.asarray(opened.dataobj, np.float32)
            zooms = [round(float(zoom), 4) for zoom in opened.header.get_zooms()[:3]]
            inside = np.asarray(nibabel.load(case.mask).dataobj) > 0
    except ValueError as error:
        raise DataError(f"{where} or its segmentation cannot be read: {error}; fetch the file again") from error
    refuse({
        f"{where} has the shape {volume.shape} and its segmentation {inside.shape}; both must be the same "
        "three-dimensional volume": volume.ndim != 3 or volume.shape != inside.shape,
        f"{where} has values that are NaN or infinite; repair the file": not np.isfinite(volume).all(),
        f"site '{site}': '{case.mask}' has no prostate in it; repair or remove the case": not inside.any(),
    }, DataError)  # fmt: skip
    return volume, inside, (zooms[1], zooms[0], zooms[2])


# -------------------------------------------------------------------------------------------------- skin tones


def split_by_tone(
    layout: Callable[[Path], Sequence[Item]], source: Path, seed: int, folds: bool, *, tones: str | Path,
    sites_per_tone: int,
) -> list[Item]:  # fmt: skip
    """Return the images whose skin tone a table gives, dealt to sites of one tone each (Fed-MAS).

    Args:
        layout: function that returns all images.
        source: folder with the files.
        seed: random seed of the dealing.
        folds: not used.
        tones: CSV file with image and skin_tone (light or dark), below the source folder or an absolute path; not part
            of the data set. Images that the file does not name are left out.
        sites_per_tone: number of sites to which the images of each tone are dealt.
    """
    import pandas

    tone_of = {Path(row["image"]).stem: row["skin_tone"].lower() for row in read_table(source / tones, TONE_COLUMNS)}
    if strange := sorted(set(tone_of.values()) - set(TONES)):
        raise DataError(f"'{source / tones}': the skin tones are {listing(strange)}; expected {', '.join(TONES)}")
    items = [item for item in layout(source) if item.name in tone_of]
    counts = pandas.crosstab([item.group for item in items], [tone_of[item.name] for item in items])
    if torn := int(((counts > 0).sum(axis=1) > 1).sum()):
        log.warning("%d lesions have images of both tones; each counts as the tone of most of its images", torn)
    tone_by_lesion = counts.idxmax(axis=1).to_dict()  # on a tie, a lesion gets the alphabetically first tone
    chosen = []
    for tone in TONES:
        of_tone = [item for item in items if tone_by_lesion[item.group] == tone]
        refuse({f"'{source / tones}': no image of the data set is {tone}": not of_tone}, DataError)
        groups, labels = group_labels(of_tone)
        place = {
            groups[i]: site
            for site, part in enumerate(iid_partition(labels, sites_per_tone, seed=seed), 1)
            for i in part.tolist()
        }
        chosen += [replace(item, site=f"{tone}-{place[item.group]}", attribute=tone) for item in of_tone]
    return chosen


TONES, TONE_COLUMNS = ("light", "dark"), ("image", "skin_tone")

# ------------------------------------------------------------------------------------------ haemorrhage on CT

KINDS = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
ANY = "any"  # name in the table for a haemorrhage of any kind
BRAIN = (40.0, 80.0)  # centre and width of the window in Hounsfield units
RSNA_UNITS = ("patient", "image")


def apply_window(path: Path, centre: float, width: float) -> Pixels:
    """Return a DICOM slice through a window as 8 bits.

    Args:
        path: path of the file.
        centre, width: centre and width of the window in the file's rescaled units (Hounsfield).

    Raises:
        DataError: the file cannot be read.
    """
    how = Reading(orientation="stored", intensity="window", window=(centre, width))
    return np.round(read_image(Sample(path, 0), site="source", split="none", how=how)[:, :, 0] * 255).astype(np.uint8)


def rsna(
    source: Path, seed: int, folds: bool, *, images: int | None, window: Sequence[float], split_unit: str
) -> list[Item]:
    """Return a seeded selection of the CT slices of the RSNA set with exactly one kind of haemorrhage.

    Args:
        source: folder with ``stage_2_train/ID_*.dcm`` (or pictures of these names) and ``stage_2_train.csv``: rows
            ``ID_<slice>_<kind>,0 or 1``, six for each slice.
        seed: random seed of the selection and of the hashes of patients.
        folds: not used.
        images: number of slices to select, the kinds in their shares; None for all.
        window: centre and width of the window in Hounsfield units, for DICOM files.
        split_unit: ``"patient"``: slices of one patient stay together (only DICOM files name the patient; the datalist
            has a hash of the name); ``"image"``: each slice by itself, as in FedISM.
    """
    choice("split_unit", split_unit, RSNA_UNITS)
    centre, width = number("centre of the window", window[0]), number("width of the window", window[1], above=0)
    table = find(source, ["stage_2_train.csv"])
    chosen = _one_kind(table)
    if images is not None and whole("images", images) < len(chosen):
        members = [[name for name, label in chosen.items() if label == kind] for kind in range(len(KINDS))]
        shares = apportion([len(names) for names in members], images)  # the kinds keep their shares in the selection
        rng = np.random.default_rng(image_seed("selection", seed))
        patients = {names[i] for names, n in zip(members, shares, strict=True) for i in rng.permutation(len(names))[:n]}
        chosen = {name: label for name, label in chosen.items() if name in patients}
    paths = Images(find(source, ["stage_2_train"], "the folder "), (".dcm", *PICTURES)).all(list(chosen), table)
    dicom = [path.suffix.lower() == ".dcm" for path in paths]
    people: list[str | None] = [None] * len(paths)
    if split_unit == "patient" and all(dicom):
        load_readers(Dicom)
        with ThreadPoolExecutor() as threads:
            people = list(threads.map(lambda path: person_in_header(path, seed), paths))
    return [
        Item(
            file_name(name),
            person or name,
            partial(apply_window, path, centre, width) if is_dicom else path,
            label,
            person,
        )
        for (name, label), path, person, is_dicom in zip(chosen.items(), paths, people, dicom, strict=True)
    ]


def _one_kind(table: Path) -> dict[str, int]:
    """Return the kind of haemorrhage of each slice that has exactly one kind; repeated rows of the table must agree.

    Raises:
        DataError: a row does not have the expected form, or two rows contradict each other.
    """
    by_name: dict[str, dict[str, str]] = {}
    for row in read_table(table, ["ID", "Label"]):
        name, _, kind = row["ID"].rpartition("_")
        if not name or kind not in (*KINDS, ANY) or row["Label"] not in ("0", "1"):
            raise DataError(f"{row.where}: expected ID_<slice>_<kind>,0 or 1, got {row['ID']},{row['Label']}")
        if by_name.setdefault(name, {}).setdefault(kind, row["Label"]) != row["Label"]:
            raise DataError(f"{row.where}: {row['ID']} is both 0 and 1")
    kinds = {name: [k for k, kind in enumerate(KINDS) if by_name[name].get(kind) == "1"] for name in sorted(by_name)}
    chosen = {name: labels[0] for name, labels in kinds.items() if len(labels) == 1}
    refuse({f"'{table}': no slice has exactly one kind of haemorrhage": not chosen}, DataError)
    return chosen


# ----------------------------------------------------------------------------------------------- cells by type


def cell_types(where: str, arrays: Mapping[str, Any]) -> Iterator[Item]:
    """Yield white blood cells with their type as class; cells of the unknown type -1 are left out."""
    for image, label, name in zip(arrays["images"], arrays["labels"].tolist(), map(str, arrays["ids"]), strict=True):
        if label != -1:
            yield Item(file_name(name), name, image, int(label))


def red_cells(where: str, arrays: Mapping[str, Any]) -> Iterator[Item]:
    """Yield red blood cells with their type as class; the sites are blocks of consecutive smears of one hospital.

    Cells of one smear stay together, since neighbouring crops overlap.
    """
    for i in np.argsort(arrays["site"], kind="stable").tolist():
        smear, label = f"s{arrays['image_no'][i]:04d}", int(arrays["labels"][i])
        yield Item(f"{smear}_{i:05d}", smear, arrays["images"][i], label, site=f"block-{arrays['site'][i]}")
