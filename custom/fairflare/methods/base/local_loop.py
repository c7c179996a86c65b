"""Train a model at a site for one round: epochs of optimizer steps, the learning rate, and checks for NaN."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.cases.floor import all_records
from fairflare.base.machine.computing import LossScale, Overflow
from fairflare.core.features.norms import LoneSample, lone_samples
from fairflare.methods.base.half_done import HalfDone, Position
from fairflare.methods.base.reports import SENT_BACK
from fairflare.methods.base.site_run import NotFinite, SiteError, SiteRun, refuse_at

if TYPE_CHECKING:
    from fairflare.base.task import Task
    from fairflare.methods.base.training import LocalTraining

log = logging.getLogger(__name__)

LOOKED_AT = 16  # number of steps on a GPU after which the loss is checked to be finite
POWER = 0.9  # of nnU-Net's schedule
LOWEST_SHARE = 1e-3  # share of the learning rate at a cosine schedule's end, as in Fed-MAS's code
MOMENTS = "optimizer"  # name under which a site stores the optimizer's state


class NothingSure(Overflow):
    """Report that no pseudo-label of a batch is certain enough, so that its step is left out."""


@dataclass
class Trained:
    """Store what :meth:`LocalLoop.train` returns besides the trained model: losses, steps and samples."""

    #: Mean training loss over the samples of each epoch, measured while training. With ``local_steps``: of each pass
    #: over the images; the last pass may be cut short, and its loss is the mean over the samples it had.
    epoch_losses: list[float]
    num_steps: int | None
    num_samples: int
    #: Reason to report if the model did not change; empty if a step was counted. If a reason is set,
    #: :meth:`check_moved` compares the trained model with the received one.
    idle: str = ""
    more: dict[str, Any] = field(default_factory=dict)  # further statistics

    def check_moved(self, run: SiteRun, model: torch.nn.Module, received: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`SiteError` if no optimizer step was counted and every parameter equals the received one."""
        moved = (
            not torch.equal(tensor.detach().to(received[name].device), received[name])
            for name, tensor in model.named_parameters()
        )
        refuse_at(run.site, {
            f"it {SENT_BACK} in round {run.current_round}, and does not count as trained: {self.idle}": (
                self.idle and not any(moved)
            ),
        })  # fmt: skip

    def losses(self) -> dict[str, Any]:
        """Return the training losses for the statistics of the site's reply; empty if no loss was measured."""
        measured = {"train_loss": self.epoch_losses[-1], "epoch_losses": self.epoch_losses} if self.epoch_losses else {}
        return {**measured, **self.more}


def rate(training: LocalTraining, current_round: int, num_rounds: int, share: float = 0.0) -> float:
    r"""Return the learning rate of round r, counted from 0, of R rounds.

    .. math:: \eta_r = \eta_{low} + \tfrac12 (\eta - \eta_{low}) (1 + \cos(\pi (r + 1) / R))

    for ``"cosine"`` (Fed-MAS's code): the first of many rounds has nearly ``learning_rate``, the last one
    ``lowest_rate``. For ``"poly"`` (nnU-Net) :math:`\eta (1 - (r + s) / R)^{0.9}`, where ``share`` s of the
    round's steps is done.
    """
    if training.schedule == "constant":
        return training.learning_rate
    if training.schedule == "poly":
        return float(
            training.learning_rate * (1 - (current_round + share) / max(num_rounds, current_round + 1)) ** POWER
        )
    low = LOWEST_SHARE * training.learning_rate if training.lowest_rate is None else training.lowest_rate
    turn = math.pi * (current_round + 1) / max(num_rounds, 1)
    return low + 0.5 * (training.learning_rate - low) * (1 + math.cos(turn))


def make_optimizer(
    training: LocalTraining, parameters: Iterable[torch.nn.Parameter], task: Task | None = None
) -> torch.optim.Optimizer:
    """Return a new optimizer with the settings of a site half; with ``optimizer="task"``, the task's own optimizer."""
    params = [parameter for parameter in parameters if parameter.requires_grad]
    if training.optimizer == "task":
        if task is None:
            raise ValueError("optimizer='task' needs the task, whose optimizer it stands for: pass task")
        return task.make_optimizer(params)
    common: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        return torch.optim.SGD(params, momentum=training.momentum, nesterov=training.momentum > 0, **common)
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return kind(params, betas=training.betas, **common)


