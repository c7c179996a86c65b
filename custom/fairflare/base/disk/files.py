"""Write files whole or not at all, so that they outlive a kill and a power cut and only their owner reads them.

Models that were trained on a site's data, and the figures about these models, are as private as the data.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PARTIAL = re.compile(r"\..+\.(?P<pid>\d{1,9})\.partial")  # name of the temporary file of :func:`write_whole`
LONGEST_NAME = 255 - len("..4194304.partial")  # characters of the name of a file that write_whole can write


log = logging.getLogger(__name__)

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


def private_folder(folder: Path) -> Path:
    """Make a folder, and its missing parent folders, that only the owner can enter, whatever the umask.

    A folder that exists is made private too; if it belongs to somebody else, a warning is logged.

    Raises:
        OSError: the folder cannot be made.
    """
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    for each in reversed(missing):
        each.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    for each in missing or [folder]:
        _keep_private(each, PRIVATE_FOLDER)
    return folder


def private_opener(path: str, flags: int) -> int:
    """Open a path for ``open(..., opener=...)``; only the owner can read a file created so, whatever the umask."""
    return os.open(path, flags, PRIVATE_FILE)


def _keep_private(path: Path, mode: int) -> None:
    if path.stat().st_mode & 0o777 != mode:
        try:
            path.chmod(mode)
        except PermissionError as error:
            log.warning("%s cannot be made private (%s): others on this machine may read it", path, error.strerror)


def write_whole(path: Path, write: Callable[[Path], object], *, durable: bool = True, shared: bool = False) -> None:
    """Replace the file ``path`` by the content that ``write`` writes; a reader sees the old or the new file, whole.

    Args:
        path: the file, in a folder that exists.
        write: function that writes the content to the path that it is given.
        durable: True: the file outlives a power cut when this returns; False: only the death of the process.
        shared: True: other users may read the file as the umask allows; False: only its owner may.

    Raises:
        OSError: the disk is full or cannot be written. The old file is then untouched, and no temporary file is left.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if not shared:
            os.close(private_opener(str(partial), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            _keep_private(partial, PRIVATE_FILE)
        write(partial)
        if not shared:
            _keep_private(partial, PRIVATE_FILE)  # a library may have replaced the file by another one
        if durable:
            flush_to_disk(partial)
        partial.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)) and error.filename2 is None:
            error.filename = str(path)  # name the wanted file; an error of writing to an open file has no name
        raise
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    if durable:
        flush_to_disk(path.parent)


def append(path: Path, data: bytes, size: int | None = None, *, durable: bool = True) -> None:
    """Write data behind the end of a private file, which is made with its folder if it is missing.

    Args:
        path: the file.
        data: what to write.
        size: number of the file's bytes to keep; those behind them, such as half a line, are removed. ``None``: all.
        durable: True: the data outlive a power cut when this returns; False: only the death of the process.

    Raises:
        OSError: the disk is full or cannot be written; some of the data may stand behind ``size`` then.
    """
    private_folder(path.parent)
    with open(path, "ab", opener=private_opener) as file:
        if size is not None:
            file.truncate(size)
        file.write(data)
    if durable:
        flush_to_disk(path)
        flush_to_disk(path.parent)


def remove_partials(folder: Path, *, mine: bool = False) -> int:
    """Remove partial files that dead processes left in a folder during :func:`write_whole`, and return their number.

    A process of another machine counts as dead, so call this only for a folder to which a single machine writes.

    Args:
        folder: the folder to clean; need not exist.
        mine: True: nobody but the caller writes to the folder now, so all partial files are removed, also those with
            the number of a living process (a restarted container uses the same process numbers again).
    """
    import psutil

    writers = {
        path: int(match["pid"])
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _PARTIAL.fullmatch(path.name))
    }
    gone = [path for path, pid in writers.items() if mine or not psutil.pid_exists(pid)]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def real_folders(roots: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return folders with all links followed, for :func:`lies_in`; ``~`` is the user's home."""
    return tuple(Path(root).expanduser().resolve() for root in roots)


def lies_in(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether a file lies in one of these :func:`real_folders` when all links are followed.

    The links may be changed before the file is read: this is not checked, since whoever can change the links can also
    change the files.
    """
    real = path.resolve()
    return any(real.is_relative_to(folder) for folder in folders)


def flush_to_disk(path: Path) -> None:
    """Flush a file's bytes, or a folder's list of names, to disk, so that they outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: Advice for the user about an error of the operating system, by the error's number.
_REMEDIES = {
    errno.ENOSPC: "free space on that disk, or name a place on another one",
    errno.EDQUOT: "free space there, or name a place on another disk",
    errno.EFBIG: "name a place where large files may be written",
    errno.EACCES: "have its owner give you access, or name another place",
    errno.EPERM: "have its owner give you access, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.EEXIST: "it is a file, and a folder is needed; give another name",
    errno.ENOTDIR: "a part of it is a file; give another name",
}


def system_error(error: OSError, where: Path | None = None) -> str:
    """Return one line about a failed operation on a file: the path, the cause, and what the user can do.

    Args:
        error: error of the operating system.
        where: the path to name if the error names none, as for writing to an open file.
    """
    path = error.filename2 or error.filename or where  # of a rename, filename2 is the target
    why = f"{error.strerror or error or type(error).__name__}"
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # errors of several files: show the first
        _, path, why = error.args[0][0]
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{f'{path}: ' if path else ''}{why}{f'; {remedy}' if remedy else ''}"


def unreadable(error: OSError | ValueError | RecursionError) -> str:
    """Return why a JSON file cannot be used, as words that follow the file's name."""
    if isinstance(error, OSError):
        return (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        )
    why = "lists within lists without end" if isinstance(error, RecursionError) else error
    return f"is not readable JSON ({why})"


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file as a dict; raise ``ValueError`` if a key stands in it twice.

    Pass it to ``json.loads`` as ``object_pairs_hook``; without it, ``json.loads`` silently takes the last of two.
    """
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError(
            f"{Counter(key for key, _ in pairs).most_common(1)[0][0]!r} stands twice in an object; keep one"
        )
    return result


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def save_torch(value: Any, path: Path) -> None:
    """Save a value with ``torch.save``; if the disk cannot be written, raise the system's error and not torch's.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    import torch

    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:  # torch's text is about positions in the archive, not about the disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as the text of a CSV file; ``None`` is an empty cell.

    No spreadsheet reads a cell as a formula: a text that could begin a formula gets a ``'`` in front.
    """
    buffer = io.StringIO()
    plain = ([_no_formula(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(buffer, lineterminator="\n").writerows(plain)
    return buffer.getvalue()


def _no_formula(text: str) -> str:
    text = text.replace("\r", " ")  # csv does not quote a carriage return, but other programs end a line there
    begins = re.match(
        r"[\s\ufeff\u200b-\u200f]*[=+\-@\uff1d\uff0b\uff0d\uff20]", text
    )  # behind blanks; also full width
    plain = re.fullmatch(r"\s*(-|[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan))\s*", text, re.IGNORECASE | re.ASCII)
    return f"'{text}" if begins and not plain else text


def safe_name(name: str) -> str:
    """Return the name of an experiment or site if it is safe as the name of a folder.

    Raises:
        ValueError: the name is not 1 to 128 letters, digits, ``.``, ``_``, ``-`` or ``@``, or it begins with ``.``.
    """
    if not re.fullmatch(r"[A-Za-z0-9_@-][A-Za-z0-9._@-]{0,127}", name):
        raise ValueError(
            f"name {name!r} must be 1 to 128 letters, digits, '.', '_', '-' or '@', and not start with '.'"
        )
    return name
