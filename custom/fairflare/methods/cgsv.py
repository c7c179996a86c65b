r"""Define CGSV: the better a site's updates agree with the sum of all sites' updates, the more of the sum it receives.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021, and the
authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fairflare.base.settings import BelowOne, Positive, settings
from fairflare.core.aggregation.entries import add_entries, largest, pack_entries
from fairflare.core.aggregation.reputations import cgsv_reputations, cgsv_shares, whole
from fairflare.core.aggregation.updates import cosines as cosines_of
from fairflare.core.states import difference, sq_norm
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import BUFFERS_STAY, OwnModel, buffers
from fairflare.methods.base.rule import RoundInputs, State, Weighing, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.methods.parts.downloads import Downloads

TINY = 1e-7  # number added to the norm of an update, as in the authors' code


@settings
class NormalisedUpdates(LocalTraining):
    r"""Train, and send the normalised change (CGSV) :math:`\Gamma \Delta / (\lVert \Delta \rVert + 10^{-7})`.

    After the training the site resets its parameters to their values before it; only the entries that the server sends
    change them. Buffers (the batch norms' statistics) stay at the site and remain as trained.

    Args:
        cgsv_gamma: Gamma, the length of what is sent. The authors take 0.5 (MNIST), 0.15 (CIFAR) and 1 (texts).

    Source:
        Xu et al., Algorithm 1.
    """

    cgsv_gamma: Positive = 0.5

    @property
    def home(self) -> RewardedModel:
        return RewardedModel(self, buffers, BUFFERS_STAY)


class RewardedModel(OwnModel):
    """Store a site's CGSV model: its parameters before the training, changed by the entries that the server sends."""

    def hand_in(self, run: SiteRun, start: State, local: State) -> tuple[State, State]:
        update = difference(local, start)
        scale = self.half.cgsv_gamma / (math.sqrt(sq_norm(update)) + TINY)
        return {name: (tensor.double() * scale).to(tensor.dtype) for name, tensor in update.items()}, start

    def take(self, run: SiteRun, last: State, download: State, entry: Mapping[str, Any]) -> State:
        return add_entries(last, download)


@settings
class CGSV(Downloads):
    r"""Send sites entries of the round's summed update u in proportion to their reputations r (CGSV).

    .. math:: u = \sum_k r_k u_k, \quad r_k \leftarrow \max(\alpha r_k + (1 - \alpha) \cos(u_k, u),\, 10^{-3}), \quad
              q_k = \tanh(\beta r_k) / \max_j \tanh(\beta r_j)

    with r normalised. In the first round the weights in u are the shares of the samples instead of r, and the moving
    average starts from r = 0. Site k is sent the :math:`\lceil q_k D_l \rceil` largest entries of each tensor l of u.
    An absent site keeps its r and is sent nothing in the round after; a new site starts with the mean r. If u is 0, r
    does not change.

    Args:
        cgsv_alpha: how much of a reputation is kept, in [0, 1).
        cgsv_beta: ``> 0``; the larger, the more alike are the sites' parts of the change: with 1e7 all get everything.

    Source:
        Xu et al., equations 1 to 5. Authors' code: alpha 0.95, beta 0.5 to 2; one entry of each tensor is never sent,
        while here all are sent if q is 1.
    """

    cgsv_alpha: BelowOne = 0.95
    cgsv_beta: Positive = 1.0

    _reputations = Saved(dict[str, float])

    def weigh(self, inputs: RoundInputs) -> Weighing:
        sites, known = inputs.sites, self._reputations
        entry = sum(known.values()) / len(known) if known else 0.0
        before = {site: known.get(site, entry) for site in sites}
        weights = inputs.remembered(normalise(before) if known else sample_weights(inputs))
        cosines = cosines_of(inputs.whole_gram(self), weights, leave_out=False)
        # If all cosines are 0, the summed update has no direction.
        after = cgsv_reputations(before, cosines, self.cgsv_alpha) if any(cosines.values()) else before
        shares = cgsv_shares(after, self.cgsv_beta)
        if any(after.values()):  # all are 0 in a first round whose summed update has no direction
            self._reputations = whole({**known, **after})
        self.remember(inputs, shares, weights)
        return Weighing(
            sites=weights, details={"cosine": cosines, "reputation": dict(self._reputations), "share": shares}
        )

    def part(self, change: State, share: float) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in change.items():
            parts |= pack_entries(name, tensor, largest(tensor, math.ceil(share * tensor.numel())))
        return parts


METHODS = [
    Method(
        name="cgsv",
        title="CGSV",
        summary="every site is sent as much of the change as its updates have pointed that way",
        rule=CGSV,
        training=NormalisedUpdates,
        group="own",
        source="Xu et al., NeurIPS 2021",
        num_rounds=15,  # of the paper's lengths; in three rounds they go nowhere
        keeps=("local_epochs",),  # one: the norms' statistics are those of the trained model, which goes back
        small={"cgsv_gamma": 1.0},
    )
]
