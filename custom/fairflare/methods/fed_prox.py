r"""Define FedProx, whose local training is pulled towards the received model.

Li et al., MLSys 2020. FedMRL uses the same proximal term, but there the server chooses mu for every site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fairflare.base.settings import NonNegative, settings
from fairflare.core import losses
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.training import LocalTraining, SiteRun, criterion_loss
from fairflare.methods.fed_avg import FedAvg

FALLBACK_MU = 1e-5  # mu that is used when the server sends one that is negative or not finite


@dataclass
class Pull:
    """Store, for one task, the effective mu and the received parameters, towards which training is pulled."""

    mu: float
    received: dict[str, torch.Tensor]


@settings
class ProximalTraining(LocalTraining):
    r"""Minimise FedProx's :math:`\ell(w) + \frac{\mu}{2} \lVert w - w^r \rVert^2` over the trainable parameters.

    Args:
        mu: strength of the pull. A value that the server sends for this site goes before this one; one that is
            negative or no number counts as 1e-5.

    Source:
        Li et al., MLSys 2020, Eq. (2).
    """

    under_dp: ClassVar[bool] = True
    own_type: ClassVar[type[Pull]] = Pull  # type of ``run.own``

    mu: NonNegative = 0.1

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        run.own = self.pull(run, model)

    def pull(self, run: SiteRun, model: torch.nn.Module) -> Pull:
        """Return the strength and the centre of this round's proximal term."""
        announced = (run.directives.get("mu") or {}).get(run.site, self.mu)
        mu = float(announced) if math.isfinite(announced) and announced >= 0 else FALLBACK_MU
        centre = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        return self.own_type(mu, centre)

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        objective = criterion_loss(self, run, model(inputs), targets)
        return objective + losses.proximal_term(model, run.own.received, run.own.mu)


# Settings of FedProx as a baseline in FedMRL's paper and code; the paper's text names SGD, its code uses Adam.
JOB: dict[str, Any] = {
    "task": "classification",
    "learns": {
        "phantom": "dermoscopy7", "partition": "shards", "eta": 1.0, "corrupted_sites": 0,
    },
    "small": {"max_pool": True, "phantom_samples": 1500, "phantom_test": 300},
    "num_sites": 4,
    "num_rounds": 5,
}  # fmt: skip
METHODS = [
    Method(
        name="fed_prox",
        title="FedProx",
        summary="local training is pulled towards the received model with strength mu",
        rule=FedAvg,
        training=ProximalTraining,
        group="control",
        source="Li et al., MLSys 2020",
        page=None,
        **JOB,
    )
]
