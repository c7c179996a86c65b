"""Compute products of rows of features: symmetric products in strips, and large products on a CPU by oneDNN."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

LONG, LARGE = 512, 2**18  # least columns and values of a channel for which oneDNN multiplies, channel by channel
STRIP = 32  # least rows of a strip of a symmetric product by oneDNN; torch's strips need twice as many to save time


def whole(lower: Tensor) -> Tensor:
    """Return whole symmetric matrices, given only the lower half of each."""
    return lower.tril() + lower.tril(-1).mT


def lower_products(u: Tensor) -> Tensor:
    """Return the lower half of each u u^T, (channels, n, n) for (channels, n, columns).

    Entries above the diagonal blocks are 0.
    """
    n, onednn = u.shape[1], _suits_onednn(u)
    if n <= (step := max(STRIP if onednn else 2 * STRIP, -(-n // 5))):
        return products_of_rows(u, u)
    g = u.new_zeros(len(u), n, n)
    for some in range(len(u)) if onednn else [slice(None)]:  # one channel at a time stays in the CPU's cache
        for i in range(0, n, step):
            g[some, i : i + step, : i + step] = _product(u[some, i : i + step], u[some, : i + step], onednn)
    return g


def products_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return each x y^T, (channels, n, m) for (channels, n, columns) and (channels, m, columns)."""
    if _suits_onednn(x):
        return torch.stack([_product(a, b, True) for a, b in zip(x, y, strict=True)])
    return _product(x, y, False)


@cache
def _onednn() -> Any:
    """Return oneDNN's function for x y^T, or ``None`` if this build of torch lacks it."""
    return getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def _product(x: Tensor, y: Tensor, onednn: bool) -> Tensor:
    return _onednn()(x, y, None, "none", [], "") if onednn else x @ y.mT


def _suits_onednn(x: Tensor) -> bool:
    """Return whether oneDNN multiplies faster than MKL: large products, above all on a processor unknown to MKL."""
    return (
        x.shape[2] >= LONG
        and x.shape[1] * x.shape[2] >= LARGE
        and _onednn() is not None
        and x.dtype == torch.float32
        and x.device.type == "cpu"
    )
