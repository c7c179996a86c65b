r"""Define FedMRL: a fairness loss, proximal coefficients chosen by QMIX, and weights from a self-organizing map.

Sahoo et al., "FedMRL: Data Heterogeneity Aware Federated Multi-agent Deep Reinforcement Learning for Medical Imaging",
MICCAI 2024. The published code neither runs nor follows the paper; this module follows the paper, interpreted as
``docs/fed_mrl.md`` describes. FedMRL has three parts, each of which can be replaced:

- A, at the sites (:mod:`fairflare.methods.parts.fair_training`): the objective
  :math:`\ell + \frac{\mu_h}{2} \lVert w - w^r \rVert^2 + \lambda (\ell - \bar F)^2`;
- B, at the server: weights from a self-organizing map of the local models (:mod:`fairflare.methods.parts.weightings`);
- C, at the server: one agent for each site, which chooses :math:`\mu_h` (:mod:`fairflare.methods.parts.mu_policy`).
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import few, refuse, true_texts
from fairflare.base.settings import settings
from fairflare.core.agents.mu_rewards import INITIAL_MU
from fairflare.exchange.messages import BySite
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import NO_IMAGES, TRAINING, VALIDATION, Field, ReportError
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports
from fairflare.methods.base.saved import Own
from fairflare.methods.fed_prox import JOB
from fairflare.methods.parts.fair_training import FairProximalTraining
from fairflare.methods.parts.mu_policy import SHOWN, MuPolicy, QMixMu
from fairflare.methods.parts.probes import MAX_LOSS
from fairflare.methods.parts.weightings import BySamples, BySom, Weighting

__all__ = ["METHODS", "FairProximalTraining", "FedMRL", "winsorise"]

log = logging.getLogger(__name__)
WIDTH = 4.0  # in the mean loss F, a site's loss is limited to [median / WIDTH, WIDTH * median]
REACH = 1.0  # in the mean loss F, a site's loss is also limited to [median - REACH, median + REACH]


def winsorise(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values, limited to [m - 1, m + 1] and to [m / 4, 4 m], with m their median.

    Thus no minority of the sites can move the mean by 1/2 or more. A shift of 1/2 would let the default fairness term
    stop the training of a site whose loss is the median. With two sites neither site is a minority.

    Args:
        values: loss of each of one or more sites, ``>= 0``, finite.
    """
    middle = statistics.median(values.values())
    low, high = max(middle / WIDTH, middle - REACH), min(middle * WIDTH, middle + REACH)
    return {site: min(max(value, low), high) for site, value in values.items()}


