"""Masks of the size, orientation and kind of file of the images that they are of, and pictures to look at them."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from fairflare.core.files import write_whole
from fairflare.data.datalist import ARRAYS, VOLUMES, Sample, suffix_of
from fairflare.data.reading import read_image
from fairflare.tasks.segmentation import SegmentationTask

WHITE = 255  # in pictures, for the only structure: also what a datalist's masks of 0 and 255 mean
COLOURS = ((230, 60, 50), (60, 130, 230), (250, 190, 40), (60, 180, 90), (170, 90, 200), (0, 190, 190))
OPACITY = 0.4  # of the overlay


def labels_of(task: SegmentationTask) -> dict[int, list[int]]:
    """``{label: structures that it belongs to}``, of labels with the same structures the smallest."""
    found: dict[int, list[int]] = {}
    for label in sorted(set().union(*task.structures)):
        having = [number for number, labels in enumerate(task.structures) if label in labels]
        if having not in found.values():
            found[label] = having
    return found


def label_map(probabilities: torch.Tensor, labels: Mapping[int, Sequence[int]], threshold: float) -> torch.Tensor:
    r"""One label a pixel.

    Where exactly the structures of a label are above the threshold, it is that label; no structure, 0. Structures that
    no label has together compete: the label with the largest sum of :math:`p_k - t` over its structures k.

    Args:
        probabilities: (structures, height, width) in [0, 1].
        labels: of :func:`labels_of`.
        threshold: t, in (0, 1); a structure is found where its probability is larger.

    Returns:
        (height, width) int64.
    """
    above = probabilities.double() - float(np.float32(threshold))
    scores = torch.stack([torch.zeros_like(above[0]), *(above[list(having)].sum(0) for having in labels.values())])
    numbers = torch.tensor([0, *labels])
    return numbers[scores.argmax(0)]  # of equals the first: nothing before something


def in_size(labels: torch.Tensor, height: int, width: int) -> npt.NDArray[np.int64]:
    """A label map of the image's own size: the nearest pixel's label."""
    pixels = labels[None, None].to(torch.float64)
    return interpolate(pixels, (height, width), mode="nearest-exact")[0, 0].to(torch.int64).numpy()


def coded(labels: npt.NDArray[np.int64], task: SegmentationTask, file: Path) -> npt.NDArray[Any]:
    """The values that a file gets for its labels: those of the masks that the task learned from, small types."""
    values = {label: label for label in labels_of(task)} | {0: 0}
    if task.mask_values is not None:
        for value, label in sorted(task.mask_values.items(), reverse=True):
            values[label] = value  # the smallest of those that mean it
    elif list(labels_of(task)) == [1] and suffix_of(file) not in (*VOLUMES, *ARRAYS):
        values[1] = WHITE
    found = np.zeros(labels.shape, np.int64)
    for label, value in values.items():
        found[labels == label] = value
    return found.astype(np.uint8 if max(values.values()) < 256 else np.uint16)


def mask_name(name: str) -> str:
    """``case.nii.gz`` -> ``case_mask.nii.gz``; a picture of any kind gets a PNG."""
    ending = suffix_of(Path(name))
    return f"{name[: len(name) - len(ending)]}_mask{ending if ending in (*VOLUMES, *ARRAYS) else '.png'}"


def overlay_name(name: str) -> str:
    """``case.nii.gz`` -> ``case_overlay.png``."""
    return f"{name[: len(name) - len(suffix_of(Path(name)))]}_overlay.png"


def size_of(file: Path) -> tuple[int, int]:
    """Height and width of an image, or of the slices of a volume."""
    return read_image(Sample(file, 0, 0 if suffix_of(file) in VOLUMES else None), site="predict", split="none").shape[
        :2
    ]


def write_mask(path: Path, mask: npt.NDArray[Any], image: Path) -> None:
    """A mask as a file like its image's.

    Args:
        path: with the ending of :func:`mask_name`.
        mask: (height, width), or (height, width, slices) of a volume, as :func:`fairflare.data.decoding.decode` has it.
        image: the file that it is a mask of; a NIfTI mask has its affine and its header.
    """
    ending = suffix_of(path)
    if ending in VOLUMES:
        content = _like(image, mask.swapaxes(0, 1)).to_bytes()
        content = gzip.compress(content, mtime=0) if ending == ".nii.gz" else content
        write_whole(path, lambda partial: partial.write_bytes(content), durable=False)
    elif ending in ARRAYS:
        write_whole(path, lambda partial: _save_array(partial, mask), durable=False)
    else:
        _save_picture(path, mask)


def _like(image: Path, mask: npt.NDArray[Any]) -> Any:
    import nibabel

    source: Any = nibabel.load(image)
    header = source.header.copy()
    header.set_data_dtype(mask.dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"], header["cal_max"], header["descrip"] = 0, 0, b"mask by fairflare"
    return type(source)(np.asarray(mask), source.affine, header)


def _save_array(path: Path, mask: npt.NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, mask)


def _save_picture(path: Path, values: npt.NDArray[Any]) -> None:
    from PIL import Image

    picture = Image.fromarray(values)
    write_whole(path, lambda partial: picture.save(partial, format="PNG"), durable=False)


def write_overlay(
    path: Path, image: Path, number: int | None, labels: npt.NDArray[np.int64], known: Sequence[int]
) -> None:
    """The image with each label in a colour of its own, as a PNG.

    Args:
        path: of the picture.
        image, number: its file and, of a volume, slice.
        labels: (height, width) of that slice.
        known: all labels, in the order of the colours.
    """
    grey = read_image(Sample(image, 0, number), site="predict", split="none")
    picture = np.broadcast_to(grey, (*grey.shape[:2], 3)) * 255.0
    for place, label in enumerate(known):
        inside = labels == label
        edge = inside & ~_inner(inside)
        colour = np.array(COLOURS[place % len(COLOURS)], np.float64)
        picture = np.where(inside[..., None], (1 - OPACITY) * picture + OPACITY * colour, picture)
        picture = np.where(edge[..., None], colour, picture)
    _save_picture(path, picture.round().astype(np.uint8))


def _inner(inside: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Pixels whose four neighbours are inside, too."""
    framed = np.pad(inside, 1)
    found = framed[:-2, 1:-1] & framed[2:, 1:-1] & framed[1:-1, :-2] & framed[1:-1, 2:]
    return np.asarray(found & inside)
