from collections.abc import Mapping
from typing import Any

from fairflare.base.settings import BelowOne, settings
from fairflare.core.states import State
from fairflare.methods.base.catalog import Method
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.base.training import LocalTraining


@settings
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server: v <- beta v + delta, w <- w + v, delta the sites' mean change.

    Args:
        beta: how much of v is kept, in [0, 1); 0: FedAvg.
    """

    beta: BelowOne = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._velocity: State = {}

    def move(self, change: State) -> State:
        old = self._velocity
        self._velocity = {name: change[name] + (self.beta * old[name] if name in old else 0) for name in change}
        return self._velocity

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": dict(self._velocity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._velocity = dict(state["velocity"])


METHODS = [Method("fed_avg_m", "FedAvgM", "FedAvg with momentum at the server", FedAvgM, LocalTraining)]
