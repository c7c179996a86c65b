"""Average each slice of some tensors over the sites that have what the slice is for.

Such slices are the rows of an output layer, each for a structure, and the columns of an input layer, each for a channel
of the images. A site that does not annotate the structure, or has no such channel, sends the slice as it received it.
In an average over all sites the slice would take only a part of the step that the other sites made.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fairflare.base.checks import group_by_key
from fairflare.core.aggregation.tensor_mean import MEAN, Aggregate
from fairflare.core.states import State, WeightsOf, weighted_average


@dataclass(frozen=True)
class PartialSlices:
    r"""Average each slice over the sites that have what it is for, its owners, and give every site the result.

    .. math:: w_s = \sum_{k \in K_s} p_k w_{k,s} \Big/ \sum_{k \in K_s} p_k

    :math:`K_s` are the sites of the round that own slice s, :math:`p_k` is a site's weight for the tensor. A slice
    keeps its received value if no site owns it, or only sites of weight 0. As all sites then have the same slice, any
    average of them (a median, too) is this slice, and a server's optimizer is given its change.

    Attributes:
        tensors: names of the tensors; empty if they are not known.
        lacking: for each slice the sites that lack what it is for.
        axis: axis of the tensors along which the slices lie: 0 for rows, 1 for columns.
    """

    tensors: Collection[str] = ()
    lacking: tuple[frozenset[str], ...] = ()
    axis: int = 0

    def place(self, numbers: Any) -> tuple[Any, ...]:
        """Return the index with which a tensor gives its slices of these numbers."""
        return (*[slice(None)] * self.axis, numbers)

    def average_slices(
        self,
        states: Mapping[str, State],
        weights_of: WeightsOf,
        received: State,
        how: Aggregate = MEAN,
        bounded: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
    ) -> dict[str, State]:
        """Return the sites' models, with slices that only some sites own averaged over these sites.

        Args:
            states: models by site; not changed.
            weights_of: function that returns the weights by site of a tensor.
            received: model that the sites received.
            how: how the slices of the owners are combined.
            bounded: function that limits the owners' weights, which sum to 1.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {site: {} for site in states}
        slices = group_by_key(
            (frozenset(states).difference(sites), number) for number, sites in enumerate(self.lacking)
        )
        slices.pop(frozenset(states), None)
        for name in [name for name in self.tensors if name in received] if slices else ():
            copies, weights = {site: state[name].clone() for site, state in states.items()}, weights_of(name)
            for owners, numbers in slices.items():
                place = self.place(numbers)
                shares = {site: weights[site] for site in sorted(owners) if weights.get(site, 0) > 0}
                value, total = received[name][place], sum(shares.values())
                if shares:
                    part = {site: {name: copies[site][place]} for site in shares}
                    even = bounded({site: share / total for site, share in shares.items()})
                    value = weighted_average(part, even, how=how)[name]
                for site in copies:
                    copies[site][place] = value.to(copies[site].dtype)
            for site, tensor in copies.items():
                parts[site][name] = tensor
        return {site: ChainMap(parts[site], state) if parts[site] else state for site, state in states.items()}  # type: ignore[arg-type]
