r"""Sharpness: optimizers that look for flat minima (SAM, GSAM), and a measure of how flat a model is on a data set.

Both ask how much the loss grows at a distance rho uphill: at :math:`\theta + \epsilon`,
:math:`\epsilon = \rho\, g / (\lVert g \rVert_2 + 10^{-12})`, with one norm over all parameters.
:class:`SAM` and :class:`GSAM` do so for every mini-batch while a site trains, :func:`sharpness` once for the whole
local data set and the received model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import LBFGS, Optimizer

__all__ = ["GSAM", "SAM", "Sharpness", "search_distance", "sharpness"]

NORM_EPS = 1e-12  # keeps rho * g / |g| finite, as in the authors' code


# --- training -----------------------------------------------------------------------------------------------


class SAM(Optimizer):
    r"""Sharpness-aware minimization around any optimizer: step with the gradient of the loss uphill.

    .. math:: d = g_p = \nabla \ell(\theta + \epsilon), \quad \epsilon = \rho\, g / (\lVert g \rVert_2 + 10^{-12})

    A step runs the closure twice, first at the weights and then at the perturbed ones, puts the weights back (from
    a copy, bit by bit, also when the closure raises) and lets the base optimizer step with d. With ``rho`` 0, or a
    first gradient of 0, the closure is run once and the step is the base optimizer's own.

    The wrapper has the base optimizer's parameter groups, state and state dict: learning-rate schedulers may be
    given either of the two, and a checkpoint of one loads into the other. ``rho`` is a setting, not part of it.
    Hooks of state dicts belong on the base optimizer.

    No weight is updated where a loss (or, with ``rho`` above 0, a gradient) is not finite: the weights and the base
    optimizer's state are then those from before the step, and ``skipped_steps`` has grown by one. Running statistics
    of norm layers have seen the batch all the same. Parameters without gradient are left out.

    Args:
        base_optimizer: an optimizer whose step needs no closure; weight decay is its own and not part of g.
        rho: search distance, finite and ``>= 0``. May be set between steps (``optimizer.rho = 0.05``).
        model: whose batch norms (and tracking instance norms) keep the running statistics and batch counters of
            the first run alone. None: they see both runs.

    Attributes:
        skipped_steps: steps left out so far because of a non-finite loss or gradient.

    Raises:
        ValueError: rho out of range, or a base optimizer that calls the closure itself (LBFGS, SAM).
        TypeError: base_optimizer is not a torch optimizer, or model not a module.

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
        if not isinstance(base_optimizer, Optimizer):
            raise TypeError(f"base_optimizer must be a torch.optim.Optimizer, got {type(base_optimizer).__name__}")
        if isinstance(base_optimizer, SAM | LBFGS):
            raise ValueError(f"base_optimizer must not call the closure itself, got {type(base_optimizer).__name__}")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        super().__init__(base_optimizer.param_groups, base_optimizer.defaults)
        self.rho = rho
        self.model = model
        self.skipped_steps = 0
        self.base_optimizer = base_optimizer
        self._follow_base()

    @property
    def rho(self) -> float:
        """Search distance of the steps to come."""
        return self._rho

    @rho.setter
    def rho(self, rho: float) -> None:
        self._rho = _non_negative("rho", rho)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update.

        Args:
            closure: zeroes the gradients, computes the loss, backpropagates and returns the loss, a scalar tensor
                or a number. Run with gradients enabled, twice.

        Returns:
            What the closure returned at the unperturbed weights.

        Raises:
            ValueError: no closure, or a gradient that is sparse or complex.
            TypeError: the closure returned no number.
        """
        if closure is None:
            raise ValueError(f"{type(self).__name__}.step needs a closure, which it runs twice")
        loss = self._run(closure)
        if not math.isfinite(_number(loss)):
            self.skipped_steps += 1
            return loss
        params = self._with_gradient() if self.rho > 0 else []
        norm = _norm([_gradient(p) for p in params])
        if norm == 0:
            self.base_optimizer.step()
            return loss
        if not math.isfinite(norm):
            self.skipped_steps += 1
            return loss

        first = [_taken(p) for p in params]
        weights = [p.detach().clone() for p in params]
        statistics = _running_statistics(self.model)
        try:
            _add(params, first, self.rho / (norm + NORM_EPS))
            perturbed_loss = self._run(closure)
        finally:
            _copy(params, weights)
            for buffer, value in statistics:
                buffer.copy_(value)
        del weights

        norm = _norm([_gradient(p) for p in self._with_gradient()])
        if not (math.isfinite(_number(perturbed_loss)) and math.isfinite(norm)):
            self.skipped_steps += 1
            return loss
        self._turn(params, first, norm)
        self.base_optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The base optimizer's."""
        self.base_optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the base optimizer."""
        self.base_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the base optimizer."""
        if "base_optimizer" in self.__dict__:
            self.base_optimizer.add_param_group(param_group)
        else:  # called by the constructor of the superclass
            super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("base_optimizer", "model", "skipped_steps", "_rho")}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow_base()

    def _follow_base(self) -> None:
        def share(base: Optimizer) -> None:
            self.defaults, self.state, self.param_groups = base.defaults, base.state, base.param_groups

        share(self.base_optimizer)
        # Loading replaces its groups and state by new objects, also where it is not done through the wrapper.
        self.base_optimizer.register_load_state_dict_post_hook(share)

    @staticmethod
    def _run(closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            return closure()

    def _with_gradient(self) -> list[Tensor]:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            if p.grad.layout != torch.strided or p.grad.is_complex():
                raise ValueError(f"gradients must be dense and real, got {p.grad.layout} {p.grad.dtype}")
        return params

    def _turn(self, params: Sequence[Tensor], first: Sequence[Tensor], norm: float) -> None:
        """Make ``.grad``, now g_p with this norm, the direction d; ``first`` is g of ``params``."""


class GSAM(SAM):
    r"""Surrogate-gap SAM: also shrinks the gap between the loss uphill and the loss.

    .. math:: d = g_p - \alpha\, g_\perp, \quad
              g_\perp = g - \frac{\langle g, g_p \rangle}{\lVert g_p \rVert^2}\, g_p

    with inner product and norm over all parameters together. ``alpha`` 0 is :class:`SAM`; if g_p is 0, so is d.
    A parameter with a gradient in only one of the two runs has 0 as the other one; without one in the second run
    it is not updated.

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
        self.alpha = alpha

    @property
    def alpha(self) -> float:
        """Weight of the gap."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._alpha = _non_negative("alpha", alpha)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_alpha": self._alpha}

    def _turn(self, params: Sequence[Tensor], first: Sequence[Tensor], norm: float) -> None:
        if self.alpha == 0 or norm == 0:
            return
        pairs = [(g, p.grad) for p, g in zip(params, first, strict=True) if p.grad is not None]
        g, perturbed = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        along = _dot(g, perturbed) / norm / norm  # in turn: the square of a small norm is 0
        # d = (1 + alpha c) g_p - alpha g, in place: one pass over the numbers for either term
        _scale([_gradient(p) for p in self._with_gradient()], 1.0 + self.alpha * along)
        _add(perturbed, g, -self.alpha)


