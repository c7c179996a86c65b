"""Apply a server's optimizer to the sites' mean change of the model, tensor by tensor."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import TypeAlias

import torch

from fairflare.base import checks
from fairflare.core.aggregation.low_rank import Products
from fairflare.core.aggregation.tensor_mean import check_finite, sq_norm

log = logging.getLogger(__name__)
State: TypeAlias = Mapping[str, "torch.Tensor"]


class Movement:
    """Apply a method's server optimizer to the mean change of the trained tensors before it is added to the model.

    Args:
        move: function that is given the mean change, a mapping ``name -> w - w^r`` in float64, and returns the change
            to apply: the same names and shapes, finite. The mean of a tensor is computed anew at every access, so that
            nothing of the model's size is in memory. If ``move`` returns the mapping itself, the plain average is used.
        types: dtype of each tensor that is transformed, by name.
        start: function that returns the model that the sites started from, or ``None`` if the states are changes
            already. It is called when the first tensor is read.
        buffers: weights by site of the floating tensors that are not in ``types``; default: the weights of the other
            tensors.
        products: object that averages the low-rank adapters of models by their products, for methods whose ``move``
            returns its argument itself; None if each factor is averaged by itself.

    Attributes:
        length: length of the applied change divided by the length of the mean change; 1 if either is unknown.
    """

    def __init__(
        self,
        move: Callable[[State], State],
        types: Mapping[str, torch.dtype],
        start: Callable[[], State | None],
        buffers: Mapping[str, float] | None = None,
        products: Products | None = None,
    ) -> None:
        self.move, self.types, self.buffers, self.products = move, types, buffers, products
        self.start = cache(start)
        self._squares: dict[str, float] = {}
        self._moved: dict[str, float] = {}

    @property
    def length(self) -> float:
        total = math.fsum(self._squares[name] for name in self._moved if name in self._squares)
        return math.sqrt(math.fsum(self._moved.values()) / total) if total > 0 else 1.0

    def apply(self, mean: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor] | None:
        """Return a function that computes the new tensor of a given name from the change that ``self.move`` returned.

        Return ``None`` if ``self.move`` returned its argument itself: then the plain average is used.

        Args:
            mean: function that returns the mean of the sites' tensors with a given name, in float64.

        Raises:
            ValueError: the result of ``move`` has other names than its argument, or (when a tensor is computed) a
                tensor of it has another shape or is not finite.
        """

        def change(name: str) -> torch.Tensor:
            total, start = mean(name), self.start()
            total = total if start is None else total.sub_(start[name])
            self._squares[name] = sq_norm({name: total})
            return total

        changes = Made(self.types, change)
        moved = self.move(changes)
        if moved is changes:
            return None
        checks.same_names("what move() gives", moved, "the mean change", changes, of="tensor")

        def make(name: str) -> torch.Tensor:
            step, start, dtype = moved[name].double(), self.start(), self.types[name]
            like = step if start is None else start[name]
            checks.same_shape(f"what move() gives of tensor {name!r}", step, "the model", like)
            check_finite(step, f"what move() gives of tensor {name!r}")
            self._moved[name] = sq_norm({name: step})
            total = step if start is None else step + like
            most = torch.finfo(dtype).max
            if float(total.abs().max() if total.numel() else 0.0) > most:
                log.warning("the change takes tensor %r beyond %s; cut to its largest number", name, dtype)
                total = total.clamp(-most, most)
            return total.to(dtype, copy=True)

        return make


class Lazy(Mapping[str, "torch.Tensor"]):
    """Map names to tensors that are made or read at access; a subclass gives the names, and ``__getitem__``."""

    names: Collection[str]

    def __contains__(self, name: object) -> bool:  # the inherited method would make the tensor
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Made(Lazy):
    """Map names to tensors, each of which is computed anew at every access."""

    def __init__(self, names: Iterable[str], make: Callable[[str], torch.Tensor]) -> None:
        self.names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self._make(name)
