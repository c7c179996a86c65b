"""Select the largest entries of a model's change, and pack them for sending as numbers and a mask of their places."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch

from fairflare.base import checks
from fairflare.core.states import Made, State

WHICH = "/which"  # suffix of a tensor's name: one bit for each entry says whether it is sent; absent: all are sent


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return a mask of a tensor's entries with the largest magnitudes.

    Args:
        values: tensor of finite numbers, of any shape.
        count: number of entries to select, ``>= 0``; a larger number than there are selects all.

    Returns:
        A flat boolean mask with exactly that many True; among equal magnitudes the first entries win.
    """
    flat = values.detach().reshape(-1).abs()
    count = min(int(checks.number("count", count, low=0, whole=True)), flat.numel())
    if count in (0, flat.numel()):
        return torch.full((flat.numel(),), count > 0)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    ordered = flat.numpy().copy()
    ordered.partition(flat.numel() - count)
    least = ordered[flat.numel() - count].item()
    del ordered  # frees memory: for a whole model this tensor is as large as the model
    mask: torch.Tensor = flat > least
    mask[torch.nonzero(flat == least).reshape(-1)[: count - int(mask.sum())]] = True
    return mask


def largest_overall(state: State, count: int) -> dict[str, torch.Tensor]:
    """Return a mask for each tensor of a state that marks the entries with the largest magnitudes in the state."""
    flat = [state[name].detach().reshape(-1) for name in state]
    masks = largest(torch.cat(flat), count).split([one.numel() for one in flat]) if flat else ()
    return dict(zip(state, masks, strict=True))


def pack_entries(name: str, tensor: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the entries of one tensor that a mask selects, in the form in which they are sent.

    The result is empty if no entry is selected, the tensor itself if all are, else the entries and the mask's bits
    under the tensor's name with the suffix :data:`WHICH`.
    """
    if bool(mask.all()):
        return {name: tensor}
    if not bool(mask.any()):
        return {}
    return {name: tensor.reshape(-1)[mask], name + WHICH: torch.from_numpy(np.packbits(mask.numpy()))}


def unpack_entries(download: State, like: State) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, flat mask and selected entries of each tensor that :func:`pack_entries` prepared for sending.

    Args:
        download: results of :func:`pack_entries` for some tensors, joined in one mapping.
        like: state of the model that the entries belong to.

    Raises:
        ValueError: the model lacks a tensor, or a tensor has another number of entries than its mask says (the message
            names the tensor).
    """
    for name in (name for name in download if not name.endswith(WHICH)):
        checks.refuse({f"tensor {name!r} came, which the model does not have": name not in like})
        size, values, bits = like[name].numel(), download[name].reshape(-1), download.get(name + WHICH)
        mask = (
            torch.ones(size, dtype=torch.bool)
            if bits is None
            else torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool))
        )
        places = int(mask.sum())
        checks.refuse({f"tensor {name!r}: {values.numel()} numbers came for {places} places": places != values.numel()})
        yield name, mask, values


def add_entries(
    state: State, download: State, minus: State | None = None, weight: float = 0.0
) -> dict[str, torch.Tensor]:
    r"""Return a model to which the downloaded entries of a change are added.

    .. math:: w_i \leftarrow w_i + d_i - a\,m_i \quad \text{where an entry was downloaded}

    Args:
        state: w, the model before.
        download: d, the downloaded entries of the change, as in :func:`unpack_entries`.
        minus: m, this site's own part of the change, to be subtracted; tensors of the same names.
        weight: a, factor of the site's own part.

    Returns:
        A new state, summed in float64; tensors without downloaded entries are those of ``state``.

    Raises:
        ValueError: as :func:`unpack_entries`.
    """
    changed: dict[str, torch.Tensor] = dict(state)
    for name, mask, values in unpack_entries(download, state):
        flat = state[name].detach().clone().reshape(-1)
        total = flat[mask].double() + values.double()
        if minus is not None:
            total -= weight * minus[name].reshape(-1)[mask].double()
        flat[mask] = total.to(flat.dtype)
        changed[name] = flat.reshape(state[name].shape)
    return changed


def change_between(now: State, before: State, names: Collection[str]) -> State:
    """Return the change between two models as a mapping that computes each tensor at access.

    Args:
        now, before: the model after and before the change.
        names: names of the tensors to compare; integer tensors are left out.
    """
    return Made(
        (name for name in now if name in names and now[name].is_floating_point()),
        lambda name: (now[name].double() - before[name].double()).to(now[name].dtype),
    )
