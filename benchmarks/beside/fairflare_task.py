"""Define the FairFlare case of ``bench_beside.py``: a task of the user's own."""

from __future__ import annotations

from typing import Any

import beside_common as common
import torch

from fairflare.tasks.base import Metric, SiteData
from fairflare.tasks.base import Task as Base


class Discs(SiteData):
    synthetic = True
    description = "discs on noise"

    def __init__(self, number: int) -> None:
        self.images = {split: common.images(number, split) for split in common.IMAGES}

    def num_samples(self, split: str) -> int:
        return common.IMAGES[split]

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False) -> Any:
        x, y = self.images[split]
        order = torch.arange(len(x))
        if shuffle_seed is not None:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(shuffle_seed))
        return [(x[chosen], y[chosen]) for chosen in order.split(batch_size)]


class Task(Base):
    primary_metric = "dice"

    def build_model(self) -> torch.nn.Module:
        return common.build()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return common.LOSS(outputs, targets)

    def declared_metrics(self) -> tuple[Metric, ...]:
        return (Metric(name="dice", doc="made up", higher_is_better=True),)

    def evaluate(self, model: torch.nn.Module, batches: Any, device: Any) -> dict[str, float]:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return {"dice": common.evaluate(model, x, y)}

    def open_site(self, site: str, settings: Any) -> SiteData:
        return Discs(int(site.removeprefix("site-")) - 1)
