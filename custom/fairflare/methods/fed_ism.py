r"""Define FedISM and FedISM+, which aim at equally flat losses at all sites whose image quality differs.

Wu et al., "Fair Federated Medical Image Classification Against Quality Shift via Inter-Client Progressive State
Matching" (FedISM+), and its predecessor FedISM (IJCAI 2024). The method has two halves that also work alone:

- SALT, at the sites: sharpness-aware local training (GSAM) with logit adjustment;
- SAGA, at the server: sites whose loss is sharper (variant S), or higher at a distance (variant L), weigh more.

FedISM searches at a fixed distance rho; FedISM+ lets it grow over the rounds (Eq. 12).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.machine.computing import plainly
from fairflare.base.settings import Flag, NonNegative, Positive, Share, settings
from fairflare.core.weighting import moving_average, normalise, power_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, read_reports, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, criterion_losses
from fairflare.methods.parts.probes import MAX_LOSS

if TYPE_CHECKING:
    from fairflare.core.sharpness import GSAM

VARIANTS = {"S": "sharpness", "L": "perturbed_loss"}


def distance(current_round: int, num_rounds: int, rho: float, tau: float | None) -> float:
    """Return the search distance of a round: fixed (FedISM), or growing with exponent ``tau`` (FedISM+, Eq. 12)."""
    from fairflare.core.sharpness import search_distance

    return rho if tau is None else search_distance(min(current_round, num_rounds - 1), num_rounds, rho, tau)


@dataclass
class _Salt:
    """Store one task's search distance, steps (which refer to the model), and report on the received model."""

    distance: float
    push: dict[str, torch.Tensor] = field(default_factory=dict)  # FedLESAM's perturbation, by parameter
    stepper: GSAM | None = None
    report: dict[str, Any] = field(default_factory=dict)


