"""Define a site's training on images without labels, beside its labelled images (``unlabelled=consistency``).

Segmentation uses a mean teacher, classification FixMatch; the method's own loss, steps and reports stay as they are. A
site without any labelled training image trains with this term alone. ``docs/unlabelled.md`` has measured benefits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.nn import functional

from fairflare.base.site_data import UNLABELLED, Proxy, SiteData
from fairflare.core.features.norms import norms_of
from fairflare.core.weighting import ramp
from fairflare.methods.base.local_loop import Trained
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, refuse_at

SHARE, WITHOUT_LABELS = "kept", "without_labels"  # keys in a reply's stats
LARGEST, SMOOTHING = 1.0, 0.99  # weight of the teacher's term after the ramp; decay of its moving average
CERTAIN, MORE = 0.95, 7  # FixMatch: least probability of a pseudo-label; unlabelled images for each labelled one


def has_labels(data: SiteData) -> bool:
    """Return whether a site has any labelled training image."""
    return UNLABELLED not in data.lists or data.num_samples("training") > 0


def check_unlabelled(training: LocalTraining, data: SiteData, site: str) -> None:
    """Refuse a site without labels if ``unlabelled`` is not set.

    Raises:
        SiteError: names the setting and what to do.
    """
    refuse_at(site, {
        "it has no labelled training image; set unlabelled=consistency (with crt_rounds=0), or leave the site out": (
            not training.unlabelled and not has_labels(data)
        ),
    })  # fmt: skip


@contextmanager
def still_statistics(model: torch.nn.Module) -> Iterator[None]:
    """Normalise by the batch, and leave the running statistics of batch norms as they are, inside the context."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, norms_of("batch")) and m.track_running_stats]
    with ExitStack() as stack:
        for norm in norms:
            norm.track_running_stats = False
            stack.callback(setattr, norm, "track_running_stats", True)
        yield


