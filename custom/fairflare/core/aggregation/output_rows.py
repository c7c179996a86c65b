"""Average each row of an output layer over the sites that annotate the row's structure.

A site that does not annotate a structure has no loss for it, and sends the structure's row as it received it. In an
average over all sites such a row would take only a part of the step that its annotators made.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairflare.base.checks import gathered
from fairflare.core.aggregation.tensor_mean import MEAN, Aggregate
from fairflare.core.states import State, WeightsOf, weighted_average

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OutputRows:
    r"""Average each output row over the sites that annotate its structure, and give every site the result.

    .. math:: w_s = \sum_{k \in K_s} p_k w_{k,s} \Big/ \sum_{k \in K_s} p_k

    :math:`K_s` are the sites of the round that annotate structure s, :math:`p_k` is a site's weight for the tensor. A
    row keeps its received value if no site annotates it, or only sites of weight 0. As all sites then have the same
    row, any average of them (a median, too) is this row, and a server's optimizer is given its change.

    Attributes:
        tensors: names of the output layer's weight and bias, which have a row for each structure; empty if unknown.
        silent: for each row the sites that do not annotate its structure.
    """

    tensors: Collection[str] = ()
    silent: tuple[frozenset[str], ...] = ()

    def of_annotators(
        self,
        states: Mapping[str, State],
        weights_of: WeightsOf,
        received: State,
        how: Aggregate = MEAN,
        bounded: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
    ) -> dict[str, State]:
        """Return the sites' models, with rows of structures that only some sites annotate averaged over these sites.

        Args:
            states: models by site; not changed.
            weights_of: function that returns the weights by site of a tensor.
            received: model that the sites received.
            how: how the rows of the annotating sites are combined.
            bounded: function that limits the annotating sites' weights, which sum to 1.
        """
        made: dict[str, dict[str, torch.Tensor]] = {site: {} for site in states}
        rows = gathered((frozenset(states).difference(silent), number) for number, silent in enumerate(self.silent))
        rows.pop(frozenset(states), None)
        for name in [name for name in self.tensors if name in received] if rows else ():
            own, weights = {site: state[name].clone() for site, state in states.items()}, weights_of(name)
            for annotating, numbers in rows.items():
                shares = {site: weights[site] for site in sorted(annotating) if weights.get(site, 0) > 0}
                value, total = received[name][numbers], sum(shares.values())
                if shares:
                    part = {site: {name: own[site][numbers]} for site in shares}
                    even = bounded({site: share / total for site, share in shares.items()})
                    value = weighted_average(part, even, how=how)[name]
                for site in own:
                    own[site][numbers] = value.to(own[site].dtype)
            for site, tensor in own.items():
                made[site][name] = tensor
        return {site: ChainMap(made[site], state) if made[site] else state for site, state in states.items()}  # type: ignore[arg-type]
