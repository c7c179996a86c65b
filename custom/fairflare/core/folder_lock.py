"""One process at a time in a folder: a lock that the system itself releases when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

LOCK_FILE = "lock"


class FolderInUse(RuntimeError):
    """Somebody else holds the folder.

    Attributes:
        holder: what the holder wrote into the lock: ``pid``, ``host``, ``since`` and its own words; may be empty.
    """

    def __init__(self, folder: Path, holder: Mapping[str, Any]) -> None:
        self.holder = dict(holder)
        super().__init__(f"{folder} is in use by {in_words(holder)}")


class FolderLock:
    """Holds a folder from :meth:`take` to :meth:`release`, or to the end of the process, whatever ends it.

    Two locks of one process exclude each other too. The file stays when the lock is released: removing it would let a
    third process lock another file of the same name.

    Args:
        folder: made when it does not exist.
        note: about the holder, JSON-like; others are told.
    """

    def __init__(self, folder: Path, note: Mapping[str, Any]) -> None:
        self.folder = folder
        self.note = dict(note)
        self._descriptor: int | None = None

    def take(self) -> None:
        """Takes the lock or refuses at once.

        Raises:
            FolderInUse: somebody else has it.
            OSError: the folder cannot be written, or its file system has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUse(self.folder, _read(path)) from None
            except OSError as error:
                why = f"{path} cannot be locked ({error.strerror}); choose a folder on a file system that has locks"
                raise OSError(error.errno, why) from error
            since = datetime.now(timezone.utc).isoformat(timespec="seconds")
            holder = {**self.note, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the folder back; nothing happens when it is not held."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for child processes that inherited the file
            os.close(self._descriptor)
            self._descriptor = None


def in_words(holder: Mapping[str, Any]) -> str:
    """``job 'x' (process 12 on host 'a', since ...)``."""
    if not holder:
        return "another process"
    what = f"job {holder['job_id']!r}" if holder.get("job_id") else "another run"
    return f"{what} (process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')})"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is just being written
        return {}
    return found if isinstance(found, dict) else {}
