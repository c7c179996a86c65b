"""Arithmetic on model states: averages, updates, norms and the checks before them.

A *state* is a mapping from tensor name to tensor (a PyTorch ``state_dict``), parameters and buffers alike.
Sums are taken in float64 and cast back once, in blocks small enough to stay on one thread, so that a result
depends neither on the number of threads nor on which of the two input forms of the averages is used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeAlias

import torch

from fairflare.base import checks
from fairflare.core.aggregation.low_rank import Products
from fairflare.core.aggregation.spectral import singular_vectors

log = logging.getLogger(__name__)
State: TypeAlias = Mapping[str, torch.Tensor]
States: TypeAlias = Mapping[str, State] | Iterable[tuple[str, State]]
WeightsOf: TypeAlias = Callable[[str], Mapping[str, float]]  # of a tensor: weight by site

_HELD = 2**27  # bytes of one tensor at the sites that are read before they are added
#: Elements per block. PyTorch splits an elementwise operation over threads above 32768 elements, and a
#: float64 block of this size fits the second-level cache.
_BLOCK = 32768
_TIE = 1e-12  # a sum of weights this close to one half is one half
_LARGEST_WHOLE = 2.0**53  # above it a floating number is no exact integer


@dataclass(frozen=True)
class Aggregate:
    r"""What is made of the sites' values of a number, with their weights.

    Attributes:
        kind: ``"mean"``; ``"median"``: the weighted median (half of the weight lies below it and half above; the middle
            where two values are); ``"trimmed_mean"``: the weighted mean of what lies between the weighted quantiles
            ``trim`` and 1 - ``trim``, a site that one of them cuts through with the part inside.
        trim: share of the weight that is left out at either end, in (0, 0.5).

    Source:
        Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, with weights in place of counts.
    """

    kind: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim: float = 0.25


MEAN = Aggregate()


def weighted_average(
    states: States,
    weights: Mapping[str, float],
    *,
    updates: bool = False,
    how: Aggregate = MEAN,
    movement: Movement | None = None,
) -> dict[str, torch.Tensor]:
    r"""Average of the sites' states with one weight for each site.

    .. math:: \hat w = \sum_k a_k w_k, \quad \sum_k a_k = 1

    Floating tensors are accumulated in float64 and cast back; where sites differ in precision, the result has
    the promoted dtype. Integer and boolean tensors (``num_batches_tracked``) are the maximum over the sites,
    a ``running_var`` is floored at 0, and a spectral norm's vectors are those of the averaged weight
    (:mod:`fairflare.core.aggregation.spectral`).

    Args:
        states: ``{site: state}``, whose states may read a tensor from disk when it is asked for: tensor by
            tensor, sites in sorted order, so besides the result one tensor is held, of as many sites as fit into
            128 MiB. Or an iterable of ``(site, state)``: one pass in the order given, with one float64 model as
            accumulator. Both forms give equal bits for the same order of sites.
        weights: ``a_k`` by site, finite, ``>= 0``, sum 1 within 1e-6; exactly the sites of
            ``states``.
        updates: the states are updates (DIFF); then a ``running_var`` may be negative and is not floored.
        how: what takes the place of the mean, number by number. All but the mean hold one tensor of all sites, and of
            integers the plain lower median is taken: a site alone cannot move a counter.
        movement: what becomes of the change of trained tensors; only with a mapping of states.

    Returns:
        The averaged state; keys in the order of the first site.

    Raises:
        ValueError: no site, other sites in ``weights`` than in ``states``, a weight out of range, or a tensor
            that is missing, unexpected, not finite, or of another shape or kind than at the first site (names
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
    states: States,
    layer_weights: Mapping[str, Mapping[str, float]],
    owner: Mapping[str, str],
    *,
    updates: bool = False,
    how: Aggregate = MEAN,
    movement: Movement | None = None,
) -> dict[str, torch.Tensor]:
    r"""Average of the sites' states with a weight for each site and layer, Eq. (6) of Fed-LWR.

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
        ValueError: as :func:`weighted_average`, or a tensor without an owner, or an owner without weights.

    Source:
        Yan et al., MICCAI 2024 (Fed-LWR), Eq. (6); batch-norm buffers follow the layer that owns them.
    """
    checks.not_empty("layer_weights", layer_weights, of="layer")
    checked = {layer: checks.shares(rho, of=f"layer {layer!r}") for layer, rho in layer_weights.items()}
    first_layer, first = next(iter(checked.items()))
    for layer, rho in checked.items():
        checks.same_names(f"weights of layer {layer!r}", rho, f"weights of layer {first_layer!r}", first)

    def weights_of(name: str) -> dict[str, float]:
        if name not in owner:
            raise ValueError(f"tensor {name!r} has no owner layer")
        if owner[name] not in checked:
            raise ValueError(f"tensor {name!r} belongs to layer {owner[name]!r}, which has no weights")
        return checked[owner[name]]

    return _average(states, set(first), weights_of, floor=not updates, how=how, movement=movement)


