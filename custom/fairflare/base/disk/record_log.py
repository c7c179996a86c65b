"""Write text records to a file that only grows: each is compressed alone, so that a record cut short can be skipped."""

from __future__ import annotations

import bz2
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fairflare.base.checks import refuse
from fairflare.base.disk.files import append, write_whole

_CHUNK = 1 << 20
_HEAD = bz2.compress(b" ")[:10]  # first bytes of every record: bzip2's level, and the mark of a block


class DamagedLog(ValueError):
    """Report that a record of a log is not as it was written; the text names file and record."""


class RecordLog:
    """Store records in a bzip2 file of many streams, which ``bzcat`` and every bzip2 library read as one text.

    A record is on disk, and outlives a power cut, when :meth:`append` returns. The cost depends on the record's size
    alone, not on the log's. Bytes that an interrupted append left
    after the last whole record are overwritten by the next append.

    Args:
        path: the file, in a folder that exists when a record is appended.

    Attributes:
        size: number of bytes of the whole records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Return the SHA-256 checksum of the log's whole records as they are on disk."""
        return self._hash.hexdigest()

    def append(self, text: str) -> None:
        """Append a record to the log.

        Raises:
            OSError: the disk is full or cannot be written; the log is then as it was.
        """
        self._add(bz2.compress(text.encode()))

    def take_over(self, other: RecordLog) -> None:
        """Append the records that another log has beyond those of this log, with which it begins."""
        if not other.path.exists():
            return
        for data in _pieces(other.path, self.size, other.size):
            self._add(data)
        refuse({f"{other.path} ends before its {other.size} bytes": self.size < other.size}, DamagedLog)

    def open_at(self, size: int) -> None:
        """Use the first ``size`` bytes of the file as the log; later bytes are overwritten by the next append.

        Raises:
            DamagedLog: the file is shorter than ``size``.
        """
        digest, left = hashlib.sha256(), size
        for data in _pieces(self.path, 0, size) if size else ():
            digest.update(data)
            left -= len(data)
        refuse({f"{self.path} ends {left} bytes early": left}, DamagedLog)
        self.size, self._hash = size, digest

    def salvage(self, size: int) -> int:
        """Keep only the undamaged records among the log's first ``size`` bytes, and return their number.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        data = self.path.read_bytes()[:size] if self.path.exists() else b""
        pieces = []
        for piece in data.split(_HEAD)[1:]:
            with suppress(OSError, ValueError):
                bz2.decompress(_HEAD + piece)
                pieces.append(_HEAD + piece)
        write_whole(self.path, lambda path: path.write_bytes(b"".join(pieces)))
        self.open_at(sum(map(len, pieces)))
        return len(pieces)

    def clear(self) -> None:
        """Empty the log: write a file without records."""
        self.open_at(0)
        write_whole(self.path, lambda path: path.write_bytes(b""))

    def read(self) -> Iterator[str]:
        """Return the log's records in its first :attr:`size` bytes."""
        return records(self.path, self.size)

    def _add(self, data: bytes) -> None:
        append(self.path, data, self.size)
        self.size += len(data)
        self._hash.update(data)


def records(path: Path, size: int | None = None) -> Iterator[str]:
    """Yield the whole records of a log, one after the other; a cut record at the end is left out.

    Args:
        path: the log's file; if it does not exist, there are no records.
        size: number of bytes to read; ``None`` for all bytes.

    Raises:
        DamagedLog: a record's bytes are damaged; a record that is merely cut at the end is left out.
    """
    if not path.exists():
        return
    number, stream, texts = 0, bz2.BZ2Decompressor(), list[bytes]()
    for piece in _pieces(path, 0, path.stat().st_size if size is None else size):
        while piece:
            try:
                texts.append(stream.decompress(piece))
            except (OSError, ValueError) as error:
                raise DamagedLog(f"{path}: record {number} is damaged ({error})") from error
            piece = stream.unused_data
            if stream.eof:
                yield b"".join(texts).decode()
                number, stream, texts = number + 1, bz2.BZ2Decompressor(), []


def _pieces(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file from ``start`` to ``end``, or to the file's end, in pieces."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (piece := file.read(min(_CHUNK, end - start))):
            yield piece
            start += len(piece)
