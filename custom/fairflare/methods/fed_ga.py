r"""Define FedGA, which raises the weight of sites where the aggregated model is much worse than their own model.

Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023, and FedISM's code.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from fairflare.base.checks import refuse
from fairflare.base.settings import Flag, Positive, settings
from fairflare.core.weighting import fedga_weights, normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import SiteRun
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.probes import MAX_LOSS, LossProbe, mean_loss

LOCAL_LOSS = "local_loss"  # name under which a site stores the training loss of its own model
STEPS = {"fedism": 0.05, "original": 0.2}  # initial step size of the weights, to be divided by the number of sites


@settings
class ReportGap(LossProbe):
    """Train as FedAvg does, and report the generalization gap (FedGA).

    The gap is the mean training loss of the received model minus that of the site's own model at the end of the round
    before; that loss is stored at the site. A site without a stored loss (in its first round, or after an absence)
    reports NaN.
    """

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        super().begin_round(run, model)
        stored = run.store.load_at(LOCAL_LOSS, run.current_round - 1)
        run.own = {"gap": math.nan if stored is None else run.own["probe_loss"] - stored["loss"]}

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        loss = mean_loss(self, run, model, plain=self.probe_loss == "ce")
        run.store.save(LOCAL_LOSS, run.current_round, {"loss": loss})
        return super().report(run, model)


@settings
class FedGA(Rule):
    r"""Move the sites' weights along their generalization gaps, with a step that shrinks over the rounds (FedGA).

    .. math:: a_k \leftarrow a_k + d_r \frac{G_k - \bar G}{\max_j \lvert G_j - \bar G \rvert}

    then clipped to [0, 1] and normalised; a starts with 1 / K, and K is the number of sites known so far. An absent
    site keeps its weight: the sites of a round share the sum of their weights. A gap that is not a number counts as the
    mean gap.

    Args:
        fedga_mode: ``"fedism"``: d_r = 0.05 / K (T - r) / T; ``"original"``: d_r = 0.2 / K (1 - (r - 2) / T), r from 0
            and no gap in the first round: the authors' loop, in which the weights of a round are moved at the end of
            the one before, so that its first step is a little above 0.2 / K.
        ga_step: step size in place of 0.05 or 0.2.
        centred: subtract the mean gap (the paper); False: the authors' code.
        shrinking: let the step shrink over the rounds; False: d_r = 0.05 / K (or 0.2 / K) in every round, also under a
            stock controller, which does not say how many rounds there are.

    Source:
        Zhang et al., section 4; FedISM's code for ``"fedism"``.
    """

    report_fields = (
        Field(
            "gap", low=-MAX_LOSS, high=MAX_LOSS, nan_ok=True, infinite_ok=True,
            doc="mean training loss of the received model less that of the site's own model of the round before",
            of=TRAINING,
            measures="loss",
        ),
    )  # fmt: skip

    fedga_mode: Literal["fedism", "original"] = "fedism"
    ga_step: Positive | None = None
    centred: Flag = True
    shrinking: Flag = True

    _weights = Saved(dict[str, float])

    def follows_num_rounds(self) -> list[str]:
        return ["shrinking"] if self.shrinking else []

    def weigh(self, inputs: RoundInputs) -> Weighing:
        refuse({
            "FedGA's step shrinks over the rounds, whose number a stock controller does not say; set "
            "shrinking=False, or run it with fairflare.flare.controller.RoundsController": (
                self.shrinking and inputs.received is None
            ),
        }, RuntimeError)  # fmt: skip
        step = self.step_of(inputs.current_round, inputs.num_rounds, len({*self._weights, *inputs.sites}))
        gaps = read_reports(inputs, "gap")
        self._weights = inputs.remembered(fedga_weights(self._weights, gaps, step, centre=self.centred))
        weights = normalise({site: self._weights[site] for site in inputs.sites})
        return Weighing(sites=weights, values={"step_of_weights": step}, details={"weights": dict(self._weights)})

    def step_of(self, current_round: int, num_rounds: int, num_sites: int) -> float:
        """Return d_r, ``>= 0``, the step size of FedGA's weights in a round."""
        size = (STEPS[self.fedga_mode] if self.ga_step is None else self.ga_step) / num_sites
        if not self.shrinking:
            return size
        passed = current_round if self.fedga_mode == "fedism" else current_round - 2
        return size * max(num_rounds - passed, 0) / max(num_rounds, 1)


METHODS = [
    Method(
        name="fed_ga",
        title="FedGA",
        summary="sites at which the aggregated model loses most against their own gain weight",
        rule=FedGA,
        training=ReportGap,
        source="Zhang et al., CVPR 2023",
        **JOB,
    )
]
