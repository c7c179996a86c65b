"""The mean of the models of several rounds, kept on disk: never more than one tensor of it in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fairflare.base.settings import Flag, settings
from fairflare.exchange.tensor_folder import KeptTensors
from fairflare.methods.base.rule import RoundInputs, Rule, State


@settings
class ReportsMean(Rule):
    """Capability: a run may end with the mean of the models of all rounds; training goes on from the last one.

    Args:
        report_average: it does. Needs our own controller.
    """

    report_average: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._average = ModelAverage()

    def reported(self, state: State) -> State:
        """Return the model that the run ends with, tested and kept, from the one of the last round."""
        return self._kept().with_last(state) if self.report_average else state

    def take_in(self, inputs: RoundInputs) -> None:
        """Take the model that the last round made, when a rule weighs; the initial one is nobody's result.

        Raises:
            RuntimeError: under a stock controller nobody knows it.
        """
        if not self.report_average:
            return
        if inputs.received is None:
            raise RuntimeError(
                f"{type(self).__name__}'s average needs the models that the sites receive; run it with "
                "fairflare.flare.controller.RoundsController, or set report_average=False"
            )
        if inputs.current_round > 0:
            self._kept().add(inputs.received)

    def _kept(self) -> ModelAverage:
        self._average.memory_folder = self.memory_folder
        return self._average

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self._kept().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "average"})
        self._kept().load_state_dict(state["average"])


class ModelAverage(KeptTensors):
    """Mean of models, in float64, numbered by how many they are.

    Attributes:
        count: models so far.
    """

    def __init__(self) -> None:
        super().__init__("average", "the mean of {} model(s) is")
        self.count = 0

    def add(self, state: State) -> None:
        """Take a model in; integer tensors are left out."""
        before = self.at(self.count) if self.count else None
        keep = self.begin(self.count + 1)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                keep(name, self._mixed(before, name, tensor))
        self.count += 1

    def with_last(self, state: State) -> dict[str, torch.Tensor]:
        """Return the mean of the models so far and this one, in its types; integer tensors are its own."""
        before = self.at(self.count) if self.count else None
        return {
            name: self._mixed(before, name, tensor).to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()
            for name, tensor in state.items()
        }

    def _mixed(self, before: State | None, name: str, tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().cpu().double()
        return wide.clone() if before is None else before[name] + (wide - before[name]) / (self.count + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and, without a folder, tensors."""
        return {"count": self.count, "mean": self.travelling(self.count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.count = int(state["count"])
        self.take_back(self.count, state["mean"])
