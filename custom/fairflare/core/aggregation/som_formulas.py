"""Compute FedMRL's self-organizing map formulas on plain numbers and arrays; the map is :mod:`fairflare.core.som`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.base import checks
from fairflare.core.weighting import normalise

Array: TypeAlias = npt.NDArray[np.float64]
#: Distances that differ by less than this share of the largest distance count as equal.
TIE = 1e-10


def model_similarity(dot: float, sq_norm_a: float, sq_norm_b: float) -> float:
    r"""Return the similarity of two models from their cosine.

    .. math:: s = (1 + \cos(v_a, v_b)) / 2

    Args:
        dot: inner product of the two vectors.
        sq_norm_a, sq_norm_b: squared norms of the two vectors.

    Returns:
        s in [0, 1]; 0.5 if a vector is zero.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.3; (MRL-3) of our specification.
    """
    if sq_norm_a <= 0 or sq_norm_b <= 0:
        return 0.5
    cosine = dot / (math.sqrt(sq_norm_a) * math.sqrt(sq_norm_b))
    return (1.0 + min(max(cosine, -1.0), 1.0)) / 2.0


def grid_sq_steps(rows: int, columns: int) -> Array:
    """Return the squared distances between the cells of a grid, (cells, cells), with the cells in row-major order."""
    cells = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
    return np.asarray(((cells[:, None] - cells) ** 2).sum(axis=-1), np.float64)


def pull(sq_distances: Array, strengths: Array, sq_steps: Array, *, eta: float, sigma: float) -> tuple[Array, Array]:
    r"""Return how far each site pulls each neuron of the map in one pass over the sites.

    .. math:: b_h = \arg\min_n \lVert v_h - m_n \rVert, \quad
              a_{hn} = \min\bigl(1, \eta t_h \exp(-\lVert n - b_h \rVert^2 / (2 \sigma^2))\bigr), \quad
              m_n \leftarrow k_n m_n + (1 - k_n) \frac{\sum_h a_{hn} v_h}{\sum_h a_{hn}}, \quad
              k_n = \prod_h (1 - a_{hn})

    With one site the result is the paper's step :math:`m_n + a_n (v - m_n)`. With several sites the neuron
    keeps the share k of its old value that would be left after the sites' steps in turn, but no site has the advantage
    of being the last one.

    Args:
        sq_distances: squared distance of every site's model to every neuron, (sites, neurons).
        strengths: t_h, ``>= 0``, (sites,): number of sites times s-hat.
        sq_steps: squared grid distances of :func:`grid_sq_steps`, (neurons, neurons).
        eta: learning rate, ``> 0``.
        sigma: radius of the neighbourhood, ``> 0``.

    Returns:
        kept and mixed, (neurons,) and (neurons, sites): neuron n becomes ``kept[n] * m[n] + mixed[n] @ v``.

    Source:
        Sahoo et al., section 3.3, read as (MRL-4) to (MRL-6) of our specification, as one batch update; in the paper
        the sites pull in turn, so that a site's place in the list counts.
    """
    near = np.exp(-sq_steps[nearest_neurons(sq_distances)] / (2.0 * sigma**2))
    rates = np.minimum(1.0, eta * strengths[:, None] * near)
    remaining = np.prod(1.0 - rates, axis=0)
    total = rates.sum(axis=0)
    shares = np.divide(rates, total, out=np.zeros_like(rates), where=total > 0)
    return remaining, ((1.0 - remaining) * shares).T


def som_weights(
    sq_distances: Mapping[str, npt.ArrayLike], similarity: Mapping[str, float], *, sigma_w: float = 1.0
) -> dict[str, float]:
    r"""Return aggregation weights from the sites' distances to the neurons and similarities to the received model.

    .. math:: \alpha_h = \hat s_h u_h / \sum_j \hat s_j u_j, \quad
              u_h = \frac{1}{N} \sum_{ij} \exp\bigl(-D^2_{h,ij} / (2 \sigma_w^2 \bar S)\bigr)

    with :math:`\hat s` the similarities scaled to sum 1 and :math:`\bar S` the mean of all :math:`D^2`.

    Args:
        sq_distances: D^2, squared distances of each site's model to all neurons, finite and ``>= 0``, of one shape.
        similarity: s, similarity of each site's model to the received model, ``>= 0``, for the same sites. All 0 count
            as all equal.
        sigma_w: width of the Gaussian in relation to the mean distance, ``> 0``.

    Returns:
        alpha by site, sum 1. If all distances are equal, alpha is the similarities scaled to sum 1.

    Raises:
        ValueError: no site, different sites, or a value out of range (names the site).

    Source:
        Sahoo et al., section 3.3 and Eq. (10), read as (MRL-9) of our specification. The factor 1/H of Eq. (10) is
        left out: with weights that sum to 1 it would shrink the model.

    Example:
        >>> som_weights({"A": [[0.0, 2.0]], "B": [[1.0, 1.0]]}, {"A": 0.5, "B": 0.5})["A"] > 0.5
        True
    """
    checks.same_names("distances", sq_distances, "similarities", similarity)
    checks.number("sigma_w", sigma_w, above=0)
    sites = sorted(sq_distances)
    rows = [np.asarray(sq_distances[site], dtype=np.float64).reshape(-1) for site in sites]
    for site, row in zip(sites, rows, strict=True):
        checks.shape(f"squared distances of site {site!r}", row, rows[0].size or "neurons")
        checks.number(f"least squared distance of site {site!r}", float(row.min()), low=0)
        checks.number(f"largest squared distance of site {site!r}", float(row.max()), low=0)
    checks.numbers("similarity", similarity, low=0)
    shares = normalise(similarity)
    largest = max(row.max() for row in rows)
    if largest == 0:
        return shares
    scaled = np.stack(rows) / largest  # dividing by the largest distance keeps the mean of huge distances finite
    exponents = -scaled / (2.0 * sigma_w**2 * scaled.mean())
    highest = exponents.max(axis=1)
    log_u = highest + np.log(np.exp(exponents - highest[:, None]).mean(axis=1))
    u = np.exp(log_u - log_u.max())
    return normalise({site: shares[site] * value for site, value in zip(sites, u.tolist(), strict=True)})


def nearest_neurons(sq_distances: Array) -> npt.NDArray[np.intp]:
    """Return, for each row of distances (one row per site), the index of the nearest neuron; on a tie the first."""
    limits = sq_distances.min(axis=1) + TIE * sq_distances.max(axis=1)
    return np.asarray(np.argmax(sq_distances <= limits[:, None], axis=1))
