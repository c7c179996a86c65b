"""Write predicted masks with the size, orientation and file type of their images, and overlays for viewing."""

from __future__ import annotations

import gzip
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.ndimage import binary_erosion

from fairflare.base.disk.files import write_whole
from fairflare.data.datalist import Sample
from fairflare.data.geometry import tag_turn
from fairflare.data.image_file import ARRAYS, ORIENTATION, SUFFIXES, VOLUMES, Dicom, image_file, suffix_of
from fairflare.data.orientation import Turn, back, turn_view
from fairflare.data.reading import PLAIN, Reading, read_image
from fairflare.tasks.placing import back_in_place
from fairflare.tasks.shared.structures import StructureTask

WHITE = 255  # value of a single structure in a picture's mask, as in a datalist's masks of 0 and 255
COLOURS = ((230, 60, 50), (60, 130, 230), (250, 190, 40), (60, 180, 90), (170, 90, 200), (0, 190, 190))
OPACITY = 0.4  # opacity of the colours in an overlay, in [0, 1]


def labels_of(task: StructureTask) -> dict[int, list[int]]:
    """Return ``{label: numbers of its structures}``; of several labels with equal structures, only the smallest."""
    combinations: dict[int, list[int]] = {}
    for label in sorted(set().union(*task.structures)):
        having = [number for number, labels in enumerate(task.structures) if label in labels]
        if having not in combinations.values():
            combinations[label] = having
    return combinations


def label_map(probabilities: torch.Tensor, labels: Mapping[int, Sequence[int]], threshold: float) -> torch.Tensor:
    r"""Turn the probabilities of the structures into one label for each pixel.

    A pixel gets the label whose structures are exactly those above the threshold, and 0 where no structure is. If no
    label has exactly these structures, the label with the largest sum of :math:`p_k - t` over its structures k wins.

    Args:
        probabilities: (structures, height, width) in [0, 1].
        labels: the structures of each label, from :func:`labels_of`.
        threshold: t, in (0, 1); a structure is found where its probability is larger.

    Returns:
        The label of each pixel, (height, width) int64.
    """
    above = probabilities.double() - float(np.float32(threshold))
    scores = torch.stack([torch.zeros_like(above[0]), *(above[list(having)].sum(0) for having in labels.values())])
    return torch.tensor([0, *labels])[scores.argmax(0)]  # of equal scores the first wins, so 0 wins over a label


def resize_labels(labels: torch.Tensor, height: int, width: int, resize: str = "stretch") -> npt.NDArray[np.int64]:
    """Resize a label map to the image's own size by nearest neighbour; 0 where preprocessing cut the image off."""
    return back_in_place(labels[None].to(torch.float64), (height, width), resize)[0].to(torch.int64).numpy()


def code_labels(labels: npt.NDArray[np.int64], task: StructureTask, file: Path) -> npt.NDArray[Any]:
    """Replace labels by the values that training masks have in files of this type, in the smallest integer type."""
    values = {label: label for label in labels_of(task)} | {0: 0}
    if task.mask_values is not None:  # of several values with the same label, the smallest is written
        values |= {label: value for value, label in sorted(task.mask_values.items(), reverse=True)}
    elif list(labels_of(task)) == [1] and suffix_of(file) not in (*VOLUMES, *ARRAYS):
        values[1] = WHITE
    table = np.zeros(max(*values, labels.max(initial=0)) + 1, np.uint8 if max(values.values()) < 256 else np.uint16)
    table[list(values)] = list(values.values())
    return table[labels]


def stem_of(name: str) -> str:
    """Return a file name without its ending, if that is the ending of a readable image type."""
    ending = suffix_of(Path(name))
    return name[: len(name) - len(ending)] if ending in SUFFIXES else name


def mask_name(name: str, volume: bool = False) -> str:
    """Name a mask's file: ``case.nii.gz`` -> ``case_mask.nii.gz``.

    The mask of any kind of picture is a PNG, that of a DICOM volume a ``.nii.gz`` file.
    """
    if (ending := suffix_of(Path(name))) not in (*VOLUMES, *ARRAYS):
        ending = ".nii.gz" if volume else ".png"
    return f"{stem_of(name)}_mask{ending}"


def overlay_name(name: str) -> str:
    """Name an overlay's file: ``case.nii.gz`` -> ``case_overlay.png``."""
    return f"{stem_of(name)}_overlay.png"


def probability_file(mask: Path, part: int) -> Path:
    """Return the path of the file with a structure's probabilities, which lies beside the mask.

    ``case_mask.nii.gz`` -> ``case_probability_1.nii.gz`` for the first structure; beside a PNG a ``.npy``.
    """
    ending = suffix_of(mask)
    stem = mask.name[: -len(f"_mask{ending}")]
    return mask.with_name(f"{stem}_probability_{part + 1}{ending if ending in (*VOLUMES, *ARRAYS) else '.npy'}")


