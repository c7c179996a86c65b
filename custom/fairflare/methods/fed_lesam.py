r"""Define FedLESAM, sharpness-aware training with one pass a step: it perturbs along the common model's last change.

Fan et al., "Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware
Minimization", ICML 2024, and the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from fairflare.base.settings import NonNegative, settings
from fairflare.core.objectives import tensors
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import fitting
from fairflare.methods.base.training import SiteRun
from fairflare.methods.fed_ism import JOB, FedISM, SharpnessReport

LAST = "last_received"  # name under which a site stores the parameters that it received


@settings
class GlobalPerturbation(SharpnessReport):
    r"""Train with gradients taken at a distance from the model, towards the common model of earlier rounds (FedLESAM).

    .. math:: y \leftarrow y - \eta\, \nabla \ell(y + \epsilon), \qquad
              \epsilon = \rho\, \frac{w^{old} - w}{\lVert w^{old} - w \rVert}

    with w the received model and w^old the one that the site received in its last round before. epsilon is the same in
    all steps of a round, and 0 in the first round and if the model has not changed. Losses are those at y + epsilon,
    and running statistics come from these passes. What the rule asks about is measured along the gradient.

    Args:
        rho: length of epsilon, as in :class:`fairflare.methods.fed_ism.SharpnessReport`.
        preset: ``"paper"``: the norm over all parameters; ``"authors"``: the sum of the tensors' norms, as in the
            authors' code, so that epsilon is shorter.

    Source:
        Fan et al., Algorithm 1. Authors' code: rho 0.1, or 0.5 for the variant -S.
    """

    rho: NonNegative = 0.1
    preset: Literal["paper", "authors"] = "paper"

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        from fairflare.core.objectives.sam import NORM_EPS

        super().begin_round(run, model)
        received = self.home.copy_sent(model)
        push = {name: last - received[name] for name, last in fitting(run, LAST, received).items()}
        run.store.save(LAST, run.current_round, {name: tensor.cpu() for name, tensor in received.items()})
        length = (
            sum(tensors.norm([tensor]) for tensor in push.values())
            if self.preset == "authors"
            else tensors.norm([*push.values()])
        )
        if length > 0:
            tensors.scale([*push.values()], run.own.distance / (length + NORM_EPS))
            run.own.push = push

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        params = [parameter for name, parameter in model.named_parameters() if name in run.own.push]
        weights = [parameter.detach().clone() for parameter in params]
        try:
            with torch.no_grad():
                tensors.add(params, [*run.own.push.values()], 1.0)
            loss = closure()
        finally:
            with torch.no_grad():
                tensors.copy(params, weights)  # bit by bit, also if the pass fails
        optimizer.step()
        return loss


METHODS = [
    Method(
        name="fed_lesam",
        title="FedLESAM",
        summary="control: flat minima with one pass a step, along the last common change (saga=true: FedISM's weights)",
        rule=FedISM,
        training=GlobalPerturbation,
        group="control",
        source="Fan et al., ICML 2024",
        server={"saga": False, "rho": 0.1},
        site={"rho": 0.1},
        **JOB,
    )
]
