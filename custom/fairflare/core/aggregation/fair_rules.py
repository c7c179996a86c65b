"""Compute the weighting baselines: FedNova, q-FedAvg, agnostic federated learning, FairFed, FedCE, FlexFair.

The functions are pure: they take dicts by site, compute in float64, return the sites in sorted order and change no
argument.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch

from fairflare.base import checks
from fairflare.core.states import State
from fairflare.core.weighting import POWER_FLOOR, normalise, power_weights, update_share

K = TypeVar("K", bound=Hashable)
LEAST_VARIANCE = 1e-5  # lower bound of a batch norm's variance after one model was subtracted from another

# ------------------------------------------------------------------------------------------------ shared by several


def finite_or_mean(values: Mapping[str, float], before: Mapping[str, float] | None = None) -> dict[str, float]:
    """Replace each value that is not finite by the site's value in ``before``, or else by the mean of the known values.

    Returns:
        The values by site, sorted; 1 for all sites if no value is known.
    """
    known = {**(before or {}), **{site: value for site, value in values.items() if math.isfinite(value)}}
    finite = [known[site] for site in sorted(values) if site in known]
    mean = statistics.fmean(finite) if finite else 1.0
    return {site: float(known.get(site, mean)) for site in sorted(values)}


# ------------------------------------------------------------------------------------------------ FedNova


@dataclass
class AccumulatedSteps:
    r"""Compute the total weight of a local training's gradients in its update: FedNova's norm of a.

    .. math:: w_k - w^r = -\eta \sum_s a_s g_s, \quad \lVert a \rVert_1 = \sum_s a_s

    The norm is found by simulating the optimizer's steps with a gradient of 1. For plain SGD it is the number of steps;
    with momentum (rho, T steps) :math:`[T - \rho (1 - \rho^T) / (1 - \rho)] / (1 - \rho)`; with a proximal term
    :math:`[1 - (1 - \eta \mu)^T] / (\eta \mu)`; with both, the simulation follows the optimizer.

    Source:
        Wang et al., NeurIPS 2020, section 3 and appendix; their code adds up momentum and proximal term one after the
        other if both are on.
    """

    total: float = 0.0
    velocity: float = 0.0

    def add(self, *, momentum: float = 0.0, nesterov: bool = False, pull: float = 0.0) -> None:
        """Add the weight of one optimizer step's gradient to :attr:`total`.

        Args:
            momentum: rho of SGD.
            nesterov: whether the momentum is Nesterov's, as in PyTorch's SGD.
            pull: learning rate times the strength mu of a proximal term.
        """
        push = 1.0 - pull * self.total
        self.velocity = momentum * self.velocity + push
        self.total += push + momentum * self.velocity if nesterov else self.velocity


def most_accumulated(num_steps: int) -> float:
    """Return the largest norm of FedNova's vector a that this number of steps can reach (Nesterov momentum 1)."""
    return num_steps * (num_steps + 3) / 2


def nova_weights(
    shares: Mapping[str, float], norms: Mapping[str, float], steps: Mapping[str, float] | None = None
) -> tuple[dict[str, float], float]:
    r"""Return FedNova's weights, for updates divided by their norms of a, and the factor of the averaged change.

    .. math:: w \leftarrow w^r + \tau_{eff} \sum_k p_k \frac{w_k - w^r}{\lVert a_k \rVert_1}, \quad
              \tau_{eff} = \sum_k p_k \lVert a_k \rVert_1

    Args:
        shares: share p of each site in the average, by site, sum 1.
        norms: norm :math:`\lVert a_k \rVert_1` by site, ``> 0``.
        steps: number of steps by site, used in place of the norms in :math:`\tau_{eff}`, as by the authors with a
            proximal term; None for the norms.

    Returns:
        Weights in proportion to p / norm, sum 1; and the factor of the average change, 1 if all norms are equal.
    """
    norm_of = checks.numbers("norm", norms, above=0)
    given = checks.numbers("number of steps", steps or norm_of, above=0)
    if len(set(norm_of.values())) == 1 and given == norm_of:
        return dict(sorted(checks.shares(shares).items())), 1.0
    ratios = {site: shares[site] / norm_of[site] for site in sorted(norm_of)}
    effective = math.fsum(shares[site] * given[site] for site in sorted(norm_of))
    return normalise(ratios), effective * math.fsum(ratios.values())


