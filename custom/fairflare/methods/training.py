"""The site half of a method: local training, with a few hooks, and what a site says about it."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from fairflare.core.acting import OnlyWith, only_with
from fairflare.core.computing import Computing, LossScale, Overflow, Precision
from fairflare.core.norms import LoneSample, lone_samples
from fairflare.core.settings import BelowOne, Flag, NonNegative, Positive, PositiveInt, settings
from fairflare.methods.criterion import HasCriterion
from fairflare.methods.optimizing import HasOptimizer
from fairflare.methods.personal import KeepsAtHome
from fairflare.methods.site_run import NotFinite as NotFinite
from fairflare.methods.site_run import SiteError as SiteError
from fairflare.methods.site_run import SiteRun as SiteRun
from fairflare.methods.site_run import StateStore as StateStore

if TYPE_CHECKING:
    from fairflare.core.task import Batch, Task

log = logging.getLogger(__name__)

LOOKED_AT = 16  # so many steps on a GPU go by before somebody looks whether the loss is finite
LOCAL_MODEL = "local_model"  # in a site's store: what it trained, for the anchor phase and for MOON
RECEIVED_MODEL = "received_model"  # and what it was sent for that, where the anchor comes as a difference to it


@dataclass
class Trained:
    """What :meth:`LocalTraining.train` leaves besides the trained model."""

    #: Mean over the samples of each epoch, measured while training. With ``local_steps`` of each pass, the last one
    #: over what was left of it.
    epoch_losses: list[float]
    num_steps: int | None
    num_samples: int

    def losses(self) -> dict[str, Any]:
        """For the reply's stats; empty where nobody measured."""
        return {"train_loss": self.epoch_losses[-1], "epoch_losses": self.epoch_losses} if self.epoch_losses else {}


