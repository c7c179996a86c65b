r"""Define CReFF: the server trains a second classifier on synthetic features that imitate the sites' gradients.

Shang et al., "Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated
Features", IJCAI 2022. The network has two classifiers (``retrained_head`` of the task): ``head`` is trained by the
sites and averaged, as in FedAvg; ``retrained`` comes from the server, is never trained at a site, and is used
for evaluation. Every model that the run saves has both.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import refuse, refuse_if
from fairflare.base.settings import NonNegative, NonNegativeInt, Positive, PositiveInt, settings
from fairflare.core.features.federated_features import classifier_gradient, match_features, retrain_classifier
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import CLASSES, TRAINING, Field
from fairflare.methods.base.rule import MakesTensors, RoundInputs, State, Weighing, sample_weights
from fairflare.methods.base.saved import Own
from fairflare.methods.bsm import JOB, LEARNS
from fairflare.methods.parts.class_gradients import MADE, REPORTED, ClassGradientTraining

if TYPE_CHECKING:
    from fairflare.base.task import Task

MAX_GRADIENT = 1e6
_SHORT = 1e-12  # norm below which a gradient has no direction


@settings
class CReFF(MakesTensors):
    r"""Average as FedAvg does, and train a second classifier anew in each round on federated features (CReFF).

    Args:
        num_features: n, features of each class; they begin as N(0, 1) and are kept from round to round.
        feature_steps, feature_rate: steps and rate of SGD that turns the features' gradients into the directions of the
            sites' (the mean over the sites that have the class, each counting alike).
        classifier_epochs, classifier_rate, classifier_batch: settings of the classifier's training from scratch.

    Source:
        Shang et al., IJCAI 2022, section 3.3 and code.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"feature_rate": only_with("feature_steps")}

    report_fields = (
        Field(
            REPORTED, "array", low=-MAX_GRADIENT, high=MAX_GRADIENT, required=False,
            doc="of each class its number, and the gradient of the server's classifier on its images: "
            "C (d + 1) numbers",
            reveals="its classes, and nearly the mean feature of the images of each, from which few may be guessed",
            keep="of fewer cases: `min_cases`; all: `secure=sums`", of=TRAINING,
        ),
        Field(
            CLASSES, "vector", low=0, required=False, doc="in its place with `secure=sums`: the classes", of=TRAINING,
        ),
    )  # fmt: skip
    makes: ClassVar[tuple[str, ...]] = (MADE,)

    num_features: PositiveInt = 100
    feature_steps: NonNegativeInt = 100
    feature_rate: NonNegative = 0.1
    classifier_epochs: PositiveInt = 300
    classifier_rate: Positive = 0.01
    classifier_batch: PositiveInt = 32

    weighs: ClassVar[bool] = False  # the reports serve the second classifier, not the weights

    _classifier = Own["tuple[torch.Tensor, torch.Tensor] | None"](lambda: None)  # classifier sent in this round
    _made = Own["dict[str, torch.Tensor]"](dict)
    federated = Own["torch.Tensor | None"](lambda: None)

    def check_run(self, num_rounds: int, task: Task | None) -> None:
        refuse({
            "CReFF needs a classification task, since it weights sites by class": (
                task is not None and task.has_classes is False
            ),
        })  # fmt: skip

    def made(self) -> dict[str, torch.Tensor]:
        return self._made

    def begin_round(self, received: State) -> None:
        """Store the second classifier that the sites receive; raise ``ValueError`` when the network has none."""
        names = [MADE + part for part in ("weight", "bias")]
        refuse({
            "CReFF needs a second classifier in the network; set retrained_head=true of the task, and let exchange "
            "match its tensors 'retrained.*'": not received.keys() >= {*names},
        })  # fmt: skip
        self._classifier = received[names[0]], received[names[1]]

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        """Return the report with its gradients as one row per class; without a second classifier they are refused."""
        gradients = report[REPORTED]
        classes, width = self._classifier[0].shape if self._classifier is not None else (0, 0)
        row = 1 + classes * (width + 1)
        if gradients is None or not len(gradients):
            return {**report, REPORTED: None}
        refuse_if(site, {
            f"field {REPORTED!r} has {len(gradients)} numbers, must be 1 to {classes} times {row}": (
                len(gradients) % row > 0 or len(gradients) > row * classes
            ),
        })  # fmt: skip
        rows = gradients.reshape(-1, row)
        labels = rows[:, 0].tolist()
        refuse_if(site, {
            f"field {REPORTED!r} must be of classes 0 to {classes - 1} in order, got {labels!s:.60}": (
                sorted(set(labels)) != labels or not set(labels) <= set(range(classes))
            ),
        })  # fmt: skip
        return {**report, REPORTED: rows}

    def weigh(self, inputs: RoundInputs) -> Weighing:
        weighing = Weighing(sites=sample_weights(inputs))
        if self._classifier is None:
            return weighing
        weight, bias = (tensor.float() for tensor in self._classifier)
        if self.federated is None:
            generator = torch.Generator().manual_seed(inputs.seed)
            self.federated = torch.randn(len(bias), self.num_features, weight.shape[1], generator=generator)
        self._seed = inputs.seed + 1 + inputs.current_round
        if self.secure:
            weighing.by_class = {str(label): self._shares(label, inputs) for label in range(len(bias))}
            weighing.means = {f"{label}.sum": torch.zeros(weight.numel() + len(bias)) for label in range(len(bias))}
        else:
            weighing.means = {
                f"{label}.sum": gradient for label, gradient in self._mean_gradients(inputs, weight).items()
            }
            self.learn(weighing)
        return weighing

    def _shares(self, label: int, inputs: RoundInputs) -> dict[str, float]:
        """Return equal weights of the sites that have a class; all 0 if the run's bounds would change these weights."""
        having = [site for site in inputs.sites if label in (inputs.reports[site][CLASSES] or ())]
        shares = {site: 1 / len(having) if site in having else 0.0 for site in inputs.sites}
        return shares if not having or inputs.bounded(shares) == shares else dict.fromkeys(shares, 0.0)

    def learn(self, weighing: Weighing) -> None:
        """Match the features to the mean gradients of the classes, and train the second classifier on them."""
        assert self._classifier is not None
        assert self.federated is not None
        weight, bias = (tensor.float() for tensor in self._classifier)
        wanted = {
            int(name.partition(".")[0]): mean.float().reshape(len(bias), -1)
            for name, mean in weighing.means.items()
            if bool(mean.any())
        }
        self.federated, before, after = match_features(
            self.federated, wanted, weight, bias, steps=self.feature_steps, learning_rate=self.feature_rate
        )
        classifier = retrain_classifier(
            self.federated,
            epochs=self.classifier_epochs,
            learning_rate=self.classifier_rate,
            batch_size=self.classifier_batch,
            seed=self._seed,
        )
        self._made = {
            MADE + part: tensor.to(like.dtype)
            for part, tensor, like in zip(("weight", "bias"), classifier, self._classifier, strict=True)
        }
        weighing.values |= {"matching_before": before, "matching_after": after, "classes": float(len(wanted))}

    def _mean_gradients(self, inputs: RoundInputs, weight: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the mean gradient of each class over the sites that have the class; leave out gradients that are 0.

        With the run's bounds no gradient is longer or shorter than ``max_update_norm`` allows, and the sites that have
        a class get no more weight in its mean than in a model. The remaining weight goes to the gradient of the class's
        present federated features.
        """
        by_label: dict[int, dict[str, torch.Tensor]] = {}
        for site in inputs.sites:
            rows = inputs.reports[site][REPORTED]
            for row in () if rows is None else rows:
                gradient = torch.from_numpy(row[1:].astype(np.float64)).reshape(len(weight), -1)
                by_label.setdefault(int(row[0]), {})[site] = gradient
        means: dict[int, torch.Tensor] = {}
        for label, by_site in by_label.items():
            lengths = {site: float(gradient.norm()) for site, gradient in by_site.items()}
            used = inputs.moderated(lengths, "")
            factors = {site: used[site] / length for site, length in lengths.items() if used[site] != length != 0}
            by_site |= {site: by_site[site] * factor for site, factor in factors.items()}
            shares = {site: 1 / len(by_site) if site in by_site else 0.0 for site in inputs.sites}
            bounded = inputs.bounded(shares)
            mean = reduce(torch.add, by_site.values()) / len(by_site)
            if bounded != shares:
                assert self.federated is not None
                assert self._classifier is not None
                now = (tensor.double() for tensor in self._classifier)
                direction = classifier_gradient(self.federated[label].double(), label, *now)
                length = statistics.median(used.values()) * (1 - sum(bounded[site] for site in by_site))
                weighted = reduce(torch.add, [bounded[site] * gradient for site, gradient in by_site.items()])
                mean = weighted + length * direction / direction.norm().clamp_min(_SHORT)
            means[label] = mean.float()
        return {label: mean for label, mean in means.items() if bool(mean.any())}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.federated is None else {"features": self.federated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.federated = state["features"].clone() if "features" in state else None


METHODS = [
    Method(
        name="creff",
        kinds=("classification",),
        title="CReFF",
        summary="FedAvg; the server trains a second classifier on features that imitate the sites' class gradients",
        rule=CReFF,
        training=ClassGradientTraining,
        learns={**LEARNS, "retrained_head": True},
        **{
            **JOB,
            "source": "Shang et al., IJCAI 2022; Elbatel et al., DeCaF @ MICCAI 2023",
            "small": {**JOB["small"], "gradient_repeats": 3, "classifier_epochs": 100},
            "keeps": ("criterion", "retrained_head"),
        },
    )
]
