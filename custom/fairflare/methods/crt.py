r"""Define cRT: after a method's rounds only the classifier is retrained, on samples drawn equally by class.

Kang et al., "Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020; combined with
federated methods: Elbatel et al., DeCaF @ MICCAI 2023, Table 2. The setting ``crt_rounds`` of a run adds it to any
method (:mod:`fairflare.federation.server.retraining`); the method ``crt`` is FedAvg with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fairflare.base.settings import Flag, NonNegativeInt, PositiveInt, Whole, settings
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.bsm import JOB, LEARNS
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.parts.classifier_retraining import CLASSIFIER, DIRECTIVE


@settings
class ClassifierAverage(Rule):
    """Average the sites' classifiers in the rounds of classifier retraining (cRT).

    Args:
        weights: ``"samples"``: by number of training samples; ``"method"``: the weights of the method's last round
            (those of the layer ``head``, where they are by layer); a site without one has the mean of the others.
        epochs, mask_absent, seed: settings that are sent to the sites, see
            :mod:`fairflare.methods.parts.classifier_retraining`.
        first_round: first round of the re-training, from 0.
    """

    directive_docs: ClassVar[dict[str, str]] = {
        DIRECTIVE: "in `check`, and in the rounds behind the method's own (`crt_rounds`): only the classifier is "
        "trained, and how (`local_epochs`, `mask_absent`; `first`, `seed`: it begins anew). With `mask_absent` the "
        "update that is sent back shows which classes the site has"
    }

    weights: Literal["samples", "method"] = "samples"
    epochs: PositiveInt = 1
    mask_absent: Flag = True
    seed: Whole = 0
    first_round: NonNegativeInt = 0

    _of_method = Saved(dict[str, float])

    def remember(self, weighing: Weighing) -> None:
        """Store the sites' weights of a round of the method before cRT, for ``weights="method"``."""
        of_layer = (weighing.layers or {}).get(CLASSIFIER.rstrip("."))
        self._of_method = dict(of_layer if of_layer is not None else weighing.sites or {})

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        settings = {"local_epochs": self.epochs, "mask_absent": self.mask_absent}
        return {DIRECTIVE: {**settings, "first": current_round == self.first_round, "seed": self.seed}}

    def weigh(self, inputs: RoundInputs) -> Weighing:
        details = {"crt_round": inputs.current_round - self.first_round}
        known = [self._of_method[site] for site in inputs.sites if site in self._of_method]
        if self.weights == "samples" or not known:
            return Weighing(sites=sample_weights(inputs), details=details)
        mean = sum(known) / len(known)
        return Weighing(sites=normalise({s: self._of_method.get(s, mean) for s in inputs.sites}), details=details)


METHODS = [
    Method(
        name="crt",
        kinds=("classification",),
        title="FedAvg + cRT",
        summary="FedAvg, then the classifier alone is trained anew, on classes in equal parts (any method: crt_rounds)",
        rule=FedAvg,
        training=LocalTraining,
        learns=LEARNS,
        run={"crt_rounds": 10},
        **{
            **JOB,
            "source": "Kang et al., ICLR 2020; Elbatel et al., DeCaF @ MICCAI 2023",
            "keeps": (),
        },
    )
]
