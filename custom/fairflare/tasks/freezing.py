"""Which parameters of a network are trained, by their names; and which layers an adapter can stand beside."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fairflare.core.features.norms import norms_of

if TYPE_CHECKING:
    from torch import nn

NAMES = 12  # that an error lists


def train_only(model: nn.Module, trained: Callable[[str], bool], *, norms: bool = False) -> None:
    """Freeze every parameter of which ``trained`` says no by its name.

    A norm with running statistics of which nothing is trained takes these, unchanged, in training too.

    Args:
        model: is changed in place.
        trained: is asked for names of parameters, and of norms without any with a dot behind them.
        norms: the norms are trained in any case.
    """
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        always = norms and isinstance(module, norms_of("all"))
        for name, parameter in own.items():
            parameter.requires_grad_(always or trained(name))
        learns = always or any(map(trained, own or (f"{prefix}.",)))
        if getattr(module, "running_mean", None) is not None and not learns:
            module.register_forward_pre_hook(_as_in_evaluation)


def _as_in_evaluation(module: nn.Module, inputs: Any) -> None:
    """Freeze a norm; whoever sets the network to training sets it too."""
    module.training = False


def matching(setting: str, pattern: str, names: list[str], what: str) -> list[str]:
    """Return the name in which the pattern is found; a ``ValueError`` with what there is where there is none."""
    found = [name for name in names if re.search(pattern, name)]
    if not found:
        kinds = list(dict.fromkeys(re.sub(r"\d+", "N", name) for name in names))
        more = f", and {len(kinds) - NAMES} more" if len(kinds) > NAMES else ""
        raise ValueError(
            f"{setting}={pattern!r} is found in no name of the network's {what}; there are (N: a number) "
            f"{', '.join(kinds[:NAMES])}{more}"
        )
    return found


def targets_of(model: nn.Module, targets: str, train_also: str) -> list[str]:
    """Return the names of the layers that get an adapter.

    Args:
        model: without adapters.
        targets: is searched for in names of linear layers and convolutions.
        train_also: is searched for in names of parameters that are trained beside; ``^$``: none.

    Raises:
        ValueError: one of them is found nowhere (names what there is).
    """
    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))
    # Convolutions with groups have other products than an adapter's two factors give.
    usable = [name for name, module in layers if getattr(module, "groups", 1) == 1]
    found = matching("adapters.targets", targets, usable, "linear layers and convolutions")
    if train_also != "^$":
        parameters = [name for name, _ in model.named_parameters()]
        matching("adapters.train_also", train_also, parameters, "parameters")
    return found
