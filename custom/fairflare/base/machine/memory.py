"""Say how many cores and how much memory this process may use, inside a container the container's, and share them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
EVERY = 30.0  # seconds between two lines on how far a command is
# Of control groups, version 2 and version 1: folder, files of the limit and of what is in use, and the name in
# memory.stat of what is in use but can be given back.
V2 = "", "memory.max", "memory.current", "inactive_file"
V1 = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that are free: those of the machine, or of the container where its limit leaves less.

    Args:
        root: root of the file system with Linux's ``proc`` and ``sys``; other systems have no limits of containers.
    """
    import psutil

    free = [int(psutil.virtual_memory().available)]
    listed = root / "proc/self/cgroup"
    for line in listed.read_text("utf-8").splitlines() if listed.is_file() else ():
        _, kinds, place = line.split(":", 2)
        top, limit, used, cached = V1 if "memory" in kinds.split(",") else V2
        groups, below = root / "sys/fs/cgroup" / top, Path(place.lstrip("/"))
        for group in (groups / below, *(groups / above for above in below.parents)):
            with suppress(OSError, ValueError):  # no such file in this container, or "max": no limit
                left = int((group / limit).read_text("utf-8")) - int((group / used).read_text("utf-8"))
                stat = dict(each.split() for each in (group / "memory.stat").read_text("utf-8").splitlines())
                free.append(left + int(stat.get(cached, 0)))
    return max(0, min(free))


def workers(each: int) -> int:
    """Return how many threads may work at a time if each needs ``each`` bytes: at most one a core, at least one."""
    return max(1, min(cores(), free_memory() // max(1, each)))


def print_progress(results: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield results, and print every 30 seconds how many of ``total`` there are; ``what`` names what is counted."""
    last = time.monotonic()
    for number, result in enumerate(results, 1):
        yield result
        if time.monotonic() - last >= EVERY and number < total:
            print(f"{number} of {total} {what}", flush=True)
            last = time.monotonic()
