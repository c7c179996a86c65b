"""Compute the Dice of images, at the network's or their own size, and of volumes whose slices are images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from monai.metrics.meandice import compute_dice

from fairflare.tasks.placing import back_in_place
from fairflare.tasks.scores.mask_metrics import MaskMetrics

HALF = 0.5  # share of a pixel's area above which the pixel belongs to a structure


@dataclass(frozen=True)
class Origin:
    """Describe an image of a batch as it was before it was resized to the network's size.

    Attributes:
        volume: name of the volume that the image is a slice or a patch of; ``None`` if it is neither.
        whole: function that reads the image's targets, (structures, height, width), at the image's own size; ``None``:
            the evaluation is at the network's size.
        resize: the way in which the image was resized: ``"stretch"``, ``"pad"`` or ``"crop"``.
        spacing: size of a pixel in mm along each axis; ``None`` if the size is not known, and lengths are in pixels.
    """

    volume: str | None
    whole: Callable[[], torch.Tensor] | None
    resize: str
    spacing: tuple[float, ...] | None = None


NOWHERE = Origin(None, None, "stretch")  # origin of an image about which nothing is known


class BatchOf(tuple[torch.Tensor, torch.Tensor]):
    """Hold a batch (inputs, targets) together with further facts about its images.

    Attributes:
        origins: the origin of each image; ``None`` if the evaluation does not need origins.
        items: for each image, the dict that a MONAI bundle's transforms returned; the bundle's postprocessing may need
            its entries.
    """

    origins: Sequence[Origin] | None
    items: Sequence[Mapping[str, Any]]

    def __new__(
        cls, inputs: torch.Tensor, targets: torch.Tensor, origins: Sequence[Origin] | None = None,
        items: Sequence[Mapping[str, Any]] = (),
    ) -> BatchOf:  # fmt: skip
        made = super().__new__(cls, (inputs, targets))
        made.origins, made.items = origins, items
        return made


class DiceScores:
    """Collect the Dice of predicted masks, batch by batch; pixels whose target is negative do not count.

    Args:
        more: further metrics, which get every image at the size at which Dice is computed; ``None`` for no others.
        choose: function that returns the channels of the structures that count, of (n, structures, ...); default: all.

    Attributes:
        images: Dice of each image and structure, (images, structures) float64, in the order in which they were added.
    """

    def __init__(
        self, more: MaskMetrics | None = None, choose: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    ) -> None:
        self.more, self.choose = more, choose
        self._scores: list[torch.Tensor] = []
        #: By volume, or number of an image that is no slice: pixels common to both masks, and sum.
        self._overlap: dict[str | int, torch.Tensor] = {}

    def add(self, found: torch.Tensor, targets: torch.Tensor, origins: Sequence[Origin] | None) -> None:
        """Add a batch of predicted masks and targets.

        Args:
            found: predicted masks, (n, structures, height, width) bool.
            targets: targets of the same shape.
            origins: the origin of each image; ``None`` if the origins are not known.
        """
        if origins is None or all(origin.whole is None for origin in origins):
            self._add(found, targets, [NOWHERE] * len(found) if origins is None else origins)
        else:
            wholes = (origin.whole() for origin in origins if origin.whole is not None)
            for image, whole, origin in zip(found.cpu(), wholes, origins, strict=True):
                full_size = back_in_place(image.to(torch.uint8), (whole.shape[1], whole.shape[2]), origin.resize)
                self._add(full_size[None] > 0, whole[None], [origin])

    def _add(self, found: torch.Tensor, targets: torch.Tensor, origins: Sequence[Origin]) -> None:
        found, targets = self.choose(found), self.choose(targets)
        found, truth = found & (targets >= 0), targets > HALF
        if self.more is not None:
            for image in zip(found, truth, targets >= 0, origins, strict=True):
                self.more.add(*image[:3], image[3].spacing)
        common, in_found, in_truth = (mask.flatten(2).sum(2) for mask in (found & truth, found, truth))
        overlaps = torch.stack([common, in_found + in_truth], 1).to("cpu", torch.float64)
        for number, (origin, overlap) in enumerate(zip(origins, overlaps, strict=True), sum(map(len, self._scores))):
            key = number if origin.volume is None else origin.volume
            self._overlap[key] = self._overlap[key] + overlap if key in self._overlap else overlap
        self._scores.append(compute_dice(found, truth, ignore_empty=False).to("cpu", torch.float64))

    @property
    def images(self) -> torch.Tensor:
        return torch.cat(self._scores)

    @property
    def volumes(self) -> torch.Tensor | None:
        """Return the Dice of each volume and structure, (volumes, structures); 1 if both masks are empty.

        An image that is no slice counts as a volume of one slice. The result is ``None`` if no image is a slice.
        """
        if not any(isinstance(key, str) for key in self._overlap):
            return None
        common, both = torch.stack(list(self._overlap.values())).unbind(1)
        return torch.where(both > 0, 2 * common / both.clamp(min=1), torch.ones_like(both))
