"""What steadies scores and weights that are measured anew in every round. Ours; each can be set to do nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fairflare.base import checks
from fairflare.core.weighting import normalise


def tempered(weights: Mapping[str, float], power: float) -> dict[str, float]:
    r"""Return weights drawn together (power below 1) or apart (above).

    .. math:: w'_k = w_k^p / \sum_j w_j^p

    Args:
        weights: by site, finite, ``>= 0``, not all 0.
        power: p, ``>= 0``; 1 changes nothing, bit by bit, 0 makes all weights alike, also those of 0.

    Returns:
        Weights by site, sum 1; their order by size stays.

    Raises:
        ValueError: no site, a weight out of range, or all 0; power out of range.

    Example:
        >>> tempered({"A": 0.8, "B": 0.2}, 0.5)
        {'A': 0.6666666666666666, 'B': 0.3333333333333333}
    """
    power = checks.number("power", power, low=0)
    given = checks.numbers("weight", checks.not_empty("the weights", weights), low=0)
    if power == 1:
        return dict(given)
    largest = max(given.values())
    if largest <= 0:
        raise ValueError("weights must not all be 0")
    return normalise({site: (weight / largest) ** power for site, weight in given.items()})


def mixed(weights: Mapping[str, float], share: float) -> dict[str, float]:
    r"""Return weights moved towards uniform ones.

    .. math:: w'_k = (1 - m)\, w_k + m / K

    Args:
        weights: by site, finite, ``>= 0``, sum 1.
        share: m, in [0, 1]; 0 changes nothing, bit by bit, 1 gives 1 / K.

    Returns:
        Weights by site, sum 1, none below m / K.

    Raises:
        ValueError: no site, a weight out of range, another sum, or share out of range.

    Example:
        >>> mixed({"A": 0.75, "B": 0.25}, 0.5)
        {'A': 0.625, 'B': 0.375}
    """
    share = checks.number("share", share, low=0, high=1)
    given = checks.shares(weights)
    if share == 0:
        return dict(given)
    return {site: (1.0 - share) * weight + share / len(given) for site, weight in given.items()}


def smoothed(scores: Mapping[str, float], before: Mapping[str, float] | None, keep: float) -> dict[str, float]:
    r"""Return moving average of one site's scores by layer.

    .. math:: s_m \leftarrow \gamma\, s_m + (1 - \gamma)\, \tilde s_m

    Args:
        scores: of this round, by layer; NaN: not measured.
        before: what this function gave the round before; ``None``: this is the site's first.
        keep: gamma, share of what was, in [0, 1); 0 gives the scores of this round.

    Returns:
        Averages by layer, in the order of ``scores``. Where only one of the two is a finite number, that one.

    Raises:
        ValueError: keep out of range.

    Example:
        >>> smoothed({"conv": 0.25}, {"conv": 0.75}, 0.5)
        {'conv': 0.5}
    """
    keep = checks.number("keep", keep, low=0, below=1)
    if keep == 0 or before is None:
        return dict(scores)
    found = {}
    for layer, new in scores.items():
        old = before.get(layer, math.nan)
        both = math.isfinite(new) and math.isfinite(old)
        found[layer] = keep * old + (1.0 - keep) * new if both else new if math.isfinite(new) else old
    return found
