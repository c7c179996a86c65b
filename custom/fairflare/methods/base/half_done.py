"""A round's training that is half done, kept at the site: who takes the round up again goes on from there.

A site may lose its process, its machine or its line in the middle of hours of training. Every so many seconds
(``save_seconds`` of the site's own file) the loop keeps what the next step depends on: the trained tensors, the
optimizer, the random state, the place in the epoch, and what of ``run.own`` the method declares to be ``moving``. The
same task again (of the same round and run, with the same model) then makes the remaining steps, and the same bits.
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

SPARE = 50  # one second of writing for so many of training, at most


@dataclass
class Position:
    """How far a round's training is.

    Attributes:
        epoch: from 0; before it all are done.
        losses: mean loss of each of those.
        num_steps: in all of those.
        steps: in this epoch.
        seen: samples in this epoch.
        total: sum of their losses, on the site's device while it trains.
    """

    epoch: int = 0
    losses: list[float] = field(default_factory=list)
    num_steps: int = 0
    steps: int = 0
    seen: int = 0
    total: torch.Tensor | float = 0.0

    @property
    def loss(self) -> float:
        """Mean over the samples of this epoch."""
        return float(self.total) / max(self.seen, 1)

    def in_epoch(self, epoch: int) -> Position:
        """Return this one, or the beginning of the next epoch."""
        return self if epoch == self.epoch else Position(epoch, [*self.losses, self.loss], self.num_steps + self.steps)


class HalfDone:
    """Keeps a training of one task, and takes it up again.

    Args:
        half: whose training it is.
        run: of the task, after ``begin_round``.
        model: before the first step.
        optimizer: with the moments that the round begins with.
    """

    def __init__(
        self, half: LocalTraining, run: SiteRun, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.run, self.model, self.optimizer = run, model, optimizer
        self._every = run.save_seconds
        self._random: dict[str, torch.Tensor] = {}
        self._kept: tuple[int, int] | None = None  # epoch and steps
        self._due = math.inf
        if self._every > 0:
            self._due = time.monotonic() + self._every
            self._start = self._fingerprint(half)

    def taken_up(self) -> Position:
        """Put everything back as it was when it was kept; the beginning where nothing is, or it is of another start.

        The random state is put back by :meth:`resume_random`, behind the batches that are skipped.
        """
        run = self.run
        if self._every <= 0:
            return Position()
        run.store.clear(HALF_DONE, but=run.current_round)
        kept = run.store.load_at(HALF_DONE, run.current_round)
        if kept is None or kept["start"] != self._start:
            return Position()
        self.model.load_state_dict(kept["model"], strict=False)
        self.optimizer.load_state_dict(kept["optimizer"])
        if run.scale is not None:
            run.scale.scaler.load_state_dict(kept["scale"])
        run.skipped_steps = kept["skipped_steps"]
        for name, value in kept["own"].items():
            mine = getattr(run.own, name)
            if hasattr(mine, "__dict__"):
                vars(mine).update(value)
            else:
                setattr(run.own, name, value)
        self._random = kept["random"]
        at = Position(**kept["position"])
        self._kept = (at.epoch, at.steps)
        log.info(
            "site %s: round %d goes on behind %d of its steps", run.site, run.current_round, at.num_steps + at.steps
        )
        return at

    def resume_random(self) -> None:
        """Return the random state that was kept, once."""
        state, self._random = self._random, {}
        if state:
            torch.set_rng_state(state["cpu"])
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self.run.device)

    def keep(self, at: Position, *, last: bool = False) -> None:
        """Keep the training where it is due; a full disk ends the keeping and not the round.

        Args:
            at: where the training is, behind a step.
            last: it is done: keep it where it was kept before, for a reply that does not get through.
        """
        begun = time.monotonic()
        if self._kept is None or self._kept == (at.epoch, at.steps) if last else begun < self._due:
            return
        run = self.run
        random = {"cpu": torch.get_rng_state()}
        if run.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(run.device)
        moving = {name: getattr(run.own, name) for name in getattr(run.own, "moving", ())}
        value = {
            "start": self._start,
            "model": dict(_trained(self.model)),
            "optimizer": self.optimizer.state_dict(),
            "scale": None if run.scale is None else run.scale.scaler.state_dict(),
            "skipped_steps": run.skipped_steps,
            "own": {name: vars(part) if hasattr(part, "__dict__") else part for name, part in moving.items()},
            "random": random,
            "position": {**vars(at), "total": float(at.total)},
        }
        try:
            run.store.save(HALF_DONE, run.current_round, value, kept=1)
        except OSError as error:
            log.warning("site %s: the half-done round cannot be kept (%s); it goes on without", run.site, error)
            self._due = math.inf
            return
        self._kept = (at.epoch, at.steps)
        now = time.monotonic()
        self._due = now + max(self._every, SPARE * (now - begun))

    def _fingerprint(self, half: LocalTraining) -> str:
        """Return a fingerprint of all that the training begins with.

        The same number of steps from the same fingerprint leads to the same model.
        """
        run = self.run
        found = hashlib.blake2b(digest_size=16)
        facts = (type(half).__name__, sorted(vars(half).items(), key=str), run.seed, run.num_rounds, str(run.device),
                 run.data.num_samples("training"))  # fmt: skip
        found.update(repr(facts).encode())
        for name, tensor in _trained(self.model):
            found.update(name.encode())
            found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return tensors that training may change: all but parameters without gradient."""
    still = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return ((name, tensor) for name, tensor in model.state_dict().items() if name not in still)
