"""Read a site's model at the server tensor by tensor, in shape and type of the model that was sent out.

Neither the reply nor the model made from it need be in memory as a whole: FLARE may have left the tensors on disk, and
they are written one by one to a file until all sites have answered. Models that are staged in memory are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from fairflare.base.checks import few, refuse, true_texts
from fairflare.core.features.layers import is_statistic
from fairflare.core.states import State, local_tensor
from fairflare.exchange.messages import Message, clean_tensor
from fairflare.exchange.tensor_file import Layout, LazyState, list_names
from fairflare.methods.base.reports import Field, read_report, shorten_value

FILTERS = (Field("filters", "names", required=False),)


class Incoming(LazyState):
    """Represent the model that a site sent; each tensor is converted at access.

    Args:
        layout: dtype and shape of every tensor.
        make: returns a tensor by its name.
        notes: remarks on the model for results and log.
        made: tensors that were converted already and that no other object uses.
        moved: whether a trained tensor differs from the received one; True also where that is not known.
    """

    def __init__(
        self,
        layout: Layout,
        make: Callable[[str], torch.Tensor],
        notes: Iterable[str] = (),
        made: Mapping[str, torch.Tensor] | None = None,
        moved: bool = True,
    ) -> None:
        self.names = self.layout = layout
        self._make, self.notes, self.made, self.moved = make, tuple(notes), made or {}, moved

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.layout:
            raise KeyError(name)
        return self.made[name] if name in self.made else self._make(name)


class Shape(Protocol):
    """Check the models that sites send: names, shapes and dtypes of their tensors."""

    updates: bool  # True: updates are collected; False: models
    stays: frozenset[str]  # names of tensors that stay at the sites and are not averaged

    def read(self, message: Message, site: str, fits: Callable[[Layout], bool] | None = None) -> Incoming:
        """Return the state to collect from a site's message, after every tensor was checked.

        If the state fits into memory, according to ``fits``, its tensors are converted once and held.

        Raises:
            ValueError, TypeError: the message's tensors cannot be collected (names site, tensor).
        """

    def shape_state(self, state: State) -> State:
        """Return a site's collected tensors in the form in which models are averaged."""


class LikeReceived:
    """Collect full models from sites that send models like the one that the server sent, or updates of it.

    A tensor that a site did not send keeps its received value: the job's method keeps this tensor at the sites, or a
    filter at the site (FLARE's ``ExcludeVars``) removed it from the message.

    Args:
        received: the model that the server sent.
        stays: names of tensors that the sites keep; such a tensor is ignored if a site sends it.
    """

    updates = False

    def __init__(self, received: State, stays: Iterable[str] = ()) -> None:
        self.received, self.stays = received, frozenset(stays)

    def read(self, message: Message, site: str, fits: Callable[[Layout], bool] | None = None) -> Incoming:
        received = self.received
        unknown = [name for name in message.params if name not in received]
        params = {name: value for name, value in message.params.items() if name not in self.stays}
        due = [name for name in received if name not in self.stays]
        averaged = any(received[name].is_floating_point() for name in params if name in received)
        refuse({
            f"site {site!r}: tensor {shorten_value(next(iter(unknown), ''))} is unexpected, the global model has none":
                bool(unknown),
            f"site {site!r} sent no model; does a filter at the site exclude every tensor?": not params and bool(due),
            f"site {site!r} sent no tensor that is averaged, only {list_names(list(params))}; does a filter at the "
            "site exclude the others?": bool(due) and not averaged,
        })  # fmt: skip

        def make(name: str) -> torch.Tensor:
            if name not in params:
                return received[name]
            where = f"site {site!r}: tensor {name!r}"
            return local_tensor(clean_tensor(name, params[name]), received[name], where, is_update=message.is_update)

        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in received.items()}
        notes = _remark_filters(site, message)
        extra: dict[str, torch.Tensor] = {}
        below = []
        moved = not any(is_trained(name, received[name]) for name in params)
        keep = fits is not None and message.is_update and fits(layout)  # a full model's tensors belong to the message
        for name in params:
            tensor = make(name)  # making the tensor checks it
            moved = moved or (is_trained(name, tensor) and not torch.equal(tensor, received[name]))
            if name.rpartition(".")[2] == "running_var" and bool((tensor < 0).any()):
                below.append(name)
            if keep:
                extra[name] = tensor
        staying = [name for name in message.params if name in self.stays]
        absent = [name for name in due if name not in params]
        notes += true_texts({
            f"site {site!r}: {list_names(staying)} came that the job's method keeps at the sites; not used": staying,
            f"site {site!r}: {list_names(absent)} of {len(received)} did not come and count as unchanged": absent,
            f"site {site!r}: {list_names(below)} with variances below 0; the average is kept at 0 or more": below,
        })  # fmt: skip
        return Incoming(layout, make, notes, extra, moved)

    def shape_state(self, state: State) -> State:
        return state


def is_trained(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is neither a counter nor a running statistic, judged by its dtype and its name."""
    return tensor.is_floating_point() and not is_statistic(name)


def _remark_filters(site: str, message: Message) -> list[str]:
    """Return a remark on FLARE's filters at the site that changed a model, with the share of an update that is not 0.

    FLARE notes the filters in the message at the site. Without filters the list is empty.
    """
    filters = read_report(message.meta, FILTERS, site)["filters"]
    if not filters:
        return []
    text = f"site {site!r}: its model went through {few(list(map(shorten_value, filters)), 3)}"
    if message.is_update:
        total = left = 0
        for name, value in message.params.items():
            tensor = clean_tensor(name, value)
            total, left = total + tensor.numel(), left + int(torch.count_nonzero(tensor))
        text += f"; {100 * left / max(total, 1):.3g} % of the numbers in its update are not 0"
    return [text]


def conform_state(state: State, layout: Layout) -> Incoming:
    """Return a staged state in another layout: absent tensors are 0 (in an update: unchanged), dtypes are cast."""

    def make(name: str) -> torch.Tensor:
        dtype, shape = layout[name]
        zero = torch.zeros((), dtype=dtype).expand(shape)
        return local_tensor(state[name], zero, f"tensor {name!r}", is_update=False) if name in state else zero

    return Incoming(layout, make)
