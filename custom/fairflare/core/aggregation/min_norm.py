"""Compute the shortest weighted mean of some vectors, and FedLF's direction, from their inner products alone."""

from __future__ import annotations

import torch

PRECISE = 1e-10  # gap in slope, relative to the largest squared length, at which the search ends
EQUAL = (
    1e-6  # relative bound below which the losses' distance from equality, or a sum of changes that cancel, counts as 0
)
MOST = 1000  # steps for each vector, far above what was seen


def min_norm(products: torch.Tensor, start: torch.Tensor, reach: float = 1.0) -> torch.Tensor:
    r"""Return the weights of the shortest weighted mean of some vectors.

    .. math:: \min_\lambda \lambda^T G \lambda, \quad \sum_k \lambda_k = 1, \quad
              \lambda \ge 0, \quad \lVert \lambda - \lambda_0 \rVert_\infty \le \epsilon

    Each step moves weight from the vector with the largest slope to the one with the smallest, as far as this shortens
    the mean. On a tie the first vector is taken, so that equal inputs give equal bits. If some vectors are equal, the
    mean is unique but the weights are not.

    Args:
        products: G, inner products of the vectors in float64, (n, n).
        start: lambda_0, weights with a sum of 1, (n,), float64.
        reach: epsilon, how far each weight may move, ``>= 0``; 1: anywhere.

    Returns:
        lambda, (n,); ``start`` if a product is not finite.

    Source:
        Sequential minimal optimisation with the pair that violates the most (Keerthi et al., 2001).

    Example:
        >>> products = torch.tensor([[1, 0.8, -0.6], [0.8, 1, 0], [-0.6, 0, 1]], dtype=torch.float64)
        >>> [round(x, 6) for x in min_norm(products, torch.full((3,), 1 / 3, dtype=torch.float64), 0.1).tolist()]
        [0.333333, 0.233333, 0.433333]
    """
    low, high = (start - reach).clamp(min=0.0), (start + reach).clamp(max=1.0)
    point, slope, none = start.clone(), products @ start, torch.tensor(torch.inf, dtype=torch.float64)
    for _ in range(MOST * len(start)):
        to = int(torch.where(point < high, slope, none).argmin())
        source = int(torch.where(point > low, slope, -none).argmax())
        gap = float(slope[source] - slope[to])
        if not gap > PRECISE * float(products.diagonal().max()):  # also ends at NaN
            break
        bend = float(products[to, to] + products[source, source] - 2 * products[to, source])
        room = min(float(high[to] - point[to]), float(point[source] - low[source]))
        step = min(gap / bend, room) if bend > 0 else room
        point[to], point[source] = min(point[to] + step, high[to]), max(point[source] - step, low[source])
        slope += step * (products[:, to] - products[:, source])
    return point


def evening(losses: torch.Tensor) -> torch.Tensor:
    r"""Return FedLF's factors h, by which the sum of the sites' changes makes losses more equal; 0 if losses are equal.

    .. math:: h = \frac{\cos(F, e) F - \lVert F \rVert e}{\lVert F \rVert^2}, \quad e = 1 / \sqrt K

    Args:
        losses: F, ``>= 0``, (sites,), float64.

    Example:
        >>> [round(x, 6) for x in evening(torch.tensor([1.0, 3.0], dtype=torch.float64)).tolist()]
        [-0.134164, 0.044721]
    """
    length, even = losses.norm(), torch.full_like(losses, len(losses) ** -0.5)
    unit = losses / length if length > 0 else even
    direction = (unit @ even) * unit - even
    return direction / length if direction.norm() > EQUAL else torch.zeros_like(losses)


def fair_factors(products: torch.Tensor, fair: torch.Tensor) -> torch.Tensor:
    r"""Return the factors by which FedLF adds up the sites' changes of a layer, (sites,); 0 for a change of 0.

    The sum is the shortest weighted mean of the changes and of a direction that makes losses more equal, scaled to the
    mean length.

    Args:
        products: inner products of the sites' changes of the layer.
        fair: h, see :func:`evening`; the direction is left out if the sum of the changes with these factors is 0.

    Source:
        Pan et al., AAAI 2024, ``get_FedLF_d_layers`` of the authors' code.
    """
    lengths = products.diagonal().sqrt()
    moved = lengths > 0
    if not bool(moved.any()):
        return torch.zeros_like(fair)
    mean = lengths[moved].mean()
    scales = torch.where(moved, mean / lengths, 0.0)
    rows, row = torch.diag(scales)[moved], fair * scales
    length = (row @ products @ row).clamp(min=0.0).sqrt()
    if length > EQUAL * mean * fair.abs().sum():
        rows = torch.cat([rows, (row * mean / length)[None]])
    return min_norm(rows @ products @ rows.T, rows.new_full((len(rows),), 1 / len(rows))) @ rows