@settings
class FedMRL(Rule):
    r"""Weight sites by a map of their models, and choose mu for each site with agents (FedMRL, parts B and C).

    Args:
        mu_policy: who chooses mu: ``"qmix"``, ``"vdn"`` (Q_tot is a plain sum, the paper's Eq. 4), ``"bandit"`` (ours:
            Thompson sampling by site), ``"fixed"`` (the sites' own mu) or ``"random"`` (a control).
        weighting: how the models are weighed: ``"som"``, ``"samples"`` or ``"uniform"``.
        mean_loss: F of the fairness term: ``"mean"`` over the sites, ``"weighted"`` by samples, or ``"sum"`` (the text
            after Eq. 9; not a fairness term any more).
        fair_mean: ``"winsorised"`` (ours): in F a site's loss counts within 1 of the median loss and within a quarter
            and four times of it, so that no single site can stop the training of the others; ``"plain"``: as it is
            reported, the paper's.

    Source:
        Sahoo et al., sections 3.1 and 3.3, with the corrections that ``docs/fed_mrl.md`` lists.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {name: only_with("use_fair") for name in ("mean_loss", "fair_mean")}

    report_fields = (
        Field(
            "train_loss", low=0, high=MAX_LOSS, nan_ok=True, infinite_ok=True,
            doc="mean criterion of the last epoch (with `local_steps` of all steps), without the two further terms",
            of=TRAINING,
        ),
        Field(
            "accuracy", low=0, high=1, home_ok=True, of=VALIDATION,
            doc="of the local model on the validation images; the primary metric where a task has no accuracy",
        ),
        Field("global_accuracy", low=0, high=1, home_ok=True, of=VALIDATION, doc="the same of the received model"),
        Field("num_validation", low=0, high=1e9, home_ok=True, of=VALIDATION, doc="number of validation images"),
        Field(
            "entropy", low=-50, high=1e-6, required=False,
            doc="sum of p log p over the classes of the training images, to one decimal, the same in every round; "
            "classes with fewer cases than `min_cases` left out",
            reveals="how unequal the class counts are: 0, one class only; -log of the number of classes: all alike. "
            "With `num_samples`, of two classes: the share of the larger one within 0.1, and their counts exactly in "
            "2 % of sites with 60 images, in none with 500; of four or five classes the largest share within 0.3. Of "
            "12 images in 3 classes the counts, exactly in 24 %",
            keep="`share_entropy=false` of the job, as in a preinstalled one", of=TRAINING,
        ),
        Field(
            "num_classes", low=1, high=1e6, required=False, of=NO_IMAGES,
            doc="number of classes of the task, not of the site",
        ),
        Field("mu", low=0, high=1e6, required=False, doc="the proximal coefficient that was used", of=NO_IMAGES),
        Field(
            "clamped", low=0, high=1, required=False,
            doc="share of the batches whose fairness factor sat at its limit", of=TRAINING,
        ),
    )  # fmt: skip
    directive_docs: ClassVar[dict[str, str]] = {
        "mean_loss": "F, mean or sum of the sites' `train_loss` of the round before; of two sites each then knows "
        "the other's",
        "mu": "the proximal coefficient of this site in this round; nothing of the others",
    }

    mu_policy: MuPolicy = field(default_factory=QMixMu)
    weighting: Weighting = field(default_factory=BySom)
    mean_loss: Literal["mean", "weighted", "sum"] = "mean"
    fair_mean: Literal["winsorised", "plain"] = "winsorised"

    _mean = Own[float | None](lambda: None)

    def follows_num_rounds(self) -> list[str]:
        return ["mu_policy"] if self.mu_policy.follows_num_rounds else []

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        sent: dict[str, Any] = {} if self._mean is None else {"mean_loss": self._mean}
        chosen = self.mu_policy.directives(sites)
        return {**sent, "mu": BySite(chosen)} if chosen else sent

    def counted(self, report: Mapping[str, Any]) -> Mapping[str, float]:
        count = report["num_validation"]
        return {"validation": count} if math.isfinite(count) else {}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        if refusal := self.mu_policy.accepts(site):
            raise ReportError(refusal)
        return report

    @property
    def weighs(self) -> bool:
        return not isinstance(self.weighting, BySamples)

    @property
    def reads_models(self) -> str:  # type: ignore[override]
        return "its map compares the sites' models (weighting=samples does not)" * self.weighting.needs_received

    def weigh(self, inputs: RoundInputs) -> Weighing:
        refuse({
            "FedMRL's map needs the model that the sites received, and its agents tell the sites mu, which a stock "
            "controller does not do; run it with fairflare.flare.controller.RoundsController, or set "
            "weighting=BySamples() and mu_policy=FixedMu()": (
                inputs.received is None and (self.weighting.needs_received or self.mu_policy.tells)
            ),
        }, RuntimeError)  # fmt: skip
        self.weighting.memory_folder = self.memory_folder
        weights, details = self.weighting.weigh(inputs)
        warnings = _warn_of_clamp(inputs)
        self._mean = self._mean_of(inputs, warnings)
        values = {**({} if self._mean is None else {"mean_loss": self._mean}), **self.mu_policy.choose(inputs)}
        warnings += self.mu_policy.warnings
        self.mu_policy.warnings.clear()
        for line in warnings:
            log.warning("round %d: %s", inputs.current_round, line)
        if warnings:
            details = {**details, "warnings": warnings}
        return Weighing(sites=weights, values=values, details=details)

    def _mean_of(self, inputs: RoundInputs, warnings: list[str]) -> float | None:
        """Return F, the mean or sum of the sites' finite losses, or ``None`` if the next round has no fairness term."""
        finite = {s: v for s, v in read_reports(inputs, "train_loss").items() if math.isfinite(v)}
        if not finite:
            return None
        if self.fair_mean == "winsorised":
            before, finite = finite, winsorise(finite)
            moved = [f"{s!r} {before[s]:g} as {finite[s]:g}" for s in finite if finite[s] != before[s]]
            warnings += true_texts({f"losses far from the median count in F only in part: {few(moved, SHOWN)}": moved})
        if self.mean_loss == "sum":
            return math.fsum(finite.values())
        share = {s: inputs.num_samples[s] if self.mean_loss == "weighted" else 1 for s in finite}
        return math.fsum(share[s] * v for s, v in finite.items()) / sum(share.values())

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean_loss": self._mean,
            "mu_policy": self.mu_policy.state_dict(),
            "weighting": self.weighting.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weighting.memory_folder = self.memory_folder
        self._mean = None if state["mean_loss"] is None else float(state["mean_loss"])
        self.mu_policy.load_state_dict(state["mu_policy"])
        self.weighting.load_state_dict(state["weighting"])


def _warn_of_clamp(inputs: RoundInputs) -> list[str]:
    """Return a warning that lists sites whose gradient factor was at a limit in most batches, or an empty text."""
    shares = {site: inputs.reports[site].get("clamped") or 0.0 for site in inputs.sites}
    stuck = [f"{site!r} {share:.0%}" for site, share in shares.items() if share > 0.5]
    return true_texts({
        f"the fairness factor sat at fair_clamp or fair_max in most batches of {few(stuck, SHOWN)}; at fair_clamp=0 "
        "such batches teach nothing: a smaller fair_weight, or a fair_clamp above 0, keeps the site training": stuck,
    })  # fmt: skip


METHODS = [
    Method(
        name="fed_mrl",
        title="FedMRL",
        summary="fairness loss, mu by QMIX, weights by a map (use_fair, mu_policy, weighting: ablations)",
        rule=FedMRL,
        training=FairProximalTraining,
        site={"mu": INITIAL_MU},
        source="Sahoo et al., MICCAI 2024",
        **{
            **JOB,
            "preinstalled": {"share_entropy": False},
            # The small job's five rounds are too few for agents to learn, so mu is fixed, as in fed_prox's job. The
            # fairness term holds a round's losses near those of the round before, so its weight is small here.
            "small": {**JOB["small"], "mu_policy": "fixed", "mu": 0.1, "fair_weight": 0.03},
        },
    )
]
