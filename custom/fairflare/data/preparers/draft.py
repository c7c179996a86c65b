"""A result that is not finished: its files, written by several threads, and which of them are done.

Whoever is killed while preparing leaves the draft where it is. The next call takes from it what is made of the same
pixels in the same way.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fairflare import __version__
from fairflare.base.disk.files import sha256_of
from fairflare.base.disk.locks import Held, locked
from fairflare.data.datalist import DataError
from fairflare.data.dicom_files import files_of_series
from fairflare.data.preparers.contents import known_ending
from fairflare.data.preparers.items import Source, pixels_of, stamp

FOLDER = ".prepare-draft"
AHEAD = 4  # images waiting for each thread: what is in memory at a time


class Draft:
    """Files on their way.

    Args:
        folder: gets ``new`` (the files), ``old`` (what they replace) and a journal.
        progress: is told the number of files that are done.
    """

    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        self.new, self.old = folder / "new", folder / "old"
        self.checksums: dict[str, str] = {}
        self._progress = progress
        self._journal = folder / "journal.jsonl"
        self._known = _read(self._journal)
        self._turn = threading.Lock()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(cores)
        self._waiting: deque[Future[None]] = deque()
        self._most = AHEAD * cores
        for part in (self.new, self.old):
            part.mkdir(parents=True, exist_ok=True)
        _put_back(self.old, folder.parent)

    def put(self, name: str, source: Source) -> str:
        """Writes an image or mask; returns its path with the ending.

        Args:
            name: path below ``new`` without an ending, with ``/``.
            source: a path is copied, of a folder (a series) the DICOM files in it; all else becomes a PNG.
        """
        if isinstance(source, Path) and source.is_dir():
            for file in files_of_series(source):
                self._submit(f"{name}/{file.name}", file)
            return name
        name += known_ending(source) if isinstance(source, Path) else ".png"
        self._submit(name, source)
        return name

    def _submit(self, name: str, source: Source) -> None:
        if len(self._waiting) >= self._most:
            self._waiting.popleft().result()
        self._waiting.append(self._threads.submit(self._write, name, source))

    def link(self, name: str, other: str) -> None:
        """One file under a second path, when all are written."""
        target = self.new / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(self.new / other)
        except OSError:  # the file system has no links
            shutil.copyfile(self.new / other, target)
        self.checksums[name] = self.checksums[other]

    def finish(self) -> None:
        """Waits for all files; what an interrupted call wrote besides is removed."""
        while self._waiting:
            self._waiting.popleft().result()
        for path in list(self.new.rglob("*")):
            if path.is_file() and path.relative_to(self.new).as_posix() not in self.checksums:
                path.unlink()

    def close(self) -> None:
        """Nothing is written after this."""
        self._threads.shutdown(cancel_futures=True)

    def _write(self, name: str, source: Source) -> None:
        target = self.new / name
        made_from = f"{__version__} {stamp(source)}"
        before, checksum = self._known.get(name, ("", ""))
        kept = before == made_from and target.is_file() and sha256_of(target) == checksum
        if not kept:
            target.parent.mkdir(parents=True, exist_ok=True)
            _save(target, source)
            checksum = sha256_of(target)
        with self._turn:
            self.checksums[name] = checksum
            if not kept:
                with self._journal.open("a", encoding="utf-8") as journal:
                    journal.write(json.dumps([name, made_from, checksum]) + "\n")
            self._progress(len(self.checksums))


def _save(target: Path, source: Source) -> None:
    if isinstance(source, Path):
        shutil.copyfile(source, target)
        return
    from PIL import Image

    Image.fromarray(np.ascontiguousarray(pixels_of(source))).save(target)


def _put_back(old: Path, out: Path) -> None:
    """What a call that was killed while it replaced an earlier result had taken away."""
    for path in list(old.iterdir()):
        if not (out / path.name).exists():
            path.rename(out / path.name)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _read(journal: Path) -> dict[str, tuple[str, str]]:
    """What was done: by file, what it is made from and its checksum. The last line may be half written."""
    found = {}
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else ():
        try:
            name, made_from, checksum = json.loads(line)
        except ValueError:
            continue
        found[name] = (made_from, checksum)
    return found


@contextmanager
def drafted(out: Path, progress: Callable[[int], None]) -> Iterator[Draft]:
    """A draft in the folder of the result, which one process at a time has; it stays only where that is interrupted.

    Raises:
        DataError: another process prepares into this folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = out / FOLDER
    try:
        with locked(folder / "lock", f"process {os.getpid()}"):
            draft = Draft(folder, progress)
            try:
                yield draft
            except Exception:
                draft.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finally:
                draft.close()
            shutil.rmtree(folder, ignore_errors=True)
    except Held as error:
        raise DataError(
            f"another call prepares into '{out}' ({error}); wait for it, or choose another folder"
        ) from error
