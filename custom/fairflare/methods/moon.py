r"""Define MOON, whose training keeps features near the global model's and away from the site's previous model's.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021. The server half is FedAvg; nothing
beyond the model is sent.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import refuse
from fairflare.base.settings import NonNegative, Positive, settings
from fairflare.core.losses import model_contrastive_loss
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import LOCAL_MODEL, Home
from fairflare.methods.base.training import LocalTraining, SiteRun, check_parts, criterion_loss
from fairflare.methods.bsm import JOB, LEARNS
from fairflare.methods.fed_avg import FedAvg

if TYPE_CHECKING:
    from fairflare.base.task import Task

NEEDED = (
    "MOON needs the features in front of the classifier; take the classification task's network, or give your own "
    "network embed(images) and head(features)"
)


@settings
class ContrastiveTraining(LocalTraining):
    r"""Train with MOON's model-contrastive term beside the criterion.

    .. math:: \ell_{sup} - \mu \log \frac{e^{\cos(z, z_g) / T}}{e^{\cos(z, z_g) / T} + e^{\cos(z, z_p) / T}}

    z, :math:`z_g`, :math:`z_p`: features of a batch in front of the classifier, by the model in training, the received
    model and this site's local model of its last round. With the task's ``neck_dim`` the features are the output of
    MOON's projection head, without it the encoder's (the baseline in Fed-MAS's code). The received and the earlier
    model run in evaluation mode and without gradient. A site without a local model of an earlier round uses the
    received model instead: the term is log 2 and changes nothing.

    The local model is stored in the site's state folder with every method. MOON stores the last three, so that a
    repeated round starts as it did the first time. Three networks are in memory during the training.

    Args:
        mu: weight of the contrastive term, finite and ``>= 0``; 0 is FedAvg and costs nothing.
        temperature: temperature T of the contrastive term.

    Source:
        Li et al., CVPR 2021, Eq. (3). The published code leaves the two constant models in training mode.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"temperature": only_with("mu")}

    mu: NonNegative = 1.0
    temperature: Positive = 0.5

    @property
    def home(self) -> Home:
        return Home(self, local_models=3 if self.mu > 0 else 1)

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        refuse({
            "MOON needs a classification task, since it compares the features of whole images": (
                task.has_classes is False
            ),
        })  # fmt: skip

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        check_parts(run, model, ("embed", "head"), NEEDED)
        return super().check(run, model)

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        if self.mu == 0:
            return
        check_parts(run, model, ("embed", "head"), NEEDED)
        stored = run.store.load_before(LOCAL_MODEL, run.current_round)
        previous = None if stored is None else _freeze(model)
        if previous is not None and stored is not None:
            previous.load_state_dict({**(run.sent.rest(previous.state_dict()) if run.sent else {}), **stored})
        run.own = _freeze(model), previous  # received and previous local model; without the latter the term is log 2

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.mu == 0:
            return super().loss(run, model, inputs, targets)
        received, previous = run.own
        z = model.embed(inputs)  # type: ignore[operator]
        supervised = criterion_loss(self, run, model.head(z), targets)  # type: ignore[operator]
        if previous is None:
            return supervised + self.mu * math.log(2)
        with torch.no_grad():
            z_global, z_previous = (m.embed(inputs) for m in (received, previous))
        return supervised + self.mu * model_contrastive_loss(z, z_global, z_previous, self.temperature)


def _freeze(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)


METHODS = [
    Method(
        name="moon",
        kinds=("classification",),
        title="MOON",
        summary="features are kept near the global model's and away from the site's previous ones; for classification",
        rule=FedAvg,
        training=ContrastiveTraining,
        learns={**LEARNS, "neck_dim": 256},
        **{
            **JOB,
            "group": "control",
            "passes": "1 + 2 forward",
            "source": "Li et al., CVPR 2021",
            "keeps": ("neck_dim",),
        },
    )
]
