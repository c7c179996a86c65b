"""A site whose training loop is its own: the methods' site halves around a loop that somebody else wrote.

A :class:`ScriptSite` does a site's tasks with a :class:`fairflare.federation.site.worker.SiteWorker`, as our executor
does. The worker runs in a thread of its own; where it would train, the script's thread trains instead and then hands
back. What the loop lends from the method is its loss and, where it has one, its step.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fairflare.base.checks import first_of, nearest
from fairflare.base.settings import values_of
from fairflare.base.task import Task
from fairflare.core.features.norms import LoneSample, lone_samples
from fairflare.exchange.messages import SiteReply, SiteTask
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.local_loop import LocalLoop, Trained, check_finite
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun

#: What to look for where a script made no step.
IDLE = (
    "see that its loop runs in every round (a Lightning Trainer does so once: make a new one) and that the optimizer "
    "has this model's parameters"
)


def told_training(training: LocalTraining, task: Task) -> dict[str, Any]:
    """Return a site half in a message to the sites: the name of its class, and its settings.

    And what the job measures.
    """
    metrics = {name: metric.told() for name, metric in task.by_name().items()}
    return {"kind": type(training).__name__, "settings": values_of(training)["args"], "metrics": metrics}


def built_training(told: Any) -> LocalTraining:
    """Return the site half that a server named; only a method's own can be named.

    Raises:
        SiteError: none was named, or one that is not known here or not with these settings.
    """
    if not isinstance(told, Mapping):
        raise SiteError("the server did not say which method it runs; make the job with ScriptRecipe")
    known = {method.training.__name__: method.training for method in all_methods().values()}
    kind, settings = told.get("kind"), told.get("settings")
    if kind not in known or not isinstance(settings, Mapping):
        raise SiteError(f"the server names the site half {kind!r:.80}, which is not known here{nearest(kind, known)}")
    try:
        return known[kind](**settings)
    except ValueError as error:
        raise SiteError(f"the server's settings of {kind} are not usable here: {error}") from error


@dataclass
class Loop:
    """One round of a script's loop: what it is given, and what it did.

    Attributes:
        run, model: of the task; the network holds the received model.
        epochs: by number from 0: summed losses, samples.
        batches, steps: how often the loop took the method's loss, and its step.
        failed: why the round is lost.
    """

    run: SiteRun
    model: torch.nn.Module
    epochs: dict[int, tuple[float, int]] = field(default_factory=dict)
    batches: int = 0
    steps: int = 0
    failed: Exception | None = None
    last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # inputs, targets, loss
    answered: threading.Event = field(default_factory=threading.Event)


class _Lent:
    """A method's site half whose training is done by somebody else."""

    _loop: Loop  # the last one

    def __init__(self, training: LocalTraining, tell: queue.Queue[Loop | SiteReply]) -> None:
        self.training, self._tell = training, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self.training, name)

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        self._check_computing(run)
        return self.training.check(run, model)

    @staticmethod
    def _check_computing(run: SiteRun) -> None:
        if str(run.computing):
            raise SiteError(
                f"site {run.site!r}: {run.computing}: precision, channels_last, compile and deterministic are of "
                "FairFlare's own training loop; take them out of the job or the site's file, and do it in the script"
            )

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        self._check_computing(run)
        if self.training.criterion != "task" and run.data.class_counts("training") is None:
            raise SiteError(
                f"site {run.site!r}: the method's criterion {self.training.criterion!r} needs the number of classes: "
                "client.Site(..., classes=N); or set criterion to 'task' in the job"
            )
        LocalLoop(self.training, run, model).begin()
        loop = Loop(run, model)
        self._tell.put(loop)
        with lone_samples(model):
            loop.answered.wait()
        if isinstance(loop.failed, LoneSample):
            raise SiteError(f"site {run.site!r}: {loop.failed}") from loop.failed
        if loop.failed is not None:
            raise loop.failed
        check_finite(run, model)
        self._loop = loop
        losses = [total / max(seen, 1) for _, (total, seen) in sorted(loop.epochs.items())]
        return Trained(losses, loop.batches or None, run.data.num_samples("training"), "" if loop.steps else IDLE)

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        check_used(self.training, self._loop)
        return self.training.report(run, model)