@settings
class SharpnessReport(LocalTraining):
    r"""Train, and report the received model's sharpness at the site, if the server half asks for it.

    .. math:: \epsilon = \rho_r\, g / \lVert g \rVert, \quad L_0 = \bar\ell(\theta), \quad
              L_p = \bar\ell(\theta + \epsilon), \quad S = L_p - L_0

    with g the gradient over the site's whole training set (Eqs. 9-11), in evaluation mode, without augmentation. The
    site reports one number: S or L_p, whichever the server's ``variant`` uses for the weights.

    Args:
        rho: distance, or the last round's where ``tau`` is set; finite, ``>= 0``. 0: plain steps, S = 0. The server
            half's value comes with each round and overrides this one.
        tau: exponent of the growth of ``rho`` over the rounds, ``> 0``; ``None`` for a fixed ``rho``.
        probe_loss: loss in the report: ``"ce"`` (the task's loss, as the authors' code), or ``"la"`` (the criterion).

    Source:
        Wu et al., section III-B, and the authors' code.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "probe_loss": only_with("criterion", "logit_adjusted", "balanced_softmax", "fedlc", when=["la"]),
    }

    rho: NonNegative = 0.05
    tau: Positive | None = None
    probe_loss: Literal["ce", "la"] = "ce"

    def follows_num_rounds(self) -> list[str]:
        return super().follows_num_rounds() + ([] if self.tau is None else ["tau"])

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        announced = run.directives.get("search_distance")
        computed = distance(run.current_round, run.num_rounds, self.rho, self.tau)
        run.own = _Salt(computed if announced is None else float(announced))
        if announced is not None and not run.private:  # the server weights sites by the report
            run.own.report = self._probe(run, model)

    def _probe(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss_of = (
                run.task_on("training").sample_losses
                if self.probe_loss == "ce"
                else partial(criterion_losses, self, run)
            )
            return loss_of(outputs, targets.to(outputs.device))

        batches = run.data.batches("training", batch_size=self.batch_size)
        from fairflare.core.sharpness import sharpness

        with plainly(model):  # compute in plain float32, since a small difference of losses is measured
            measured = sharpness(model, losses, batches, run.own.distance)
        wanted = VARIANTS[run.directives.get("variant", "S")]
        return {wanted: getattr(measured, wanted)}

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own.report)

    def released(self, run: SiteRun) -> dict[str, tuple[float, ...]]:
        """Return the distances from the received model at which L_p or S needs losses; private sites add noise."""
        announced, wanted = run.directives.get("search_distance"), VARIANTS[run.directives.get("variant", "S")]
        return (
            {}
            if announced is None
            else {wanted: (float(announced), 0.0) if wanted == "sharpness" else (float(announced),)}
        )


@settings
class SharpnessAwareTraining(SharpnessReport):
    """Train with GSAM steps and logit adjustment (SALT), and report the received model's sharpness at the site.

    Args:
        salt: sharpness-aware steps; False: plain ones (ablation: SAGA only).
        gsam_alpha: weight of GSAM's gap, ``>= 0``; 0 is SAM. The authors' code has 0.1, the paper is silent.
    """

    under_dp: ClassVar[bool] = True
    acts: ClassVar[dict[str, OnlyWith | None]] = {"gsam_alpha": only_with("salt")}

    salt: Flag = True
    gsam_alpha: NonNegative = 0.1

    @property
    def gradients(self) -> int:
        """Return how many gradients of the same batch one optimizer step computes (2 with SAM)."""
        return 1 + self.salt

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        if not self.salt:
            return super().step(run, model, optimizer, closure)
        memory: _Salt = run.own
        if memory.stepper is None:
            from fairflare.core.sharpness import GSAM

            memory.stepper = GSAM(optimizer, rho=memory.distance, alpha=self.gsam_alpha, model=model)
        loss: torch.Tensor = memory.stepper.step(closure)
        if memory.stepper.skipped_steps and bool(torch.isfinite(loss)):
            raise SiteError(
                f"site {run.site!r}: the loss or its gradient is not finite at the search distance "
                f"{memory.distance:g} in round {run.current_round}; lower rho or learning_rate, or set max_grad_norm"
            )
        return loss


@settings
class FedISM(Rule):
    r"""Weight sites in proportion to a power of their reported sharpness, averaged over the rounds (SAGA).

    .. math:: \tilde w_k = \frac{x_k^q}{\sum_j x_j^q}, \qquad w_k \leftarrow \beta \tilde w_k + (1 - \beta) w_k

    with x = S (variant S) or L_p (variant L), at least 1e-10. A value that is not a number is replaced by the
    median of the other sites' values. A site's average starts with its first weight and does not change while the site
    is absent. The weights of a round are normalised over its sites. If all values are at the floor, weights are equal.

    Args:
        variant: weights by sharpness (``"S"``) or by perturbed loss (``"L"``).
        q: exponent of the weights, ``>= 0``.
        beta: share of this round in the moving average, in (0, 1].
        rho, tau: search distance that is sent to the sites, as in :class:`SharpnessAwareTraining`.
        saga: weight by sharpness; False: weights by number of samples (ablation: SALT only); the reports are then not
            asked for.

    Source:
        Wu et al., section III-C, Eq. (12) for the distance.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {name: only_with("saga") for name in ("variant", "q", "beta")}

    report_fields = (
        Field(
            "sharpness", low=-MAX_LOSS, high=MAX_LOSS, nan_ok=True, infinite_ok=True, required=False,
            doc="S, by how much the mean training loss of the received model rises at the search distance "
            "(`variant=S`)",
            keep="`saga=false` of the job", of=TRAINING, measures="loss",
        ),
        Field(
            "perturbed_loss", low=0, high=MAX_LOSS, nan_ok=True, infinite_ok=True, required=False,
            doc="L_p, the mean training loss at that distance (`variant=L`, in place of S)",
            keep="`saga=false` of the job", of=TRAINING, measures="loss",
        ),
    )  # fmt: skip
    directive_docs: ClassVar[dict[str, str]] = {
        "search_distance": "the distance of this round, which follows from the job's settings",
        "variant": "which of the two figures the server weighs by, and a site reports",
    }

    variant: Literal["S", "L"] = "S"
    q: NonNegative = 2.0
    beta: Share = 0.5
    rho: NonNegative = 0.05
    tau: Positive | None = None
    saga: Flag = True

    _average = Saved(dict[str, float])  # moving average of each site's weight, also of absent sites

    @property
    def weighs(self) -> bool:
        return self.saga

    @property
    def noisy_from(self) -> float:
        """Return the number of patients times epsilon below which the noise in reports makes the weights random."""
        return 1000.0 if self.variant == "S" else 100.0

    def follows_num_rounds(self) -> list[str]:
        return ["tau"] if self.saga and self.tau is not None else []

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        if not self.saga:
            return {}
        search_distance = distance(current_round, num_rounds, self.rho, self.tau)
        return {"search_distance": search_distance, "variant": self.variant}

    def check_report(self, report: dict[str, Any], site: str, num_steps: int | None) -> dict[str, Any]:
        wanted = VARIANTS[self.variant]
        if self.saga and report[wanted] is None:
            Field(wanted).read(report, site)  # raises an error that names the field
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if not self.saga:
            return Weighing(sites=sample_weights(inputs))
        fresh = inputs.remembered(power_weights(read_reports(inputs, VARIANTS[self.variant]), self.q))
        self._average = moving_average(fresh, self._average, self.beta)
        return Weighing(
            sites=normalise({site: self._average[site] for site in inputs.sites}),
            values={"search_distance": distance(inputs.current_round, inputs.num_rounds, self.rho, self.tau)},
        )


# Settings of the paper and its code, which makes a new Adam optimizer in every round.
FIXED = {"rho": 0.05}
GROWING = {"rho": 0.1, "tau": 0.5}
JOB: dict[str, Any] = {
    "task": "classification",
    "small": {"max_pool": True},
    "num_sites": 5,
    "num_rounds": 5,
}
_COMMON: dict[str, Any] = {"rule": FedISM, "training": SharpnessAwareTraining, **JOB}
METHODS = [
    Method(
        name="fed_ism",
        title="FedISM",
        summary="sharpness-aware training; sites with sharper losses weigh more (saga=false, salt=false: ablations)",
        server={**FIXED, "variant": "S"},
        site=FIXED,
        group="local",
        passes="2",
        source="Wu et al., IJCAI 2024",
        **_COMMON,
    ),
    Method(
        name="fed_ism_plus_s",
        title="FedISM+ (S)",
        summary="FedISM with a search distance that grows over the rounds",
        server={**GROWING, "variant": "S"},
        site=GROWING,
        group="local",
        passes="2",
        source="Wu et al., FedISM+",
        **_COMMON,
    ),
    Method(
        name="fed_ism_plus_l",
        title="FedISM+ (L)",
        summary="FedISM+ that weighs by the loss at the search distance instead of the sharpness",
        server={**GROWING, "variant": "L"},
        site=GROWING,
        group="local",
        passes="2",
        source="Wu et al., FedISM+",
        **_COMMON,
    ),
]
