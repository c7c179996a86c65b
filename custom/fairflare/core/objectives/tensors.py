"""Compute with a list of tensors (parameters, gradients) as with one long vector.

The tensors of a list may differ in device and type, and are not copied together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fairflare.base.checks import group_by_key

if TYPE_CHECKING:
    from torch import Tensor


def _alike(*lists: Sequence[Tensor]) -> list[list[list[Tensor]]]:
    """Group the tensors of parallel lists by device and dtype, without which PyTorch's fused functions are slow."""
    rows = zip(*lists, strict=True)
    groups = group_by_key((tuple((tensor.device, tensor.dtype) for tensor in row), row) for row in rows)
    return [[list(column) for column in zip(*group, strict=True)] for group in groups.values()]


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the L2 norm of a list of tensors, summed in at least float32 inside a tensor and float64 between them."""
    squares = 0.0
    for (group,) in _alike(tensors):
        wide = torch.promote_types(group[0].dtype, torch.float32)
        norms = torch.stack(list(torch._foreach_norm([t.detach() for t in group], 2, dtype=wide)))
        squares += float(norms.cpu().double().square().sum())
    return math.sqrt(squares)


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the inner product of two lists of tensors, taken as vectors; the precision is that of :func:`norm`."""
    total = 0.0
    for a, b in _alike(left, right):
        wide = torch.promote_types(a[0].dtype, torch.float32)
        dots = [torch.dot(x.reshape(-1).to(wide), y.reshape(-1).to(wide)) for x, y in zip(a, b, strict=True)]
        total += float(torch.stack(dots).cpu().double().sum())
    return total


def add(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> None:
    """Add ``factor * others`` to a list of tensors, tensor by tensor, in place."""
    for a, b in _alike(tensors, others):
        torch._foreach_add_(a, b, alpha=factor)


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each of a list of tensors by ``factor``, in place."""
    for (group,) in _alike(tensors):
        torch._foreach_mul_(group, factor)


def copy(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy ``values`` into ``tensors``, in place, bit by bit if the types are equal."""
    for a, b in _alike(tensors, values):
        torch._foreach_copy_(a, b)
