"""Store what a run knows of its network and its sites before its first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairflare.core.aggregation.low_rank import Products
from fairflare.core.aggregation.partial_slices import PartialSlices
from fairflare.core.statistics.footing import Footing
from fairflare.federation.plan.site_training import AtHome


@dataclass(frozen=True)
class RunContext:
    """Store what the server has learned of the network and from the check; the defaults stand for knowing nothing.

    Attributes:
        reported: numbers that each site reported: images by split, and number of ``groups`` of people.
        facts: all facts that each site reported about its data.
        footing: compares sites that annotate different structures.
        rows, columns: average output rows over the sites that annotate them, and input columns over those that have the
            channel.
        parameters: names of the trained parameters; ``None`` if the model is not known: dtypes and names of tensors
            then decide.
        frozen: names of tensors that no training changes.
        products: averages products of low-rank factors; ``None`` to average each factor.
        at_home: which tensors stay at the sites.
    """

    reported: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    footing: Footing = field(default_factory=lambda: Footing({}))
    rows: PartialSlices = field(default_factory=PartialSlices)
    columns: PartialSlices = field(default_factory=PartialSlices)
    parameters: frozenset[str] | None = None
    frozen: frozenset[str] = frozenset()
    products: Products | None = None
    at_home: AtHome = field(default_factory=AtHome)


UNKNOWN = RunContext()  # of a server that knows neither the network nor facts about the sites
