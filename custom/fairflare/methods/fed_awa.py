r"""Define FedAWA, in which the server fits the sites' weights to their changes of the model.

Shi et al., "FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using Client Vectors", CVPR
2025. A control: sites that differ from the others lose weight, which is the reverse of fairness.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from fairflare.base.settings import Positive, PositiveInt, settings
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining

TINY = 1e-12  # share of the largest square below which a distance counts as 0, and has no gradient


def misfit(scores: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    r"""Return FedAWA's loss of the weights :math:`q = \mathrm{softmax}(T)`, in float64.

    .. math:: \sum_k q_k \Big\lVert \Delta_k - \sum_j q_j \Delta_j \Big\rVert
              + \sum_k q_k \big(1 - \cos(w + \Delta_k, w)\big)

    Args:
        scores: T, (sites,).
        gram: inner products of the sites' changes, (sites, sites); with a further row and column for the model w.
            Without it, or if w is 0, the second sum is left out.
    """
    sites = len(scores)
    changes, squared_lengths = gram[:sites, :sites], gram.diagonal()
    q = torch.softmax(scores, 0)
    mixed = changes @ q
    squares = squared_lengths[:sites] - 2 * mixed + q @ mixed
    apart = squares > TINY * squared_lengths[:sites].max()
    loss = (q * torch.where(apart, squares, 1.0).sqrt())[apart].sum()
    if len(gram) > sites and squared_lengths[-1] > 0:
        along = squared_lengths[-1] + gram[-1, :sites]
        lengths = (
            (squared_lengths[-1] * (squared_lengths[-1] + 2 * gram[-1, :sites] + squared_lengths[:sites]))
            .clamp_min(1e-300)
            .sqrt()
        )
        loss = loss + (q * (1 - along / lengths)).sum()
    return loss


@settings
class FedAWA(Rule):
    r"""Average with weights that a step of Adam fits to the sites' changes in each round (FedAWA).

    The loss is :func:`misfit`. T starts as the logarithm of the number of samples and is kept from round to round, also
    for an absent site. The weights of the round are those after its steps.

    Args:
        awa_steps: steps of Adam in a round.
        awa_rate: learning rate of Adam, about how much a step changes the logarithm of a weight.

    Source:
        Shi et al. and the authors' code.
    """

    reads_models: ClassVar[str] = "it compares each site's update with those of the others"

    awa_steps: PositiveInt = 1
    awa_rate: Positive = 1e-3

    weighs: ClassVar[bool] = True
    _scores = Saved(dict[str, float])

    def weigh(self, inputs: RoundInputs) -> Weighing:
        gram = inputs.whole_gram(self, model=True)
        first = [self._scores.get(site, math.log(inputs.num_samples[site])) for site in inputs.sites]
        scores = torch.tensor(first, dtype=torch.float64)
        adam = torch.optim.Adam([scores.requires_grad_()], lr=self.awa_rate, betas=(0.5, 0.999))
        for _ in range(self.awa_steps):
            adam.zero_grad()
            misfit(scores, gram).backward()
            adam.step()
        learned = dict(zip(inputs.sites, torch.softmax(scores.detach(), 0).tolist(), strict=True))
        weights = inputs.remembered(learned)
        self._scores |= {
            site: score + math.log(max(weights[site], 1e-300) / learned[site])
            for site, score in zip(inputs.sites, scores.tolist(), strict=True)
        }
        return Weighing(sites=weights)


METHODS = [
    Method(
        name="fed_awa",
        title="FedAWA",
        summary="control: weights fitted to the sites' changes; who differs loses weight",
        rule=FedAWA,
        training=LocalTraining,
        group="control",
        source="Shi et al., CVPR 2025",
    )
]
