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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import refuse
from fairflare.base.disk.files import private_folder, remove_partials, write_whole
from fairflare.data.image_file import ImageFile, image_file
from fairflare.data.intensity import Bounds
from fairflare.data.picture_values import npy_header

log = logging.getLogger(__name__)

DECODED_BYTES = 16 * 2**30  # default limit of all cached files together
FORM = 3  # version of the cached files, of decoding and of preparing; files of another version are replaced
UNUSED_DAYS = 30  # cached files that were not used for this long are removed
Arrays = Mapping[str, npt.NDArray[Any]]


class DecodedVolumes:
    """Cache decoded or prepared volumes on disk; a damaged, missing or outdated volume is made again.

    If a volume cannot be written (a full disk), it is made each time, and the log reports this once.

    Args:
        folder: folder for the cached files alone; it is created when needed.
        limit: largest number of bytes of all cached files together.
    """

    def __init__(self, folder: Path, limit: int = DECODED_BYTES) -> None:
        self.folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._warned = False

    def arrays(self, how: str, sources: Sequence[ImageFile], make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays that are made of one or several files, mapped into memory if they are or can be cached.

        Threads that ask for the same arrays at a time each make them, unless the caller lets only one ask.

        Args:
            how: everything but the files that decides what is made, as text.
            sources: the files, such as an image and its mask.
            make: function that makes the arrays, by name.
        """
        file = self._file(how, sources)
        if (cached := _open(file)) is None:
            arrays = make()
            now = [image_file(source.path) for source in sources]
            if self._file(how, now) != file:  # a file was replaced while it was read: image and mask may not belong
                return self.arrays(how, now, make)
            self._write(file, arrays)
            cached = _open(file) or arrays
        return cached

    def bounds(self, source: ImageFile, kind: str, measure: Callable[[], Bounds | None]) -> Bounds | None:
        """Return the intensity bounds of an image; they are measured once if the image is cached, else each time."""
        file = self._file("image", [source])
        if (record := _record(file)) is None:
            return measure()
        if kind not in record["bounds"]:
            record["bounds"][kind] = measure()
            with self._warning():
                _write_record(file, record)
        low_high = record["bounds"][kind]
        return low_high and (low_high[0], low_high[1])

    def _file(self, how: str, sources: Sequence[ImageFile]) -> Path:
        paths = (how, *(str(source.path.resolve()) for source in sources))
        states = (str(FORM), *(f"{source.stamp} {source.size}" for source in sources))
        name, state = (hashlib.sha256(" ".join(words).encode()).hexdigest() for words in (paths, states))
        return self.folder / f"{name[:24]}-{state[:16]}.npy"

    def _write(self, file: Path, arrays: Arrays) -> None:
        size = sum(array.nbytes + 4096 for array in arrays.values())
        if size > self.limit + 4096:
            return
        with self._warning(), self._lock:
            private_folder(self.folder)  # the folder is private because the arrays are images of patients
            self._make_room(size, file)
            starts: dict[str, int] = {}
            write_whole(file, lambda partial: _save(partial, arrays, starts), durable=False)
            state = file.stat()
            _write_record(
                file, {"size": state.st_size, "crc": _checksum(file, state.st_mtime_ns), "starts": starts, "bounds": {}}
            )

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn an error of writing the cache in the ``with`` block into a warning, the first time."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                log.warning(
                    "decoded volumes cannot be kept in %s (%s): they are decoded again each time", self.folder, error
                )
            self._warned = True

    def _make_room(self, needed: int, new: Path) -> None:
        """Remove older states of the same source and long unused files, then more files until ``needed`` bytes fit."""
        remove_partials(self.folder)
        oldest = time.time() - UNUSED_DAYS * 86400
        present: list[tuple[float, int, Path]] = []
        for file in self.folder.glob("*-*.npy"):
            with contextlib.suppress(FileNotFoundError):  # another process removed the file
                record = file.with_suffix(".json")
                used = record.stat().st_mtime if record.exists() else 0.0
                if used < oldest or file.name.partition("-")[0] == new.name.partition("-")[0]:
                    _remove(file)
                else:
                    present.append((used, file.stat().st_size, file))
        present.sort(reverse=True)
        while present and needed + sum(size for _, size, _ in present) > self.limit:
            _remove(present.pop()[2])


def _record(file: Path) -> dict[str, Any] | None:
    """Return the record of a cached file (size, checksum, bounds), or ``None`` if the file cannot be used."""
    try:
        record = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        return record if file.stat().st_size == record["size"] and {"crc", "starts", "bounds"} <= {*record} else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_record(file: Path, record: Mapping[str, Any]) -> None:
    write_whole(file.with_suffix(".json"), lambda partial: partial.write_text(json.dumps(record)), durable=False)


def _open(file: Path) -> Arrays | None:
    """Return the arrays of a cached file, mapped into memory, or ``None`` if it cannot be used."""
    if (record := _record(file)) is None:
        return None
    try:
        refuse({
            "its checksum differs from the recorded one": _checksum(file, file.stat().st_mtime_ns) != record["crc"],
        })  # fmt: skip
        os.utime(file.with_suffix(".json"))  # mark the arrays as used now
        mapped = np.memmap(file, np.uint8, mode="r")  # once, since each map keeps a file open
        with file.open("rb") as opened:
            return {name: _part(mapped, opened, start) for name, start in record["starts"].items()}
    except FileNotFoundError:  # another process removed it to make room
        return None
    except (OSError, ValueError) as error:
        log.warning("a decoded volume on disk is damaged and is made anew: %s (%s)", file, error)
        return None


def _remove(file: Path) -> None:
    file.with_suffix(".json").unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _save(path: Path, arrays: Arrays, starts: dict[str, int]) -> None:
    """Write arrays one behind the other, in C order, each from a multiple of 64 bytes, and note where each starts."""
    with path.open("wb") as file:
        for name, array in arrays.items():
            file.write(b"\0" * (-file.tell() % 64))
            starts[name] = file.tell()
            # numpy would write an array of Fortran's order in that order; others it copies in parts.
            array = np.ascontiguousarray(array) if array.flags.f_contiguous else array
            np.lib.format.write_array(file, array, allow_pickle=False)


def _part(mapped: npt.NDArray[np.uint8], file: Any, start: int) -> npt.NDArray[Any]:
    file.seek(start)
    shape, dtype = npy_header(file)
    begin = file.tell()
    return mapped[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


@cache
def _checksum(path: Path, stamp: int) -> int:
    """Return the CRC-32 of a file of a time of change, read once in this process.

    The file is read in parts: mapped whole it would count as memory of this process.
    """
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum
