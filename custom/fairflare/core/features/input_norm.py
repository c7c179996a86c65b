"""Define a layer that normalises a network's input by the site's statistics, or in training by a random site's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import nn

NAME = "input_norm"  # name of the module in a network
FLAT = 1 / 255  # a deviation below one grey level of an 8-bit image is no usable scale, and counts as 1


class InputNorm(nn.modules.batchnorm._BatchNorm):
    """Normalise each image by channel, with means and deviations of a whole site; no training changes them.

    It is a batch norm without weights, whose statistics stay at a site.

    Args:
        channels: number of channels of the images.

    Attributes:
        sites: means and deviations of sites, (sites, 2, channels), from which training draws for each image; ``None``:
            the layer's own are used, as always in evaluation.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels, affine=False)
        self.sites: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        statistics = torch.stack([self.running_mean, self.running_var.sqrt()])[None]
        if self.training and self.sites is not None:
            statistics = self.sites[torch.randint(len(self.sites), (len(images),))].to(statistics)
        mean, deviation = statistics.reshape(len(statistics), 2, -1, *[1] * (images.ndim - 2)).unbind(1)
        return (images - mean) / torch.where(deviation < FLAT, 1.0, deviation)


def put_before(model: nn.Module) -> nn.Module:
    """Put an :class:`InputNorm` before a network, whose tensors keep their names.

    Raises:
        ValueError: the network has no convolution, which would tell the number of channels.
    """
    first = next((m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)), None)
    if first is None:
        raise ValueError("adapters=fed_rdn needs a network that begins with a convolution; choose another network")
    model.add_module(NAME, InputNorm(first.in_channels))
    model.register_forward_pre_hook(_normalise_input)
    return model


def _normalise_input(model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return model.get_submodule(NAME)(args[0]), *args[1:]


def pool_pixels(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return mean and variance of all pixels of some images, by channel, in float64, or ``None`` if there is no image.

    Pixels that targets of the images' size mark as not counted (-1 for every structure), such as padding, are left out.
    """
    sums: list[torch.Tensor] = []
    for images, targets in batches:
        pixels = images.double().movedim(1, 0)
        if targets.ndim == images.ndim:
            pixels = pixels[:, (targets >= 0).any(1)]
        pixels = pixels.flatten(1)
        sums.append(torch.stack([torch.ones_like(pixels).sum(1), pixels.sum(1), pixels.square().sum(1)]))
    if not any(bool(count[0]) for count, _, _ in sums):
        return None
    count, total, squares = reduce(torch.add, sums)
    return total / count, (squares / count - (total / count).square()).clamp_min(0)
