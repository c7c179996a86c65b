"""Do work in a separate process that then ends, so that this process does not keep the work's memory and imports."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from fairflare.base.machine.environment import shield_imports
from fairflare.base.machine.one_run import needs_main, starting_process
from fairflare.base.own_errors import describe_error

T = TypeVar("T")


def run_in_child(work: Callable[..., T], *arguments: Any, before: Callable[[], None] = shield_imports) -> T:
    """Return the result of ``work(*arguments)``, computed by a new Python process.

    Where classes of the main script are needed, which a notebook's have no file for, this process computes it.

    Args:
        work, arguments: the function and its arguments; they must be picklable.
        before: function that the new process calls before it unpickles the work.

    Raises:
        ValueError: the work raised an error (the message has its text), or the new process died.
    """
    if needs_main(work, arguments):
        return _plainly(work, *arguments)
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=before) as pool:
            with starting_process(work, arguments):
                result = pool.submit(_plainly, work, *arguments)
            return result.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a process that was to build the task's network, or to draw, ended before it was done; is there memory "
            "enough for it?"
        ) from error


def _plainly(work: Callable[..., T], *arguments: Any) -> T:
    """Raise a child process's errors as ``ValueError``, which can be sent to the parent process."""
    try:
        return work(*arguments)
    except Exception as error:
        raise ValueError(str(error) if isinstance(error, ValueError) else describe_error(error)) from None
