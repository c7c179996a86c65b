r"""Define FedMRL's site half (part A): a proximal term, and a fairness term pulling its loss to the sites' mean loss.

Sahoo et al., MICCAI 2024; :mod:`fairflare.methods.fed_mrl` has the paper and the server half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import refuse
from fairflare.base.settings import Flag, NonNegative, Positive, settings
from fairflare.core import losses
from fairflare.core.agents.mu_rewards import round_entropy
from fairflare.methods.base.training import SiteRun, criterion_loss
from fairflare.methods.fed_prox import ProximalTraining, Pull
from fairflare.methods.parts.probes import ReportsScore, mean_loss, score, score_in


@dataclass
class _Fair(Pull):
    """Store one task's data for the loss: the sites' mean loss, the gradient factors and the losses of the batches."""

    moving: ClassVar = ("factors", "batches")
    mean_loss: float | None = None
    factors: list[float] = field(default_factory=list)  # clamped gradient factors of the batches so far
    batches: list[tuple[int, float, int]] = field(default_factory=list)  # epoch, criterion, samples of each batch


@settings
class FairProximalTraining(ReportsScore, ProximalTraining):
    r"""Train with FedMRL's local objective J, a proximal term and a fairness term beside the criterion (part A).

    .. math:: J = \ell_b + \frac{\mu_h}{2} \lVert w - w^r \rVert^2 + \lambda (\ell_b - \bar F)^2

    The server sends the mean loss F of the sites, a constant of the round. So the first and third term together have
    the gradient :math:`(1 + 2 \lambda (\ell_b - \bar F)) \nabla \ell_b`. If the factor would be negative (a site far
    better than the mean would be made worse), it is limited to ``fair_clamp``. Round 0 has no fairness term. Adam is
    invariant to the scale of a gradient, so with Adam the factor multiplies the step's learning rate, unless the loss
    is literal.

    Args:
        optimizer: "sgd", as the paper; "adam", as the authors' code; "adamw"; "task", a MONAI bundle's own.
        use_fair: the fairness term; False: without it (ablation of part A).
        fair_weight: lambda, the weight of the fairness term.
        fair_clamp: least gradient factor; ``None`` for the literal loss, without any limit.
        fair_max: largest gradient factor.
        share_entropy: report the entropy of the labels (one number about the site's class balance) to one decimal,
            without the classes that have too few cases; False, as in a preinstalled job: the server uses a neutral
            value.

    Source:
        Sahoo et al., Eqs. (3), (6), (9).
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        name: only_with("use_fair") for name in ("fair_weight", "fair_clamp", "fair_max")
    }

    own_type = _Fair

    optimizer: Literal["adam", "adamw", "sgd", "task"] = "sgd"
    use_fair: Flag = True
    fair_weight: NonNegative = 1.0
    fair_clamp: NonNegative | None = 0.0
    fair_max: Positive = 10.0
    share_entropy: Flag = True

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse({
            f"fair_clamp must be at most fair_max={self.fair_max!r}, got {self.fair_clamp!r}": (
                self.fair_clamp is not None and self.fair_clamp > self.fair_max
            ),
        })  # fmt: skip

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        super().begin_round(run, model)
        mean_loss = run.directives.get("mean_loss")
        if self.use_fair and self.fair_weight > 0 and mean_loss is not None and math.isfinite(mean_loss):
            run.own.mean_loss = float(mean_loss)

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        objective = criterion_loss(self, run, model(inputs), targets)
        run.own.batches.append((run.epoch, float(objective.detach()), len(inputs)))
        return self.fair(objective, run.own) + losses.proximal_term(model, run.own.received, run.own.mu)

    def fair(self, objective: torch.Tensor, memory: _Fair) -> torch.Tensor:
        """Return the loss of a batch with the fairness term.

        With ``fair_clamp=None`` the term's value is added, as the paper writes it. Otherwise the gradient of loss and
        term together is a multiple of the loss's gradient. That factor is clamped; it multiplies the loss here, or the
        learning rate, and then the loss is returned unchanged.
        """
        if memory.mean_loss is None:
            return objective
        if self.fair_clamp is None:
            return objective + self.fair_weight * losses.fairness_term(objective, memory.mean_loss)
        factor = 1 + 2 * self.fair_weight * (float(objective.detach()) - memory.mean_loss)
        factor = min(max(factor, self.fair_clamp), self.fair_max)
        memory.factors.append(factor)
        return objective if self._scales_rate else factor * objective

    @property
    def _scales_rate(self) -> bool:
        return self.optimizer != "sgd" and self.fair_clamp is not None

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        loss = closure()
        rates = [group["lr"] for group in optimizer.param_groups]
        if self._scales_rate and run.own.factors:
            for group in optimizer.param_groups:
                group["lr"] *= run.own.factors[-1]
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return loss

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        # With local_steps the last pass may have only just begun, so the loss is then taken over all steps.
        last = [(value, n) for epoch, value, n in run.own.batches if self.local_steps is not None or epoch == run.epoch]
        counts = run.data.class_counts("training")
        reported = counts if self.share_entropy else None
        factors, least = run.own.factors, self.fair_clamp
        clamped = [] if least is None else [factor <= least or factor >= self.fair_max for factor in factors]
        return {
            "train_loss": (
                mean_loss(self, run, model)
                if run.hides
                else math.fsum(value * n for value, n in last) / sum(n for _, n in last)
            ),
            "accuracy": score(self, run, model, "validation"),
            "global_accuracy": score_in(run, run.metrics),
            "num_validation": run.data.num_samples("validation"),
            "entropy": round_entropy(reported.tolist()) if reported is not None and bool(reported.any()) else None,
            "num_classes": len(counts) if counts is not None else None,
            "mu": run.own.mu,
            "clamped": sum(clamped) / len(clamped) if clamped else None,
        }
