"""Freed memory stays with the process while it computes, in place of going back to the kernel after every layer."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>
MOST = 2**31 - 1  # bytes; mallopt takes an int
AHEAD = 2**28  # bytes that the heap grows by beyond what is asked
IDLE = 2.0  # seconds without work, after which what is free goes back: the next task often follows at once


@contextmanager
def reused_memory(device: str) -> Iterator[None]:
    """Inside, blocks of up to 2 GiB that are freed are handed out again without a page fault.

    They are free again two seconds behind the end, unless other work has begun by then: tasks that follow each other
    in one process touch their memory once.

    glibc maps a large block anew for every tensor and gives it back when the tensor dies, so that a training step on a
    CPU touches each page of its activations for the first time, again and again. All three of glibc's limits must be
    set: each of them alone ends its own adaptation, which is worse. Meanwhile the process holds what it needed at its
    peak; no number changes.

    Does nothing for another device, for another C library, and where ``MALLOC_*`` or ``GLIBC_TUNABLES`` of the
    environment say what the user wants. Safe in threads: the first call changes the limits, for good.

    Args:
        device: type of the device that computes: ``"cpu"``, ``"cuda"``, ...
    """
    heap = _adjusted() if device == "cpu" else None
    if heap is None:
        yield
        return
    heap.begin()
    try:
        yield
    finally:
        heap.end()


class _Heap:
    """Of this process, with its limits set; knows whether anybody computes."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self.libc = libc
        self._alone = threading.Lock()
        self._busy = 0
        self._ended = 0.0
        self._waiting: threading.Timer | None = None

    def begin(self) -> None:
        with self._alone:
            self._busy += 1

    def end(self) -> None:
        with self._alone:
            self._busy -= 1
            self._ended = time.monotonic()
            if self._waiting is None or not self._waiting.is_alive():  # a copy of a process has no threads
                self._wait(IDLE)

    def _wait(self, seconds: float) -> None:
        self._waiting = threading.Timer(seconds, self._look)
        self._waiting.daemon = True
        self._waiting.start()

    def _look(self) -> None:
        with self._alone:
            self._waiting = None
            left = self._ended + IDLE - time.monotonic()
            if self._busy:
                return  # whose end waits anew
            if left > 0:
                self._wait(left)
            else:
                self.libc.malloc_trim(0)


@cache
def _adjusted() -> _Heap | None:
    """The process's heap with its limits set; ``None``: they are left as they are."""
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if chosen or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    for limit, value in ((M_MMAP_THRESHOLD, MOST), (M_TRIM_THRESHOLD, MOST), (M_TOP_PAD, AHEAD)):
        libc.mallopt(limit, value)
    return _Heap(libc)
