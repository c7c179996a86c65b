"""Release means over a site's patients with noise: clipped, by the Gaussian mechanism, from the site's secret draws."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fairflare.base.task import evaluating
from fairflare.methods.base.site_run import SiteRun
from fairflare.privacy.secret import SecretDraws
from fairflare.privacy.training import PrivateUnits

log = logging.getLogger(__name__)
T = TypeVar("T")
LOSS_BOUND = 4.0  # losses are clipped to it: the loss of guessing among 55 classes


def noisy_mean(
    values: Sequence[float], low: float, high: float, z: float, draws: Callable[[], SecretDraws] = SecretDraws
) -> float:
    """Return the mean of values, one of each unit, clipped to [low, high], with noise, and clipped again.

    A unit moves the mean by at most (high - low) / n; the noise's standard deviation is ``z`` times this. A value that
    is not a number counts as ``high``.
    """
    clipped = [high if math.isnan(value) else min(max(value, low), high) for value in values]
    noise = z * (high - low) / len(values) * float(draws().noise(1)[0])
    return min(max(math.fsum(clipped) / len(values) + noise, low), high)


def one_release(z: float, delta: float) -> float:
    """Return the exact epsilon of a number whose noise has a deviation of ``z`` times the most that a unit can move it.

    Source:
        Balle and Wang, ICML 2018, Theorem 8.
    """

    from scipy.optimize import brentq
    from scipy.stats import norm

    def overshoot(epsilon: float) -> float:
        tail = float(norm.logcdf(-1 / (2 * z) - epsilon * z))
        return float(norm.cdf(1 / (2 * z) - epsilon * z)) - math.exp(epsilon + tail) - delta

    most = 1 / (2 * z * z) + math.sqrt(2 * math.log(1 / delta)) / z  # bound by concentrated privacy, which is larger
    return 0.0 if overshoot(0.0) <= 0 else float(brentq(overshoot, 0.0, most))


def measure_units(run: SiteRun, units: PrivateUnits, split: str, measure: Callable[[Any], T], unread: T) -> list[T]:
    """Return what ``measure`` computes from each unit's (a patient's, say) batches; ``unread`` if one is unreadable."""
    measured = []
    for numbers in units.members:
        try:
            measured.append(measure(list(run.data.chosen(split, numbers, 0, False))))
        except ValueError as error:
            log.warning("site %s: a %s counts as one without a value: %s", run.site, units.kind, error)
            measured.append(unread)
    return measured


def losses_at(
    run: SiteRun, units: PrivateUnits, model: torch.nn.Module, received: Mapping[str, torch.Tensor], distance: float
) -> list[float]:
    """Return each unit's mean loss at a distance from the received model, in the direction opposite to the update.

    The update has its noise already, so a patient's influence on this direction is counted.

    Args:
        run: the server's task that this site performs, with the site's data.
        units: the training list's units.
        model: the trained network; it is unchanged after the call.
        received: the received model.
        distance: 2-norm over all trained tensors; 0: at the received model.
    """
    trained = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    way = {n: received[n].double() - trained[n].double() for n, p in model.named_parameters() if p.requires_grad}
    length = math.sqrt(sum(float(by.square().sum()) for by in way.values())) or 1.0

    def loss(batches: Any) -> float:
        return float(torch.cat([
            run.task.sample_losses(model(run.on_device(inputs)), run.on_device(targets)) for inputs, targets in batches
        ]).double().mean())  # fmt: skip

    moved = {name: (received[name] + by * (distance / length)).to(received[name].dtype) for name, by in way.items()}
    try:
        model.load_state_dict({**received, **moved})
        with torch.random.fork_rng(devices=[]), evaluating(model):
            return measure_units(run, units, "training", loss, math.nan)
    finally:
        model.load_state_dict(trained)
