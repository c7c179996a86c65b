"""Choose by name which parameters of a network are trained, and which of its layers get an adapter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from fairflare.core.features.norms import norms_of

NAMES = 12  # largest number of names that an error lists


def train_only(model: nn.Module, trained: Callable[[str], bool], *, norms: bool = False) -> nn.Module:
    """Freeze every parameter for whose name the function ``trained`` returns False, and return the network.

    A norm without a trained parameter uses its running statistics in training as well, and leaves them unchanged.

    Args:
        model: the network, which is changed in place.
        trained: function from a parameter's name to whether it is trained. For a module without own parameters, it gets
            the module's name with a dot at the end.
        norms: True: the parameters of norms are trained whatever ``trained`` returns.
    """
    for prefix, module in model.named_modules():
        parameters = dict(module.named_parameters(prefix, recurse=False))
        always = norms and isinstance(module, norms_of("all"))
        for name, parameter in parameters.items():
            parameter.requires_grad_(always or trained(name))
        learns = always or any(map(trained, parameters or (f"{prefix}.",)))
        if getattr(module, "running_mean", None) is not None and not learns:
            module.register_forward_pre_hook(_set_evaluation)
    return model


def _set_evaluation(module: nn.Module, inputs: Any) -> None:
    """Set a frozen norm to evaluation mode before each forward pass, as ``model.train()`` puts it in training mode."""
    module.training = False


def matching(setting: str, pattern: str, names: list[str], what: str) -> list[str]:
    """Return those of the names that contain a match of a setting's regular expression.

    Raises:
        ValueError: the pattern is found in no name; the message lists the names.
    """
    if not (matches := [name for name in names if re.search(pattern, name)]):
        kinds = list(dict.fromkeys(re.sub(r"\d+", "N", name) for name in names))
        raise ValueError(
            f"{setting}={pattern!r} is found in no name of the network's {what}; there are (N: a number) "
            f"{', '.join(kinds[:NAMES])}{f', and {len(kinds) - NAMES} more' * (len(kinds) > NAMES)}"
        )
    return matches


def targets_of(model: nn.Module, targets: str, train_also: str) -> list[str]:
    """Return the names of the layers that get an adapter.

    Args:
        model: the network without adapters.
        targets: regular expression, searched for in the names of linear layers and convolutions without groups.
        train_also: regular expression, searched for in the names of parameters, which are trained as a whole; ``^$``:
            none.

    Raises:
        ValueError: one of the expressions is found in no name; the message lists the names.
    """
    # Convolutions with groups are left out: the product of an adapter's two factors does not have their weight's shape.
    usable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and getattr(module, "groups", 1) == 1
    ]
    matches = matching("adapters.targets", targets, usable, "linear layers and convolutions")
    if train_also != "^$":
        matching("adapters.train_also", train_also, [name for name, _ in model.named_parameters()], "parameters")
    return matches
