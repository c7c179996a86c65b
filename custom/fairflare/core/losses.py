r"""Compute local training losses of the methods: losses for imbalanced classes, and terms added to a loss.

The losses for imbalanced classes take logits (n, C) or (n, C, d1, ...), targets (n,) or (n, d1, ...) of class indices,
and ``counts``: the site's own number of training samples (pixels) of each class. They change the logits in training
only; a model trained with them is evaluated on its raw logits (LDAM: cosines). ``counts`` should be on the CPU, since
its few values are read in every call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from fairflare.base import checks

if TYPE_CHECKING:
    from torch import Tensor, nn

PRIOR_FLOOR = 1e-12  # least share of a class, log -27.63; the authors' log(0) becomes NaN if it is multiplied by 0
COUNT_FLOOR = 1e-8  # least class count in FedLC, as in the code used by Fed-MAS: an absent class has margin 100 tau
REDUCTIONS = ("mean", "sum", "none")

Counts: TypeAlias = "torch.Tensor | Sequence[float]"
Params: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[Tensor]"


# --- imbalanced classes -------------------------------------------------------------------------------------


def class_log_prior(counts: Counts, floor: float = PRIOR_FLOOR) -> Tensor:
    r"""Return the logarithm of the share of every class.

    .. math:: \log \max(\pi_c, \text{floor}), \quad \pi_c = n_c / \sum_j n_j

    Args:
        counts: (C,), samples of each class; finite, ``>= 0``, not all 0.
        floor: least share of a class, in (0, 1]; an absent class has this share.

    Returns:
        (C,) in float64 on the CPU, ``<= 0``.

    Raises:
        ValueError: counts or floor out of range.

    Source:
        Menon et al., ICLR 2021; FedISM's code has no floor, so that an absent class has minus infinity.

    Example:
        >>> class_log_prior([9, 1, 0]).tolist()
        [-0.10536051565782628, -2.3025850929940455, -27.631021115928547]
    """
    floor = checks.number("floor", floor, above=0, high=1)
    numbers = _class_counts(counts)
    return (numbers / numbers.sum()).clamp_min(floor).log()


def logit_adjusted_cross_entropy(
    logits: Tensor, targets: Tensor, counts: Counts, tau: float = 1.0, reduction: str = "mean"
) -> Tensor:
    r"""Return cross-entropy of logits shifted by the class prior (LA).

    .. math:: \ell(z, y) = CE(z + \tau \log \pi, y)

    Args:
        logits: (n, C, ...), floating point.
        targets: (n, ...), class indices.
        counts: (C,), as in :func:`class_log_prior`; an absent class has the floor 1e-12 for its share.
        tau: finite and ``>= 0``; 0 is plain cross-entropy, 1 FedISM's default.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        A scalar; (n, ...) for ``"none"``.

    Raises:
        ValueError: a shape, type or value out of range.

    Source:
        Menon et al., ICLR 2021, Eq. (10); FedISM's code.
    """
    _check_batch(logits, targets, reduction)
    log_prior = checks.number("tau", tau, low=0) * class_log_prior(counts)
    return torch.nn.functional.cross_entropy(logits + _shape_by_class(log_prior, logits), targets, reduction=reduction)


def balanced_softmax(logits: Tensor, targets: Tensor, counts: Counts, reduction: str = "mean") -> Tensor:
    r"""Return the balanced softmax loss (BSM): :func:`logit_adjusted_cross_entropy` with tau 1.

    .. math:: \ell(z, y) = -\log \frac{n_y e^{z_y}}{\sum_c n_c e^{z_c}}

    Arguments, result and errors are those of :func:`logit_adjusted_cross_entropy`. The loss of a sample of an absent
    class is large and finite.

    Source:
        Ren et al., NeurIPS 2020, Eq. (4). Fed-MAS adds 1e-12 to the shares; here they are floored at 1e-12.
    """
    return logit_adjusted_cross_entropy(logits, targets, counts, 1.0, reduction)


def ldam_margins(counts: Counts, max_margin: float = 0.5) -> Tensor:
    r"""Return margins of LDAM, larger for rarer classes.

    .. math:: m_c = m_{max}\, n_c^{-1/4} / \max_j n_j^{-1/4}

    the maximum being over the classes that are present; an absent class has 0.

    Args:
        counts: (C,), as in :func:`class_log_prior`.
        max_margin: margin of the rarest class, finite and ``>= 0``.

    Returns:
        (C,) in float64 on the CPU.

    Raises:
        ValueError: an argument out of range.

    Source:
        Cao et al., NeurIPS 2019, Eq. (13) and code.
    """
    numbers = _class_counts(counts)
    margins = torch.where(numbers > 0, numbers.clamp_min(torch.finfo(torch.float64).tiny) ** -0.25, 0.0)
    return checks.number("max_margin", max_margin, low=0) * margins / margins.max()


def drw_weights(
    counts: Counts, current_round: int, num_rounds: int, *, beta: float = 0.9999, start: float = 0.8
) -> Tensor:
    r"""Return the class weights of LDAM-DRW (deferred re-weighting): 1 at first, later larger for rarer classes.

    .. math:: v_c \propto (1 - \beta) / (1 - \beta^{n_c}), \quad \sum_c v_c = \text{number of present classes}

    Args:
        counts: (C,), as in :func:`class_log_prior`.
        current_round: ``0 <= current_round < num_rounds``.
        num_rounds: ``>= 1``.
        beta: constant of the effective number of samples, in [0, 1).
        start: share of the rounds with weights 1, in [0, 1]; at least the first round has them unless it is 0.

    Returns:
        (C,) in float64 on the CPU. Once the weights differ from 1, an absent class has 0.

    Raises:
        ValueError: an argument out of range.

    Source:
        Cao et al., NeurIPS 2019, section 3.3 and code; Cui et al., CVPR 2019 for the weights.
    """
    numbers = _class_counts(counts)
    checks.number("current_round", current_round, low=0, below=checks.whole("num_rounds", num_rounds), whole=True)
    beta = checks.number("beta", beta, low=0, below=1)
    start = checks.number("start", start, low=0, high=1)
    # Adding 1e-9 offsets rounding: 0.29 * 100 is 28.999999999999996, which floor would turn into 28.
    if current_round < max(math.floor(start * num_rounds + 1e-9), 1 if start > 0 else 0):
        return torch.ones_like(numbers)
    present = numbers > 0
    # expm1 computes 1 - beta^n without cancellation when beta is close to 1
    effective = -torch.expm1(numbers * math.log(beta)) if beta > 0 else present.double()
    weights = torch.where(present, 1.0 / torch.where(present, effective, 1.0), 0.0)
    return weights / weights.sum() * present.sum()


def ldam_loss(
    cosines: Tensor,
    targets: Tensor,
    counts: Counts,
    *,
    max_margin: float = 0.5,
    scale: float = 30.0,
    weights: Counts | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Return the label-distribution-aware margin loss (LDAM).

    .. math:: \ell(z, y) = v_y\, CE(s\,(z - m_y e_y), y)

    Args:
        cosines: (n, C, ...), output of a cosine classifier (normalised features and class vectors, no bias).
        targets: (n, ...), class indices.
        counts: (C,), as in :func:`class_log_prior`.
        max_margin: margin of the rarest class, as in :func:`ldam_margins`.
        scale: s, finite and ``> 0``.
        weights: v, (C,), finite and ``>= 0``, for instance :func:`drw_weights`; None for 1.
        reduction: ``"mean"`` (over the samples, divided by the sum of their weights, as in PyTorch; 0 when that is
            0), ``"sum"`` or ``"none"``.

    Returns:
        A scalar; (n, ...) for ``"none"``.

    Raises:
        ValueError: a shape, type or value out of range.

    Source:
        Cao et al., NeurIPS 2019, Eqs. (12)-(13) and code.
    """
    _check_batch(cosines, targets, reduction)
    scale = checks.number("scale", scale, above=0)
    margins = _shape_by_class(ldam_margins(counts, max_margin), cosines)
    lowered = cosines.scatter_add(1, targets.unsqueeze(1), -margins.flatten()[targets].unsqueeze(1))
    losses = torch.nn.functional.cross_entropy(scale * lowered, targets, reduction="none")
    if weights is None:
        return _reduce(losses, reduction)
    v = _shape_by_class(_class_counts(weights, "weights"), cosines, "weights").flatten()[targets]
    if reduction == "mean":
        return (v * losses).sum() / v.sum().clamp_min(torch.finfo(v.dtype).tiny)
    return _reduce(v * losses, reduction)


