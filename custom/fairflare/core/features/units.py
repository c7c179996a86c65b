"""Which layers of a network belong together: a convolution with the norm behind it, found by running it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.task import evaluating
from fairflare.core.features.layers import layers_of, parameter_layers

if TYPE_CHECKING:
    from torch import nn


def execution_order(model: nn.Module, inputs: torch.Tensor, layers: Iterable[str]) -> list[str]:
    """Return the layers in the order in which a forward pass begins them; those that it does not reach are not there.

    Args:
        model: is run once in evaluation mode, without gradients, and left as it was found.
        inputs: a batch, on the model's device.
        layers: names of modules of the model. One that runs several times stands where it ran first.
    """
    order: dict[str, None] = {}

    def begins(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        order.setdefault(name)

    with ExitStack() as stack, evaluating(model):
        for name in layers:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(partial(begins, name)).remove)
        model(inputs)
    return list(order)


def units(model: nn.Module, inputs: torch.Tensor) -> dict[str, str]:
    """Return the unit of every layer: what is to be averaged with the same weights.

    A layer that mixes features (one of its tensors has two dimensions or more, and it is no norm: convolution, linear
    map) begins a unit; a layer that only scales and shifts them (a norm, a PReLU) belongs to the one that ran just
    before it, whose outputs its running statistics describe. A module that has tensors of its own *and* runs other
    layers inside stands alone, and so does a norm in front of everything. A layer that never runs by itself (the output
    map of torch's attention) belongs to the unit of the layer that it is a part of; where there is none it stands
    alone.

    Args:
        model, inputs: as for :func:`execution_order`.

    Returns:
        ``{layer: first layer of its unit}``, layers in state-dict order, see :func:`parameter_layers`.

    Source:
        Ours. A layer-wise mix that takes a norm's statistics from other sites than the convolution before it describes
        features that no model has.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 1))
        >>> units(net, torch.zeros(1, 1, 8, 8))
        {'0': '0', '1': '0', '3': '3'}
    """
    layers = parameter_layers(model)
    order = execution_order(model, inputs, layers)
    enclosing = {name for name in order if any(_inside(other, name) for other in order)}
    mixes = _mixing(model, layers)
    found: dict[str, str] = {}
    before: str | None = None
    for name in order:
        if name in enclosing:
            found[name] = name
            continue
        if before is None or name in mixes:
            before = name
        found[name] = before
    for name in layers:
        if name not in found:
            owners = [other for other in order if _inside(name, other)]
            found[name] = found[max(owners, key=len)] if owners else name
    return {name: found[name] for name in layers}


def _inside(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))


def _mixing(model: nn.Module, layers: dict[str, nn.Module]) -> set[str]:
    """Return the layers that mix features, found by the shapes of the tensors that each layer owns.

    Names do not tell: a parametrized weight is no tensor with the name ``weight``.
    """
    state = model.state_dict()
    owner = layers_of(state)
    # Norm layers: their scale may have more than one dimension, but they do not mix features.
    norms = (torch.nn.modules.batchnorm._NormBase, torch.nn.GroupNorm, torch.nn.LayerNorm)
    return {
        owner[key] for key, tensor in state.items() if tensor.ndim > 1 and not isinstance(layers[owner[key]], norms)
    }
