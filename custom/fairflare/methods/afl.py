r"""Agnostic federated learning: the model that is best for the worst mixture of the sites.

Mohri et al., "Agnostic Federated Learning", ICML 2019, with local epochs as in FedAvg; and the "Agnostic-FL" of
FedISM's code, which takes the worst site's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fairflare.core.acting import OnlyWith, only_with
from fairflare.core.fair_rules import finite_or_mean, simplex_projection, updated_share, with_newcomers
from fairflare.core.settings import Flag, Positive, settings
from fairflare.core.weighting import normalise
from fairflare.methods.catalog import Method
from fairflare.methods.fed_ism import JOB, SETTINGS
from fairflare.methods.model_average import ModelAverage
from fairflare.methods.probes import PROBE_LOSS, LossProbe
from fairflare.methods.rule import RoundInputs, Rule, State, Weighing


@settings
class AFL(Rule):
    r"""AFL, server half. F_k is the mean training loss of the received model.

    .. math:: w \leftarrow \sum_k \lambda_k w_k, \qquad \lambda \leftarrow \Pi(\lambda + \gamma F)

    with the projection on the simplex; all lambda are equal in the first round. A site that is absent keeps its lambda:
    those of a round share what they hold together. One that is new starts with the mean, and all are projected again.
    An F that is not a number counts as the site's last one, else as the mean.

    Args:
        afl_mode: ``"projected"``, as above; ``"argmax"`` (FedISM's code): the model of the site with the largest F
            alone, the first by name of several.
        afl_rate: gamma, step of lambda.
        report_average: the run ends with the mean of the models of all rounds, which is what the paper's bound is for;
            training goes on from the last one. Needs our own controller.

    Source:
        Mohri et al., section 4; gamma and the order of the two steps as in the code of Li et al. (q-FedAvg).
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"afl_rate": only_with("afl_mode", "projected")}

    report_fields = (PROBE_LOSS,)

    afl_mode: Literal["projected", "argmax"] = "projected"
    afl_rate: Positive = 0.1
    report_average: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lambda: dict[str, float] = {}
        self._losses: dict[str, float] = {}  # the last finite ones
        self._average = ModelAverage()

    @property
    def reports_another(self) -> bool:
        return self.report_average

    def reported(self, state: State) -> State:
        self._average.memory_folder = self.memory_folder
        return self._average.with_last(state) if self.report_average else state

    def _take_in(self, inputs: RoundInputs) -> None:
        """The model that the last round made; the initial one is nobody's result."""
        if inputs.received is None:
            raise RuntimeError(
                "AFL's average needs the models that the sites receive; run it with "
                "fairflare.flare.controller.RoundsController, or set report_average=False"
            )
        self._average.memory_folder = self.memory_folder
        if inputs.current_round > 0:
            self._average.add(inputs.received)

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if self.report_average:
            self._take_in(inputs)
        losses = finite_or_mean({site: inputs.reports[site]["probe_loss"] for site in inputs.sites}, self._losses)
        self._losses |= losses
        if self.afl_mode == "argmax":
            worst = max(inputs.sites, key=lambda site: losses[site])  # sites are sorted: the first of several
            return Weighing(sites={site: float(site == worst) for site in inputs.sites})
        before = with_newcomers(self._lambda, inputs.sites)
        weights = normalise({site: before[site] for site in inputs.sites})
        losses = inputs.moderated(losses, "probe_loss")
        held = sum(before[site] for site in inputs.sites)
        moved = simplex_projection({site: before[site] + self.afl_rate * losses[site] for site in inputs.sites}, held)
        after = updated_share(before, moved) if held > 0 else before
        self._lambda = inputs.remembered(normalise(after))
        return Weighing(sites=weights, details={"lambda": dict(self._lambda)})

    def state_dict(self) -> dict[str, Any]:
        self._average.memory_folder = self.memory_folder
        return {"lambda": dict(self._lambda), "losses": dict(self._losses), "average": self._average.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._lambda = {site: float(value) for site, value in state["lambda"].items()}
        self._losses = {site: float(value) for site, value in state["losses"].items()}
        self._average.memory_folder = self.memory_folder
        self._average.load_state_dict(state["average"])


METHODS = [
    Method(
        name="afl",
        title="AFL",
        summary="weights that a step towards the worst mixture of the sites moves (afl_mode=argmax: Agnostic-FL)",
        rule=AFL,
        training=LossProbe,
        site=SETTINGS,
        source="Mohri et al., ICML 2019",
        **JOB,
    )
]
