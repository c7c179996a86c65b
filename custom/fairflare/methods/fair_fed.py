r"""FairFed: weights that follow how far a site's accuracy is from that of all.

Ezzeldin et al., "FairFed: Enabling Group Fairness in Federated Learning", AAAI 2023, with plain accuracy as its metric;
and what FedISM's code calls so, which does the opposite.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from fairflare.base.settings import NonNegative, settings
from fairflare.core.aggregation.fair_rules import fair_fed_gaps, fair_fed_weights
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import TRAINING, VALIDATION, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, sample_weights
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.methods.fed_ism import JOB, SETTINGS
from fairflare.methods.parts.probes import ReportsScore, score, score_in


@settings
class ReportAccuracy(ReportsScore, LocalTraining):
    """FairFed, site half: plain training, and how good the received model is here.

    Args:
        fairfed_mode: ``"original"``: accuracy on the validation images; ``"fedism"``: balanced accuracy on the training
            images. A task without accuracy: its primary metric.
    """

    fairfed_mode: Literal["original", "fedism"] = "original"

    def made_of(self, name: str) -> tuple[str, ...]:
        return VALIDATION if self.fairfed_mode == "original" else TRAINING

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        if self.fairfed_mode == "original":  # the validation images have just been looked at
            run.own = {"accuracy": score_in(run, run.metrics)}
        else:
            run.own = {"accuracy": score(self, run, model, "training", balanced=True)}

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own)


@settings
class FairFed(Rule):
    r"""FairFed, server half.

    .. math:: \omega_k \leftarrow \omega_k - \beta (\Delta_k - \bar\Delta), \quad
              \Delta_k = \lvert A - A_k \rvert, \quad A = \textstyle\sum_j p_j A_j

    clipped at 0 and normalised; omega starts with p_k = n_k / sum n. A site that is absent keeps its omega: those of a
    round share what they hold together; all 0: alike. An accuracy that is not a number moves nothing.

    Args:
        fairfed_mode: ``"original"``: as above, a site far from the mean loses weight, also the worst one; ``"fedism"``:
            the sum over j is missing as in FedISM's code, so that good sites lose weight; the first round is by
            samples.
        fairfed_beta: beta, ``>= 0``.

    Source:
        Ezzeldin et al., AAAI 2023, Algorithm 1; FedISM's code.
    """

    report_fields = (
        Field(
            "accuracy", low=0, high=1, nan_ok=True,
            doc="of the received model, on validation or (`fairfed_mode=fedism`) training images; the primary metric "
            "where a task has no accuracy",
            of=VALIDATION,
        ),
    )  # fmt: skip

    fairfed_mode: Literal["original", "fedism"] = "original"
    fairfed_beta: NonNegative = 0.1

    _outlive = ("omega",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._omega: dict[str, float] = {}

    def weigh(self, inputs: RoundInputs) -> Weighing:
        shares = sample_weights(inputs)
        before = {**{site: shares[site] for site in inputs.sites if site not in self._omega}, **self._omega}
        plain = self.fairfed_mode == "original"
        gaps = fair_fed_gaps({s: inputs.reports[s]["accuracy"] for s in inputs.sites}, shares, summed=plain)
        if plain or inputs.current_round > 0:
            before = fair_fed_weights(before, gaps, self.fairfed_beta)
        self._omega = inputs.remembered(normalise(before))
        weights = normalise({site: self._omega[site] for site in inputs.sites})
        return Weighing(sites=weights, details={"accuracy_gap": gaps, "omega": dict(self._omega)})


METHODS = [
    Method(
        name="fair_fed",
        title="FairFed",
        summary="sites far from the mean accuracy lose weight (fairfed_mode=fedism: as in FedISM's code)",
        rule=FairFed,
        training=ReportAccuracy,
        site=SETTINGS,
        source="Ezzeldin et al., AAAI 2023",
        **JOB,
    )
]
