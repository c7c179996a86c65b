"""Resize images and masks to the network's size, and bring predictions back to the image's own size.

``"stretch"`` resizes both sides to the network's lengths; ``"pad"`` keeps the proportions and shows the whole image,
with an edge around it; ``"crop"`` keeps the proportions and fills the picture, so that the longer side's ends are cut
off.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import interpolate, pad

Size = tuple[int, int]  # height, width
NOT_COUNTED = -1  # value in targets of a pixel that does not count in loss and metrics


def plain(value: Any) -> torch.Tensor:
    """Convert a value, such as MONAI's ``MetaTensor``, to a plain tensor, whose gradients carry no image header."""
    return torch.as_tensor(value).as_subclass(torch.Tensor)


def inner_size(image_size: Size, size: Size, how: str) -> Size:
    """Return the size to which the whole image is resized before it is padded or cut to ``size``."""
    if how == "stretch":
        return size
    factors = [new / old for new, old in zip(size, image_size, strict=True)]
    factor = min(factors) if how == "pad" else max(factors)
    height, width = (max(1, round(old * factor)) for old in image_size)
    return height, width


def centre(pictures: torch.Tensor, size: Size, fill: float = 0.0) -> torch.Tensor:
    """Cut or pad pictures (..., height, width) around their middle; a call with the old size puts pixels back."""
    edges: list[int] = []
    for new, old in zip(size[::-1], (pictures.shape[-1], pictures.shape[-2]), strict=True):
        before = (new - old) // 2 if new >= old else -((old - new) // 2)
        edges += [before, new - old - before]
    return pad(pictures, edges, value=fill) if any(edges) else pictures


def smooth(pictures: torch.Tensor, size: Size, how: str = "stretch") -> torch.Tensor:
    """Resize pictures (n, channels, height, width) float32 to the network's size, bilinearly.

    A low-pass filter is applied if a picture shrinks; an edge around the image is 0.
    """
    inner = inner_size((pictures.shape[2], pictures.shape[3]), size, how)
    if tuple(pictures.shape[2:]) != inner and len(pictures):
        pictures = interpolate(pictures, inner, mode="bilinear", antialias=True, align_corners=False)
    return centre(pictures, size).contiguous()


def nearest(pictures: torch.Tensor, size: Size) -> torch.Tensor:
    """Resize pictures (channels, height, width) by taking the pixel under each new pixel's centre."""
    return interpolate(pictures[None].float(), size, mode="nearest-exact")[0].to(pictures.dtype)


def masks_placed(masks: torch.Tensor, size: Size, how: str, by: str) -> torch.Tensor:
    """Resize masks to the network's size; pixels outside the image get ``NOT_COUNTED``.

    Args:
        masks: (structures, height, width) with the values 0, 1 or ``NOT_COUNTED``.
        size: height and width of the network's inputs.
        how: ``"stretch"``, ``"pad"`` or ``"crop"``.
        by: ``"nearest"``: the nearest pixel's value; ``"area"``: the share of the new pixel's counted area that the
            structure covers. A new pixel of which less than half counts gets ``NOT_COUNTED``.

    Returns:
        masks of the network's size, float32 for ``"area"``, int8 for ``"pad"``, else in the type of ``masks``.
    """
    if how == "pad":  # pixels of the edge get -1, for which the type needs a sign
        masks = masks.to(torch.int8)
    inner = inner_size((masks.shape[1], masks.shape[2]), size, how)
    return centre(nearest(masks, inner) if by == "nearest" else _shares(masks, inner), size, NOT_COUNTED)


def _shares(masks: torch.Tensor, size: Size) -> torch.Tensor:
    rows, columns = overlaps(masks.shape[1], size[0]), overlaps(masks.shape[2], size[1]).T
    counts = (masks != NOT_COUNTED).float()
    share = rows @ counts @ columns
    covered = rows @ (masks.float() * counts) @ columns
    return torch.where(share < 0.5, torch.tensor(float(NOT_COUNTED)), covered / share.clamp(min=1e-6)).clamp(max=1.0)


@lru_cache(maxsize=64)
def overlaps(old: int, new: int) -> torch.Tensor:
    """Return the share of each new pixel's length that each old pixel covers, (new, old), along one axis."""
    edges = torch.arange(new + 1, dtype=torch.float64) * old / new
    places = torch.arange(old, dtype=torch.float64)
    covered = torch.minimum(edges[1:, None], places + 1) - torch.maximum(edges[:-1, None], places)
    return (covered.clamp(min=0.0) * new / old).float()


def back_in_place(pictures: torch.Tensor, image_size: Size, how: str) -> torch.Tensor:
    """Resize the network's predictions to the image's own size, by the nearest pixel.

    Args:
        pictures: predictions (channels, height, width); 0 means "nothing found", and cut-off pixels get 0.
        image_size: height and width of the image itself.
        how: the way in which the image was resized for the network: ``"stretch"``, ``"pad"`` or ``"crop"``.
    """
    return nearest(centre(pictures, inner_size(image_size, (pictures.shape[1], pictures.shape[2]), how)), image_size)
