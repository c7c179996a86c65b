r"""Define agnostic federated learning (AFL), which trains the model that is best for the worst mixture of the sites.

Mohri et al., "Agnostic Federated Learning", ICML 2019, with local epochs as in FedAvg. The module also has the
"Agnostic-FL" of FedISM's code, which takes the worst site's model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import Positive, settings
from fairflare.core.aggregation.fair_rules import add_newcomers, finite_or_mean, simplex_projection
from fairflare.core.weighting import normalise, update_share
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports
from fairflare.methods.base.saved import Saved
from fairflare.methods.fed_ism import JOB
from fairflare.methods.parts.probes import PROBE_LOSS, LossProbe


@settings
class AFL(Rule):
    r"""Move the sites' weights towards sites with a higher F_k, the mean training loss of the received model (AFL).

    .. math:: w \leftarrow \sum_k \lambda_k w_k, \qquad \lambda \leftarrow \Pi(\lambda + \gamma F)

    with :math:`\Pi` the projection on the simplex; all lambda start equal. An absent site keeps its lambda:
    the sites of a round share the sum of their lambda. A new site starts with the mean lambda, and all are projected
    again. An F that is not a number is replaced by the site's last F, or else by the mean of the other sites' F.

    Args:
        afl_mode: ``"projected"``, as above; ``"argmax"`` (FedISM's code): the model of the site with the largest F
            alone, the first by name of several.
        afl_rate: gamma, step size of the weights lambda.

    Source:
        Mohri et al., section 4; gamma and the order of the two steps as in the code of Li et al. (q-FedAvg).
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"afl_rate": only_with("afl_mode", "projected")}

    report_fields = (PROBE_LOSS,)

    afl_mode: Literal["projected", "argmax"] = "projected"
    afl_rate: Positive = 0.1

    _lambda = Saved(dict[str, float])
    _losses = Saved(dict[str, float])  # last finite F of each site

    @property
    def reads_models(self) -> str:  # type: ignore[override]
        return "its model is that of one site (afl_mode=projected is a mean)" * (self.afl_mode == "argmax")

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses = finite_or_mean(read_reports(inputs, "probe_loss"), self._losses)
        self._losses |= losses
        if self.afl_mode == "argmax":
            worst = max(inputs.sites, key=lambda site: losses[site])  # of sites with equal losses, the first by name
            return Weighing(sites={site: float(site == worst) for site in inputs.sites})
        before = add_newcomers(self._lambda, inputs.sites)
        weights = normalise({site: before[site] for site in inputs.sites})
        losses = inputs.moderated(losses, "probe_loss")
        held = sum(before[site] for site in inputs.sites)
        moved = simplex_projection({site: before[site] + self.afl_rate * losses[site] for site in inputs.sites}, held)
        self._lambda = inputs.remembered(normalise(update_share(before, moved) if held > 0 else before))
        return Weighing(sites=weights, details={"lambda": dict(self._lambda)})


METHODS = [
    Method(
        name="afl",
        title="AFL",
        summary="weights that a step towards the worst mixture of the sites moves (afl_mode=argmax: Agnostic-FL)",
        rule=AFL,
        training=LossProbe,
        source="Mohri et al., ICML 2019",
        **JOB,
    )
]
