"""Stage the local models of a round until the last site has reported: in memory up to a budget, then on disk.

The weights of a round depend on every report, so no model can be averaged when it arrives. Models beyond the budget are
written to a safetensors file for each site, which the average reads tensor by tensor: the server's memory does not grow
with the number of sites then. The average has the same bits, wherever the models were staged.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import psutil
import torch
from safetensors import SafetensorError, safe_open

from fairflare.base.checks import refuse
from fairflare.base.disk.files import private_folder, remove_partials, write_whole
from fairflare.exchange.tensor_file import DTYPES, NAME_OF, Layout, LazyState, layout_of, write_tensors
from fairflare.exchange.tensor_folder import SUFFIX, file_of, names_in

SHARE = 0.25  # share of the free memory that is the default budget
GROUP = Path("/sys/fs/cgroup")  # folder of this process's control group, as seen in a container


class StagingError(ValueError):
    """Signal that a staged model is missing or damaged, which is an error of the server and not of a site."""


class Staging:
    """Store one state for each site, in memory up to a budget and then in a folder.

    Args:
        folder: folder for the states, which is created if needed; it should be on a real disk and used by one job only.
            States of an earlier process stay there until :meth:`discard` or :meth:`clear`.
        memory: number of bytes of states that stay in memory; further ones are written to the folder. ``None`` stands
            for a quarter of the memory that is free when the first state after a :meth:`clear` is stored.
    """

    def __init__(self, folder: str | os.PathLike[str], memory: float | None = 0) -> None:
        self.folder = private_folder(Path(folder))
        self._memory = memory
        self._budget: float | None = None
        self._held: dict[str, Mapping[str, torch.Tensor]] = {}

    def fits(self, layout: Layout, site: str = "") -> bool:
        """Return whether a state of this layout fits into the memory budget, replacing an earlier state of ``site``."""
        if self._budget is None:
            self._budget = SHARE * free_memory() if self._memory is None else self._memory
        taken = sum(_num_bytes(layout_of(state)) for other, state in self._held.items() if other != site)
        return taken + _num_bytes(layout) <= self._budget

    def put(self, site: str, state: Mapping[str, torch.Tensor]) -> int:
        """Store the state of a site; the site's earlier state is replaced in one step when the new state is complete.

        Args:
            site: name of the site, not empty; characters that a file name cannot contain are escaped.
            state: tensors of any device and strides; tensors that share memory are each written in full. A
                :class:`LazyState` is read one tensor after the other, so that one tensor is in memory besides its
                ``made`` tensors, which are not copied again.

        Returns:
            Size of the file in bytes, or of the tensors in memory.

        Raises:
            TypeError: a value is not a dense tensor (names site and tensor).
            ValueError: the site name is empty or too long, or a tensor has a dtype that cannot be staged.
            OSError: the disk is full or cannot be written; nothing of the new state is then left behind.
        """
        path, layout = self._path(site), _layout(site, state)
        try:
            if self.fits(layout, site):
                ready = state.made if isinstance(state, LazyState) else {}
                held = {
                    name: ready[name]
                    if name in ready
                    else state[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                    for name in layout
                }
                path.unlink(missing_ok=True)
                self._held[site] = held
                return _num_bytes(layout)
            metadata = {"site": site, "names": json.dumps(list(layout))}
            # durable=False: after a power cut the round is repeated, and this file is not read again.
            write_whole(path, lambda partial: write_tensors(partial, state, layout, metadata), durable=False)
        except OSError as error:
            raise OSError(error.errno, f"the model of site {site!r} cannot be written to {path}: {error}") from error
        self._held.pop(site, None)
        return path.stat().st_size

    def open(self, site: str) -> Mapping[str, torch.Tensor]:
        """Return the staged state of a site: from memory, or as a mapping that reads a tensor from disk at access.

        The tensors' names have the order in which they were stored. A file is read again at every access to a tensor.
        The tensors must not be changed.

        Raises:
            ValueError: the site is not staged, or the file is damaged.
        """
        path = self._path(site)
        if site in self._held:
            return MappingProxyType(self._held[site])
        if not path.is_file():
            raise StagingError(f"site {site!r} is not staged; staged are {self.sites()}")
        return _StagedState(site, path)

    def open_all(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return the state of every staged site by name, opened as by :meth:`open`, for ``weighted_average``."""
        return {site: self.open(site) for site in self.sites()}

    def sites(self) -> list[str]:
        """Return the names of the staged sites, sorted."""
        return sorted({*names_in(self.folder), *self._held})

    def write_all(self, folder: Path) -> None:
        """Write the staged states (models) of all sites into another folder, as :meth:`put` would."""
        other = Staging(folder)
        for site, state in self.open_all().items():
            other.put(site, state)

    def discard(self, site: str) -> None:
        """Remove the staged state of a site, if it exists."""
        self._held.pop(site, None)
        self._path(site).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every staged state, and the incomplete files of interrupted calls of :meth:`put`."""
        self._held.clear()
        self._budget = None
        remove_partials(self.folder, mine=True)
        for path in self.folder.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder of staged models if it is empty; no state can be stored afterwards."""
        with suppress(OSError):
            self.folder.rmdir()

    def _path(self, site: str) -> Path:
        return file_of(self.folder, "site", site)


