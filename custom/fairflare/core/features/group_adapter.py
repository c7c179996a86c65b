r"""Define a low-rank adapter with singular values for each group of people.

The adapted layer computes :math:`y = W x + s\, B\,(d_g \odot A x)`. W is a frozen linear layer or convolution, A is (r,
n), B is (m, r), and d_g has the r values of group g. The group of each image of a batch is set from outside
(:func:`people`); until then, the mean of all groups' values is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fairflare.base.checks import refuse


class Values(nn.Module):
    """Store one group's singular values, (r,), as a separate layer, which can have its own aggregation weights."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


class GroupAdapter(nn.Module):
    r"""Wrap a frozen layer and add a low-rank adapter with singular values by group to its output.

    Each group g has trained singular values S_g. The adapter uses for an image of group g
    :math:`d_g = \lambda S_g + \frac{1 - \lambda}{G - 1} \sum_{h \ne g} S_h`, and for an image of an unknown group the
    mean of all S_g.

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
        return torch.add(self.base_layer(inputs), self.scale * self.fair_B(low * values.view(len(values), *shape)))

    def merge(self) -> None:
        """Add the adapter of an image of unknown group to the layer's weights."""
        weight, mean = self.base_layer.get_parameter("weight"), torch.stack(tuple(self.values)).mean(0)
        change = (self.fair_B.weight.flatten(1) * mean) @ self.fair_A.weight.flatten(1)
        weight.data += self.scale * change.view_as(weight)

    def _values(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the singular values for each image, (images, r), or the same for all images, (1, r)."""
        table = torch.stack(tuple(self.values))
        mean = table.mean(0, keepdim=True)
        if self.numbers is None:
            return mean
        others = (table.sum(0, keepdim=True) - table) / (len(table) - 1)
        by_group = torch.cat([self.own * table + (1 - self.own) * others, mean])
        refuse({
            f"adapters=fair_lora: layer {self.name!r} is given {len(inputs)} rows for {len(self.numbers)} images; take "
            "layers whose first dimension is the image (adapters.targets)": len(self.numbers) not in (1, len(inputs)),
        })  # fmt: skip
        return by_group[self.numbers.to(table.device)]


def start_of(group: int, groups: int, rank: int) -> torch.Tensor:
    """Return the initial singular values of a group, (rank,).

    The first half is the same for all groups; the second half is rotated by a different number of places for each
    group.

    >>> [round(value, 2) for value in start_of(1, 2, 4).tolist()]
    [0.5, 0.1, 0.02, 0.1]
    """
    first = torch.linspace(0.5, 0.1, rank // 2)
    return torch.cat([first, 0.2 * first.roll(-group * (rank // 2 // groups))])


def _factors(layer: nn.Module, rank: int) -> tuple[Any, Any]:
    """Return layer A, like the given layer with ``rank`` outputs, and layer B, which maps each position by itself."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    form = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    kind = type(layer)
    return kind(layer.in_channels, rank, bias=False, **form), kind(rank, layer.out_channels, 1, bias=False)


def adapters_of(model: nn.Module) -> list[GroupAdapter]:
    """Return all group adapters of a network."""
    return [module for module in model.modules() if isinstance(module, GroupAdapter)]


@contextmanager
def people(model: nn.Module, numbers: Sequence[int]) -> Iterator[None]:
    """Set the group of each image of a batch in the network's group adapters, inside the context.

    Args:
        model: network with or without group adapters.
        numbers: group index of each image in a batch, or one index for all images; the number of groups G stands for an
            unknown group.
    """
    adapters = adapters_of(model)
    for adapter in adapters:
        adapter.numbers = torch.as_tensor(numbers, dtype=torch.long)
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.numbers = None