@settings
class LocalTraining(KeepsAtHome, HasCriterion, HasOptimizer):
    """Site half of FedAvg, and the frame of every other: E epochs over the site's training images.

    Args:
        optimizer: ``"adam"`` (L2 weight decay, as the papers), ``"adamw"`` or ``"sgd"``; ``"task"``: a MONAI bundle's
            own, of which only the learning rate is set here.
        learning_rate: step size of the optimizer.
        weight_decay: of the optimizer.
        betas: decay rates of Adam's moments.
        momentum: of SGD, with Nesterov's form when > 0.
        batch_size: images in a batch.
        local_epochs: passes over the training images in a round.
        local_steps: so many optimizer steps in a round, the same at every site, in place of ``local_epochs`` (which
            then stays 1): passes in new orders until they are done, the last one cut short. ``None``: whole passes.
        keep_optimizer_state: moments stay at the site between rounds (Fed-LWR's code); else a new optimizer a round.
        max_grad_norm: gradients are clipped to this global norm; ``None``: not.
        augment: use the task's training augmentation.
        criterion: ``"task"`` (the task's own loss), or for classification with the site's class counts
            ``"logit_adjusted"``, ``"balanced_softmax"`` or ``"fedlc"``.
        prior_strength: tau of logit adjustment and FedLC; ``None``: the papers' 1 and 0.5.
        schedule: of the learning rate over the rounds: ``"constant"``, or ``"cosine"``, down to ``lowest_rate`` in the
            last one; see :meth:`rate`.
        lowest_rate: of the cosine, ``> 0`` and at most ``learning_rate``; ``None``: a thousandth of it.
        norm_statistics: running means, variances and counters of batch norms: ``"average"`` over the sites (the
            papers); ``"recalibrated"``: measured again after each aggregation, with the new model over all sites'
            training images; or ``"site"``: each site has its own, which stay there. What a norm learns is shared all
            the same. See ``docs/norm_statistics.md``.
        precision: of training and evaluation: ``"fp32"``, or mixed (``torch.autocast``): ``"bf16"``, ``"fp16"`` (with a
            scaled loss). Weights, updates and losses stay float32. A site's own file goes first; so for the next three.
        channels_last: another order of images and kernels in memory, faster for most convolutions.
        compile: ``torch.compile`` of the network; takes minutes at first.
        deterministic: on a GPU only operations that give the same bits every time, which are slower; a network that has
            one without such a form is refused by name. On a CPU results are the same bits anyway.

    Source:
        Defaults: Yan et al., MICCAI 2024, section 3.1 and the authors' code (betas, moments kept).
    """

    #: Settings that need another one's value, see :mod:`fairflare.core.acting`.
    acts: ClassVar[dict[str, OnlyWith | None]] = {
        "weight_decay": only_with("optimizer", "adam", "adamw", "sgd"),
        "betas": only_with("optimizer", "adam", "adamw"),
        "momentum": only_with("optimizer", "sgd"),
        "prior_strength": only_with("criterion", "logit_adjusted", "fedlc"),
        "lowest_rate": only_with("schedule", "cosine"),
    }
    #: Whether the method needs a score of each model in [0, 1] that is better when higher.
    scores: ClassVar[bool] = False
    #: What the store has by class (``before``, ``during``, ``counts``), for a picture that stays at the site.
    by_class: ClassVar[str] = ""

    optimizer: Literal["adam", "adamw", "sgd", "task"] = "adam"
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 1e-4
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    momentum: BelowOne = 0.9
    batch_size: PositiveInt = 8
    local_epochs: PositiveInt = 1
    local_steps: PositiveInt | None = None
    keep_optimizer_state: Flag = True
    max_grad_norm: Positive | None = None
    augment: Flag = False
    criterion: Literal["task", "logit_adjusted", "balanced_softmax", "fedlc"] = "task"
    prior_strength: NonNegative | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    lowest_rate: Positive | None = None
    norm_statistics: Literal["average", "recalibrated", "site"] = "average"
    precision: Precision = "fp32"
    channels_last: Flag = False
    compile: Flag = False
    deterministic: Flag = False

    def __post_init__(self) -> None:
        low = self.lowest_rate
        if self.schedule == "cosine" and low is not None and low > self.learning_rate:
            raise ValueError(f"lowest_rate must be at most learning_rate={self.learning_rate!r}, got {low!r}")
        if self.own_norms and self.norm_statistics == "recalibrated":
            raise ValueError(
                f"norm_statistics='recalibrated' would change nothing: with {type(self).__name__} those of the "
                "norms stay at the sites; leave it at 'average'"
            )
        if self.local_steps is not None and self.local_epochs != 1:
            raise ValueError(
                f"local_steps={self.local_steps!r} and local_epochs={self.local_epochs!r} exclude each other: take one "
                "of them out"
            )

    @property
    def computing(self) -> Computing:
        """How the network computes, where the site does not say otherwise."""
        return Computing(self.precision, self.channels_last, self.compile, self.deterministic)

    @property
    def local_models_kept(self) -> int:
        """Of so many last rounds the site's local model stays in its store."""
        return 1

    def sends(self, names: Iterable[str]) -> list[str]:
        """Those of the model's tensors whose updates go to the server."""
        return list(names)

    # -- hooks

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        """Called with the received model before training; what later hooks need goes to ``run.own``."""

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Objective of one batch: the criterion, unless a method adds terms."""
        return self.criterion_loss(run, model(inputs), targets)

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """One optimizer step. ``closure`` zeroes the gradients, backpropagates the loss, clips, returns the loss."""
        loss = closure()
        optimizer.step()
        return loss

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        """What the rule needs, after training: the fields it declares."""
        return {}

    def made_of(self, name: str) -> tuple[str, ...] | None:
        """Splits whose images a reported value is made of, where a setting decides; ``None``: as its field declares."""
        return None

    def report_anchor(self, run: SiteRun, local: torch.nn.Module, anchor: torch.nn.Module) -> dict[str, Any]:
        """What a two-phase rule needs to know about the anchor."""
        raise SiteError(
            f"site {run.site!r}: the server asks about an anchor, but {type(self).__name__} has no anchor report; "
            "choose the site half that belongs to the server half"
        )

    # -- before the first round

    def check_task(self, task: Task) -> None:
        """Refuses a task that this half cannot learn, as far as that is known without data.

        Raises:
            ValueError: says which setting does not go with it.
        """
        self.check_criterion(task)
        self.check_optimizer(task)
        if self.scores:
            metrics = task.by_name()
            name = "accuracy" if "accuracy" in metrics else task.primary_metric
            if not metrics[name].higher_is_better or metrics[name].low < 0 or metrics[name].high > 1:
                raise ValueError(
                    f"it goes by a score in [0, 1] that is better when higher, and {name!r} lies in "
                    f"{metrics[name].range}, better when {'higher' if metrics[name].higher_is_better else 'lower'}"
                )

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        """Looks whether the site's data and the network have what :meth:`train` needs, without training.

        Returns:
            What the server should know besides: fields of :data:`fairflare.federation.check.FIELDS`.

        Raises:
            SiteError: they have not.
        """
        if self.criterion != "task":
            self.class_counts(run)
        return {}

    # -- the frame

    def start(self, run: SiteRun, model: torch.nn.Module) -> None:
        """What goes before the first step of a round."""
        torch.manual_seed(run.seed)
        run.scale = LossScale(run.device.type) if run.computing.precision == "fp16" else None
        model.train()
        self.begin_round(run, model)

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        """Trains ``model`` in place, deterministically for a given ``run.seed``.

        Raises:
            NotFinite: a loss or a trained tensor that is not finite (names site, round, and where).
            SiteError: one sample for a batch norm without running statistics.
        """
        self.start(run, model)
        optimizer = self.make_optimizer((p for p in model.parameters() if p.requires_grad), run.task)
        if self.keep_optimizer_state:
            kept = run.store.load_before("optimizer", run.current_round)
            if kept is not None:
                optimizer.load_state_dict(kept)
        rate = self.rate(run.current_round, run.num_rounds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        num_steps, epoch_losses, run.skipped_steps = 0, [], 0
        try:
            with lone_samples(model):
                for epoch in self._passes():
                    run.epoch = epoch
                    left = None if self.local_steps is None else self.local_steps - num_steps
                    loss, steps = self._one_epoch(run, model, optimizer, num_steps, left)
                    epoch_losses.append(loss)
                    num_steps += steps
                    if left is not None and steps in (0, left):  # 0: there is nothing to cycle through
                        break
        except LoneSample as error:
            raise SiteError(f"site {run.site!r}: {error}") from error
        check_finite(run, model)
        self._check_skipped(run, num_steps)
        # Behind the check, and only finite ones: moments of a broken round would break every later one, or (a square
        # that overflowed) stop its weights for good.
        if self.keep_optimizer_state and _finite_moments(optimizer):
            run.store.save("optimizer", run.current_round, optimizer.state_dict())
        return Trained(epoch_losses, num_steps - run.skipped_steps, run.data.num_samples("training"))

    def _check_skipped(self, run: SiteRun, num_steps: int) -> None:
        """Says how many steps overflowed; raises :class:`NotFinite` where none is left, as nothing was learned."""
        if not run.skipped_steps:
            return
        told = f"site {run.site!r}: {run.skipped_steps} of {num_steps} steps of round {run.current_round} overflowed in"
        if run.skipped_steps == num_steps:
            raise NotFinite(f"{told} float16, so nothing was learned; set precision to 'bf16' or 'fp32'")
        log.warning("%s float16 and were left out", told)

    def _passes(self) -> Iterable[int]:
        return range(self.local_epochs) if self.local_steps is None else itertools.count()

    def batches(self, run: SiteRun, model: torch.nn.Module, seed: int) -> Iterable[Batch]:
        """The batches of an epoch: each training image once, in an order and with an augmentation of this seed."""
        return run.data.batches("training", batch_size=self.batch_size, shuffle_seed=seed, augment=self.augment)

    def _one_epoch(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps_before: int,
        most: int | None = None,
    ) -> tuple[float, int]:
        """Mean loss over the samples gone through, and the number of steps, at most ``most``."""
        seed = run.seed + run.epoch
        order = run.data.order("training", seed)
        total, seen, steps = torch.zeros((), dtype=torch.float64, device=run.device), 0, 0
        # Looking at a number on a GPU waits for all that it was given to do.
        every = 1 if run.device.type == "cpu" else LOOKED_AT
        for inputs, targets in self.batches(run, model, seed):
            run.batch = None if order is None else order[seen : seen + len(inputs)]
            total += self._one_step(run, model, optimizer, inputs, targets).double() * len(inputs)
            if steps % every == 0:
                self._check_losses(run, total, steps_before + steps)
            seen += len(inputs)
            steps += 1
            if steps == most:
                break
        self._check_losses(run, total, steps_before + steps - 1)
        return float(total) / max(seen, 1), steps

    def _check_losses(self, run: SiteRun, total: torch.Tensor, step: int) -> None:
        """Raises :class:`NotFinite` where the losses so far are not finite, or float16 holds no gradient."""
        if not math.isfinite(float(total)):
            by = "" if run.device.type == "cpu" else "by "
            raise NotFinite(
                f"site {run.site!r}: the training loss became {float(total)} in round {run.current_round}, epoch "
                f"{run.epoch}, {by}step {step}; lower learning_rate (now {self.learning_rate:g}), set "
                "max_grad_norm, or look for extreme values in the images"
            )
        if run.scale is not None and run.scale.exhausted:
            raise NotFinite(
                f"site {run.site!r}: the gradients overflow in float16 at any scale in round {run.current_round}, "
                f"epoch {run.epoch}, step {step}; set precision to 'bf16' or 'fp32', or lower learning_rate"
            )

    def _one_step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        inputs, targets = (run.on_device(tensor) for tensor in (inputs, targets))
        run.first_pass = True
        try:
            return self.step(run, model, optimizer, partial(self.one_pass, run, model, optimizer, inputs, targets))
        except Overflow as overflow:
            run.skipped_steps += 1
            return overflow.loss

    def one_pass(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Forward and backward pass of a batch on the run's device; the loss, detached."""
        optimizer.zero_grad(set_to_none=True)
        loss = self.loss(run, model, inputs, targets)
        run.first_pass = False
        # Backpropagating a NaN would only spread it; the caller stops with a message. On a GPU it does so later.
        if run.device.type != "cpu" or torch.isfinite(loss):
            if run.scale is None:
                loss.backward()
            else:
                run.scale.backward(loss, optimizer)
        self.clip(model)
        return loss.detach()


def _finite_moments(optimizer: torch.optim.Optimizer) -> bool:
    moments = (value for by_name in optimizer.state.values() for value in by_name.values())
    return all(bool(torch.isfinite(value).all()) for value in moments if isinstance(value, torch.Tensor))


def check_finite(run: SiteRun, model: torch.nn.Module) -> None:
    """Raises :class:`NotFinite` when a tensor of the trained model is not finite (names it)."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NotFinite(
                f"site {run.site!r}: tensor {name!r} is not finite after training in round {run.current_round}; "
                "lower learning_rate or set max_grad_norm"
            )
