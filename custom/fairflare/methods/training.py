"""The site half of a method: local training, with a few hooks, and what a site says about it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from fairflare.core import losses
from fairflare.core.norms import LoneSample, lone_samples
from fairflare.core.settings import BelowOne, Flag, NonNegative, Positive, PositiveInt, settings
from fairflare.methods.personal import KeepsAtHome

if TYPE_CHECKING:
    from fairflare.core.task import Batch, SiteData, Task

LOCAL_MODEL = "local_model"  # in a site's store: what it trained, for the anchor phase and for MOON
LOWEST_SHARE = 1e-3  # of the learning rate, at the end of a cosine: from 0.1 to 1e-4 in Fed-MAS's code


class SiteError(RuntimeError):
    """A task cannot be done at a site.

    Args:
        message: for this site's own log; may name files.
        public: what the server may know: no file name, path or identifier.
        skipped: an expected refusal (too little data), not a failure.
    """

    def __init__(self, message: str, *, public: str | None = None, skipped: bool = False) -> None:
        super().__init__(message)
        self.public = public or message
        self.skipped = skipped


class NotFinite(SiteError):
    """A training came to a loss or a tensor that is no finite number."""


class StateStore(Protocol):
    """What a site keeps between tasks; see :class:`fairflare.federation.site_store.SiteStore`."""

    def save(self, name: str, current_round: int, value: Mapping[str, Any]) -> None: ...

    def load_before(self, name: str, current_round: int) -> dict[str, Any] | None: ...

    def load_at(self, name: str, current_round: int) -> dict[str, Any] | None: ...


@dataclass
class SiteRun:
    """One task at one site, as a site half sees it. It lives as long as the task."""

    site: str
    task: Task
    data: SiteData  # going through their batches ends with TaskStopped when the job is stopped
    device: torch.device
    current_round: int
    num_rounds: int
    seed: int  # of this experiment, site and round
    directives: Mapping[str, Any]
    store: StateStore
    scratch: Path
    settings: Mapping[str, Any] = field(default_factory=dict)  # the site's private file
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the received model, on the validation split
    # While training: epoch from 0 (with ``local_steps`` the pass), and which training samples the batch holds (None:
    # the data do not say).
    epoch: int = 0
    batch: list[int] | None = None
    first_pass: bool = True  # of the batch's step, which may look at the loss twice
    #: What the site half keeps from one hook to the next. Here and not on the half, so that nothing outlives the task:
    #: after an out-of-memory an optimizer kept elsewhere would hold a second model.
    own: Any = None


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
class LocalTraining(KeepsAtHome):
    """Site half of FedAvg, and the frame of every other: E epochs over the site's training images.

    Args:
        optimizer: ``"adam"`` (L2 weight decay, as the papers), ``"adamw"`` or ``"sgd"``.
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

    Source:
        Defaults: Yan et al., MICCAI 2024, section 3.1 and the authors' code (betas, moments kept).
    """

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
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
        if self.criterion != "task" and task.has_classes is False:
            raise ValueError(f"criterion={self.criterion!r} needs classes; set criterion to 'task'")

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

    def follows_num_rounds(self) -> list[str]:
        """Settings whose effect in a round depends on the number of rounds: an experiment cannot go on with another."""
        return [] if self.schedule == "constant" else ["schedule"]

    def rate(self, current_round: int, num_rounds: int) -> float:
        r"""Learning rate of round r, from 0, of R.

        .. math:: \eta_r = \eta_{low} + \tfrac12 (\eta - \eta_{low}) (1 + \cos(\pi (r + 1) / R))

        for ``"cosine"`` (Fed-MAS's code): the first of many rounds has nearly ``learning_rate``, the last one
        ``lowest_rate``.
        """
        if self.schedule == "constant":
            return self.learning_rate
        low = LOWEST_SHARE * self.learning_rate if self.lowest_rate is None else self.lowest_rate
        turn = math.pi * (current_round + 1) / max(num_rounds, 1)
        return low + 0.5 * (self.learning_rate - low) * (1 + math.cos(turn))

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer with this rule's settings."""
        params = list(parameters)
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                params,
                lr=self.learning_rate,
                momentum=self.momentum,
                nesterov=self.momentum > 0,
                weight_decay=self.weight_decay,
            )
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(params, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay)

    def start(self, run: SiteRun, model: torch.nn.Module) -> None:
        """What goes before the first step of a round."""
        torch.manual_seed(run.seed)
        model.train()
        self.begin_round(run, model)

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        """Trains ``model`` in place, deterministically for a given ``run.seed``.

        Raises:
            NotFinite: a loss or a trained tensor that is not finite (names site, round, and where).
            SiteError: one sample for a batch norm without running statistics.
        """
        self.start(run, model)
        optimizer = self.make_optimizer(p for p in model.parameters() if p.requires_grad)
        if self.keep_optimizer_state:
            kept = run.store.load_before("optimizer", run.current_round)
            if kept is not None:
                optimizer.load_state_dict(kept)
        rate = self.rate(run.current_round, run.num_rounds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        num_steps, epoch_losses = 0, []
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
        # Behind the check, and only finite ones: moments of a broken round would break every later one, or (a square
        # that overflowed) stop its weights for good.
        if self.keep_optimizer_state and _finite_moments(optimizer):
            run.store.save("optimizer", run.current_round, optimizer.state_dict())
        return Trained(epoch_losses, num_steps, run.data.num_samples("training"))

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
        total, seen, steps = 0.0, 0, 0
        for inputs, targets in self.batches(run, model, seed):
            run.batch = None if order is None else order[seen : seen + len(inputs)]
            loss = self._one_step(run, model, optimizer, inputs, targets)
            if not math.isfinite(loss):
                raise NotFinite(
                    f"site {run.site!r}: the training loss became {loss} in round {run.current_round}, epoch "
                    f"{run.epoch}, step {steps_before + steps}; lower learning_rate (now {self.learning_rate:g}), set "
                    "max_grad_norm, or look for extreme values in the images"
                )
            total += loss * len(inputs)
            seen += len(inputs)
            steps += 1
            if steps == most:
                break
        return total / max(seen, 1), steps

    def _one_step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> float:
        inputs, targets = inputs.to(run.device), targets.to(run.device)
        run.first_pass = True
        return float(self.step(run, model, optimizer, partial(self.one_pass, run, model, optimizer, inputs, targets)))

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
        # Backpropagating a NaN would only spread it; the caller stops with a message.
        if torch.isfinite(loss):
            loss.backward()
        self.clip(model)
        return loss.detach()

    def clip(self, model: torch.nn.Module) -> None:
        """Limits the gradients where ``max_grad_norm`` is set."""
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)


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
