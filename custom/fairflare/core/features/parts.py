"""Choose the part of a network that a site fine-tunes for itself: its head, its norms, or all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fairflare.core.features.layers import layer_of
from fairflare.core.features.norms import norm_tensors

if TYPE_CHECKING:
    from torch import nn

HEAD, NORMS = "head", "norms"


def names_in(model: nn.Module, part: str) -> list[str]:
    """Return the names of the parameters that training a part changes, in the order of the network.

    ``HEAD``: tensors called ``head.*``, else those of the last layer that is trained. ``NORMS``: scale and shift of all
    kinds of norm layers. Any other part: every parameter that is trained.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    last = layer_of(trained[-1]) if trained else ""
    head = [n for n in trained if n.startswith("head.")] or [n for n in trained if layer_of(n) == last]
    return {HEAD: head, NORMS: [n for n in norm_tensors(model, "all") if n in trained]}.get(part, trained)


@contextmanager
def only(model: nn.Module, part: str) -> Iterator[None]:
    """Let only a part of a network (head, norm layers or all) be trained inside the context."""
    chosen = names_in(model, part)
    frozen = [p for n, p in model.named_parameters() if p.requires_grad and n not in chosen]
    model.zero_grad()  # a gradient of the round before would count in clipping
    torch.nn.ParameterList(frozen).requires_grad_(False)
    try:
        yield
    finally:
        torch.nn.ParameterList(frozen).requires_grad_(True)
