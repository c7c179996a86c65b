r"""Define SCAFFOLD, whose control variates correct each site's gradients by their difference to those of all sites.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, option II.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Literal

import torch

from fairflare.base.settings import settings
from fairflare.core.weighting import uniform_weights
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import fitting, keep
from fairflare.methods.base.reports import NO_IMAGES, Field
from fairflare.methods.base.rule import RoundInputs, SendsBeside, State, SumOfKept, Weighing, read_reports
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun

CONTROL = "control"  # name under which a site stores its control variate


@dataclass
class _Controls:
    """Store one task's received parameters, c - c_k and c_k by name, and the sum of its steps' learning rates."""

    moving: ClassVar = ("rate_sum",)
    received: dict[str, torch.Tensor]
    push: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor]
    rate_sum: float = 0.0


@settings
class ControlledTraining(LocalTraining):
    r"""Train with corrected gradients, and renew the site's control variate (SCAFFOLD, option II).

    .. math:: y \leftarrow y - \eta (g - c_k + c), \qquad c_k \leftarrow c_k - c + \frac{x - y}{\sum \eta}

    over the trained parameters that are sent, with x the received and y the trained model, and the sum of the learning
    rates of all steps of the round. c_k stays at the site and begins with 0. Weight decay and the clipping of gradients
    act on g, so that c_k contains them. If the site has hidden records, the further steps that these cause get no
    correction and are not in the sum.

    Args:
        optimizer: always plain SGD; with another (x - y) over the rates would be no mean gradient.
        momentum: always 0, for the same reason.
    """

    optimizer: Literal["sgd"] = "sgd"
    momentum: Literal[0] = 0

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        received = self.home.copy_sent(model)
        control = fitting(run, CONTROL, received)
        push = {n: run.beside[n].to(x) - control.get(n, 0) for n, x in received.items() if n in run.beside}
        run.own = _Controls(received, push, control)

    def step(
        self, run: SiteRun, model: torch.nn.Module, optimizer: torch.optim.Optimizer, closure: Any
    ) -> torch.Tensor:
        loss: torch.Tensor = closure()
        kinds = {(group.get("momentum"), group["lr"]) for group in optimizer.param_groups}
        # With another optimizer, (x - y) over the sum of the rates would not be the mean gradient.
        if not isinstance(optimizer, torch.optim.SGD) or len(kinds) > 1 or min(kinds)[0]:
            raise SiteError(
                f"site {run.site!r}: {type(optimizer).__name__} with (momentum, rate) {sorted(kinds)} in its script; "
                "for SCAFFOLD use torch.optim.SGD without momentum and with one rate"
            )
        if not run.untold:  # else c would grow from round to round, as the server divides by fewer steps
            for name, push in run.own.push.items():
                parameter = model.get_parameter(name)  # also one without a gradient here, whose c_k would else drift
                parameter.grad = push.clone() if parameter.grad is None else parameter.grad.add_(push)
            run.own.rate_sum += optimizer.param_groups[0]["lr"]
        optimizer.step()
        return loss

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        memory, trained = run.own, dict(model.named_parameters())
        if memory.rate_sum:  # without a step c_k stays what it was
            slopes = {name: (x - trained[name].detach()) / memory.rate_sum for name, x in memory.received.items()}
            control = {name: (slope - memory.push.get(name, 0)).cpu() for name, slope in slopes.items()}
            keep(run, CONTROL, memory.kept, control)
        return {"rate_sum": memory.rate_sum}


@settings
class Scaffold(SumOfKept, SendsBeside):
    r"""Average the sites' models, each site counting alike, and move the common control variate c (SCAFFOLD).

    .. math:: w \leftarrow w^r + \frac{1}{|P|} \sum_P \Delta_k, \qquad
              c \leftarrow c + \frac1N \sum_P (c_k^+ - c_k)
                = c - \frac1N \sum_P \Big(c + \frac{\Delta_k}{\sum \eta}\Big)

    with P the sites of the round and N all sites seen so far. The second form needs no c_k: a site sends the sum of its
    rates in place of a second model. Batch norm's statistics are a plain mean and have no c.

    Source:
        Karimireddy et al., Algorithm 1, with a global step of 1.
    """

    report_fields = (
        Field(
            "rate_sum", low=1e-9, high=1e9,
            doc="the sum of the learning rates of the round's steps; with the update it gives the mean gradient",
            reveals="with the job's learning rate and batch size the number of images", of=NO_IMAGES,
        ),
    )  # fmt: skip
    beside_doc: ClassVar[str] = "the common control variate: for each trained number its mean gradient, of all sites"
    only_mean: ClassVar[str] = "its control variate is a sum of all sites' changes"
    reads_models: ClassVar[str] = "its control variate divides each site's update by that site's rates"

    _control = Saved["dict[str, torch.Tensor]"](dict)

    def beside(self) -> State:
        return dict(self._control)

    def weigh(self, inputs: RoundInputs) -> Weighing:
        reported = read_reports(inputs, "rate_sum")
        # A falsely small sum would make the change of c large; a falsely large one makes it small.
        least = inputs.moderated(
            {site: min(rate, median(reported.values())) for site, rate in reported.items()}, "rate_sum"
        )
        rates = {site: max(rate, reported[site]) for site, rate in least.items()}
        shares = {site: inputs.shares.get(site, 1.0) * reported[site] / rate for site, rate in rates.items()}
        (known, present), start = self.count(inputs, shares), inputs.received or {}  # stock controllers are refused
        for name in (n for n in inputs.states[inputs.sites[0]] if n in inputs.parameters):
            received = start[name].double()
            before = self._control.get(name, torch.zeros_like(received)).double()
            gone = sum(shares[s] * before + (inputs.states[s][name].double() - received) / r for s, r in rates.items())
            self._control[name] = (before * known - gone / len(inputs.sites) * present).to(start[name].dtype)
        return Weighing(sites=uniform_weights(inputs.sites))


METHODS = [
    Method(
        name="scaffold",
        title="SCAFFOLD",
        summary="control: gradients are corrected by control variates against the sites' drift; fair to nobody",
        rule=Scaffold,
        training=ControlledTraining,
        group="control",
        source="Karimireddy et al., ICML 2020",
        site={"learning_rate": 0.1},
        keeps=("optimizer", "momentum", "learning_rate"),
    )
]
