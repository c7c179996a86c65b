"""T2-weighted prostate MRI of six sites, as NIfTI volumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import choice
from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError
from fairflare.data.intensity import TOP_PERCENTILE
from fairflare.data.preparers.common import (
    Item,
    Preparer,
    Writing,
    check_pairs,
    existing_folder,
    file_name,
    files_by_ending,
    listing,
    write_sites,
)
from fairflare.data.preparers.options import option
from fairflare.data.preparers.tables import say_counts

PROSTATE_SITES: Mapping[str, tuple[str, ...]] = {  # names of the folders that are in use
    "BIDMC": ("bidmc", "sitee"),
    "BMC": ("bmc", "isbi_1.5", "siteb"),
    "HK": ("hk", "sitef"),
    "I2CVB": ("i2cvb", "sitec"),
    "RUNMC": ("runmc", "isbi", "sitea"),
    "UCL": ("ucl", "sited"),
}
CASES = (12, 30, 12, 19, 30, 13)
SPLIT_UNITS = ("patient", "slice")
WINDOWS, ORDERS = ("volume", "slice"), ("drawn", "file")
FILE_ORDER_SHARE = 0.8
MASK = "_segmentation"


def prepare_prostate_mri(
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    sites: Sequence[str] | None = None,
    split_unit: str = "patient",
    neighbours: bool = False,
    window: str = "volume",
    order: str = "drawn",
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """The six-site prostate set: ``<site>/CaseNN.nii.gz`` with ``<site>/CaseNN_segmentation.nii.gz``.

    Every slice (third axis) with some prostate (mask > 0) becomes an image, clipped to [minimum, 99th
    percentile] of its volume and scaled to 8 bit. Upper and lower case do not matter; folders may also be
    called ``SiteA`` to ``SiteF``, ``ISBI`` (RUNMC) or ``ISBI_1.5`` (BMC).

    Args:
        source_dir: folder with a folder for each site.
        sites: the sites to use; default all six, which must then be there.
        split_unit: ``"patient"``, or ``"slice"`` as in some published figures, where slices of one patient
            may be in training and test at once.
        neighbours: make images of three channels: the slice before, the slice, the slice after.
        window: ``"volume"``: as above; ``"slice"``: as Fed-LWR's authors, each slice clipped at its own 99th percentile
            and divided by its maximum (what is below 0 is black).
        order: ``"drawn"``: cases are drawn for the splits; ``"file"``: as Fed-LWR's authors, the first 80 % of a site's
            cases in the order of their names are for training (the last quarter of these validates: the paper's
            6:2:2), the others for the test.
        out_dir, writing: see :func:`fairflare.data.preparers.common.write_sites`.

    Returns:
        the folder of each site.
    """
    choice("split_unit", split_unit, SPLIT_UNITS)
    choice("window", window, WINDOWS)
    if choice("order", order, ORDERS) == "file" and split_unit != "patient":
        raise ValueError("order='file' is of whole cases; it needs split_unit='patient'")
    source = existing_folder(Path(source_dir))
    wanted = list(PROSTATE_SITES) if sites is None else [choice("site", name, PROSTATE_SITES) for name in sites]
    folders = {path.name.lower(): path for path in sorted(source.iterdir()) if path.is_dir()}
    found = {name: folders[alias] for name in wanted for alias in PROSTATE_SITES[name][::-1] if alias in folders}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(
            f"'{source}': expected a folder for each of {', '.join(wanted)} (or SiteA to SiteF), found "
            f"{listing(path.name for path in folders.values())}; missing: {', '.join(missing)}. "
            "Name the sites that you have with 'sites' (--sites)"
        )
    if sites is None:
        cases = {name: len(_cases(name, folder)) for name, folder in found.items()}
        places = [place for place, name in enumerate(PROSTATE_SITES) for _ in range(cases[name])]
        say_counts(f"cases of {', '.join(PROSTATE_SITES)}", places, CASES)
    how = (split_unit, neighbours, window, order)
    items = {name: _items(name, folder, *how) for name, folder in found.items()}
    return write_sites(items, out_dir, **writing)


def _items(site: str, folder: Path, split_unit: str, neighbours: bool, window: str, order: str) -> Iterator[Item]:
    cases = _cases(site, folder)
    trained = int(FILE_ORDER_SHARE * len(cases))
    validated = max(1, round(trained / 4))
    for place, (stem, (image, mask)) in enumerate(cases.items()):
        split = "training" if place < trained - validated else "validation" if place < trained else "test"
        volume, inside, spacing = _volumes(site, image, mask)
        low, scale = _window(volume, window)
        pictures = np.round(np.clip((volume - low) * scale, 0, 255)).astype(np.uint8).transpose(2, 1, 0)
        last = len(pictures) - 1
        for index in np.flatnonzero(inside.any(axis=(0, 1))).tolist():
            around = (max(index - 1, 0), index, min(index + 1, last))
            picture = np.stack([pictures[k] for k in around], axis=-1) if neighbours else pictures[index]
            name = f"{file_name(stem)}_{index:03d}"
            by_patient = split_unit == "patient"
            yield Item(
                name, stem if by_patient else name, picture, inside[:, :, index].T.astype(np.uint8),
                patient=stem if by_patient else None, splits=(split,) if order == "file" else (), volume=stem,
                spacing=spacing,
            )  # fmt: skip


def _window(volume: npt.NDArray[np.float32], window: str) -> tuple[float, float | npt.NDArray[np.float32]]:
    """What becomes 0, and the factor that makes the 99th percentile of the volume, or of each slice, 255."""
    if window == "volume":
        low, high = float(volume.min()), float(np.percentile(volume, TOP_PERCENTILE))
        return low, 255.0 / (high - low) if high > low else 0.0
    top = np.percentile(volume, TOP_PERCENTILE, (0, 1), keepdims=True).astype(np.float32)
    return 0.0, np.divide(255.0, top, out=np.zeros_like(top), where=top > 0)


def _cases(site: str, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Volume and segmentation of each case."""
    files = {name.lower(): path for name, path in files_by_ending(folder, (".nii.gz", ".nii"))}
    masks = {stem[: -len(MASK)]: path for stem, path in files.items() if stem.endswith(MASK)}
    cases = {stem: path for stem, path in files.items() if not stem.endswith(MASK)}
    check_pairs(site, folder, cases, masks, f"CaseNN.nii.gz in '{folder}', each with CaseNN_segmentation.nii.gz")
    return {stem: (cases[stem], masks[stem]) for stem in sorted(cases)}


