"""Cache volumes as arrays on the site's own disk, decoded or prepared, so that a part is read without the rest.

Each volume has two files in a private folder: ``<source>-<state>.npy`` and ``.json``, where ``source`` is a hash of the
source files' paths and of how they are prepared, and ``state`` a hash of their sizes and times of change. Names of
source files are not written. The first file holds one or several arrays in numpy's format, one behind the other. Only
the newest state of a source is stored; the least recently used volumes are removed when the limit is reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.disk.files import private_folder, remove_partials, write_whole
from fairflare.data.image_file import ImageFile, npy_header
from fairflare.data.intensity import Bounds

log = logging.getLogger(__name__)

DECODED_BYTES = 16 * 2**30  # default limit of all cached files together
FORM = 3  # version of the cached files, of decoding and of preparing; files of another version are replaced
UNUSED_DAYS = 30  # cached files that were not used for this long are removed
ALIGNED = 64  # bytes; each array starts at a multiple of them
Arrays = Mapping[str, npt.NDArray[Any]]
_SOUND: set[tuple[Path, int]] = set()  # files, with their times of change, whose checksum this process has verified
#: Locks by file: threads that need parts of one volume wait while the first of them prepares it.
_TURNS = tuple(threading.Lock() for _ in range(64))


class DecodedVolumes:
    """Cache decoded volumes on disk; a damaged, missing or outdated volume is decoded again.

    If a volume cannot be written (a full disk), it is decoded each time, and the log reports this once.

    Args:
        folder: folder for the cached files alone; it is created when needed.
        limit: largest number of bytes of all cached files together.
    """

    def __init__(self, folder: Path, limit: int = DECODED_BYTES) -> None:
        self.folder, self.limit = folder, limit
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
        file = self._file(what, [source])
        found = self._open(file)
        if found is not None:
            return np.moveaxis(found["array"], 0, 2)
        array = decode()
        if array.ndim > 2 and array.shape[2] > 1 and not array.dtype.hasobject:
            self._keep(file, {"array": np.moveaxis(array, 2, 0)})  # files store slice after slice
        return array

    def arrays(self, how: str, sources: Sequence[ImageFile], make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays that are made of several files, mapped into memory if they are or can be cached.

        Args:
            how: everything but the files that decides what is made, as text.
            sources: the files, such as an image and its mask.
            make: function that makes the arrays, by name.
        """
        file = self._file(how, sources)
        with _TURNS[hash(file) % len(_TURNS)]:
            found = self._open(file)
            if found is None:
                made = make()
                self._keep(file, made)
                found = self._open(file) or made
        return found

    def bounds(self, source: ImageFile, kind: str, measure: Callable[[], Bounds | None]) -> Bounds | None:
        """Return the intensity bounds of an image; they are measured once if the image is cached, else each time."""
        file = self._file("image", [source])
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

    def _file(self, how: str, sources: Sequence[ImageFile]) -> Path:
        paths, states = ([getattr(source, of) for source in sources] for of in ("path", "state"))
        name = hashlib.sha256(" ".join([how, *(str(path.resolve()) for path in paths)]).encode()).hexdigest()[:24]
        state = hashlib.sha256(f"{FORM} {' '.join(states)}".encode()).hexdigest()[:16]
        return self.folder / f"{name}-{state}.npy"

    def _said(self, file: Path) -> dict[str, Any] | None:
        """Return the record of a cached array (size, checksum, bounds), or ``None`` if the array cannot be used."""
        try:
            said = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            return said if file.stat().st_size == said["size"] and isinstance(said["crc"], int) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _open(self, file: Path) -> Arrays | None:
        said = self._said(file)
        if said is None:
            return None
        try:
            state = (file, file.stat().st_mtime_ns)
            if state not in _SOUND and _checksum(file) != said["crc"]:
                raise ValueError("its checksum differs from the recorded one")
            _SOUND.add(state)
            os.utime(file.with_suffix(".json"))  # mark the arrays as used now
            mapped = np.memmap(file, np.uint8, mode="r")  # once, since each map keeps a file open
            with file.open("rb") as opened:
                return {name: _part(mapped, opened, start) for name, start in said["starts"].items()}
        except (OSError, ValueError, KeyError) as error:
            log.warning("a decoded volume on disk is damaged and is made anew: %s (%s)", file, error)
            return None

    def _keep(self, file: Path, arrays: Arrays) -> None:
        size = sum(array.nbytes + 4096 for array in arrays.values())
        if size > self.limit + 4096:
            return
        with self._telling(), self._lock:
            private_folder(self.folder)  # the folder is private because the arrays are images of patients
            self._make_room(size, file)
            starts: dict[str, int] = {}
            write_whole(file, lambda partial: _save(partial, arrays, starts), durable=False)
            said = {"size": file.stat().st_size, "crc": _checksum(file), "starts": starts, "bounds": {}}
            self._write_said(file, said)

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


def _save(path: Path, arrays: Arrays, starts: dict[str, int]) -> None:
    """Write arrays one behind the other, in C order and aligned, and note where each starts."""
    with path.open("wb") as file:
        for name, array in arrays.items():
            file.write(b"\0" * (-file.tell() % ALIGNED))
            starts[name] = file.tell()
            if array.flags.f_contiguous:  # numpy would write it in that order; others it copies in parts
                array = np.ascontiguousarray(array)
            np.lib.format.write_array(file, array, allow_pickle=False)


def _part(mapped: npt.NDArray[np.uint8], file: Any, start: int) -> npt.NDArray[Any]:
    file.seek(start)
    shape, dtype = npy_header(file)
    begin = file.tell()
    return mapped[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read in parts: a file mapped whole would count as memory of this process."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            found = zlib.crc32(block, found)
    return found
