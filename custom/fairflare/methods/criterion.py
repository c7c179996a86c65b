"""The loss of a site half: the task's own, or one for imbalanced classes with the site's counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fairflare.core import losses
from fairflare.methods.site_run import SiteError, SiteRun

if TYPE_CHECKING:
    from fairflare.core.task import Task


class HasCriterion:
    """Part of every site half; its settings are declared in :class:`fairflare.methods.training.LocalTraining`."""

    criterion: str
    prior_strength: float | None

    def criterion_loss(self, run: SiteRun, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The task's loss, or the chosen loss for imbalanced classes; the mean over the batch."""
        if self.criterion == "task":
            return run.task.loss(outputs, targets)
        return self.criterion_losses(run, outputs, targets).mean()

    def criterion_losses(self, run: SiteRun, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The same for each sample, (n,).

        Raises:
            SiteError: the site's data have no classes to count.
        """
        if self.criterion == "task":
            return run.task.sample_losses(outputs, targets)
        counts = self.class_counts(run)
        if self.criterion == "balanced_softmax":
            return losses.balanced_softmax(outputs, targets, counts, reduction="none")
        strength = {} if self.prior_strength is None else {"tau": self.prior_strength}
        rule = losses.logit_adjusted_cross_entropy if self.criterion == "logit_adjusted" else losses.fedlc_loss
        return rule(outputs, targets, counts, reduction="none", **strength)

    def class_counts(self, run: SiteRun) -> torch.Tensor:
        """Training samples of each class, for the criterion.

        Raises:
            SiteError: the site's data have no classes to count.
        """
        counts = run.data.class_counts("training")
        if counts is None:
            raise SiteError(
                f"site {run.site!r}: criterion {self.criterion!r} needs classes, which the task's data do not have; "
                "set criterion to 'task' or choose a classification task"
            )
        return counts

    def check_criterion(self, task: Task) -> None:
        """Raises ``ValueError`` when the criterion needs classes and the task has none."""
        if self.criterion != "task" and task.has_classes is False:
            raise ValueError(f"criterion={self.criterion!r} needs classes; set criterion to 'task'")
