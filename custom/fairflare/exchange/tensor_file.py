"""Write a safetensors file tensor by tensor, so that no more than one tensor is in memory.

The safetensors library's own writer needs all tensors at once. The format is a header with the positions of the
tensors, then their bytes. The library can read the files that this module writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch

from fairflare.base.checks import few
from fairflare.base.disk.files import private_opener
from fairflare.core.aggregation.movement import Lazy

#: Name of each dtype in torch, by its name in the safetensors format.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
NAME_OF = {f"torch.{dtype}": name for name, dtype in DTYPES.items()}

Layout: TypeAlias = dict[str, tuple["torch.dtype", tuple[int, ...]]]  # dtype and shape of each tensor, by its name


class LazyState(Lazy):
    """Represent a state whose tensors are computed or read at access and do not stay in memory.

    A subclass sets :attr:`layout`, also as its ``names``, and implements ``__getitem__``.

    Attributes:
        layout: dtype and shape of every tensor, in the order of the names.
        made: tensors that are in memory already and that no other object uses.
    """

    layout: Layout
    made: Mapping[str, torch.Tensor] = MappingProxyType({})


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], layout: Layout, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file, which only its owner may read.

    Args:
        path: path of the file.
        tensors: dense tensors by name, of any device and strides; each is read once.
        layout: dtype and shape that every tensor must have.
        metadata: texts to store in the file's header.

    Raises:
        ValueError: a tensor has another dtype or shape than in ``layout``.
        OSError: the disk is full or cannot be written.
    """
    # Wide dtypes come first, so that every tensor begins at a multiple of its item size.
    order = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata or {})}
    end = 0
    for name in order:
        dtype, shape = layout[name]
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAME_OF[str(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", opener=private_opener) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = tensors[name].detach()
            if (form := (tensor.dtype, tuple(tensor.shape))) != layout[name]:
                raise ValueError(f"tensor {name!r} is {form[0]} {form[1]}, announced was {layout[name]}")
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def layout_of(state: Mapping[str, torch.Tensor]) -> Layout:
    """Return the dtype and shape of each tensor of a state, by name; tensors of a lazy state are not computed."""
    if isinstance(state, LazyState):
        return state.layout
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}


def list_names(names: list[str]) -> str:
    """Return the number of tensors and their first names in words; names, which sites choose, are quoted and cut."""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({few([f'{name[:80]!r:.80}' for name in names], 3)})"