class Movement:
    """What becomes of the mean change of the trained tensors before the model takes it: a method's optimizer.

    Args:
        move: is given the mean change, ``names -> w - w^r`` in float64, and gives back the change to apply: the same
            names and shapes, finite. The mean of a tensor is made when it is asked for, each time anew, so that
            nothing of the model's size waits. The mapping itself given back: the plain average.
        types: of the tensors that it is about, by name.
        start: gives what the sites started from; ``None``: the states are changes themselves. Called when the first
            tensor is asked for.
        buffers: weight by site of the other floating tensors, as in :func:`weighted_average`; default: as the rest.
        products: averages low-rank adapters, of models, where ``move`` gives ``change`` itself.

    Attributes:
        length: of the change that was applied, as a factor of the mean change's; 1 where either is not known.
    """

    def __init__(
        self,
        move: Callable[[State], State],
        types: Mapping[str, torch.dtype],
        start: Callable[[], State | None],
        buffers: Mapping[str, float] | None = None,
        products: Products | None = None,
    ) -> None:
        self.move, self.types, self.buffers, self.products = move, types, buffers, products
        self.start = cache(start)
        self._squares: dict[str, float] = {}
        self._moved: dict[str, float] = {}

    @property
    def length(self) -> float:
        total = math.fsum(self._squares[name] for name in self._moved if name in self._squares)
        return math.sqrt(math.fsum(self._moved.values()) / total) if total > 0 else 1.0

    def applied(self, mean: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor] | None:
        """Makes the new tensors by name; ``None``: the change stays as it is.

        Args:
            mean: of the sites' tensors of a name, float64.

        Raises:
            ValueError: what ``move`` gives has other names, or (when a tensor is made) another shape, or is not finite.
        """

        def change(name: str) -> torch.Tensor:
            found, start = mean(name), self.start()
            found = found if start is None else found.sub_(start[name])
            self._squares[name] = sq_norm({name: found})
            return found

        changes = Made(self.types, change)
        moved = self.move(changes)
        if moved is changes:
            return None
        checks.same_names("what move() gives", moved, "the mean change", changes, of="tensor")

        def make(name: str) -> torch.Tensor:
            step, start, dtype = moved[name].double(), self.start(), self.types[name]
            like = step if start is None else start[name]
            checks.same_shape(f"what move() gives of tensor {name!r}", step, "the model", like)
            _check_finite(step, f"what move() gives of tensor {name!r}")
            self._moved[name] = sq_norm({name: step})
            total = step if start is None else step + like
            most = torch.finfo(dtype).max
            if float(total.abs().max() if total.numel() else 0.0) > most:
                log.warning("the change takes tensor %r beyond %s; cut to its largest number", name, dtype)
                total = total.clamp(-most, most)
            return total.to(dtype, copy=True)

        return make