# ------------------------------------------------------------------------------------------------ q-FedAvg


def q_bend(losses: Mapping[str, float], squares: Mapping[str, float], q: float) -> float:
    r"""Return b of :func:`q_step`: the weighted mean of each site's squared norm of the change divided by its loss.

    .. math:: b = \sum_k a_k \lVert w_k - w^r \rVert^2 / F_k, \quad a_k = F_k^q / \sum_j F_j^q

    Args:
        losses: F, loss of each site, finite; a loss below 1e-10 counts as 1e-10.
        squares: squared norm of the change of each site; may be infinite.
        q: exponent of the losses, ``>= 0``.

    Returns:
        b, ``>= 0``; may be infinite.
    """
    shares = power_weights(losses, q)
    return math.fsum(share * squares[site] / max(losses[site], POWER_FLOOR) for site, share in shares.items() if share)


def q_step(losses: Mapping[str, float], squares: Mapping[str, float], q: float, lipschitz: float) -> float:
    r"""Return the length of q-FedAvg's step, as a factor of the average change with weights in proportion to F^q.

    .. math:: \frac{L \sum F_k^q}{\sum_k (q F_k^{q-1} \lVert L (w^r - w_k) \rVert^2 + L F_k^q)}
              = \frac{1}{1 + q L b}

    with b of :func:`q_bend`.

    Args:
        losses: F, loss of each site, finite; a loss below 1e-10 counts as 1e-10.
        squares: squared norm of the change of each site; may be infinite.
        q: exponent of the losses, ``>= 0``.
        lipschitz: L, Lipschitz constant of the loss's gradient, ``> 0``.

    Returns:
        The factor, in [0, 1]; 1 for q = 0.

    Source:
        Li et al., ICLR 2020, Algorithm 2 and their code.
    """
    return 1.0 if q == 0 else 1.0 / (1.0 + q * lipschitz * q_bend(losses, squares, q))


# ------------------------------------------------------------------------------------------------ agnostic (AFL)


def simplex_projection(values: Mapping[str, float], mass: float = 1.0) -> dict[str, float]:
    """Return the nearest weights, in Euclidean distance, that are ``>= 0`` and sum to ``mass``.

    Args:
        values: number of each site, finite; not empty.
        mass: sum of the result, ``>= 0``.

    Source:
        Duchi et al., ICML 2008.
    """
    given = checks.numbers("value", checks.not_empty("the values to project", values))
    mass = float(checks.number("mass", mass, low=0))
    falling = sorted(given.values(), reverse=True)
    thetas = [
        (total - mass) / count
        for count, (value, total) in enumerate(zip(falling, accumulate(falling), strict=True), start=1)
        if value + (mass - total) / count > 0 or count == 1
    ]
    return {site: max(given[site] - thetas[-1], 0.0) for site in sorted(given)}


def add_newcomers(weights: Mapping[str, float], sites: Collection[str]) -> dict[str, float]:
    """Return AFL's weights with newcomers added: each gets the mean weight, then all weights are projected again.

    A newcomer is a site of ``sites`` that ``weights`` does not name.
    """
    new = sorted(set(sites) - set(weights))
    if not new:
        return dict(weights)
    entry = statistics.fmean(weights.values()) if weights else 1.0 / len(new)
    return simplex_projection({**weights, **dict.fromkeys(new, entry)})


# ------------------------------------------------------------------------------------------------ FairFed


def fair_fed_gaps(
    accuracies: Mapping[str, float], shares: Mapping[str, float], *, summed: bool = True
) -> dict[str, float]:
    r"""Return how far each site's accuracy is from the mean accuracy of all sites, weighted by their shares.

    .. math:: \Delta_k = \lvert \textstyle\sum_j p_j A_j - A_k \rvert

    Args:
        accuracies: A, accuracy of the received model at each site; a site whose accuracy is not finite has the mean
            gap.
        shares: p, weight of each site in the mean.
        summed: whether the gap is that of the formula above; False: :math:`\lvert p_k A_k - A_k \rvert`, as in FedISM's
            code, which lacks the sum.
    """
    finite = {site: accuracies[site] for site in sorted(accuracies) if math.isfinite(accuracies[site])}
    if not finite:
        return dict.fromkeys(sorted(accuracies), 0.0)
    common = math.fsum(w * finite[site] for site, w in normalise({site: shares[site] for site in finite}).items())
    gaps = {site: abs((common if summed else shares[site] * value) - value) for site, value in finite.items()}
    return finite_or_mean({site: gaps.get(site, math.nan) for site in accuracies})


