"""Find the norm layers of a model and their tensors, and let batch norms accept a batch of one sample."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch  # and not its parts, which an import by name would load at once (base/machine/later.py)

from fairflare.base.checks import refuse
from fairflare.core.features.layers import is_statistic, layers_of, parameter_layers

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)


def norms_of(kind: str) -> tuple[type[nn.Module], ...]:
    """Return the module classes of norm layers that a setting's value ``"batch"`` or ``"all"`` stands for."""
    nn, batch = torch.nn, torch.nn.modules.batchnorm._BatchNorm
    others = (nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    return (batch,) if kind == "batch" else (batch, *others)


def norm_tensors(model: nn.Module, kind: str) -> list[str]:
    """List all tensors (affine, statistics) of the norm layers of a kind (:func:`norms_of`), in state-dict order."""
    state, layers = model.state_dict(), parameter_layers(model)
    return [name for name, owner in layers_of(state).items() if isinstance(layers[owner], norms_of(kind))]


def running_statistics(model: nn.Module) -> list[str]:
    """List the running means, variances and counters of norm layers that have them, in state-dict order."""
    state, layers = model.state_dict(), parameter_layers(model)
    return [
        name
        for name, owner in layers_of(state).items()
        if isinstance(layers[owner], torch.nn.modules.batchnorm._NormBase) and is_statistic(name)
    ]


class LoneSample(ValueError):
    """Report that a batch norm without running statistics was given a single sample."""


@contextmanager
def lone_samples(model: nn.Module) -> Iterator[None]:
    """Let a batch norm in training mode use its running statistics if a channel has one value, inside the context.

    One value per channel (a batch of one sample whose features are 1x1) has no variance, and torch raises an error.
    Such a batch does not change the running statistics; the first one is logged. All other batches are normalised as
    usual.

    Raises:
        LoneSample: raised by the model's forward pass inside the context if such a batch norm has no running
            statistics; the message names the norm.

    Source:
        Ours; for the projector of Fed-MAS see ``docs/fed_mas.md``.
    """
    switched: set[nn.Module] = set()
    warned: list[str] = []

    def switch_off(name: str, module: Any, args: tuple[Any, ...]) -> None:
        if not module.training or not args or args[0].ndim < 2 or args[0].numel() != args[0].shape[1]:
            return
        refuse({
            f"batch norm {name!r} has no running statistics and got one sample with 1x1 features; choose another "
            "batch_size (its last batch has one sample), or a norm that does not look at the batch":
                module.running_mean is None,
        }, LoneSample)  # fmt: skip
        if not warned:
            warned.append(name)
            log.info("a batch of one sample: batch norm %r takes its running statistics, unchanged", name)
        switched.add(module)
        module.training = False

    def switch_on(module: Any, args: tuple[Any, ...], output: Any) -> None:
        if module in switched:
            switched.remove(module)
            module.training = True

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, norms_of("batch")):
                stack.callback(module.register_forward_pre_hook(partial(switch_off, name)).remove)
                stack.callback(module.register_forward_hook(switch_on, always_call=True).remove)
        yield
