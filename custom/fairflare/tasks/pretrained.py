"""Load weights of another training as far as they fit: rename tensors, and interpolate position embeddings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairflare.base.checks import few
from fairflare.core.aggregation.low_rank import FACTOR
from fairflare.tasks.networks import match_name, read_checkpoint

SHOWN = 5  # largest number of names that a line lists
POSITIONS = "patch_embedding.position_embeddings"
#: Rules (pattern, replacement) that turn a vision transformer's names in timm and MAE into MONAI's.
OF_VIT = (
    (r"^patch_embed\.proj\.", "patch_embedding.patch_embeddings."),
    (r"^(blocks\.\d+\.attn)\.proj\.", r"\1.out_proj."),
    (r"^(blocks\.\d+\.mlp)\.fc([12])\.", r"\1.linear\2."),
)


def load_partial(model: nn.Module, path: Path, keys: Mapping[str, str]) -> str:
    """Load those tensors of a file that fit a network, and return one line about the result for the log.

    A tensor's name must be that of a tensor of the network, with or without ``encoder.`` before it. Prefixes of
    training scripts are taken off first; names of a ViT may be those of timm. Position embeddings of another grid are
    interpolated.

    Args:
        model: the network, which is changed in place; its tensors that the file lacks stay as they are.
        path: path of the file, see :func:`fairflare.tasks.networks.read_checkpoint`.
        keys: ``{REGEX: replacement}``, applied to each name in the file, one after the other.

    Returns:
        One line: how many tensors fitted, and which tensors of the file and of the network did not, with shapes.

    Raises:
        ValueError: the file cannot be read, two of its names become one, a grid cannot be interpolated, or no tensor
            fits (the message lists names of both).
    """
    state = model.state_dict()
    names = {name.replace(".base_layer.", "."): name for name in state if not FACTOR.fullmatch(name)}
    positions = _place(POSITIONS, names)
    tensors = _rename(read_checkpoint(path), [*keys.items(), *(OF_VIT if positions else ())], path)
    if positions is not None:
        encoder: Any = getattr(model, "encoder", model)
        tensors = _positions(tensors, encoder.grid, state[names[positions]], path)
    fitting: dict[str, torch.Tensor] = {}
    misfits: list[str] = []
    for name, tensor in tensors.items():
        if (place := _place(name, names)) is None:
            misfits.append(f"{name} {tuple(tensor.shape)}")
        elif state[names[place]].shape != tensor.shape:
            misfits.append(f"{name} {tuple(tensor.shape)} (here {tuple(state[names[place]].shape)})")
        else:
            fitting[names[place]] = tensor.to(state[names[place]].dtype)
    random = [
        plain for plain, name in names.items() if name not in fitting and not plain.endswith("num_batches_tracked")
    ]
    unused, begun = (few(names, SHOWN) or "nothing" for names in (misfits, random))
    rest = f"not used of the file: {unused}; as it began in the network: {begun}"
    if not fitting:
        raise ValueError(
            f"checkpoint {path}: none of its {len(tensors)} tensors fits the network ({rest}); map its names with "
            "initial_keys={REGEX: replacement}"
        )
    model.load_state_dict({**state, **fitting})
    return f"initial weights: {len(fitting)} of {len(tensors)} tensors of {path.name} fitted; {rest}"


def _rename(
    tensors: Mapping[str, torch.Tensor], rules: Sequence[tuple[str, str]], path: Path
) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        new = match_name(name)
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in renamed:
            raise ValueError(f"checkpoint {path}: two tensors become {new!r}, the second is {name!r}; see initial_keys")
        renamed[new] = tensor
    return renamed


def _place(name: str, names: Mapping[str, str]) -> str | None:
    return next((place for place in (name, f"encoder.{name}") if place in names), None)


def _positions(
    tensors: dict[str, torch.Tensor], grid: Sequence[int], positions: torch.Tensor, path: Path
) -> dict[str, torch.Tensor]:
    """Convert position embeddings of a file to the form of the network.

    The class token's position embedding is added to that token, and the patches' embeddings are interpolated to the
    network's grid.
    """
    timm, token = tensors.pop("pos_embed", None), tensors.get("cls_token")
    if timm is not None:
        tensors[POSITIONS] = timm
        patches = timm.shape[1] - 1
        if token is not None and (patches == positions.shape[1] or _side(patches, len(grid))):
            tensors |= {"cls_token": token + timm[:, :1], POSITIONS: timm[:, 1:]}
    given = tensors.get(POSITIONS)
    if given is None or given.ndim != 3 or given.shape[2] != positions.shape[2] or given.shape == positions.shape:
        return tensors
    if not (side := _side(given.shape[1], len(grid))):
        raise ValueError(
            f"checkpoint {path}: its {given.shape[1]} position embeddings are no square or cubic grid, here it is "
            f"{tuple(grid)}; choose image_size and patch_size of its training"
        )
    plane = given.transpose(1, 2).reshape(1, -1, *[side] * len(grid)).float()
    plane = nn.functional.interpolate(
        plane, tuple(grid), mode="bicubic" if len(grid) == 2 else "trilinear", align_corners=False
    )
    return {**tensors, POSITIONS: plane.flatten(2).transpose(1, 2)}


def _side(patches: int, dimensions: int) -> int:
    """Return the side of the square or cube that a number of patches makes; 0: the number makes none."""
    side = round(math.exp(math.log(max(patches, 1)) / dimensions))
    return side if side**dimensions == patches else 0