def fedlc_loss(
    logits: Tensor,
    targets: Tensor,
    counts: Counts,
    tau: float = 0.5,
    reduction: str = "mean",
    *,
    exclude_target: bool = False,
) -> Tensor:
    r"""Return cross-entropy of logits calibrated by class counts (FedLC).

    .. math:: z'_c = z_c - \tau\, n_c^{-1/4}, \quad \ell = -\log \left( e^{z'_y} / \sum_c e^{z'_c} \right)

    Args:
        logits: (n, C, ...), floating point.
        targets: (n, ...), class indices.
        counts: (C,), as in :func:`class_log_prior`; floored at 1e-8.
        tau: finite and ``>= 0``; 0 is plain cross-entropy, 0.5 Fed-MAS's setting.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        exclude_target: sum over the classes other than y, the pairwise form; the loss may then be negative. Needs
            two classes.

    Returns:
        A scalar; (n, ...) for ``"none"``.

    Raises:
        ValueError: a shape, type or value out of range.

    Source:
        Zhang et al., ICML 2022. Published re-implementations, and Fed-MAS, sum over all classes, our default.
    """
    _check_batch(logits, targets, reduction)
    margins = checks.number("tau", tau, low=0) * _class_counts(counts).clamp_min(COUNT_FLOOR) ** -0.25
    calibrated = logits - _shape_by_class(margins, logits)
    if not exclude_target:
        return torch.nn.functional.cross_entropy(calibrated, targets, reduction=reduction)
    checks.whole("the number of classes with exclude_target", logits.shape[1], low=2)
    index = targets.unsqueeze(1)
    others = calibrated.scatter(1, index, -math.inf)
    return _reduce(others.logsumexp(1) - calibrated.gather(1, index).squeeze(1), reduction)


