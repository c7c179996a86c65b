"""Choose an action by Thompson sampling: draw from the posterior of each action's reward, and take the largest."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def standardise(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean, divided by their standard deviation; all are 0 if all rewards are equal.

    Thus the scale of the rewards has no effect, and none of n rewards is farther from 0 than ``sqrt(n - 1)``.
    """
    middle, deviation = statistics.fmean(rewards or [0.0]), statistics.pstdev(rewards or [0.0])
    return [(reward - middle) / deviation if deviation > 0 else 0.0 for reward in rewards]


def beliefs(earned: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    r"""Return mean and standard deviation of the posterior of each action's mean reward.

    The prior is N(0, 1), and a reward has variance 1: after n rewards with the sum S the posterior is
    :math:`N(S / (n + 1),\; 1 / (n + 1))`.

    Args:
        earned: the rewards that each action earned, on the scale of :func:`standardise`.

    Source:
        Agrawal and Goyal, "Near-Optimal Regret Bounds for Thompson Sampling", J. ACM 2017, algorithm 2.
    """
    return [(sum(rewards) / (len(rewards) + 1), (len(rewards) + 1) ** -0.5) for rewards in earned]


def thompson(earned: Sequence[Sequence[float]], draws: random.Random) -> int:
    """Draw a reward for each action from its distribution in :func:`beliefs`; return the action with the largest."""
    drawn = [draws.gauss(mean, deviation) for mean, deviation in beliefs(earned)]
    return drawn.index(max(drawn))
