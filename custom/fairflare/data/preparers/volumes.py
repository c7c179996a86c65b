"""Volumes of one's own, whole for a MONAI bundle or slice by slice for 2D tasks: NIfTI files and DICOM series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from fairflare.base.checks import choice
from fairflare.base.for_types import Unpack
from fairflare.data.geometry import DrawnOn
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.listed import Groups
from fairflare.data.preparers.looking import look_at_volume
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
)  # fmt: skip
from fairflare.data.preparers.own import write_own
from fairflare.data.preparers.trees import listed, of_site, trees_of
from fairflare.data.preparers.writing import Writing

Plane = Literal["axial", "coronal", "sagittal"]


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
    """Prepare volumes with masks or classes, of one or several sites; the files are copied as they are.

    Every volume and every mask is read. A mask lies on its volume, corner by corner to half a voxel,
    whichever way both are stored (:func:`fairflare.data.geometry.fit`). Labels that are not 0, 1, ..., K-1 get these
    numbers in the order of their values, by ``mask_values`` in ``fairflare.json``. Patients are those of the table, of
    ``group``, of BIDS (``sub-``) or of DICOM headers (a hash of the key).

    Args:
        out_dir: folder to write to.
        source_dir: one tree, or a folder with one for each site: see :mod:`fairflare.data.preparers.trees`.
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
            name: of_site(name, Path(images), Path(labels), columns or {}, attributes, classes)
            for name, (images, labels) in folders.items()
        }
    elif csv is None:
        trees = trees_of(Path(source_dir or ""), suffix, attributes)
    else:
        trees = {"": listed(Path(source_dir or ""), csv, columns or {}, "", attributes, classes)}
    look = partial(look_at_volume, plane=plane, keep_empty=keep_empty, drawn_on=mask_drawn_on)
    return write_own(
        trees, look, out_dir, dealing, writing, "volume", plane, attributes=attributes, classes=classes, group=group,
        leave_out=leave_out, mask_drawn_on=mask_drawn_on,
    )  # fmt: skip


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
PREPARERS = (
    Preparer(
        "volumes", "NIfTI volumes and DICOM series with masks or classes, whole (3D) or slice by slice (--slices)",
        prepare_volumes, OPTIONS, has_source=False, dealing=Dealing(),
    ),
)  # fmt: skip
