r"""FlexFair: a penalty on how unequal losses are, over the sites or over groups of people.

Xing et al., "Achieving flexible fairness metrics in federated medical imaging", Nature Communications 2025: the
objective plus a weight times the variance of a measure over the parties that are to be served alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import NonNegative, settings
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing, sample_weights
from fairflare.methods.base.training import SiteError, SiteRun, criterion_losses
from fairflare.methods.fed_ism import JOB, SETTINGS
from fairflare.methods.parts.group_sums import check_attribute, known_groups, numbers_of
from fairflare.methods.parts.probes import PROBE_LOSS, LossProbe

MEAN = "mean_loss"


@settings
class VariancePenalty(LossProbe):
    r"""FlexFair, site half: the mean loss of a batch plus :math:`\lambda` times a variance.

    Over the sites it is :math:`(L - \bar L)^2`, L the batch's loss and :math:`\bar L` the mean over the sites in the
    last round: its gradient is that of the variance of the sites' losses, but for a factor. Over groups it is the
    variance of the mean losses of those groups that are in the batch.

    Args:
        flexfair_over: whose losses are to be alike: ``"sites"`` or ``"groups"``.
        flexfair_attribute: of people, for ``"groups"``.
        flexfair_weight: lambda.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"flexfair_attribute": only_with("flexfair_over", "groups")}

    flexfair_over: Literal["sites", "groups"] = "sites"
    flexfair_attribute: str = ""
    flexfair_weight: NonNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flexfair_over == "groups" and not self.flexfair_attribute:
            raise ValueError("flexfair_over='groups' needs flexfair_attribute, an attribute that the datalists declare")

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        if self.flexfair_attribute:
            check_attribute(run, self.flexfair_attribute)
        return super().check(run, model)

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = criterion_losses(self, run, model(inputs), targets)
        mean = losses.mean()
        if self.flexfair_over == "groups":
            return mean + self.flexfair_weight * self._over_groups(run, losses)
        told = run.directives.get(MEAN)
        return mean if told is None else mean + self.flexfair_weight * (mean - float(told)) ** 2

    def _over_groups(self, run: SiteRun, losses: torch.Tensor) -> torch.Tensor:
        """Variance of the groups' mean losses in a batch; 0 with fewer than two."""
        if run.batch is None:
            raise SiteError(f"site {run.site!r}: flex_fair needs data that say which image is which in a batch")
        numbers = torch.from_numpy(numbers_of(run, self.flexfair_attribute, "training")[run.batch]).to(losses.device)
        groups = [numbers == group for group in range(known_groups(run, self.flexfair_attribute))]
        means = [losses[of].mean() for of in groups if bool(of.any())]
        return torch.stack(means).var(unbiased=False) if len(means) > 1 else losses.new_zeros(())


@settings
class FlexFair(Rule):
    """FlexFair, server half: FedAvg by samples, and the mean of the sites' losses for the next round.

    Args:
        flexfair_over: as at the sites.
    """

    report_fields = (PROBE_LOSS,)
    directive_docs: ClassVar[dict[str, str]] = {
        MEAN: "mean over the sites, by samples, of the training losses of the last round's model"
    }

    flexfair_over: Literal["sites", "groups"] = "sites"

    _outlive = ("mean",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mean: float | None = None

    @property
    def weighs(self) -> bool:
        return False

    def weigh(self, inputs: RoundInputs) -> Weighing:
        shares = sample_weights(inputs)
        told = {site: inputs.reports[site]["probe_loss"] for site in inputs.sites}
        known = {site: loss for site, loss in told.items() if math.isfinite(loss)}
        if known:
            losses = inputs.moderated(known, "probe_loss")
            of = normalise({site: shares[site] for site in known})
            self._mean = math.fsum(of[site] * losses[site] for site in known)
        return Weighing(sites=shares, values={} if self._mean is None else {MEAN: self._mean})

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        return {} if self._mean is None or self.flexfair_over == "groups" else {MEAN: self._mean}


METHODS = [
    Method(
        name="flex_fair",
        title="FlexFair",
        summary="a penalty on the variance of the losses over the sites, or over groups of people",
        rule=FlexFair,
        training=VariancePenalty,
        site=SETTINGS,
        source="Xing et al., Nature Communications 2025",
        **JOB,
    )
]