# --- measuring ----------------------------------------------------------------------------------------------


class Sharpness(NamedTuple):
    """Means over all samples of a data set.

    Attributes:
        loss: L0, at the weights.
        perturbed_loss: Lp, at the search distance uphill.
        sharpness: S = Lp - L0, summed from the differences of the samples; may be negative.
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
    r"""How much a model's mean loss on a data set grows at a distance rho along its gradient.

    .. math:: L_0 = \frac1n \sum_i \ell(f(x_i; \theta), y_i), \quad
              L_p = \frac1n \sum_i \ell(f(x_i; \theta + \epsilon), y_i), \quad S = L_p - L_0

    with :math:`\epsilon = \rho\, \nabla L_0 / (\lVert \nabla L_0 \rVert_2 + 10^{-12})` of the *whole* data set over
    all parameters that require gradients. The model is in evaluation mode (batch norms use and keep their running
    statistics), so the result does not depend on how the samples are divided into batches. Costs two forward
    passes and one backward pass.

    Losses are taken as the model computes them, then summed and subtracted in float64: of a float32 model S, a
    difference of nearly equal losses, has an absolute error of about 1e-7 of the loss per sample and less in the
    mean.

    Args:
        model: not changed: parameters, buffers, gradients, ``requires_grad``, training mode and torch's random
            state are afterwards, also after an exception, what they were, bit by bit.
        loss_fn: ``loss_fn(outputs, targets)`` returns the losses of the samples, shape (n,), for instance
            ``torch.nn.CrossEntropyLoss(reduction="none")``. A scalar is taken for the mean over the batch; it was
            rounded before it came here, so of a float32 model S is then uncertain by about 6e-8 of the loss.
        batches: re-iterable of (inputs, targets), tensors or lists, tuples and dicts of tensors, the first one of
            inputs with the samples along its first dimension. Iterated twice, both times with the same random
            state of torch; the same samples must come, without random augmentation, in any order. Moved to the
            device of the parameters.
        rho: search distance, finite and ``>= 0``. 0: S is 0 and the second pass is left out.

    Returns:
        The three means. S is 0 where the gradient is 0 or no parameter requires one; not finite where a loss is
        not; NaN, like Lp, where only the gradient is not.

    Raises:
        ValueError: rho out of range, an iterator in place of a re-iterable, no sample, another number of samples
            in the second pass, or losses of a wrong shape.

    Source:
        Wu et al. (FedISM+), Eqs. (9)-(11). Their code augments the images at random, which adds noise to S.
    """
    rho = _non_negative("rho", rho)
    if isinstance(batches, Iterator):
        raise ValueError("batches must be iterable twice, got an iterator (wrap it in a list)")
    params = [p for p in model.parameters() if p.requires_grad]
    wide = [torch.promote_types(p.dtype, torch.float32) for p in params]
    with _evaluation(model):
        # zeros, not the first batch's gradients, which may share memory or be expanded
        total = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(params, wide, strict=True)] if rho > 0 else []
        before = _losses(model, loss_fn, batches, params, total)
        n = len(before)
        if n == 0:
            raise ValueError("batches hold no sample")
        loss = float(before.mean())
        norm = _norm(total) / n  # the gradient of the mean loss
        if norm == 0:
            return Sharpness(loss, loss, loss - loss)  # 0, but NaN for a loss that is not finite
        if not math.isfinite(norm):
            return Sharpness(loss, math.nan, math.nan)
        weights = [p.detach().clone() for p in params]
        try:
            with torch.no_grad():
                _add(params, total, rho / (norm + NORM_EPS) / n)
            del total
            after = _losses(model, loss_fn, batches, params, [])
        finally:
            with torch.no_grad():
                _copy(params, weights)
    if len(after) != n:
        raise ValueError(f"batches gave {n} samples in the first pass and {len(after)} in the second")
    return Sharpness(loss, float(after.mean()), float((after - before).mean()))


def search_distance(current_round: int, num_rounds: int, rho_max: float, tau: float) -> float:
    r"""The growing search distance of FedISM+.

    .. math:: \rho_r = \rho_{max}\, \left(\frac{r + 1}{T}\right)^\tau

    Args:
        current_round: r, ``0 <= r < num_rounds``.
        num_rounds: T, ``>= 1``.
        rho_max: distance of the last round, finite and ``>= 0``; 0.1 in the paper.
        tau: finite and ``> 0``; 0.5 in the paper. Larger: a later start.

    Raises:
        ValueError: an argument out of range.

    Source:
        Wu et al. (FedISM+), Eq. (12), with t = r + 1.

    Example:
        >>> round(search_distance(74, 300, 0.1, 0.5), 12)
        0.05
    """
    rho_max = _non_negative("rho_max", rho_max)
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau must be finite and > 0, got {tau}")
    if num_rounds < 1:
        raise ValueError(f"num_rounds must be >= 1, got {num_rounds}")
    if not 0 <= current_round < num_rounds:
        raise ValueError(f"current_round must be in [0, {num_rounds}), got {current_round}")
    return float(rho_max * ((current_round + 1) / num_rounds) ** tau)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards the mode of every module and all buffers are what they were."""
    training = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode
        with torch.no_grad():
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
    """Losses of all samples, float64 on the CPU; the gradient of their sum is added to ``total``, unless empty."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    collected = [torch.zeros(0, dtype=torch.float64)]
    with torch.random.fork_rng(gpus), torch.set_grad_enabled(bool(total)):
        for inputs, targets in batches:
            moved = _moved(inputs, device)
            losses = loss_fn(model(moved), _moved(targets, device))
            size = len(_first_tensor(moved))
            if losses.ndim == 0:  # the mean of the batch, for each of its samples
                losses = losses.expand(size)
            if losses.shape != (size,):
                raise ValueError(
                    f"loss_fn must return {size} losses, shape ({size},), or their mean, got {tuple(losses.shape)}"
                )
            if total and losses.requires_grad:
                wide = torch.promote_types(losses.dtype, torch.float32)
                gradients = torch.autograd.grad(losses.sum(dtype=wide), params, allow_unused=True)
                found = [(t, g) for t, g in zip(total, gradients, strict=True) if g is not None]
                with torch.no_grad():
                    _add([t for t, _ in found], [g for _, g in found], 1.0)
            collected.append(losses.detach().cpu().double())
    return torch.cat(collected)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        moved = [_moved(item, device) for item in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value


def _first_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.ndim:
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in items:
        try:
            return _first_tensor(item)
        except ValueError:
            continue
    raise ValueError(f"inputs of a batch must hold a tensor of samples, got {type(value).__name__}")


# --- lists of tensors ---------------------------------------------------------------------------------------


def _alike(*lists: Sequence[Tensor]) -> list[list[list[Tensor]]]:
    """The lists divided by device and dtype: only then the fused functions are fast."""
    groups: dict[tuple[Any, ...], list[list[Tensor]]] = {}
    for tensors in zip(*lists, strict=True):
        group = groups.setdefault(tuple((t.device, t.dtype) for t in tensors), [[] for _ in lists])
        for column, tensor in zip(group, tensors, strict=True):
            column.append(tensor)
    return list(groups.values())


def _norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm of all numbers together; float32 at least inside a tensor, float64 between tensors."""
    squares = 0.0
    for (group,) in _alike(tensors):
        wide = torch.promote_types(group[0].dtype, torch.float32)
        norms = torch.stack(list(torch._foreach_norm([t.detach() for t in group], 2, dtype=wide)))
        squares += float(norms.cpu().double().square().sum())
    return math.sqrt(squares)


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Inner product of all numbers; precision as in :func:`_norm`."""
    total = 0.0
    for a, b in _alike(left, right):
        wide = torch.promote_types(a[0].dtype, torch.float32)
        dots = [torch.dot(x.reshape(-1).to(wide), y.reshape(-1).to(wide)) for x, y in zip(a, b, strict=True)]
        total += float(torch.stack(dots).cpu().double().sum())
    return total


def _add(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> None:
    for a, b in _alike(tensors, others):
        torch._foreach_add_(a, b, alpha=factor)


def _scale(tensors: Sequence[Tensor], factor: float) -> None:
    for (group,) in _alike(tensors):
        torch._foreach_mul_(group, factor)


def _copy(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for a, b in _alike(tensors, values):
        torch._foreach_copy_(a, b)


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        raise ValueError(f"parameter of shape {tuple(param.shape)} has no gradient")
    return param.grad


def _taken(param: Tensor) -> Tensor:
    """The gradient, taken away from the parameter so that the next backward pass does not write into it."""
    gradient, param.grad = _gradient(param), None
    # A view of a larger buffer (data-parallel buckets) is written to by its owner all the same.
    shared = gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()
    return gradient.clone() if shared else gradient


def _running_statistics(model: nn.Module | None) -> list[tuple[Tensor, Tensor]]:
    """Buffers of the norm layers and copies of them."""
    buffers = [
        buffer
        for module in (model.modules() if model is not None else ())
        if isinstance(module, _NormBase)
        for buffer in module.buffers(recurse=False)
    ]
    return [(buffer, buffer.clone()) for buffer in buffers]


# --- checks -------------------------------------------------------------------------------------------------


def _number(loss: Any) -> float:
    try:
        return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the closure must return the loss, one number, got {got}") from error


def _non_negative(name: str, value: float) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and >= 0, got {value}")
    return number
