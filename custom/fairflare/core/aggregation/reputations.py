"""Compute sites' reputations in the methods that send every site a different part of the model (CFFL, CGSV)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from fairflare.base import checks
from fairflare.core.weighting import normalise

LEAST = 1e-3  # lower bound of a reputation in CGSV, as in the authors' code
TOLERANCE = 1e-9  # distance from 1 up to which reputations count as normalised


def cgsv_reputations(before: Mapping[str, float], cosines: Mapping[str, float], alpha: float) -> dict[str, float]:
    r"""Return CGSV's reputations after a round.

    .. math:: r_k \leftarrow \max(\alpha r_k + (1 - \alpha) \varphi_k, 10^{-3})

    scaled so that the sites' reputations have the same sum as before (1 if that sum was 0).

    Args:
        before: reputation r that each site of the round had until now, ``>= 0``; 0 for all in the first round.
        cosines: phi by site, cosine of the site's change with the mean change, in [-1, 1].
        alpha: share of the old reputation that is retained, in [0, 1].

    Source:
        Xu et al., NeurIPS 2021, Eq. 3; the least value: the authors' code.
    """
    checks.same_names("cosines", cosines, "reputations", before)
    reputations = normalise({s: max(alpha * before[s] + (1 - alpha) * cosines[s], LEAST) for s in sorted(before)})
    held = sum(before.values()) or 1.0
    return {site: held * value for site, value in reputations.items()}


def cgsv_shares(reputations: Mapping[str, float], beta: float) -> dict[str, float]:
    r"""Return the part of the model's change that each site is sent; 1 for all if all reputations are 0.

    .. math:: q_k = \tanh(\beta r_k) / \max_j \tanh(\beta r_j)

    Args:
        reputations: reputation r of each site, ``>= 0``.
        beta: steepness of the hyperbolic tangent, ``> 0``.
    """
    values = {site: math.tanh(beta * value) for site, value in reputations.items()}
    most = max(values.values())
    return {site: value / most if most > 0 else 1.0 for site, value in values.items()}


def cffl_reputations(
    before: Mapping[str, float], metrics: Mapping[str, float], alpha: float, rep: Literal["paper", "code"]
) -> dict[str, float]:
    r"""Return CFFL's reputations after a round.

    .. math:: x_k = v_k / \sum_j v_j, \quad
              c \leftarrow \tfrac12 c + \tfrac12 \widehat{\sinh(\alpha x)} \ \text{(paper)}, \quad
              c \leftarrow \sinh(\alpha (0.8\, c + 0.2\, x)) \ \text{(code)}

    scaled so that the sites' reputations have the same sum as before (1 if that sum was 0).

    Args:
        before: c, reputation before the round of each reputable site that takes part, ``>= 0``.
        metrics: v, metric of each site, in [0, 1]; NaN counts as 0. All 0: equal shares x.
        alpha: steepness of the hyperbolic sine, ``> 0``.
        rep: ``"paper"`` or ``"code"``: which of the two formulas is used, the paper's or the authors' code's.

    Source:
        Lyu et al., 2020, as in the authors' code.
    """
    checks.same_names("metrics", metrics, "reputations", before)
    sites = sorted(before)
    shares = normalise({site: 0.0 if math.isnan(metrics[site]) else metrics[site] for site in sites})
    held = sum(before.values()) or 1.0
    shared = {site: before[site] / held for site in sites}
    if rep == "code":
        reputations = normalise({site: math.sinh(alpha * (0.8 * shared[site] + 0.2 * shares[site])) for site in sites})
    else:
        earned = normalise({site: math.sinh(alpha * shares[site]) for site in sites})
        reputations = normalise({site: 0.5 * shared[site] + 0.5 * earned[site] for site in sites})
    return {site: held * value for site, value in reputations.items()}


def whole(reputations: Mapping[str, float]) -> dict[str, float]:
    """Return reputations scaled to sum 1 (their sum differs from 1 after a site has joined or left)."""
    return dict(reputations) if abs(sum(reputations.values()) - 1) < TOLERANCE else normalise(reputations)


def cffl_shares(reputations: Mapping[str, float], sizes: Mapping[str, float]) -> dict[str, float]:
    """Return which part of the global change each site is sent.

    The part is the product of the site's reputation and its number of samples, each divided by the largest one.
    """
    checks.same_names("numbers of samples", sizes, "reputations", reputations)
    best, most = max(reputations.values()), max(sizes.values())
    return {
        site: (value / best if best > 0 else 1.0) * (sizes[site] / most if most > 0 else 1.0)
        for site, value in reputations.items()
    }
