"""The optimizer of a site half, and its learning rate over the rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fairflare.core.task import Task

LOWEST_SHARE = 1e-3  # of the learning rate, at the end of a cosine: from 0.1 to 1e-4 in Fed-MAS's code


class HasOptimizer:
    """Part of every site half; its settings are declared in :class:`fairflare.methods.training.LocalTraining`."""

    optimizer: str
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    momentum: float
    max_grad_norm: float | None
    schedule: str
    lowest_rate: float | None

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

    def check_optimizer(self, task: Task) -> None:
        """Refuses the optimizer of a task that has none.

        Raises:
            ValueError: it has none.
        """
        if self.optimizer == "task" and not task.has_optimizer:
            raise ValueError("optimizer='task' needs a MONAI bundle's; set optimizer to 'adam', 'adamw' or 'sgd'")

    def make_optimizer(
        self, parameters: Iterable[torch.nn.Parameter], task: Task | None = None
    ) -> torch.optim.Optimizer:
        """A new optimizer with this rule's settings; the task's own where these say so."""
        params = list(parameters)
        if self.optimizer == "task":
            if task is None:
                raise ValueError("optimizer='task' needs the task")
            return task.make_optimizer(params)
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

    def clip(self, model: torch.nn.Module) -> None:
        """Limits the gradients where ``max_grad_norm`` is set."""
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
