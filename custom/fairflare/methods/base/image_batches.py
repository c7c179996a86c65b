"""Iterate over the images on which a site measures features: a split or a fixed subset of it, once or several times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fairflare.methods.base.site_run import SiteRun


@dataclass
class ImageBatches:
    """Iterate over batches of images on the run's device, with deterministic transforms; can be iterated repeatedly.

    Args:
        run: the server's task that this site performs, with the site's data.
        split: ``"training"``, ``"validation"`` or another split of the data.
        batch_size: number of images that are read at a time.
        passes: number of passes over the images, each in another seeded order; 1: one pass, in the order of the list.
        max_samples: largest number of images, a seeded choice that is the same in every round; ``None`` for all images.
        least: if > 0, images are regrouped into batches of ``batch_size`` or ``least`` images, whichever is more; the
            last batch of a pass consists of the remaining images. 0: the batches are those of the data.
    """

    run: SiteRun
    split: str
    batch_size: int
    passes: int = 1
    max_samples: int | None = None
    least: int = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.passes):
            for images in self._batches_of_pass(None if self.passes == 1 else self.run.seed + number):
                yield images.to(self.run.device)

    @property
    def count(self) -> int:
        """Return the number of images in one pass over the batches."""
        total = self.run.data.num_samples(self.split)
        return total if self.max_samples is None else min(total, self.max_samples)

    @property
    def shuffled(self) -> bool:
        """Return whether the images are shuffled anew in every pass over them.

        A subset of the images is shuffled only if the data can tell which image comes when (``SiteData.order``).
        """
        return self.max_samples is None or self.run.data.order(self.split, self.run.seed) is not None

    def _batches_of_pass(self, seed: int | None) -> Iterator[torch.Tensor]:
        given = self.run.data.batches(self.split, batch_size=self.batch_size, shuffle_seed=seed)
        batches: Iterator[torch.Tensor] = (inputs for inputs, _ in given)
        if self.max_samples is not None:
            batches = self._choose(batches, seed, self.max_samples)
        return batches if self.max_samples is None and not self.least else self._cut(batches)

    def _choose(self, batches: Iterable[torch.Tensor], seed: int | None, count: int) -> Iterator[torch.Tensor]:
        total = self.run.data.num_samples(self.split)
        chosen = set(torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count].tolist())
        order = None if seed is None else self.run.data.order(self.split, seed)
        numbers = iter(range(total) if order is None else order)
        for inputs in batches:
            yield inputs[[i for i, number in zip(range(len(inputs)), numbers, strict=False) if number in chosen]]

    def _cut(self, batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the images in batches of the size that ``least`` asks for; a new image shape begins a new batch."""
        size, waiting = max(self.batch_size, self.least), None
        for batch in batches:
            if waiting is not None and waiting.shape[1:] != batch.shape[1:]:
                yield waiting
                waiting = None
            waiting = batch if waiting is None else torch.cat([waiting, batch])
            while len(waiting) >= size:
                yield waiting[:size]
                waiting = waiting[size:]
        if waiting is not None and len(waiting):
            yield waiting
