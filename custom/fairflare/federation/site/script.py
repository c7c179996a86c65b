"""Run the methods' site halves around a training loop in the user's own script.

A :class:`ScriptSite` performs a site's tasks with a :class:`fairflare.federation.site.worker.SiteWorker`, as
FairFlare's executor does. The worker runs in its own thread. When it would train, the script's thread trains instead
and then returns control. The loop uses the method's loss and, if the method has one, its optimizer step.
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

from fairflare.base.checks import nearest, refuse
from fairflare.base.disk.files import safe_name
from fairflare.base.settings import values_of
from fairflare.base.task import Task
from fairflare.core.features.norms import LoneSample, lone_samples
from fairflare.exchange.messages import SiteReply, SiteTask
from fairflare.federation.site.site_state import SENT
from fairflare.federation.site.worker import SiteWorker
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.home import choose_tuned_part
from fairflare.methods.base.local_loop import LocalLoop, Trained, check_finite
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun

#: Advice for a message about a script that made no optimizer step.
IDLE = (
    "see that its loop runs in every round (a Lightning Trainer does so once: make a new one) and that the optimizer "
    "has this model's parameters"
)


def describe_training(training: LocalTraining, task: Task) -> dict[str, Any]:
    """Return the description of a method's site half that is sent to the sites, with the job's metrics and the primary.

    The description names the class of the site half and holds its settings.
    """
    return {
        "kind": type(training).__name__,
        "settings": values_of(training)["args"],
        "metrics": {name: metric.describe() for name, metric in task.by_name().items()},
        "primary": task.primary_metric,
    }


def build_training(description: Any) -> LocalTraining:
    """Build the object that trains at this site, of the class and settings that the server sent; only known classes.

    Raises:
        SiteError: the server named no class, or one that is unknown at this site, or settings that it does not accept.
    """
    if not isinstance(description, Mapping):
        raise SiteError("the server did not say which method it runs; make the job with ScriptRecipe")
    known = {method.training.__name__: method.training for method in all_methods().values()}
    kind, settings = description.get("kind"), description.get("settings")
    if kind not in known or not isinstance(settings, Mapping):
        raise SiteError(
            f"the server names the training class {kind!r:.80}, which is not known here{nearest(kind, known)}"
        )
    try:
        return known[kind](**settings)
    except ValueError as error:
        raise SiteError(f"the server's settings of {kind} are not usable here: {error}") from error


@dataclass
class Loop:
    """Record one round of a script's training loop: its inputs, and what the loop did.

    Attributes:
        run, model: run and network of the ``train`` task; the network holds the received model.
        epochs: sum of losses and number of samples of each epoch, by the epoch's number from 0.
        batches, steps: number of calls of the method's loss, and of the method's optimizer step.
        failed: the error that made the round fail; ``None`` for no error.
        last: inputs, targets and loss of the last batch, until the method's step is made; ``None`` for no such batch.
        answered: event that is set when the loop is over.
    """

    run: SiteRun
    model: torch.nn.Module
    epochs: dict[int, tuple[float, int]] = field(default_factory=dict)
    batches: int = 0
    steps: int = 0
    failed: Exception | None = None
    last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    answered: threading.Event = field(default_factory=threading.Event)


def _computing_problem(run: SiteRun) -> dict[str, object]:
    """Return whether a run sets how the network computes, which a script's loop decides itself, by the error's text."""
    return {
        f"site {run.site!r}: {run.computing}: precision, channels_last, compile and deterministic are of FairFlare's "
        "own training loop; take them out of the job or the site's file, and do it in the script": str(run.computing)
    }


class _Lent:
    """Wrap a method's site half so that the user's script trains in its place."""

    _loop: Loop  # the loop of the last round that was trained

    def __init__(self, training: LocalTraining, tell: queue.Queue[Loop | SiteReply]) -> None:
        self.training, self._tell = training, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self.training, name)

    def check(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        part = choose_tuned_part(self.training.personalise)
        refuse({
            f"site {run.site!r}: personalise=finetune:{part} is done by FairFlare's own training loop, and a script's "
            "trains here; leave it out": part,
            **_computing_problem(run),
        }, SiteError)  # fmt: skip
        return self.training.check(run, model)

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        criterion = self.training.criterion
        refuse({
            **_computing_problem(run),
            f"site {run.site!r}: the method's criterion {criterion!r} needs the number of classes: client.Site(..., "
            "classes=N); or set criterion to 'task' in the job":
                criterion != "task" and run.data.class_counts("training") is None,
        }, SiteError)  # fmt: skip
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
        return Trained(
            [total / max(seen, 1) for _, (total, seen) in sorted(loop.epochs.items())],
            loop.batches or None,
            run.data.num_samples("training"),
            "" if loop.steps else IDLE,
        )

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        # A loop without the method's own loss or step would give a result that is taken for that of the method.
        kind, loop = type(self.training).__name__, self._loop
        own_loss, own_step = needs(self.training)
        refuse({
            f"trained with a loss of its own, but {kind} has one; take site.loss(inputs, targets) in the script":
                own_loss and not loop.batches,
            f"made {loop.steps} of {loop.batches} steps with {kind}, which has its own; take site.loss(inputs, "
            "targets) and, for optimizer.step(), site.step(optimizer) in the script":
                own_step and (not loop.batches or loop.steps != loop.batches),
        }, lambda problem: SiteError(f"site {run.site!r}: the script {problem}"))  # fmt: skip
        return self.training.report(run, model)


class ScriptSite:
    """Perform a site's tasks for a user's script, whose own loop does the training.

    Args:
        site: name of the site.
        task: the script's network, loss, data and metrics (:class:`fairflare.tasks.scripts.LoopTask`).
        model: the network that the loop trains; received models are loaded into it.
        training: the method's site half.
        settings: settings as in a site file: ``prior``, ``metrics_by_class``, ``min_cases``.
        state_folder: folder for the state of this experiment and site.
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
        self.worker = SiteWorker(
            site,
            task,
            lent,
            {**settings, "device": device},
            state_folder,
            sent=state_folder / SENT / f"{safe_name(site)}.jsonl",
        )
        self._loop: Loop | None = None

    def begin(self, request: SiteTask) -> SiteReply | None:
        """Perform a task and return the reply; ``None`` for ``train``: the script trains until :meth:`finish`."""

        def work() -> None:
            self.worker.network.use(self.model)
            self._tell.put(self.worker.perform(request))

        # The thread is a daemon, so that it ends with a script that ends in the middle of a round.
        threading.Thread(target=work, name="fairflare-task", daemon=True).start()
        answer = self._tell.get()
        if isinstance(answer, SiteReply):
            return answer
        self._loop = answer
        return None

    def finish(self) -> SiteReply:
        """End the training of a round and return the reply to ``train``, with the network's present state."""
        loop, self._loop = self._running(), None
        loop.answered.set()
        reply = self._tell.get()
        assert isinstance(reply, SiteReply)
        return reply

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, epoch: int | None = None) -> torch.Tensor:
        """Return the method's loss of a batch, to be backpropagated once; a constant 0 in a round that has failed."""
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
        """Make the method's optimizer step from the gradients of the last loss; do nothing if the round has failed."""
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
            first = False  # the script itself has made the first forward and backward pass
            passes.clip()
            return loss

        try:
            self.training.step(loop.run, loop.model, optimizer, closure)
        except Exception as error:
            loop.failed = error
        loop.steps += 1

    def _zero(self) -> torch.Tensor:
        """Return a loss of 0 that can be backpropagated, so that the script runs on until the next round."""
        return torch.stack([p.sum() * 0 for p in self.model.parameters() if p.requires_grad]).sum()

    def _running(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("no training is in progress; call site.receive() or site.epochs(number) first")
        return self._loop


def needs(training: LocalTraining) -> tuple[bool, bool]:
    """Return whether a method has its own loss, and whether it has its own optimizer step."""
    kind = type(training)
    return (
        kind.loss is not LocalTraining.loss or training.criterion != "task",
        kind.step is not LocalTraining.step or training.max_grad_norm is not None,
    )
