"""Where a layer's output has the images: first, in another dimension, or in several rows each (windows of tokens)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SAME = 1e-3  # relative difference of one image's features alone and beside another one: rounding
SEED = 0


@dataclass(frozen=True)
class Layout:
    """Of an output in which the images are not simply the first dimension.

    Args:
        dim: where the images are.
        rows: so many of each image stand there.
        together: the rows of one image follow each other (image by image); else row by row, with all images in each.
    """

    dim: int
    rows: int
    together: bool

    def by_image(self, output: Tensor, images: int) -> Tensor:
        """The output with the images in front, (n, ...); as it is where its shape is another one."""
        if output.ndim <= self.dim or output.shape[self.dim] != self.rows * images:
            return output
        sizes = (images, self.rows) if self.together else (self.rows, images)
        return torch.movedim(output.unflatten(self.dim, sizes), self.dim if self.together else self.dim + 1, 0)


def first_tensor(output: Any) -> Tensor | None:
    """What counts as a layer's output: itself, or the first tensor in it."""
    if isinstance(output, (tuple, list)):
        output = next((part for part in output if isinstance(part, Tensor)), None)
    return output if isinstance(output, Tensor) else None


def layouts(model: nn.Module, image: Tensor, layers: Mapping[str, nn.Module]) -> dict[str, Layout]:
    """How the layers lay out images, for those that do not have them first; found by trying.

    The image runs alone, and (where a layer has not one row for it) beside another one, made up: what has doubled is
    the dimension of the images, and what is as before belongs to the first. So windows of tokens (B * windows, tokens,
    channels) and sequence-first features (tokens, B, channels) are told apart whatever their sizes are.

    Args:
        model: in evaluation mode, treats images apart from each other (no batch norm without running statistics).
        image: (1, ...), on the model's device.
        layers: of the model, by name.

    Returns:
        Layout by name. Not there: layers with one row for the one image, those whose output depends on no image or on
        both, and those without a tensor.
    """
    alone = _outputs(model, image, layers)
    odd = [name for name, output in alone.items() if output.shape[:1] != (1,)]
    if not odd:
        return {}
    beside = _outputs(model, torch.cat([image, _another(image)]), {name: layers[name] for name in odd})
    found = {name: _layout(alone[name], beside[name]) for name in odd if name in beside}
    return {name: layout for name, layout in found.items() if layout is not None}


def _outputs(model: nn.Module, images: Tensor, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Of the last call of each layer."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            found[name] = tensor.clone()  # a later layer may work in place

    with ExitStack() as stack, torch.no_grad():
        for name, module in layers.items():
            stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        model(images)
    return found


def _another(image: Tensor) -> Tensor:
    if not image.is_floating_point():
        return image.flip(-1)
    noise = torch.rand(image.shape, generator=torch.Generator().manual_seed(SEED))
    return noise.to(image)


def _layout(alone: Tensor, beside: Tensor) -> Layout | None:
    if alone.ndim != beside.ndim:
        return None
    grown = [dim for dim in range(alone.ndim) if alone.shape[dim] != beside.shape[dim]]
    if len(grown) != 1 or beside.shape[grown[0]] != 2 * alone.shape[grown[0]]:
        return None
    rows = alone.shape[grown[0]]
    tried = [Layout(grown[0], rows, together) for together in (True, False)]
    away = [float((layout.by_image(beside, 2)[0].double() - alone.double()).norm()) for layout in tried]
    best = min(range(len(tried)), key=lambda i: away[i])
    return tried[best] if away[best] <= SAME * float(alone.double().norm()) else None
