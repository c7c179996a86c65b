r"""Ditto: every site trains a model of its own beside FedAvg's, pulled towards it.

Li et al., ICML 2021. The common model is FedAvg's, bit for bit. The authors' loop takes the two models' steps in turn,
batch by batch; as the own model is pulled towards the *received* model, the order changes neither of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fairflare.base.settings import NonNegative, PositiveInt, field_names, settings
from fairflare.exchange.messages import clean_state
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import OWN_MODEL, Home, as_returned, last_kept
from fairflare.methods.base.local_loop import MOMENTS, make_optimizer
from fairflare.methods.base.rule import State
from fairflare.methods.base.training import LocalTraining, NotFinite, SiteRun
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_prox import ProximalTraining, Pull

OWN = "own_"  # in front of what the second model's training keeps in the store


@settings
class DittoTraining(LocalTraining):
    r"""Ditto, site half: :math:`v \leftarrow v - \eta (\nabla F(v) + \lambda (v - w^r))` beside the common training.

    The own model starts as the first received one, and has the common training's optimizer, with moments of its own.

    Args:
        ditto_lambda: strength of the pull towards the received model; 0: Solo. The authors tried 0.1, 1 and 2.
        personal_epochs: passes over the training images for the own model in a round; nothing: ``local_epochs``, as in
            the authors' loop.

    Source:
        Li et al., ICML 2021, Algorithm 1; default of lambda: the authors'.
    """

    ditto_lambda: NonNegative = 1.0
    personal_epochs: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if None not in (self.local_steps, self.personal_epochs):
            raise ValueError(
                f"local_steps={self.local_steps!r} is of the site's own model too; leave personal_epochs="
                f"{self.personal_epochs!r} out"
            )

    @property
    def home(self) -> SecondModel:
        return SecondModel(
            self, doc="a second model and its optimizer's moments; the update of the common one is sent as ever"
        )


class SecondModel(Home):
    """Ditto's model of a site, which is trained after the common one and measured in place of it."""

    model = "of its own besides the common one, and is measured with that"

    def measured(self, run: SiteRun, state: State) -> State:
        return last_kept(run, OWN_MODEL, state) or state

    def finish(self, run: SiteRun, model: torch.nn.Module, start: State, local: State) -> dict[str, torch.Tensor]:
        """Train the second model too; one that is not finite is replaced by the received model, and the site says so.

        Its moments begin anew with it.
        """
        update = super().finish(run, model, start, local)
        before = self.measured(run, start)
        model.load_state_dict(before)
        try:
            self.train(run, model, start)
            after = as_returned(clean_state(model.state_dict()), before)
        except NotFinite as error:
            run.store.lose(f"its own model begins anew with the received one, as it broke: {error}")
            fresh = make_optimizer(self.half, model.parameters(), run.task)
            replace(run.store, prefix=OWN).save(MOMENTS, run.current_round, fresh.state_dict())
            after = dict(start)
        run.store.save(OWN_MODEL, run.current_round, after)
        return update

    def train(self, run: SiteRun, model: torch.nn.Module, received: State) -> None:
        """Train ``model``, which holds the second one, with the seed that the common training had."""
        like = {name: getattr(self.half, name) for name in field_names(LocalTraining)}
        like["local_epochs"] = self.half.personal_epochs or self.half.local_epochs
        TowardsReceived(**like, mu=self.half.ditto_lambda).train(
            replace(run, own=received, store=replace(run.store, prefix=OWN)), model
        )


@settings
class TowardsReceived(ProximalTraining):
    """The second model's training: FedProx whose centre is not where it starts but the received model (``run.own``)."""

    def pull(self, run: SiteRun, model: torch.nn.Module) -> Pull:
        centre = {n: run.own[n].detach().to(run.device) for n, p in model.named_parameters() if p.requires_grad}
        return Pull(self.mu, centre)


METHODS = [
    Method(
        name="ditto",
        title="Ditto",
        summary="every site has a model of its own, pulled towards FedAvg's",
        rule=FedAvg,
        training=DittoTraining,
        source="Li et al., ICML 2021",
        small={"ditto_lambda": 0.1},  # in three rounds a model that is held closer learns less than FedAvg's
    )
]
