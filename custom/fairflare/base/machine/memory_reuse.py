"""Let freed memory stay with the process while it computes, in place of going back to the kernel after every layer."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # numbers of mallopt's parameters in <malloc.h>
MOST = 2**31 - 1  # bytes; largest limit, since mallopt takes an int
AHEAD = 2**28  # bytes by which the heap grows beyond the requested size


@contextmanager
def reuse_memory(device: str) -> Iterator[None]:
    """Hand freed blocks of memory of up to 2 GiB out again without a page fault, inside the context.

    Free memory goes back to the kernel at the end of the context.

    glibc maps a large block anew for every tensor and gives it back when the tensor dies, so that a training step on a
    CPU touches each page of its activations for the first time, again and again. All three of glibc's limits must be
    set: setting only one of them ends glibc's own adaptation of the limits, which is worse than setting none. Inside
    the context the process keeps its peak memory. Computed results do not change.

    Does nothing for another device, for another C library, or if ``MALLOC_*`` or ``GLIBC_TUNABLES`` of the
    environment say what the user wants. Safe in threads: the first call sets the limits, which stay set afterwards.

    Args:
        device: type of the device that computes: ``"cpu"``, ``"cuda"``, ...
    """
    libc = _set_limits() if device == "cpu" else None
    try:
        yield
    finally:
        if libc is not None:
            libc.malloc_trim(0)


@cache
def _set_limits() -> ctypes.CDLL | None:
    """Return the C library, after setting its limits, or ``None`` if its limits are left as they are."""
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if chosen or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    for limit, value in ((M_MMAP_THRESHOLD, MOST), (M_TRIM_THRESHOLD, MOST), (M_TOP_PAD, AHEAD)):
        libc.mallopt(limit, value)
    return libc
