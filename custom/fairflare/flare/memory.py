"""What keeps FLARE's server process small: replies wait on disk, and freed memory goes back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from nvflare.app_common.utils.tensor_disk_offload_context import cleanup_tensor_disk_offload, setup_tensor_disk_offload

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 2**20


@contextmanager
def replies_on_disk(engine: Any, job: str) -> Iterator[bool]:
    """FLARE's disk offload of tensors, as long as the context lasts; False: FLARE has none here.

    The tensors of a reply arrive as references to files in ``TMPDIR``. They are removed at the end, however it comes.
    """
    receiving = _receiving(engine)
    context = setup_tensor_disk_offload(receiving, True, job)
    try:
        yield context.applied
    finally:
        cleanup_tensor_disk_offload(receiving, context)


def _receiving(engine: Any) -> Any:
    """The engine whose cell takes the replies; the simulator's has a second cell for that, which FLARE passes over."""
    cell = getattr(getattr(engine, "server", None), "job_cell", None)
    return engine if cell is None else SimpleNamespace(get_cell=lambda: cell)


def give_large_blocks_back() -> bool:
    """From now on, what is freed of blocks of 1 MB and more goes back to the system; False where there is no glibc.

    Otherwise glibc learns from the first freed tensor to take the next from its heaps, one for each of FLARE's many
    threads, and those never shrink.
    """
    try:
        return bool(ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE))
    except (OSError, AttributeError):
        return False
