"""Compute the similarity of two sets of features: Gram matrices, HSIC, linear CKA and cosine, all in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from fairflare.base.checks import choice, refuse, whole

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SAMPLES = {"biased": 2, "unbiased": 4}  # least number of samples, by estimator of HSIC
COSINE_EPS = 1e-8  # a norm in the denominator of a cosine is at least this

Matrix: TypeAlias = "torch.Tensor | np.ndarray"


class LayerSimilarity(NamedTuple):
    """Store similarity ``delta`` (1: alike; NaN if undefined) and ``dissimilarity`` 1 - delta, precise near delta 1."""

    delta: float
    dissimilarity: float


UNDEFINED = LayerSimilarity(math.nan, math.nan)


def center(k: Tensor, estimator: str = "biased") -> Tensor:
    r"""Center a symmetric (n, n) Gram matrix so that HSIC is a plain inner product of two centered matrices.

    ``"biased"``: :math:`HKH`, :math:`H = I - 11^T/n`. ``"unbiased"`` (n >= 3), U-centering: zero diagonal and, off it,
    :math:`k_{ij} - r_i/(n-2) - r_j/(n-2) + s/((n-1)(n-2))` with r, s the row and total sums of K without its diagonal.
    """
    n = len(k)
    if estimator == "biased":
        rows = k.mean(dim=1)
        return k - rows[:, None] - rows[None, :] + rows.mean()
    k = k.clone().fill_diagonal_(0)
    rows = k.sum(dim=1) / (n - 2)
    return (k - rows[:, None] - rows[None, :] + rows.sum() / (n - 1)).fill_diagonal_(0)


class Alignment:
    """Compute CKA of Gram matrices K and L from K and E = K - L, so that a small 1 - CKA is precise."""

    def __init__(self, estimator: str) -> None:
        self.estimator = estimator
        self.kk = self.ll = self.ee = self.ek = 0.0  # sums of HSIC of the pairs K, K; L, L; E, E; and E, K + L

    def add(self, k: Tensor, e: Tensor) -> None:
        """Add the HSICs of a pair K, E of (n, n) matrices in float64, n >= 2; with n < 4 by the biased estimator."""
        estimator = self.estimator if len(k) >= LEAST_SAMPLES[self.estimator] else "biased"
        k, e = center(k, estimator), center(e, estimator)
        l = k - e
        self.kk += hsic_of_centered(k, k, estimator)
        self.ll += hsic_of_centered(l, l, estimator)
        self.ee += hsic_of_centered(e, e, estimator)
        self.ek += hsic_of_centered(e, l.add_(k), estimator)

    def similarity(self) -> LayerSimilarity:
        """Return the similarity delta and the dissimilarity 1 - delta of a layer.

        1 - delta = (|E|^2 - (|K| - |L|)^2) / (2 |K| |L|), with |K| - |L| = <E, K + L> / (|K| + |L|).
        """
        if not (self.kk > 0 and self.ll > 0 and math.isfinite(self.kk + self.ll + self.ee)):
            return UNDEFINED
        a, b = math.sqrt(self.kk), math.sqrt(self.ll)
        dissimilarity = (self.ee - (self.ek / (a + b)) ** 2) / (2 * a * b)
        dissimilarity = min(max(dissimilarity, 0.0), 1.0 if self.estimator == "biased" else 2.0)
        return LayerSimilarity(1.0 - dissimilarity, dissimilarity)


def linear_cka(x: Matrix, y: Matrix, estimator: str = "biased") -> float:
    r"""Return linear CKA of two feature matrices of the same samples, (n, p) and (n, q), in float64.

    .. math:: \delta = HSIC(K, L) / \sqrt{HSIC(K, K) \, HSIC(L, L)}, \quad K = x x^T, \; L = y y^T

    Returns:
        delta in [0, 1] (biased) or [-1, 1] (unbiased). 1 when x and y are both constant over the samples, NaN when
        only one is, when n is 1, when a value is not finite, and when an unbiased denominator is 0.

    Raises:
        ValueError: not two matrices with the same number of rows, unknown estimator, ``"unbiased"`` with n 2 or 3,
            or none at all.

    Source:
        Yan et al., MICCAI 2024, Eq. (2); Kornblith et al., ICML 2019. Unbiased: HSIC_1 of Song et al., JMLR 2012.
    """
    choice("estimator", estimator, LEAST_SAMPLES)
    x, y = _matrix("x", x), _matrix("y", y)
    refuse({
        f"x and y must have the same number of rows, got {len(x)} and {len(y)}": len(x) != len(y),
        "x and y hold no sample; give at least 2": len(x) == 0,
    })  # fmt: skip
    if len(x) < 2:
        return math.nan
    whole(f"number of samples ({estimator})", len(x), low=LEAST_SAMPLES[estimator])
    x, y = _unit(x), _unit(y)
    if not (x.any() and y.any()):
        return math.nan if x.any() or y.any() else 1.0
    k = x @ x.T
    alignment = Alignment(estimator)
    alignment.add(k, k - y @ y.T)
    return alignment.similarity().delta


def cosine_distance(aa: Tensor, bb: Tensor, ab: Tensor, dd: Tensor) -> Tensor:
    """Return 1 - cosine of vectors a and b, precise if it is small: (|a - b|^2 - (|a| - |b|)^2) / (2 |a| |b|).

    The arguments are the inner products aa, bb and ab, and ``dd``, |a - b|^2. A norm below 1e-8 counts as 1e-8; if both
    norms are below, the result is 0.
    """
    a, b = aa.sqrt(), bb.sqrt()
    distance = ((dd - (a - b).square()) / (2 * a * b)).clamp(0, 2)
    small_a, small_b = a < COSINE_EPS, b < COSINE_EPS
    plain = 1 - ab / (a.clamp_min(COSINE_EPS) * b.clamp_min(COSINE_EPS))
    return torch.where(small_a | small_b, plain.masked_fill(small_a & small_b, 0.0), distance)


def hsic_of_centered(k: Tensor, l: Tensor, estimator: str) -> float:
    r"""Return the Hilbert-Schmidt independence criterion of two Gram matrices that :func:`center` has centered.

    ``"biased"`` (n >= 2; Yan et al., MICCAI 2024, Eq. 2): :math:`vec(HKH) \cdot vec(HLH) / (n-1)^2`. ``"unbiased"``
    (n >= 4; HSIC_1 of Song et al., JMLR 2012): the inner product of the two U-centered matrices (Szekely and Rizzo)
    over :math:`n(n-3)`, which is the same number as the form with three traces.
    """
    n = len(k)
    return float((k * l).sum()) / ((n - 1) ** 2 if estimator == "biased" else n * (n - 3))


def _matrix(name: str, value: Matrix) -> Tensor:
    matrix = torch.as_tensor(value).detach().to(device="cpu", dtype=torch.float64)
    refuse({f"{name} must be a matrix (samples, features), got shape {tuple(matrix.shape)}": matrix.ndim != 2})
    return matrix


def _unit(x: Tensor) -> Tensor:
    """Return a feature matrix centered and scaled to norm 1; a matrix whose rows differ by rounding only becomes 0."""
    x = x / float(x.abs().max()) if x.any() else x
    x = x - x[0]  # before the mean is subtracted, so that equal rows become exact zeros
    if x.numel() and float(x.abs().max()) <= 1e-14:
        return torch.zeros_like(x)
    x = x - x.mean(dim=0)
    return x / (float(x.norm()) or 1.0)
