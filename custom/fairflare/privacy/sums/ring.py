"""Convert a site's numbers to integers of a ring, block by block, and sums of such integers back to numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fairflare.privacy.sums.keys import SumRefused, need

Words = npt.NDArray[np.unsignedinteger[Any]]
Floats = npt.NDArray[np.float64]

BLOCK = 1 << 19  # numbers that are worked on at a time: 4 MiB of a ring of 64 bits
MOST_FRACTION = 40  # more bits of fraction would only add digits that a double does not have
SLACK = 1e-9  # largest difference between 1 and the sum of a mean's weights
COUNTER = "num_batches_tracked"  # steps of a batch norm: the server counts them by the steps that the sites report


@dataclass(frozen=True)
class Ring:
    """Define how numbers become integers: ``round_half_even(weight * clip(number) * 2**fraction) mod 2**bits``.

    Attributes:
        bits: 32 or 64, bits of a number as it is sent.
        fraction: 0 to 40, bits behind the point.
        bound: numbers are clipped to ``[-bound, bound]``.
    """

    bits: int
    fraction: int
    bound: float

    def __post_init__(self) -> None:
        good = (
            type(self.bits) is int and self.bits in (32, 64)
            and type(self.fraction) is int and 0 <= self.fraction <= MOST_FRACTION
            and isinstance(self.bound, float) and 0 < self.bound < math.inf
        )  # fmt: skip
        need(good, ValueError(f"a ring has 32 or 64 bits, 0 to 40 of fraction and a float bound above 0, got {self}"))

    @classmethod
    def fitting(cls, bits: int, bound: float) -> Ring:
        """Return the ring with the most bits of fraction in which no weighted mean can wrap.

        Args:
            bits: 32 or 64.
            bound: largest absolute value of a number.
        """
        return cls(bits, min(bits - 2 - math.ceil(math.log2(bound)), MOST_FRACTION), float(bound))

    @property
    def words(self) -> np.dtype[Any]:
        """Return the integer type for arithmetic in the ring, which wraps around."""
        return np.dtype(f"<u{self.bits // 8}")

    def limit(self, sites: int) -> int:
        """Return the largest absolute value, as an integer of the ring, of a weighted mean over this many sites.

        Raises:
            ValueError: the sum over this many sites could wrap around.
        """
        most = self.bound * 2.0**self.fraction * (1 + SLACK) + sites / 2
        need(most < 2 ** (self.bits - 1), ValueError(
            f"a sum of {sites} sites could wrap around in {self}; take a smaller bound or fraction",
        ))  # fmt: skip
        return math.floor(most)

    def quantise(self, values: Floats, weight: float) -> Words:
        """Return numbers, clipped and multiplied by a weight, as integers of the ring, (n,)."""
        scaled = weight * np.clip(values, -self.bound, self.bound) * 2.0**self.fraction
        return np.rint(scaled).astype(np.int64).astype(self.words)


#: Rings of trained tensors, of buffers, and of sums over images (squares of a patient's number of images are large).
TRAINED, BUFFERS, SUMS = Ring.fitting(32, 1.0), Ring.fitting(64, 2.0**20), Ring.fitting(64, 2.0**33)


@dataclass(frozen=True)
class SumLayout:
    """Describe the order of tensors in one flat vector: sorted by name, each flattened.

    Attributes:
        shapes: shape of each tensor by name, sorted.
        columns: for each tensor, the column of the table of weights that it takes its weight from.
        layers: names of the columns, sorted.
    """

    shapes: Mapping[str, tuple[int, ...]]
    columns: Mapping[str, int]
    layers: tuple[str, ...]

    @classmethod
    def make(cls, like: Mapping[str, torch.Tensor], owner: Mapping[str, str] | None = None) -> SumLayout:
        """Return a layout of a model's tensors; ``owner`` names each one's layer, if layers have own weights."""
        owners = {name: owner[name] if owner is not None else "" for name in sorted(like)}
        layers = tuple(sorted(set(owners.values())))
        columns = {name: layers.index(layer) for name, layer in owners.items()}
        return cls({name: tuple(like[name].shape) for name in owners}, columns, layers)

    @cached_property
    def numbers(self) -> int:
        """Return the number of entries of the flat vector of all tensors."""
        return sum(map(math.prod, self.shapes.values()))

    def parts(self, name: str) -> Iterator[slice]:
        """Return the slices of a tensor's flat numbers that are processed one after the other."""
        size = math.prod(self.shapes[name])
        return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


class Kinds(NamedTuple):
    """Hold the names of a model's tensors, sorted by how secure sums treat them.

    Attributes:
        params: floating tensors that are trained, for the ring of 32 bits.
        buffers: other floating tensors, for the ring of 64 bits.
        steps: counters of steps (``num_batches_tracked``), which no sum is needed for.
        fixed: other integers, which may not change.
    """

    params: list[str]
    buffers: list[str]
    steps: list[str]
    fixed: list[str]


def kinds(state: Mapping[str, torch.Tensor], trained: Iterable[str]) -> Kinds:
    """Return the names of a model's tensors by kind; ``trained`` are the names of its trained parameters."""
    floating = [name for name in sorted(state) if state[name].is_floating_point()]
    integers, chosen = sorted(set(state).difference(floating)), set(trained)
    return Kinds(
        params=[name for name in floating if name in chosen],
        buffers=[name for name in floating if name not in chosen],
        steps=[name for name in integers if name.rpartition(".")[2] == COUNTER],
        fixed=[name for name in integers if name.rpartition(".")[2] != COUNTER],
    )


def same_integers(site: str, received: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> None:
    """Refuse a training that changes integers other than step counters, as a weighted sum of them means nothing.

    Raises:
        SumRefused: such a tensor has changed; the text names it.
    """
    for name in kinds(received, ()).fixed:
        need(torch.equal(received[name].cpu(), local[name].cpu()), SumRefused(
            site,
            f"training changes the {received[name].dtype} tensor {name!r}, which cannot be summed; make it floating",
        ))  # fmt: skip
