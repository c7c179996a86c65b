"""Prepare a user's own NIfTI and DICOM volumes, whole for a MONAI bundle or slice by slice for 2D tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fairflare.base.checks import choice, refuse
from fairflare.data.preparers.dealing import Dealing
from fairflare.data.preparers.looking import look_at_volume
from fairflare.data.preparers.options import Plane, declare_preparer
from fairflare.data.preparers.own import PrepareRequest, write_own
from fairflare.data.preparers.trees import add_unlabelled, list_table, read_site, trees_of

VOLUMES = (
    "csv", "columns", "attributes", "classes", "slices", "keep_empty", "leave_out", "unlabelled", "suffix", "channels",
    "mask_values", "mask_drawn_on", "group",
)  # fmt: skip


def prepare_volumes(
    out_dir: str | Path, *, source_dir: str | Path | None = None,
    folders: Mapping[str, tuple[str | Path, str | Path]] | None = None, dealing: Dealing | None = None, **options: Any,
) -> dict[str, Path]:  # fmt: skip
    """Prepare volumes with masks or classes, of one or several sites; the files are copied unchanged.

    Every volume and every mask is read. The corners of a mask must be those of its volume to half a voxel,
    whichever way both are stored (:func:`fairflare.data.geometry.fit`). Labels that are not 0, 1, ..., K-1 get these
    numbers in the order of their values, by ``mask_values`` in ``fairflare.json``. Patients are identified by the
    table, by ``group``, by BIDS (``sub-``) or by DICOM headers (a hash of PatientID).

    Args:
        out_dir, dealing: see :class:`.own.PrepareRequest`.
        source_dir: one tree of files, or a folder with one tree for each site, see
            :mod:`fairflare.data.preparers.trees`.
        folders: instead of ``source_dir``, the folder of images, and the folder of masks or the table of classes, by
            site.
        options: options of ``VOLUMES``, see :class:`.own.PrepareRequest`, and of :class:`.writing.Writing`.

    Returns:
        Folder of each site.

    Raises:
        DataError: the source is not as expected, or volumes cannot be used; the message names all of them.
        ValueError: arguments contradict each other.
    """
    request = PrepareRequest.take(VOLUMES, out_dir, options, dealing)
    csv, columns, people, classes = request.csv, request.columns or {}, request.attributes, request.classes
    channels = request.channels or ()
    refuse({
        "give either --source or --site": (source_dir is None) == (not folders),
        "--csv goes with --source; with --site a table takes the place of the folder of masks":
            csv is not None and source_dir is None,
        "--keep-empty is of --slices": request.slices is None and request.keep_empty,
        "--size and --corrupt are of pictures, not of volumes": request.dealing.edge > 0,
    })  # fmt: skip
    plane = None if request.slices is None else choice("slices", request.slices, get_args(Plane))
    if folders:
        trees = {
            name: read_site(name, Path(images), Path(labels), columns, people, classes, channels=channels)
            for name, (images, labels) in folders.items()
        }
    elif csv is None:
        suffixes = [request.suffix] if isinstance(request.suffix, str) else request.suffix or ()
        trees = trees_of(Path(source_dir or ""), suffixes, people, channels)
    else:
        trees = {"": list_table(Path(source_dir or ""), csv, columns, "", people, classes, channels=channels)}
    add_unlabelled(trees, request.unlabelled)
    look = partial(look_at_volume, plane=plane, keep_empty=request.keep_empty, drawn_on=request.mask_drawn_on)
    return write_own(request, trees, look, "volume")


PREPARERS = (
    declare_preparer(
        "volumes", "NIfTI volumes and DICOM series with masks or classes, whole (3D) or slice by slice (--slices)",
        prepare_volumes, VOLUMES, Dealing(),
    ),
)  # fmt: skip
