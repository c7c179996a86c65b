"""Save a round's half-done training at the site, so that a repeated task resumes the training from there.

A site may lose its process, its machine or its connection in the middle of hours of training. Every ``save_seconds``
(a setting in the site's own file) the training loop saves everything that the next step depends on: the trained
tensors, the optimizer, the random state, the position in the epoch, and those attributes of ``run.own`` that the method
names in ``moving``. When the site receives the same task again (same round, run and model), it makes only the
remaining steps, and the result has the same bits as a training without interruption.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fairflare.methods.base.site_run import HALF_DONE, SiteRun

if TYPE_CHECKING:
    from fairflare.methods.base.training import LocalTraining

log = logging.getLogger(__name__)

SPARE = 50  # least seconds of training between two saves, for each second that a save takes


@dataclass
class Position:
    """Describe the position that a site's training has reached in a round.

    Attributes:
        epoch: number of the present epoch, from 0; all earlier epochs are done.
        losses: mean loss of each earlier epoch.
        num_steps: optimizer steps in all earlier epochs together.
        steps: optimizer steps in the present epoch so far.
        seen: samples in the present epoch so far.
        total: sum of the losses of the samples seen in the present epoch, on the site's device during training.
    """

    epoch: int = 0
    losses: list[float] = field(default_factory=list)
    num_steps: int = 0
    steps: int = 0
    seen: int = 0
    total: torch.Tensor | float = 0.0

    @property
    def loss(self) -> float:
        """Return the mean loss over the samples that the present epoch has seen."""
        return float(self.total) / max(self.seen, 1)

    def move_to_epoch(self, epoch: int) -> Position:
        """Return this position if it is in ``epoch``, else the beginning of ``epoch``, which must be the next epoch."""
        return self if epoch == self.epoch else Position(epoch, [*self.losses, self.loss], self.num_steps + self.steps)


class HalfDone:
    """Save the training of one task from time to time, and resume it when the task is repeated.

    Args:
        training: the method's site half, which trains.
        run: the server's task that this site performs, after ``begin_round``.
        model: the network before the first step.
        optimizer: the optimizer, with the moments that the round begins with.
    """

    def __init__(
        self, training: LocalTraining, run: SiteRun, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.run, self.model, self.optimizer = run, model, optimizer
        self._random: dict[str, torch.Tensor] = {}
        self._kept: tuple[int, int] | None = None  # epoch and steps of the position that was saved last
        self._due = math.inf
        if run.save_seconds > 0:
            self._due = time.monotonic() + run.save_seconds
            self._start = self._fingerprint(training)

    def resume(self) -> Position:
        """Restore the saved training into model, optimizer and run, and return its position.

        Return the beginning of the round if no training was saved, or if the saved one began with another model, seed,
        settings or data size. The random state is restored later, by :meth:`resume_random`, after the batches of the
        saved training are skipped.
        """
        run = self.run
        if run.save_seconds <= 0:
            return Position()
        run.store.clear(HALF_DONE, but=run.current_round)
        saved = run.store.load_at(HALF_DONE, run.current_round)
        if saved is None or saved["start"] != self._start:
            return Position()
        self.model.load_state_dict(saved["model"], strict=False)
        self.optimizer.load_state_dict(saved["optimizer"])
        if run.scale is not None:
            run.scale.scaler.load_state_dict(saved["scale"])
        run.skipped_steps = saved["skipped_steps"]
        for name, value in saved["own"].items():
            mine = getattr(run.own, name)
            if hasattr(mine, "__dict__"):
                vars(mine).update(value)
            else:
                setattr(run.own, name, value)
        if run.unlabelled is not None:
            run.unlabelled.load_state(saved["unlabelled"])
        self._random = saved["random"]
        position = Position(**saved["position"])
        self._kept = (position.epoch, position.steps)
        log.info(
            "site %s: round %d goes on behind %d of its steps",
            run.site,
            run.current_round,
            position.num_steps + position.steps,
        )
        return position

    def resume_random(self) -> None:
        """Restore the saved state of the random number generators; a second call does nothing."""
        state, self._random = self._random, {}
        if state:
            torch.set_rng_state(state["cpu"])
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self.run.device)

    def keep(self, position: Position, *, last: bool = False) -> None:
        """Save the training if the next save is due; on a full disk, later saves are skipped and the round continues.

        Args:
            position: the position of the training, after a step.
            last: whether the training is finished. Its end is saved if the training was saved before at an earlier
                position, so that a lost reply need not be computed again.
        """
        begun = time.monotonic()
        if self._kept is None or self._kept == (position.epoch, position.steps) if last else begun < self._due:
            return
        run = self.run
        of_gpu = {"cuda": torch.cuda.get_rng_state(run.device)} if run.device.type == "cuda" else {}
        moving = {name: getattr(run.own, name) for name in getattr(run.own, "moving", ())}
        value = {
            "start": self._start,
            "model": dict(_list_trained(self.model)),
            "optimizer": self.optimizer.state_dict(),
            "scale": None if run.scale is None else run.scale.scaler.state_dict(),
            "skipped_steps": run.skipped_steps,
            "own": {name: vars(part) if hasattr(part, "__dict__") else part for name, part in moving.items()},
            "unlabelled": None if run.unlabelled is None else run.unlabelled.state(),
            "random": {"cpu": torch.get_rng_state(), **of_gpu},
            "position": {**vars(position), "total": float(position.total)},
        }
        try:
            run.store.save(HALF_DONE, run.current_round, value, kept=1)
        except OSError as error:
            log.warning("site %s: the half-done round cannot be kept (%s); it goes on without", run.site, error)
            self._due = math.inf
            return
        self._kept = (position.epoch, position.steps)
        now = time.monotonic()
        self._due = now + max(run.save_seconds, SPARE * (now - begun))

    def _fingerprint(self, training: LocalTraining) -> str:
        """Return a fingerprint of everything that a training begins with: model, settings, seed, data size and so on.

        The same number of steps from the same fingerprint leads to the same model.
        """
        run = self.run
        facts = (type(training).__name__, sorted(vars(training).items(), key=str), run.seed, run.num_rounds,
                 str(run.device), run.data.num_samples("training"))  # fmt: skip
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
        for name, tensor in _list_trained(self.model):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _list_trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return names and tensors of a model's state that training may change: all but parameters without gradient."""
    still = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return ((name, tensor) for name, tensor in model.state_dict().items() if name not in still)
