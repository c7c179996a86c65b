"""Limit the memory of FLARE's server process: replies wait on disk, and freed memory returns to the system."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from nvflare.app_common.utils.tensor_disk_offload_context import cleanup_tensor_disk_offload, setup_tensor_disk_offload

_M_MMAP_THRESHOLD = -3  # constant of glibc's malloc.h
_LARGE = 2**20
_SHARE = 0.1  # largest share of the time that the search for reference cycles may take


@contextmanager
def replies_on_disk(engine: Any, job: str) -> Iterator[bool]:
    """Switch FLARE's disk offload of tensors on while the context lasts; yield False if this FLARE has none.

    The tensors of a reply arrive as references to files in ``TMPDIR``. The files are removed when the context ends,
    also after an error.
    """
    receiving = _receiving(engine)
    context = setup_tensor_disk_offload(receiving, True, job)
    try:
        yield context.applied
    finally:
        cleanup_tensor_disk_offload(receiving, context)


def job_cell(engine: Any) -> Any:
    """Return FLARE's cell (its communication endpoint) to which the sites' jobs connect, or ``None`` if none exists."""
    return _receiving(engine).get_cell()


def _receiving(engine: Any) -> Any:
    """Return an engine whose cell receives the replies.

    The simulator's engine has a second cell for replies, which FLARE does not use for disk offload.
    """
    cell = getattr(getattr(engine, "server", None), "job_cell", None)
    return engine if cell is None else SimpleNamespace(get_cell=lambda: cell)


@contextmanager
def memory_given_back() -> Iterator[Callable[[], None]]:
    """Limit the memory of the process while the context lasts; yield a function to call repeatedly during waits.

    FLARE's streaming leaves tensors and packets in reference cycles, several times the size of the model for every
    site. Python frees them only when it searches all objects for cycles, which is seldom. The yielded function runs
    this search. Objects that exist already are left out of it (:func:`gc.freeze`), so that it takes milliseconds.
    """
    # Have glibc return freed blocks of 1 MB and more to the system at once. By default, after the first freed tensor,
    # glibc would serve further tensors from its heaps, one for each of FLARE's many threads, and heaps hardly shrink.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE)
    gc.collect()
    gc.freeze()
    due = [0.0]

    def collect() -> None:
        if time.monotonic() >= due[0]:
            started = time.thread_time()  # time of this thread alone
            gc.collect()
            due[0] = time.monotonic() + (time.thread_time() - started) / _SHARE

    try:
        yield collect
    finally:
        gc.unfreeze()
