"""Files that are there whole or not at all, whatever is killed, and that stay there when the power goes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

_PARTIAL = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.partial")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Replaces ``path`` by what ``write`` writes; a reader sees the old file or the new one, never a part.

    Args:
        path: in a folder that exists.
        write: is given the file to write.

    Raises:
        OSError: the disk is full or cannot be written. The old file is then untouched and nothing else is left.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        _to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _to_disk(path.parent)


def remove_partials(folder: Path, *, held: bool = False) -> int:
    """Removes what :func:`write_whole` of processes that are gone left in a folder; how many.

    A process of another machine is taken for gone: call this only with a folder that one machine owns.

    Args:
        folder: may be missing.
        held: the caller alone may write there, and writes nothing now: then all are of the dead, also those whose
            process number is in use again (in a container it always is).
    """
    gone = [path for path in _partials(folder) if held or not _is_alive(path)]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def _partials(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _PARTIAL.fullmatch(path.name)] if folder.is_dir() else []


def _is_alive(partial: Path) -> bool:
    match = _PARTIAL.fullmatch(partial.name)
    try:
        os.kill(int(match["pid"]) if match else 0, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _to_disk(path: Path) -> None:
    """A file's bytes, or a folder's names, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