def continue_optimizer(
    training: LocalTraining, run: SiteRun, model: torch.nn.Module, moments: str
) -> torch.optim.Optimizer:
    """Return a round's optimizer: its rate is the round's; its moments are the last round's, if the half keeps them.

    ``moments`` is the name under which the site's store has them.
    """
    optimizer = make_optimizer(training, model.parameters(), run.task)
    stored = run.store.load_before(moments, run.current_round) if training.keep_optimizer_state else None
    if stored is not None:
        optimizer.load_state_dict(stored)
    for group in optimizer.param_groups:
        group["lr"] = rate(training, run.current_round, run.num_rounds)
    return optimizer


@dataclass
class LocalLoop:
    """Train a model for one round with the settings and hooks of a method's site half, the part that runs at a site.

    A training script of a user's own calls :meth:`begin` and :meth:`one_pass` in place of :meth:`train`.

    Args:
        half: the method's site half.
        run: the server's task that this site performs, with the site's data.
        model: the network, which is trained in place.
        optimizer: the optimizer that :meth:`one_pass` uses; :meth:`train` makes its own.
    """

    half: LocalTraining
    run: SiteRun
    model: torch.nn.Module
    optimizer: Any = None
    _told: int | None = None  # number of steps that the shown records alone would take; None if none are hidden
    unsure: int = 0  # steps that were left out for lack of a pseudo-label

    def begin(self) -> None:
        """Seed the random numbers, and call ``begin_round`` of the method's site half with the received model."""
        run = self.run
        torch.manual_seed(run.seed)
        run.scale = LossScale(run.device.type) if run.computing.precision == "fp16" else None
        run.skipped_steps = 0
        self.model.train()
        self.half.begin_round(run, self.model)
        if run.hides:
            self._told = self._steps_of_round()

    def _steps_of_round(self) -> int:
        size = -(-self.run.data.num_samples("training") // self.half.batch_size)
        return self.half.local_steps or self.half.local_epochs * size

    def train(self) -> Trained:
        """Train the model, deterministically for a given ``run.seed``.

        Raises:
            NotFinite: a loss or a trained tensor that is not finite (the message names site, round and place).
            SiteError: a batch with one sample reached a batch norm without running statistics.
        """
        self.begin()
        trained, run = self._train(), self.run
        if self._told is not None:  # report the round's size as if there were no hidden records
            trained.num_samples, trained.num_steps = run.data.num_samples("training"), self._told
        return trained if run.unlabelled is None else run.unlabelled.report(trained)

    @all_records()
    def _train(self) -> Trained:
        training, run = self.half, self.run
        optimizer = self.optimizer = continue_optimizer(training, run, self.model, MOMENTS)
        progress = HalfDone(training, run, self.model, optimizer)
        position = progress.resume()
        try:
            with lone_samples(self.model):
                for run.epoch in (
                    itertools.count(position.epoch)
                    if training.local_steps
                    else range(position.epoch, training.local_epochs)
                ):
                    position = position.move_to_epoch(run.epoch)
                    left = training.local_steps and training.local_steps - position.num_steps
                    self._epoch(position, left, progress)
                    if left and position.steps in (0, left):  # 0: the data gave no batch, nor would another pass
                        break
        except LoneSample as error:
            raise SiteError(f"site {run.site!r}: {error}") from error
        check_finite(run, self.model)
        progress.keep(position, last=True)
        num_steps, losses = position.num_steps + position.steps, [*position.losses, position.loss]
        if run.skipped_steps:
            skipped = f"{run.skipped_steps} of {num_steps} steps of round {run.current_round} overflowed in float16"
            refuse_at(run.site, {
                f"{skipped}, so nothing was learned; set precision to 'bf16' or 'fp32'": run.skipped_steps == num_steps,
            }, NotFinite)  # fmt: skip
            log.warning("site %r: %s and were left out", run.site, skipped)
        # Save the moments only after the check of the model, and only finite ones: a broken round's moments would break
        # every later round, or (a square that overflowed) stop the update of its weights for good.
        moments = filter(torch.is_tensor, (value for by_name in optimizer.state.values() for value in by_name.values()))
        if training.keep_optimizer_state and all(bool(torch.isfinite(moment).all()) for moment in moments):
            run.store.save(MOMENTS, run.current_round, optimizer.state_dict())
        counted_steps = num_steps - run.skipped_steps - self.unsure
        idle = "" if counted_steps else "its training images gave no batch"
        return Trained(losses, counted_steps, run.data.num_samples("training"), idle)

    def one_pass(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run a forward and a backward pass of a batch on the run's device; return the loss, detached."""
        run = self.run
        self.optimizer.zero_grad(set_to_none=True)
        beside = run.unlabelled
        loss = inputs.new_zeros(()) if beside and beside.alone else self.half.loss(run, self.model, inputs, targets)
        if beside is not None:
            loss = loss + beside.term(self.model, inputs)
            if beside.alone and not bool(beside.counts.any()):  # neither a label nor a pseudo-label
                raise NothingSure(loss.detach())
        run.first_pass = False
        # A NaN loss is not backpropagated: the caller stops with a message. On a GPU the loss is checked only later.
        if run.device.type != "cpu" or torch.isfinite(loss):
            if run.scale is None:
                loss.backward()
            else:
                run.scale.backward(loss, self.optimizer)
        self.clip()
        return loss.detach()

    def clip(self) -> None:
        """Clip the norm of the model's gradients to ``max_grad_norm``, if that is set."""
        if self.half.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.half.max_grad_norm)

    def _epoch(self, position: Position, most: int | None, progress: HalfDone) -> None:
        """Train from a position to the end of its epoch of at most ``most`` steps, and advance the position."""
        training, run = self.half, self.run
        seed = run.seed + run.epoch
        order = run.data.order("training", seed)
        position.total = torch.as_tensor(position.total, dtype=torch.float64, device=run.device)
        # Reading a number from a GPU waits until all of its queued work is done.
        every = 1 if run.device.type == "cpu" else LOOKED_AT
        batches = iter(
            run.data.batches("training", batch_size=training.batch_size, shuffle_seed=seed, augment=training.augment)
        )
        # Skip batches that are done; reading them may draw random numbers.
        next(itertools.islice(batches, position.steps, position.steps), None)
        progress.resume_random()
        for inputs, targets in itertools.islice(batches, None if most is None else most - position.steps):
            done = position.num_steps + position.steps
            run.untold = self._told is not None and done >= self._told
            if training.schedule == "poly":
                share = min(1.0, done / self._steps_of_round())
                for group in self.optimizer.param_groups:
                    group["lr"] = rate(training, run.current_round, run.num_rounds, share)
            run.batch = None if order is None else order[position.seen : position.seen + len(inputs)]
            inputs = run.drop_channels(inputs, run.epoch, position.steps)
            position.total = position.total + self._step(inputs, targets).double() * len(inputs)
            if position.steps % every == 0:
                self._check_losses(position.total, position.num_steps + position.steps)
            position.seen += len(inputs)
            position.steps += 1
            progress.keep(position)
        self._check_losses(position.total, position.num_steps + position.steps - 1)

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        run, optimizer = self.run, self.optimizer
        closure = partial(self.one_pass, run.on_device(inputs), run.on_device(targets))
        run.first_pass = True
        try:
            loss = self.half.step(run, self.model, optimizer, closure)
        except NothingSure as unsure:
            self.unsure += 1
            return unsure.loss
        except Overflow as overflow:
            run.skipped_steps += 1
            return overflow.loss
        if run.unlabelled is not None:
            run.unlabelled.update_teacher(self.model)
        return loss

    def _check_losses(self, total: torch.Tensor | float, step: int) -> None:
        """Raise :class:`NotFinite` if the losses so far are not finite, or if gradients exceed float16's range."""
        run, loss = self.run, float(total)
        where = f"in round {run.current_round}, epoch {run.epoch}"
        by = "" if run.device.type == "cpu" else "by "
        refuse_at(run.site, {
            f"the training loss became {loss} {where}, {by}step {step}; lower learning_rate (now "
            f"{self.half.learning_rate:g}), set max_grad_norm, or look for extreme values in the images": (
                not math.isfinite(loss)
            ),
            f"the gradients overflow in float16 at any scale {where}, step {step}; set precision to 'bf16' or 'fp32', "
            "or lower learning_rate": run.scale is not None and run.scale.exhausted,
        }, NotFinite)  # fmt: skip


def check_finite(run: SiteRun, model: torch.nn.Module) -> None:
    """Raise :class:`NotFinite` when a tensor of the trained model is not finite (names it)."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NotFinite(
                f"site {run.site!r}: tensor {name!r} is not finite after training in round {run.current_round}; "
                "lower learning_rate or set max_grad_norm"
            )
