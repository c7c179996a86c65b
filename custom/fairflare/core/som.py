r"""FedMRL's aggregation weights from a self-organizing map of the sites' models.

A small grid of neurons, each a point in the space of the models, is pulled towards the local models round by
round. A site's weight follows from how far its model lies from all neurons and from its cosine with the received
model. :class:`SelfOrganizingMap` has three forms of the same rules:

- ``"plain"``: the neurons are vectors as long as the model. The reference, and right for small models.
- ``"gram"``: the same numbers without such vectors. A neuron starts somewhere and only moves towards local
  models, so it stays an affine combination of its start and of these; all the rules ask for are distances, and
  these follow from inner products. One pass over the models, block by block, adds up the inner products of all
  local models and all starts (a 45 x 45 matrix for 20 sites and 25 neurons); the map is then trained on
  coefficients alone. Random starts are not stored: a counter-based generator makes the block that is needed from
  (seed, round, tensor, block), so that they are the very numbers of the plain form.
- ``"sketch"``: the plain form on count sketches (fixed random projections) of the vectors; the only one whose
  memory from round to round is small. Approximate: a sketch of 4096 numbers keeps distances to some 2 %. Neurons
  that start around the mean differ by less than that in their distance to a site, so it is another neuron that
  wins than in the exact forms, and the weights differ like those of another seed.

What must outlive a round are 25 points in general position. No exact form can describe them with less than 25
vectors once six or seven rounds of four sites have pulled them: that is ``storage`` x 25 x parameters in the state
of the plain form, and in a file of the caller's for the Gram form, written and read tensor by tensor (``keep`` and
``kept`` of :meth:`SelfOrganizingMap.step`). With ``restart`` every round begins with a new map and nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fairflare.core.weighting import normalise

__all__ = ["SelfOrganizingMap", "SomResult", "Stream", "model_similarity", "som_weights"]

Array: TypeAlias = npt.NDArray[np.float64]
#: A model as something that gives its tensors one at a time: a state dict (which may read from disk when a tensor
#: is asked for), an iterable of tensors, or a function that returns one.
Stream: TypeAlias = Mapping[str, Tensor] | Iterable[Tensor] | Callable[[], Iterable[Tensor]]
Form: TypeAlias = Literal["plain", "gram", "sketch"]

FORMS = ("plain", "gram", "sketch")
INITS = ("sample", "uniform")
SPACES = ("weights", "updates")
ORDERS = ("name", "similarity")
STORAGES = {"float32": torch.float32, "float64": torch.float64}

#: Statistics of a batch norm: part of the model, not of its parameters.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
#: Spread of the starts around the mean model, in standard deviations of the parameters.
SAMPLE_SPREAD = 0.01
#: Distances that differ by less than this share of the largest are a tie, whichever form computed them.
TIE = 1e-10
#: Numbers per block: with 45 vectors in float64 a block takes 12 MB.
_BLOCK = 2**15
_NEIGHBOURS = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]


@dataclass(frozen=True)
class SomResult:
    """What one round of the map gave.

    Attributes:
        weights: alpha_h by site, ``> 0`` or ``>= 0`` where the similarity is 0; sum 1. Without the excluded sites.
        similarity: s_h by site, in [0, 1].
        bmu: (row, column) of the neuron nearest to the site's model, after training.
        sq_distances: squared distance of the site's model to every neuron, (rows, columns), after training.
        u_matrix: (rows, columns), mean distance of a neuron to its up to eight neighbours; 0 for a grid of one.
        sigma: radius of the neighbourhood in this round.
        excluded: sites whose model is not finite.
    """

    weights: dict[str, float]
    similarity: dict[str, float]
    bmu: dict[str, tuple[int, int]]
    sq_distances: dict[str, Array]
    u_matrix: Array
    sigma: float
    excluded: tuple[str, ...] = ()


# --- formulas -----------------------------------------------------------------------------------------------


def model_similarity(dot: float, sq_norm_a: float, sq_norm_b: float) -> float:
    r"""Similarity of two models from their cosine.

    .. math:: s = (1 + \cos(v_a, v_b)) / 2

    Args:
        dot: inner product of the two vectors.
        sq_norm_a, sq_norm_b: their squared norms.

    Returns:
        s in [0, 1]; 0.5 where a vector is zero.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.3; (MRL-3) of our specification.
    """
    if sq_norm_a <= 0 or sq_norm_b <= 0:
        return 0.5
    cosine = dot / (math.sqrt(sq_norm_a) * math.sqrt(sq_norm_b))
    return (1.0 + min(max(cosine, -1.0), 1.0)) / 2.0


def som_weights(
    sq_distances: Mapping[str, npt.ArrayLike], similarity: Mapping[str, float], *, sigma_w: float = 1.0
) -> dict[str, float]:
    r"""Aggregation weights from the distances to the neurons and the similarity to the received model.

    .. math:: \alpha_h = \hat s_h u_h / \sum_j \hat s_j u_j, \quad
              u_h = \frac{1}{N} \sum_{ij} \exp\bigl(-D^2_{h,ij} / (2 \sigma_w^2 \bar S)\bigr)

    with :math:`\hat s` the similarities scaled to sum 1 and :math:`\bar S` the mean of all :math:`D^2`.

    Args:
        sq_distances: D^2 by site: squared distances to all neurons, any shape, the same at every site; finite,
            ``>= 0``.
        similarity: s by site, ``>= 0``; the same sites. All 0 count as all equal.
        sigma_w: width, ``> 0``.

    Returns:
        alpha by site, sum 1. Equal distances leave the similarities: alpha = s-hat.

    Raises:
        ValueError: no site, different sites, or a value out of range (names the site).

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.3 and Eq. (10), read as (MRL-9) of our specification. The
        factor 1/H of Eq. (10) is left out: with weights that sum to 1 it would shrink the model.

    Example:
        >>> som_weights({"A": [[0.0, 2.0]], "B": [[1.0, 1.0]]}, {"A": 0.5, "B": 0.5})["A"] > 0.5
        True
    """
    if not sq_distances:
        raise ValueError("no site to weight")
    if set(sq_distances) != set(similarity):
        raise ValueError(f"distances are of sites {sorted(sq_distances)}, similarities of {sorted(similarity)}")
    _positive("sigma_w", sigma_w)
    sites = sorted(sq_distances)
    rows = [np.asarray(sq_distances[site], dtype=np.float64).reshape(-1) for site in sites]
    for site, row in zip(sites, rows, strict=True):
        if row.size != rows[0].size or not row.size:
            raise ValueError(f"site {site!r} has {row.size} distances, site {sites[0]!r} has {rows[0].size}")
        if not (np.isfinite(row).all() and (row >= 0).all()):
            raise ValueError(f"squared distances of site {site!r} must be finite and >= 0, got {row.tolist()}")
        if not (math.isfinite(similarity[site]) and similarity[site] >= 0):
            raise ValueError(f"similarity of site {site!r} must be finite and >= 0, got {similarity[site]}")
    shares = normalise(similarity)
    largest = max(row.max() for row in rows)
    if largest == 0:
        return shares
    scaled = np.stack(rows) / largest  # keeps the mean of huge distances in range
    exponents = -scaled / (2.0 * sigma_w**2 * scaled.mean())
    highest = exponents.max(axis=1)
    log_u = highest + np.log(np.exp(exponents - highest[:, None]).mean(axis=1))
    u = np.exp(log_u - log_u.max())
    return normalise({site: shares[site] * value for site, value in zip(sites, u.tolist(), strict=True)})


# --- the map ------------------------------------------------------------------------------------------------


class SelfOrganizingMap:
    r"""The map, from round to round.

    Each round, with :math:`\hat s` the similarities scaled to sum 1, H sites in sorted order, and
    ``sigma = max(sigma_min, sigma_0 exp(-kappa r))``:

    .. math:: b_h = \arg\min_{ij} \lVert v_h - m_{ij} \rVert, \quad
              g_{ij} = \exp(-\lVert (i,j) - b_h \rVert^2 / (2 \sigma^2)), \quad
              m_{ij} \leftarrow m_{ij} + \min(1, \eta H \hat s_h g_{ij}) (v_h - m_{ij})

    then :func:`som_weights` of the distances to the trained neurons.

    Args:
        grid: rows and columns, each ``>= 1``.
        sigma_0, kappa, sigma_min: radius of the neighbourhood: start ``> 0``, decay ``>= 0`` per round, floor
            ``> 0``.
        eta: learning rate, ``> 0``.
        eta_decay: ``>= 0``; the learning rate of round r is ``eta exp(-eta_decay r)``. 0, the default, is the
            specification's constant rate.
        epochs: passes over the sites in a round, ``>= 1``.
        sigma_w: width in :func:`som_weights`, ``> 0``.
        init: where neurons start. ``"sample"``: at the mean of the first round's vectors plus 0.01 times their
            standard deviation (one number, over all sites and parameters) times N(0, 1). ``"uniform"``: U[0, 1),
            the paper's "random"; every real model is then nearly equally far from all neurons.
        space: ``"weights"``: the map lives among the models, and s_h is the similarity of local and received
            model. ``"updates"``: among local minus received, and s_h is the similarity of a site's update to the
            mean one; shows differences where the cosines of the models are all close to 1.
        form: ``"plain"``, ``"gram"`` or ``"sketch"``, see the module.
        order: in which the sites pull. ``"name"``, the specification's; renaming the sites then changes the weights
            a little. ``"similarity"``: the most similar first, so that no name matters.
        restart: begin every round with new neurons; only the round counter is kept.
        storage: precision of the neurons between rounds, ``"float32"`` or ``"float64"``.
        sketch_size: length of a sketch, ``>= 1``.
        seed: of the starts and of the sketch, ``>= 0``.

    Raises:
        ValueError: an argument out of range (names it and the value).

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.3, read as (MRL-3) to (MRL-9) of our specification. The
        paper gives no formula for the influence; the authors' code computes a map and aggregates without it.
    """

    def __init__(
        self,
        grid: Sequence[int] = (5, 5),
        *,
        sigma_0: float = 2.0,
        kappa: float = 0.1,
        sigma_min: float = 0.5,
        eta: float = 0.5,
        eta_decay: float = 0.0,
        epochs: int = 1,
        sigma_w: float = 1.0,
        init: Literal["sample", "uniform"] = "sample",
        space: Literal["weights", "updates"] = "weights",
        form: Form = "plain",
        order: Literal["name", "similarity"] = "name",
        restart: bool = False,
        storage: Literal["float32", "float64"] = "float32",
        sketch_size: int = 4096,
        seed: int = 0,
    ) -> None:
        if len(grid) != 2 or any(int(side) != side or side < 1 for side in grid):
            raise ValueError(f"grid must be two whole numbers >= 1, got {tuple(grid)}")
        for name, number in (("sigma_0", sigma_0), ("sigma_min", sigma_min), ("eta", eta), ("sigma_w", sigma_w)):
            _positive(name, number)
        for name, number in (("kappa", kappa), ("eta_decay", eta_decay)):
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {number}")
        for name, count, least in (("epochs", epochs, 1), ("sketch_size", sketch_size, 1), ("seed", seed, 0)):
            if int(count) != count or not least <= count < 2**63:
                raise ValueError(f"{name} must be a whole number >= {least}, got {count}")
        for name, value, known in (
            ("init", init, INITS),
            ("space", space, SPACES),
            ("form", form, FORMS),
            ("order", order, ORDERS),
            ("storage", storage, tuple(STORAGES)),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; Available: {', '.join(map(repr, sorted(known)))}")
        self.grid = (int(grid[0]), int(grid[1]))
        self.sigma_0, self.kappa, self.sigma_min = float(sigma_0), float(kappa), float(sigma_min)
        self.eta, self.eta_decay, self.epochs, self.sigma_w = float(eta), float(eta_decay), int(epochs), float(sigma_w)
        self.init, self.space, self.form = init, space, form
        self.order, self.restart = order, bool(restart)
        self.storage, self.sketch_size, self.seed = storage, int(sketch_size), int(seed)

        #: Rounds done.
        self.rounds = 0
        #: Neurons between rounds, (rows * columns, length); None before the first round, and in the Gram form.
        self.neurons: Tensor | None = None
        rows, columns = self.grid
        cells = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
        self._sq_steps = ((cells[:, None, :] - cells[None, :, :]) ** 2).sum(axis=-1).astype(np.float64)

    @property
    def sigma(self) -> float:
        """Radius of the neighbourhood in the next round."""
        return max(self.sigma_min, self.sigma_0 * math.exp(-self.kappa * self.rounds))

    def step(
        self,
        states: Mapping[str, Stream],
        received: Stream,
        *,
        names: Iterable[str] | None = None,
        kept: Mapping[str, Tensor] | None = None,
        keep: Callable[[str, Tensor], object] | None = None,
    ) -> SomResult:
        """One round: trains the map on the local models and weights the sites.

        Args:
            states: local model by site, after training. All are read side by side, one tensor of each at a time;
                with ``keep`` they are read twice.
            received: the model the sites started from, in the same form as the local ones.
            names: tensors that make up the vector, the trainable parameters; for state dicts only. Default: every
                floating tensor but the statistics of batch norms.
            kept: neurons to begin with, ``{tensor name: (rows * columns, *shape)}`` (names ``"0"``, ``"1"``, ... if
                the models are no state dicts). The Gram form needs in every round after the first what it handed to
                ``keep`` in the round before, unless it restarts; the other forms remember by themselves and take it
                only to place the neurons.
            keep: called with the name of each tensor and the trained neurons' part of it, (rows * columns, *shape)
                in the precision of ``storage``. Gram form only. Must not overwrite ``kept`` while a round may still
                be repeated.

        Returns:
            Weights and what a picture of the map needs. A site whose model is not finite is left out.

        Raises:
            ValueError: no (usable) site, tensors that differ from the received model's (names site and tensor), a
                received model that is not finite, or neurons that are missing or of another shape. The map is then
                unchanged.
        """
        if not states:
            raise ValueError("no site to place on the map")
        if keep is not None and self.form != "gram":
            raise ValueError(f"keep is for form 'gram'; form {self.form!r} keeps its neurons itself")
        if keep is not None and any(isinstance(stream, Iterator) for stream in (received, *states.values())):
            raise ValueError("with keep the models are read twice; give a function that returns the iterator")
        if self.form == "gram" and self.rounds and kept is None and not self.restart:
            raise ValueError(f"form 'gram' needs the neurons that round {self.rounds - 1} handed to keep")
        models = _Models(states, received, None if names is None else tuple(names))
        sums, space = self._gather(models, kept)
        excluded = tuple(site for site in models.sites if not math.isfinite(sums.sq_norm[site]))
        sites = [site for site in models.sites if site not in excluded]
        if not sites:
            raise ValueError(f"no site has a finite model: {', '.join(map(repr, excluded))}")
        space.choose([models.sites.index(site) for site in sites])
        if space.starts_at_mean:
            space.start_at_mean(SAMPLE_SPREAD * sums.spread(sites))

        similarity = sums.similarity(sites)
        shares = normalise(similarity)
        sigma = self.sigma
        eta = self.eta * math.exp(-self.eta_decay * self.rounds)
        in_turn = list(enumerate(sites))
        if self.order == "similarity":
            in_turn.sort(key=lambda turn: -similarity[turn[1]])
        for _ in range(self.epochs):
            for h, site in in_turn:
                nearest = _nearest(space.sq_distances(h))
                near = np.exp(-self._sq_steps[nearest] / (2.0 * sigma**2))
                space.pull(h, np.minimum(1.0, eta * len(sites) * shares[site] * near))

        sq_distances = {site: space.sq_distances(h).reshape(self.grid) for h, site in enumerate(sites)}
        result = SomResult(
            weights=som_weights(sq_distances, similarity, sigma_w=self.sigma_w),
            similarity=similarity,
            bmu={site: divmod(_nearest(d.reshape(-1)), self.grid[1]) for site, d in sq_distances.items()},
            sq_distances=sq_distances,
            u_matrix=self._u_matrix(space.sq_between()),
            sigma=sigma,
            excluded=excluded,
        )
        if isinstance(space, _Vectors):
            self.neurons = None if self.restart else space.result().to(STORAGES[self.storage])
        elif isinstance(space, _Inner) and keep is not None:
            self._write(models, sites, kept, space, keep)
        self.rounds += 1
        return result

    def state_dict(self) -> dict[str, Any]:
        """What goes on from round to round: plain values and one tensor (None in the Gram form)."""
        return {
            "settings": self._settings(),
            "rounds": self.rounds,
            "neurons": None if self.neurons is None else self.neurons.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave.

        Raises:
            ValueError: the state is of a map with other settings (names the first), or its neurons do not fit.
        """
        settings = self._settings()
        for name, value in settings.items():
            theirs = state["settings"].get(name)
            if theirs != value:
                raise ValueError(f"state is of a map with {name} {theirs!r}, this one has {value!r}")
        neurons = state["neurons"]
        if neurons is not None and (neurons.dim() != 2 or len(neurons) != self._count):
            raise ValueError(f"state has neurons of shape {tuple(neurons.shape)}, the map has {self._count} neurons")
        self.rounds = int(state["rounds"])
        self.neurons = None if neurons is None else neurons.detach().clone().to(STORAGES[self.storage])

    # --------------------------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return self.grid[0] * self.grid[1]

    def _settings(self) -> dict[str, Any]:
        """The settings that say what the numbers of a state mean."""
        return {
            "grid": list(self.grid),
            "form": self.form,
            "space": self.space,
            "storage": self.storage,
            "sketch_size": self.sketch_size if self.form == "sketch" else 0,
            "seed": self.seed,
        }

    def _start(self, kept: Mapping[str, Tensor] | None) -> str:
        """Where the neurons begin this round."""
        if kept is not None:
            return "kept"
        return "own" if self.neurons is not None and not self.restart else self.init

    def _gather(self, models: _Models, kept: Mapping[str, Tensor] | None) -> tuple[_Sums, _Space]:
        """One pass over all models."""
        start = self._start(kept)
        sums = _Sums(models.sites, self.space)
        space: _Space
        if self.form == "gram":
            space = _Inner(len(models.sites), self._count, start == "sample")
        elif self.form == "sketch":
            space = _Sketches(len(models.sites), self._count, start == "sample", self.sketch_size, self._buckets)
        else:
            space = _Vectors(start == "sample")
        for block in self._blocks(models, models.sites, start, kept):
            sums.add(block)
            space.add(block)
        if not sums.count:
            raise ValueError("the models have no floating tensor to place on the map")
        if not math.isfinite(sums.sq_norm_received):
            raise ValueError("the received model is not finite")
        space.finish(self.neurons if start == "own" else None)
        return sums, space

    def _blocks(
        self, models: _Models, sites: Sequence[str], start: str, kept: Mapping[str, Tensor] | None
    ) -> Iterator[_Block]:
        """All models block by block, in float64, with the same block of the neurons' starts."""
        for t, (name, received, tensors) in enumerate(models.tensors(sites)):
            neurons = self._kept(kept, name, received.shape) if kept is not None else None
            g = received.reshape(-1)
            flat = [tensor.reshape(-1) for tensor in tensors]
            for b, first in enumerate(range(0, g.numel(), _BLOCK)):
                part = slice(first, first + _BLOCK)
                base = g[part].double()
                local = torch.empty(len(flat), base.numel(), dtype=torch.float64)
                for row, vector in zip(local, flat, strict=True):
                    row.copy_(vector[part])
                # Points are taken from an origin near them: subtracting first keeps the digits of distances.
                origin = base if self.space == "weights" else torch.zeros_like(base)
                begin: Tensor | None = None
                if neurons is not None:
                    begin = neurons[:, part].double() - origin
                elif start == "sample":
                    begin = self._random(start, t, b, base.numel())
                elif start == "uniform":
                    begin = self._random(start, t, b, base.numel()) - origin
                last = first + _BLOCK >= g.numel()
                yield _Block(name, received.shape, t, b, last, base, local, local - base, origin, begin)

    def _kept(self, kept: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
        if name not in kept:
            raise ValueError(f"kept neurons lack tensor {name!r}")
        neurons, wanted = kept[name].detach(), (self._count, *shape)
        if tuple(neurons.shape) != wanted:
            raise ValueError(f"kept neurons of tensor {name!r} have shape {tuple(neurons.shape)}, wanted {wanted}")
        if not bool(torch.isfinite(neurons).all()):
            raise ValueError(f"kept neurons of tensor {name!r} are not finite")
        return neurons.reshape(self._count, -1).cpu()

    def _random(self, start: str, tensor: int, block: int, length: int) -> Tensor:
        """A block of all neurons' starts, the same numbers whenever it is asked for."""
        rng = self._generator(self.rounds, tensor, block)
        shape = (self._count, length)
        if start == "sample":
            return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).double()
        return torch.from_numpy(rng.random(shape, dtype=np.float32)).double()

    def _buckets(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Bucket and sign of each coordinate of a block; the same in every round."""
        rng = self._generator(2**64 - 1, block.tensor, block.place)
        drawn = rng.integers(0, 2 * self.sketch_size, size=block.received.numel(), dtype=np.int64)
        return torch.from_numpy(drawn // 2), torch.from_numpy((drawn % 2 * 2 - 1).astype(np.float64))

    def _generator(self, stream: int, tensor: int, place: int) -> np.random.Generator:
        # The two upper words of the counter say where: no block can run into the numbers of another one.
        counter = np.array([0, 0, place, tensor], dtype=np.uint64)
        key = np.array([self.seed, stream], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(counter=counter, key=key))

    def _write(
        self,
        models: _Models,
        sites: Sequence[str],
        kept: Mapping[str, Tensor] | None,
        space: _Inner,
        keep: Callable[[str, Tensor], object],
    ) -> None:
        """Second pass: the trained neurons, tensor by tensor."""
        parts: list[Tensor] = []
        for block in self._blocks(models, sites, self._start(kept), kept):
            parts.append((space.combine(block) + block.origin).to(STORAGES[self.storage]))
            if block.last:
                keep(block.name, torch.cat(parts, dim=1).reshape(self._count, *block.shape))
                parts = []

    def _u_matrix(self, sq_between: Array) -> Array:
        rows, columns = self.grid
        distances = np.sqrt(sq_between)
        u = np.zeros(self.grid)
        for i in range(rows):
            for j in range(columns):
                near = [(i + a) * columns + j + b for a, b in _NEIGHBOURS if 0 <= i + a < rows and 0 <= j + b < columns]
                if near:
                    u[i, j] = distances[i * columns + j, near].mean()
        return u


# --- the passes over the models -----------------------------------------------------------------------------


class _Block(NamedTuple):
    """The same stretch of every vector, float64."""

    name: str  # of the tensor it is from
    shape: torch.Size  # of that tensor
    tensor: int  # number of that tensor
    place: int  # number of the block in it
    last: bool  # of that tensor
    received: Tensor  # (n,)
    local: Tensor  # (sites, n)
    update: Tensor  # (sites, n): local minus received; also the local models seen from the origin
    origin: Tensor  # (n,): what the map's points are counted from; the received model, or 0 among updates
    begin: Tensor | None  # (neurons, n): starts seen from the origin, or seen from the mean of the models


class _Models:
    """The models side by side, tensor by tensor."""

    def __init__(self, states: Mapping[str, Stream], received: Stream, names: tuple[str, ...] | None) -> None:
        self.sites = sorted(states)
        self._states, self._received, self._names = states, received, names
        for site in self.sites:
            if isinstance(states[site], Mapping) != isinstance(received, Mapping):
                raise ValueError(f"site {site!r}: the model must come in the same form as the received one")
        if names is not None and not isinstance(received, Mapping):
            raise ValueError("names are for models that are state dicts")

    def tensors(self, sites: Sequence[str]) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Name, received tensor and the tensor of each site; floating tensors that are not empty."""
        for name, received, tensors in (
            self._named(sites) if isinstance(self._received, Mapping) else self._plain(sites)
        ):
            for site, tensor in zip(sites, tensors, strict=True):
                if tensor.shape != received.shape:
                    raise ValueError(
                        f"site {site!r}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                        f"the received model has {tuple(received.shape)}"
                    )
                if not tensor.is_floating_point():
                    raise ValueError(f"site {site!r}: tensor {name!r} is {tensor.dtype}, not a floating one")
            if received.numel():
                yield name, received.detach().cpu(), [tensor.detach().cpu() for tensor in tensors]

    def _named(self, sites: Sequence[str]) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        whole: Any = self._received
        states: Any = self._states
        known = {site: set(states[site]) for site in sites}  # asking a lazy state itself may read the tensor
        for name in whole if self._names is None else self._names:
            if name not in whole:
                raise ValueError(f"tensor {name!r} is not in the received model")
            if self._names is None and name.rpartition(".")[2] in STATISTICS:
                continue
            received = whole[name]
            if not received.is_floating_point():
                if self._names is None:
                    continue
                raise ValueError(f"tensor {name!r} of the received model is {received.dtype}, not a floating one")
            for site in sites:
                if name not in known[site]:
                    raise ValueError(f"site {site!r}: tensor {name!r} is missing, the received model has it")
            yield name, received, [states[site][name] for site in sites]

    def _plain(self, sites: Sequence[str]) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        streams = {site: _opened(self._states[site]) for site in sites}
        for number, received in enumerate(_opened(self._received)):
            tensors = {site: next(stream, None) for site, stream in streams.items()}
            for site, tensor in tensors.items():
                if tensor is None:
                    raise ValueError(f"site {site!r}: tensor {number} is missing, the received model has it")
            if received.is_floating_point():
                yield str(number), received, [tensor for tensor in tensors.values() if tensor is not None]
        for site, stream in streams.items():
            if next(stream, None) is not None:
                raise ValueError(f"site {site!r} has more tensors than the received model")


def _opened(stream: Any) -> Iterator[Tensor]:
    if isinstance(stream, Tensor):
        return iter([stream])
    return iter(stream() if callable(stream) else stream)


class _Sums:
    """Sums over all parameters that do not depend on the map."""

    def __init__(self, sites: Sequence[str], space: str) -> None:
        self._row = {site: row for row, site in enumerate(sites)}
        self._space = space
        self.count = 0
        self.sq_norm_received = 0.0
        self._sq_norm, self._dot, self._sum, self._sum_sq = (np.zeros(len(sites)) for _ in range(4))
        self._between = np.zeros((len(sites), len(sites)))  # inner products of the updates

    @property
    def sq_norm(self) -> dict[str, float]:
        """Squared norm of the local models; not finite where a model is not."""
        return {site: float(self._sq_norm[row]) for site, row in self._row.items()}

    def add(self, block: _Block) -> None:
        self.count += block.received.numel()
        self.sq_norm_received += float(block.received @ block.received)
        self._sq_norm += (block.local * block.local).sum(dim=1).numpy()
        self._dot += (block.local @ block.received).numpy()
        if self._space == "weights":
            self._sum += block.local.sum(dim=1).numpy()
        else:
            self._sum += block.update.sum(dim=1).numpy()
            self._between += (block.update @ block.update.T).numpy()

    def spread(self, sites: Sequence[str]) -> float:
        """Standard deviation over all numbers of all vectors on the map."""
        rows = [self._row[site] for site in sites]
        squares = self._sq_norm if self._space == "weights" else self._between.diagonal()
        mean = self._sum[rows].mean() / self.count
        return math.sqrt(max(squares[rows].mean() / self.count - mean**2, 0.0))

    def similarity(self, sites: Sequence[str]) -> dict[str, float]:
        """s_h by site."""
        rows = [self._row[site] for site in sites]
        if self._space == "weights":
            return {
                site: model_similarity(float(self._dot[row]), float(self._sq_norm[row]), self.sq_norm_received)
                for site, row in zip(sites, rows, strict=True)
            }
        between = self._between[np.ix_(rows, rows)]
        return {
            site: model_similarity(float(between[h].mean()), float(between[h, h]), float(between.mean()))
            for h, site in enumerate(sites)
        }


# --- points and neurons -------------------------------------------------------------------------------------


class _Space(Protocol):
    """The sites' points and the neurons, which can only be measured and pulled."""

    starts_at_mean: bool

    def add(self, block: _Block) -> None:
        """Takes in a block of every vector."""

    def finish(self, own: Tensor | None) -> None:
        """After the last block; ``own``: neurons kept from the round before."""

    def choose(self, rows: list[int]) -> None:
        """Keeps only the sites of these rows, numbered anew."""

    def start_at_mean(self, scale: float) -> None:
        """Neurons begin at the mean of the sites plus ``scale`` times what the blocks held."""

    def sq_distances(self, site: int) -> Array:
        """Squared distances of a site to all neurons."""

    def pull(self, site: int, shares: Array) -> None:
        """Moves each neuron by its share of the way towards a site."""

    def sq_between(self) -> Array:
        """Squared distances among the neurons."""


class _Vectors:
    """Explicit vectors."""

    def __init__(self, starts_at_mean: bool) -> None:
        self.starts_at_mean = starts_at_mean
        self._points: list[Tensor] = []
        self._origins: list[Tensor] = []
        self._begins: list[Tensor] = []

    def add(self, block: _Block) -> None:
        self._points.append(block.update)
        self._origins.append(block.origin)
        if block.begin is not None:
            self._begins.append(block.begin)

    def finish(self, own: Tensor | None) -> None:
        self.points = torch.cat(self._points, dim=1)
        self.origin = torch.cat(self._origins)
        if own is None:
            self.neurons = torch.cat(self._begins, dim=1)
        elif own.shape[1] != self.origin.numel():
            raise ValueError(f"the map's neurons have {own.shape[1]} numbers, the models {self.origin.numel()}")
        else:
            self.neurons = own.double() - self.origin
        self._points, self._origins, self._begins = [], [], []

    def choose(self, rows: list[int]) -> None:
        self.points = self.points[rows]

    def start_at_mean(self, scale: float) -> None:
        self.neurons = self.points.mean(dim=0) + scale * self.neurons

    def sq_distances(self, site: int) -> Array:
        return self._sq_distances(self.points[site])

    def pull(self, site: int, shares: Array) -> None:
        for neuron, share in zip(self.neurons, shares.tolist(), strict=True):
            neuron += share * (self.points[site] - neuron)

    def sq_between(self) -> Array:
        return np.stack([self._sq_distances(neuron) for neuron in self.neurons])

    def _sq_distances(self, point: Tensor) -> Array:
        ways = (point - neuron for neuron in self.neurons)  # one at a time: memory for one vector
        return np.array([float(way @ way) for way in ways])

    def result(self) -> Tensor:
        """The neurons, from the true origin."""
        return self.neurons + self.origin


class _Sketches(_Vectors):
    """Count sketches: each coordinate is added, with its sign, to its bucket."""

    def __init__(
        self,
        num_sites: int,
        num_neurons: int,
        starts_at_mean: bool,
        size: int,
        buckets: Callable[[_Block], tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(starts_at_mean)
        self._buckets = buckets
        self.points = torch.zeros(num_sites, size, dtype=torch.float64)
        self.neurons = torch.zeros(num_neurons, size, dtype=torch.float64)
        self.origin = torch.zeros(size, dtype=torch.float64)

    def add(self, block: _Block) -> None:
        bucket, sign = self._buckets(block)
        self.points.index_add_(1, bucket, block.update * sign)
        self.origin.index_add_(0, bucket, block.origin * sign)
        if block.begin is not None:
            self.neurons.index_add_(1, bucket, block.begin * sign)

    def finish(self, own: Tensor | None) -> None:
        if own is not None:
            self.neurons = own.double() - self.origin


class _Inner:
    """Inner products: a neuron is a row of coefficients of the sites' points and the neurons' starts."""

    def __init__(self, num_sites: int, num_neurons: int, starts_at_mean: bool) -> None:
        self.starts_at_mean = starts_at_mean
        self._num_sites = num_sites
        size = num_sites + num_neurons
        self._products = torch.zeros(size, size, dtype=torch.float64)
        self._coefficients = np.eye(num_neurons, size, k=num_sites)

    def add(self, block: _Block) -> None:
        vectors = _all_vectors(block)
        self._products += vectors @ vectors.T

    def finish(self, own: Tensor | None) -> None:
        self.products: Array = self._products.numpy()

    def choose(self, rows: list[int]) -> None:
        wanted = [*rows, *range(self._num_sites, len(self.products))]
        self.products = self.products[np.ix_(wanted, wanted)]
        self._coefficients = self._coefficients[:, wanted]
        self._num_sites = len(rows)

    def start_at_mean(self, scale: float) -> None:
        self._coefficients *= scale
        self._coefficients[:, : self._num_sites] = 1.0 / self._num_sites

    def sq_distances(self, site: int) -> Array:
        return self._sq_norms(self._towards(site))

    def pull(self, site: int, shares: Array) -> None:
        self._coefficients += shares[:, None] * self._towards(site)

    def sq_between(self) -> Array:
        return np.stack([self._sq_norms(row - self._coefficients) for row in self._coefficients])

    def combine(self, block: _Block) -> Tensor:
        """The neurons' part of a block, (neurons, n)."""
        return torch.from_numpy(self._coefficients) @ _all_vectors(block)

    def _towards(self, site: int) -> Array:
        """Coefficients of the way from each neuron to a site."""
        way = -self._coefficients
        way[:, site] += 1.0
        return way

    def _sq_norms(self, coefficients: Array) -> Array:
        squares: Array = np.einsum("ij,ij->i", coefficients @ self.products, coefficients)  # neuron, basis vector
        return np.maximum(squares, 0.0)  # rounding may leave -1e-20 where a neuron sits on a model


def _all_vectors(block: _Block) -> Tensor:
    if block.begin is None:
        raise ValueError("the Gram form has no starts of its own")
    return torch.cat([block.update, block.begin])


def _nearest(sq_distances: Array) -> int:
    """The first of the nearest neurons, row by row."""
    return int(np.argmax(sq_distances <= sq_distances.min() + TIE * sq_distances.max()))


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value}")
