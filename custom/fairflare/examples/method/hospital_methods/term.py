from math import exp

from fairflare import AggregationWeights, LocalTraining, Method, NonNegative, ReportField, RoundInputs, Rule, settings


class ReportLoss(LocalTraining):
    """Site half: plain training, and the loss of the received model on the validation images."""

    def report(self, run, model):
        return {"probe_loss": run.metrics["loss"]}


@settings
class TERM(Rule):
    """Server half: weights in proportion to n_k exp(t F_k), F_k the loss at site k, n_k its number of images.

    Args:
        t: the tilt; 0: FedAvg. The paper also has t < 0: declare ``t: float`` for that.
    """

    report_fields = (ReportField("probe_loss", low=0.0, doc="validation loss of the received model"),)
    t: NonNegative = 1.0

    def weigh(self, inputs: RoundInputs) -> AggregationWeights:
        losses = {site: inputs.reports[site]["probe_loss"] for site in inputs.sites}
        most = max(losses.values())  # exp of a difference does not overflow
        tilted = {site: inputs.num_samples[site] * exp(self.t * (losses[site] - most)) for site in inputs.sites}
        return AggregationWeights(sites={site: value / sum(tilted.values()) for site, value in tilted.items()})


METHODS = [Method("term", "TERM", "sites with a higher loss weigh exponentially more", TERM, ReportLoss)]
