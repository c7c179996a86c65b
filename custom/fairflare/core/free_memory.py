"""How much memory is there to take?"""

from __future__ import annotations

from pathlib import Path

import psutil

GROUP = Path("/sys/fs/cgroup")  # of this process, as a container sees it


def free_memory() -> int:
    """Bytes that may still be taken: what the machine has available or, if that is less, this process's container."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available
    return max(0, min(available, limit - used))
