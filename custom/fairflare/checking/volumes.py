"""Look at a volume and its mask for ``check-data``: each file is read once, and nothing is copied in more bytes."""

from __future__ import annotations

import hashlib
import math
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_erosion, find_objects

from fairflare.core.statistics.channels import describe_channels
from fairflare.core.statistics.label_maps import regions_of, shape_of
from fairflare.data.datalist import Sample
from fairflare.data.intensity import counts_of, rescale
from fairflare.data.kinds import describe_mask, hash_values, shorten
from fairflare.data.orientation import orient_view
from fairflare.data.whole_volumes import check_scale, open_volume

# What a mask is, for messages.
EMPTY, FULL, LINES = (
    "with nothing in it", "that leaves no background",
    "of lines or single slices (no pixel has its structure on all sides); was an outline drawn, or a part?",
)  # fmt: skip
SIDE = 128  # number of pixels along a side from which the shapes of structures are taken
CHECKED = 8  # bytes a voxel that a check makes beside what the files hold: what is marked, codes, connected parts


def look_at_masked(data: Any, sample: Sample, split: str) -> dict[str, Any]:
    """Read a volume and its mask as the task reads them, and return what is checked of both.

    Returns:
        ``size`` as stored; ``content``, a checksum of the values of each image (``None`` if all are the same);
        ``channels``, a description of the images where there are several; ``target``, a checksum of the
        slice with most voxels of structures; ``labelled``, the structures that the mask marks; ``odd``, what the mask
        is; ``features`` of each structure in that slice, by :func:`regions_of`; ``shapes`` of these;
        ``drawn``, the mask's description for comparisons; ``prepared``, the bytes that volume and targets take when
        they are prepared.

    Raises:
        DataError: the task cannot use the volume or its mask.
    """
    case = open_volume(sample, data.site, split, data.max_image_bytes, data.reading)
    assert case.mask is not None
    mask, affine = case.mask, case.affine
    for one, channel in zip(case.images, data.reading.channels, strict=True):
        check_scale(one, data.reading.channel_reading(max(0, channel)))
    volumes = [case.bring_to_grid(number, one.array) for number, one in enumerate(case.images)]
    structured = data.task.structure_masks(data.coding, data.site, split)
    counts = counts_of(mask)
    meaning = structured.meaning(counts, str(sample.label))
    # One voxel, to refuse a file whose header lacks what the task needs.
    data.task.regrid(mask[None, :1, :1, :1], affine, sample.image.name, data.site, nearest=True)
    image, codes = (orient_view(array, affine, data.task.orientation)[0] for array in (volumes[0], mask))
    inside = {
        value: meant for value, meant in meaning.items() if any(meant in structure for structure in structured.labels)
    }
    marks: npt.NDArray[np.uint8] = np.zeros(codes.shape, np.uint8)  # 1, 2, ... for the values that mark structures
    for number, value in enumerate(inside, 1):
        marks[codes == value] = min(number, 255)
    place = max(range(codes.shape[-1]), key=lambda index: int(np.count_nonzero(marks[..., index])))
    seen = structured.inside(np.ascontiguousarray(codes[..., place]), meaning).numpy()
    background = sum(n for value, n in counts.items() if value not in inside and meaning[value] != structured.ignore)
    labelled = [k for k, labels in enumerate(structured.labels) if {*labels} & {*inside.values()}]
    lines = not any(
        _has_inner(codes, [value for value, meant in inside.items() if meant in structure])
        for structure in structured.labels
    )
    return {
        "size": mask.shape, "labelled": labelled,
        "content": [*map(_content, volumes)], "channels": describe_channels(data.datalist.channels, volumes),
        "target": hashlib.sha256(seen.tobytes()).hexdigest(),
        "odd": [FULL] * (not background) + [LINES] * lines if labelled else [EMPTY],
        "features": [(features, number) for number, features in regions_of(seen, True).items()],
        "shapes": shapes_of(seen),
        "drawn": [describe_mask(shorten(sample.image), image, marks)],
        "prepared": math.prod(map(round, data.shapes(split)[0])) * (np.float32().nbytes + len(structured.labels)),
    }  # fmt: skip


def shapes_of(seen: npt.NDArray[Any]) -> dict[int, npt.NDArray[np.floating]]:
    """Return the shapes of the background (0) and of each structure (from 1) of a picture's or a slice's targets."""
    small = seen[:, :: (step := max(1, max(seen.shape[1:]) // SIDE)), ::step] > 0
    return {number: shape_of(region) for number, region in enumerate([~small.any(0), *small]) if region.any()}


def _has_inner(mask: npt.NDArray[Any], values: list[int]) -> bool:
    """Return whether a voxel with one of the values has all its neighbours along the axes inside too."""
    inside = reduce(np.logical_or, (mask == value for value in values), np.zeros(mask.shape, bool))
    return any(bool(binary_erosion(inside[box]).any()) for box in find_objects(inside.view(np.int8)))


def _content(values: npt.NDArray[Any]) -> str | None:
    """Return a checksum of a volume, the same for a copy of another type or scale; ``None`` if it is constant."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return None if low == high else hash_values(values, lambda slab: rescale(slab, (low, high)))
