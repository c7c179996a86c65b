r"""q-FedAvg: sites with a higher loss count more, by a power q.

Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020; and the simpler form of FedISM's code.
"""

from __future__ import annotations

from typing import Literal

from fairflare.core.fair_rules import finite_or_mean, q_step
from fairflare.core.settings import NonNegative, Positive, settings
from fairflare.core.updates import squared_norms
from fairflare.core.weighting import POWER_FLOOR, power_weights, uniform_weights
from fairflare.methods.catalog import Method
from fairflare.methods.fed_avg import PAPER
from fairflare.methods.probes import PROBE_LOSS, LossProbe
from fairflare.methods.rule import RoundInputs, Rule, Weighing


@settings
class QFedAvg(Rule):
    r"""q-FedAvg, server half. F_k is the mean training loss of the received model.

    .. math:: w \leftarrow w^r - \frac{\sum_k F_k^q\, \Delta w_k}{\sum_k h_k}, \quad
              \Delta w_k = L (w^r - w_k), \quad h_k = q F_k^{q-1} \lVert \Delta w_k \rVert^2 + L F_k^q

    over the trained parameters; batch norm's statistics are a plain mean. F is at least 1e-10; one that is not a number
    counts as the mean of the others'. q = 0: the uniform mean of the models.

    Args:
        q: exponent, ``>= 0``.
        q_form: ``"delta_h"``, as above; ``"weighted"``: :math:`w \leftarrow \sum_k a_k w_k` with a_k in proportion
            to F_k^q (FedISM's code), whose step does not depend on L.
        learning_rate: of the sites' training: L is 1 / learning_rate.
        lipschitz: L itself, for Adam, whose steps are not learning rate times gradient; ``None``: as above.

    Source:
        Li et al., Algorithm 2 and the authors' code.
    """

    report_fields = (PROBE_LOSS,)

    q: NonNegative = 1.0
    q_form: Literal["delta_h", "weighted"] = "delta_h"
    learning_rate: Positive = 1e-3
    lipschitz: Positive | None = None

    @property
    def not_a_mean(self) -> str:
        return "" if self.q_form == "weighted" else "it makes a step along the mean (q_form=weighted does not)"

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses = finite_or_mean({site: inputs.reports[site]["probe_loss"] for site in inputs.sites})
        if self.q_form == "weighted":
            return Weighing(sites=power_weights(losses, self.q))
        floored = {site: max(loss, POWER_FLOOR) for site, loss in losses.items()}
        losses = inputs.moderated(floored, "probe_loss")
        squares = squared_norms(inputs.states, inputs.start(self), inputs.parameters)
        step = q_step(losses, squares, self.q, self.lipschitz or 1 / self.learning_rate)
        return Weighing(
            sites=power_weights(losses, self.q),
            step=step,
            buffers=uniform_weights(inputs.sites),
            values={"step": step},
        )


METHODS = [
    Method(
        name="q_fed_avg",
        title="q-FedAvg",
        summary="sites with a higher loss count more, by a power q (q_form=weighted: FedISM+'s baseline)",
        rule=QFedAvg,
        training=LossProbe,
        paper=PAPER,
        source="Li et al., ICLR 2020",
    )
]
