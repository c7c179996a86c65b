r"""Define FedOpt and FedAvgM, in which the server moves the model by an optimizer, along the sites' mean change.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (FedAdam, FedYogi, FedAdagrad); Hsu et al., "Measuring the
Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019 (FedAvgM).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from fairflare.base.acting import OnlyWith, only_with
from fairflare.base.settings import BelowOne, Positive, settings
from fairflare.core.states import Made, State
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg


@settings
class FedAvgM(FedAvg):
    r"""Move the model by a sum of the sites' mean changes (FedAvgM): :math:`u \leftarrow \beta u + D`, :math:`w + u`.

    Args:
        beta: how much of u is kept, in [0, 1); 0: FedAvg.
    """

    beta: BelowOne = 0.9

    _velocity = Saved["dict[str, torch.Tensor]"](dict)

    def move(self, change: State) -> State:
        old = self._velocity
        self._velocity = {name: change[name] + (self.beta * old[name] if name in old else 0) for name in change}
        return self._velocity


@settings
class FedOpt(FedAvg):
    r"""Move the model by an adaptive optimizer along D, the sites' mean change (FedOpt).

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) D, \qquad w \leftarrow w + \eta \frac{m}{\sqrt v + \tau}

    with v beginning at :math:`\tau^2`, and no correction of a bias. Entries whose D was 0 in all rounds do not move.
    Batch norm's statistics are averaged.

    Args:
        form: ``"adam"``: :math:`v \leftarrow \beta_2 v + (1 - \beta_2) D^2`; ``"yogi"``:
            :math:`v \leftarrow v - (1 - \beta_2) D^2 \, \mathrm{sign}(v - D^2)`; ``"adagrad"``:
            :math:`v \leftarrow v + D^2`.
        server_rate: eta: about how far an entry with \|D\| much above tau moves in a round.
        beta1: decay rate of m; without a value 0.9, with ``"adagrad"`` 0.
        beta2: decay rate of v.
        server_tau: tau: entries with \|D\| far below it move by about :math:`\eta D / (2 \tau)`.

    Source:
        Reddi et al., Algorithm 2.
    """

    acts: ClassVar[dict[str, OnlyWith | None]] = {"beta2": only_with("form", "adam", "yogi")}

    form: Literal["adam", "yogi", "adagrad"] = "adam"
    server_rate: Positive = 0.01
    beta1: BelowOne | None = None
    beta2: BelowOne = 0.99
    server_tau: Positive = 1e-3

    _mean = Saved["dict[str, torch.Tensor]"](dict)
    _square = Saved["dict[str, torch.Tensor]"](dict)

    def move(self, change: State) -> State:
        beta1 = self.beta1 if self.beta1 is not None else 0.0 if self.form == "adagrad" else 0.9
        return Made(change, lambda name: self._step(name, change[name], beta1))

    def _step(self, name: str, change: torch.Tensor, beta1: float) -> torch.Tensor:
        new = change.square()
        old = self._square.get(name, torch.full_like(change, self.server_tau**2))
        if self.form == "adagrad":
            square = old + new
        elif self.form == "yogi":
            square = old - (1 - self.beta2) * new * (old - new).sign()
        else:
            square = self.beta2 * old + (1 - self.beta2) * new
        mean = beta1 * self._mean.get(name, 0.0) + (1 - beta1) * change
        self._mean[name], self._square[name] = mean, square
        return self.server_rate * mean / (square.sqrt() + self.server_tau)


JOB: dict[str, Any] = {"training": LocalTraining, "page": "fed_opt"}
METHODS = [
    Method(
        name="fed_opt",
        title="FedOpt",
        summary="control: the server moves by Adam, Yogi or Adagrad (form) along the mean change; fair to nobody",
        rule=FedOpt,
        group="control",
        source="Reddi et al., ICLR 2021",
        small={"beta1": 0.0, "server_rate": 0.02, "server_tau": 0.01},  # three rounds are too few for moments to begin
        **JOB,
    ),
    Method(
        name="fed_avg_m",
        title="FedAvgM",
        summary="control: FedAvg with momentum at the server; fair to nobody",
        rule=FedAvgM,
        group="control",
        source="Hsu et al., 2019",
        small={"beta": 0.5},
        **JOB,
    ),
]
