"""Files that are there whole or not at all, whatever is killed, and that stay there when the power goes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
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


def remove_partials(folder: Path) -> int:
    """Removes what :func:`write_whole` of processes that are gone left in a folder; how many.

    A process of another machine is taken for gone: call this only with a folder that one machine owns.
    """
    gone = [path for path in _partials(folder) if not _is_alive(path)]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def real_folders(roots: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Folders with all links followed, for :func:`lies_in`; ``~`` is the user's home."""
    return tuple(Path(root).expanduser().resolve() for root in roots)


def lies_in(path: Path, folders: Iterable[Path]) -> bool:
    """Whether a file lies in one of these :func:`real_folders` when all links are followed.

    What the links are when somebody reads the file later is another matter: whoever can change them meanwhile can also
    change the files.
    """
    real = path.resolve()
    return any(real.is_relative_to(folder) for folder in folders)


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
