r"""Define TERM, PropFair and FedEBA+ as site weights: sites at which the received model has a higher loss weigh more.

Li et al., "Tilted Empirical Risk Minimization", ICLR 2021; Zhang et al., "Proportional Fairness in Federated Learning",
TMLR 2023; Wang et al., "FedEBA+: Towards Fair and Effective Federated Learning via Entropy-Based Model", 2023.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import Positive, settings
from fairflare.core.weighting import proportional_weights, tilted_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Weighing, read_reports
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.probes import PROBE_LOSS, LossProbe


@settings
class LossWeights(FedAvg):
    r"""Weight sites by F_k, the mean training loss of the received model, and by p_k (``weighting``).

    An F that is not a number counts as the mean of the other sites' F. Equal F: the weights are p.

    Args:
        form: weights in proportion to p exp(t F) (``"term"``), p exp(F / tau) (``"fed_eba_plus"``: TERM with
            t = 1 / tau), or p / max(M - F, epsilon) (``"prop_fair"``).
        tilt: t of TERM; 0: FedAvg, below 0: sites with a lower loss weigh more.
        eba_tau: tau of FedEBA+.
        loss_bound: M of PropFair, above the loss of an untrained model; Dice + CE begins above 2.
        bound_gap: epsilon of PropFair: sites with a loss above M - epsilon weigh alike.

    Source:
        Li et al. and their code (t); Zhang et al. and their code (M, epsilon); Wang et al.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "tilt": only_with("form", "term"),
        "eba_tau": only_with("form", "fed_eba_plus"),
        "loss_bound": only_with("form", "prop_fair"),
        "bound_gap": only_with("form", "prop_fair"),
    }

    report_fields = (PROBE_LOSS,)

    form: Literal["term", "prop_fair", "fed_eba_plus"] = "term"
    tilt: float = 0.1
    eba_tau: Positive = 0.5
    loss_bound: Positive = 2.0
    bound_gap: Positive = 0.2

    def weigh(self, inputs: RoundInputs) -> Weighing:
        shares, losses = self.shares(inputs), read_reports(inputs, "probe_loss")
        if self.form == "prop_fair":
            return Weighing(sites=proportional_weights(shares, losses, self.loss_bound, self.bound_gap))
        return Weighing(sites=tilted_weights(shares, losses, self.tilt if self.form == "term" else 1 / self.eba_tau))


METHODS = [
    Method(
        name="loss_weights",
        title="Loss weights",
        summary="TERM, PropFair or FedEBA+ (form): sites with a higher loss weigh more",
        rule=LossWeights,
        training=LossProbe,
        source="Li et al., ICLR 2021; Zhang et al., TMLR 2023; Wang et al., 2023",
        **JOB,
    )
]
