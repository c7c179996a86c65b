from math import exp

from fairflare.core.aggregation.fair_rules import finite_or_mean
from fairflare.base.settings import NonNegative, settings
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.parts.probes import PROBE_LOSS, LossProbe
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing


@settings
class TERM(Rule):
    """Weights in proportion to n_k exp(t F_k), F_k the mean training loss of the received model.

    Args:
        t: the tilt; 0: FedAvg. The paper also has t < 0: declare ``t: float`` for that.
    """

    report_fields = (PROBE_LOSS,)
    t: NonNegative = 1.0

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses = finite_or_mean({site: inputs.reports[site]["probe_loss"] for site in inputs.sites})
        most = max(losses.values())  # exp of a difference does not overflow
        tilted = {site: inputs.num_samples[site] * exp(self.t * (losses[site] - most)) for site in inputs.sites}
        return Weighing(sites=normalise(tilted))


METHODS = [Method("term", "TERM", "sites with a higher loss weigh exponentially more", TERM, LossProbe)]
