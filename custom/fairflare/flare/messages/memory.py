"""What keeps FLARE's server process small: replies wait on disk, and freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from nvflare.app_common.utils.tensor_disk_offload_context import cleanup_tensor_disk_offload, setup_tensor_disk_offload

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 2**20
_SHARE = 0.1  # of the time that searching for cycles may take


@contextmanager
def replies_on_disk(engine: Any, job: str) -> Iterator[bool]:
    """Switch FLARE's disk offload of tensors on as long as the context lasts; yield False where FLARE has none.

    The tensors of a reply arrive as references to files in ``TMPDIR``. They are removed at the end, however it comes.
    """
    receiving = _receiving(engine)
    context = setup_tensor_disk_offload(receiving, True, job)
    try:
        yield context.applied
    finally:
        cleanup_tensor_disk_offload(receiving, context)


def job_cell(engine: Any) -> Any:
    """Return FLARE's cell that the sites' jobs talk to; ``None`` where there is none."""
    return _receiving(engine).get_cell()


def _receiving(engine: Any) -> Any:
    """Return the engine whose cell takes the replies.

    The simulator's has a second cell for that, which FLARE passes over.
    """
    cell = getattr(getattr(engine, "server", None), "job_cell", None)
    return engine if cell is None else SimpleNamespace(get_cell=lambda: cell)


@contextmanager
def memory_given_back() -> Iterator[Callable[[], None]]:
    """Keep the process small as long as the context lasts; gives what is to be called again and again while it waits.

    FLARE's streaming leaves tensors and packets in reference cycles, a multiple of the model for every site, and they
    stay until Python looks for cycles among all objects, which it seldom does. Objects that are there already are left
    out of the search (:func:`gc.freeze`), so that it takes milliseconds.
    """
    # Have glibc return freed blocks of 1 MB and more to the system at once. By default it would, after the first freed
    # tensor, serve further ones from its heaps: one for each of FLARE's many threads, and they hardly shrink.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE)
    gc.collect()
    gc.freeze()
    due = [0.0]

    def collect() -> None:
        if time.monotonic() >= due[0]:
            started = time.thread_time()  # other threads' work in between does not count
            gc.collect()
            due[0] = time.monotonic() + (time.thread_time() - started) / _SHARE

    try:
        yield collect
    finally:
        gc.unfreeze()
