"""Make temporary folders that show whether their owner is alive, so that those of a killed process can be removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from fairflare.base.disk.locks import Held, hold_lock

PREFIX = "fairflare-"
OWNER = ".owner"  # lock file in the folder; locked as long as a process that uses the folder lives


class OwnedFolder(tempfile.TemporaryDirectory[str]):
    """Make a temporary folder that contains a held lock until the folder is removed or its owner process is dead.

    Args:
        kind: a word in the folder's name.

    Attributes:
        path: path of the folder.
        descriptor: file descriptor of the lock; a child process that inherits it holds the lock too. ``None`` if the
            file system has no locks; then :func:`sweep` will not remove the folder.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(prefix=f"{PREFIX}{kind}-")
        self.path = Path(self.name)
        self.descriptor: int | None = None
        self._held = ExitStack()
        with suppress(OSError):
            lock = hold_lock(self.path / OWNER, f"process {os.getpid()}", needed=True)
            self.descriptor = self._held.enter_context(lock)

    def __enter__(self) -> OwnedFolder:  # type: ignore[override]
        return self

    def cleanup(self) -> None:
        self._held.close()
        super().cleanup()


def sweep() -> list[str]:
    """Remove this user's temporary folders whose owner process is dead, and return a sentence about each.

    A folder whose owner file is missing or empty, or whose lock is held, stays.
    """
    lines = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with suppress(OSError, Held):
            note = folder / OWNER
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not note.stat().st_size:
                continue
            who = note.read_text(encoding="utf-8", errors="replace")[:40]
            with hold_lock(note, who, needed=True):
                shutil.rmtree(folder)
            lines.append(f"removed {folder}, which a dead process left ({who})")
    return lines
