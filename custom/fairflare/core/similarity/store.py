"""Rows of two feature matrices by layer: in memory up to a budget, in one scratch file beyond it."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

BLOCK = 4000  # columns that are stored, read and multiplied side by side; products are slow at 2**k


@dataclass
class _Piece:
    """Some rows of a layer, flat, one block of columns (2, rows, columns) after the other."""

    rows: int
    numel: int
    dtype: torch.dtype
    scales: Tensor  # (blocks, 2, rows, 1)
    values: Tensor | None  # None: in the file
    offset: int


class Store:
    """Appended by rows, read back by columns. A context manager: the scratch file is gone in any case at its end.

    Args:
        memory: bytes to keep in memory.
        folder: existing folder for the scratch file (default: the system's temporary folder).
    """

    def __init__(self, memory: float, folder: str | Path | None = None) -> None:
        self.memory = memory
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.bytes_in_memory = self.bytes_in_file = 0
        self._pieces: dict[str, list[_Piece]] = {}
        self._file: IO[bytes] | None = None
        self._work: dict[str, Tensor] = {}

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()
        if self._file is not None:
            self._file.close()

    def clear(self) -> None:
        """Forget all rows; the scratch file is used again from its start."""
        self._pieces.clear()
        self.bytes_in_memory = self.bytes_in_file = 0

    @property
    def nbytes(self) -> int:
        return self.bytes_in_memory + self.bytes_in_file

    def work(self, use: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for ``size`` numbers, the same at every call with this ``use``: new memory is slow."""
        room = self._work.get(use)
        if room is None or (room.dtype, room.device) != (dtype, device) or len(room) < size:
            room = self._work[use] = torch.empty(size, dtype=dtype, device=device)
        return room[:size]

    def check_room(self, nbytes: float) -> None:
        """Raise OSError (folder, needed, available) if ``nbytes`` more fit neither into memory nor into the folder."""
        needed = int(nbytes - max(0, self.memory - self.bytes_in_memory))
        if needed > 0 and needed > shutil.disk_usage(self.folder).free:
            raise self._full(needed)

    def append(self, name: str, u: Tensor, w: Tensor, *, exact: bool) -> None:
        """Add rows of a layer, both (rows, width) and both changed.

        They are kept as float32 (``exact``), or in 16 bits: whole numbers, scaled for each row in each block by the
        largest that it has there, so that nothing overflows, whatever came before.
        """
        rows, width = u.shape
        dtype = torch.float32 if exact else torch.int16
        size = 2 * rows * width
        spill = self.bytes_in_memory + size * dtype.itemsize > self.memory
        values = self.work(str(dtype), size, dtype, u.device) if spill else u.new_empty(size, dtype=dtype)
        scales = torch.ones(-(-width // BLOCK), 2, rows, 1)
        whole = width // BLOCK * BLOCK
        for start, stop, columns in ((0, whole, BLOCK), (whole, width, width - whole)):
            if start == stop:
                continue
            blocks = values[2 * rows * start : 2 * rows * stop].view(-1, 2, rows, columns)
            for i, x in enumerate((u, w)):
                x = x[:, start:stop].unflatten(1, (-1, columns)).transpose(0, 1)
                if not exact:
                    scale = (torch.maximum(x.amax(2), -x.amin(2)).float() / 32767).clamp_min(1e-38)[..., None]
                    scales[start // BLOCK :][: len(x), i] = scale.cpu()
                    x.div_(scale).round_()
                blocks[:, i].copy_(x)
        values = values.cpu()
        piece = _Piece(rows, len(values), dtype, scales, None if spill else values, self.bytes_in_file)
        if spill:
            self._write(values)
        else:
            self.bytes_in_memory += values.nbytes
        self._pieces.setdefault(name, []).append(piece)

    def columns(self, name: str) -> Iterator[Tensor]:
        """All rows of a layer, one block of columns at a time: u and w as (2, n, columns), float32 on the CPU.

        The numbers are overwritten by the next step of the iteration.
        """
        pieces = self._pieces[name]
        scales = torch.cat([piece.scales for piece in pieces], dim=2)
        buffer = torch.empty(2, scales.shape[2], BLOCK)
        for number, scale in enumerate(scales):
            row = size = 0
            for piece in pieces:
                block = self._read(piece, number)
                size = block.shape[2]
                buffer[:, row : row + piece.rows, :size] = block
                row += piece.rows
            yield buffer[:, :, :size].mul_(scale)

    def _full(self, needed: int) -> OSError:
        return OSError(
            errno.ENOSPC,
            f"scratch folder {str(self.folder)!r} is too small for the features: {needed} bytes needed, "
            f"{shutil.disk_usage(self.folder).free} available; choose another folder (scratch) or allow more memory",
        )

    def _scratch(self, offset: int) -> IO[bytes]:
        """The scratch file, at a place in it. Where the system allows that, it has no name in the folder."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="cka-")  # noqa: SIM115
        self._file.seek(offset)
        return self._file

    def _write(self, values: Tensor) -> None:
        self.check_room(values.nbytes)
        try:
            file = self._scratch(self.bytes_in_file)
            file.write(values.view(torch.uint8).numpy())  # type: ignore[call-overload]
            file.flush()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full(values.nbytes) from error
            raise
        self.bytes_in_file += values.nbytes

    def _read(self, piece: _Piece, number: int) -> Tensor:
        """A block of a piece, (2, rows, columns)."""
        start = 2 * piece.rows * BLOCK * number
        size = min(2 * piece.rows * BLOCK, piece.numel - start)
        if piece.values is not None:
            values = piece.values[start : start + size]
        else:
            values = torch.empty(size, dtype=piece.dtype)
            file = self._scratch(piece.offset + start * values.itemsize)
            if file.readinto(values.view(torch.uint8).numpy()) != values.nbytes:  # type: ignore[attr-defined]
                raise OSError(errno.EIO, f"scratch file in {self.folder} ended early")
        return values.view(2, piece.rows, -1)
