r"""FedMRL: a fairness loss, a proximal coefficient for every site chosen by QMIX, weights from a self-organizing map.

Sahoo et al., "FedMRL: Data Heterogeneity Aware Federated Multi-agent Deep Reinforcement Learning for Medical Imaging",
MICCAI 2024. The published code neither runs nor follows the paper; this is the paper, read as ``docs/fed_mrl.md`` says.
Three parts, each of which can be another one:

- A, at the sites: the objective, :math:`\ell + \frac{\mu_h}{2} \lVert w - w^r \rVert^2 + \lambda (\ell - \bar F)^2`;
- B, at the server: weights from a self-organizing map of the local models (:mod:`fairflare.methods.weightings`);
- C, at the server: agents, one a site, that choose :math:`\mu_h` (:mod:`fairflare.methods.mu_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from fairflare.core import losses
from fairflare.core.mu_rewards import INITIAL_MU, label_entropy
from fairflare.core.settings import Flag, NonNegative, Positive, settings
from fairflare.methods.catalog import Method
from fairflare.methods.fed_prox import JOB, SETTINGS, ProximalTraining, Pull
from fairflare.methods.mu_policy import FixedMu, MuPolicy, QMixMu
from fairflare.methods.reports import Field, ReportError
from fairflare.methods.rule import RoundInputs, Rule, Weighing
from fairflare.methods.training import SiteRun
from fairflare.methods.weightings import BySom, Weighting

# ------------------------------------------------------------------------------------------------ site half, part A


@dataclass
class _Fair(Pull):
    """Of one task: also the mean loss of the sites, the factor of the whole round, and what the batches lost."""

    mean_loss: float | None = None
    factor: float | None = None  # with fair_mode "epoch"
    batches: list[tuple[float, int]] = field(default_factory=list)  # (criterion, samples) of the round so far


@settings
class FairProximalTraining(ProximalTraining):
    r"""FedMRL, site half (part A).

    .. math:: J = \ell_b + \frac{\mu_h}{2} \lVert w - w^r \rVert^2 + \lambda (\ell_b - \bar F)^2

    The mean loss F of the sites comes from the server and is a constant of the round, so the first and third term have
    the gradient :math:`(1 + 2 \lambda (\ell_b - \bar F)) \nabla \ell_b`. Where it turns round (a site far better than
    the mean would be made worse), the factor stays at ``fair_clamp``. Round 0 has no fairness term.

    Args:
        use_fair: the fairness term; False: without it (ablation of part A).
        fair_weight: lambda, the weight of the fairness term.
        fair_clamp: least gradient factor; ``None``: the literal loss, without any limit.
        fair_max: largest gradient factor.
        fair_mode: ``"batch"``: the factor follows each batch; ``"epoch"``: once a round from the mean loss of the
            received model over the whole training set.
        share_entropy: report the entropy of the labels (one number about the site's class balance); False: the server
            uses a neutral value.

    Source:
        Sahoo et al., Eqs. (3), (6), (9).
    """

    use_fair: Flag = True
    fair_weight: NonNegative = 1.0
    fair_clamp: NonNegative | None = 0.0
    fair_max: Positive = 10.0
    fair_mode: Literal["batch", "epoch"] = "batch"
    share_entropy: Flag = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fair_clamp is not None and self.fair_clamp > self.fair_max:
            raise ValueError(f"fair_clamp must be at most fair_max={self.fair_max!r}, got {self.fair_clamp!r}")

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        pull = self.pull(run, model)
        own = run.own = _Fair(pull.mu, pull.received)
        told = run.directives.get("mean_loss")
        if self.use_fair and self.fair_weight > 0 and told is not None and math.isfinite(told):
            own.mean_loss = float(told)
            if self.fair_mode == "epoch":
                own.factor = self._clamped(self._whole_loss(run, model) - own.mean_loss)

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own = self.criterion_loss(run, model(inputs), targets)
        run.own.batches.append((float(own.detach()), len(inputs)))
        return self.fair(own, run.own) + losses.proximal_term(model, run.own.received, run.own.mu)

    def fair(self, own: torch.Tensor, told: _Fair) -> torch.Tensor:
        """The criterion with the fairness term: in value where the loss is literal, in gradient where it is clamped."""
        if told.mean_loss is None:
            return own
        if told.factor is not None:
            return told.factor * own
        if self.fair_clamp is None:
            return own + self.fair_weight * losses.fairness_term(own, told.mean_loss)
        return self._clamped(float(own.detach()) - told.mean_loss) * own

    def _clamped(self, excess: float) -> float:
        factor = 1 + 2 * self.fair_weight * excess
        return factor if self.fair_clamp is None else min(max(factor, self.fair_clamp), self.fair_max)

    def _whole_loss(self, run: SiteRun, model: torch.nn.Module) -> float:
        from fairflare.core.task import evaluating

        total = 0.0
        with evaluating(model):
            for inputs, targets in run.data.batches("training", batch_size=self.batch_size):
                outputs = model(inputs.to(run.device))
                total += float(self.criterion_losses(run, outputs, targets.to(run.device)).double().sum())
        return total / run.data.num_samples("training")

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        per_epoch = math.ceil(run.data.num_samples("training") / self.batch_size)
        last = run.own.batches[-per_epoch:]
        counts = run.data.class_counts("training")
        validation = run.data.batches("validation", batch_size=self.batch_size)
        return {
            "train_loss": math.fsum(value * n for value, n in last) / sum(n for _, n in last),
            "accuracy": _accuracy(run, run.task.evaluate(model, validation, run.device)),
            "global_accuracy": _accuracy(run, run.metrics),
            "num_validation": run.data.num_samples("validation"),
            "entropy": label_entropy(counts.tolist()) if self.share_entropy and counts is not None else None,
            "num_classes": len(counts) if counts is not None else None,
            "mu": run.own.mu,
        }


def _accuracy(run: SiteRun, metrics: Mapping[str, float]) -> float:
    """Accuracy where the task has one, else its primary metric; both in [0, 1]."""
    return metrics.get("accuracy", metrics[run.task.primary_metric])


# ------------------------------------------------------------------------------------------------ server half


def _moved(**parts: str) -> dict[str, str]:
    pairs = ((part, *name.partition(":")) for part, names in parts.items() for name in names.split())
    return {old: f"it is {part}.{new or old} now" for part, old, _, new in pairs}


@settings
class FedMRL(Rule):
    r"""FedMRL, server half (parts B and C).

    Args:
        mu_policy: who chooses mu: ``"qmix"``, ``"vdn"`` (Q_tot is a plain sum, the paper's Eq. 4), ``"fixed"`` (the
            sites' own mu) or ``"random"`` (a control).
        weighting: how the models are weighed: ``"som"``, ``"samples"`` or ``"uniform"``.
        mean_loss: F of the fairness term: ``"mean"`` over the sites, ``"weighted"`` by samples, or ``"sum"`` (the text
            after Eq. 9; not a fairness term any more).

    Source:
        Sahoo et al., sections 3.1 and 3.3, with the corrections that ``docs/fed_mrl.md`` lists.
    """

    report_fields = (
        Field("train_loss", low=0, nan_ok=True, infinite_ok=True),
        Field("accuracy", low=0, high=1),
        Field("global_accuracy", low=0, high=1),
        Field("num_validation", low=0, high=1e9),
        Field("entropy", low=-50, high=1e-6, required=False),
        Field("num_classes", low=1, high=1e6, required=False),
        Field("mu", low=0, required=False),
    )

    retired: ClassVar[dict[str, str]] = {**Rule.retired, "use_som": "it is weighting=som or =samples now", **_moved(
        mu_policy="actions zeta gamma agent_rate:learning_rate agent_hidden:hidden warmup updates explore cautious "
        "share_agents double_q agent_seed:seed",
        weighting="grid som_init:init som_input:space sigma_0 kappa sigma_min eta_som:eta som_epochs:epochs sigma_w "
        "som_restart:restart",
    ), "action_mode": "mu is always chosen from mu_policy.actions"}  # fmt: skip

    mu_policy: MuPolicy = field(default_factory=QMixMu)
    weighting: Weighting = field(default_factory=BySom)
    mean_loss: Literal["mean", "weighted", "sum"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mean: float | None = None

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        told: dict[str, Any] = {} if self._mean is None else {"mean_loss": self._mean}
        chosen = self.mu_policy.directives(sites)
        return {**told, "mu": chosen} if chosen else told

    def check_report(self, report: dict[str, Any], site: str) -> dict[str, Any]:
        if refusal := self.mu_policy.accepts(site):
            raise ReportError(refusal)
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if inputs.received is None and (self.weighting.needs_received or not isinstance(self.mu_policy, FixedMu)):
            raise RuntimeError(
                "FedMRL's map needs the model that the sites received, and its agents tell the sites mu, which a stock "
                "controller does not do; run it with fairflare.flare.controller.RoundsController, or set "
                "weighting=BySamples() and mu_policy=FixedMu()"
            )
        self.weighting.memory_folder = self.memory_folder
        weights, details = self.weighting.weigh(inputs)
        self._mean = self._mean_of(inputs)
        values = {} if self._mean is None else {"mean_loss": self._mean}
        values.update(self.mu_policy.choose(inputs))
        return Weighing(sites=weights, values=values, details=details)

    def _mean_of(self, inputs: RoundInputs) -> float | None:
        """F over the finite losses (MRL-2); ``None``: no fairness term next round."""
        found = {s: inputs.reports[s]["train_loss"] for s in inputs.sites}
        finite = {s: v for s, v in found.items() if math.isfinite(v)}
        if not finite:
            return None
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


METHODS = [
    Method(
        name="fed_mrl",
        title="FedMRL",
        summary="fairness loss, mu by QMIX, weights by a map (use_fair, mu_policy, weighting: ablations)",
        rule=FedMRL,
        training=FairProximalTraining,
        site={**SETTINGS, "mu": INITIAL_MU},
        source="Sahoo et al., MICCAI 2024",
        **JOB,
    )
]
