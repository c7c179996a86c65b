"""Compute lengths and angles of the sites' changes of a model, read tensor by tensor and summed in float64.

Sums run over blocks that stay on one thread, so that they do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat

import torch

from fairflare.core.aggregation.tensor_mean import HELD
from fairflare.core.states import State, blocks

CANCELS = 1e-6  # a sum of changes whose length is below this share of their lengths is a rounding error


def pairs(tensor: torch.Tensor, base: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return each block of a tensor together with the block at the same place of a second tensor."""
    return zip(blocks(tensor), repeat(None) if base is None else blocks(base), strict=base is not None)


def change(part: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """Return ``part - base`` in float64 as a new tensor; ``base`` None if ``part`` is a difference itself."""
    return part.to(torch.float64, copy=True) if base is None else part.double() - base.double()


def square(part: torch.Tensor, base: torch.Tensor | None) -> float:
    """Return the squared L2 norm of a tensor's change."""
    return float(change(part, base).square_().sum())


def squared_norms(states: Mapping[str, State], received: State | None, names: Collection[str]) -> dict[str, float]:
    r"""Return the squared L2 norm of every site's change, :math:`\lVert w_k - w^r \rVert^2`.

    Args:
        states: finite state of each site, by site.
        received: model that the sites started from; ``None`` if the states are changes already.
        names: names of the tensors to include; integer tensors are left out.

    Returns:
        The squared norm by site, sites sorted; infinite if float64 cannot hold it.
    """
    by_site: dict[str, float] = {}
    for site in sorted(states):
        parts: list[float] = []
        for name in (n for n in states[site] if n in names):
            tensor = states[site][name]
            if tensor.is_floating_point():
                parts += [square(*pair) for pair in pairs(tensor, None if received is None else received[name])]
        by_site[site] = total(parts)
    return by_site


def gram(
    states: Mapping[str, State],
    received: State | None,
    names: Collection[str],
    owner: Mapping[str, str],
    further: State | None = None,
) -> dict[str, torch.Tensor]:
    r"""Return the inner products of the sites' changes by layer, :math:`G_{jk} = \langle \Delta_j, \Delta_k \rangle`.

    Besides the products, memory holds the values of one tensor at as many sites as fit into 128 MiB.

    Args:
        states, received, names: as in :func:`squared_norms`.
        owner: name of the layer by name of the tensor.
        further: tensors for a last row and column, from which ``received`` is not subtracted; for instance the
            received model itself.

    Returns:
        By layer a matrix in float64, (sites, sites), sites sorted; 0 in a layer without such tensors. Their sum is that
        of the whole model. A change whose square float64 cannot hold counts as 0.
    """
    sources: list[tuple[State, State | None]] = [(states[site], received) for site in sorted(states)]
    sources += [] if further is None else [(further, None)]
    matrices = {layer: torch.zeros(len(sources), len(sources), dtype=torch.float64) for layer in owner.values()}
    for name in (n for n in sources[0][0] if n in names):
        first = sources[0][0][name]
        if not first.is_floating_point():
            continue
        held = max(1, HELD // max(2 * first.nbytes, 1))  # two groups of sites are in memory at a time
        groups = [slice(begin, begin + held) for begin in range(0, len(sources), held)]
        for row, left in enumerate(groups):
            rows = _read(sources[left], name)
            for part in _side_by_side(rows):
                matrices[owner[name]][left, left] += part @ part.T
            for right in groups[row + 1 :]:
                others = _read(sources[right], name)
                for part, other in zip(_side_by_side(rows), _side_by_side(others), strict=True):
                    matrices[owner[name]][left, right] += part @ other.T
    for layer, products in matrices.items():
        fits = products.diagonal().isfinite()
        matrices[layer] = torch.where(fits[:, None] & fits, products.triu() + products.triu(1).T, 0.0)
    return matrices


def _read(sources: Sequence[tuple[State, State | None]], name: str) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    return [(state[name], None if start is None else start[name]) for state, start in sources]


def _side_by_side(rows: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Iterator[torch.Tensor]:
    """Yield each block of the changes of one tensor at some sites, (sites, numbers)."""
    for parts in zip(*(pairs(*row) for row in rows), strict=True):
        yield torch.stack([change(*part) for part in parts])


def cosines(products: torch.Tensor, weights: Mapping[str, float], *, leave_out: bool) -> dict[str, float]:
    r"""Return the cosine of each site's change with the mean change of all sites, or of the other sites alone.

    .. math:: \cos(\Delta_k, \bar\Delta), \quad \bar\Delta = \sum_j c_j \Delta_j

    Args:
        products: inner products of the sites' changes over the whole model, see :func:`gram`.
        weights: c, weight of each site in the mean, finite, ``>= 0``. Their sum does not matter.
        leave_out: whether the site's own part is left out of the mean: :math:`\bar\Delta - c_k \Delta_k` is taken.

    Returns:
        The cosine by site, in [-1, 1]; 0 if one of the two changes is 0, or if the mean is shorter than a millionth of
        the changes in it, which then cancel.
    """
    by_site, lengths = {}, products.diagonal().sqrt()
    for k, site in enumerate(sorted(weights)):
        parts = torch.tensor([weights[s] for s in sorted(weights)], dtype=torch.float64)
        parts[k] = 0.0 if leave_out else parts[k]
        others = float(parts @ products @ parts)
        length = float(lengths[k]) * math.sqrt(others) if others > (CANCELS * float(parts @ lengths)) ** 2 else 0.0
        by_site[site] = min(max(float(products[k] @ parts) / length, -1.0), 1.0) if length else 0.0
    return by_site


def total(parts: list[float]) -> float:
    """Return the exact sum of some numbers; infinite if the sum is undefined or overflows."""
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):  # ValueError: infinity minus infinity, as products may give
        return math.inf