def fair_fed_weights(memory: Mapping[str, float], gaps: Mapping[str, float], beta: float) -> dict[str, float]:
    r"""Return FairFed's weights: :math:`\omega_k \leftarrow \omega_k - \beta (\Delta_k - \bar\Delta)`, clipped at 0.

    Args:
        memory: omega, weight of each site, ``>= 0``; includes the sites of ``gaps``, the sum of whose weights is
            preserved.
        gaps: Delta by site, finite (:func:`fair_fed_gaps`).
        beta: step size, ``>= 0``.
    """
    mean = statistics.fmean(gaps[site] for site in sorted(gaps))
    return update_share(memory, {site: memory[site] - beta * (gaps[site] - mean) for site in sorted(gaps)})


# ------------------------------------------------------------------------------------------------ FedCE


def contributions(
    directions: Mapping[str, float], scores: Mapping[str, float], *, multiply: bool, floor: float
) -> dict[str, float]:
    """Return FedCE's coefficients: the normalised sum or product of two estimates of each site's contribution.

    Args:
        directions, scores: first and second estimate by site, finite, each normalised before they are combined; a lower
            value than ``floor`` counts as ``floor``.
        multiply: whether the estimates are multiplied; False: they are added.
        floor: least value of each estimate and of the sum or product, ``>= 0``.
    """

    def share_out(values: Mapping[str, float]) -> dict[str, float]:
        return normalise({site: max(value, floor) for site, value in values.items()})

    g, e = share_out(directions), share_out(scores)
    return share_out({site: g[site] * e[site] if multiply else g[site] + e[site] for site in sorted(g)})


def minus_state(received: State, local: State, coefficient: float) -> dict[str, torch.Tensor]:
    r"""Return the received model without the site's own model in it: :math:`(w^r - c_k w_k) / (1 - c_k)`.

    Integer tensors are the received ones; a ``running_var`` is at least 1e-5.

    Args:
        received, local: state dicts of the received model and of the site's own model, with the same names.
        coefficient: c_k, the site's weight in the received model, in [0, 1).
    """
    rest_by_name = {}
    for name, tensor in received.items():
        rest_by_name[name] = tensor.detach().clone()
        if tensor.is_floating_point():
            rest = (tensor.double() - coefficient * local[name].to(tensor.device).double()) / (1 - coefficient)
            rest_by_name[name].copy_(rest.clamp_(min=LEAST_VARIANCE) if name.endswith("running_var") else rest)
    return rest_by_name


# ------------------------------------------------------------------------------------------------ FlexFair


def variance_slopes(losses: Mapping[K, float], images: Mapping[K, float], total: float) -> dict[K, float]:
    r"""Return how much more an image of each party counts if the variance of the parties' losses is minimised too.

    A party is a site, or a group of people over all sites.

    .. math:: P = \frac{1}{A} \sum_a (L_a - M)^2, \quad M = \frac{\sum_a n_a L_a}{\sum_a n_a}, \quad
              \nabla P = \frac{1}{N} \sum_i s_{a(i)} \nabla \ell_i

    with :math:`s_a = \frac{2 N}{A} [(L_a - M) / n_a - \sum_b (L_b - M) / \sum_b n_b]`. A federation that averages by
    samples, and in which each image i counts :math:`1 + \lambda s_{a(i)}` times, follows the gradient of the mean loss
    plus :math:`\lambda P` and needs no more than the sums :math:`n_a` and :math:`n_a L_a`.

    Args:
        losses: L, mean loss by party (site, or group of people over all sites), finite.
        images: n, number of images of each party, ``> 0``.
        total: N, number of images of all sites, ``> 0``.

    Returns:
        s by party; 0 for each if there are fewer than two parties.

    Source:
        Xing et al., Nature Communications 2025: the variance around the mean of all images, as in the authors' code,
        which differentiates it with the losses of all sites in one process.
    """
    if len(losses) < 2:
        return dict.fromkeys(losses, 0.0)
    known = math.fsum(images[a] for a in losses)
    mean = math.fsum(images[a] * losses[a] for a in losses) / known
    together = math.fsum(losses[a] - mean for a in losses) / known
    return {a: 2 * total / len(losses) * ((losses[a] - mean) / images[a] - together) for a in losses}