class ScriptSite:
    """One site.

    Args:
        site: name.
        task: the script's network, loss, data and metrics (:class:`fairflare.tasks.scripts.LoopTask`).
        model: the network that the loop trains; received models are loaded into it.
        training: the method's site half.
        settings: as in a site file: ``prior``, ``metrics_by_class``, ``min_cases``.
        state_folder: of this experiment and site.
    """

    def __init__(
        self,
        site: str,
        task: Task,
        model: torch.nn.Module,
        training: LocalTraining,
        settings: Mapping[str, Any],
        state_folder: Path,
    ) -> None:
        self.model, self.training = model, training
        self._tell: queue.Queue[Loop | SiteReply] = queue.Queue()
        device = next((str(p.device) for p in model.parameters()), "cpu")
        lent: Any = _Lent(training, self._tell)
        self.worker = SiteWorker(site, task, lent, {**settings, "device": device}, state_folder)
        self._loop: Loop | None = None

    def begin(self, request: SiteTask) -> SiteReply | None:
        """Do a task; ``None``: it is to train, and the loop may do so until :meth:`finish`."""

        def work() -> None:
            self.worker.network.use(self.model)
            self._tell.put(self.worker.perform(request))

        # A daemon: of a script that ended in the middle of a round nothing must stay.
        threading.Thread(target=work, name="fairflare-task", daemon=True).start()
        found = self._tell.get()
        if isinstance(found, SiteReply):
            return found
        self._loop = found
        return None

    def finish(self) -> SiteReply:
        """Return the answer to ``train``, with the model as it is now."""
        loop, self._loop = self._running(), None
        loop.answered.set()
        reply = self._tell.get()
        assert isinstance(reply, SiteReply)
        return reply

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, epoch: int | None = None) -> torch.Tensor:
        """Return the method's loss of a batch, to be backpropagated once; in a round that failed a constant 0."""
        loop = self._running()
        if loop.failed is not None:
            return self._zero()
        run = loop.run
        run.epoch = (
            sum(seen for _, seen in loop.epochs.values()) // run.data.num_samples("training")
            if epoch is None
            else epoch
        )
        inputs, targets = inputs.to(run.device), targets.to(run.device)
        run.batch, run.first_pass = None, True
        try:
            loss = self.training.loss(run, loop.model, inputs, targets)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise SiteError(
                    f"site {run.site!r}: the training loss became {value} in round {run.current_round}, epoch "
                    f"{run.epoch}, step {loop.batches}; lower the script's learning rate, or look for extreme values "
                    "in the images"
                )
        except Exception as error:
            loop.failed = error
            return self._zero()
        run.first_pass = False
        total, seen = loop.epochs.get(run.epoch, (0.0, 0))
        loop.epochs[run.epoch] = (total + value * len(inputs), seen + len(inputs))
        loop.batches += 1
        loop.last = (inputs, targets, loss.detach())
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the method's step from the gradients of the last :meth:`loss`; nothing in a round that failed."""
        loop = self._running()
        if loop.failed is not None:
            return
        if loop.last is None:
            raise RuntimeError("site.step(optimizer) needs a loss from site.loss(inputs, targets) before it")
        inputs, targets, loss = loop.last
        loop.last = None
        passes, first = LocalLoop(self.training, loop.run, loop.model, optimizer), True

        def closure() -> torch.Tensor:
            nonlocal first
            if not first:
                return passes.one_pass(inputs, targets)
            first = False  # the script has made this pass
            passes.clip()
            return loss

        try:
            self.training.step(loop.run, loop.model, optimizer, closure)
        except Exception as error:
            loop.failed = error
        loop.steps += 1

    def _zero(self) -> torch.Tensor:
        """Return something to backpropagate: the script goes on, so that it is there in the next round."""
        return torch.stack([p.sum() * 0 for p in self.model.parameters() if p.requires_grad]).sum()

    def _running(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("no training is going on; ask with site.receive() or site.epochs(number) first")
        return self._loop


def needs(training: LocalTraining) -> tuple[bool, bool]:
    """Return whether a method has a loss of its own, and a step."""
    kind = type(training)
    loss = kind.loss is not LocalTraining.loss or training.criterion != "task"
    return loss, kind.step is not LocalTraining.step or training.max_grad_norm is not None


def check_used(training: LocalTraining, loop: Loop) -> None:
    """Refuse a script's loop that did not take what its method changes in the loop.

    Without that change the loop would take part under false colours.

    Raises:
        SiteError: it did not.
    """
    kind, site = type(training), loop.run.site
    own_loss, own_step = needs(training)
    if problem := first_of({
        f"trained with a loss of its own, but {kind.__name__} has one; take site.loss(inputs, targets) in the script":
            own_loss and not loop.batches,
        f"made {loop.steps} of {loop.batches} steps with {kind.__name__}, which has its own; take "
        "site.loss(inputs, targets) and, for optimizer.step(), site.step(optimizer) in the script":
            own_step and (not loop.batches or loop.steps != loop.batches),
    }):  # fmt: skip
        raise SiteError(f"site {site!r}: the script {problem}")
