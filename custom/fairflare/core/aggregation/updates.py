"""Compute lengths and angles of the sites' changes of a model, read tensor by tensor and summed in float64.

Sums run over blocks that stay on one thread, so that they do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch

from fairflare.base import checks
from fairflare.core.states import State, blocks


def pairs(tensor: torch.Tensor, base: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each block of a tensor with the same block of the tensor that it is compared with."""
    others = blocks(base) if base is not None else None
    for index, part in enumerate(blocks(tensor)):
        yield part, None if others is None else others[index]


def change(part: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """Return ``part - base`` in float64 as a new tensor; ``base`` None: ``part`` is a difference itself."""
    return part.to(torch.float64, copy=True) if base is None else part.double() - base.double()


def square(part: torch.Tensor, base: torch.Tensor | None) -> float:
    """Return the squared L2 norm of a change."""
    moved = change(part, base)
    return float(moved.square_().sum()) if moved.numel() else 0.0


def squared_norms(states: Mapping[str, State], received: State | None, names: Collection[str]) -> dict[str, float]:
    r"""Return the squared L2 norm of every site's change, :math:`\lVert w_k - w^r \rVert^2`.

    Args:
        states: finite state of each site, by site.
        received: model that the sites started from; ``None``: the states are changes already.
        names: names of the tensors to include; integer tensors are left out.

    Returns:
        The squared norm by site, sites sorted; infinite where float64 cannot hold it.
    """
    found: dict[str, float] = {}
    for site in sorted(states):
        parts: list[float] = []
        for name in (n for n in states[site] if n in names):
            tensor = states[site][name]
            if tensor.is_floating_point():
                base = None if received is None else received[name]
                parts += [square(*pair) for pair in pairs(tensor, base)]
        found[site] = total(parts)
    return found


def products(states: Mapping[str, State], received: State | None, names: Collection[str]) -> torch.Tensor:
    r"""Return the inner products of the sites' changes, :math:`\langle w_j - w^r, w_k - w^r \rangle`, in float64.

    Args:
        states, received, names: as in :func:`squared_norms`; one tensor of all sites is in memory at a time.

    Returns:
        (sites, sites), sites sorted; where ``received`` is given, its products are a further row and column.
    """
    sites, size = sorted(states), len(states) + (received is not None)
    found = torch.zeros(size, size, dtype=torch.float64)
    for name in (n for n in states[sites[0]] if n in names and states[sites[0]][n].is_floating_point()):
        base = None if received is None else received[name]
        rows = [change(states[site][name], base) for site in sites] + ([] if base is None else [base.double()])
        matrix = torch.stack([row.reshape(-1) for row in rows])
        found += matrix @ matrix.T
    return found


def cosines(
    states: Mapping[str, State],
    received: State | None,
    weights: Mapping[str, float],
    names: Collection[str],
    *,
    leave_out: bool,
) -> dict[str, float]:
    r"""Return the cosine of each site's change with the mean change of all sites, or of the other sites alone.

    .. math:: \cos(\Delta_k, \bar\Delta), \quad \bar\Delta = \sum_j c_j \Delta_j

    Args:
        states, received, names: as in :func:`squared_norms`; one tensor of one site is in memory at a time.
        weights: c, weight of each site of ``states`` in the mean, finite, ``>= 0``. Their sum does not matter.
        leave_out: whether the site's own part is left out of the mean: :math:`\bar\Delta - c_k \Delta_k` is taken.

    Returns:
        The cosine by site, in [-1, 1]; 0 where one of the two changes is 0 or float64 cannot hold its norm.
    """
    sites = sorted(states)
    checks.same_names("weights", weights, "states", states)
    sums: dict[str, tuple[list[float], list[float], list[float]]] = {site: ([], [], []) for site in sites}
    for name in (n for n in states[sites[0]] if n in names):
        base = None if received is None else received[name]
        mean: list[torch.Tensor] = []
        for site in sites:
            tensor = states[site][name]
            if not tensor.is_floating_point():
                break
            moved = [weights[site] * change(*pair) for pair in pairs(tensor, base)]
            mean = [a.add_(b) for a, b in zip(mean, moved, strict=True)] if mean else moved
        else:
            for site in sites:  # reads the tensors again, so that one tensor of one site is in memory at a time
                for pair, whole in zip(pairs(states[site][name], base), mean, strict=True):
                    own = change(*pair)
                    others = whole - weights[site] * own if leave_out else whole
                    for parts, values in zip(sums[site], (own * others, own.square(), others.square()), strict=True):
                        parts.append(float(values.sum()))
    return {site: _cosine(*(total(parts) for parts in sums[site])) for site in sites}


def _cosine(dot: float, own: float, others: float) -> float:
    length = math.sqrt(own) * math.sqrt(others)
    if length == 0 or not math.isfinite(dot) or not math.isfinite(length):
        return 0.0
    return min(max(dot / length, -1.0), 1.0)


def total(parts: list[float]) -> float:
    """Return the exact sum of some numbers; infinite where the sum is undefined or overflows."""
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):  # ValueError: infinity minus infinity, as products may give
        return math.inf
