"""Define how a rule weights the sites of a round: by samples, equally, or by FedMRL's self-organizing map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from fairflare.base.settings import (
    Part,
    field_names,
    settings,
)
from fairflare.core.som import MapSettings, SelfOrganizingMap
from fairflare.core.weighting import uniform_weights
from fairflare.exchange.tensor_folder import KeptTensors
from fairflare.methods.base.rule import RoundInputs, sample_weights
from fairflare.methods.base.saved import KeepsState


class Weighting(KeepsState, Part, ABC):
    """Compute a weight for every site of a round; weights are ``>= 0`` and sum to 1.

    Attributes:
        needs_received: whether the weights depend on the model that the sites received.
    """

    needs_received: ClassVar[bool] = False

    @abstractmethod
    def weigh(self, inputs: RoundInputs) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the weight of each site, and details of the computation to record (JSON-like)."""


@settings
class BySamples(Weighting):
    """Weight sites in proportion to their number of training samples, as FedAvg does."""

    kind: ClassVar[str] = "samples"

    def weigh(self, inputs: RoundInputs) -> tuple[dict[str, float], dict[str, Any]]:
        return sample_weights(inputs), {}


@settings
class Uniform(Weighting):
    """Give all sites the same aggregation weight."""

    kind: ClassVar[str] = "uniform"

    def weigh(self, inputs: RoundInputs) -> tuple[dict[str, float], dict[str, Any]]:
        return uniform_weights(inputs.sites), {}


@settings
class BySom(MapSettings, Weighting):
    """Weight sites by a self-organizing map of their models; see :class:`fairflare.core.som.SelfOrganizingMap`.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.3.
    """

    kind: ClassVar[str] = "som"
    needs_received: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._map = SelfOrganizingMap(**{name: getattr(self, name) for name in field_names(type(self))})
        self._neurons = KeptTensors("som", "the map's neurons after {} round(s) are")  # key: number of finished rounds

    def weigh(self, inputs: RoundInputs) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the sites' weights from the map, and details of the map; a model that is not finite has weight 0.

        Raises:
            RuntimeError: the received model is unknown, or the stored neurons are missing.
            ValueError: :meth:`SelfOrganizingMap.step` refuses the models.
        """
        if inputs.received is None:
            raise RuntimeError("the map needs the model that the sites received")
        self._map.seed = inputs.seed
        states = {site: inputs.changing(inputs.states[site]) for site in inputs.sites}
        rounds = self._map.rounds
        before = self._open_store().load(rounds) if rounds else None
        placed = self._map.step(
            states, inputs.changing(inputs.received), kept=before, keep=self._open_store().begin(rounds + 1)
        )
        details = {"bmu": {site: list(cell) for site, cell in placed.bmu.items()}, "sigma": placed.sigma}
        return {site: placed.weights.get(site, 0.0) for site in inputs.sites}, {"som": details}

    def _open_store(self) -> KeptTensors:
        self._neurons.memory_folder = self.memory_folder
        return self._neurons

    def state_dict(self) -> dict[str, Any]:
        return {"map": self._map.state_dict(), "neurons": self._open_store().travelling(self._map.rounds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the map; raise ``ValueError`` when the state belongs to a map with other settings."""
        self._map.seed = int(state["map"]["settings"]["seed"])
        self._map.load_state_dict(state["map"])
        self._open_store().take_back(self._map.rounds, state["neurons"])
