"""Compute averages and updates of model states, and check the states before.

A *state* is a mapping from tensor name to tensor (a PyTorch ``state_dict``), parameters and buffers alike.
Sums are taken in float64 and cast back once, in blocks small enough to stay on one thread, so that a result does not
depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch

from fairflare.base import checks
from fairflare.core.aggregation.movement import Made as Made
from fairflare.core.aggregation.movement import Movement as Movement
from fairflare.core.aggregation.movement import State as State
from fairflare.core.aggregation.spectral import singular_vectors
from fairflare.core.aggregation.tensor_mean import (
    HELD,
    MEAN,
    MeanNotFinite,
    RobustMiddle,
    WeightedMean,
    all_finite,
    check_finite,
)
from fairflare.core.aggregation.tensor_mean import Aggregate as Aggregate
from fairflare.core.aggregation.tensor_mean import blocks as blocks
from fairflare.core.aggregation.tensor_mean import sq_norm as sq_norm

WeightsOf: TypeAlias = Callable[[str], Mapping[str, float]]  # type of functions from a tensor's name to weights by site

_LARGEST_WHOLE = 2.0**53  # above this limit a floating-point number no longer holds every integer exactly


def weighted_average(
    states: Mapping[str, State],
    weights: Mapping[str, float],
    *,
    updates: bool = False,
    how: Aggregate = MEAN,
    movement: Movement | None = None,
) -> dict[str, torch.Tensor]:
    r"""Average the sites' states with one weight for each site.

    .. math:: \hat w = \sum_k a_k w_k, \quad \sum_k a_k = 1

    Floating tensors are accumulated in float64 and cast back; if sites differ in precision, the result has
    the promoted dtype. Integer and boolean tensors (``num_batches_tracked``) are the maximum over the sites,
    a ``running_var`` is floored at 0, and a spectral norm's running vectors are computed anew from the averaged weight
    (:mod:`fairflare.core.aggregation.spectral`).

    Args:
        states: ``{site: state}``, whose states may read a tensor from disk at access. They are read tensor by tensor,
            sites in sorted order, so that besides the result one tensor of as many sites as fit into 128 MiB is in
            memory.
        weights: ``a_k`` by site, finite, ``>= 0``, sum 1 within 1e-6; exactly the sites of
            ``states``.
        updates: whether the states are updates (DIFF). In an update a ``running_var`` may be negative and is not
            floored.
        how: how the sites' values are combined, number by number. Aggregates other than the mean need one tensor of all
            sites in memory, and combine integers by the plain lower median, so that one site alone cannot move a
            counter.
        movement: transformation of the mean change of trained tensors.

    Returns:
        The averaged state; keys in the order of the first site.

    Raises:
        ValueError: there is no site, ``weights`` has other sites than ``states``, a weight is out of range, or a tensor
            is missing, unexpected, not finite, or of another shape or kind than at the first site (the message names
            the site and the tensor).
    """
    checked = others = checks.shares(weights)
    if movement is not None and movement.buffers is not None:
        others = checks.shares(movement.buffers)
        checks.same_names("weights of the buffers", others, "weights", checked)

    def weights_of(name: str) -> dict[str, float]:
        return checked if movement is None or name in movement.types else others

    return _average(states, set(checked), weights_of, floor=not updates, how=how, movement=movement)


def layerwise_average(
    states: Mapping[str, State],
    layer_weights: Mapping[str, Mapping[str, float]],
    owner: Mapping[str, str],
    *,
    updates: bool = False,
    how: Aggregate = MEAN,
    movement: Movement | None = None,
) -> dict[str, torch.Tensor]:
    r"""Average the sites' states with a weight for each site and layer, Eq. (6) of Fed-LWR.

    .. math:: \hat w_m = \sum_k \rho_k^m w_{k,m}, \quad \sum_k \rho_k^m = 1 \text{ for every layer } m

    Args:
        states: as in :func:`weighted_average`.
        layer_weights: ``{layer: {site: rho}}``; in each layer the same sites, finite, ``>= 0``, sum 1.
        owner: ``{tensor name: layer}`` for every floating tensor; further entries are ignored.
        updates, how, movement: as in :func:`weighted_average`.

    Returns:
        The averaged state; keys in the order of the first site. Integer tensors, dtypes and ``running_var``
        as in :func:`weighted_average`.

    Raises:
        ValueError: as for :func:`weighted_average`; or a tensor has no owner, or an owner has no weights.

    Source:
        Yan et al., MICCAI 2024 (Fed-LWR), Eq. (6); batch-norm buffers follow the layer that owns them.
    """
    checks.not_empty("layer_weights", layer_weights, of="layer")
    checked = {layer: checks.shares(rho, of=f"layer {layer!r}") for layer, rho in layer_weights.items()}
    first_layer, first = next(iter(checked.items()))
    for layer, rho in checked.items():
        checks.same_names(f"weights of layer {layer!r}", rho, f"weights of layer {first_layer!r}", first)

    def weights_of(name: str) -> dict[str, float]:
        if (layer := owner.get(name)) in checked:
            return checked[layer]
        why = "has no owner layer" if layer is None else f"belongs to layer {layer!r}, which has no weights"
        raise ValueError(f"tensor {name!r} {why}")

    return _average(states, set(first), weights_of, floor=not updates, how=how, movement=movement)


def difference(local: State, received: State, site: str = "local") -> dict[str, torch.Tensor]:
    """Return a site's update: its local state minus the state it received. A site sends the update as a DIFF.

    Args:
        local: state after local training.
        received: state that the training started from, with the same keys, shapes and kinds as ``local``.
        site: name of the site for error messages.

    Returns:
        ``w_k - w^r`` with the dtype of ``local`` for floating tensors and int64 for integer and boolean ones.

    Raises:
        ValueError: keys, shapes or kinds of the two states differ, or ``local`` is not finite.
    """
    check_state(local, received, site)
    typed = ((name, mine, mine.dtype if mine.is_floating_point() else torch.int64) for name, mine in local.items())
    return {name: mine.detach().to(kind) - received[name].detach().to(mine.device, kind) for name, mine, kind in typed}


def add_update(state: State, update: State, site: str = "update") -> dict[str, torch.Tensor]:
    """Return the local state that an update stands for: the global state plus the update (DIFF).

    Args:
        state: the global state that the site received.
        update: ``w_k - w^r``, with the same keys and shapes as ``state``. Integer tensors may have become floating in a
            privacy filter; they are rounded to the nearest integer.
        site: name of the site for error messages.

    Returns:
        ``w^r + update`` in the dtypes of ``state``; neither argument is changed.

    Raises:
        ValueError: keys or shapes of the two differ, a floating tensor became integer, or the sum is not finite.
    """
    _check_names(update, state, site, "the global model")
    return {
        name: local_tensor(update[name], base, f"site {site!r}: tensor {name!r}", is_update=True)
        for name, base in state.items()
    }


def local_tensor(value: torch.Tensor, received: torch.Tensor, where: str, *, is_update: bool) -> torch.Tensor:
    """Return one tensor of a site's local model, in the shape and dtype of the one that the site received.

    Args:
        value: tensor that the site sent, in any precision. A privacy filter may have turned integers into floating
            numbers; these are rounded to the nearest integer.
        received: the tensor of the global model; not changed.
        where: name of the tensor and site for error messages.
        is_update: whether ``value`` is the difference to ``received``; if False, it is the local tensor itself.

    Raises:
        ValueError: the shape differs, a floating tensor became integer, or a value is not finite or does not fit the
            dtype.
    """
    checks.same_shape(where, value, "the global model", received)
    checks.refuse({
        f"{where} is {value.dtype}, the global model has {received.dtype}":
            value.is_complex() or (received.is_floating_point() and not value.is_floating_point()),
    })  # fmt: skip
    received, value = received.detach(), value.detach().to(received.device)
    if not received.is_floating_point():
        check_finite(value, where)
        steps = _whole(value, where)
        return (received.long() + steps if is_update else steps).to(received.dtype)
    wide = received.dtype if value.dtype == received.dtype else torch.float64
    total = (received.to(wide) + value.to(wide) if is_update else value).to(received.dtype)
    checks.refuse({f"{where} is not finite" + " after adding the update" * is_update: not all_finite(total)})
    return total


def check_state(state: State, like: State, site: str) -> None:
    """Check that a site's state has the keys, shapes and kinds of another state, and that every value is finite.

    Args:
        state: the state to check.
        like: state whose keys, shapes and kinds are required; as a rule the global model.
        site: name of the site for error messages.

    Raises:
        ValueError: the states disagree; the message names the site and the first tensor that differs.
    """
    _check_names(state, like, site, "the global model")
    for name, expected in like.items():
        tensor = state[name]
        where = f"site {site!r}: tensor {name!r}"
        checks.same_shape(where, tensor, "the global model", expected)
        _check_kind(tensor, expected, where, "the global model")
        check_finite(tensor, where)


# ------------------------------------------------------------------------------------------------------------


def _average(
    states: Mapping[str, State], sites: set[str], weights_of: WeightsOf, *, floor: bool, how: Aggregate,
    movement: Movement | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return the average of every tensor; the sites are read once per tensor.

    ``floor``: the states are models, not updates; tensors of a model that depend on each other are then made consistent
    after averaging.
    """
    checks.same_names("the states", checks.not_empty("the states to average", states), "the weights", sites)
    opened = {site: states[site] for site in sorted(states)}
    first_site, first = next(iter(opened.items()))
    for site, state in opened.items():
        _check_names(state, first, site, f"site {first_site!r}")

    def mean(name: str, wide: bool = False) -> torch.Tensor:
        try:
            return _mean_of(name, opened, weights_of, floor, how, wide)
        except MeanNotFinite:  # only now look for the site, since testing the mean is cheaper than testing every site
            for site, state in opened.items():
                check_finite(state[name], f"site {site!r}: tensor {name!r}")
            raise

    moved = movement.apply(partial(mean, wide=True)) if movement is not None else None
    makers: dict[str, Callable[[str], torch.Tensor]] = (
        dict.fromkeys(movement.types, moved) if moved and movement else {}
    )
    if movement is not None and movement.products is not None:
        factors = movement.products.average_factors(opened, weights_of)
        makers |= dict.fromkeys(factors, factors.pop)
    average = {name: makers.get(name, mean)(name) for name in first}
    return average | singular_vectors(average) if floor else average


