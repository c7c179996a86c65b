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

BLOCK = 4000  # columns that are stored, read and multiplied side by side, or a few less; products are slow at 2**k
HIGHEST = 2**15 - 1
TOO_SMALL = (
    "scratch folder '{}' is too small for the features: {} bytes needed, {} available; choose another folder (scratch) "
    "or allow more memory"
)


@dataclass
class _Piece:
    """Some rows of a layer, (blocks, 2, rows, columns): a block of columns of both matrices after the other."""

    scales: Tensor  # (blocks, 2, rows, 1)
    values: Tensor  # those in the file: without memory, of the shape and type that they have there
    offset: int | None  # in the file; None: in memory


class Store:
    """Appended by rows, read back by columns; to be closed: then the scratch file is gone.

    Args:
        memory: bytes to keep in memory (of the device that the rows are on).
        folder: existing folder for the scratch file (default: the system's temporary folder).
    """

    def __init__(self, memory: float, folder: str | Path | None = None) -> None:
        self.memory = memory
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.bytes_in_memory = self.bytes_in_file = 0
        self._pieces: dict[str, list[_Piece]] = {}
        self._file: IO[bytes] | None = None
        self._rooms: dict[str, Tensor] = {}

    def close(self) -> None:
        self.clear()
        if self._file is not None:
            self._file.close()

    def clear(self) -> None:
        """Forget all rows; the scratch file is used again from its start."""
        self._pieces.clear()
        self.bytes_in_memory = self.bytes_in_file = 0

    def room(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """For rows that :meth:`append` is to take, (2, rows, at least width): zeros behind, anything before that.

        It is the same memory at every call: new memory is slow.
        """
        blocks = max(1, -(-width // BLOCK))
        shape = (2, rows, blocks * max(1, -(-width // blocks)))
        pair = self._reused("rows", 2 * rows * shape[2], dtype, device).view(shape)
        pair[:, :, width:] = 0
        return pair

    def append(self, name: str, pair: Tensor, *, exact: bool) -> None:
        """Add rows of a layer, all or some of what :meth:`room` gave; they are changed.

        They are kept as float32 (``exact``) or in 16 bits: whole numbers, scaled for each row in each block by the
        largest that it has there, so that nothing overflows, whatever came before.
        """
        values = pair.unflatten(2, (-(-pair.shape[2] // BLOCK), -1))
        scales = torch.ones(*values.shape[:3], 1, device=pair.device)
        if not exact:
            highest = torch.maximum(values.amax(3, keepdim=True), -values.amin(3, keepdim=True))
            scales = (highest.float() / HIGHEST).clamp_min(1e-38)
            values.div_(scales).round_()
        values, scales = (x.permute(2, 0, 1, 3) for x in (values, scales))
        dtype = torch.float32 if exact else torch.int16
        nbytes = values.numel() * dtype.itemsize
        offset = self.bytes_in_file if self.bytes_in_memory + nbytes > self.memory else None
        if offset is None:
            stored = torch.empty(values.shape, dtype=dtype, device=pair.device).copy_(values)
            self.bytes_in_memory += nbytes
        else:
            room = self._reused(f"spilled {dtype}", values.numel(), dtype, torch.device("cpu"))
            self._write(room.view(values.shape).copy_(values))
            stored = torch.empty(values.shape, dtype=dtype, device="meta")
        self._pieces.setdefault(name, []).append(_Piece(scales, stored, offset))

    def columns(self, name: str) -> Iterator[Tensor]:
        """All rows of a layer, one block of columns at a time: both matrices as (2, n, columns), float32.

        The numbers are overwritten by the next step of the iteration.
        """
        pieces = self._pieces[name]
        scales = torch.cat([piece.scales for piece in pieces], dim=2)
        buffer = scales.new_empty(2, scales.shape[2], pieces[0].values.shape[3])
        for number, scale in enumerate(scales):
            row = 0
            for piece in pieces:
                block = piece.values[number] if piece.offset is None else self._read(piece, number)
                buffer[:, row : row + block.shape[1]] = block
                row += block.shape[1]
            yield buffer.mul_(scale)

    def check_room(self, nbytes: float) -> None:
        """Raise OSError (folder, needed, available) if ``nbytes`` more fit neither into memory nor into the folder."""
        needed = int(nbytes - max(0, self.memory - self.bytes_in_memory))
        if needed > max(0, free := shutil.disk_usage(self.folder).free):
            raise OSError(errno.ENOSPC, TOO_SMALL.format(self.folder, needed, free))

    def _reused(self, use: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        room = self._rooms.get(use)
        if room is None or (room.dtype, room.device) != (dtype, device) or len(room) < size:
            room = self._rooms[use] = torch.empty(size, dtype=dtype, device=device)
        return room[:size]

    def _scratch(self, offset: int) -> IO[bytes]:
        """The scratch file, at a place in it. Where the system allows that, it has no name in the folder."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="cka-")  # noqa: SIM115
        self._file.seek(offset)
        return self._file

    def _write(self, values: Tensor) -> None:
        if values.nbytes > (free := shutil.disk_usage(self.folder).free):
            raise OSError(errno.ENOSPC, TOO_SMALL.format(self.folder, values.nbytes, free))
        try:
            file = self._scratch(self.bytes_in_file)
            file.write(values.view(torch.uint8).numpy())  # type: ignore[call-overload]
            file.flush()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(errno.ENOSPC, TOO_SMALL.format(self.folder, values.nbytes, free)) from error
            raise
        self.bytes_in_file += values.nbytes

    def _read(self, piece: _Piece, number: int) -> Tensor:
        """A block of a piece, (2, rows, columns)."""
        assert piece.offset is not None
        block = torch.empty(piece.values.shape[1:], dtype=piece.values.dtype)
        file = self._scratch(piece.offset + number * block.nbytes)
        if file.readinto(block.view(torch.uint8).numpy()) != block.nbytes:  # type: ignore[attr-defined]
            raise OSError(errno.EIO, f"scratch file in {self.folder} ended early")
        return block


def largest(x: Tensor) -> Tensor:
    """Largest absolute value, on its device; NaN if there is one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)
