"""Read whole volumes of a datalist: NIfTI, DICOM series and 3D arrays as stored, with the affine of their voxels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import first_of
from fairflare.data.datalist import DataError, Sample
from fairflare.data.image_file import MAX_IMAGE_BYTES
from fairflare.data.intensity import slabs
from fairflare.data.reading import (
    PLAIN,
    Labels,
    Reading,
    _bounds,
    _Opened,
    _scaled,
    open_image,
    open_pair,
    whole_numbers,
)


@dataclass(frozen=True)
class Whole:
    """Represent a volume with its mask and affine.

    Attributes:
        image: (rows, columns, slices) float32 in [0, 1].
        mask: values of the mask's file, of the same shape, in the smallest unsigned type; ``None`` if not requested.
        affine: (4, 4) matrix from (row, column, slice) to mm (RAS); ``None`` if the file does not state one.
    """

    image: npt.NDArray[np.float32]
    mask: Labels | None
    affine: npt.NDArray[np.float64] | None


def read_whole(
    sample: Sample, *, masked: bool, site: str, split: str, max_bytes: int = MAX_IMAGE_BYTES, how: Reading = PLAIN
) -> Whole:
    """Return the volume of a sample, its grey values scaled by the bounds of the whole file.

    Args:
        sample: entry of a datalist without the key ``slice``.
        masked: whether the sample's mask is read too; its shape and position must be those of the volume.
        site, split: names for the messages.
        max_bytes: largest number of bytes that a decoded file may take.
        how: settings that scale intensities; the volume is not reoriented.

    Raises:
        DataError: a file is too large, damaged or no volume, or volume and mask do not fit together.
    """
    how = replace(how, orientation="stored", once=True)
    opened, mask, affine = open_volume(sample, site, split, max_bytes, how, masked=masked)
    return Whole(_scaled(opened, opened.array, None, _bounds(opened, how, max_bytes), how), mask, affine)


def open_volume(
    sample: Sample, site: str, split: str, limit: int, how: Reading, *, masked: bool = True
) -> tuple[_Opened, Labels | None, npt.NDArray[np.float64] | None]:
    """Open the volume of a sample as stored; return it with its mask and affine, see :class:`Whole`.

    Arguments and errors are those of :func:`read_whole`.
    """
    if sample.slice is not None:
        reason = (
            f"the datalist picks slice {sample.slice} of it, which a task on whole volumes does not use; take the key "
            "'slice' out (one entry for each volume), or run a task on slices"
        )
        raise DataError(
            f"site '{site}': volume '{sample.image}' of split '{split}' cannot be used: {reason}",
            f"site '{site}': a volume of split '{split}' cannot be used",
            reason,
        )
    how = replace(how, orientation="stored", once=True)
    where = (sample, site, split, limit, how)
    opened, *masks = map(_volume, open_pair(*where) if masked else [open_image(*where)])
    affine = opened.facts.affine if opened.fit is None else opened.fit.affine
    if affine is None and sample.spacing is not None and len(sample.spacing) == 3:
        affine = np.diag([*sample.spacing, 1.0])
    return opened, next((whole_numbers(mask, mask.array) for mask in masks), None), affine


def check_scale(opened: _Opened, how: Reading) -> None:
    """Raise ``DataError`` if the values of a volume cannot be scaled: they are not finite, or there is no window."""
    array, padded = opened.array, opened.facts.padded
    if array.dtype.kind == "f" and not all(
        (np.isfinite(slab) | (np.isnan(slab) & padded)).all() for slab in slabs(array)
    ):
        raise opened.not_finite()
    if how.intensity == "window":
        _scaled(opened, array[:, :, :1], 0, None, how)


def read_labels(sample: Sample, site: str, split: str, max_bytes: int, how: Reading) -> Labels:
    """Return the mask alone of a volume, as :func:`read_whole` does."""
    how = replace(how, orientation="stored", once=True)
    mask = _volume(open_pair(sample, site, split, max_bytes, how, masks_only=True)[1])
    return whole_numbers(mask, mask.array)


def _volume(opened: _Opened) -> _Opened:
    array = opened.array
    if problem := first_of({
        f"it holds {array.dtype} values, not numbers": array.dtype.kind not in "biuf",
        f"it has the shape {array.shape}, which is no volume with one value a voxel; tasks on pictures are "
        "'segmentation' and 'classification'":
            array.ndim != 3 or (opened.facts.slices is None and array.shape[2] in (3, 4)) or 0 in array.shape,
    }):  # fmt: skip
        raise opened.unreadable(problem)
    return opened
