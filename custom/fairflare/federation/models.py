"""The global model's files in the run directory, in FLARE's own layout so that its tools and examples read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fairflare.core.files import save_torch, write_whole

MODEL_FILE = "FL_global_model.pt"
BEST_MODEL_FILE = "best_FL_global_model.pt"


class ModelFiles:
    """Writes the current and the best global model.

    Args:
        folder: run directory.
        method: noted in the files.
    """

    def __init__(self, folder: Path, method: str) -> None:
        self.folder = folder
        self.method = method
        self.best: float | None = None  # mean validation metric of the best model so far
        self.best_round: int | None = None  # that received it

    def save(self, state: Mapping[str, torch.Tensor], current_round: int, name: str = MODEL_FILE) -> None:
        """Replaces the file atomically."""
        content = {"model": dict(state), "train_conf": {"round": current_round, "method": self.method}}
        write_whole(self.folder / name, lambda path: save_torch(content, path))

    def keep_best(
        self, state: Mapping[str, torch.Tensor], validation: Mapping[str, Mapping[str, float]], metric: str, made: int
    ) -> None:
        """Keeps the model with the best mean validation metric.

        Args:
            state: the *received* model of a round, which is what the sites validated.
            validation: ``{site: {metric: value}}`` of it.
            metric: larger is better.
            made: round that made the model.
        """
        values = [by[metric] for by in validation.values() if metric in by]
        if not values:
            return
        mean = sum(values) / len(values)
        if self.best is None or mean > self.best:
            self.best, self.best_round = mean, made + 1
            self.save(state, made, BEST_MODEL_FILE)

    def take_back(
        self,
        state: Mapping[str, torch.Tensor],
        made: int,
        best: Mapping[str, torch.Tensor] | None,
        value: float | None,
        best_round: int | None,
    ) -> None:
        """Both files as they were after an earlier round.

        Args:
            state: the global model.
            made: the round that made it; -1: none did.
            best: the best model; ``None``: there is none.
            value: its mean validation metric.
            best_round: the round that received it.
        """
        for name in (MODEL_FILE, BEST_MODEL_FILE):
            (self.folder / name).unlink(missing_ok=True)
        if made >= 0:
            self.save(state, made)
        self.best = self.best_round = None
        if best is not None and best_round is not None:
            self.save(best, best_round - 1, BEST_MODEL_FILE)
            self.best, self.best_round = value, best_round
