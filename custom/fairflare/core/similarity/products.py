"""Products of rows of features, in strips where they are symmetric, on a CPU by oneDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LONG = 512  # columns from which the products of single channels are made one by one, by oneDNN:
ONEDNN: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)  # x y^T
STRIP = 32  # least rows of a strip of a symmetric product


def whole(lower: Tensor) -> Tensor:
    """Symmetric matrices from their lower halves."""
    return lower.tril() + lower.tril(-1).mT


def lower_products(u: Tensor) -> Tensor:
    """The lower half of each u u^T, (channels, n, n) for (channels, n, columns); above the diagonal blocks: zeros."""
    n = u.shape[1]
    if n <= (step := max(STRIP, -(-n // 5))):
        return products_of_rows(u, u)
    g = u.new_zeros(len(u), n, n)
    for some in range(len(u)) if _by_onednn(u) else [slice(None)]:  # a channel stays in the cache
        for i in range(0, n, step):
            g[some, i : i + step, : i + step] = _product(u[some, i : i + step], u[some, : i + step])
    return g


def products_of_rows(x: Tensor, y: Tensor) -> Tensor:
    """Each x y^T, (channels, n, m) for (channels, n, columns) and (channels, m, columns)."""
    return torch.stack(list(map(_product, x, y))) if _by_onednn(x) else _product(x, y)


def _product(x: Tensor, y: Tensor) -> Tensor:
    return ONEDNN(x, y, None, "none", [], "") if x.ndim == 2 and _by_onednn(x) else x @ y.mT


def _by_onednn(x: Tensor) -> bool:
    """Where its products are faster than MKL's: of long rows, above all on a processor that MKL does not know."""
    return ONEDNN is not None and x.dtype == torch.float32 and x.device.type == "cpu" and x.shape[-1] >= LONG
