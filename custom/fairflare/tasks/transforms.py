"""Turn an entry of a datalist into tensors of one size, by MONAI transforms.

Two transforms are not MONAI's:

- :class:`Read`. When a reader fails, ``LoadImaged`` tries every other reader, so the reason is lost. Here MONAI's
  readers are used directly (:mod:`fairflare.data.reading`), and errors name site and split.
- :func:`shrunk`. ``Resize(anti_aliasing=True)`` blurs with a Gaussian that does not sum to 1 and takes pixels outside
  the image as zeros: a constant image of 0.5 becomes 0.45, at the border 0.40. It also takes 40 times as long (256 to
  64 pixels).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from monai.transforms import EnsureChannelFirstd, Lambdad, MapTransform

from fairflare.base.checks import few
from fairflare.data.datalist import DataError, Sample
from fairflare.data.intensity import counts_of
from fairflare.data.reading import PLAIN, Reading, read_pair
from fairflare.data.whole_volumes import read_image
from fairflare.tasks.placing import NOT_COUNTED, masks_placed, plain, smooth

LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's conversion to grey
MOST_FURTHER = 40  # largest unexpected value of a mask that is probably a further structure's number
Item = dict[Hashable, Any]


@dataclass(frozen=True)
class Read:
    """Read a sample: ``image``, (height, width, 1 or 3) float32 in [0, 1], and ``label``, the mask's values or a class.

    Args:
        site, split: names for messages.
        max_bytes: largest number of bytes that a decoded file may take.
        class_of: function that returns the class, or the findings, of a sample; ``None`` if a sample has a mask of the
            image's size.
        how: settings for reading files (orientation, intensities).
    """

    site: str
    split: str
    max_bytes: int
    class_of: Callable[[Sample, str], int | tuple[int, ...]] | None = None
    how: Reading = PLAIN

    def __call__(self, sample: Sample) -> Item:
        label: Any
        where: dict[str, Any] = {"site": self.site, "split": self.split, "max_bytes": self.max_bytes, "how": self.how}
        if sample.label is None:  # nobody reads the target of an image without a label
            image = read_image(sample, **where)
            label = np.zeros(image.shape[:2], np.int64) if self.class_of is None else torch.tensor(0)
        elif self.class_of is None:
            image, label = read_pair(sample, **where)
        else:
            image = read_image(sample, **where)
            label = torch.tensor(self.class_of(sample, self.split))
        return {"sample": sample, "image": image, "label": label}


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

    def __call__(self, item: Item) -> Item:
        """Convert the mask of an item; for a sample without a label, zeros that are not used."""
        mask, file = item["label"], item["sample"].label
        return {**item, "label": self.inside(mask, {}) if file is None else self.structures(mask, str(file))}

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


def convert_channels(picture: torch.Tensor, channels: int) -> torch.Tensor:
    """Convert a picture (1 or 3, height, width) to ``channels`` channels: colour to luminance, or grey repeated."""
    picture = plain(picture).contiguous()
    return luminance(picture) if channels == 1 else picture.expand(channels, -1, -1)


def luminance(pictures: torch.Tensor) -> torch.Tensor:
    """Convert pictures (..., 1 or 3, height, width) to luminance, (..., 1, height, width); grey ones are unchanged."""
    if pictures.shape[-3] == 1:
        return pictures
    return torch.einsum("...chw,c->...hw", pictures.float(), torch.tensor(LUMINANCE)).unsqueeze(-3)


def shrunk(picture: torch.Tensor, size: tuple[int, int], how: str) -> torch.Tensor:
    """Resize a picture (channels, height, width) in [0, 1] to the network's size, bilinearly.

    A low-pass filter is applied if the picture shrinks.
    """
    return smooth(picture[None], size, how)[0].clamp(0.0, 1.0)


def place_masks(masks: torch.Tensor, size: tuple[int, int], how: str, by: str) -> torch.Tensor:
    """Resize masks (structures, height, width) to the network's size; see :func:`.placing.masks_placed`."""
    if how == "pad":  # pixels of the edge get -1, for which the type needs a sign
        masks = masks.to(torch.int8)
    return masks_placed(masks, size, how, by)


def each(key: str, change: Callable[..., torch.Tensor], **named: Any) -> Lambdad:
    """Wrap a function of tensors as a transform of one key, whose results carry no image header."""
    return Lambdad(key, partial(change, **named), track_meta=False)


def apply_transforms(transforms: Iterable[Callable[[Any], Any]], sample: Any) -> Mapping[str, Any]:
    """Return what transforms make of a sample one after the other; MONAI's Compose would change our errors."""
    return cast("Mapping[str, Any]", reduce(lambda item, transform: transform(item), transforms, sample))


def mask_transforms(
    read: Read, structured: Structured, channels: int, size: tuple[int, int], how: str = "stretch", by: str = "nearest"
) -> list[Callable[[Any], Any]]:
    """Return the transforms of segmentation samples: image in [0, 1], label (structures, height, width) of 0 and 1."""
    # Structures before resizing, which could hide an unexpected value.
    return [
        *class_transforms(read, channels, size, how),
        structured,
        each("label", place_masks, size=size, how=how, by=by),
    ]


def class_transforms(
    read: Read, channels: int, size: tuple[int, int], how: str = "stretch"
) -> list[Callable[[Any], Any]]:
    """Return the transforms of classification samples: image float32 in [0, 1], label the number of the class."""
    return [read, *input_transforms(channels, size, how)]


def input_transforms(channels: int, size: tuple[int, int], how: str = "stretch") -> list[MapTransform]:
    """Return the transforms of an image (height, width, 1 or 3) to the network's input in evaluation."""
    return [
        EnsureChannelFirstd("image", channel_dim=-1),
        each("image", convert_channels, channels=channels),
        each("image", shrunk, size=size, how=how),
    ]
