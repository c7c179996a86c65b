r"""Define Fed-MAS, which weights sites by rescue factors, measured against a frozen self-supervised network.

Elbatel et al., "Federated Model Aggregation via Self-Supervised Priors for Highly Imbalanced Medical Image
Classification", DeCaF @ MICCAI 2023. The method is for long-tailed classes.

A round, in the paper's order: Each site measures by class the distance between the received model's projected features
and those of a frozen network that all sites hold (w, Eqs. 1-2). The site trains with balanced softmax and the same
distance as a second loss (Eq. 4), and collects the distances during training (w^). The site reports one number, the
rescue factor RF = sum_c w_c w^_c (Eq. 3). The server averages in proportion to RF (Eq. 5).

Two settings give the paper's ablations: ``mas=False`` is "BSM with KD"; ``mas=False`` with ``lambda_f=0`` is BSM-FL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Bounds

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.cases.floor import all_records
from fairflare.base.checks import refuse
from fairflare.base.settings import Flag, NonNegative, PositiveInt, Text, settings
from fairflare.core.priors import TIMM, RunningClassMean, rescue_factor
from fairflare.core.weighting import rescue_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import NO_IMAGES, TRAINING, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports, sample_weights
from fairflare.methods.base.training import LocalTraining, SiteRun, class_counts, criterion_loss, criterion_losses
from fairflare.methods.bsm import BALANCED, JOB, LEARNS
from fairflare.methods.parts.prior_features import Priors, SitePrior

if TYPE_CHECKING:
    from fairflare.base.task import Task

Encoder = Literal["embedded", "resnet18", "resnet50", "densenet121"] | Annotated[str, Bounds(pattern=TIMM)]
MAX_RESCUE_FACTOR = 16e6  # RF is at most 16 E |C|; here E |C| (epochs times classes) is at most a million


@dataclass
class _Rescue:
    """Store one task's prior network and the class means of distances before (w) and during (w^) the training."""

    moving: ClassVar = ("during", "open_epoch")
    prior: SitePrior | None = None
    before: torch.Tensor | None = None  # w, mean distance by class before the training
    during: RunningClassMean | None = None  # w^, mean distance by class during the training
    open_epoch: int = 0


