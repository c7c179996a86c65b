"""Define the layer that a tensor of a model belongs to, by one rule for sites and server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


_INNER = re.compile(r"\.(parametrizations\.|lora_[AB]\.[^.]+\.weight$|base_layer\.(weight|bias)$)")


def layer_of(tensor_name: str) -> str:
    """Return the name of the layer that holds a tensor.

    It is the tensor's name without its last component. A parametrized tensor
    (``torch.nn.utils.parametrizations``: weight norm, spectral norm) belongs to the module that it is the weight of,
    as does all that the parametrization keeps for itself; and so do the factors of a low-rank adapter and the frozen
    layer inside it (``peft``).

    Args:
        tensor_name: key of a state dict.

    Returns:
        Name of the module; ``""`` is the model itself.

    >>> layer_of("down.conv.weight"), layer_of("0.parametrizations.weight.original0"), layer_of("scale")
    ('down.conv', '0', '')
    >>> layer_of("attn.qkv.base_layer.weight"), layer_of("attn.qkv.lora_A.default.weight")
    ('attn.qkv', 'attn.qkv')
    """
    inner = _INNER.search(f".{tensor_name}")
    return tensor_name[: max(inner.start() - 1, 0)] if inner else tensor_name.rpartition(".")[0]


def layers_of(names: Iterable[str]) -> dict[str, str]:
    """Return ``{tensor name: layer name}``, in the order given (Fed-LWR spec, 2.1)."""
    return {name: layer_of(name) for name in names}


def parameter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model: every module with parameters or (persistent) buffers of its own.

    Returns:
        Modules by name, in state-dict order. A module registered under two names has two entries, as in the state dict.

    Source:
        Fed-LWR counts layers m = 1..M without defining them; one layer for each such module is our reading.
    """
    return {name: model.get_submodule(name) for name in dict.fromkeys(layers_of(model.state_dict()).values())}


#: Last component of the tensor names of a batch norm's running statistics.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_statistic(tensor_name: str) -> bool:
    """Return whether a tensor is a running statistic of a norm, judged by its name alone."""
    return tensor_name.rpartition(".")[2] in STATISTICS
