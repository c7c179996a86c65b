r"""Define q-FedAvg, in which sites with a higher loss weigh more, by a power q of the loss.

Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020. The module also has
the simpler form in FedISM's code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from fairflare.base.checks import refuse_if
from fairflare.base.settings import NonNegative, Positive, settings
from fairflare.core.aggregation.fair_rules import finite_or_mean, q_bend, q_step
from fairflare.core.aggregation.updates import squared_norms
from fairflare.core.weighting import POWER_FLOOR, power_weights, uniform_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import LENGTH, TRAINING, Field
from fairflare.methods.base.rule import RoundInputs, Steps, Weighing, read_reports
from fairflare.methods.parts.probes import PROBE_LOSS, LossProbe


@settings
class QFedAvg(Steps):
    r"""Weight sites by a power of F_k, the mean training loss of the received model at site k (q-FedAvg).

    .. math:: w \leftarrow w^r - \frac{\sum_k F_k^q\, \Delta w_k}{\sum_k h_k}, \quad
              \Delta w_k = L (w^r - w_k), \quad h_k = q F_k^{q-1} \lVert \Delta w_k \rVert^2 + L F_k^q

    over the trained parameters; batch norm's statistics are a plain mean. F is at least 1e-10; an F that is not a
    number is replaced by the mean of the other sites' F. q = 0: the uniform mean of the models.

    L is the Lipschitz constant of the gradients. The paper uses 1 / learning rate for L, which holds only if an
    update is learning rate times gradient: with Adam the step would be some 1e-4 of the mean change. By default L is
    measured. The squared gradient of a loss that is never negative is at most 2 L F, and at most L F if the loss falls
    exponentially. With L times the change in place of the gradient, as in the paper, this gives

    .. math:: L = 1 / \sum_k a_k \lVert w_k - w^r \rVert^2 / F_k, \quad a_k = F_k^q / \sum_j F_j^q

    in each round; the least L of all rounds so far is used. In the round in which this L was measured the step is
    1 / (1 + q) of the mean change, and no step is shorter.

    Args:
        q: exponent of the loss, ``>= 0``.
        q_form: ``"delta_h"``, as above; ``"weighted"``: :math:`w \leftarrow \sum_k a_k w_k` with a_k in proportion
            to F_k^q (FedISM's code), whose step does not depend on L.
        learning_rate: learning rate of the sites' training, for ``lipschitz="rate"``.
        lipschitz: L of ``"delta_h"``: ``"auto"``: measured, as above; ``"rate"``: 1 / learning_rate, the paper's, for
            plain SGD; or a number.

    Source:
        Li et al., Algorithm 2 and the authors' code.
    """

    report_fields = (
        PROBE_LOSS,
        Field(
            LENGTH, low=0, required=False, of=TRAINING,
            doc="`delta_h` with `secure=sums`: norm of the update of the trained parameters",
        ),
    )  # fmt: skip
    directive_docs: ClassVar[dict[str, str]] = {LENGTH: f"with `secure=sums`: the report has `{LENGTH}`"}

    q: NonNegative = 1.0
    q_form: Literal["delta_h", "weighted"] = "delta_h"
    learning_rate: Positive = 1e-3
    lipschitz: Positive | Literal["auto", "rate"] = "auto"

    _measured = math.inf  # least L that was measured so far

    @property
    def only_mean(self) -> str:  # type: ignore[override]
        return "" if self.q_form == "weighted" else f"{super().only_mean} (q_form=weighted does not)"

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        return {LENGTH: True} if self.secure and self.q_form == "delta_h" else {}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        refuse_if(site, {
            f"the report lacks the field {LENGTH!r} that secure=sums needs; lower min_cases there, or set "
            "q_form=weighted": bool(self.directives(0, 0, [site])) and report[LENGTH] is None,
        })  # fmt: skip
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses = finite_or_mean(read_reports(inputs, "probe_loss"))
        if self.q_form == "weighted":
            return Weighing(sites=power_weights(losses, self.q))
        losses = inputs.moderated({site: max(loss, POWER_FLOOR) for site, loss in losses.items()}, "probe_loss")
        if self.secure:
            lengths = inputs.moderated(read_reports(inputs, LENGTH), LENGTH)
            squares = {site: norm * norm for site, norm in lengths.items()}
        else:
            squares = squared_norms(inputs.states, inputs.start(self), inputs.parameters)
        lipschitz = self._constant(q_bend(losses, squares, self.q))
        self.step = q_step(losses, squares, self.q, lipschitz)
        return Weighing(
            sites=power_weights(losses, self.q),
            buffers=uniform_weights(inputs.sites),
            values={"step": self.step, "lipschitz": lipschitz},
        )

    def _constant(self, bend: float) -> float:
        """Return the Lipschitz constant L of a round; ``lipschitz="auto"`` updates the least L by 1 / ``bend``."""
        if self.lipschitz == "rate":
            return 1 / self.learning_rate
        if self.lipschitz != "auto":
            return self.lipschitz
        if 0 < bend < math.inf:
            self._measured = min(1 / bend, self._measured)
        return self._measured if self._measured < math.inf else 1.0  # no model has changed yet, so that any L is right

    def state_dict(self) -> dict[str, Any]:
        return {"lipschitz": self._measured} if self._measured < math.inf else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._measured = state.get("lipschitz", math.inf)


METHODS = [
    Method(
        name="q_fed_avg",
        title="q-FedAvg",
        summary="sites with a higher loss count more, by a power q (q_form=weighted: FedISM+'s baseline)",
        rule=QFedAvg,
        training=LossProbe,
        source="Li et al., ICLR 2020",
    )
]
