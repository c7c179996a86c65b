"""Stop a task from deep inside its loops, without handing FLARE's stop signal through every function on the way.

Code that performs a task opens :func:`stoppable`; long loops call :func:`check_stop` in each step. Outside of a task
:func:`check_stop` does nothing. Threads that a step starts are not stopped; the step stops once they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fairflare.base.task import Proxy

if TYPE_CHECKING:
    from fairflare.base.task import Batch, Batches

_asked: ContextVar[Callable[[], bool] | None] = ContextVar("fairflare_should_stop", default=None)


class TaskStopped(Exception):
    """Report that the job was stopped while a task was performed."""


@contextmanager
def stoppable(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Let :func:`check_stop` ask ``should_stop``, inside the context and in this thread."""
    token = _asked.set(should_stop)
    try:
        yield
    finally:
        _asked.reset(token)


def check_stop() -> None:
    """End the current task if the job was stopped, else do nothing.

    Raises:
        TaskStopped: the job was stopped.
    """
    should_stop = _asked.get()
    if should_stop is not None and should_stop():
        raise TaskStopped("the job was stopped")


class StoppableData(Proxy):
    """Wrap a site's data so that iterating over their batches ends with :class:`TaskStopped` when the job is stopped.

    So training, probes, evaluation and similarity can be stopped, also in methods and tasks that are added later.
    """

    def batches(self, split: str, **options: Any) -> Batches:
        """Return batches as :meth:`fairflare.base.task.SiteData.batches` does, which end when the job is stopped."""
        return _StoppableBatches(self._inner.batches(split, **options))


class _StoppableBatches(Proxy):
    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Batch]:
        check_stop()
        for batch in self._inner:
            check_stop()  # reading the batch may have taken long
            yield batch
            check_stop()
