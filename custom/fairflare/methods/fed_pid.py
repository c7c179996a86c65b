r"""Define FedCostWAvg, FedPIDAvg and FedPID, in which sites whose own loss falls fastest weigh more.

Maechler et al., "FedCostWAvg", 2021 (arXiv 2111.08649), "FedPIDAvg", 2023 (2304.12117), and "FedPID", 2024
(2411.02152), which won MICCAI's challenge FeTS in 2021, 2022 and 2024.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from fairflare.base.settings import settings
from fairflare.core.weighting import POWER_FLOOR, blended_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import SiteRun
from fairflare.methods.parts.probes import MAX_LOSS, LossProbe, mean_loss

WINDOW = 6  # rounds of which FedPIDAvg adds up the costs


@settings
class ReportCost(LossProbe):
    """Train as FedAvg does, and report the mean training loss of the trained model, the cost."""

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        """Do nothing before the training, as the reported cost is of the trained model."""

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return {"cost": mean_loss(self, run, model, plain=self.probe_loss == "ce")}


@settings
class FedPID(Rule):
    r"""Weight sites by their number of images n_k and by the fall of their cost c_k, the trained model's loss.

    A weight is a sum of shares, each in proportion to a number by site (``form``). A negative number counts as 0; if
    the numbers of all sites are 0, the shares of n are used in their place.

    Costs are remembered by site. A site in its first round, or whose cost is not a number, counts with the mean of the
    other sites' numbers; in the first round of all, the weights are the shares of n.

    Args:
        form: shares that are added, with c the present and c' the last cost: ``"fed_cost_w_avg"``: 0.5 by n, 0.5 by
            c' / c; ``"fed_pid_avg"``: 0.45 by n, 0.45 by c' - c, 0.1 by the sum of the last six c; ``"fed_pid"``: 0.45
            by n, 0.45 by c' - c, 0.1 by the site's first cost less c.

    Source:
        Maechler et al., the three papers; FedPID's factors are those of FedPIDAvg.
    """

    report_fields = (
        Field(
            "cost", low=0, high=MAX_LOSS, nan_ok=True, infinite_ok=True,
            doc="mean training loss of the site's model after its training", of=TRAINING, measures="loss",
        ),
    )  # fmt: skip

    form: Literal["fed_cost_w_avg", "fed_pid_avg", "fed_pid"] = "fed_pid_avg"

    _first = Saved(dict[str, float])
    _costs = Saved(dict[str, list[float]])  # the last costs of each site, the newest last

    def weigh(self, inputs: RoundInputs) -> Weighing:
        shares, first = sample_weights(inputs), dict(self._first)
        before = {site: costs[-1] for site, costs in self._costs.items()}
        costs = read_reports(inputs, "cost")
        known = {site: cost for site, cost in costs.items() if math.isfinite(cost)}
        known = known and inputs.moderated(known, "cost")
        now = {site: known.get(site, math.nan) for site in costs}
        for site, cost in known.items():
            self._first.setdefault(site, cost)
            self._costs[site] = [*self._costs.get(site, []), cost][-WINDOW:]
        if not before.keys() & now.keys():
            return Weighing(sites=shares)
        if self.form == "fed_cost_w_avg":
            ratio = {site: before.get(site, math.nan) / max(cost, POWER_FLOOR) for site, cost in now.items()}
            return Weighing(sites=blended_weights(shares, [(0.5, shares), (0.5, ratio)]))
        fall = {site: before.get(site, math.nan) - cost for site, cost in now.items()}
        if self.form == "fed_pid_avg":
            third = {site: math.fsum(self._costs.get(site, [math.nan])) for site in now}
        else:
            third = {site: first.get(site, math.nan) - cost for site, cost in now.items()}
        return Weighing(sites=blended_weights(shares, [(0.45, shares), (0.45, fall), (0.1, third)]))


METHODS = [
    Method(
        name="fed_pid",
        title="FedPID",
        summary="FedCostWAvg, FedPIDAvg or FedPID (form): sites whose loss falls fastest weigh more; fair to nobody",
        rule=FedPID,
        training=ReportCost,
        group="control",
        source="Maechler et al., 2021, 2023, 2024",
    )
]
