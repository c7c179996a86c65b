"""The images that a site measures features on: a split, as often as asked for, whole or a fixed subset of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fairflare.methods.training import SiteRun


@dataclass
class ImageBatches:
    """Input batches on the run's device, with deterministic transforms; can be gone through any number of times.

    Args:
        run: has the data.
        split: ``"training"``, ``"validation"`` or another one of the data.
        batch_size: images in a batch.
        passes: over the images, each in another seeded order; 1: once, in the order of the list.
        max_samples: at most so many images, a seeded choice that is the same in every round; ``None``: all.
    """

    run: SiteRun
    split: str
    batch_size: int
    passes: int = 1
    max_samples: int | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.passes):
            if self.max_samples is not None:
                yield from self._subset(self.max_samples)
                continue
            seed = None if self.passes == 1 else self.run.seed + number
            for inputs, _ in self.run.data.batches(self.split, batch_size=self.batch_size, shuffle_seed=seed):
                yield inputs.to(self.run.device)

    @property
    def count(self) -> int:
        """Images of a pass."""
        total = self.run.data.num_samples(self.split)
        return total if self.max_samples is None else min(total, self.max_samples)

    def batched(self) -> list[tuple[torch.Tensor, ...]]:
        """The batches of each pass, as numbers of images (0: the first one in the order of the list)."""
        seeds = range(self.run.seed, self.run.seed + self.passes)
        orders = [torch.randperm(self.count, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return [order.split(self.batch_size) for order in orders]

    def _subset(self, count: int) -> Iterator[torch.Tensor]:
        """In file order."""
        total = self.run.data.num_samples(self.split)
        chosen = set(torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count].tolist())
        waiting: list[torch.Tensor] = []
        index = 0
        for inputs, _ in self.run.data.batches(self.split, batch_size=self.batch_size):
            for image in inputs:
                if index in chosen:
                    waiting.append(image)
                index += 1
                if len(waiting) == self.batch_size:
                    yield torch.stack(waiting).to(self.run.device)
                    waiting = []
        if waiting:
            yield torch.stack(waiting).to(self.run.device)
