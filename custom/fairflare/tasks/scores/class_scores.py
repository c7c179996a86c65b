"""Measure a classifier: loss, probabilities, metrics and their sampling error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fairflare.base import checks
from fairflare.tasks.base import evaluating
from fairflare.tasks.images import ImageTask
from fairflare.tasks.scores.finding_scores import finding_losses, finding_metrics, image_losses

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import numpy.typing as npt
    import torch

    from fairflare.base.cases.resampling import Drawn
    from fairflare.base.task import Batch, Device, SiteData

    Told: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]

OUTSIDE = "outside"  # metric: share of images for which a class wins that the site's data cannot have
BATCH = 64  # number of images in a batch where no result depends on this number


class MeasuresClasses(ImageTask):
    """Define loss and metrics of a network that gives logits, (n, classes); targets are class numbers, or findings."""

    def chosen(self, values: torch.Tensor) -> torch.Tensor:
        """Return logits, (..., classes), in which a class that the site's data cannot have has no probability.

        Its logit is minus infinity, so the softmax is over the others, and nothing pushes the class down.
        """
        import torch

        if self.annotated is None or self.findings:  # targets of findings mark what is not known
            return values
        unseen = sorted({*range(len(self.names()))}.difference(self.annotated))
        return values.index_fill(-1, torch.tensor(unseen, dtype=torch.int64, device=values.device), -math.inf)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy over the samples of a batch."""
        return self.sample_losses(outputs, targets).mean() if self.findings else self._entropy(outputs, targets)

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return image_losses(outputs, targets) if self.findings else self._entropy(outputs, targets, "none")

    def _entropy(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(self.chosen(outputs), targets, reduction=reduction)

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the probability of each class, (n, classes) float64 on the CPU; rows sum to 1, except for findings."""
        import torch

        if self.findings:
            return outputs.to("cpu", torch.float64).sigmoid()
        return torch.softmax(self.chosen(outputs.to("cpu", torch.float64)), 1)

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        """Evaluate the model: the metrics of :func:`.metrics.classification_metrics`, and ``loss`` (cross-entropy).

        For findings, return the metrics of :func:`.finding_scores.finding_metrics`, and the loss of each measured
        finding.
        """
        from fairflare.tasks.scores.metrics import classification_metrics

        logits, labels = self._outputs(model, batches, device)
        if self.findings:
            losses, known = (values.sum(0).tolist() for values in finding_losses(logits, labels))
            metrics = finding_metrics(labels.numpy(), self.probabilities(logits).numpy(), self.findings, self._measured)
            metrics |= {f"loss_{self.findings[k]}": losses[k] / known[k] for k in self._measured if known[k]}
        else:
            metrics = classification_metrics(
                labels.numpy(), self.probabilities(logits).numpy(), class_names=self.names(), groups=self.groups()
            )
            if self.annotated is not None:
                predicted = logits.argmax(1)
                metrics[OUTSIDE] = 1 - sum(float((predicted == number).double().mean()) for number in self.annotated)
        return {**metrics, "loss": float(self.loss(logits, labels))}

    def resampled(
        self, model: torch.nn.Module, data: SiteData, drawn: Sequence[Drawn], device: Device
    ) -> list[float] | None:
        """Return the primary metric of each draw of images, as :meth:`fairflare.base.task.Task.resampled` defines it.

        The value is NaN for a draw with too few classes.
        """
        outcomes = self.outcomes(model, data, "test", device)
        return [self._primary(outcomes, one) for one in drawn]

    def _primary(self, outcomes: Told, chosen: Any) -> float:
        """Return the primary metric of the images with the chosen indices; NaN if the metric is not defined on them."""
        from fairflare.tasks.scores.metrics import classification_metrics

        if self.findings:
            labels, scores = (values[chosen] for values in outcomes)
            return finding_metrics(labels, scores, self.findings, self._measured)[self.primary_metric]
        return classification_metrics(
            *(values[chosen] for values in outcomes), class_names=self.names(), groups=self.groups(),
            areas=self.primary_metric.startswith("auc"),
        ).get(self.primary_metric, math.nan)  # fmt: skip

    def outcomes(self, model: torch.nn.Module, data: SiteData, split: str, device: Device) -> Told:
        """Return true classes and probabilities of a split, as :meth:`fairflare.base.task.Task.outcomes` defines it."""
        logits, labels = self._outputs(model, data.batches(split, batch_size=BATCH), device)
        return labels.numpy(), self.probabilities(logits).numpy()

    def sampling(self, model: torch.nn.Module, data: SiteData, device: Device) -> dict[str, Any]:
        """Describe the sampling error of the primary metric as :meth:`fairflare.base.task.Task.sampling` does.

        The primary metric may be any of :mod:`fairflare.tasks.scores.metrics`.
        """
        import numpy as np

        from fairflare.base.cases import sampling

        targets, probabilities = outcomes = self.outcomes(model, data, "test", device)
        names, cases, metric = self.names(), data.cases("test"), self.primary_metric
        classes: dict[str, Any] = {}
        if not self.findings:
            support = np.bincount(targets, minlength=len(names))
            right = (probabilities.argmax(1) == targets).astype(float)
            classes = {"classes": names, "class_support": support.tolist()}
        if classes and metric in sampling.SHARES:
            return {**sampling.report_mean(right, cases, 0.0, 1.0), **classes}
        if classes and metric == sampling.MEAN_RECALL:
            recalls = np.bincount(targets, right, len(names)) / np.maximum(support, 1)
            influence = (right - recalls[targets]) / (support[targets] * (support > 0).sum())
            error = sampling.standard_error(influence, cases)
        else:
            error = sampling.jackknife(partial(self._primary, outcomes), len(targets), cases)
        certain = {"standard_error": error} if math.isfinite(error) else {}
        return {"test_cases": sampling.number_cases(len(targets), cases)[0], **certain, **classes}

    @property
    def _measured(self) -> Sequence[int]:
        return range(len(self.findings or ())) if self.annotated is None else self.annotated

    def _outputs(
        self, model: torch.nn.Module, batches: Iterable[Batch], device: Device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits (float64) and labels of all images, on the CPU."""
        import torch

        with evaluating(model):
            pairs = [
                (self.outputs(model, inputs.to(device)).to("cpu", torch.float64), targets)
                for inputs, targets in batches
            ]
        checks.whole("the number of batches to evaluate on", len(pairs))
        logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model's outputs are not finite; lower learning_rate or set max_grad_norm")
        return logits, labels
