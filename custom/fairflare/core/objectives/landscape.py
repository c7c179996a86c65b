r"""The loss around a trained model, along two random directions in which every filter is as long as the model's own.

.. math:: f(a, b) = L(\theta + a\, d + b\, e), \qquad d_i = \lVert \theta_i \rVert \, g_i / \lVert g_i \rVert

for every filter i (g: independent normal numbers; e: likewise), which is what makes one output channel of a convolution
or one output of a linear layer. A network whose layers are scaled against each other without changing what it computes
(one layer times c, the next one divided by c, through a ReLU) has the same picture; with plain random directions the
larger weights would look flatter.

Source:
    Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018, section 4. As there biases and the weights
    of norms (every parameter of one dimension) get no direction. Statistics of norms and other buffers stay as they
    are. Of a transposed convolution a filter is an output channel here too, where the authors' code takes the input
    channel.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fairflare.base import checks

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Direction = dict[str, Tensor]


def filter_norms(model: nn.Module) -> dict[str, Tensor]:
    """L2 norm of each filter.

    Returns:
        By name of the parameter, of those with two dimensions or more: float64 on the CPU, of as many dimensions as
        the parameter and of a shape that multiplies it filter by filter.
    """
    transposed = _transposed(model)
    return {
        name: _norms(parameter, transposed.get(name))
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and parameter.is_floating_point()
    }


def direction(model: nn.Module, seed: int, number: int = 0) -> Direction:
    """A random filter-normalised direction.

    Args:
        model: gives names, shapes and the norms of its filters.
        seed: ``>= 0``. What is drawn for a parameter depends on seed, ``number``, its name and shape alone: of two
            models the parameters that both have get the same draw, each scaled to the model's own filters.
        number: which of the directions of this seed.

    Returns:
        By name of the parameter, of its shape and type, on the CPU. Parameters without a direction are not in it. Where
        all weights of a filter are 0, so is its direction.

    Raises:
        ValueError: the model has no parameter of two dimensions or more, or one that is not finite (names it).
    """
    checks.number("seed", seed, low=0, whole=True)
    transposed, norms = _transposed(model), filter_norms(model)
    checks.not_empty("parameters with filters", norms, of="parameter of two dimensions or more")
    found = {}
    for name, parameter in model.named_parameters():
        if name not in norms:
            continue
        if not bool(torch.isfinite(norms[name]).all()):
            raise ValueError(f"parameter {name!r} of the model is not finite")
        digest = hashlib.sha256(f"{seed}/{number}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # A draw of exactly 0 for all of a filter does not happen; of an empty filter there is nothing to scale.
        scale = norms[name] / _norms(drawn, transposed.get(name)).clamp(min=torch.finfo(torch.float64).tiny)
        found[name] = (drawn * scale).to(parameter.dtype)
    return found


def coordinates(extent: float, points: int) -> list[float]:
    """Places along a direction, from ``-extent`` to ``extent``; the one in the middle is exactly 0.

    Raises:
        ValueError: ``extent`` not above 0, or ``points`` even or below 5.
    """
    checks.number("range", extent, above=0)
    checks.whole("points", points, low=5)
    if points % 2 == 0:
        raise ValueError(f"points must be odd, so that the model itself is one of them, got {points}")
    half = points // 2
    return [extent * place / half for place in range(-half, half + 1)]


def surface(
    model: nn.Module,
    loss: Callable[[], float],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    places: Sequence[float],
    done: Callable[[int], None] = lambda count: None,
) -> npt.NDArray[np.float64]:
    """The loss on a grid around a model.

    Args:
        model: is moved, and afterwards is what it was, bit by bit, also after an exception.
        loss: of the model as it is when called, in evaluation mode if it is to be that of Li et al.
        first, second: of :func:`direction`.
        places: of :func:`coordinates`, along both directions.
        done: is told how many of the ``len(places) ** 2`` losses there are.

    Returns:
        (places, places) float64: the row is the place along ``first``, the column that along ``second``; not finite
        where the loss is not.

    Raises:
        ValueError: the loss of the model itself is not finite.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in first}
    checks.same_names("the first direction", first, "the model", parameters, of="parameter")
    checks.same_names("the second direction", second, "the first", first, of="parameter")
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    found = np.full((len(places), len(places)), np.nan)
    middle = len(places) // 2
    others = [(i, j) for i in range(len(places)) for j in range(len(places)) if (i, j) != (middle, middle)]
    try:
        for count, (i, j) in enumerate([(middle, middle), *others], start=1):
            _move(parameters, kept, ((places[i], first), (places[j], second)))
            found[i, j] = loss()
            if count == 1 and not math.isfinite(found[i, j]):
                raise ValueError(f"the loss of the model itself is {found[i, j]}, so there is nothing to draw")
            done(count)
    finally:
        _move(parameters, kept, ())
    return found


