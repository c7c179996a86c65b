r"""Measure a model's sharpness on a data set: how much its loss grows at a small distance along its gradient.

All measures evaluate the loss at a distance rho from the weights, where the loss is larger: at
:math:`\theta + \epsilon`, :math:`\epsilon = \rho\, g / (\lVert g \rVert_2 + 10^{-12})`, with one norm over all
parameters. :class:`SAM` and :class:`GSAM` (:mod:`fairflare.core.objectives.sam`) do so for every mini-batch while a
site trains, :func:`sharpness` once for the whole local data set and the received model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fairflare.base import checks
from fairflare.base.task import evaluating
from fairflare.core.objectives import tensors
from fairflare.core.objectives.sam import GSAM as GSAM
from fairflare.core.objectives.sam import NORM_EPS
from fairflare.core.objectives.sam import SAM as SAM


class Sharpness(NamedTuple):
    """Store a model's mean loss and its sharpness over all samples of a data set.

    Attributes:
        loss: L0, mean loss at the model's weights.
        perturbed_loss: Lp, mean loss at the search distance from the weights, along the gradient.
        sharpness: S = Lp - L0, mean of the samples' differences; may be negative.
    """

    loss: float
    perturbed_loss: float
    sharpness: float


def sharpness(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    rho: float,
) -> Sharpness:
    r"""Return how much a model's mean loss on a data set grows at a distance rho along its gradient.

    .. math:: L_0 = \frac1n \sum_i \ell(f(x_i; \theta), y_i), \quad
              L_p = \frac1n \sum_i \ell(f(x_i; \theta + \epsilon), y_i), \quad S = L_p - L_0

    with :math:`\epsilon = \rho\, \nabla L_0 / (\lVert \nabla L_0 \rVert_2 + 10^{-12})` of the *whole* data set over
    all parameters that require gradients. The model is in evaluation mode (batch norms use and keep their running
    statistics), so the result does not depend on how the samples are divided into batches. Costs two forward
    passes and one backward pass.

    Losses are taken in the precision of the model and then summed and subtracted in float64. For a float32 model, S, a
    difference of nearly equal losses, has an absolute error of about 1e-7 of the loss per sample and less in the mean.

    Args:
        model: model to measure. Parameters, buffers, gradients, ``requires_grad``, training mode and torch's random
            state are restored bit by bit afterwards, also after an exception.
        loss_fn: ``loss_fn(outputs, targets)`` returns the losses of the samples, shape (n,), for instance
            ``torch.nn.CrossEntropyLoss(reduction="none")``. A scalar is taken for the mean over the batch; it
            is already rounded, so that S of a float32 model is then uncertain by about 6e-8 of the loss.
        batches: re-iterable of (inputs, targets), tensors or lists, tuples and dicts of tensors, the first one of
            inputs with the samples along its first dimension. Iterated twice, both times with the same random
            state of torch; the same samples must come, without random augmentation, in any order. Moved to the
            device of the parameters.
        rho: search distance, finite and ``>= 0``. 0: S is 0 and the second pass is left out.

    Returns:
        The three means. S is 0 if the gradient is 0 or no parameter requires a gradient. S is not finite if a loss is
        not finite. S and Lp are NaN if only the gradient is not finite.

    Raises:
        ValueError: rho out of range, an iterator in place of a re-iterable, no sample, another number of samples
            in the second pass, or losses of a wrong shape.

    Source:
        Wu et al. (FedISM+), Eqs. (9)-(11). Their code augments the images at random, which adds noise to S.
    """
    rho = checks.number("rho", rho, low=0)
    checks.refuse({
        "batches must be iterable twice, got an iterator (wrap it in a list)": isinstance(batches, Iterator),
    })  # fmt: skip
    params = [p for p in model.parameters() if p.requires_grad]
    with _evaluation(model):
        # Start from zeros, not from the first batch's gradients, which may share memory or be expanded.
        total = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params if rho > 0]
        before = _losses(model, loss_fn, batches, params, total)
        n = len(before)
        checks.not_empty("batches", before, of="sample")
        loss = float(before.mean())
        norm = tensors.norm(total) / n  # norm of the gradient of the mean loss
        if norm == 0:
            return Sharpness(loss, loss, loss - loss)  # the sharpness is 0, but NaN for a loss that is not finite
        if not math.isfinite(norm):
            return Sharpness(loss, math.nan, math.nan)
        weights = [p.detach().clone() for p in params]
        try:
            tensors.add(params, total, rho / (norm + NORM_EPS) / n)
            del total
            after = _losses(model, loss_fn, batches, params, [])
        finally:
            tensors.copy(params, weights)
    checks.refuse({f"batches gave {n} samples in the first pass and {len(after)} in the second": len(after) != n})
    return Sharpness(loss, float(after.mean()), float((after - before).mean()))


def search_distance(current_round: int, num_rounds: int, rho_max: float, tau: float) -> float:
    r"""Return the growing search distance of FedISM+.

    .. math:: \rho_r = \rho_{max}\, \left(\frac{r + 1}{T}\right)^\tau

    Args:
        current_round: r, ``0 <= r < num_rounds``.
        num_rounds: T, ``>= 1``.
        rho_max: distance of the last round, finite and ``>= 0``; 0.1 in the paper.
        tau: exponent, finite and ``> 0``; 0.5 in the paper. With a larger exponent the distance grows later.

    Raises:
        ValueError: an argument out of range.

    Source:
        Wu et al. (FedISM+), Eq. (12), with t = r + 1.

    Example:
        >>> round(search_distance(74, 300, 0.1, 0.5), 12)
        0.05
    """
    checks.number("current_round", current_round, low=0, below=checks.whole("num_rounds", num_rounds), whole=True)
    rho_max = checks.number("rho_max", rho_max, low=0)
    tau = checks.number("tau", tau, above=0)
    return float(rho_max * ((current_round + 1) / num_rounds) ** tau)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients; the exit restores the mode of every module and all buffers."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with evaluating(model):
        try:
            yield
        finally:
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)


def _losses(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    params: Sequence[Tensor],
    total: Sequence[Tensor],
) -> Tensor:
    """Return the losses of all samples, float64 on the CPU, and add the gradient of their sum to ``total``.

    With an empty ``total`` no gradient is computed.
    """
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    collected = [torch.zeros(0, dtype=torch.float64)]
    with torch.random.fork_rng(gpus), torch.set_grad_enabled(bool(total)):
        for inputs, targets in batches:
            moved, wanted = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (inputs, targets))
            sizes = [len(value) for value in tree_leaves(moved) if isinstance(value, torch.Tensor) and value.ndim]
            checks.refuse({
                f"inputs of a batch must hold a tensor of samples, got {type(inputs).__name__}": not sizes,
            })  # fmt: skip
            losses, size = loss_fn(model(moved), wanted), sizes[0]
            # The batch's mean loss counts as the loss of each sample.
            losses = losses.expand(size) if losses.ndim == 0 else losses
            checks.refuse({
                f"loss_fn must return {size} losses, shape ({size},), or their mean, got {tuple(losses.shape)}":
                    losses.shape != (size,),
            })  # fmt: skip
            if total and losses.requires_grad:
                wide = torch.promote_types(losses.dtype, torch.float32)
                gradients = torch.autograd.grad(losses.sum(dtype=wide), params, materialize_grads=True)
                # Detached, as the zeros of an older PyTorch for an unused parameter require gradients.
                tensors.add(total, [gradient.detach() for gradient in gradients], 1.0)
            collected.append(losses.detach().cpu().double())
    return torch.cat(collected)
