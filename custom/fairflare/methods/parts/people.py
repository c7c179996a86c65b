"""Training and tests in which each image is met as one of its group of people."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.task import Proxy
from fairflare.core.features.group_adapter import people
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun

if TYPE_CHECKING:
    from fairflare.base.task import Batch, Batches


class ByPeople(LocalTraining):
    """Capability of a training: its network has adapters by group, and goes through the site's images by group."""

    @property
    @abstractmethod
    def attribute(self) -> str:
        """Whose groups; where a site's data lack it, as at a site that was no part of the run, all count alike."""

    def shown(self, run: SiteRun, model: torch.nn.Module) -> Any:
        """The site's data, whose batches tell the network which groups they are of."""
        return run.data if self.attribute not in run.data.attributes else _OfPeople(run, model, self.attribute)


class _OfPeople(Proxy):
    """A site's data; while a batch is out, the network's adapters are told its groups."""

    def __init__(self, run: SiteRun, model: torch.nn.Module, attribute: str) -> None:
        super().__init__(run.data)
        self._site, self._model, self._attribute = run.site, model, attribute

    def batches(self, split: str, **options: Any) -> Batches:
        """See :meth:`fairflare.base.task.SiteData.batches`."""
        order = self._inner.order(split, options.get("shuffle_seed"))
        if order is None:
            raise SiteError(f"site {self._site!r}: fair_lora needs data that say which image is which in a batch")
        numbers = self._inner.group_numbers(split, self._attribute)
        return _Told(self._inner.batches(split, **options), self._model, [numbers[index] for index in order])


class _Told(Proxy):
    """Batches of images whose groups are known, in their order."""

    def __init__(self, inner: Batches, model: torch.nn.Module, numbers: list[int]) -> None:
        super().__init__(inner)
        self._model, self._numbers = model, numbers

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Batch]:
        seen = 0
        for batch in self._inner:
            count = len(batch[0])
            with people(self._model, self._numbers[seen : seen + count]):
                yield batch
            seen += count
