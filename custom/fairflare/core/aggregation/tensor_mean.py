"""Compute the weighted mean, median or trimmed mean of one tensor over all sites, block by block in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fairflare.base.checks import refuse

HELD = 2**27  # bytes of the sites' copies of one tensor that are collected before they are added up
#: Elements per block. PyTorch splits an elementwise operation over threads above 32768 elements, and a
#: float64 block of this size fits the second-level cache.
_BLOCK = 32768
_TIE = 1e-12  # a sum of weights that is this close to one half counts as one half


@dataclass(frozen=True)
class Aggregate:
    r"""Define how the sites' values of one parameter are combined, given the sites' weights.

    Attributes:
        kind: ``"mean"``: the weighted mean; ``"median"``: the weighted median (half of the weight lies below it and
            half above; the midpoint where two values qualify); ``"trimmed_mean"``: the weighted mean of the values
            between the weighted quantiles ``trim`` and 1 - ``trim``. A site whose weight lies partly outside counts
            with the part inside.
        trim: share of the total weight that is left out at either end, in (0, 0.5).

    Source:
        Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, with weights in place of counts.
    """

    kind: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim: float = 0.25


MEAN = Aggregate()


class MeanNotFinite(ValueError):
    """Report that an average is not finite, because a tensor is not or the weights sum to slightly more than 1."""


class RobustMiddle:
    """Compute the weighted median or trimmed mean of one tensor, from all sites' tensors in memory."""

    def __init__(self, name: str, first: torch.Tensor, how: Aggregate) -> None:
        self.name, self.how = name, how
        self.like = first.detach().new_empty(()).expand(first.shape)
        self.dtype = first.dtype
        self._waiting: list[tuple[torch.Tensor, float]] = []

    def add(self, tensor: torch.Tensor, weight: float) -> None:
        self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self._waiting.append((tensor.detach().to(self.like.device).reshape(-1), weight))

    def result(self, floor: bool, wide: bool = False) -> torch.Tensor:
        tensors = [tensor for tensor, _ in self._waiting]
        if not self.dtype.is_floating_point:
            middle = torch.stack([tensor.long() for tensor in tensors]).median(0).values
            return middle.to(self.dtype).reshape(self.like.shape)
        weights = torch.tensor([weight for _, weight in self._waiting], dtype=torch.float64, device=self.like.device)
        result = weights.new_empty(self.like.numel(), dtype=torch.float64 if wide else self.dtype)
        for block, *parts in zip(result.split(_BLOCK), *(tensor.split(_BLOCK) for tensor in tensors), strict=True):
            middle = self._middle(torch.stack([part.double() for part in parts]), weights)
            block.copy_(middle.clamp_(min=0.0) if floor else middle)
        refuse({
            f"the {self.how.kind} of tensor {self.name!r} does not fit {self.dtype}": not all_finite(result),
        }, MeanNotFinite)  # fmt: skip
        return result.reshape(self.like.shape)

    def _middle(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted median or trimmed mean over the sites of values of shape (sites, numbers)."""
        values, order = values.sort(dim=0, stable=True)
        weights = weights[order]
        above = weights.cumsum(0)
        if self.how.kind == "median":
            bounds = ((above >= 0.5 - _TIE), (above > 0.5 + _TIE))  # the last sum is 1: a first True always exists
            low, high = (values.gather(0, reached.int().argmax(0, keepdim=True))[0] for reached in bounds)
            return low / 2 + high / 2
        trim = self.how.trim
        inside = (above.clamp(max=1 - trim) - (above - weights).clamp(min=trim)).clamp_(min=0.0)
        return values.where(inside > 0, 0.0).mul_(inside).sum(0).div_(inside.sum(0))


class WeightedMean:
    """Compute the weighted sum of one tensor over the sites, or the maximum over the sites of an integer tensor.

    NumPy adds up, on the CPU: its calls cost less than PyTorch's, which counts with blocks that fit the cache.
    """

    def __init__(self, name: str, first: torch.Tensor, hold: int) -> None:
        """Begin a weighted mean with the first site's tensor.

        Args:
            name: name of the tensor.
            first: tensor of the first site; it defines shape and dtype of the result.
            hold: number of bytes of tensors that are collected before they are added to the sum together, so that the
                sum stays in the processor's cache.
        """
        self.name = name
        self.like = first.detach().new_empty(()).expand(first.shape)  # view of the shape and dtype, without memory
        self.dtype = first.dtype
        self._most = None if first.is_floating_point() else first.detach().clone()  # maximum of an integer tensor
        self._total: np.ndarray[Any, np.dtype[np.float64]] | None = None  # sum of the tensors added so far
        self._hold, self._held = hold, 0  # number of bytes to collect, and number collected
        self._waiting: list[tuple[np.ndarray[Any, Any], float]] = []

    def add(self, tensor: torch.Tensor, weight: float) -> None:
        self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        tensor = tensor.detach()
        if self._most is not None:
            self._most = torch.maximum(self._most, tensor.to(self.like.device))
            return
        flat = tensor.reshape(-1).cpu()  # NumPy has no bfloat16, whose numbers are all float32 numbers
        self._waiting.append(((flat.float() if flat.dtype == torch.bfloat16 else flat).numpy(), weight))
        self._held += self._waiting[-1][0].nbytes
        if self._held > self._hold:
            self._total = np.zeros(self.like.numel()) if self._total is None else self._total
            list(self._sums(self._total))  # adds the waiting tensors to the total, in place
            self._waiting.clear()
            self._held = 0

    def _sums(
        self, total: np.ndarray[Any, np.dtype[np.float64]] | None = None
    ) -> Iterator[tuple[slice, np.ndarray[Any, np.dtype[np.float64]]]]:
        """Yield the place and weighted sum of each block of the waiting tensors, added to ``total`` where it is given.

        Sums go in the order of the sites, and have the same bits however many tensors are added at once.
        """
        size = self.like.numel()
        room, scratch = np.empty((2, min(_BLOCK, size)))
        for first in range(0, size, _BLOCK):
            block = slice(first, min(first + _BLOCK, size))
            product = scratch[: block.stop - first]
            sums = room[: len(product)] if total is None else total[block]
            if total is None:
                sums.fill(0.0)
            with np.errstate(all="ignore"):
                for flat, weight in self._waiting:
                    product[:] = flat[block]
                    # Product and sum are two operations: a fused one rounds differently from machine to machine.
                    np.multiply(product, weight, out=product)
                    np.add(sums, product, out=sums)
            yield block, sums

    def result(self, floor: bool, wide: bool = False) -> torch.Tensor:
        if self._most is not None:
            return self._most.to(self.dtype)
        mean = torch.empty(self.like.numel(), dtype=torch.float64 if wide else self.dtype)
        for block, sums in self._sums(self._total):  # without a float64 sum of the tensor's size, if none was begun
            mean[block] = torch.from_numpy(np.maximum(sums, 0.0, out=sums) if floor else sums)
        refuse({
            f"the average of tensor {self.name!r} does not fit {self.dtype}": not all_finite(mean),
        }, MeanNotFinite)  # fmt: skip
        return mean.reshape(self.like.shape).to(self.like.device)


def check_finite(tensor: torch.Tensor, where: str) -> None:
    refuse({f"{where} is not finite": not all_finite(tensor)})


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether every value of a tensor is finite; a block is tested value by value only if its sum is not."""
    return not tensor.is_floating_point() or all(
        math.isfinite(block.sum(dtype=torch.float32 if block.element_size() < 4 else None).item())
        or bool(torch.isfinite(block).all())
        for block in blocks(tensor)
    )


def blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensor in flat pieces that PyTorch handles in one thread and that fit the cache."""
    return torch.split(tensor.detach().reshape(-1), _BLOCK)


def sq_norm(update: Mapping[str, torch.Tensor]) -> float:
    """Return the squared L2 norm over the floating tensors of an update, accumulated in float64.

    Args:
        update: state whose tensors are measured; integer counters are not part of a norm.

    Returns:
        The sum of squares, ``>= 0``; 0 for no tensor.

    Raises:
        ValueError: a tensor that is not finite.
    """
    parts = []
    for name in [n for n, t in update.items() if t.is_floating_point()]:
        squares = [block.double().square().sum().item() for block in blocks(update[name])]
        refuse({f"squared norm of tensor {name!r} is not finite": not all(map(math.isfinite, squares))})
        parts.extend(squares)
    return math.fsum(parts)
