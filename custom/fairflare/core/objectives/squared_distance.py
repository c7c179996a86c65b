"""Compute the squared distance between parameters and reference parameters, with an explicit, faster gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class SquaredDistance(torch.autograd.Function):
    r"""Compute :math:`\sum_i |a_i - b_i|^2` of tensors ``(*a, *b)`` as one node of the autograd graph.

    One node takes half the time of a node for each operation, and gives a gradient of a with the same bits, which can
    be differentiated again; b is constant. Neither a nor b may be changed in place before the backward pass (PyTorch
    then raises an error).
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        differences = _differences(tensors)
        ctx.save_for_backward(*tensors, *differences)
        return torch.stack([torch.linalg.vector_norm(d).to(differences[0]) for d in differences]).square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        third = len(saved) // 3
        # create_graph=True needs differences with a gradient graph; the saved ones of the forward pass have none.
        differences = _differences(saved[: 2 * third]) if torch.is_grad_enabled() else saved[2 * third :]
        return *(2 * grads[0].to(d) * d for d in differences), *[None] * third


def _differences(tensors: Sequence[Tensor]) -> list[Tensor]:
    middle = len(tensors) // 2
    return [a - b for a, b in zip(tensors[:middle], tensors[middle:], strict=True)]
