r"""Ditto: every site trains a model of its own beside FedAvg's, pulled towards it.

Li et al., ICML 2021. The common model is FedAvg's, bit for bit. The authors' loop takes the two models' steps in turn,
batch by batch; as the own model is pulled towards the *received* model, the order changes neither of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fairflare.core.settings import NonNegative, PositiveInt, field_names, settings
from fairflare.methods.catalog import Method
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_prox import ProximalTraining, Pull
from fairflare.methods.training import LocalTraining, SiteRun, StateStore

MOMENTS = "optimizer"  # as the frame calls them in the store


@settings
class DittoTraining(LocalTraining):
    r"""Ditto, site half: :math:`v \leftarrow v - \eta (\nabla F(v) + \lambda (v - w^r))` beside the common training.

    The own model starts as the first received one, and has the common training's optimizer, with moments of its own.

    Args:
        ditto_lambda: strength of the pull towards the received model; 0: Solo. The authors tried 0.1, 1 and 2.
        personal_epochs: passes over the training images for the own model in a round.

    Source:
        Li et al., ICML 2021, Algorithm 1; default of lambda: the authors'.
    """

    ditto_lambda: NonNegative = 1.0
    personal_epochs: PositiveInt = 1
    own_model: ClassVar[bool] = True
    home_doc: ClassVar[str] = "a second model and its optimizer's moments; the update of the common one is sent as ever"

    def train_own(self, run: SiteRun, own: torch.nn.Module, received: Mapping[str, torch.Tensor]) -> None:
        like = {name: getattr(self, name) for name in field_names(LocalTraining)}
        half = TowardsReceived(**{**like, "local_epochs": self.personal_epochs, "mu": self.ditto_lambda})
        half.train(replace(run, own=received, store=OwnStore(run.store)), own)

    def forget_own(self, run: SiteRun, own: torch.nn.Module) -> None:
        fresh = self.make_optimizer((p for p in own.parameters() if p.requires_grad), run.task)
        OwnStore(run.store).save(MOMENTS, run.current_round, fresh.state_dict())


@settings
class TowardsReceived(ProximalTraining):
    """The own model's training: FedProx whose centre is not where it starts but the received model (``run.own``)."""

    def pull(self, run: SiteRun, model: torch.nn.Module) -> Pull:
        centre = {n: run.own[n].detach().to(run.device) for n, p in model.named_parameters() if p.requires_grad}
        return Pull(self.mu, centre)


@dataclass
class OwnStore:
    """The site's store, under names that the common training does not use."""

    store: StateStore

    def save(self, name: str, current_round: int, value: Mapping[str, Any]) -> None:
        self.store.save(f"own_{name}", current_round, value)

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None:
        return self.store.load_before(f"own_{name}", current_round)

    def load_at(self, name: str, current_round: int) -> dict[str, Any] | None:
        return self.store.load_at(f"own_{name}", current_round)


METHODS = [
    Method(
        name="ditto",
        title="Ditto",
        summary="every site has a model of its own, pulled towards FedAvg's",
        rule=FedAvg,
        training=DittoTraining,
        source="Li et al., ICML 2021",
    )
]
