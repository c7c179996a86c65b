"""Measure the running statistics of batch norms anew, in the right order, and pool the moments of several sites.

A norm's input depends on the norms before it, so its moments are right only when theirs are. The norms of a network
are therefore measured group by group: first those that no other norm is in front of, then, with their new statistics,
those that only these are in front of, and so on. Which norms are in front of which is found by running the network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fairflare.base.checks import group_by_key, refuse
from fairflare.base.task import evaluating

WIDE = 2**22  # largest number of values that are converted to float64 at once
MEAN, VARIANCE = "running_mean", "running_var"
Forward = Callable[["torch.Tensor"], object]


class Unmeasurable(ValueError):
    """Report that the input of a batch norm has no finite moments; the text names the batch norm."""


# ------------------------------------------------------------------------------------------------ which norms


def running_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms that normalise by running statistics in evaluation, by name.

    A module that is registered under several names has one entry, under the first name. Other norms are left out:
    GroupNorm and LayerNorm have no running statistics. Those of InstanceNorm (``track_running_stats=True``) are means
    over the images of moments within one image, which differ from moments over all images: see :func:`other_running`.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm) and _runs(module)}


def other_running(model: nn.Module) -> list[str]:
    """Return the names of modules other than batch norms with running statistics, such as InstanceNorm.

    Measuring the batch norms anew leaves these statistics as they are.
    """
    known = set(map(id, running_norms(model).values()))
    return [name for name, module in model.named_modules() if id(module) not in known and _runs(module)]


def registered_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names under which each module of :func:`running_norms` is registered; the state dict has each name."""
    names = group_by_key((id(module), name) for name, module in model.named_modules(remove_duplicate=False))
    return {name: names[id(module)] for name, module in running_norms(model).items()}


def _runs(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), torch.Tensor) for name in (MEAN, VARIANCE))


@dataclass(frozen=True)
class Group:
    """Describe batch norms that can be measured in one forward pass.

    Attributes:
        names: names of the norms, in the order of execution.
        calls: how often each norm is called in one forward pass.
        more: whether the pass reaches further norms, which can only be measured later.
    """

    names: list[str]
    calls: dict[str, int]
    more: bool


def next_group(model: nn.Module, images: Tensor, done: Iterable[str] = (), *, forward: Forward | None = None) -> Group:
    """Return the batch norms whose input depends on no other batch norm that is still to be measured.

    The outputs of all norms that are not ``done`` are replaced by NaN, so that a norm whose input has no NaN does not
    depend on them. A norm whose input depends on its own output (weights that are used several times in a row) always
    has NaN in its input; it is measured once no other norm is left, with its present statistics.

    Args:
        model: network, in training or evaluation mode; it is not changed.
        images: a batch of input images, on the model's device.
        done: names of norms that have their new statistics already.
        forward: function that runs the forward pass; default: ``model(images)``.
    """
    pending = {name: module for name, module in running_norms(model).items() if name not in set(done)}
    calls: Counter[str] = Counter()
    tainted: set[str] = set()

    def note_input(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        calls[name] += 1
        if bool(torch.isnan(args[0]).any()):
            tainted.add(name)

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for name, module in pending.items():
            stack.callback(module.register_forward_pre_hook(partial(note_input, name)).remove)
            stack.callback(module.register_forward_hook(lambda _, args, out: torch.full_like(out, math.nan)).remove)
        (forward or model)(images)
    reached = list(calls)
    names = [name for name in reached if name not in tainted] or reached[:1]
    return Group(names, {name: calls[name] for name in names}, len(names) < len(reached))


# ------------------------------------------------------------------------------------------------ moments


@dataclass
class Moments:
    """Store count, mean and squared deviations of the values of each channel.

    Attributes:
        count: number of values of each channel.
        mean: (channels,) float64.
        squares: (channels,) float64, sum of squared distances to the mean.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def compute(cls, values: Tensor) -> Moments:
        """Compute the moments of (n, channels, ...) in float64; on the CPU if the device has no float64."""
        axes = [axis for axis in range(values.ndim) if axis != 1]
        wide = values.detach().to("cpu" if values.device.type == "mps" else values.device).double()
        mean = wide.mean(axes, keepdim=True)
        return cls(values.numel() // values.shape[1], mean.flatten(), (wide - mean).square_().sum(axes))

    def join(self, other: Moments) -> Moments:
        """Return the moments of the union of two sets of values.

        Source:
            Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
        """
        count = self.count + other.count
        gap = other.mean - self.mean
        return Moments(
            count,
            self.mean + gap * (other.count / count),
            self.squares + other.squares + gap**2 * (self.count * other.count / count),
        )


class _Enough(Exception):
    """Stop a forward pass in which no further norm of the group follows."""


def measure(
    model: nn.Module, batches: Iterable[Tensor], group: Group, *, forward: Forward | None = None
) -> dict[str, Moments]:
    """Return moments of the inputs of a group's batch norms over all batches, in the order of the group.

    Args:
        model: network, in training or evaluation mode; it is not changed.
        batches: images on the model's device.
        group: norms to measure, from :func:`next_group`; each forward pass stops at the last of them.
        forward: as in :func:`next_group`.

    Raises:
        Unmeasurable: the input of a norm is not finite (the message names the norm).
    """
    norms = running_norms(model)
    measured: dict[str, Moments] = {}
    left = 0

    def add(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal left
        values = args[0]
        for part in values.split(max(1, WIDE // max(1, values[0].numel()))):
            moments = Moments.compute(part)
            measured[name] = measured[name].join(moments) if name in measured else moments
        left -= 1
        if left == 0:
            raise _Enough

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for name in group.names:
            stack.callback(norms[name].register_forward_pre_hook(partial(add, name)).remove)
        for images in batches:
            left = sum(group.calls.values())
            try:
                (forward or model)(images)
            except _Enough:
                continue
    in_order = {name: measured[name] for name in group.names if name in measured}
    refuse({
        f"the input of batch norm {name!r} is not finite": not bool(torch.isfinite(one.mean + one.squares).all())
        for name, one in in_order.items()
    }, Unmeasurable)  # fmt: skip
    return in_order


def pool_statistics(
    means: Mapping[str, Tensor], variances: Mapping[str, Tensor], weights: Mapping[str, float], count: int
) -> tuple[Tensor, Tensor]:
    r"""Return running statistics of one batch norm over the values of all sites.

    .. math:: m = \sum_k p_k m_k, \qquad v = \frac{N}{N - 1} \sum_k p_k \left(v_k + (m_k - m)^2\right)

    With :math:`p_k = n_k / N` these are the moments of all values together (:meth:`Moments.join` for any number of
    sites), with the unbiased variance, as torch keeps it.

    Args:
        means, variances: m_k and v_k, mean and biased variance of the values of each site, (channels,).
        weights: p_k by site, ``>= 0``, sum 1.
        count: N, number of values of a channel at all sites together, ``>= 2``.

    Returns:
        m and v, float64.
    """
    sites = sorted(weights)
    mean = torch.stack([weights[site] * means[site].double() for site in sites]).sum(0)
    parts = [weights[site] * (variances[site].double() + (means[site].double() - mean) ** 2) for site in sites]
    return mean, torch.stack(parts).sum(0) * (count / (count - 1))