class TrainedOn(Proxy):
    """Give a site without labels its unlabelled images as training images, with targets that are not used."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name not in ("num_samples", "batches", "order", "cases", "num_cases"):
            return value
        return lambda split, *args, **more: value(UNLABELLED if split == "training" else split, *args, **more)


class Consistency:
    """Compute the consistency term of one round at one site.

    The mean teacher starts as the received model and follows the trained one after each step; it sees the images with
    noise. FixMatch takes the model's own sure answers on the images as labels of strongly changed copies. Both views of
    an image have the same flips and turns, and no unlabelled image changes running statistics of batch norms.

    Attributes:
        alone: whether the site has no labelled training image, so that there is no other term.
        seen, sure: number of pseudo-labels so far, and of those that count.

    Source:
        Mean teacher: Tarvainen and Valpola, NeurIPS 2017; noise: Yu et al., MICCAI 2019 (UA-MT, code). FixMatch: Sohn
        et al., NeurIPS 2020, with changes of contrast and brightness, noise and cutout as its strong view.
    """

    def __init__(self, training: LocalTraining, run: SiteRun, model: torch.nn.Module) -> None:
        self.half, self.run, self.probable = training, run, getattr(run.task, "probabilities", torch.sigmoid)
        self.alone, self.fixmatch = not has_labels(run.data), run.task.consistency == "fixmatch"
        self.weight = 1.0 if self.fixmatch else LARGEST * ramp(run.current_round, run.num_rounds)
        self.teacher: Any = None if self.fixmatch else deepcopy(model).train().requires_grad_(False)
        self.steps = self.seen = self.sure = 0
        self._stream = self._batches()

    @classmethod
    def make(cls, training: LocalTraining, run: SiteRun, model: torch.nn.Module) -> Consistency | None:
        """Return the consistency term of this round, or ``None`` if it is off or the site has no unlabelled images."""
        if training.unlabelled and UNLABELLED in run.data.lists:
            return cls(training, run, model)
        partly = training.unlabelled and run.task.consistency == "teacher" and getattr(run.task, "annotated", None)
        return NotDrawn(training, run, model) if partly and run.current_round else None

    def _batches(self) -> Iterator[torch.Tensor]:
        size = self.half.batch_size * (MORE if self.fixmatch else 1)
        for number in itertools.count():
            how: Any = {"shuffle_seed": self.run.seed + number, "augment": self.half.augment}
            yield from (inputs for inputs, _ in self.run.data.batches(UNLABELLED, batch_size=size, **how))

    def term(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return the weighted consistency term of a step; ``inputs`` is its batch if the site has no labels.

        A further pass of the same step (SAM) has the same images, noise and targets.
        """
        if self.run.first_pass:
            self._draw(model, inputs if self.alone else self.run.on_device(next(self._stream)))
        with still_statistics(model):
            outputs: torch.Tensor = model(self.view)
        if self.fixmatch:
            each = functional.cross_entropy(outputs, self.target, reduction="none")
            return torch.mean(each * self.counts) * self.weight
        return torch.mean((self.probable(outputs) - self.target).square()) * self.weight

    @torch.no_grad()
    def _draw(self, model: torch.nn.Module, inputs: torch.Tensor) -> None:
        """Make the changed copies (views) and the targets of a step's unlabelled images."""
        judge = model if self.teacher is None else self.teacher
        noisy = inputs + (0.1 * torch.randn_like(inputs)).clamp(-0.2, 0.2)
        with still_statistics(judge):
            outputs = judge(inputs if self.fixmatch else noisy)
        if self.fixmatch:
            likely, self.target = outputs.softmax(1).max(1)
            self.view, self.counts = strong(noisy), (likely >= CERTAIN).to(outputs.dtype)
        else:
            self.view, self.target, self.counts = inputs, self.probable(outputs), torch.ones(len(inputs))
        self.seen, self.sure = self.seen + len(inputs), self.sure + int(self.counts.sum())

    @torch.no_grad()
    def update_teacher(self, model: torch.nn.Module) -> None:
        """Update the mean teacher towards the trained model after a step."""
        self.steps += 1
        share = min(1 - 1 / (self.steps + 1), SMOOTHING)
        for old, new in zip(self.teacher.parameters() if self.teacher else (), model.parameters(), strict=False):
            old.mul_(share).add_(new, alpha=1 - share)

    def state(self) -> dict[str, Any]:
        """Return the values that change from step to step, with which an interrupted round continues."""
        return {
            "teacher": None if self.teacher is None else self.teacher.state_dict(),
            "steps": self.steps, "seen": self.seen, "sure": self.sure,
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the values of :meth:`state`, and skip the images of the steps that are done."""
        self.steps, self.seen, self.sure = state["steps"], state["seen"], state["sure"]
        if self.teacher is not None:
            self.teacher.load_state_dict(state["teacher"])
        for _ in range(0 if self.alone else self.steps):
            next(self._stream)

    def report(self, trained: Trained) -> Trained:
        """Add to a training's result the values that the server receives about the unlabelled images, and return it."""
        trained.more |= {SHARE: self.sure / max(self.seen, 1), **({WITHOUT_LABELS: True} if self.alone else {})}
        if self.alone and not trained.num_steps:
            raise SiteError(
                f"site {self.run.site!r}: no training step in round {self.run.current_round}: the model predicts none "
                f"of the site's {self.seen} unlabelled images with a probability of {CERTAIN} or more", skipped=True,
            )  # fmt: skip
        return trained


class NotDrawn(Consistency):
    """Compute the term of a site that annotates only some structures: it learns the others from the received model.

    Thus the site does not unlearn structures that only other sites annotate. The term is a form of the Dice loss that
    is 0 if both models give the same probabilities. The usual form is not 0 then: it is smallest if each pixel whose
    probability is above half the Dice is marked in full, so that structures grew from round to round. There is no term
    in the first round, whose model knows nothing, and no ramp: with the mean teacher's ramp, blood cells were learned
    less well in 8 rounds (two seeds).

    Source:
        Conditional distillation: Wang et al., ConDistFL, MICCAI 2023 workshops. Loss: Wang et al., Dice Semimetric
        Losses, MICCAI 2023; for masks of 0 and 1 it is the Dice loss.
    """

    def __init__(self, training: LocalTraining, run: SiteRun, model: torch.nn.Module) -> None:
        super().__init__(training, run, model)
        task: Any = run.task
        self.others = task.annotating(tuple(k for k in range(len(task.structures)) if k not in task.annotated))

    def term(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), still_statistics(self.teacher):
            target = self.others.chosen(self.teacher(inputs).sigmoid())
        with still_statistics(model):
            probabilities = self.others.chosen(model(inputs).sigmoid())
        apart, both = (values.flatten(2).sum(2) for values in ((probabilities - target).abs(), probabilities + target))
        return torch.mean(apart / (both + 1e-5))  # as in MONAI's Dice loss, 0 if both are empty

    def update_teacher(self, model: torch.nn.Module) -> None:
        """Do nothing after a step, as the teacher stays the received model."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing, as no value of this term changes from step to step."""

    def report(self, trained: Trained) -> Trained:
        return trained


def strong(images: torch.Tensor) -> torch.Tensor:
    """Return images (n, channels, ...) with changed contrast and brightness, and a grey box of half of each side."""
    shape = (len(images), *[1] * (images.ndim - 1))
    factor, shift = (torch.empty(shape, device=images.device).uniform_(*bounds) for bounds in ((0.5, 1.5), (-0.2, 0.2)))
    changed = ((images - 0.5) * factor + 0.5 + shift).clamp(0.0, 1.0)
    for image in changed:
        corners = [int(torch.randint(side - side // 2 + 1, ())) for side in image.shape[1:]]
        box = [
            slice(None),
            *(slice(corner, corner + side // 2) for corner, side in zip(corners, image.shape[1:], strict=True)),
        ]
        image[tuple(box)] = 0.5
    return changed