class _StagedState(LazyState):
    """Read single tensors of a site's staged safetensors file.

    The safetensors library checks the file once. The tensors are then read with plain file reads, since the library's
    reads map the file into memory: mapped pages of all sites' files would count as memory of the server, and opening
    the file anew with the library for each tensor would parse the header each time.
    """

    def __init__(self, site: str, path: Path) -> None:
        self._site, self._file = site, path
        try:
            with safe_open(path, framework="pt") as checked:
                metadata = checked.metadata() or {}
            with path.open("rb") as file:
                self._start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(self._start - 8))
                self._stamp = _stamp(file.fileno())
            self._entries = {name: header[name] for name in json.loads(metadata["names"])}
            self.names = self.layout = {
                name: (getattr(torch, DTYPES[entry["dtype"]]), tuple(entry["shape"]))
                for name, entry in self._entries.items()
            }
            if metadata["site"] != site or len(self._entries) != len(header) - 1:  # the metadata is one entry
                raise StagingError("its header names another site")
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StagingError(f"staged model of site {site!r} in {path} is damaged: {error}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        first, end = self._entries[name]["data_offsets"]
        data = torch.empty(end - first, dtype=torch.uint8)
        with self._file.open("rb") as file:
            if _stamp(file.fileno()) != self._stamp:
                raise StagingError(f"staged model of site {self._site!r} was replaced while it was being read")
            file.seek(self._start + first)
            if file.readinto(data.numpy().data) < len(data):
                raise StagingError(f"staged model of site {self._site!r} in {self._file} ends early")
        dtype, shape = self.layout[name]
        return data.view(dtype).reshape(shape)


def _layout(site: str, state: Mapping[str, torch.Tensor]) -> Layout:
    """Return the dtype and shape of every tensor, after checking that it is dense and that its dtype can be staged."""
    for name, tensor in state.items() if not isinstance(state, LazyState) else ():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"site {site!r}: {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"site {site!r}: tensor {name!r} must be dense, got {tensor.layout}")
    layout = layout_of(state)
    refuse({
        f"site {site!r}: tensor {name!r} has dtype {dtype}, which cannot be staged": True
        for name, (dtype, _) in layout.items() if str(dtype) not in NAME_OF
    })  # fmt: skip
    return layout


def _num_bytes(layout: Layout) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())


def _stamp(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def free_memory() -> int:
    """Return the bytes of memory that are still available to this process.

    The number is that of the machine or, if it is smaller, that of this process's container.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # the process is in no container, or in one without a limit ("max")
        return available
    return max(0, min(available, limit - used))
