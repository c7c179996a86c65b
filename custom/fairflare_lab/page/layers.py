"""What is kept of the values by layer and site, of which a long run has millions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

Sums: TypeAlias = dict[tuple[Any, str], tuple[float, int]]  # by (layer or round, site) a sum and of how many


class LayerSums:
    """Adds the rounds of one run.

    Attributes:
        weight: by (layer, site), over the rounds.
        unlike: 1 - similarity by (round, site), over the layers.
        largest: by round the largest weight, whose it is, and in which layer.
    """

    def __init__(self) -> None:
        self.weight: Sums = defaultdict(lambda: (0.0, 0))
        self.unlike: Sums = defaultdict(lambda: (0.0, 0))
        self.largest: dict[int, tuple[float, str, str]] = {}

    def add_round(self, number: int, layers: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> None:
        """Add a round's ``layers``."""
        for layer, by_site in layers.items():
            for site, values in by_site.items():
                weight, unlike = values.get("weight"), values.get("dissimilarity")
                for sums, key, value in ((self.weight, (layer, site), weight), (self.unlike, (number, site), unlike)):
                    if value is not None:
                        total, count = sums[key]
                        sums[key] = (total + value, count + 1)
                if weight is not None and (number not in self.largest or weight > self.largest[number][0]):
                    self.largest[number] = (weight, site, layer)


def mean(sums: Sums, key: tuple[Any, str]) -> float:
    """Divide one of the sums; NaN where nothing was added."""
    total, count = sums.get(key, (math.nan, 1))
    return total / count
