r"""Define FedDyn, whose sites minimise a loss with a linear and a quadratic term that make their optima agree.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from fairflare.base.settings import Positive, settings
from fairflare.core import losses
from fairflare.core.states import Made
from fairflare.core.weighting import uniform_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import fitting, keep
from fairflare.methods.base.rule import RoundInputs, State, SumOfKept, Weighing
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun, criterion_loss

DRIFT = "drift"  # name under which a site stores l_k


@settings
class DynamicTraining(LocalTraining):
    r"""Minimise :math:`f_k(y) - \langle g_k, y \rangle + \frac\alpha2 \lVert y - x \rVert^2`, then update g_k (FedDyn).

    .. math:: g_k \leftarrow g_k - \alpha (y - x), \qquad
              l_k = -g_k / \alpha, \quad l_k \leftarrow l_k + y - x

    with x the received and y the trained model. Up to a constant the two terms are a pull of strength alpha towards
    x - l_k, in which form they are computed. l_k stays at the site, starts as 0, and has the trained parameters
    that are sent.

    Args:
        feddyn_alpha: alpha, strength of the pull.
    """

    feddyn_alpha: Positive = 0.01

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        received = self.home.copy_sent(model)
        drift = fitting(run, DRIFT, received)
        run.own = {name: x - drift.get(name, 0) for name, x in received.items()}, drift  # centre x - l_k, and l_k

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        moving = {name: p for name, p in model.named_parameters() if name in run.own[0]}
        pull = losses.proximal_term(moving, run.own[0], self.feddyn_alpha)
        return criterion_loss(self, run, model(inputs), targets) + pull

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        trained, (centre, drift) = dict(model.named_parameters()), run.own
        keep(run, DRIFT, drift, {name: (trained[name].detach() - x).cpu() for name, x in centre.items()})
        return {}


@settings
class FedDyn(SumOfKept):
    r"""Average the sites' models, each site counting alike, and add the mean of all sites' corrections l_k (FedDyn).

    .. math:: x \leftarrow \frac{1}{|P|} \sum_P y_k - \frac h\alpha, \qquad
              -\frac h\alpha \leftarrow -\frac h\alpha + \frac1N \sum_P (y_k - x)

    with P the sites of the round and N all sites seen so far. :math:`-h/\alpha` is kept in float64; in it, the l_k
    of a new site is 0. Batch norm's statistics are a plain mean.

    Source:
        Acar et al., Algorithm 1, with the sign and scale of the authors' code.
    """

    only_mean: ClassVar[str] = "its drift is a sum of all sites' changes"

    _drift = Saved["dict[str, torch.Tensor]"](dict)
    _known, _present = 0.0, 1.0  # shares of all sites: those known before, and those of the round

    def weigh(self, inputs: RoundInputs) -> Weighing:
        self._known, self._present = self.count(inputs, inputs.shares)
        length = math.sqrt(sum(float(drift.square().sum()) for drift in self._drift.values()))
        return Weighing(sites=uniform_weights(inputs.sites), values={"drift": length})

    def move(self, change: State) -> State:
        return Made(change, lambda name: self._step(name, change[name]))

    def _step(self, name: str, change: torch.Tensor) -> torch.Tensor:
        self._drift[name] = self._known * self._drift.get(name, torch.zeros_like(change)) + self._present * change
        return change + self._drift[name]


METHODS = [
    Method(
        name="fed_dyn",
        title="FedDyn",
        summary="control: each site's loss gets terms that make the sites' optima agree; fair to nobody",
        rule=FedDyn,
        training=DynamicTraining,
        group="control",
        source="Acar et al., ICLR 2021",
    )
]
