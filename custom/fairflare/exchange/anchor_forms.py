"""Send the anchor (the average of a round's local models) to the sites in full, or in half the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

AnchorAs = Literal["model", "bf16", "difference"]
MODEL: AnchorAs = "model"
BF16: AnchorAs = "bf16"
DIFFERENCE: AnchorAs = "difference"
State = Mapping[str, "torch.Tensor"]


def lighter(anchor: State, received: State, form: AnchorAs) -> dict[str, torch.Tensor]:
    """Return the anchor in the form in which it is sent.

    Vectors are sent unchanged: they have few bytes, and a variance that shrinks from 1 to 0.002 would be lost in a
    difference.

    Args:
        anchor: tensors by name.
        received: model with which the sites began the round; used for ``"difference"`` only.
        form: ``"model"``: unchanged. ``"bf16"``: matrices and kernels (two dimensions or more, more than 16 bits) in
            bfloat16, with a relative error of at most 2**-8. ``"difference"``: in place of each matrix or kernel its
            difference to the received one, in bfloat16, with an error of at most 2**-8 of the difference.

    Returns:
        Tensors by name; converted tensors are new objects, unchanged tensors are those of ``anchor``.
    """
    if form == MODEL:
        return dict(anchor)
    base = received if form == DIFFERENCE else {}
    return {
        name: (value - base[name] if base else value).to(torch.bfloat16) if _shrinks(value) else value
        for name, value in anchor.items()
    }


def restored(sent: State, received: State) -> dict[str, torch.Tensor]:
    """Return the anchor at a site, from the tensors that were sent in the form ``"difference"``.

    Args:
        sent: tensors by name, from :func:`lighter`.
        received: the model that this site was sent for training in the same round.

    Raises:
        ValueError: a sent tensor is missing or has another shape in ``received`` (names the tensor).
    """
    whole = {}
    for name, value in sent.items():
        own = received.get(name)
        if own is None or own.shape != value.shape:
            raise ValueError(f"tensor {name!r} of the anchor does not fit the model that was received for training")
        whole[name] = own + value.to(own.dtype) if _shrinks(own) else value
    return whole


def _shrinks(value: torch.Tensor) -> bool:
    return value.ndim > 1 and value.is_floating_point() and value.element_size() > 2
