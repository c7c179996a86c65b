"""Define the layer that a tensor of a model belongs to, by one rule for sites and server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fairflare.base.checks import group_by_key

if TYPE_CHECKING:
    import torch
    from torch import nn


_INNER = re.compile(r"\.(parametrizations\.|lora_[AB]\.[^.]+\.weight$|base_layer\.(weight|bias)$)")


def layer_of(tensor_name: str) -> str:
    """Return the name of the layer that holds a tensor.

    It is the tensor's name without its last component. A parametrized tensor
    (``torch.nn.utils.parametrizations``: weight norm, spectral norm), and any other tensor of the parametrization,
    belongs to the module that has the weight; so do the factors of a low-rank adapter and the frozen layer inside it
    (``peft``).

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


def output_tensors(model: nn.Module, inputs: torch.Tensor, rows: int) -> list[str]:
    """Return the names of the parameters (weight, bias) that have a row for each of a network's outputs.

    They belong to the linear layer or convolution that runs once and whose output, in evaluation mode, is the network's
    output itself. The list is empty if there is no such layer with ``rows`` outputs.

    Args:
        model: network; on the meta device nothing is computed.
        inputs: input of the network, (1, ...), on the same device.
        rows: number of outputs, (n, rows, ...).
    """
    from torch import nn

    from fairflare.base.task import evaluating

    ran: list[tuple[nn.Module, object]] = []
    with ExitStack() as stack, evaluating(model):
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and len(module.weight) == rows:
                hook = module.register_forward_hook(lambda module, args, output: ran.append((module, output)))
                stack.callback(hook.remove)
        outputs = model(inputs)
    identities = [
        id(parameter)
        for module, output in ran
        # a plain weight, and a single call
        if output is outputs and "weight" in module._parameters and sum(other is module for other, _ in ran) == 1
        for parameter in module._parameters.values()
    ]
    return [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in identities]


def input_tensors(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    """Return the names of the weights that have a column (second axis) for each channel of a network's input.

    They belong to the convolutions that are given the input itself. If another operation is given it, a channel has a
    part in the network that is no column.

    Args:
        model: network; on the meta device nothing is computed.
        inputs: input of the network, (1, channels, ...), on the same device.

    Raises:
        ValueError: the input is given to another operation, too; the message names it.
    """
    import torch
    from torch.overrides import TorchFunctionMode, resolve_name

    from fairflare.base.task import evaluating

    names = group_by_key((id(tensor), name) for name, tensor in model.named_parameters(remove_duplicate=False))
    before, weights = inputs._version, list[str]()

    class GivenInput(TorchFunctionMode):
        """Note the weights that meet the input, and raise an error for any other operation on it."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            values = (*args, *(kwargs or {}).values())
            given = any(part is inputs for one in values for part in (one if isinstance(one, (list, tuple)) else [one]))
            if given and isinstance(result, torch.Tensor) and (result is not inputs or inputs._version != before):
                weight: Any = values[1] if func in (torch.conv1d, torch.conv2d, torch.conv3d) else None
                if id(weight) not in names or weight.shape[1] != inputs.shape[1]:
                    raise ValueError(f"its input is given to {resolve_name(func) or func}, not to convolutions alone")
                weights.extend(names[id(weight)])
            return result

    with evaluating(model), GivenInput():
        model(inputs)
    return list(dict.fromkeys(weights))


#: Last component of the tensor names of a batch norm's running statistics.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_statistic(tensor_name: str) -> bool:
    """Return whether a tensor is a running statistic of a norm layer, judged by its name alone."""
    return tensor_name.rpartition(".")[2] in STATISTICS
