"""Define CReFF's site half, which reports gradients of the server's classifier by class, and then trains as FedAvg."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.base.acting import OnlyWith
from fairflare.base.checks import refuse
from fairflare.base.settings import PositiveInt, settings
from fairflare.base.task import evaluating
from fairflare.core.features.federated_features import classifier_gradient
from fairflare.methods.base.reports import ByClass
from fairflare.methods.base.training import LocalTraining, SiteRun, check_parts, class_counts

if TYPE_CHECKING:
    from fairflare.base.task import Task

MADE = "retrained."  # prefix of the names of the server's classifier's tensors
REPORTED = "class_gradients"  # name of the report's field with the gradients
NEEDED = "CReFF needs a second classifier; set retrained_head=true of the classification task"


@settings
class ClassGradientTraining(LocalTraining):
    """Compute the gradients of the server's classifier by class, then train as FedAvg does (CReFF).

    For each class of the site the gradient of the cross-entropy is computed on ``gradient_images`` random images of the
    class, with the encoder in evaluation mode and the task's random augmentation. The mean over the repeats is
    reported.

    Args:
        gradient_images: largest number of images of a class in a repeat.
        gradient_repeats: each with other images and another augmentation.

    Source:
        Shang et al., section 3.2 and code.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"augmentation": None}

    gradient_images: PositiveInt = 32
    gradient_repeats: PositiveInt = 10

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        refuse({
            "CReFF needs a classification task, since its sites report gradients by class": task.has_classes is False,
            NEEDED: not getattr(task, "retrained_head", True),
        })  # fmt: skip

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        check_parts(run, model, ("retrained", "embed"), NEEDED)
        return super().check(run, model)

    def sends(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not name.startswith(MADE)]

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        check_parts(run, model, ("retrained", "embed"), NEEDED)
        classifier: Any = model.retrained
        sums: dict[int, torch.Tensor] = {}
        for repeat in range(self.gradient_repeats):
            for label, features in self._features(run, model, repeat).items():
                gradient = classifier_gradient(
                    features, label, classifier.weight, run.task.chosen(classifier.bias)
                ).detach()
                sums[label] = sums.get(label, 0) + gradient / self.gradient_repeats
        run.own = {label: sums[label].cpu() for label in sorted(sums)}

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        head: Any = model.retrained
        rows = {label: gradient.flatten().numpy() for label, gradient in run.own.items()}
        return {REPORTED: ByClass("training", rows, (len(head.bias), head.weight.numel() + len(head.bias)))}

    def _features(self, run: SiteRun, model: torch.nn.Module, repeat: int) -> dict[int, torch.Tensor]:
        """Return the features of at most ``gradient_images`` random images of each class, by class."""
        counts = class_counts(self, run).clamp_max(self.gradient_images)
        by_class: dict[int, list[torch.Tensor]] = {label: [] for label in counts.nonzero().flatten().tolist()}
        seed = run.seed + self.local_epochs + repeat  # a seed that no epoch of the training uses
        batches = run.data.batches("training", batch_size=self.batch_size, shuffle_seed=seed, augment=True)
        with evaluating(model):
            for inputs, targets in batches:
                chosen: list[int] = []
                for place, label in enumerate(targets.tolist()):
                    if len(by_class[label]) + chosen.count(label) < counts[label]:
                        chosen.append(label)
                        targets[place] = -1
                if chosen:
                    features = model.embed(inputs[targets == -1].to(run.device))  # type: ignore[operator]
                    for label, feature in zip(chosen, features, strict=True):
                        by_class[label].append(feature)
                if all(len(features) == counts[label] for label, features in by_class.items()):
                    break
        return {label: torch.stack(features) for label, features in by_class.items()}
