"""A file that one process at a time holds. The system takes it from a process that ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairflare.core.stopping import check_stop

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between two tries
_TAKEN = (errno.EAGAIN, errno.EACCES)
MAX_HOLDER = 200  # characters that are read of who holds a lock


class Held(RuntimeError):
    """Another process holds the lock; the text is what it said of itself."""


@contextmanager
def locked(path: Path, holder: str, wait: float = 0.0) -> Iterator[None]:
    """Holds a lock file, made if need be with its folder; it stays there, free, afterwards.

    Where the file system knows no locks the log says so, and nothing is held.

    Args:
        path: the file.
        holder: a few words for others who want it.
        wait: seconds to try; the signal to stop is heard meanwhile.

    Raises:
        Held: another one holds it, also another one of this process.
        OSError: the file cannot be made or written.
        TaskStopped: the job was stopped while waiting.
    """
    end = time.monotonic() + wait
    while (descriptor := _try(path)) is None:
        if time.monotonic() >= end:
            raise Held(_holder(path))
        check_stop()
        time.sleep(POLL)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try(path: Path) -> int | None:
    """An open descriptor that holds the lock; ``None``: somebody else does."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # the folder was removed in this moment
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                os.close(descriptor)
                return None
            log.warning("%s cannot be locked (%s): keep other processes away from its folder", path, error.strerror)
        if _is_there(path, descriptor):
            return descriptor
        os.close(descriptor)  # who held it has removed it


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        text = path.read_bytes()[: 4 * MAX_HOLDER].decode(errors="replace")
    except OSError:
        return "another process"
    return "".join(c for c in text if c.isprintable())[:MAX_HOLDER] or "another process"
