r"""Define the optimizers SAM and GSAM, which look for flat minima of the loss.

For every mini-batch they compute the gradient at a distance rho from the weights, in the direction in which the loss
grows: at :math:`\theta + \epsilon`, :math:`\epsilon = \rho\, g / (\lVert g \rVert_2 + 10^{-12})`, with one norm over
all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from fairflare.base import checks
from fairflare.core.objectives import tensors

NORM_EPS = 1e-12  # added to the norm; keeps rho * g / |g| finite, as in the authors' code


class SAM:
    r"""Wrap any optimizer for sharpness-aware minimization: step with the gradient at weights with a higher loss.

    .. math:: d = g_p = \nabla \ell(\theta + \epsilon), \quad \epsilon = \rho\, g / (\lVert g \rVert_2 + 10^{-12})

    A step runs the closure twice, first at the weights and then at the perturbed ones, puts the weights back (from
    a copy, bit by bit, also when the closure raises) and lets the base optimizer step with d. With ``rho`` 0, or a
    first gradient of 0, the closure is run once and the step is the base optimizer's own.

    If a loss (or, with ``rho`` above 0, a gradient) is not finite, the step is skipped: weights and the base
    optimizer's state do not change, and ``skipped_steps`` grows by one. Running statistics of norm layers include the
    batch all the same. Parameters without gradient are left out.

    Args:
        base_optimizer: optimizer whose step needs no closure. It applies its weight decay itself, which is not part of
            g.
        rho: search distance, finite and ``>= 0``.
        model: model whose batch norms (and instance norms with running statistics) update running statistics and batch
            counters in the first run of the closure alone. It is None if they are updated in both runs.

    Attributes:
        skipped_steps: number of steps skipped so far because of a non-finite loss or gradient.

    Raises:
        ValueError: rho out of range.

    Source:
        Foret et al., ICLR 2021. Not the adaptive variant (ASAM).

    Example:
        >>> w = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
        >>> optimizer = SAM(torch.optim.SGD([w], lr=1.0), rho=0.1)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = 0.5 * (w[0] ** 2 + 4 * w[1] ** 2)
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure).item(), [round(v, 6) for v in w.tolist()]  # w - (1.024254, 4.388057)
        (2.5, [-0.024254, -3.388057])
    """

    def __init__(self, base_optimizer: Optimizer, *, rho: float, model: nn.Module | None = None) -> None:
        self.base_optimizer, self.model = base_optimizer, model
        self.rho = checks.number("rho", rho, low=0)
        self.skipped_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:
        """Update the weights once.

        Args:
            closure: function that zeroes the gradients, computes the loss, backpropagates and returns the loss, a
                scalar tensor or a number. It is run twice with gradients enabled.

        Returns:
            What the closure returned at the unperturbed weights.

        Raises:
            ValueError: a gradient is sparse or complex.
            TypeError: the closure returned no number.
        """
        loss = self._run(closure)
        finite = math.isfinite(_number(loss))
        params, gradients = self._parameters_and_gradients() if finite and self.rho > 0 else ([], [])
        norm = tensors.norm(gradients)
        if not (finite and math.isfinite(norm)):
            self.skipped_steps += 1
            return loss
        if norm == 0:
            self.base_optimizer.step()
            return loss

        first = [_take_gradient(p, g) for p, g in zip(params, gradients, strict=True)]
        del gradients
        weights = [p.detach().clone() for p in params]
        statistics = _running_statistics(self.model)
        try:
            tensors.add(params, first, self.rho / (norm + NORM_EPS))
            perturbed_loss = self._run(closure)
        finally:
            tensors.copy(params, weights)
            for buffer, value in statistics:
                buffer.copy_(value)
        del weights

        norm = tensors.norm(self._parameters_and_gradients()[1])
        if not (math.isfinite(_number(perturbed_loss)) and math.isfinite(norm)):
            self.skipped_steps += 1
            return loss
        self._turn(params, first, norm)
        self.base_optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients by the base optimizer's method."""
        self.base_optimizer.zero_grad(set_to_none=set_to_none)

    @staticmethod
    def _run(closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            return closure()

    def _parameters_and_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that have a gradient, and their gradients."""
        params = [p for group in self.base_optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in params]
        for g in gradients:
            if g.layout != torch.strided or g.is_complex():
                raise ValueError(f"gradients must be dense and real, got {g.layout} {g.dtype}")
        return params, gradients

    def _turn(self, params: Sequence[Tensor], first: Sequence[Tensor], norm: float) -> None:
        """Turn the gradients in ``.grad``, which are g_p with this norm, into d; ``first`` holds g of ``params``."""


class GSAM(SAM):
    r"""Wrap any optimizer for surrogate-gap SAM, which also reduces the gap between the perturbed loss and the loss.

    .. math:: d = g_p - \alpha\, g_\perp, \quad
              g_\perp = g - \frac{\langle g, g_p \rangle}{\lVert g_p \rVert^2}\, g_p

    with inner product and norm over all parameters together. With ``alpha`` 0 this is :class:`SAM`; if g_p is 0, so is
    d. If a parameter has a gradient in only one of the two runs, the other gradient counts as 0; a parameter without
    gradient in the second run is not updated.

    Args:
        base_optimizer, rho, model: as for :class:`SAM`.
        alpha: weight of the gap, finite and ``>= 0``.

    Raises:
        ValueError: alpha out of range, and as for :class:`SAM`.

    Source:
        Zhuang et al., ICLR 2022; with Adam and alpha 0.1 the local training of FedISM and FedISM+ (Wu et al.).
    """

    def __init__(
        self, base_optimizer: Optimizer, *, rho: float, alpha: float = 0.1, model: nn.Module | None = None
    ) -> None:
        super().__init__(base_optimizer, rho=rho, model=model)
        self.alpha = checks.number("alpha", alpha, low=0)

    def _turn(self, params: Sequence[Tensor], first: Sequence[Tensor], norm: float) -> None:
        if self.alpha == 0 or norm == 0:
            return
        pairs = [(g, p.grad) for p, g in zip(params, first, strict=True) if p.grad is not None]
        g, perturbed = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        along = tensors.dot(g, perturbed) / norm / norm  # divided twice since the square of a small norm is 0
        # Compute d = (1 + alpha c) g_p - alpha g in place, with one pass over the numbers for each term.
        tensors.scale(self._parameters_and_gradients()[1], 1.0 + self.alpha * along)
        tensors.add(perturbed, g, -self.alpha)


# ------------------------------------------------------------------------------------------------------------


def _take_gradient(param: Tensor, gradient: Tensor) -> Tensor:
    """Remove and return a parameter's gradient, so that the next backward pass does not write into this tensor."""
    param.grad = None
    # A view of a larger buffer (data-parallel buckets) is cloned, since the buffer's owner may still write into it.
    shared = gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()
    return gradient.clone() if shared else gradient


def _running_statistics(model: nn.Module | None) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a norm layer's buffer and its copy, for all norm layers of a model."""
    return [
        (buffer, buffer.clone())
        for module in (model.modules() if model is not None else ())
        if isinstance(module, _NormBase)
        for buffer in module.buffers(recurse=False)
    ]


def _number(loss: Any) -> float:
    try:
        return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the closure must return the loss, one number, got {got}") from error
