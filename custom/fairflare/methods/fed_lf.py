r"""Define FedLF: each layer moves along the shortest mean of the sites' changes and of one that equalises the losses.

Pan et al., "FedLF: Layer-Wise Fair Federated Learning", AAAI 2024, and the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch

from fairflare.base.settings import settings
from fairflare.core.aggregation.fair_rules import finite_or_mean
from fairflare.core.aggregation.min_norm import EQUAL, evening, fair_factors
from fairflare.core.states import Made, State
from fairflare.core.weighting import normalise, uniform_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.rule import RoundInputs, Rule, SiteWeights, Weighing, read_reports
from fairflare.methods.base.saved import Own
from fairflare.methods.parts.probes import PROBE_LOSS, LossProbe


@settings
class FedLF(Rule):
    r"""Move each layer along the shortest weighted mean of the sites' changes and of one that equalises losses (FedLF).

    .. math:: d_l = \arg\min \lVert d \rVert, \quad d \in \mathrm{conv}\{\tilde\Delta_{1l}, \dots, \tilde\Delta_{Kl},
              \tilde\phi_l\}, \quad \phi_l = \sum_k h_k \tilde\Delta_{kl}, \qquad
              w \leftarrow w + d\, \lVert \bar\Delta \rVert / \lVert d \rVert

    with a tilde for "scaled to the layer's mean length" and h of :func:`~fairflare.core.aggregation.min_norm.evening`.
    The whole step is as long as the plain mean change, unless the changes cancel. Some factors of the sites' changes
    may be negative. Batch norm's statistics are a plain mean.

    Source:
        Pan et al., section 4, and the authors' code.
    """

    report_fields = (PROBE_LOSS,)
    reads_models: ClassVar[str] = "it compares each site's update with those of the others"
    only_mean: ClassVar[str] = "it moves along a direction of its own"
    weighs: ClassVar[bool] = False  # the losses serve the direction; the weights are those of the norms' statistics

    _direction = Own["partial[torch.Tensor] | None"](lambda: None)

    def weigh(self, inputs: RoundInputs) -> Weighing:
        losses = inputs.moderated(finite_or_mean(read_reports(inputs, "probe_loss")), "probe_loss")
        fair = evening(torch.tensor([losses[site] for site in inputs.sites], dtype=torch.float64))
        layers = inputs.gram(self)
        by_layer = {layer: fair_factors(products, fair) for layer, products in layers.items()}
        square = torch.stack([by_layer[layer] @ layers[layer] @ by_layer[layer] for layer in layers]).sum()
        whole = torch.stack([*layers.values()]).sum(0)  # its mean is the squared length of the plain mean change
        scale = (whole.mean() / square).sqrt() if square > EQUAL**2 * whole.diagonal().max() else 1.0
        factors = {layer: bound_factors(inputs, scale * factor) for layer, factor in by_layer.items()}
        self._direction = partial(direction, inputs, inputs.start(self), factors)
        return Weighing(sites=uniform_weights(inputs.sites), details={"factors": factors})

    def move(self, change: State) -> State:
        chosen, self._direction = self._direction, None  # it refers to the sites' models, which may be in memory
        return change if chosen is None else Made(change, chosen)


def bound_factors(inputs: RoundInputs, factors: torch.Tensor) -> SiteWeights:
    """Return a layer's factors by site; none exceeds, in size, a site's largest allowed share of all factors."""
    sizes = inputs.bounded(normalise(dict(zip(inputs.sites, factors.abs().tolist(), strict=True))))
    total = float(factors.abs().sum())
    return {s: total * sizes[s] * (1 if f >= 0 else -1) for s, f in zip(inputs.sites, factors.tolist(), strict=True)}


def direction(inputs: RoundInputs, start: State | None, factors: Mapping[str, SiteWeights], name: str) -> torch.Tensor:
    """Return the sum of the sites' changes of a tensor, with the factors of its layer."""
    total = torch.zeros((), dtype=torch.float64)
    for site, factor in factors[inputs.owner[name]].items():
        local = inputs.states[site][name].double()
        total = total + factor * (local if start is None else local - start[name].double())
    return total


METHODS = [
    Method(
        name="fed_lf",
        title="FedLF",
        summary="layer by layer the shortest mean of the sites' changes and of one that evens losses",
        rule=FedLF,
        training=LossProbe,
        source="Pan et al., AAAI 2024",
        num_rounds=15,
        keeps=("local_epochs",),  # one: its direction is made of gradients: long local training leaves it behind
    )
]
