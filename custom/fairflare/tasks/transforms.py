"""Turn images and masks as files hold them into tensors: the network's input, and one mask for each structure.

Resizing is not MONAI's: ``Resize(anti_aliasing=True)`` blurs with a Gaussian that does not sum to 1 and takes pixels
outside the image as zeros: a constant image of 0.5 becomes 0.45, at the border 0.40. It also takes 40 times as long
(256 to 64 pixels).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fairflare.base.checks import few
from fairflare.data.datalist import DataError
from fairflare.data.intensity import counts_of
from fairflare.tasks.placing import NOT_COUNTED, smooth

LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's conversion to grey
MOST_FURTHER = 40  # largest unexpected value of a mask that is probably a further structure's number


@dataclass(frozen=True)
class Structured:
    """Convert a mask file's values, (height, width), to (structures, height, width) of 0, 1 and -1 (does not count).

    Args:
        labels: the labels that belong to each structure.
        coding: ``{value in the file: label}``; ``None`` if the values are the labels. Then 0 is background, and 255
            stands for 1 if 1 is the only label.
        site, split: names for messages.
        ignore: label of pixels that do not count; ``None`` if all pixels count.
        silent: labels that the site did not annotate, so that no mask may mark them.
    """

    labels: Sequence[Sequence[int]]
    coding: Mapping[int, int] | None
    site: str
    split: str
    ignore: int | None = None
    silent: frozenset[int] | set[int] = frozenset()

    def structures(self, mask: npt.NDArray[np.unsignedinteger[Any]], file: str) -> torch.Tensor:
        return self.inside(mask, self.meaning(counts_of(mask), file))

    def meaning(self, values: Collection[int], file: str) -> dict[int, int]:
        """Return the label of each value that a mask has; raise ``DataError`` if a value has no meaning."""
        uncounted = {0} if self.ignore is None else {0, self.ignore}
        coding = {value: value for value in uncounted.union(*self.labels)} if self.coding is None else self.coding
        binary = self.coding is None and {*coding} == {0, 1}
        if binary and 255 in values and 1 not in values:
            coding = {0: 0, 255: 1}
        if strange := [value for value in values if value not in coding]:
            more, known = max(strange), [[label] for label in range(1, len(self.labels) + 1)]
            further = self.coding is None and [list(group) for group in self.labels] == known and more <= MOST_FURTHER
            lossy = "; JPEG changes values, use PNG for masks" if file.lower().endswith((".jpg", ".jpeg")) else ""
            raise DataError(
                f"site '{self.site}': mask '{file}' of split '{self.split}' has the values "
                f"{few(list(map(str, strange)), 5)}; expected are {', '.join(map(str, sorted(coding)))}"
                f"{' (or 0 and 255)' if binary and 1 in coding else ''}. Correct the mask, or "
                f"{f'learn these structures too (--set num_classes={more}), or ' * further}say with 'mask_values' in "
                "the site's fairflare.json what they mean, such as "
                f"{json.dumps({**coding, **dict.fromkeys(strange, 0 if further else self.labels[0][0])})}{lossy}",
                f"site '{self.site}': a mask of split '{self.split}' has values that are not expected",
            )
        if odd := sorted(self.silent & {coding[value] for value in values}):
            raise DataError(
                f"site '{self.site}': mask '{file}' of split '{self.split}' marks {few(list(map(str, odd)), 5)}, which "
                "'structures' in the site's fairflare.json does not have; add the label there, or correct the mask",
                f"site '{self.site}': a mask of split '{self.split}' marks what 'structures' in the site file lacks",
            )
        return {value: coding[value] for value in values}

    def inside(self, mask: npt.NDArray[np.unsignedinteger[Any]], meaning: Mapping[int, int]) -> torch.Tensor:
        """Return the structures of a mask, given the label of each of its values."""
        inside = torch.zeros(len(self.labels), *mask.shape, dtype=torch.uint8 if self.ignore is None else torch.int8)
        for value, meant in meaning.items():  # a copy of the mask for each value in turn, of one byte a voxel
            here = torch.from_numpy(mask == value)
            for number, labels in enumerate(self.labels):
                if meant == self.ignore:
                    inside[number][here] = NOT_COUNTED
                elif meant in labels:
                    inside[number] |= here
        return inside


def luminance(pictures: torch.Tensor) -> torch.Tensor:
    """Convert pictures (..., 1 or 3, height, width) to luminance, (..., 1, height, width); grey ones are unchanged."""
    if pictures.shape[-3] == 1:
        return pictures
    return torch.einsum("...chw,c->...hw", pictures.float(), torch.tensor(LUMINANCE)).unsqueeze(-3)


def prepare_image(
    image: npt.NDArray[np.float32], channels: int, size: tuple[int, int], how: str = "stretch"
) -> torch.Tensor:
    """Return an image (height, width, 1 or 3) in [0, 1] as the network's input in evaluation.

    Colour becomes luminance, or grey is repeated. The image is resized to the network's size, bilinearly, with a
    low-pass filter if it shrinks.
    """
    # torch knows no mirrored views, as turned channels are
    picture = torch.from_numpy(np.ascontiguousarray(np.moveaxis(image, -1, 0)))
    picture = luminance(picture) if channels == 1 else picture.expand(channels, -1, -1)
    return smooth(picture[None], size, how)[0].clamp(0.0, 1.0)
