"""Define a task for ``bench_exchange.py``: a frozen random encoder of any size, and a small trained head.

How large it is says ``FAIRFLARE_BENCH_PARAMETERS`` (default: a million), the same for the server and all sites.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fairflare.tasks.base import Metric, SiteData
from fairflare.tasks.base import Task as Base

WIDTH, CLASSES, IMAGES = 2048, 2, 16


class Vectors(SiteData):
    """Hold random vectors of two classes, different at every site."""

    synthetic = True
    description = "random vectors"
    num_classes = CLASSES

    def __init__(self, site: str) -> None:
        generator = torch.Generator().manual_seed(sum(site.encode()))
        self.targets = torch.arange(IMAGES) % CLASSES
        self.inputs = torch.randn(IMAGES, 64, generator=generator) + self.targets[:, None]

    def num_samples(self, split: str) -> int:
        return IMAGES

    def class_counts(self, split: str) -> torch.Tensor:
        return torch.bincount(self.targets)

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False) -> Any:
        return list(zip(self.inputs.split(batch_size), self.targets.split(batch_size), strict=True))


class Net(nn.Module):
    """Define frozen square layers, and one trained layer with a batch norm after them."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        count = max(1, round(parameters / WIDTH**2))
        layers: list[nn.Module] = [nn.Linear(64, WIDTH)]
        for _ in range(count):
            layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()]
        self.encoder = nn.Sequential(*layers).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.encoder(inputs)))
        return found


class Task(Base):
    """Define a task that finds the class of a vector."""

    primary_metric = "accuracy"
    has_classes = True

    def build_model(self) -> nn.Module:
        return Net(int(os.environ.get("FAIRFLARE_BENCH_PARAMETERS", 10**6)))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="accuracy", doc="share of right answers", higher_is_better=True),)

    def evaluate(self, model: nn.Module, batches: Iterable[Any], device: Any) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            pairs = [(model(inputs.to(device)).cpu(), targets) for inputs, targets in batches]
        outputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        right = (outputs.argmax(1) == targets).float().mean()
        return {"accuracy": float(right), "loss": float(self.loss(outputs, targets))}

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Vectors(site)
