"""Scale updates that are far larger than those of the other sites down to a multiple of the median norm.

Three kinds of tensors are measured separately, because a large change of one kind would hide changes of another: the
parameters, the running statistics of batch norm, and integers (counters). No state is written: a site that exceeds a
limit gets a view of its state that changes each tensor when it is read, so that at most one changed tensor is in
memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fairflare.base import checks
from fairflare.core.aggregation.updates import pairs, square, total
from fairflare.core.features.layers import is_statistic
from fairflare.core.states import Made, State

PARAMETERS, STATISTICS, COUNTERS, VARIANCES = "parameters", "running statistics", "counters", "running variances"


@dataclass(frozen=True)
class Clip:
    """Describe one quantity of a site's update that was limited.

    Attributes:
        site: name of the site.
        what: ``PARAMETERS`` or ``STATISTICS``: L2 norm of the change; ``COUNTERS``: largest change of an integer;
            ``VARIANCES``: lowest running variance, which counts as 0.
        value, used: the quantity as the site sent it, and as it counts after limiting (infinite if float64 cannot
            hold the norm).
    """

    site: str
    what: str
    value: float
    used: float


def limit_changes(
    states: Mapping[str, State], received: State | None, factor: float
) -> tuple[dict[str, State], list[Clip]]:
    r"""Return the sites' states with changes that are limited relative to the median over the sites.

    .. math:: w_k \leftarrow w^r + \min(1, f\,\mathrm{med}_j \lVert \Delta_j \rVert / \lVert \Delta_k \rVert)\,
              \Delta_k, \quad \Delta_k = w_k - w^r

    The norms are taken twice: over all floating tensors except running statistics, and over the running statistics
    (``running_mean``, ``running_var``). No entry of an integer tensor may change by more than f times the median of the
    sites' largest changes of that tensor. In whole models a ``running_var`` below 0 counts as 0, so that the average
    keeps the share of the other sites.

    With two sites the median is the mean of both norms, and no norm exceeds the limit if f is at least 2. With three or
    more sites one malicious site is limited.

    Args:
        states: state of each site, by site, finite, with the same tensor names. Each tensor is read once here and again
            when the result is used.
        received: model that the sites' training started from; ``None`` if the states are updates already.
        factor: f, ``>= 1``.

    Returns:
        The states by site (a limited state as a lazy view, other states unchanged), and a list of what was limited,
        sites in sorted order.

    Raises:
        ValueError: the factor is out of range.

    Source:
        Norm clipping at a quantile of the sites' norms: Andrew et al., "Differentially Private Learning with Adaptive
        Clipping", NeurIPS 2021, who clip at the median itself (f = 1, without their noise).
    """
    factor = float(checks.number("factor", factor, low=1))
    by_site = {site: _measure(states[site], received) for site in sorted(states)}
    if not by_site:
        return {}, []
    limits = {w: factor * statistics.median(m.norms[w] for m in by_site.values()) for w in (PARAMETERS, STATISTICS)}
    steps = {
        name: math.floor(factor * statistics.median(m.counters[name] for m in by_site.values()))
        for name in next(iter(by_site.values())).counters
    }
    bounded: dict[str, State] = dict(states)
    clips: list[Clip] = []
    for site, measured in by_site.items():
        scale = {what: limit / norm for what, limit in limits.items() if (norm := measured.norms[what]) > limit}
        clips += [Clip(site, what, measured.norms[what], limits[what]) for what in scale]
        over = {name: steps[name] for name, change in measured.counters.items() if change > steps[name]}
        if over:
            worst = max(sorted(over), key=lambda name: measured.counters[name])
            clips.append(Clip(site, COUNTERS, float(measured.counters[worst]), float(steps[worst])))
        negative = received is not None and measured.lowest_variance < 0
        if negative:
            clips.append(Clip(site, VARIANCES, measured.lowest_variance, 0.0))
        if scale or over or negative:
            bounded[site] = _clip_state(states[site], received, scale, over)
    return bounded, clips


# ------------------------------------------------------------------------------------------------------------


class _Measured(NamedTuple):
    """Store one site's norm of the change by kind, largest change of every integer tensor, and lowest variance."""

    norms: dict[str, float]
    counters: dict[str, int]
    lowest_variance: float


def _kind(name: str) -> str:
    return STATISTICS if is_statistic(name) else PARAMETERS  # statistics include counters that a filter made floating


def _measure(state: State, received: State | None) -> _Measured:
    squares: dict[str, list[float]] = {PARAMETERS: [], STATISTICS: []}
    counters, lowest_variance = dict[str, int](), math.inf
    for name in state:
        tensor, base = state[name], None if received is None else received[name]
        if tensor.is_floating_point():
            squares[_kind(name)] += [square(*pair) for pair in pairs(tensor, base)]
            if name.rpartition(".")[2] == "running_var" and tensor.numel():
                lowest_variance = min(lowest_variance, float(tensor.min()))
        else:
            change = tensor.long() if base is None else tensor.long() - base.long()
            # Not abs().max(): the lowest integer has no positive counterpart, so its abs() would overflow.
            counters[name] = max(int(change.max()), -int(change.min())) if change.numel() else 0
    return _Measured({what: math.sqrt(total(parts)) for what, parts in squares.items()}, counters, lowest_variance)


def _clip_state(state: State, received: State | None, scale: Mapping[str, float], steps: Mapping[str, int]) -> State:
    """Return a view of a site's state with limited changes; a tensor is limited when it is read."""

    def clip_tensor(name: str) -> torch.Tensor:
        tensor = state[name]
        base = None if received is None else received[name]
        if tensor.is_floating_point():
            factor = scale.get(_kind(name))
            tensor = tensor if factor is None else _scale_change(tensor, base, factor)
            return tensor.clamp(min=0.0) if base is not None and name.rpartition(".")[2] == "running_var" else tensor
        if name not in steps:
            return tensor
        limit, start = steps[name], torch.zeros_like(tensor) if base is None else base
        return (start.long() + (tensor.long() - start.long()).clamp(-limit, limit)).to(tensor.dtype)

    return Made(state, clip_tensor)


def _scale_change(tensor: torch.Tensor, base: torch.Tensor | None, factor: float) -> torch.Tensor:
    if factor == 0.0:  # 0 is also the factor of a change whose norm float64 cannot hold
        return torch.zeros_like(tensor) if base is None else base.to(tensor.dtype, copy=True)
    if base is None:
        return (tensor.double() * factor).to(tensor.dtype)
    wide = base.double()
    return (wide + (tensor.double() - wide) * factor).to(tensor.dtype)
