r"""Define FedNova, in which sites that make more local steps do not pull the model towards their own optimum.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020. Every
site's update is divided by its effective number of steps, and the weighted sum is multiplied by their mean number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import refuse, refuse_if
from fairflare.base.settings import Flag, NonNegative, settings
from fairflare.core.aggregation.fair_rules import AccumulatedSteps, most_accumulated, nova_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import NO_IMAGES, Field
from fairflare.methods.base.rule import RoundInputs, Steps, Weighing, read_reports, sample_weights
from fairflare.methods.base.training import SiteRun
from fairflare.methods.fed_prox import JOB, ProximalTraining, Pull

log = logging.getLogger(__name__)


@dataclass
class _Counted(Pull):
    """Store one task's effective number of steps; ``only_counted`` names an optimizer whose steps count 1 each."""

    moving: ClassVar = ("steps", "only_counted")
    steps: AccumulatedSteps = field(default_factory=AccumulatedSteps)
    only_counted: str = ""


@settings
class NovaTraining(ProximalTraining):
    """Train with an optional proximal term, and report the effective number of steps, the norm of a (FedNova).

    The norm accounts for SGD's momentum and the proximal term. Adam has no such norm, so its steps count 1 each (the
    log says so). The norm is of this round's gradients only, without momentum kept from earlier rounds
    (``keep_optimizer_state``).

    Args:
        mu: strength of a proximal term; 0: none.
        nesterov: momentum in Nesterov's form, as with every other method here; False: the authors'.

    Raises:
        ValueError: SGD with ``learning_rate * mu >= 1``, which overshoots the received model.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"nesterov": only_with("optimizer", "sgd")}
    own_type = _Counted

    mu: NonNegative = 0.0
    nesterov: Flag = True

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse({
            f"learning_rate * mu must be below 1, got {self.learning_rate!r} * {self.mu!r}": (
                self.optimizer == "sgd" and self.learning_rate * self.mu >= 1
            ),
        })  # fmt: skip

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        if not self.nesterov and isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["nesterov"] = False
        loss = super().step(run, model, optimizer, closure)
        memory: _Counted = run.own
        if run.untold:
            return loss
        if isinstance(optimizer, torch.optim.SGD):
            group = optimizer.param_groups[0]
            memory.steps.add(momentum=group["momentum"], nesterov=group["nesterov"], pull=group["lr"] * memory.mu)
        else:
            memory.only_counted = type(optimizer).__name__
            memory.steps.add()
        return loss

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        memory: _Counted = run.own
        if memory.only_counted:
            log.info("site %s: %s has no FedNova norm; its steps count 1 each", run.site, memory.only_counted)
        return {"step_norm": max(memory.steps.total, 1.0) if memory.steps.total else 0.0}


@settings
class FedNova(Steps):
    r"""Average updates per local step, and apply them with the sites' mean number of steps (FedNova).

    .. math:: w \leftarrow w^r + \tau_{eff} \sum_k p_k \frac{w_k - w^r}{\lVert a_k \rVert_1}, \quad
              \tau_{eff} = \sum_k p_k \lVert a_k \rVert_1

    with p_k = n_k / sum n; batch norm's statistics are averaged with p_k.

    Args:
        effective_steps: what tau_eff is the mean of: ``"norms"``, or ``"steps"``, the numbers of steps (the authors'
            code with a proximal term). A site that does not tell its number of steps counts with its norm.
    """

    report_fields = (
        Field(
            "step_norm", low=1, high=1e9,
            doc="the norm of a: what the optimizer steps of the round come to; plain SGD and Adam: their number",
            reveals="with the job's batch size the number of images", of=NO_IMAGES,
        ),
    )  # fmt: skip

    effective_steps: Literal["norms", "steps"] = "norms"

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        norm, most = report["step_norm"], math.inf if num_steps is None else most_accumulated(num_steps)
        too_large = norm > most * (1 + 1e-9)
        refuse_if(site, {f"field 'step_norm' is {norm:g}, {num_steps} steps come to {most:g} at most": too_large})
        return {**report, "num_steps": num_steps}

    def weigh(self, inputs: RoundInputs) -> Weighing:
        shares = sample_weights(inputs)
        norms = inputs.moderated(read_reports(inputs, "step_norm"), "step_norm")
        steps = None
        if self.effective_steps == "steps":
            reported = read_reports(inputs, "num_steps")
            steps = inputs.moderated({site: reported[site] or norm for site, norm in norms.items()}, "num_steps")
        weights, self.step = nova_weights(shares, norms, steps)
        return Weighing(sites=weights, buffers=shares, values={"step": self.step})


METHODS = [
    Method(
        name="fed_nova",
        title="FedNova",
        summary="updates count per step: sites with more local steps do not pull more",
        rule=FedNova,
        training=NovaTraining,
        group="control",
        source="Wang et al., NeurIPS 2020",
        **JOB,
    )
]