# --- terms added to a loss ----------------------------------------------------------------------------------


def proximal_term(params: Params, reference: Params, mu: float) -> Tensor:
    r"""Return FedProx's pull towards the received model.

    .. math:: \frac\mu2 \sum_i \lVert w_i - w^r_i \rVert^2

    Args:
        params: the model in training (its parameters that require gradients count, buffers never do), a mapping of
            names to tensors, or tensors.
        reference: w^r, the received model: a model, or a mapping (a state dict, for instance) that has at least the
            names of ``params``, or as many tensors in the same order; no gradient.
        mu: strength of the pull, finite and ``>= 0``; 0 is FedAvg and costs nothing.

    Returns:
        A scalar on the device of the first parameter; 0 without parameters.

    Raises:
        ValueError: mu out of range, a name or tensor that is missing, or other shapes (names them).

    Source:
        Li et al., MLSys 2020, Eq. (2).

    Example:
        >>> float(proximal_term([torch.tensor([2.0, 1.0])], [torch.tensor([1.0, 1.0])], mu=0.1))
        0.05000000074505806
    """
    mu = checks.number("mu", mu, low=0)
    trained = _name_params(params, trainable=True)
    first = next(iter(trained.values()), torch.zeros(()))
    if mu == 0 or not trained:
        return torch.zeros((), dtype=first.dtype, device=first.device)
    received = _name_params(reference, trainable=False)
    if not isinstance(reference, torch.nn.Module | Mapping):
        checks.refuse({f"reference has {len(received)} tensors, params {len(trained)}": len(received) != len(trained)})
        received = dict(zip(trained, received.values(), strict=True))
    for name, w in trained.items():
        checks.refuse({f"reference has no parameter {name!r}": name not in received})
        checks.same_shape(f"parameter {name!r}", w, "the reference", received[name])
    pulled_to = [received[name].detach().to(w) for name, w in trained.items()]
    from fairflare.core.objectives.squared_distance import SquaredDistance

    squared: Tensor = SquaredDistance.apply(*trained.values(), *pulled_to)  # type: ignore[no-untyped-call]
    return 0.5 * mu * squared.to(first)


