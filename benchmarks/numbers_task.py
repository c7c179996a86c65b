"""Define a task of seven weights (``width=2``) and four numbers a site, for benchmarks of everything but training."""

from __future__ import annotations

from typing import Any

import torch

from fairflare.tasks.base import Metric, SiteData
from fairflare.tasks.base import Task as Base


class Numbers(SiteData):
    synthetic = True
    description = "four numbers"

    def num_samples(self, split: str) -> int:
        return 4

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False) -> Any:
        return [(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[0.0], [1.0], [0.0], [2.0]]))]


class Task(Base):
    primary_metric = "dice"

    def __init__(self, width: int = 2) -> None:
        self.width = width

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(1, self.width), torch.nn.Linear(self.width, 1))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, targets)

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="dice", doc="made up", higher_is_better=True),)

    def evaluate(self, model: Any, batches: Any, device: Any) -> dict[str, float]:
        return {"dice": 0.5, "loss": 0.1}

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Numbers()
