"""Lock files and folders for one process at a time. A process that ends, however it ends, frees its locks."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import private_folder
from fairflare.base.stopping import check_stop

log = logging.getLogger(__name__)

POLL = 0.2  # seconds between two attempts to take a lock
MAX_HOLDER = 400  # most characters that are read of a holder's text in a lock file
LOCK_FILE = "lock"


class Held(RuntimeError):
    """Report that another process holds the lock; the text is what that process wrote about itself."""


@contextmanager
def hold_lock(path: Path, holder: str, wait: float = 0.0, *, needed: bool = False) -> Iterator[int]:
    """Hold the lock of a file inside the context, and yield the file's descriptor.

    The file and its folder are made if they are missing. The file is unlocked afterwards, and stays.

    Args:
        path: the lock file.
        holder: a text about the holder, written into the file for others who want the lock.
        wait: seconds to wait for a lock that is held; a stop of the job ends the wait.
        needed: if the file system has no locks, raise an error (True), or log a warning and go on without one (False).

    Raises:
        Held: another process, or another lock of this process, holds the file.
        OSError: the file cannot be made or written, or not locked if that is ``needed``.
        TaskStopped: the job was stopped while waiting.
    """
    end = time.monotonic() + wait
    while (descriptor := _try(path, needed)) is None:
        if time.monotonic() >= end:
            raise Held(_holder(path))
        check_stop()
        time.sleep(POLL)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield descriptor
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # unlocks the file also for child processes that inherited it
        os.close(descriptor)


class FolderInUse(RuntimeError):
    """Report that another process, or another lock of this process, holds the folder.

    Attributes:
        holder: what the holder wrote into the lock: ``pid``, ``host``, ``since`` and its own words; may be empty.
    """

    def __init__(self, folder: Path, holder: Mapping[str, Any]) -> None:
        self.holder = dict(holder)
        super().__init__(f"{folder} is in use by {describe_holder(holder)}")


@dataclass(eq=False)
class FolderLock:
    """Hold a folder from :meth:`take` to :meth:`release`, or to the end of the process, whatever ends it.

    Two locks of one process exclude each other too.

    Args:
        folder: the folder to hold; it is made when it does not exist.
        note: JSON-like facts about the holder, which others who want the folder are shown.
    """

    folder: Path
    note: Mapping[str, Any]
    _held: ExitStack = field(default_factory=ExitStack, init=False)

    def take(self) -> None:
        """Take the lock on the folder, or raise at once if the lock is held.

        Raises:
            FolderInUse: the lock is held, by another process or by another lock of this process.
            OSError: the folder cannot be written, or its file system has no locks.
        """
        holder = {
            **self.note, "pid": os.getpid(), "host": socket.gethostname(),
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip
        try:
            self._held.enter_context(hold_lock(self.folder / LOCK_FILE, json.dumps(holder), needed=True))
        except Held as held:
            raise FolderInUse(self.folder, _note(str(held))) from None

    def release(self) -> None:
        """Release the lock on the folder; nothing happens when the lock is not held."""
        self._held.close()


def describe_holder(holder: Mapping[str, Any]) -> str:
    """Return the description of a lock's holder as text: ``job 'x' (process 12 on host 'a', since ...)``."""
    if not holder:
        return "another process"
    what = f"job {holder['job_id']!r}" if holder.get("job_id") else "another run"
    return f"{what} (process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')})"


def _note(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:  # the holder is writing its note at this moment
        return {}
    return content if isinstance(content, dict) else {}


def _try(path: Path, needed: bool) -> int | None:
    """Return an open descriptor that holds the lock, or ``None`` if the lock is held already."""
    while True:
        if not path.parent.is_dir():
            private_folder(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # the folder was removed in this moment
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # with which systems say that it is held
                os.close(descriptor)
                return None
            if needed:
                os.close(descriptor)
                raise OSError(
                    error.errno,
                    f"{path} cannot be locked ({error.strerror}); choose a folder on a file system that has locks",
                ) from error
            log.warning("%s cannot be locked (%s): keep other processes away from its folder", path, error.strerror)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # the earlier holder has removed this file: try the new one


def _holder(path: Path) -> str:
    try:
        text = path.read_bytes()[: 4 * MAX_HOLDER].decode(errors="replace")
    except OSError:
        return "another process"
    return "".join(c for c in text if c.isprintable())[:MAX_HOLDER] or "another process"
