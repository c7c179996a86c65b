"""Read a DICOM SEG by highdicom as a mask of segment numbers, with its frames at the positions that the file states.

A SEG may leave out empty frames; :func:`fairflare.data.geometry.fit` gives its mask all slices of the image. Segments
that overlap, or are fractional (values between 0 and 1), do not give each voxel one label, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.own_errors import is_of_machine, reading_as
from fairflare.data.dicom import NO_IMAGE_CLASSES, NO_IMAGES
from fairflare.data.dicom_files import files_of_series, has_dicom_mark
from fairflare.data.geometry import SEGMENTS, Grid, Misfit, refuse_misfit
from fairflare.data.listing.attributes import MAX_NAME


def file_in(path: Path) -> Path | None:
    """Return a path if it is a SEG file, or the SEG that is the only DICOM file of a folder; otherwise ``None``."""
    import pydicom

    files = files_of_series(path) if path.is_dir() else [path]
    if len(files) != 1 or not has_dicom_mark(files[0]):
        return None
    with reading_as("DICOM file"):
        head = pydicom.filereader.read_file_meta_info(files[0])
    return files[0] if NO_IMAGE_CLASSES.get(head.get("MediaStorageSOPClassUID")) == "SEG" else None


def grid_of(file: Path) -> Grid:
    """Return the position of a SEG's frames; for a picture, which has no position, a grid of one slice.

    Raises:
        Misfit: highdicom is not installed, or the file is damaged or cannot be read as a mask.
    """
    with _reading(file) as seg:
        where, frame = seg.get_volume_geometry(), str(seg.get("FrameOfReferenceUID", ""))
        if where is None and len(seg.get_source_image_uids()) == 1:
            return Grid((seg.Rows, seg.Columns, 1))
        if where is None:
            raise ValueError("its frames have no regular positions")
        # DICOM's axes point to the left and the back.
        affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.asarray(where.affine)[:, [1, 2, 0, 3]]
        slices, rows, columns = where.spatial_shape
        return Grid((rows, columns, slices), (("SEG", affine),), of=SEGMENTS, frame=frame)


def labels_of(file: Path) -> npt.NDArray[Any]:
    """Return each voxel's segment number: (rows, columns, slices), or (rows, columns) if the SEG has no positions.

    Raises:
        Misfit: as :func:`grid_of`, or two segments overlap.
    """
    with _reading(file) as seg:
        if seg.get_volume_geometry() is not None:
            return np.moveaxis(seg.get_volume(combine_segments=True).array, 0, 2)
        sources = [instance for _, _, instance in seg.get_source_image_uids()]
        return np.asarray(seg.get_pixels_by_source_instance(sources, combine_segments=True)[0])


def names_of(file: Path) -> dict[int, str]:
    """Return the label of each segment, by its number."""
    with _reading(file) as seg:
        return {
            int(one.SegmentNumber): name[:MAX_NAME]
            for one in seg.SegmentSequence
            if one.SegmentNumber and (name := str(one.SegmentLabel).strip()).isprintable()
        }


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    """Open a SEG; raise ``Misfit`` for errors of highdicom, in the ``with`` block too, and if it is not installed."""
    remedy = f"Export segments that do not overlap and are yes or no. Or make a NIfTI mask of it: {NO_IMAGES['SEG'][1]}"
    refuse_misfit(
        find_spec("highdicom") is None,
        "DICOM SEG",
        f"'{file.name}' is a DICOM SEG, which needs the package highdicom",
        f"pip install 'fairflare[seg]'. {remedy.partition('. ')[2]}",
    )
    from highdicom.seg import segread

    try:
        yield segread(file)
    except Exception as error:
        if is_of_machine(error):
            raise
        raise Misfit(
            "DICOM SEG that is no mask", f"highdicom cannot make a mask of '{file.name}' ({error})", remedy
        ) from error