def _mean_of(
    name: str, states: Mapping[str, State], weights_of: WeightsOf, floor: bool, how: Aggregate, wide: bool
) -> torch.Tensor:
    """Return the average of one tensor over the sites; ``wide``: in float64."""
    mean: WeightedMean | RobustMiddle | None = None
    first_site, look = next(iter(states)), how.kind != "mean"
    for site, state in states.items():
        tensor = state[name]
        where, whose = f"site {site!r}: tensor {name!r}", f"site {first_site!r}"
        if not isinstance(tensor, torch.Tensor):  # not by refuse(): it would cost more than small tensors' sums
            raise ValueError(f"{where} must be a torch.Tensor, got {type(tensor).__name__}")
        if look:  # a non-finite value shows up in a mean, but a median may hide it
            check_finite(tensor, where)
        if mean is None:
            checks.refuse({f"{where} is {tensor.dtype}, not a real number": tensor.is_complex()})
            mean = RobustMiddle(name, tensor, how) if look else WeightedMean(name, tensor, HELD)
        like = mean.like
        if tensor.shape != like.shape or tensor.is_floating_point() != like.is_floating_point():
            checks.same_shape(where, tensor, whose, like)
            _check_kind(tensor, like, where, whose)
        # Integer tensors are not averaged and need no weight.
        mean.add(tensor, weights_of(name)[site] if tensor.is_floating_point() else 0.0)
    assert mean is not None
    return mean.result(floor and name.rpartition(".")[2] == "running_var", wide)


def _check_names(state: Mapping[str, object], like: Mapping[str, object], site: str, whose: str) -> None:
    if state.keys() != like.keys():
        name = next(name for name in (*like, *state) if name not in state or name not in like)
        what = f"missing, {whose} has it" if name in like else f"unexpected, {whose} does not have it"
        raise ValueError(f"site {site!r}: tensor {name!r} is {what}")


def _check_kind(tensor: torch.Tensor, like: torch.Tensor, where: str, whose: str) -> None:
    checks.refuse({
        f"{where} is {tensor.dtype}, {whose} has {like.dtype}":
            tensor.is_complex() or tensor.is_floating_point() != like.is_floating_point(),
    })  # fmt: skip


def _whole(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return a tensor rounded to the nearest integers, as int64."""
    if not tensor.is_floating_point():
        return tensor.long()
    checks.refuse({
        f"{where} holds a number that no integer of the global model can be":
            bool((tensor.abs() > _LARGEST_WHOLE).any()),
    })  # fmt: skip
    return tensor.double().round().long()
