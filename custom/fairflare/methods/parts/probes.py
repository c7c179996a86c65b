"""What a site measures of a model besides the task's metrics: one place for all methods that weigh by it.

Evaluation mode, no gradients, no augmentation, every sample once, sums in float64; neither parameters, buffers nor the
random numbers of the training change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import settings
from fairflare.base.task import evaluating
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.training import LocalTraining, SiteRun, criterion_losses

if TYPE_CHECKING:
    from fairflare.base.task import Task

MAX_LOSS = 1e6  # mean loss over a site's images; a network that is wrong by a million is of no use to anybody
PROBE_LOSS = Field(
    "probe_loss", low=0, high=MAX_LOSS, nan_ok=True, infinite_ok=True,
    doc="mean training loss of the received model", of=TRAINING,
)  # fmt: skip


def mean_loss(half: LocalTraining, run: SiteRun, model: torch.nn.Module, *, plain: bool = False) -> float:
    """Return the mean loss of a model over the site's training images.

    Args:
        half: whose criterion and batch size are taken.
        run: the task at the site.
        model: on the run's device.
        plain: the task's own loss instead of the criterion.

    Returns:
        NaN or infinite where a sample's loss is.
    """
    total, seen = 0.0, 0
    with torch.random.fork_rng(devices=[]), evaluating(model):
        for inputs, targets in run.data.batches("training", batch_size=half.batch_size):
            outputs, targets = model(inputs.to(run.device)), targets.to(run.device)
            found = run.task.sample_losses(outputs, targets) if plain else criterion_losses(half, run, outputs, targets)
            total += float(found.double().sum())
            seen += len(inputs)
    return total / seen if seen else math.nan


def score(half: LocalTraining, run: SiteRun, model: torch.nn.Module, split: str, *, balanced: bool = False) -> float:
    """Return the accuracy of a model on a split of the site, in [0, 1]; NaN where it is not defined.

    See :func:`score_in`.
    """
    with torch.random.fork_rng(devices=[]):
        batches = run.data.batches(split, batch_size=half.batch_size)
        return score_in(run, run.task.evaluate(model, batches, run.device), balanced=balanced)


def score_in(run: SiteRun, metrics: Mapping[str, float], *, balanced: bool = False) -> float:
    """Return the accuracy (or balanced accuracy) where the task has one, else its primary metric (Dice)."""
    name = "balanced_accuracy" if balanced else "accuracy"
    return float(metrics.get(name, metrics[run.task.primary_metric]))


class ReportsScore(LocalTraining if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mix-in of site halves whose report is a score in [0, 1] that is better when higher."""

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        metrics = task.by_name()
        metric = metrics["accuracy" if "accuracy" in metrics else task.primary_metric]
        if not metric.higher_is_better or metric.low < 0 or metric.high > 1:
            raise ValueError(
                f"it goes by a score in [0, 1] that is better when higher, and {metric.name!r} lies in {metric.range}, "
                f"better when {'higher' if metric.higher_is_better else 'lower'}"
            )


@settings
class LossProbe(LocalTraining):
    """Plain local training, and the mean training loss of the received model.

    Args:
        probe_loss: of the report: ``"ce"`` (the task's loss), or ``"la"`` (the criterion).
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "probe_loss": only_with("criterion", "logit_adjusted", "balanced_softmax", "fedlc", when=["la"])
    }

    probe_loss: Literal["ce", "la"] = "ce"

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        run.own = {"probe_loss": mean_loss(self, run, model, plain=self.probe_loss == "ce")}

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own)