def _volumes(
    site: str, image: Path, mask: Path
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], tuple[float, ...]]:
    """Intensities and prostate (columns, rows, slices), and the spacing of rows, columns and slices in mm.

    The prostate is somewhere.
    """
    import nibabel

    try:
        opened = nibabel.load(image)
        volume = np.asarray(opened.dataobj, np.float32)
        zooms = [round(float(zoom), 4) for zoom in opened.header.get_zooms()[:3]]
        inside = np.asarray(nibabel.load(mask).dataobj) > 0
    except Exception as error:  # nibabel raises what it likes for a damaged file
        raise DataError(
            f"site '{site}': '{image}' or its segmentation cannot be read: {error}; fetch the file again"
        ) from error
    if volume.ndim != 3 or volume.shape != inside.shape:
        raise DataError(
            f"site '{site}': '{image}' has the shape {volume.shape} and its segmentation "
            f"{inside.shape}; both must be the same three-dimensional volume"
        )
    if not np.isfinite(volume).all():
        raise DataError(f"site '{site}': '{image}' has values that are NaN or infinite; repair the file")
    if not inside.any():
        raise DataError(f"site '{site}': '{mask}' has no prostate in it; repair or remove the case")
    return volume, inside, (zooms[1], zooms[0], zooms[2])


OPTIONS = (
    option("sites", list[str] | None, f"Default: {' '.join(PROSTATE_SITES)}.", None, metavar="SITE"),
    option("split_unit", Literal[SPLIT_UNITS], "What stays together.", "patient"),
    option("neighbours", bool, "Three neighbouring slices as channels.", False, "--neighbours"),
    option("window", Literal[WINDOWS], "Of what the 99th percentile is.", "volume"),
    option("order", Literal[ORDERS], "Of the cases: drawn, or as the files.", "drawn"),
)
PREPARERS = (Preparer("prostate-mri", "T2 prostate MRI, six sites", prepare_prostate_mri, OPTIONS),)
