"""Measure a model's loss or accuracy at a site, for methods that compute weights from these values.

The model is in evaluation mode, without gradients; every sample is seen once, without augmentation; sums are in
float64. The parameters, the buffers and the random numbers of the training do not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.checks import refuse
from fairflare.base.settings import settings
from fairflare.base.task import evaluating
from fairflare.methods.base.reports import STAY, TRAINING, Field
from fairflare.methods.base.training import LocalTraining, SiteRun, criterion_losses

if TYPE_CHECKING:
    from fairflare.base.task import Task

MAX_LOSS = 1e6  # largest mean loss over a site's images that a report may have
PROBE_LOSS = Field(
    "probe_loss", low=0, high=MAX_LOSS, nan_ok=True, infinite_ok=True,
    doc="mean training loss of the received model", of=TRAINING, measures="loss",
)  # fmt: skip


def mean_loss(training: LocalTraining, run: SiteRun, model: torch.nn.Module, *, plain: bool = False) -> float:
    """Return the mean loss of a model over the site's training images.

    Args:
        training: the method's site half, whose criterion and batch size are used.
        run: the server's task that this site performs, with the site's data.
        model: the network, on the run's device.
        plain: use the task's own loss instead of the criterion.

    Returns:
        The mean loss; NaN or infinite if a sample's loss is, and NaN without any image.
    """
    total, seen = 0.0, 0
    with torch.random.fork_rng(devices=[]), evaluating(model):
        for inputs, targets in run.data.batches("training", batch_size=training.batch_size):
            loss_of = run.task_on("training").sample_losses if plain else partial(criterion_losses, training, run)
            values = loss_of(model(inputs.to(run.device)), targets.to(run.device))
            total += float(values.double().sum())
            seen += len(inputs)
    return total / seen if seen else math.nan


def score(
    training: LocalTraining, run: SiteRun, model: torch.nn.Module, split: str, *, balanced: bool = False
) -> float:
    """Return a model's (balanced) accuracy on a split of the site; NaN if it is undefined.

    For a task without accuracy it is the primary metric (:func:`score_in`).
    """
    with torch.random.fork_rng(devices=[]):
        batches = run.data.batches(split, batch_size=training.batch_size)
        return score_in(run, run.task_on(split).evaluate(model, batches, run.device), balanced=balanced)


def score_in(run: SiteRun, metrics: Mapping[str, float], *, balanced: bool = False) -> float:
    """Return the (balanced) accuracy among a task's metrics; the primary metric (Dice) if the task has no accuracy."""
    name = "balanced_accuracy" if balanced else "accuracy"
    return float(metrics.get(name, metrics[run.task.primary_metric]))


class ReportsScore(LocalTraining if TYPE_CHECKING else object):  # type: ignore[misc]
    """Refuse tasks whose score is not in [0, 1] or not better when higher; mix-in for site halves that report it."""

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        metrics = task.by_name()
        metric = metrics["accuracy" if "accuracy" in metrics else task.primary_metric]
        refuse({
            f"it goes by a score in [0, 1] that is better when higher, and {metric.name!r} lies in {metric.range}, "
            f"better when {'higher' if metric.higher_is_better else 'lower'}": (
                not metric.higher_is_better or metric.low < 0 or metric.high > 1
            ),
        })  # fmt: skip


@settings
class LossProbe(LocalTraining):
    """Train as FedAvg does, and report the mean training loss of the received model.

    Args:
        probe_loss: loss in the report: ``"ce"`` (the task's loss), or ``"la"`` (the criterion).
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "probe_loss": only_with("criterion", "logit_adjusted", "balanced_softmax", "fedlc", when=["la"])
    }
    under_dp: ClassVar[bool] = True

    probe_loss: Literal["ce", "la"] = "ce"

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        run.own = {} if run.private else {"probe_loss": mean_loss(self, run, model, plain=self.probe_loss == "ce")}

    def released(self, run: SiteRun) -> dict[str, tuple[float, ...]]:
        """Return the distances from the received model at which losses are reported; private sites add noise."""
        return {} if STAY in run.directives else {"probe_loss": (0.0,)}

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return dict(run.own)
