"""Save tensors to files, each written whole or not at all, in numbered folders.

The folders are for values that are too large for memory and for a state dict, such as the neurons of FedMRL's map: 25
vectors as long as the model, written and read tensor by tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError

from fairflare.base.disk.files import LONGEST_NAME, private_folder, write_whole
from fairflare.base.disk.temporary import OwnedFolder
from fairflare.core.states import Made

SUFFIX = ".safetensors"
_KEY = "tensor"


def file_of(folder: Path, what: str, name: str) -> Path:
    """Return the path of the file for a name; characters that a file name cannot contain are escaped.

    Raises:
        ValueError: the name is empty or too long (``what`` is the kind of name, for the message).
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a {what} name must be a non-empty string, got {name!r}")
    file_name = quote(name, safe=" ") + SUFFIX
    if len(file_name) > LONGEST_NAME:
        raise ValueError(f"{what} name {name[:40]!r}... gives a file name longer than {LONGEST_NAME}")
    return folder / file_name


def names_in(folder: Path) -> list[str]:
    """Return the names whose files in a folder are complete, sorted; a name is that of :func:`file_of`."""
    return sorted(unquote(path.name[: -len(SUFFIX)]) for path in folder.glob(f"*{SUFFIX}"))


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, whose: str
) -> None:  # fmt: skip
    """Write tensors to a safetensors file with the library's own writer.

    Args:
        path: path of the file.
        tensors: dense, contiguous tensors by name, on the CPU, no two of which share memory.
        metadata: texts to store in the file's header.
        whose: description of the tensors for the error message.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{whose} cannot be written to {path.parent}: {error}") from error


class KeptTensors:
    """Save tensors by name under a number, such as the number of a round; tensors of the two newest numbers are kept.

    A round that is repeated after a crash needs the tensors of the second newest number. With a folder that outlives
    the process the tensors still exist after a restart; else they are saved with the state of the aggregation rule.

    Args:
        name: name of the folder below ``memory_folder``.
        what: description of the tensors for messages, with a place for the number: ``"the mean of {} model(s) is"``.
        memory_folder: folder that outlives the process; it is made at the first write, and nothing else may use its
            folder ``name``. ``None`` stands for a temporary folder, removed with this object. Set it before the
            first tensor is written and before :meth:`take_back`.
    """

    def __init__(self, name: str, what: str, memory_folder: Path | None = None) -> None:
        self.name, self.what, self.memory_folder = name, what, memory_folder

    @cached_property
    def root(self) -> Path:
        """Return the folder that contains one folder for each number (round) with saved tensors."""
        if self.memory_folder is not None:
            return self.memory_folder / self.name
        self._temporary = OwnedFolder("memory")
        return self._temporary.path / "tensors"

    def begin(self, number: int) -> Callable[[str, torch.Tensor], None]:
        """Create an empty folder for a number (a round's), and remove all other numbers' folders but the one before.

        Returns:
            A function that saves a tensor under its name; it raises OSError when the disk is full.
        """
        folder = self._path_of(number)
        for other in self.root.iterdir() if self.root.is_dir() else ():
            if other != self._path_of(number - 1):
                shutil.rmtree(other)
        private_folder(folder)

        def keep(name: str, tensor: torch.Tensor) -> None:
            tensors = {_KEY: tensor.detach().cpu().contiguous()}
            whose = f"tensor {name!r}"
            try:
                write_whole(file_of(folder, "tensor", name), lambda path: save_tensors(path, tensors, None, whose))
            except FileNotFoundError as error:
                raise OSError(f"{whose} cannot be written to {folder}: {error.strerror}") from error

        return keep

    def load(self, number: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors saved under a number (a round's), by name; each is read from disk at every access.

        Raises:
            RuntimeError: the number's folder does not exist. Reading a tensor raises ValueError when its file is
                damaged.
        """
        if not (folder := self._path_of(number)).is_dir():
            raise RuntimeError(f"{self.what.replace('{}', str(number))} not in {self.root}; start a new experiment")
        return Made(names_in(folder), partial(_read, folder))

    def travelling(self, number: int) -> dict[str, torch.Tensor] | None:
        """Return the tensors saved under a number, to be saved with the state of an aggregation rule.

        The result is ``None`` if no tensors are saved yet, or if their folder outlives the process.
        """
        return dict(self.load(number)) if self.memory_folder is None and number else None

    def take_back(self, number: int, tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Save the tensors that :meth:`travelling` returned under a number again, unless they are ``None``."""
        if tensors is not None:
            keep = self.begin(number)
            for name, tensor in tensors.items():
                keep(name, tensor)

    def _path_of(self, number: int) -> Path:
        return self.root / f"{number:06d}"


def _read(folder: Path, name: str) -> torch.Tensor:
    """Return a tensor of a folder that holds one file for each tensor."""
    from safetensors.torch import load_file

    path = file_of(folder, "tensor", name)
    try:
        return load_file(path)[_KEY]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"tensor {name!r} in {path} is damaged: {error}") from error
