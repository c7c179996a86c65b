r"""A low-rank adapter whose singular values are those of a person's group: :math:`y = W x + s\, B\,(d_g \odot A x)`.

W is a frozen linear layer or convolution, A is (r, n), B is (m, r), and d_g has the r values of group g. Which group
each image of a batch is of is set from outside (:func:`people`); until it is, all groups count alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Values(nn.Module):
    """Hold one group's singular values, (r,), as a layer of their own, so that they have own weights in the average."""

    weight: nn.Parameter

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


class GroupAdapter(nn.Module):
    r"""Wrap a frozen layer and add a low-rank adapter with singular values by group to its output.

    An image of group g is given :math:`d_g = \lambda S_g + \frac{1 - \lambda}{G - 1} \sum_{h \ne g} S_h`; one whose
    group is not known the mean of all S.

    Args:
        layer: linear layer, or convolution without groups; its weights stay unchanged.
        name: name of the layer, for error messages.
        groups: number of groups G, ``>= 2``.
        rank: rank r of the adapter, an even number.
        alpha: numerator of the scale s = alpha / rank.
        own: lambda, weight of the group's own singular values, in (0, 1].

    Source:
        Li et al., "FairFedMed", IEEE TMI 2025; start, lambda and the mean for an unknown group as in the authors' code.
    """

    def __init__(self, layer: nn.Module, name: str, groups: int, rank: int, alpha: float, own: float) -> None:
        super().__init__()
        self.base_layer, self.name = layer, name
        self.fair_A, self.fair_B = _factors(layer, rank)
        nn.init.zeros_(self.fair_A.weight)
        nn.init.normal_(self.fair_B.weight)
        self.fair_S = nn.ModuleList(Values(start_of(group, groups, rank)) for group in range(groups))
        self.scale, self.own = alpha / rank, own
        self.numbers: torch.Tensor | None = None

    @property
    def values(self) -> list[nn.Parameter]:
        """Return the singular values S, one parameter for each group."""
        return [values.weight for values in self.fair_S if isinstance(values, Values)]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        low = self.fair_A(inputs)
        values = self._values(inputs).to(low.dtype)
        # The channels are dimension 1 of a convolution's output and the last dimension of a linear layer's.
        between = (1,) * (low.ndim - 2)
        shape = (*between, values.shape[1]) if isinstance(self.base_layer, nn.Linear) else (values.shape[1], *between)
        found: torch.Tensor = self.base_layer(inputs) + self.scale * self.fair_B(low * values.view(len(values), *shape))
        return found

    def _values(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (images, r), or (1, r) for all of them."""
        table = torch.stack(tuple(self.values))
        mean = table.mean(0, keepdim=True)
        if self.numbers is None:
            return mean
        others = (table.sum(0, keepdim=True) - table) / (len(table) - 1)
        by_group = torch.cat([self.own * table + (1 - self.own) * others, mean])
        if len(self.numbers) not in (1, len(inputs)):
            raise ValueError(
                f"adapters=fair_lora: layer {self.name!r} is given {len(inputs)} rows for {len(self.numbers)} images; "
                "take layers whose first dimension is the image (adapters.targets)"
            )
        return by_group[self.numbers.to(table.device)]


def start_of(group: int, groups: int, rank: int) -> torch.Tensor:
    """Return the values that a group starts with, (rank,).

    A half that is the same for all, and one that is turned by group.

    >>> [round(value, 2) for value in start_of(1, 2, 4).tolist()]
    [0.5, 0.1, 0.02, 0.1]
    """
    half = torch.linspace(0.5, 0.1, rank // 2)
    return torch.cat([half, 0.2 * half.roll(-group * (rank // 2 // groups))])


def _factors(layer: nn.Module, rank: int) -> tuple[Any, Any]:
    """Return A, a layer like the given one with ``rank`` outputs, and B, which works on each place by itself."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    form = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    kind = type(layer)
    return kind(layer.in_channels, rank, bias=False, **form), kind(rank, layer.out_channels, 1, bias=False)


def adapters_of(model: nn.Module) -> list[GroupAdapter]:
    """Return the group adapters that a network has."""
    return [module for module in model.modules() if isinstance(module, GroupAdapter)]


@contextmanager
def people(model: nn.Module, numbers: Sequence[int]) -> Iterator[None]:
    """Tell a network's adapters the group of each image in the batches that it is given, inside the context.

    Args:
        model: the network.
        numbers: group of each image in a batch, or one for all; G, the number of groups: the group is not known.
    """
    adapters = adapters_of(model)
    for adapter in adapters:
        adapter.numbers = torch.as_tensor(numbers, dtype=torch.long)
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.numbers = None