@settings
class RescueTraining(LocalTraining):
    r"""Train towards the features of a frozen prior network, and report the rescue factor RF (Fed-MAS).

    .. math:: L = L_{sup} + \lambda_f\, \bar\ell_f, \qquad RF = \sum_{c \in C_k} w_c\, \hat w_c

    w is the mean distance by class of the *received* model over all training images, in evaluation mode, without
    augmentation. w^ is the mean distance by class in the forward passes of the training: a mean for each epoch, summed
    over the epochs; with ``local_steps`` the mean over the passes, as their number differs between sites. w and w^ stay
    at the site; RF and the prior's fingerprint are reported.

    Model and prior see the same image. The prior's features of the unaugmented images are computed once and cached (in
    memory and in the state folder, 4 bytes a feature); they serve for w, and for training without ``augment``. With
    ``augment`` the prior runs on every augmented batch.

    The model needs a projection head: set ``projector_dim`` of the task.

    Args:
        lambda_f: weight of the distance in the loss, finite and ``>= 0``. 0 without ``mas`` at the server: no prior.
        prior: checkpoint of the prior network, unless the site's own file names one with ``"prior"``; ``None`` for the
            packaged one (for ``prior_network="embedded"``).
        prior_network: architecture of the prior network, see :func:`fairflare.tasks.priors.load_prior`.
        prior_image_size: size to which images are resized for the prior; ``None`` for the task's size.
        rf_mode: ``"paper"`` (Eq. 3), ``"code"`` (both divergences normalised first) or ``"class_mean"``.
        rf_source: ``"prior"``, or ``"supervised"``: RF of the criterion's losses (the authors' ``lambda_f=0``).
        cache_features: keep features as above; False: the prior runs in every pass.

    Source:
        Elbatel et al., sections 2.1 and 2.2; the authors' code where the paper is silent.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"rf_mode": only_with("mas"), "rf_source": only_with("mas")}

    lambda_f: NonNegative = 3.0
    prior: Text | None = None
    prior_network: Encoder = "embedded"
    prior_image_size: Annotated[PositiveInt, Bounds(ge=32)] | None = None
    rf_mode: Literal["paper", "code", "class_mean"] = "paper"
    rf_source: Literal["prior", "supervised"] = "prior"
    cache_features: Flag = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._priors = Priors(self.prior_network, self.prior, self.prior_image_size)

    def check_task(self, task: Task) -> None:
        if self.lambda_f > 0:
            self._priors.check_task(task)
        super().check_task(task)

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        facts = super().check(run, model)
        return {**facts, "prior": self._priors.network(run, model).fingerprint} if self.lambda_f > 0 else facts

    @all_records()  # prior features are cached by image number; only means by class are reported
    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        memory = run.own = _Rescue()
        weighed = bool(run.directives.get("rescue_factor"))
        if self.lambda_f > 0 or (weighed and self.rf_source == "prior"):
            # Cached prior features are of unaugmented images: cache none if no pass sees unaugmented images.
            memory.prior = self._priors.open_site(
                run, model, cached=self.cache_features and (weighed or not self.augment)
            )
        if weighed:
            memory.during = RunningClassMean(len(class_counts(self, run, "Fed-MAS measures by class and needs")))
        if weighed or (memory.prior is not None and memory.prior.cache is not None):
            self._look_at_all(run, model)

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        memory: _Rescue = run.own
        if memory.prior is None and memory.during is None:
            return super().loss(run, model, inputs, targets)
        features = model.embed(inputs)  # type: ignore[operator]
        outputs = model.head(features)  # type: ignore[operator]
        loss = criterion_loss(self, run, outputs, targets)
        distances = None
        if memory.prior is not None:
            # With lambda_f=0 the projector is not trained and needs no gradient.
            with torch.set_grad_enabled(self.lambda_f > 0):
                distances = memory.prior.distances(run, model, features, inputs, changed=self.augment)
            if self.lambda_f > 0:
                loss = loss + self.lambda_f * distances.mean()
        if memory.during is not None and run.first_pass:
            if self.rf_source == "supervised" or distances is None:
                with torch.no_grad():
                    distances = criterion_losses(self, run, outputs, targets)
            while memory.open_epoch < run.epoch:
                memory.during.end_epoch()
                memory.open_epoch += 1
            memory.during.add(distances, targets)
        return loss

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        memory: _Rescue = run.own
        report: dict[str, Any] = {} if memory.prior is None else {"prior": memory.prior.network.fingerprint}
        if memory.during is not None and memory.before is not None:
            memory.during.end_epoch()
            counts = class_counts(self, run)  # a class with too few cases counts 0
            during = memory.during.total(memory.before) / (1 if self.local_steps is None else memory.open_epoch + 1)
            factor = rescue_factor(memory.before, during, counts, self.rf_mode) if counts.any() else math.nan
            report["rescue_factor"] = factor
            run.store.save("divergence", run.current_round, {
                "before": memory.before, "during": during, "counts": counts, "rescue_factor": factor,
            })  # fmt: skip
        return report

    def _look_at_all(self, run: SiteRun, model: torch.nn.Module) -> None:
        """Make one pass over the unaugmented training images before the training.

        The pass computes w of the received model, and adds the prior's features that the cache lacks.
        """
        from fairflare.base.task import evaluating

        order = run.data.order("training")
        memory: _Rescue = run.own
        measured = None if memory.during is None else RunningClassMean(memory.during.num_classes)
        numbers = iter(order or ())
        with evaluating(model):
            for inputs, targets in run.data.batches("training", batch_size=self.batch_size):
                run.batch = None if order is None else [*islice(numbers, len(inputs))]
                if memory.prior is not None:
                    memory.prior.look(run, inputs)
                if measured is None:
                    continue
                inputs, targets = inputs.to(run.device), targets.to(run.device)
                features = model.embed(inputs)  # type: ignore[operator]
                if self.rf_source == "supervised" or memory.prior is None:
                    values = criterion_losses(self, run, model.head(features), targets)  # type: ignore[operator]
                else:
                    values = memory.prior.distances(run, model, features, inputs)
                measured.add(values, targets)
        run.batch = None
        if memory.prior is not None and memory.prior.cache is not None:
            memory.prior.cache.save(run)
        memory.before = None if measured is None else measured.means()


@settings
class FedMAS(Rule):
    r"""Weight sites in proportion to their rescue factors RF (Fed-MAS).

    .. math:: a_k = RF_k / \sum_j RF_j

    A factor that is not a number is replaced by the mean of the other factors. If all are 0 or none is a number,
    weights are equal.

    Args:
        mas: weight by rescue factors; False: weights by number of samples ("BSM with KD", Table 2); rescue factors are
            then not asked for.

    Source:
        Elbatel et al., Eq. (5).
    """

    report_fields = (
        Field(
            "rescue_factor", low=0, high=MAX_RESCUE_FACTOR, nan_ok=True, infinite_ok=True, required=False,
            doc="RF, the sum over the site's classes of the divergence before times that while training; classes with "
            "fewer cases than `min_cases` left out",
            reveals="it grows with the number of classes that the site has; not which. The divergences by class and "
            "the class counts that it is made of stay in the site's state folder",
            keep="`mas=false` of the job", of=TRAINING,
        ),
        Field(
            "prior", "text", required=False,
            doc="fingerprint of the frozen prior network, 64 bits of SHA-256 in hexadecimal digits",
            reveals="which published checkpoint the site holds", of=NO_IMAGES,
            alike="distances to different networks cannot be compared: give every site the same checkpoint file "
            "('prior' in its fairflare.json) and version of fairflare",
        ),
    )  # fmt: skip
    directive_docs: ClassVar[dict[str, str]] = {
        "rescue_factor": "true: the server weighs by the rescue factor, so sites measure it"
    }

    mas: Flag = True

    @property
    def weighs(self) -> bool:
        return self.mas

    def check_run(self, num_rounds: int, task: Task | None) -> None:
        refuse({
            "Fed-MAS needs a classification task, since it weights sites by class": (
                self.mas and task is not None and task.has_classes is False
            ),
        })  # fmt: skip

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        return {"rescue_factor": True} if self.mas else {}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        if self.mas and report["rescue_factor"] is None:
            Field("rescue_factor").read(report, site)  # raises an error that names the field
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if not self.mas:
            return Weighing(sites=sample_weights(inputs))
        return Weighing(sites=rescue_weights(read_reports(inputs, "rescue_factor")))


WITH_PROJECTOR = {**LEARNS, "projector_dim": 96}  # width of the packaged prior's features; MoCo's ResNet-50 has 2048
METHODS = [
    Method(
        name="fed_mas",
        kinds=("classification",),
        title="Fed-MAS",
        summary="sites far from a frozen self-supervised network weigh more; for long-tailed classes",
        rule=FedMAS,
        training=RescueTraining,
        site=BALANCED,
        learns=WITH_PROJECTOR,
        **JOB,
    ),
    Method(
        name="bsm_kd",
        kinds=("classification",),
        title="BSM + KD",
        summary="Fed-MAS's local training, weights by number of samples (ablation: no MAS)",
        rule=FedMAS,
        training=RescueTraining,
        site=BALANCED,
        server={"mas": False},
        learns=WITH_PROJECTOR,
        **JOB,
    ),
]
