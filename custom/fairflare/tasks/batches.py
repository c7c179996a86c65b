"""Load batches of a site's images with torch's loader, and augment them with MONAI's random transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from monai.networks.layers import gaussian_1d, separable_filtering
from monai.transforms import (
    Compose,
    OneOf,
    RandAdjustContrastd,
    RandAffined,
    RandFlipd,
    Randomizable,
    RandScaleIntensityd,
    RandZoomd,
    Transform,
)
from torch.utils.data import DataLoader, Dataset

from fairflare.base.task import Batches
from fairflare.tasks.placing import plain
from fairflare.tasks.scores.dice_scores import BatchOf
from fairflare.tasks.transforms import LUMINANCE

if TYPE_CHECKING:
    from fairflare.base.task import Batch
    from fairflare.tasks.images import ImageData


def load_batches(entries: Sequence[Any], size: int, read: Callable[[list[Any]], Batch]) -> Batches:
    """Return batches of ``size`` entries, each as ``read`` returns it; they can be iterated repeatedly."""
    # The loader gets its own generator; else the loader would draw from torch's global one, which the training uses.
    return DataLoader(cast("Dataset[Any]", entries), size, collate_fn=read, generator=torch.Generator())


def read_batch(data: ImageData, split: str, indices: Sequence[int]) -> Batch:
    """Read the samples of a batch at once, and their origins where the evaluation needs them."""
    inputs, targets = data.read(split, indices)
    targets = targets.float() if data.moves_targets else targets
    origins = data.origins(split, indices)
    return (inputs, targets) if origins is None else BatchOf(inputs, targets, origins)


@dataclass
class Augmented:
    """Augment batches randomly, with the same result for the same seed whatever the batch size.

    One stream of random numbers goes through the samples in their order, in the calling thread. The result thus does
    not depend on how many threads read the samples.

    Args:
        batches: iterable of (inputs, targets); it can be iterated repeatedly.
        transform: the random changes of a sample; see :func:`changes`.
        seed: seed of the epoch.
        with_targets: whether the targets are images, to which geometric changes apply as well.
        scaled: whether inputs are in [0, 1], and are clipped to it after the changes.
    """

    batches: Batches
    transform: Compose
    seed: int
    with_targets: bool
    scaled: bool = True

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        self.transform.set_random_state(seed=self.seed % 2**32)
        for inputs, targets in self.batches:
            items = [self.transform({"image": a, "label": b}) for a, b in zip(inputs, targets, strict=True)]
            images, labels = (torch.stack([plain(item[key]) for item in items]) for key in ("image", "label"))
            yield images.clamp_(0.0, 1.0) if self.scaled else images, labels if self.with_targets else targets


class Blur(Randomizable, Transform):
    """Blur every image by a Gaussian kernel, 5 pixels wide and 9 high, with a new sigma in [0.1, 5] each time.

    Source:
        Fed-MAS's code: torchvision's ``GaussianBlur((5, 9), (0.1, 5))``, edges mirrored.
    """

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        image = torch.as_tensor(item["image"])
        sigma = torch.tensor(self.R.uniform(0.1, 5.0))
        kernels = [gaussian_1d(sigma, tail / float(sigma), approx="sampled", normalize=True) for tail in (4, 2)]
        return {**item, "image": separable_filtering(image[None], [k.to(image) for k in kernels], mode="reflect")[0]}


class Jitter(Randomizable, Transform):
    """Change brightness, contrast, saturation and hue of every image at random, in a new order each time.

    Brightness, contrast and saturation are multiplied by a factor in [0.75, 1.25] each; the hue is turned by up to 0.01
    of a turn. Values stay in [0, 1]. A grey image has neither saturation nor hue.

    Source:
        Fed-MAS's code for its ISIC set: torchvision's ``ColorJitter(0.25, 0.25, 0.25, 0.01)``, without its rounding to
        256 levels.
    """

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        image = torch.as_tensor(item["image"])
        factors, turn = self.R.uniform(0.75, 1.25, 3), self.R.uniform(-0.01, 0.01)
        for kind in self.R.permutation(4):
            if kind == 3:
                image = _turn_hues(image, turn) if len(image) == 3 else image
            else:
                grey = torch.tensordot(torch.tensor(LUMINANCE).to(image), image, 1) if len(image) == 3 else image[0]
                plain = (torch.zeros_like(grey), grey.mean(), grey)[kind]  # image without the property
                image = (plain + (image - plain) * factors[kind]).clamp(0.0, 1.0)
        return {**item, "image": image}


def _turn_hues(image: torch.Tensor, turn: float) -> torch.Tensor:
    """Turn all hues of an image (3, height, width) by a share of a full turn.

    Value and chroma (HSV) do not change.
    """
    top, chroma = image.amax(0), image.amax(0) - image.amin(0)
    red, green, blue = image / chroma.clamp_min(1e-12)
    sixth = torch.where(red >= torch.maximum(green, blue), green - blue, torch.where(
        green >= blue, blue - red + 2, red - green + 4
    ))  # fmt: skip
    away = (torch.tensor([5.0, 3.0, 1.0]).to(image)[:, None, None] + sixth + 6 * turn) % 6
    return top - chroma * torch.minimum(away, 4 - away).clamp(0.0, 1.0)


def changes(names: Sequence[str], *, size: Sequence[int], with_targets: bool) -> Compose:
    """Return a transform of one sample that applies the named random changes in their fixed order.

    Args:
        names: names of changes. FairFlare's own: ``"flip"`` (left and right, half of the images), ``"affine"`` (half of
            the images: turned by up to 9.7 degrees, up to 10 % larger or smaller), ``"intensity"`` (gamma and scale,
            each for three in ten images). As in the papers' code: ``"flip_vertical"`` (half of the images), ``"blur"``
            (:class:`Blur`), ``"rotate"`` (every image by up to 10 degrees), ``"shift"`` (every image by up to 2 % of
            its size), ``"one_move"`` (one change for every image: 0.95 to 1.2 times as large, moved by up to 5 % of its
            width to a side, or turned by up to 45 degrees), and ``"jitter"`` (:class:`Jitter`). Empty pixels become
            black in ``"rotate"``, ``"shift"`` and ``"one_move"``.
        size: height and width of the images.
        with_targets: whether geometric changes apply to the targets, too.
    """
    moved = ("image", "label") if with_targets else ("image",)
    each: Any = {"keys": moved, "prob": 1.0, "mode": "nearest"}
    black: Any = {**each, "padding_mode": "zeros", "cache_grid": False}
    steps: dict[tuple[str, ...], list[Any]] = {
        ("flip",): [RandFlipd(keys=moved, prob=0.5, spatial_axis=1 if len(size) == 2 else 0)],
        ("flip_vertical",): [RandFlipd(keys=moved, prob=0.5, spatial_axis=0)],
        ("blur",): [Blur()],
        ("rotate", "shift"): [
            RandAffined(
                rotate_range=math.radians(10) if "rotate" in names else None,
                translate_range=[0.02 * side for side in size] if "shift" in names else None, **black,
            )
        ],
        ("one_move",): [
            OneOf([
                RandZoomd(min_zoom=0.95, max_zoom=1.2, padding_mode="constant", **each),
                RandAffined(translate_range=[0.0, 0.05 * size[1]], **black),
                RandAffined(rotate_range=math.radians(45), **black),
            ])
        ],
        ("jitter",): [Jitter()],
        ("affine",): [
            RandAffined(
                keys=moved, prob=0.5, rotate_range=0.17, scale_range=(0.1, 0.1), padding_mode="border",
                mode=("bilinear", "nearest") if with_targets else ("bilinear",), cache_grid=False,
            )
        ],
        ("intensity",): [
            RandAdjustContrastd(keys="image", prob=0.3, gamma=(0.8, 1.25)),
            RandScaleIntensityd(keys="image", prob=0.3, factors=0.1),
        ],
    }  # fmt: skip
    return Compose([step for any_of, transforms in steps.items() if {*any_of} & {*names} for step in transforms])
