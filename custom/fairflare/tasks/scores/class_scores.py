"""How good a classifier is: its loss, probabilities and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fairflare.base import checks
from fairflare.tasks.base import evaluating

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TypeAlias

    import numpy as np
    import numpy.typing as npt
    import torch

    from fairflare.base.cases.resampling import Drawn
    from fairflare.base.task import Batch, Device, SiteData

    Told: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]

BATCH = 64  # images, where nothing depends on it


class MeasuresClasses(ABC):
    """Part of a task whose targets are the numbers of classes and whose network gives logits, (n, classes)."""

    primary_metric: ClassVar[str]

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the classes."""

    @abstractmethod
    def groups(self) -> dict[str, list[int]]:
        """Return the groups of classes, such as head, medium, tail."""

    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the network gives for whole inputs, in evaluation."""
        found: torch.Tensor = model(inputs)
        return found

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets)

    def sample_losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets, reduction="none")

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the probability of each class, (n, classes) float64 on the CPU; rows sum to 1."""
        import torch

        return torch.softmax(outputs.to("cpu", torch.float64), 1)

    def evaluate(self, model: torch.nn.Module, batches: Iterable[Batch], device: Device) -> dict[str, float]:
        """Return the metrics of :func:`fairflare.tasks.scores.metrics.classification_metrics`, and ``loss``.

        The loss is the cross-entropy.
        """
        from fairflare.tasks.scores.metrics import classification_metrics

        logits, labels = self._outputs(model, batches, device)
        metrics = classification_metrics(
            labels.numpy(), self.probabilities(logits).numpy(), class_names=self.names(), groups=self.groups()
        )
        return {**metrics, "loss": float(self.loss(logits, labels))}

    def resampled(
        self, model: torch.nn.Module, data: SiteData, drawn: Sequence[Drawn], device: Device
    ) -> list[float] | None:
        """Return the metric of each draw, as :meth:`fairflare.base.task.Task.resampled`.

        NaN where a draw has too few classes.
        """
        import math

        from fairflare.tasks.scores.metrics import classification_metrics

        targets, probabilities = self.outcomes(model, data, "test", device)
        named: dict[str, Any] = {
            "class_names": self.names(), "groups": self.groups(), "areas": self.primary_metric.startswith("auc"),
        }  # fmt: skip
        found = []
        for one in drawn:
            metrics = classification_metrics(targets[one], probabilities[one], **named)
            found.append(metrics.get(self.primary_metric, math.nan))
        return found

    def outcome_names(self) -> list[str]:
        """Return the classes."""
        return self.names()

    def outcomes(self, model: torch.nn.Module, data: SiteData, split: str, device: Device) -> Told:
        """Return classes and probabilities, as :meth:`fairflare.base.task.Task.outcomes`."""
        logits, labels = self._outputs(model, data.batches(split, batch_size=BATCH), device)
        return labels.numpy(), self.probabilities(logits).numpy()

    def sampling(self, model: torch.nn.Module, data: SiteData, device: Device) -> dict[str, Any]:
        """Describe the sampling error of the primary metric as :meth:`fairflare.base.task.Task.sampling` does.

        The primary metric may be any of :mod:`fairflare.tasks.scores.metrics`.
        """
        import math

        import numpy as np

        from fairflare.base.cases import sampling
        from fairflare.tasks.scores.metrics import classification_metrics

        targets, probabilities = self.outcomes(model, data, "test", device)
        names, cases, metric = self.names(), data.cases("test"), self.primary_metric
        support = np.bincount(targets, minlength=len(names))
        right = (probabilities.argmax(1) == targets).astype(float)
        if metric in sampling.SHARES:
            said = sampling.of_mean(right, cases, 0.0, 1.0)
        else:
            if metric == sampling.MEAN_RECALL:
                recalls = np.bincount(targets, right, len(names)) / np.maximum(support, 1)
                influence = (right - recalls[targets]) / (support[targets] * (support > 0).sum())
                error = sampling.standard_error(influence, cases)
            else:
                named: dict[str, Any] = {
                    "class_names": names, "groups": self.groups(), "areas": metric.startswith("auc"),
                }  # fmt: skip

                def of_images(kept: Any) -> float:
                    return classification_metrics(targets[kept], probabilities[kept], **named).get(metric, math.nan)

                error = sampling.jackknife(of_images, len(targets), cases)
            said = {"test_cases": sampling.num_cases(len(targets), cases)}
            said |= {"standard_error": error} if math.isfinite(error) else {}
        return {**said, "classes": names, "class_support": support.tolist()}

    def write_examples(
        self, model: torch.nn.Module, data: SiteData, folder: Path, *, batch_size: int, device: Device, title: str
    ) -> bool:
        """Write example images, chosen by the probability of the true class, with the class that was told."""
        from fairflare.tasks.scores import examples

        examples.write(examples.of_classification(self, model, data, batch_size, device), folder, self.names(), title)
        return True

    def _outputs(
        self, model: torch.nn.Module, batches: Iterable[Batch], device: Device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, float64, and labels of all images, on the CPU."""
        import torch

        outputs, targets = [], []
        with evaluating(model):
            for inputs, labels in batches:
                outputs.append(self.outputs(model, inputs.to(device)).to("cpu", torch.float64))
                targets.append(labels)
        checks.whole("the number of batches to evaluate on", len(outputs))
        logits, labels = torch.cat(outputs), torch.cat(targets)
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model's outputs are not finite; lower learning_rate or set max_grad_norm")
        return logits, labels
