"""Cache decoded volumes as arrays on the site's own disk, so that a slice is read without the other slices.

Each volume has two files in a private folder: ``<source>-<state>.npy`` and ``.json``, where ``source`` is a hash of the
source file's path and ``state`` a hash of its size and time of change. Names of source files are not written. Only the
newest state of a source is stored; the least recently used volumes are removed when the limit is reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.disk.files import private_folder, remove_partials, write_whole
from fairflare.data.image_file import ImageFile
from fairflare.data.intensity import Bounds

log = logging.getLogger(__name__)

DECODED_BYTES = 8 * 2**30  # default limit of all cached files together
FORM = 2  # version of the cached files and of decoding; files of another version are replaced
UNUSED_DAYS = 30  # cached files that were not used for this long are removed


class DecodedVolumes:
    """Cache decoded volumes on disk; a damaged, missing or outdated volume is decoded again.

    If a volume cannot be written (a full disk), it is decoded each time, and the log reports this once.

    Args:
        folder: folder for the cached files alone; it is created when needed.
        limit: largest number of bytes of all cached files together.
    """

    def __init__(self, folder: Path, limit: int = DECODED_BYTES) -> None:
        self.folder, self.limit = folder, limit
        self._sound: set[tuple[str, int]] = set()  # files whose checksum this process has verified
        self._lock = threading.Lock()
        self._told = False

    def array(self, source: ImageFile, what: str, decode: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return the decoded array of a file, from the cache if possible.

        A cached array is mapped into memory; otherwise ``decode`` is called and its result is cached.

        Args:
            source: the file.
            what: ``"image"`` or ``"mask"``, which are cached separately even for one file.
            decode: function that decodes the file; an array with fewer than three axes is not cached.
        """
        file = self._file(source, what)
        found = self._open(file)
        if found is None:
            found = decode()
            if found.ndim > 2 and found.shape[2] > 1 and not found.dtype.hasobject:
                self._keep(file, found)
        return found

    def bounds(self, source: ImageFile, kind: str, measure: Callable[[], Bounds | None]) -> Bounds | None:
        """Return the intensity bounds of an image; they are measured once if the image is cached, else each time."""
        file = self._file(source, "image")
        said = self._said(file)
        if said is None:
            return measure()
        known = said.setdefault("bounds", {})
        if kind not in known:
            known[kind] = measure()
            with self._telling():
                self._write_said(file, said)
        return None if known[kind] is None else (known[kind][0], known[kind][1])

    # -- files

    def _file(self, source: ImageFile, what: str) -> Path:
        name = hashlib.sha256(f"{what} {source.path.resolve()}".encode()).hexdigest()[:24]
        state = hashlib.sha256(f"{FORM} {source.stamp} {source.size}".encode()).hexdigest()[:16]
        return self.folder / f"{name}-{state}.npy"

    def _said(self, file: Path) -> dict[str, Any] | None:
        """Return the record of a cached array (size, checksum, bounds), or ``None`` if the array cannot be used."""
        try:
            said = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            return said if file.stat().st_size == said["size"] and isinstance(said["crc"], int) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _open(self, file: Path) -> npt.NDArray[Any] | None:
        said = self._said(file)
        if said is None:
            return None
        try:
            state = (file.name, file.stat().st_mtime_ns)
            if state not in self._sound and _checksum(file) != said["crc"]:
                raise ValueError("its checksum differs from the recorded one")
            self._sound.add(state)
            os.utime(file.with_suffix(".json"))  # mark the array as used now
            return np.moveaxis(np.load(file, mmap_mode="r", allow_pickle=False), 0, 2)  # files store slice after slice
        except (OSError, ValueError) as error:
            log.warning("a decoded volume on disk is damaged and is made anew: %s (%s)", file, error)
            return None

    def _keep(self, file: Path, array: npt.NDArray[Any]) -> None:
        if array.nbytes > self.limit:
            return
        with self._telling(), self._lock:
            private_folder(self.folder)  # the folder is private because the arrays are images of patients
            self._make_room(array.nbytes + 4096, file)
            write_whole(file, lambda partial: _save(partial, array), durable=False)
            self._write_said(file, {"size": file.stat().st_size, "crc": _checksum(file), "bounds": {}})

    def _write_said(self, file: Path, said: dict[str, Any]) -> None:
        text = json.dumps(said)
        write_whole(file.with_suffix(".json"), lambda partial: partial.write_text(text), durable=False)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Suppress an error of writing the cache in the ``with`` block; log only the first such error."""
        try:
            yield
        except OSError as error:
            if not self._told:
                log.warning(
                    "decoded volumes cannot be kept in %s (%s): they are decoded again each time", self.folder, error
                )
            self._told = True

    def _make_room(self, needed: int, new: Path) -> None:
        """Remove older states of the same source and long unused files, then more files until ``needed`` bytes fit."""
        remove_partials(self.folder)
        source = new.name.partition("-")[0]
        oldest = time.time() - UNUSED_DAYS * 86400
        kept: list[tuple[float, int, Path]] = []
        for file in self.folder.glob("*-*.npy"):
            with contextlib.suppress(FileNotFoundError):  # another process removed the file
                said = file.with_suffix(".json")
                used = said.stat().st_mtime if said.exists() else 0.0
                if used < oldest or file.name.partition("-")[0] == source:
                    _remove(file)
                else:
                    kept.append((used, file.stat().st_size, file))
        kept.sort(reverse=True)
        while kept and needed + sum(size for _, size, _ in kept) > self.limit:
            _remove(kept.pop()[2])


def _remove(file: Path) -> None:
    file.with_suffix(".json").unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(np.moveaxis(array, 2, 0)), allow_pickle=False)


def _checksum(path: Path) -> int:
    return zlib.crc32(np.memmap(path, np.uint8, mode="r").data)
