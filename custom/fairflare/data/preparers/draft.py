"""Write the files of an unfinished result by several threads into a hidden folder, which is later moved into place."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fairflare.base.disk.files import sha256_of
from fairflare.base.disk.locks import Held, hold_lock
from fairflare.base.machine.memory import cores
from fairflare.data.datalist import DataError
from fairflare.data.dicom_files import files_of_series
from fairflare.data.image_file import Picture, load_readers
from fairflare.data.preparers.contents import find_ending
from fairflare.data.preparers.items import Item, Source, pixels_of
from fairflare.data.preparers.names import file_name

FOLDER = ".prepare-draft"
CORES = cores()
MOST_WAITING = 4 * CORES  # largest number of images in memory at a time


class Draft:
    """Write the files of a new result into a temporary folder.

    Args:
        folder: temporary folder with the subfolders ``new`` (new files) and ``old`` (files that they replace).
        threads: pool of threads that write the files.
        progress: function that is called with the number of files written so far.
    """

    def __init__(self, folder: Path, threads: ThreadPoolExecutor, progress: Callable[[int], None]) -> None:
        self.new, self.old = folder / "new", folder / "old"
        self.checksums: dict[str, str] = {}
        self._progress, self._threads = progress, threads
        self._waiting: deque[tuple[str, Future[str]]] = deque()
        self._first: dict[str, str] = {}  # folder with the only copy of a file that all sites share, by the file's name
        self._links: list[tuple[Path, Path]] = []

    def put(self, folder: str, item: Item) -> Item:
        """Write images and mask into the folder of a site; return the item with their paths below that folder."""
        ends = [f"_{file_name(name)}" for name in item.channels] if item.more else [""]
        image, *more, mask = (
            source
            if source is None or isinstance(source, int | tuple)
            else self._put(folder, f"{kind}/{item.name}{end}", source, item.shared)
            for kind, end, source in (
                *(("images", end, source) for end, source in zip(ends, (item.image, *item.more), strict=True)),
                ("masks", "", item.mask),
            )
        )
        return replace(item, image=image, mask=mask, more=tuple(more))

    def _put(self, folder: str, name: str, source: Any, shared: bool) -> str:
        """Write a file and return its name: copy a file or a folder's DICOM files, or save pixels as PNG."""
        if isinstance(source, Path) and source.is_dir():
            for file in files_of_series(source):
                self._submit(f"{folder}/{name}/{file.name}", file)
            return name
        name += find_ending(source) if isinstance(source, Path) else ".png"
        first = self._first.setdefault(name, folder) if shared else folder
        if first == folder:
            self._submit(f"{folder}/{name}", source)
        else:
            self.link(f"{folder}/{name}", f"{first}/{name}")
        return name

    def _submit(self, name: str, source: Source) -> None:
        self._settle(MOST_WAITING - 1)
        self._waiting.append((name, self._threads.submit(self._write, name, source)))

    def _settle(self, most: int) -> None:
        """Wait until at most so many files are left to write."""
        while len(self._waiting) > most:
            name, checksum = self._waiting.popleft()
            self.checksums[name] = checksum.result()
            self._progress(len(self.checksums))

    def _write(self, name: str, source: Source) -> str:
        target = self.new / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, Path):
            shutil.copyfile(source, target)
        else:
            from PIL import Image

            Image.fromarray(np.ascontiguousarray(pixels_of(source))).save(target)
        return sha256_of(target)

    def link(self, name: str, other: str) -> None:
        """Record that a file or a DICOM series gets a second path ``name``, as a link, once all files are written."""
        self._links.append((Path(name), Path(other)))

    def finish(self) -> None:
        """Wait until all files are written, and make the recorded links."""
        self._settle(0)
        for name, other in self._links:
            first = self.new / other
            for file in sorted(first.iterdir()) if first.is_dir() else [first]:  # a DICOM series is a folder
                below = file.relative_to(first)
                target = self.new / name / below
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                try:
                    target.hardlink_to(file)
                except OSError:  # the file system does not support links
                    shutil.copyfile(file, target)
                self.checksums[(name / below).as_posix()] = self.checksums[(other / below).as_posix()]
        self._links.clear()


@contextmanager
def open_draft(out: Path, progress: Callable[[int], None]) -> Iterator[Draft]:
    """Yield a draft in the folder of the result, locked for one process; remove its temporary folder at the end.

    Raises:
        DataError: another process writes to this folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = out / FOLDER
    try:
        with hold_lock(folder / "lock", f"process {os.getpid()}"):
            _fresh(folder, out)
            try:
                load_readers(Picture)  # the threads save pictures
                with ThreadPoolExecutor(CORES) as threads:
                    yield Draft(folder, threads, progress)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except Held as error:
        raise DataError(
            f"another call prepares into '{out}' ({error}); wait for it, or choose another folder"
        ) from error


def _fresh(folder: Path, out: Path) -> None:
    """Empty the folder of a draft, and restore an old result that a killed call had moved away.

    A call that is killed while it replaces a result leaves the old result in that folder.
    """
    for path in (folder / "old").glob("*"):
        if not (out / path.name).exists():
            path.rename(out / path.name)
    for part in ("new", "old"):
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir()
