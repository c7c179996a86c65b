"""Prepare a user's own NIfTI and DICOM volumes, whole for a MONAI bundle or slice by slice for 2D tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from fairflare.base.checks import choice, first_of
from fairflare.base.for_types import Unpack
from fairflare.data.geometry import DrawnOn
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.listed import Groups
from fairflare.data.preparers.looking import look_at_volume
from fairflare.data.preparers.options import Plane, of_function
from fairflare.data.preparers.own import write_own
from fairflare.data.preparers.trees import add_unlabelled, listed, of_site, trees_of
from fairflare.data.preparers.writing import Writing


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
    unlabelled: Sequence[str] | None = None,
    suffix: str | Sequence[str] | None = None,
    channels: Sequence[str] | None = None,
    mask_values: Mapping[str, int | str] | None = None,
    mask_drawn_on: DrawnOn | None = None,
    group: Groups = None,
    dealing: Dealing | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Prepare volumes with masks or classes, of one or several sites; the files are copied unchanged.

    Every volume and every mask is read. The corners of a mask must be those of its volume to half a voxel,
    whichever way both are stored (:func:`fairflare.data.geometry.fit`). Labels that are not 0, 1, ..., K-1 get these
    numbers in the order of their values, by ``mask_values`` in ``fairflare.json``. Patients are identified by the
    table, by ``group``, by BIDS (``sub-``) or by DICOM headers (a hash of PatientID).

    Args:
        out_dir: folder to write to.
        source_dir: one tree of files, or a folder with one tree for each site, see
            :mod:`fairflare.data.preparers.trees`.
        folders: instead of ``source_dir``, the folder of images, and the folder of masks or the table of classes, by
            site.
        csv, columns: table below ``source_dir`` with image, mask or label, perhaps site, patient and split; and names
            of its columns.
        attributes: attributes of the people and their columns in the table or in a BIDS tree's ``participants.tsv``;
            see :func:`fairflare.data.preparers.listed.columns_of`.
        classes: names of the classes in the order of their numbers.
        slices: list slices of this plane instead of whole volumes.
        keep_empty: with ``slices``, also list slices in which the mask is 0.
        unlabelled: folders of images without labels, see :func:`fairflare.data.preparers.trees.add_unlabelled`.
        leave_out: skip volumes that cannot be used, and report them.
        suffix: suffix of the images of a BIDS tree, such as ``T1w``; several are the channels of a case.
        channels: names of the images of a case, in the order of the network's input: the ends of their names, the
            columns of the table, or the names for ``_0000``, ``_0001``, ...
        mask_values: ``{value in the file: label}`` for ``fairflare.json``.
        mask_drawn_on: rule for pairs of which only one file states a geometry, for ``fairflare.json``.
        group: regular expression whose first group is the patient, searched in the path of an image below its folder.
        dealing: rule by which the volumes are dealt to sites; default: the sites that the source names.
        writing: see :func:`fairflare.data.preparers.writing.write_sites`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the source is not as expected, or volumes cannot be used; the message names all of them.
        ValueError: arguments contradict each other.
    """
    dealing, channels = dealing or Dealing(), channels or ()
    if problem := first_of({
        "give either --source or --site": (source_dir is None) == (not folders),
        "--csv goes with --source; with --site a table takes the place of the folder of masks":
            csv is not None and source_dir is None,
        "--keep-empty is of --slices": slices is None and keep_empty,
        "--size and --corrupt are of pictures, not of volumes": dealing.edge > 0,
    }):  # fmt: skip
        raise ValueError(problem)
    plane = None if slices is None else choice("slices", slices, get_args(Plane))
    if folders:
        trees = {
            name: of_site(name, Path(images), Path(labels), columns or {}, attributes, classes, channels=channels)
            for name, (images, labels) in folders.items()
        }
    elif csv is None:
        suffixes = [suffix] if isinstance(suffix, str) else suffix or ()
        trees = trees_of(Path(source_dir or ""), suffixes, attributes, channels)
    else:
        trees = {"": listed(Path(source_dir or ""), csv, columns or {}, "", attributes, classes, channels=channels)}
    add_unlabelled(trees, unlabelled)
    look = partial(look_at_volume, plane=plane, keep_empty=keep_empty, drawn_on=mask_drawn_on)
    return write_own(
        trees, look, out_dir, dealing, writing, "volume", plane, attributes=attributes, classes=classes, group=group,
        leave_out=leave_out, mask_values=mask_values, mask_drawn_on=mask_drawn_on,
    )  # fmt: skip


PREPARERS = (
    of_function(
        "volumes", "NIfTI volumes and DICOM series with masks or classes, whole (3D) or slice by slice (--slices)",
        prepare_volumes, Dealing(),
    ),
)  # fmt: skip
