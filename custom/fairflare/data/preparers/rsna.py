"""RSNA's intracranial haemorrhage (2019): slices of head CT with one of five kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fairflare.base.checks import choice, number, whole
from fairflare.base.for_types import Unpack
from fairflare.data.corruptions import image_seed
from fairflare.data.datalist import PICTURES, DataError
from fairflare.data.partitions import apportion
from fairflare.data.preparers.common import Dealing, Item, Preparer, Writing, file_name, write_pool
from fairflare.data.preparers.items import Picture, Pixels
from fairflare.data.preparers.listed import person_in_header
from fairflare.data.preparers.options import option
from fairflare.data.preparers.skin import FEDISM
from fairflare.data.preparers.tables import Images, Row, find_folder, find_table, read_table

KINDS = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
ANY = "any"
IMAGES = 25_000
WINDOW = (40.0, 80.0)  # centre and width in Hounsfield units: brain
SPLIT_UNITS = ("patient", "image")


@dataclass(frozen=True)
class Windowed(Picture):
    """A DICOM slice through a window, 8 bits.

    Attributes:
        path: of the file.
        centre, width: in the units that the file's rescaling gives (Hounsfield).
    """

    path: Path
    centre: float
    width: float

    def read(self) -> Pixels:
        import pydicom
        from pydicom.pixels import apply_modality_lut

        try:
            slice_ = pydicom.dcmread(self.path)
            values = np.asarray(apply_modality_lut(slice_.pixel_array, slice_), np.float32)
        except Exception as error:  # pydicom raises what it likes for a damaged file
            raise DataError(f"'{self.path}' cannot be read: {error}; fetch the file again, or leave it out") from error
        if values.ndim != 2:
            raise DataError(f"'{self.path}' has the shape {values.shape}; expected one slice")
        scaled = np.clip((values - (self.centre - self.width / 2)) / self.width, 0, 1)
        if getattr(slice_, "PhotometricInterpretation", "") == "MONOCHROME1":  # high values are dark
            scaled = 1 - scaled
        return np.round(scaled * 255).astype(np.uint8)


def prepare_rsna(
    source_dir: str | Path, out_dir: str | Path, *, images: int | None = IMAGES, window: Sequence[float] = WINDOW,
    split_unit: str = "patient", dealing: Dealing = FEDISM, **writing: Unpack[Writing],
) -> dict[str, Path]:  # fmt: skip
    """Slices with exactly one kind of haemorrhage, a seeded selection. Default: FedISM's twenty sites in two pools.

    Args:
        source_dir: with ``stage_2_train/ID_*.dcm`` (or pictures of these names) and ``stage_2_train.csv``: rows
            ``ID_<slice>_<kind>,0 or 1``, six for each slice.
        out_dir, dealing, writing: see :func:`fairflare.data.preparers.pictures.prepare_images`.
        images: so many, the kinds in their shares; None: all.
        window: centre and width in Hounsfield units; of DICOM files.
        split_unit: ``"patient"``: slices of one stay together (DICOM files say whose they are, pictures do not; a hash
            of it is the datalist's key); ``"image"``: as FedISM.
    """
    choice("split_unit", split_unit, SPLIT_UNITS)
    centre, width = number("centre of the window", window[0]), number("width of the window", window[1], above=0)
    source = Path(source_dir)
    table = find_table(source, ["stage_2_train.csv"])
    labels = one_kind(table, read_table(table, ["ID", "Label"]))
    seed = writing.get("seed", 0)
    chosen = labels if images is None else selected(labels, whole("images", images), seed)
    folder = find_folder(source, ["stage_2_train"])
    paths = Images(folder, (".dcm", *PICTURES)).all(list(chosen), table)
    dicom = [path.suffix.lower() == ".dcm" for path in paths]
    people = _people(paths, seed) if split_unit == "patient" and all(dicom) else [None] * len(paths)
    items = [
        Item(file_name(name), person or name, Windowed(path, centre, width) if is_dicom else path, label, person)
        for (name, label), path, person, is_dicom in zip(chosen.items(), paths, people, dicom, strict=True)
    ]
    keys = "DICOM files say whose a slice is, pictures do not; with --split-unit image nobody is asked"
    return write_pool(items, out_dir, dealing, class_names=KINDS, keys=keys, **writing)


def one_kind(table: Path, rows: Sequence[Row]) -> dict[str, int]:
    """The kind of each slice that has exactly one; rows that occur twice must agree.

    Raises:
        DataError: a row that is none of these, or two that contradict each other.
    """
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        name, _, kind = row["ID"].rpartition("_")
        if not name or kind not in (*KINDS, ANY) or row["Label"] not in ("0", "1"):
            raise DataError(f"{row.where}: expected ID_<slice>_<kind>,0 or 1, got {row['ID']},{row['Label']}")
        if found.setdefault(name, {}).setdefault(kind, row["Label"]) != row["Label"]:
            raise DataError(f"{row.where}: {row['ID']} is both 0 and 1")
    chosen = {}
    for name in sorted(found):
        kinds = [number for number, kind in enumerate(KINDS) if found[name].get(kind) == "1"]
        if len(kinds) == 1:
            chosen[name] = kinds[0]
    if not chosen:
        raise DataError(f"'{table}': no slice has exactly one kind of haemorrhage")
    return chosen


def selected(labels: Mapping[str, int], count: int, seed: int) -> dict[str, int]:
    """So many of them, the classes in their shares; all where there are fewer."""
    if count >= len(labels):
        return dict(labels)
    members = [[name for name, label in labels.items() if label == kind] for kind in range(len(KINDS))]
    shares = apportion([len(names) for names in members], count)
    rng = np.random.default_rng(image_seed("selection", seed))
    chosen = {names[i] for names, n in zip(members, shares, strict=True) for i in rng.permutation(len(names))[:n]}
    return {name: label for name, label in labels.items() if name in chosen}


def _people(paths: Sequence[Path], seed: int) -> list[str | None]:
    """A key of the patient of each slice: the start of a hash."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda path: person_in_header(path, seed), paths))


OPTIONS = (
    option("images", int, "So many.", IMAGES),
    option("window", tuple[float, float], "Centre and width; of DICOM.", WINDOW),
    option("split_unit", Literal[SPLIT_UNITS], "What stays together.", "patient"),
)
TEXT = "intracranial haemorrhage on CT, five kinds"
PREPARERS = (Preparer("rsna", TEXT, prepare_rsna, OPTIONS, dealing=FEDISM),)
