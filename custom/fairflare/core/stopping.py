"""A task that is told to stop: heard deep inside its loops, without every function on the way handing the signal on.

Whoever performs a task opens :func:`stoppable`; whatever loops for long calls :func:`check_stop` in each step. Outside
of a task nothing is asked. Threads that a step starts do not hear it; the step does, when they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked: ContextVar[Callable[[], bool] | None] = ContextVar("fairflare_should_stop", default=None)


class TaskStopped(Exception):
    """The job was stopped while a task was performed."""


@contextmanager
def stoppable(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Inside, in this thread, :func:`check_stop` asks ``should_stop``."""
    token = _asked.set(should_stop)
    try:
        yield
    finally:
        _asked.reset(token)


def check_stop() -> None:
    """Does nothing, or ends the task.

    Raises:
        TaskStopped: the job was stopped.
    """
    should_stop = _asked.get()
    if should_stop is not None and should_stop():
        raise TaskStopped("the job was stopped")
