"""Work in a process of its own that ends, so that its memory and its imports do not stay in this one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def in_child(work: Callable[..., T], *arguments: Any, before: Callable[[], None] | None = None) -> T:
    """What ``work(*arguments)`` gives, done by a new Python process.

    Args:
        work, arguments: can be pickled.
        before: is called there before the work arrives.

    Raises:
        BrokenProcessPool: the process was ended, or could not import what the work needs.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=before) as pool:
        return pool.submit(work, *arguments).result()
