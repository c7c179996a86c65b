"""Define the methods of docs/results/protocol.md's hypotheses 1 and 4, for ``fairflare compare --method-file``.

Hypothesis 1: FedRDN's random input with other weights. Hypothesis 4: FedAvg for the first half of the rounds, then the
method. With a weight for each site alone (no second phase) the two halves of a method compose by inheritance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fairflare.base.settings import settings
from fairflare.methods.afl import AFL
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Weighing, sample_weights
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.methods.fed_ism import GROWING, FedISM, SharpnessAwareTraining
from fairflare.methods.fed_rdn import FedRDN, RandomStatistics
from fairflare.methods.loss_weights import LossWeights
from fairflare.methods.parts.probes import PROBE_LOSS, LossProbe

RANDOM_INPUT: dict[str, Any] = {"learns": {"adapters": "fed_rdn"}, "keeps": ("adapters",), "group": "local"}


def is_early(round_or_run: RoundInputs | SiteRun) -> bool:
    """Return whether a round belongs to the first half, in which a warm start is FedAvg."""
    return round_or_run.current_round < round_or_run.num_rounds // 2


# ------------------------------------------------------------------------------------------------ hypothesis 1


@settings
class RandomInputAndLoss(RandomStatistics, LossProbe):
    """Train on images normalised by a random site's statistics, and report the received model's loss."""

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        RandomStatistics.begin_round(self, run, model)
        LossProbe.begin_round(self, run, model)

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return RandomStatistics.report(self, run, model) | LossProbe.report(self, run, model)


@settings
class RandomInputTerm(FedRDN, LossWeights):
    """Weight sites as TERM does, and send all sites' input statistics: FedRDN's own weights are the parent's."""

    report_fields = (*FedRDN.report_fields, PROBE_LOSS)
    weighs = True


@settings
class RandomInputAfl(FedRDN, AFL):
    """Weight sites as AFL does, and send all sites' input statistics."""

    report_fields = (*FedRDN.report_fields, PROBE_LOSS)
    weighs = True
    _outlive = (*FedRDN._outlive, *AFL._outlive)
    reads_models = AFL.reads_models  # type: ignore[assignment]

    def weigh(self, inputs: RoundInputs) -> Weighing:
        super().weigh(inputs)  # stores the statistics
        return AFL.weigh(self, inputs)


# ------------------------------------------------------------------------------------------------ hypothesis 4


@settings
class WarmTerm(LossWeights):
    """Average as FedAvg does for half the rounds, then weight sites as TERM does."""

    def weigh(self, inputs: RoundInputs) -> Weighing:
        return Weighing(sites=sample_weights(inputs)) if is_early(inputs) else super().weigh(inputs)


@settings
class WarmFedISM(FedISM):
    """Average as FedAvg does for half the rounds, then weight sites as FedISM+ does."""

    def weigh(self, inputs: RoundInputs) -> Weighing:
        return Weighing(sites=sample_weights(inputs)) if is_early(inputs) else super().weigh(inputs)


@settings
class WarmSharpnessAware(SharpnessAwareTraining):
    """Make plain steps for half the rounds, then sharpness-aware ones."""

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        step = LocalTraining.step if is_early(run) else SharpnessAwareTraining.step
        return step(self, run, model, optimizer, closure)


METHODS = [
    Method("rdn_term", "FedRDN + TERM", "random input, sites with a higher loss weigh more",
           RandomInputTerm, RandomInputAndLoss, **RANDOM_INPUT),
    Method("rdn_afl", "FedRDN + AFL", "random input, weights move towards the worst mixture",
           RandomInputAfl, RandomInputAndLoss, **RANDOM_INPUT),
    Method("warm_term", "FedAvg, then TERM", "FedAvg for half the rounds, then TERM", WarmTerm, LossProbe),
    Method("warm_fed_ism_plus_l", "FedAvg, then FedISM+ (L)", "FedAvg for half the rounds, then FedISM+ (L)",
           WarmFedISM, WarmSharpnessAware, server={**GROWING, "variant": "L"}, site=GROWING, group="local", passes="2"),
]  # fmt: skip