def numbers(losses: npt.NDArray[np.float64], places: Sequence[float]) -> dict[str, float]:
    r"""What a surface says in a few numbers.

    Args:
        losses: of :func:`surface`.
        places: of it.

    Returns:
        ``loss``: of the model itself. ``mean_rise``, ``max_rise``: how much larger it is on the points of the grid
        that are not the model and not farther from it than the range, on average and at most; ``mean_rise_half``: the
        same up to half the range. ``curvature``: :math:`(f(h, 0) + f(-h, 0) + f(0, h) + f(0, -h) - 4 f(0, 0)) / h^2`
        with one step h of the grid, near :math:`d^T H d + e^T H e` for the Hessian H where h is small. Not finite where
        a loss is not that it is made of.

    Raises:
        ValueError: the shapes do not fit.
    """
    checks.shape("losses", losses, len(places), len(places))
    middle, step = len(places) // 2, places[-1] / (len(places) // 2)
    centre = losses[middle, middle]
    away = np.hypot(*np.meshgrid(places, places, indexing="ij"))
    slack = 1 + 1e-9  # a point on the rim is within it
    inside, near = ((away > 0) & (away <= radius * slack) for radius in (places[-1], places[-1] / 2))
    up, down = losses[middle + 1, middle], losses[middle - 1, middle]
    cross = up + down + losses[middle, middle + 1] + losses[middle, middle - 1]
    rises = losses - centre
    return {
        "loss": float(centre),
        "mean_rise": float(rises[inside].mean()),
        "mean_rise_half": float(rises[near].mean()),
        "max_rise": float(rises[inside].max()),
        "curvature": float((cross - 4 * centre) / step**2),
    }


def _transposed(model: nn.Module) -> dict[str, int]:
    """Number of groups of each transposed convolution, by its weight's name."""
    return {
        f"{name}.weight" if name else "weight": module.groups
        for name, module in model.named_modules()
        if isinstance(module, TRANSPOSED)
    }


def _norms(parameter: Tensor, groups: int | None) -> Tensor:
    """(filters, 1, ...); of a transposed convolution (inputs, outputs of a group, 1, ...)."""
    values = parameter.detach().to("cpu", torch.float64)
    if groups is None:
        lengths: Tensor = values.flatten(1).norm(dim=1)
        return lengths.view(-1, *(1,) * (values.ndim - 1))
    parts = values.view(groups, -1, *values.shape[1:])  # (groups, inputs of a group, outputs of a group, kernel ...)
    norms = parts.flatten(3).square().sum((1, 3)).sqrt()  # (groups, outputs of a group)
    return norms[:, None].expand(-1, parts.shape[1], -1).reshape(*values.shape[:2], *(1,) * (values.ndim - 2))


@torch.no_grad()
def _move(
    parameters: Mapping[str, Tensor], kept: Mapping[str, Tensor], steps: Sequence[tuple[float, Mapping[str, Tensor]]]
) -> None:
    for name, parameter in parameters.items():
        moved = kept[name]
        for length, along in steps:
            if length:
                moved = moved + length * along[name].to(moved.device)
        parameter.copy_(moved)