class Made(Mapping[str, torch.Tensor]):
    """Tensors by name, each made when it is asked for, and every time anew."""

    def __init__(self, names: Iterable[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def difference(local: State, received: State, site: str = "local") -> dict[str, torch.Tensor]:
    """The update of a site: local minus received, what travels as a DIFF.

    Args:
        local: state after local training.
        received: state that the training started from; same keys, shapes and kinds.
        site: named in errors.

    Returns:
        ``w_k - w^r`` with the dtype of ``local`` for floating tensors and int64 for integer and boolean ones.

    Raises:
        ValueError: keys, shapes or kinds differ, or ``local`` is not finite.
    """
    check_state(local, received, site)
    update = {}
    for name, mine in local.items():
        theirs, kind = received[name].detach().to(mine.device), mine.dtype if mine.is_floating_point() else torch.int64
        update[name] = mine.detach().to(kind) - theirs.to(kind)
    return update


def add_update(state: State, update: State, site: str = "update") -> dict[str, torch.Tensor]:
    """The local state behind an update: global plus DIFF.

    Args:
        state: the global state that the site received.
        update: ``w_k - w^r``, same keys and shapes. Integer tensors may have become floating in a privacy
            filter; they are rounded to the nearest integer.
        site: named in errors.

    Returns:
        ``w^r + update`` in the dtypes of ``state``; neither argument is changed.

    Raises:
        ValueError: keys or shapes differ, a floating tensor came back as integer, or the sum is not finite.
    """
    _check_names(update, state, site, "the global model")
    return {
        name: local_tensor(update[name], base, f"site {site!r}: tensor {name!r}", is_update=True)
        for name, base in state.items()
    }


def local_tensor(value: torch.Tensor, received: torch.Tensor, where: str, *, is_update: bool) -> torch.Tensor:
    """One tensor of a site's local model, in the shape and dtype of the one that the site received.

    Args:
        value: what the site sent, in any precision. Integers may have become floating in a privacy filter; they are
            rounded to the nearest.
        received: the tensor of the global model; not changed.
        where: named in errors.
        is_update: ``value`` is the difference to ``received``, else the tensor itself.

    Raises:
        ValueError: another shape, a floating tensor that came back as integer, a value that is not finite or does not
            fit.
    """
    checks.same_shape(where, value, "the global model", received)
    if value.is_complex() or (received.is_floating_point() and not value.is_floating_point()):
        raise ValueError(f"{where} is {value.dtype}, the global model has {received.dtype}")
    received, value = received.detach(), value.detach().to(received.device)
    if not received.is_floating_point():
        _check_finite(value, where)
        steps = _whole(value, where)
        return (received.long() + steps if is_update else steps).to(received.dtype)
    total = value
    if is_update:
        wide = received.dtype if value.dtype == received.dtype else torch.float64
        total = received.to(wide) + value.to(wide)
    total = total.to(received.dtype)
    if not _all_finite(total):
        raise ValueError(f"{where} is not finite" + (" after adding the update" if is_update else ""))
    return total


def check_state(state: State, like: State, site: str) -> None:
    """Checks the state of a site against another one: same keys, shapes and kinds, and every value finite.

    Args:
        state: the state to check.
        like: what it must look like, as a rule the global model.
        site: named in errors.

    Raises:
        ValueError: the first disagreement, with site and tensor.
    """
    _check_names(state, like, site, "the global model")
    for name, expected in like.items():
        tensor = state[name]
        where = f"site {site!r}: tensor {name!r}"
        checks.same_shape(where, tensor, "the global model", expected)
        _check_kind(tensor, expected, where, "the global model")
        _check_finite(tensor, where)


def sq_norm(update: State, names: Iterable[str] | None = None) -> float:
    """Squared L2 norm over the tensors of an update, accumulated in float64.

    Args:
        update: any state.
        names: tensors to include; every floating tensor when None (integer counters are not part of a norm).

    Returns:
        The sum of squares, ``>= 0``; 0 for no tensor.

    Raises:
        ValueError: a name that is not in ``update``, or a tensor that is not finite.
    """
    parts = []
    for name in [n for n, t in update.items() if t.is_floating_point()] if names is None else names:
        if name not in update:
            raise ValueError(f"tensor {name!r} is not in the update")
        squares = [block.double().square().sum().item() for block in blocks(update[name])]
        if not all(map(math.isfinite, squares)):
            raise ValueError(f"squared norm of tensor {name!r} is not finite")
        parts.extend(squares)
    return math.fsum(parts)


# ------------------------------------------------------------------------------------------------------------


class _NotFinite(ValueError):
    """The average is not finite: a tensor is not, or the weights sum to a bit more than 1."""


class _Robust:
    """Weighted median or trimmed mean of one tensor over the sites; all of them wait."""

    def __init__(self, name: str, first_site: str, first: torch.Tensor, how: Aggregate) -> None:
        self.name, self.first_site, self.how = name, first_site, how
        self.like = first.detach().new_empty(()).expand(first.shape)
        self.dtype = first.dtype
        self._waiting: list[tuple[torch.Tensor, float]] = []

    def add(self, site: str, tensor: torch.Tensor, weight: float) -> None:
        self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self._waiting.append((tensor.detach().to(self.like.device).reshape(-1), weight))

    def result(self, floor: bool, wide: bool = False) -> torch.Tensor:
        tensors = [tensor for tensor, _ in self._waiting]
        if not self.dtype.is_floating_point:
            middle = torch.stack([tensor.long() for tensor in tensors]).median(0).values
            return middle.to(self.dtype).reshape(self.like.shape)
        weights = torch.tensor([weight for _, weight in self._waiting], dtype=torch.float64, device=self.like.device)
        dtype = torch.float64 if wide else self.dtype
        found = torch.empty(self.like.numel(), dtype=dtype, device=self.like.device)
        for block, *parts in zip(found.split(_BLOCK), *(tensor.split(_BLOCK) for tensor in tensors), strict=True):
            middle = self._middle(torch.stack([part.double() for part in parts]), weights)
            block.copy_(middle.clamp_(min=0.0) if floor and self.name.rpartition(".")[2] == "running_var" else middle)
        if not _all_finite(found):
            raise _NotFinite(f"the {self.how.kind} of tensor {self.name!r} does not fit {self.dtype}")
        return found.reshape(self.like.shape)

    def _middle(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of (sites, numbers), over the sites."""
        values, order = values.sort(dim=0, stable=True)
        weights = weights[order]
        above = weights.cumsum(0)
        if self.how.kind == "median":
            bounds = ((above >= 0.5 - _TIE), (above > 0.5 + _TIE))  # the last sum is 1: there is always a first
            low, high = (values.gather(0, reached.int().argmax(0, keepdim=True))[0] for reached in bounds)
            return low / 2 + high / 2
        trim = self.how.trim
        kept = (above.clamp(max=1 - trim) - (above - weights).clamp(min=trim)).clamp_(min=0.0)
        return values.where(kept > 0, 0.0).mul_(kept).sum(0).div_(kept.sum(0))


class _Mean:
    """Weighted sum of one tensor over the sites, or their maximum when it holds integers."""

    def __init__(self, name: str, first_site: str, first: torch.Tensor, hold: int) -> None:
        """``hold``: bytes of tensors that may wait, to be added together: the sum then stays in the cache."""
        self.name, self.first_site = name, first_site
        self.like = first.detach().new_empty(()).expand(first.shape)  # shape and dtype without the memory
        self.dtype = first.dtype
        self.total = None if first.is_floating_point() else first.detach().clone()  # of what waits no more
        self._hold, self._held = hold, 0  # bytes
        self._waiting: list[tuple[torch.Tensor, float]] = []

    def add(self, site: str, tensor: torch.Tensor, weight: float) -> None:
        self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        tensor = tensor.detach().to(self.like.device)
        if not tensor.is_floating_point():
            assert self.total is not None
            self.total = torch.maximum(self.total, tensor)
            return
        self._waiting.append((tensor.reshape(-1), weight))
        self._held += tensor.nbytes
        if self._held > self._hold:
            self._add_waiting()

    def _add_waiting(self) -> torch.Tensor:
        """The sum so far, flat, in float64."""
        if self.total is None:
            self.total = torch.zeros(self.like.numel(), dtype=torch.float64, device=self.like.device)
        scratch = self._room()
        for total, parts in self._blocks(self.total):
            self._add(total, parts, scratch)
        self._waiting.clear()
        self._held = 0
        return self.total

    def _blocks(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """The tensor block by block, beside those of what waits."""
        for block, *parts in zip(flat.split(_BLOCK), *(part.split(_BLOCK) for part, _ in self._waiting), strict=True):
            yield block, parts

    def _add(self, total: torch.Tensor, parts: list[torch.Tensor], scratch: torch.Tensor) -> None:
        """Number by number in the order of the sites, however many wait: the bits are the same."""
        for part, (_, weight) in zip(parts, self._waiting, strict=True):
            # Product and sum are two operations: a fused one rounds differently from machine to machine.
            total.add_(scratch[: len(total)].copy_(part).mul_(weight))

    def _room(self) -> torch.Tensor:
        return torch.empty(min(_BLOCK, self.like.numel()), dtype=torch.float64, device=self.like.device)

    def result(self, floor: bool, wide: bool = False) -> torch.Tensor:
        if not self.dtype.is_floating_point:
            assert self.total is not None
            return self.total.to(self.dtype)
        floor = floor and self.name.rpartition(".")[2] == "running_var"
        if wide or self.total is not None:
            total = self._add_waiting()
            mean = (total.clamp_(min=0.0) if floor else total).to(torch.float64 if wide else self.dtype)
        else:  # all sites at once: no sum of the tensor's size
            mean = torch.empty(self.like.numel(), dtype=self.dtype, device=self.like.device)
            room, scratch = self._room(), self._room()
            for block, parts in self._blocks(mean):
                total = room[: len(block)].zero_()
                self._add(total, parts, scratch)
                block.copy_(total.clamp_(min=0.0) if floor else total)
        if not _all_finite(mean):
            raise _NotFinite(f"the average of tensor {self.name!r} does not fit {self.dtype}")
        return mean.reshape(self.like.shape)


def _average(
    states: States, sites: set[str], weights_of: WeightsOf, *, floor: bool, how: Aggregate, movement: Movement | None
) -> dict[str, torch.Tensor]:
    """The average; ``floor``: it is of models, and what belongs together in a model does so again."""
    average = _means(states, sites, weights_of, floor, how, movement)
    return average | singular_vectors(average) if floor else average


def _means(
    states: States, sites: set[str], weights_of: WeightsOf, floor: bool, how: Aggregate, movement: Movement | None
) -> dict[str, torch.Tensor]:
    """Either form of the states: all tensors in one pass over the sites, or a pass for every tensor."""
    if not isinstance(states, Mapping):
        if movement is None:
            return _one_pass(states, sites, weights_of, floor, True, how)
        raise ValueError("a movement needs every tensor by itself: give the states by site, not a stream")
    _check_sites(set(states), sites)
    opened = {site: states[site] for site in sorted(states)}
    first_site, first = next(iter(opened.items()))
    for site, state in opened.items():
        _check_names(state, first, site, f"site {first_site!r}")

    def mean(name: str, wide: bool = False) -> torch.Tensor:
        column = ((site, {name: state[name]}) for site, state in opened.items())
        try:
            # What is not finite shows in a mean, and hides in a median.
            return _one_pass(column, sites, weights_of, floor, how.kind != "mean", how, wide)[name]
        except _NotFinite:  # seen in the sum, which is cheaper than at every site: now look which site it is
            for site, state in opened.items():
                _check_finite(state[name], f"site {site!r}: tensor {name!r}")
            raise

    moved = movement.applied(partial(mean, wide=True)) if movement is not None else None
    makers: dict[str, Callable[[str], torch.Tensor]] = (
        dict.fromkeys(movement.types, moved) if moved and movement else {}
    )
    if movement is not None and movement.products is not None:
        factors = movement.products.averaged(opened, weights_of)
        makers |= dict.fromkeys(factors, factors.pop)
    return {name: makers.get(name, mean)(name) for name in first}


def _one_pass(
    states: Iterable[tuple[str, State]],
    sites: set[str],
    weights_of: WeightsOf,
    floor: bool,
    look: bool,
    how: Aggregate,
    wide: bool = False,
) -> dict[str, torch.Tensor]:
    """The averages of all tensors; ``look``: at every tensor that comes, as it cannot be looked at again; ``wide``: in
    float64."""
    means: dict[str, _Mean | _Robust] = {}
    seen: set[str] = set()
    first_site = ""
    for site, state in states:
        if site in seen:
            raise ValueError(f"site {site!r} comes twice")
        if site not in sites:
            raise ValueError(f"site {site!r} has no weight; weights are for {sorted(sites)}")
        if not seen:
            first_site = site
        elif state.keys() != means.keys():
            _check_names(state, means, site, f"site {first_site!r}")
        for name in list(means) or list(state):
            tensor = state[name]
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"site {site!r}: tensor {name!r} must be a torch.Tensor, got {type(tensor).__name__}")
            if look:
                _check_finite(tensor, f"site {site!r}: tensor {name!r}")
            if name not in means:
                if tensor.is_complex():
                    raise ValueError(f"site {site!r}: tensor {name!r} is {tensor.dtype}, not a real number")
                hold = 0 if look else _HELD
                mean = how.kind == "mean"
                means[name] = _Mean(name, site, tensor, hold) if mean else _Robust(name, site, tensor, how)
            like = means[name].like
            if tensor.shape != like.shape or tensor.is_floating_point() != like.is_floating_point():
                where, whose = f"site {site!r}: tensor {name!r}", f"site {first_site!r}"
                checks.same_shape(where, tensor, whose, like)
                _check_kind(tensor, like, where, whose)
            # Integer tensors are not averaged and need no weight.
            means[name].add(site, tensor, weights_of(name)[site] if tensor.is_floating_point() else 0.0)
        seen.add(site)
        del state  # before the next one is made
    if not seen or seen != sites:
        _check_sites(seen, sites)
    return {name: means.pop(name).result(floor, wide) for name in list(means)}


def _check_sites(have: set[str], weighted: set[str]) -> None:
    checks.same_names("the states", checks.not_empty("the states to average", have), "the weights", weighted)


def _check_names(state: Mapping[str, object], like: Mapping[str, object], site: str, whose: str) -> None:
    if state.keys() == like.keys():
        return
    name = next(name for name in (*like, *state) if name not in state or name not in like)
    what = f"missing, {whose} has it" if name in like else f"unexpected, {whose} does not have it"
    raise ValueError(f"site {site!r}: tensor {name!r} is {what}")


def _check_kind(tensor: torch.Tensor, like: torch.Tensor, where: str, whose: str) -> None:
    if tensor.is_complex() or tensor.is_floating_point() != like.is_floating_point():
        raise ValueError(f"{where} is {tensor.dtype}, {whose} has {like.dtype}")


def _check_finite(tensor: torch.Tensor, where: str) -> None:
    if not _all_finite(tensor):
        raise ValueError(f"{where} is not finite")


def _whole(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """As int64, rounded."""
    if not tensor.is_floating_point():
        return tensor.long()
    if bool((tensor.abs() > _LARGEST_WHOLE).any()):
        raise ValueError(f"{where} holds a number that no integer of the global model can be")
    return tensor.double().round().long()


def _all_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is finite; cheap sums, and the exact test only where one of them overflows."""
    if not tensor.is_floating_point():
        return True
    return all(
        math.isfinite(block.sum(dtype=torch.float32 if block.element_size() < 4 else None).item())
        or bool(torch.isfinite(block).all())
        for block in blocks(tensor)
    )


def blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensor in flat pieces that PyTorch handles in one thread and that fit the cache."""
    return torch.split(tensor.detach().reshape(-1), _BLOCK)
