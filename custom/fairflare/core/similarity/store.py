"""Store tensors that are read again later, in memory up to a budget and beyond it in one scratch file."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TOO_SMALL = (
    "scratch folder '{}' is too small for the features: {} bytes needed, {} available; choose another folder (scratch) "
    "or allow more memory"
)


class Store:
    """Store tensors in memory, and in a scratch file beyond a budget; closing the store removes the file.

    Args:
        memory: number of bytes that may be held in memory (of the device that the tensors are on).
        folder: existing folder for the scratch file (default: the system's temporary folder).
    """

    def __init__(self, memory: float, folder: str | Path | None = None) -> None:
        self.memory = memory
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.bytes_in_memory = self.bytes_in_file = 0
        self._file: IO[bytes] | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def clear(self) -> None:
        """Remove all stored tensors; memory and file count as empty, and the file is overwritten.

        Functions that :meth:`keep` returned before must not be called any more.
        """
        self.bytes_in_memory = self.bytes_in_file = 0

    def keep(self, values: Tensor) -> Callable[[], Tensor]:
        """Store float32 values, which must not change afterwards, and return a function that reads them."""
        if self.bytes_in_memory + values.nbytes <= self.memory:
            self.bytes_in_memory += values.nbytes
            return lambda: values
        return partial(self._read, values.shape, self._write(values.cpu()))

    def check_room(self, nbytes: float) -> None:
        """Raise OSError (folder, needed, available) if ``nbytes`` more fit neither into memory nor into the folder."""
        needed = int(nbytes - max(0, self.memory - self.bytes_in_memory))
        if needed > max(0, free := shutil.disk_usage(self.folder).free):
            raise OSError(errno.ENOSPC, TOO_SMALL.format(self.folder, needed, free))

    def _scratch(self, offset: int) -> IO[bytes]:
        """Return the scratch file at a position; it has no name in the folder if the system allows unnamed files."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="cka-")  # noqa: SIM115
        self._file.seek(offset)
        return self._file

    def _write(self, values: Tensor) -> int:
        """Write values to the scratch file and return their position in the file."""
        offset, free = self.bytes_in_file, shutil.disk_usage(self.folder).free
        try:
            if values.nbytes > free:
                raise OSError(errno.ENOSPC, "too small")
            file = self._scratch(offset)
            file.write(values.numpy())  # type: ignore[call-overload]
            file.flush()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(errno.ENOSPC, TOO_SMALL.format(self.folder, values.nbytes, free)) from error
            raise
        self.bytes_in_file += values.nbytes
        return offset

    def _read(self, shape: tuple[int, ...], offset: int) -> Tensor:
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        if self._scratch(offset).readinto(values.numpy()) != values.nbytes:  # type: ignore[attr-defined]
            raise OSError(errno.EIO, f"scratch file in {self.folder} ended early")
        return values