def fairness_term(loss: Tensor, global_loss: float | Tensor) -> Tensor:
    r"""Return FedMRL's pull of a site's loss towards the mean of all sites.

    .. math:: (F_h - \bar F)^2

    Its gradient is :math:`2 (F_h - \bar F) \nabla F_h`: a site that is better than the mean is pushed to be worse.

    Args:
        loss: F_h, a scalar, with gradient.
        global_loss: mean loss of the sites in the round before; no gradient.

    Returns:
        A scalar ``>= 0``.

    Raises:
        ValueError: not scalars.

    Source:
        Sahoo et al. (FedMRL), Eq. (3); spec MRL-1.
    """
    mean = torch.as_tensor(global_loss, dtype=loss.dtype, device=loss.device).detach()
    checks.shape("loss", loss)
    checks.shape("global_loss", mean)
    return (loss - mean).square()


def model_contrastive_loss(
    z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5, reduction: str = "mean"
) -> Tensor:
    r"""Return MOON's contrast of the local model's features: near the global model's, far from its own previous ones.

    .. math:: -\log \frac{e^{\cos(z, z_g) / T}}{e^{\cos(z, z_g) / T} + e^{\cos(z, z_p) / T}}

    Args:
        z: projections (or pooled features) of a batch's images by the model in training, (n, d).
        z_global: projections of the same images by the received global model in evaluation mode, (n, d); no gradient.
        z_previous: projections of the same images by the site's local model of its last round, in evaluation mode, (n,
            d); no gradient. In the first round they are those of the global model, and the loss is log 2.
        temperature: T, finite and ``> 0``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        A scalar; (n,) for ``"none"``.

    Raises:
        ValueError: shapes that differ or are not (n, d), temperature or reduction out of range.

    Source:
        Li et al., CVPR 2021, Eq. (3).
    """
    checks.shape("z", z, "n", "d")
    checks.same_shape("z_global", z_global, "z", z)
    checks.same_shape("z_previous", z_previous, "z", z)
    temperature = checks.number("temperature", temperature, above=0)
    checks.choice("reduction", reduction, REDUCTIONS)
    near = torch.nn.functional.cosine_similarity(z, z_global.detach(), dim=1)
    far = torch.nn.functional.cosine_similarity(z, z_previous.detach(), dim=1)
    return _reduce(-torch.nn.functional.logsigmoid((near - far) / temperature), reduction)


# ------------------------------------------------------------------------------------------------------------


def _class_counts(counts: Counts, name: str = "counts") -> Tensor:
    numbers = torch.as_tensor(counts, dtype=torch.float64, device="cpu").detach()
    checks.shape(name, numbers, "C")
    checks.numbers(name, dict(enumerate(numbers.tolist())), of="class", low=0)
    checks.refuse({f"{name} must not all be 0, got {numbers.tolist()}": not bool((numbers > 0).any())})
    return numbers


def _shape_by_class(values: Tensor, logits: Tensor, name: str = "counts") -> Tensor:
    """Return values by class, (C,), in the shape (C, 1, ...), to be added to logits (n, C, ...)."""
    checks.refuse({f"{name} are of {len(values)} classes, logits of {logits.shape[1]}": len(values) != logits.shape[1]})
    return values.to(logits).reshape(-1, *[1] * (logits.ndim - 2))


def _check_batch(logits: Tensor, targets: Tensor, reduction: str) -> None:
    checks.choice("reduction", reduction, REDUCTIONS)
    expected = (*logits.shape[:1], *logits.shape[2:])
    checks.refuse({
        f"logits must be floating point (n, C, ...), got {logits.dtype} {tuple(logits.shape)}":
            logits.ndim < 2 or not logits.is_floating_point(),
        f"targets must be class indices (int64), got {targets.dtype}": targets.dtype != torch.int64,
        f"targets must have shape {expected} with at least 1 sample for logits of shape {tuple(logits.shape)}, "
        f"got {tuple(targets.shape)}": targets.shape != expected or targets.numel() == 0,
    })  # fmt: skip
    if targets.device.type == "cpu":  # on a GPU the check would wait for the device, which checks indices by itself
        checks.indices("targets", targets, logits.shape[1])


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _name_params(params: Params, trainable: bool) -> dict[str, Tensor]:
    if isinstance(params, torch.nn.Module):
        return {name: p for name, p in params.named_parameters() if p.requires_grad or not trainable}
    return dict(params) if isinstance(params, Mapping) else {str(index): p for index, p in enumerate(params)}
