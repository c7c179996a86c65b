r"""Average low-rank adapters by the products that they stand for, not by their factors.

An adapted layer computes with :math:`W + s B A`, where W is frozen, B is (m, r) and A is (r, n); a convolution's kernel
counts as an (m, n) matrix, n = input channels x kernel size. The mean of the sites' layers is therefore
:math:`W + s \sum_k a_k B_k A_k`, which :math:`(\sum_k a_k B_k)(\sum_k a_k A_k)` is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fairflare.base import checks

#: Length of each row of A after averaging: as in LoRA's random start, where n numbers have the variance 1 / 3n.
ROW = 3**-0.5
#: Names of an adapter's factors as ``peft`` gives them: layer, factor, and the adapter's name.
FACTOR = re.compile(r"(?P<layer>.*)\.lora_(?P<factor>[AB])\.(?P<adapter>[^.]+)\.weight")


@dataclass(frozen=True)
class Averaged:
    """Store the factors of the sites' mean product of adapters, cut to a rank.

    Attributes:
        a, b: (rank, n) and (m, rank), float64, the largest singular value first; beyond ``min(m, n)``, and beyond what
            the sites' factors span, they are 0.
        lost, whole: Frobenius norm of the part that was cut off, and of the mean product before cutting.
    """

    a: torch.Tensor
    b: torch.Tensor
    lost: float
    whole: float


def average_products(
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], weights: Mapping[str, float], rank: int
) -> Averaged:
    r"""Return factors of the best approximation of rank r to :math:`\sum_k a_k B_k A_k`.

    With the stacked factors :math:`[a_1 B_1, \ldots] = Q_B R_B` and :math:`[A_1; \ldots]^T = Q_A R_A` the mean product
    is :math:`Q_B (R_B R_A^T) Q_A^T`, whose singular values are those of the small matrix in the middle, of at most
    :math:`\sum_k r_k` rows and columns. The (m, n) product itself is never computed.

    Args:
        factors: ``(A, B)`` by site; A is (r_k, n), B is (m, r_k). Ranks may differ.
        weights: a_k by site, finite, ``>= 0``; of exactly these sites.
        rank: r of the result, ``>= 1``.

    Returns:
        ``A = c V^T`` and ``B = U S / c`` with c = :data:`ROW`: A's rows are as long as at LoRA's start, so that a
        direction whose singular value is 0 can still be learned.

    Raises:
        ValueError: no site, other sites in ``weights``, factors that do not fit each other or another site's, a value
            that is not finite (names the site).

    Source:
        HLoRA: Liu et al., 2025 (product before mean, projection by SVD); the QR of the stacked factors is standard.
    """
    checks.whole("rank", rank, low=1)
    checks.same_names("weights", weights, "the factors", checks.not_empty("the factors", factors), of="site")
    sites = sorted(factors)
    first_a, first_b = factors[sites[0]]
    for site in sites:
        a, b = factors[site]
        checks.refuse({
            f"site {site!r}: factors A {tuple(a.shape)} and B {tuple(b.shape)} do not fit each other, or those of "
            f"site {sites[0]!r} {tuple(first_a.shape)} and {tuple(first_b.shape)}":
                a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or len(b) != len(first_b)
                or a.shape[1] != first_a.shape[1],
            f"site {site!r}: a factor is not finite": not all(bool(torch.isfinite(part).all()) for part in (a, b)),
        })  # fmt: skip
    # NumPy's decompositions are used since PyTorch's would load 4 MB more code into the server.
    left = np.concatenate([factors[site][1].double().numpy() * weights[site] for site in sites], axis=1)
    right = np.concatenate([factors[site][0].double().numpy() for site in sites], axis=0)
    q_left, r_left = np.linalg.qr(left)
    q_right, r_right = np.linalg.qr(right.T)
    u, values, v = np.linalg.svd(r_left @ r_right.T, full_matrices=False)
    columns = min(rank, len(values))
    mean_b, mean_a = np.zeros((len(left), rank)), np.zeros((rank, right.shape[1]))
    mean_b[:, :columns] = q_left @ (u[:, :columns] * (values[:columns] / ROW))
    mean_a[:columns] = ROW * (v[:columns] @ q_right.T)
    lost, whole = (float(np.linalg.norm(part)) for part in (values[columns:], values))
    return Averaged(torch.from_numpy(mean_a), torch.from_numpy(mean_b), lost, whole)


def pairs_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the names of the factors ``(A, B)`` of each adapted layer, by the layer's name, among a model's tensors.

    >>> pairs_of(["fc.base_layer.weight", "fc.lora_A.default.weight", "fc.lora_B.default.weight"])
    {'fc': ('fc.lora_A.default.weight', 'fc.lora_B.default.weight')}
    """
    matches = checks.group_by_key((match["layer"], match) for match in map(FACTOR.fullmatch, names) if match)
    factors = {layer: {match["factor"]: match.string for match in some} for layer, some in matches.items()}
    return {layer: (both["A"], both["B"]) for layer, both in factors.items() if len(both) == 2}


@dataclass
class Products:
    """Average adapters by their products, in place of the mean of each factor (:mod:`fairflare.core.states`).

    Attributes:
        made: norms ``(lost, whole)`` of :class:`Averaged` by layer, for the last average.
    """

    made: dict[str, tuple[float, float]] = field(default_factory=dict)

    def average_factors(
        self, states: Mapping[str, Mapping[str, torch.Tensor]], weights_of: Callable[[str], Mapping[str, float]]
    ) -> dict[str, torch.Tensor]:
        """Return the averaged factors of all adapted layers by tensor name, in the sites' shapes and dtypes.

        The layers are averaged one after the other.

        Args:
            states: models, not updates, by site.
            weights_of: function that returns the weights by site of a tensor; a layer has the weights of its factor A.
        """
        self.made = {}
        averages: dict[str, torch.Tensor] = {}
        first = next(iter(states.values()))
        for layer, (name_a, name_b) in pairs_of(first).items():
            shapes = first[name_a], first[name_b]
            factors = {site: (state[name_a].flatten(1), state[name_b].flatten(1)) for site, state in states.items()}
            try:
                result = average_products(factors, weights_of(name_a), len(shapes[0]))
            except ValueError as error:
                raise ValueError(f"adapter of layer {layer!r}: {error}") from error
            self.made[layer] = (result.lost, result.whole)
            for name, factor, like in zip((name_a, name_b), (result.a, result.b), shapes, strict=True):
                averages[name] = factor.reshape(like.shape).to(like.dtype)
        return averages

    @property
    def error(self) -> float:
        """Return the relative truncation error of the last average over all layers, in [0, 1]."""
        lost, whole = (math.hypot(*norms) for norms in zip(*self.made.values(), strict=True)) if self.made else (0, 0)
        return lost / whole if whole > 0 else 0.0

    def errors(self) -> dict[str, float]:
        """Return, by layer, the relative truncation error of the last average of adapter products."""
        return {layer: lost / whole if whole > 0 else 0.0 for layer, (lost, whole) in self.made.items()}
