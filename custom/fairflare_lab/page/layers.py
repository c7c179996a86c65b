"""What is kept of the values by layer and site, of which a long run has millions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Mean:
    """Sums by key, to be divided at the end."""

    sums: dict[Any, float] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=dict)

    def add(self, key: Any, value: float) -> None:
        self.sums[key] = self.sums.get(key, 0.0) + value
        self.counts[key] = self.counts.get(key, 0) + 1

    def of(self, key: Any) -> float:
        """NaN where nothing was added."""
        return self.sums[key] / self.counts[key] if key in self.sums else math.nan


@dataclass(frozen=True)
class Largest:
    """The largest weight of a round, whose it is and in which layer (empty: of the whole model)."""

    value: float
    site: str
    layer: str = ""


class LayerSums:
    """Adds the rounds of one run.

    Attributes:
        layers: in the order in which they came.
        weight: mean by (layer, site) over the rounds.
        unlike: 1 - similarity, mean by (round, site) over the layers.
        largest: by round.
    """

    def __init__(self) -> None:
        self.layers: dict[str, None] = {}
        self.weight = Mean()
        self.unlike = Mean()
        self.largest: dict[int, Largest] = {}

    def add_round(self, number: int, layers: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> None:
        """A round's ``layers``."""
        for layer, by_site in layers.items():
            for site, values in by_site.items():
                weight, unlike = values.get("weight"), values.get("dissimilarity")
                if weight is not None:
                    self.layers[layer] = None
                    self.weight.add((layer, site), weight)
                    before = self.largest.get(number)
                    if before is None or weight > before.value:
                        self.largest[number] = Largest(weight, site, layer)
                if unlike is not None:
                    self.unlike.add((number, site), unlike)

    def weights(self, layers: Sequence[str], sites: Sequence[str]) -> np.ndarray:
        """Mean weight, ``(layers, sites)``, NaN where there is none."""
        return np.array([[self.weight.of((layer, site)) for site in sites] for layer in layers], dtype=float)
