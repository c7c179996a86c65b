"""A site's data, as a task sees them: each batch asks first whether the job was stopped."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fairflare.core.stopping import check_stop
from fairflare.core.task import Batches, SiteData
from fairflare.exchange.messages import SPLIT_TEST

if TYPE_CHECKING:
    from fairflare.core.task import Batch


class StoppableData(SiteData):
    """The same data; going through their batches ends with ``TaskStopped`` when the job is stopped.

    So training, probes, evaluation and similarity hear it, those of methods and tasks to come too.

    Args:
        data: of the site.
        test: the list that is shown as ``"test"``; of another one than that no further test list is shown.
    """

    def __init__(self, data: SiteData, test: str = SPLIT_TEST) -> None:
        self._data, self._test = data, test
        self.synthetic, self.description, self.test_splits = data.synthetic, data.description, data.test_splits
        self.num_classes, self.class_names = data.num_classes, data.class_names
        self.class_groups = data.class_groups
        if test != SPLIT_TEST:
            self.test_splits = (SPLIT_TEST,)

    def _list(self, split: str) -> str:
        return self._test if split == SPLIT_TEST else split

    def num_samples(self, split: str) -> int:
        return self._data.num_samples(self._list(split))

    def class_counts(self, split: str) -> torch.Tensor | None:
        return self._data.class_counts(self._list(split))

    def cases(self, split: str) -> Sequence[Hashable] | None:
        return self._data.cases(self._list(split))

    def num_cases(self, split: str) -> int:
        return self._data.num_cases(self._list(split))

    def class_cases(self, split: str) -> torch.Tensor | None:
        return self._data.class_cases(self._list(split))

    def order(self, split: str, shuffle_seed: int | None = None) -> list[int] | None:
        return self._data.order(self._list(split), shuffle_seed)

    def fingerprint(self, split: str) -> str | None:
        return self._data.fingerprint(self._list(split))

    def batches(
        self, split: str, *, batch_size: int, shuffle_seed: int | None = None, augment: bool = False
    ) -> Batches:
        return _StoppableBatches(
            self._data.batches(self._list(split), batch_size=batch_size, shuffle_seed=shuffle_seed, augment=augment)
        )

    def __getattr__(self, name: str) -> Any:
        """What a task's own data have besides."""
        if name == "_data":  # not there yet
            raise AttributeError(name)
        return getattr(self._data, name)


class _StoppableBatches:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        """What the batches have besides."""
        if name == "_batches":  # not there yet
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Batch]:
        check_stop()
        for batch in self._batches:
            check_stop()  # reading took its time
            yield batch
            check_stop()
