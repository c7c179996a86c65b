r"""Define Ditto: beside FedAvg's common model every site trains its own model, pulled towards the common one.

Li et al., ICML 2021. The common model is FedAvg's, bit for bit. The authors' loop alternates between steps of the two
models, batch by batch. As the own model is pulled towards the *received* model, the order of the steps changes neither
model, so this module trains the models one after the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fairflare.base.checks import refuse
from fairflare.base.settings import NonNegative, PositiveInt, settings
from fairflare.exchange.messages import clean_state
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import OWN_MODEL, Home, last_kept, return_trained
from fairflare.methods.base.local_loop import MOMENTS, make_optimizer
from fairflare.methods.base.rule import State
from fairflare.methods.base.training import LocalTraining, NotFinite, SiteRun, pick_settings
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_prox import ProximalTraining, Pull

OWN = "own_"  # prefix of the names of values that the own model's training saves in the site's store


@settings
class DittoTraining(LocalTraining):
    r"""Train a second model v beside the common one: :math:`v \leftarrow v - \eta (\nabla F(v) + \lambda (v - w^r))`.

    The site's own model v starts as the first received model. Its training has the same kind of optimizer as the common
    training, with moments of its own.

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
        refuse({
            f"local_steps={self.local_steps!r} is of the site's own model too; leave personal_epochs="
            f"{self.personal_epochs!r} out": None not in (self.local_steps, self.personal_epochs),
        })  # fmt: skip

    @property
    def home(self) -> SecondModel:
        return SecondModel(
            self, doc="a second model and its optimizer's moments; the update of the common one is sent as ever"
        )


class SecondModel(Home):
    """Train and store a site's own model (Ditto) after the common one; metrics are measured with the own model."""

    model = "of its own besides the common one, and is measured with that"

    def choose_measured_model(self, run: SiteRun, state: State) -> State:
        return last_kept(run, OWN_MODEL, state) or state

    def finish(self, run: SiteRun, model: torch.nn.Module, start: State, local: State) -> dict[str, torch.Tensor]:
        """Train and store the site's own model after the common one, and return the update of the common model.

        If the own model becomes non-finite, it is replaced by the received model with a new optimizer state, and the
        server is told that the own model was lost.
        """
        update = super().finish(run, model, start, local)
        before = self.choose_measured_model(run, start)
        model.load_state_dict(before)
        try:
            self.train(run, model, start)
            after = return_trained(clean_state(model.state_dict()), before)
        except NotFinite as error:
            run.store.lose(f"its own model begins anew with the received one, as it broke: {error}")
            fresh = make_optimizer(self.half, model.parameters(), run.task)
            replace(run.store, prefix=OWN).save(MOMENTS, run.current_round, fresh.state_dict())
            after = dict(start)
        run.store.save(OWN_MODEL, run.current_round, after)
        return update

    def train(self, run: SiteRun, model: torch.nn.Module, received: State) -> None:
        """Train ``model``, which holds the site's own model, with the same seed as the common training."""
        personal_settings = {
            "local_epochs": self.half.personal_epochs or self.half.local_epochs,
            "mu": self.half.ditto_lambda,
        }
        own_half = TowardsReceived(**{**pick_settings(self.half), **personal_settings})
        own_half.train(replace(run, own=received, store=replace(run.store, prefix=OWN)), model)


@settings
class TowardsReceived(ProximalTraining):
    """Train a site's own model with FedProx's term around the received model (``run.own``), not around its start."""

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
        group="own",
        passes="2",
        source="Li et al., ICML 2021",
        small={"ditto_lambda": 0.1},  # with a larger lambda the own model learns less than FedAvg's in three rounds
    )
]
