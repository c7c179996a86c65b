"""Compute spectral norms' running vectors from an averaged weight, since the mean of sites' vectors is invalid."""

from __future__ import annotations

from collections.abc import Mapping

import torch

LEFT, RIGHT = "_u", "_v"  # names of the left and right running vector in torch's spectral norm
ITERATIONS = 15  # number of power iterations, as many as torch makes when a spectral norm is created


def singular_vectors(average: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return new running vectors for every weight under torch's spectral norm.

    The vectors are found by power iteration from the averaged vectors.

    Spectral norm divides a weight by u^T W v. A mean of the sites' vectors is shorter than 1 and fits no matrix, so
    that the network would divide by too small a number until further training corrects the vectors.

    Args:
        average: a state dict; ``<layer>.parametrizations.<tensor>.original`` next to ``.0._u`` and ``.0._v``.

    Returns:
        ``_u`` and ``_v`` by name, of length 1, in their own dtypes; empty if the model has no spectral norm. A weight
        with a further parametrization, or whose W is 0, has no entry.

    Source:
        Miyato et al., ICLR 2018, Algorithm 1; ``torch.nn.utils.parametrizations.spectral_norm``.
    """
    vectors: dict[str, torch.Tensor] = {}
    for name, u in average.items():
        module, _, last = name.rpartition(".")
        weight = average.get(module.removesuffix(".0") + ".original")
        v = average.get(f"{module}.{RIGHT}")
        if last != LEFT or not module.endswith(".0") or "parametrizations" not in module or weight is None or v is None:
            continue
        # As the parametrization does: rows are the first dimension, for a transposed convolution the second.
        matrix = weight.movedim(0 if weight.shape[0] == len(u) else 1, 0).flatten(1).double()
        left, right = u.double(), v.double()
        for _ in range(ITERATIONS):
            left = torch.nn.functional.normalize(matrix @ right, dim=0)
            right = torch.nn.functional.normalize(matrix.T @ left, dim=0)
        if bool(left.any()) and bool(right.any()):
            vectors[name], vectors[f"{module}.{RIGHT}"] = left.to(u.dtype), right.to(v.dtype)
    return vectors
