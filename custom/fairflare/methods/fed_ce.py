r"""Define FedCE, which weights sites by their contribution to the model's direction and to its accuracy.

Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023. The module
has the variants of NVIDIA FLARE's implementation and of FedISM's code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from fairflare.base.checks import refuse
from fairflare.base.settings import Flag, NonNegative, settings
from fairflare.core.aggregation.fair_rules import contributions, finite_or_mean, minus_state
from fairflare.core.aggregation.updates import cosines as cosines_of
from fairflare.core.weighting import normalise
from fairflare.exchange.messages import BySite
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import TRAINING, VALIDATION, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.methods.parts.probes import ReportsScore, score

Preset = Literal["original", "fedism"]
OWN_MODEL, SCORES = "own_model", "minus_scores"  # names under which a site stores its own model and its scores
LEAST_REST = 1e-6  # least weight of the other sites; with less, subtracting a site leaves nothing


@settings
class MinusModel(ReportsScore, LocalTraining):
    """Train as FedAvg does, and report how much worse the received model is without this site (FedCE).

    From the second round on, the site subtracts its own model of the round before from the received model, with the
    coefficient that the server sends, and measures the accuracy of the rest. It reports 1 minus the mean of these
    accuracies over the rounds. Without an own model of exactly that round, or without a coefficient, nothing is
    measured and the report repeats its last value. Own models stay at the site.

    Args:
        preset: ``"original"``: accuracy (else the primary metric: Dice) on the validation images; ``"fedism"``:
            balanced accuracy on the training images.
        stale_ok: let a site that missed the round before use its last own model.
        include_round0: count 0 for the first round in the mean, as in FLARE's example.

    Source:
        Jiang et al., section 3; FLARE's ``PTFedCEHelper``.
    """

    preset: Preset = "original"
    stale_ok: Flag = False
    include_round0: Flag = True

    def made_of(self, name: str) -> tuple[str, ...]:
        return VALIDATION if self.preset == "original" else TRAINING

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        stored = run.store.load_before(SCORES, run.current_round) if run.current_round > 0 else None
        total, count = (stored["total"], stored["count"]) if stored else (0.0, int(self.include_round0))
        score = self._score_without_us(run, model)
        if math.isfinite(score):
            total, count = total + score, count + 1
        run.store.save(SCORES, run.current_round, {"total": total, "count": count})
        run.own = {"minus_score": min(max(1.0 - total / count, 0.0), 1.0) if count else 1.0}

    def _score_without_us(self, run: SiteRun, model: torch.nn.Module) -> float:
        coefficient = (run.directives.get("coefficient") or {}).get(run.site)
        if coefficient is None or run.current_round == 0 or not 0 <= coefficient <= 1 - LEAST_REST:
            return math.nan
        last_model = run.store.load_at(OWN_MODEL, run.current_round - 1)
        if last_model is None and self.stale_ok:
            last_model = run.store.load_before(OWN_MODEL, run.current_round)
        if last_model is None:
            return math.nan
        received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        try:
            model.load_state_dict(minus_state(received, last_model, coefficient))
            return score(self, run, model, self.made_of("minus_score")[0], balanced=self.preset == "fedism")
        finally:
            model.load_state_dict(received)

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        trained = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        run.store.save(OWN_MODEL, run.current_round, trained)
        return dict(run.own)


@settings
class FedCE(Rule):
    r"""Weight sites by their estimated contributions in direction and accuracy (FedCE).

    .. math:: g_k = 1 - \overline{\cos}(\Delta_k, \bar\Delta - c_k \Delta_k), \quad
              \bar\Delta = \textstyle\sum_j c_j \Delta_j, \quad
              c \propto \hat g + \hat e \ \text{ or } \ \hat g \circ \hat e

    The cosine is over the trained parameters, its mean over the rounds. e_k is the report ``minus_score``; a hat means
    normalised over the sites. In the first round c_k is 1 / K. An absent site keeps its values, a new site starts with
    c_k = 1 / (K + 1). A score that its site withholds (``min_cases``) is replaced by the others' mean score.

    Args:
        combine: ``"sum"`` or ``"multiply"``; ``None`` for the preset's (sum; FedISM: multiply).
        preset: ``"original"``: FLARE's; ``"fedism"``: no floor, and the coefficients' mean over the rounds is used.
        floor: least value of each estimate and of their combination; ``None`` for the preset's (1e-6; 0).
        stale_ok: send coefficients also to sites that missed the round before.

    Source:
        Jiang et al., section 3; FLARE's ``FedCEModelAggregator``.
    """

    reads_models: ClassVar[str] = "it compares each site's update with those of the others"
    report_fields = (
        Field(
            "minus_score", low=0, high=1, home_ok=True, of=VALIDATION, measures="error",
            doc="1 less the mean accuracy (or primary metric), over the rounds, of the received model without this "
            "site's own",
        ),
    )  # fmt: skip
    directive_docs: ClassVar[dict[str, str]] = {
        "coefficient": "the weight that this site's model had in the one it receives; nothing of the others"
    }

    combine: Literal["sum", "multiply"] | None = None
    preset: Preset = "original"
    floor: NonNegative | None = None
    stale_ok: Flag = False

    _coefficients = Saved(dict[str, float])
    _cosines = Saved(dict[str, list[float]])  # mean cosine and number of rounds, by site
    _sums = Saved(dict[str, list[float]])  # sum of coefficients and number of rounds, by site
    _last = Saved(list[str])  # sites that took part in the previous round

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        coefficients = self._coefficients if self.stale_ok else {site: self._coefficients[site] for site in self._last}
        return (
            {"coefficient": BySite({site: coefficients[site] for site in sites if site in coefficients})}
            if coefficients
            else {}
        )

    def weigh(self, inputs: RoundInputs) -> Weighing:
        refuse({
            "FedCE tells every site its coefficient, which a stock controller does not do; run it with "
            "fairflare.flare.controller.RoundsController (or FLARE's own FedCE recipe)": inputs.received is None,
        }, RuntimeError)  # fmt: skip
        sites = inputs.sites
        entry = 1 / (len(self._coefficients) + 1) if self._coefficients else 1 / len(sites)
        before = {site: self._coefficients.get(site, entry) for site in sites}
        cosines = cosines_of(inputs.whole_gram(self), before, leave_out=True)
        for site, cosine in cosines.items():
            mean, count = self._cosines.get(site, [0.0, 0])
            self._cosines[site] = [mean + (cosine - mean) / (count + 1), count + 1]
        directions = {site: max(1 - self._cosines[site][0], 0.0) for site in sites}
        fedism = self.preset == "fedism"
        measured = contributions(
            directions,
            finite_or_mean(read_reports(inputs, "minus_score")),
            multiply=fedism if self.combine is None else self.combine == "multiply",
            floor=(0.0 if fedism else 1e-6) if self.floor is None else self.floor,
        )
        weights = inputs.remembered(self._mean_over_rounds(measured) if fedism else measured)
        self._coefficients |= weights
        self._last = list(sites)
        return Weighing(sites=weights, details={"cosine": cosines, "direction": directions})

    def _mean_over_rounds(self, coefficients: Mapping[str, float]) -> dict[str, float]:
        for site, coefficient in coefficients.items():
            total, count = self._sums.get(site, [0.0, 0])
            self._sums[site] = [total + coefficient, count + 1]
        return normalise({site: self._sums[site][0] / self._sums[site][1] for site in coefficients})


METHODS = [
    Method(
        name="fed_ce",
        title="FedCE",
        summary="weights by contribution in direction and in accuracy (combine=multiply; preset=fedism)",
        rule=FedCE,
        training=MinusModel,
        source="Jiang et al., CVPR 2023",
    )
]