def write_probabilities(mask: Path, probabilities: npt.NDArray[Any], image: Path, turn: Turn | None = None) -> None:
    """Write a file for each structure beside the mask, float32 in [0, 1]; 0 where the image was cut off.

    Args:
        mask: file that :func:`write_mask` wrote.
        probabilities: probabilities, (structures, height, width), or (structures, height, width, slices) for a volume.
        image, turn: as in :func:`write_mask`.
    """
    for part, values in enumerate(probabilities):
        write_mask(probability_file(mask, part), values.astype(np.float32), image, turn)


def write_mask(path: Path, mask: npt.NDArray[Any], image: Path, turn: Turn | None = None) -> None:
    """Write a mask as a file of the same type and geometry as its image.

    Args:
        path: path of the mask, with an ending as from :func:`mask_name`.
        mask: (height, width), or (height, width, slices) of a volume, as the network saw it.
        image: the image's file; a NIfTI mask takes affine and header from it, or the affine of a DICOM series.
        turn: rotation by which the image was reoriented for the network and which is undone for the mask. If a picture
            file has an orientation tag, the mask gets the same tag.
    """
    ending = suffix_of(path)
    tag = image_file(image).facts().grid.tag
    mask = np.ascontiguousarray(turn_view(turn_view(mask, back(turn)), back(tag_turn(tag))))
    if ending in VOLUMES:
        content = _make_like(image, mask.swapaxes(0, 1)).to_bytes()
        content = gzip.compress(content, mtime=0) if ending == ".nii.gz" else content
        write_whole(path, lambda partial: partial.write_bytes(content), durable=False, shared=True)
    elif ending in ARRAYS:
        content = io.BytesIO()
        np.save(content, mask)
        write_whole(path, lambda partial: partial.write_bytes(content.getvalue()), durable=False, shared=True)
    else:
        _save_picture(path, mask, tag)


def _make_like(image: Path, mask: npt.NDArray[Any]) -> Any:
    import nibabel

    file = image_file(image)
    if isinstance(file, Dicom):
        return _series_image(file.facts().grid.affine, mask)
    source: Any = nibabel.load(image)
    header = source.header.copy()
    header.set_data_dtype(mask.dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"], header["cal_max"], header["descrip"] = 0, 0, b"mask by fairflare"
    return type(source)(np.asarray(mask), source.affine, header)


def _series_image(affine: npt.NDArray[Any] | None, mask: npt.NDArray[Any]) -> Any:
    """Return the mask of a DICOM series as a NIfTI image, without a position if that of the series is unknown."""
    import nibabel

    lies = None if affine is None else affine[:, [1, 0, 2, 3]]
    volume = nibabel.Nifti1Image(mask, np.eye(4) if lies is None else lies)
    for form in (volume.set_sform, volume.set_qform):
        form(lies, 0 if lies is None else 1)  # scanner coordinates in both: programs differ in which they read
    if lies is not None:
        volume.header.set_xyzt_units("mm")
    return volume


def _save_picture(path: Path, values: npt.NDArray[Any], tag: int | None = None) -> None:
    from PIL import Image

    picture, exif = Image.fromarray(values), Image.Exif()
    if tag is not None:
        exif[ORIENTATION] = tag
    write_whole(path, lambda partial: picture.save(partial, format="PNG", exif=exif), durable=False, shared=True)


def write_overlay(
    path: Path, image: Path, number: int | None, labels: npt.NDArray[np.int64], known: Sequence[int],
    how: Reading = PLAIN,
) -> None:  # fmt: skip
    """Write a PNG of the image in which each label is overlaid in its own colour.

    Args:
        path: path of the PNG.
        image, number: the image's file and, for a volume, the number of the slice.
        labels: (height, width) labels of the picture or slice.
        known: all labels, in the order of the colours.
        how: settings for reading the image; the overlay is drawn upright.
    """
    grey = read_image(Sample(image, 0, number), site="predict", split="none", how=how)
    picture = np.broadcast_to(grey, (*grey.shape[:2], 3)) * 255.0
    for place, label in enumerate(known):
        inside = labels == label
        edge = inside & ~binary_erosion(inside)
        colour = np.array(COLOURS[place % len(COLOURS)], np.float64)
        picture = np.where(inside[..., None], (1 - OPACITY) * picture + OPACITY * colour, picture)
        picture = np.where(edge[..., None], colour, picture)
    _save_picture(path, picture.round().astype(np.uint8))
