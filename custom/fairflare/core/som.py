r"""Compute FedMRL's aggregation weights from a self-organizing map of the sites' models.

The map's neurons, points in the space of the models, are pulled towards the local models round by round. A site's
weight follows from the distances of its model to all neurons and from the model's cosine with the received model.

A neuron only moves towards local models, so it stays an affine combination of its start and the local models. The rules
need only distances, and distances follow from inner products. One pass over the models, block by block, adds up the
inner products of all local models and all starts (a 45 x 45 matrix for 20 sites and 25 neurons); the map is then
trained on coefficients alone. Random starts are not stored: a counter-based generator computes each block of them from
(seed, round, tensor, block). The 25 trained neurons must be stored between rounds as 25 full vectors; they are passed
tensor by tensor to the function ``keep`` and are given to the next round as ``kept``.

No result depends on the sites' names or order: all sites pull the neurons at once (:func:`pull`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from fairflare.base import checks
from fairflare.base.settings import NonNegative, Positive, PositiveInt, settings
from fairflare.core.aggregation.movement import State
from fairflare.core.aggregation.som_formulas import (
    Array,
    grid_sq_steps,
    model_similarity,
    nearest_neurons,
    pull,
    som_weights,
)
from fairflare.core.features.layers import is_statistic
from fairflare.core.weighting import normalise

if TYPE_CHECKING:
    from torch import Tensor

#: Spread of the initial neurons around the mean model, in standard deviations of the parameters.
SAMPLE_SPREAD = 0.01
#: Number of parameters of each model in a block: with 45 models in float64 a block takes 12 MB.
_BLOCK = 2**15


@dataclass(frozen=True)
class SomResult:
    """Store the results of one round of the self-organizing map.

    Attributes:
        weights: aggregation weight alpha_h by site, ``> 0`` (0 is possible if the similarity is 0), sum 1; excluded
            sites have no entry.
        similarity: similarity s_h of each site's model to the received model, by site, in [0, 1].
        bmu: by site, the (row, column) of the neuron nearest to the site's model after the map's training.
        sq_distances: by site, the squared distance of its model to every neuron after the map's training, (rows,
            columns).
        sigma: radius of the neighbourhood in this round.
        excluded: sites whose model is not finite.
    """

    weights: dict[str, float]
    similarity: dict[str, float]
    bmu: dict[str, tuple[int, int]]
    sq_distances: dict[str, Array]
    sigma: float
    excluded: tuple[str, ...] = ()


# --- the map ------------------------------------------------------------------------------------------------


@settings
class MapSettings:
    """Define how a self-organizing map is initialized and trained.

    Args:
        grid: rows and columns of the map.
        init: where neurons start: "sample", around the mean of the first local models, or "uniform", U[0, 1) as in the
            paper: every real model is then nearly equally far from all neurons.
        sigma_0: radius of the neighbourhood in the first round.
        kappa: rate of the exponential decay of the radius per round.
        sigma_min: lower bound of the radius of the neighbourhood.
        eta: learning rate of the map.
        epochs: passes over the sites in a round.
        sigma_w: width of the Gaussian that turns distances to neurons into aggregation weights (:func:`som_weights`).
    """

    grid: tuple[PositiveInt, PositiveInt] = (5, 5)
    init: Literal["sample", "uniform"] = "sample"
    sigma_0: Positive = 2.0
    kappa: NonNegative = 0.1
    sigma_min: Positive = 0.5
    eta: Positive = 0.5
    epochs: PositiveInt = 1
    sigma_w: Positive = 1.0


class SelfOrganizingMap(MapSettings):
    r"""Train a self-organizing map of the sites' models round by round and weigh the sites by it.

    Each round, with :math:`\hat s` the similarities scaled to sum 1, H sites, and
    ``sigma = max(sigma_min, sigma_0 exp(-kappa r))``: ``epochs`` times :func:`pull` with strengths
    :math:`H \hat s_h`, then :func:`som_weights` of the distances to the trained neurons.

    Args:
        grid, more: settings as in :class:`MapSettings`.
        seed: seed of the neurons' random starts.

    Attributes:
        rounds: number of rounds that the map has been trained for.

    Source:
        Sahoo et al., section 3.3, read as (MRL-3) to (MRL-9) of our specification. The paper gives no formula for the
        influence; the authors' code computes a map and aggregates without it.
    """

    def __init__(self, grid: tuple[int, int] = (5, 5), *, seed: int = 0, **more: Any) -> None:
        super().__init__(grid=grid, **more)
        self.seed = int(checks.number("seed", seed, low=0, below=2**63, whole=True))
        self.rounds = 0
        self._sq_steps = grid_sq_steps(*self.grid)

    @property
    def sigma(self) -> float:
        """Return the radius of the neighbourhood on the map in the next round."""
        return max(self.sigma_min, self.sigma_0 * math.exp(-self.kappa * self.rounds))

    def step(
        self,
        states: Mapping[str, State],
        received: State,
        *,
        kept: State | None = None,
        keep: Callable[[str, Tensor], object] | None = None,
    ) -> SomResult:
        """Run one round: train the map on the local models and weigh the sites.

        Args:
            states: local model by site, after training. All floating tensors count except the statistics of batch
                norms. The models are read side by side, one tensor of each at a time; they are read a second time if
                ``keep`` is given.
            received: model that the sites' training started from.
            kept: neurons at the start of the round, ``{tensor name: (rows * columns, *shape)}``; in every round after
                the first, the tensors that ``keep`` was given in the round before.
            keep: function that stores the trained neurons. It is called with the name of each tensor and the neurons'
                values of it, (rows * columns, *shape), float32. It must not overwrite ``kept`` while a round may still
                be repeated.

        Returns:
            The sites' weights, and where each site lies on the map. A site whose model is not finite is left out.

        Raises:
            ValueError: there is no (usable) site, a site's tensors differ from the received model's (the message names
                site and tensor), the received model is not finite, or neurons are missing or of another shape. The map
                is then unchanged.
        """
        checks.refuse({
            f"step() needs `kept`: pass the neurons that `keep` stored in round {self.rounds - 1}":
                self.rounds and kept is None,
        })  # fmt: skip
        checks.not_empty("states to place on the map", states)
        models = {site: states[site] for site in sorted(states)}
        sums = self._add_up(models, received, kept)
        excluded = tuple(site for site, square in zip(models, sums.squares, strict=True) if not math.isfinite(square))
        checks.refuse({
            f"no site has a finite model: {', '.join(map(repr, excluded))}": len(excluded) == len(models),
        })  # fmt: skip
        if excluded:  # rare: read the models once more without the excluded sites
            models = {site: model for site, model in models.items() if site not in excluded}
            sums = self._add_up(models, received, kept)

        sites = list(models)
        similarity = {
            site: model_similarity(dot, square, sums.sq_received)
            for site, dot, square in zip(sites, sums.dots.tolist(), sums.squares.tolist(), strict=True)
        }
        strengths = len(sites) * np.array(list(normalise(similarity).values()))
        neurons = self._train(sums, strengths, start_at_mean=kept is None and self.init == "sample")
        distances = sums.sq_distances(neurons)
        by_site = dict(zip(sites, distances.reshape(-1, *self.grid), strict=True))
        result = SomResult(
            weights=som_weights(by_site, similarity, sigma_w=self.sigma_w),
            similarity=similarity,
            bmu={
                site: divmod(n, self.grid[1])
                for site, n in zip(sites, nearest_neurons(distances).tolist(), strict=True)
            },
            sq_distances=by_site,
            sigma=self.sigma,
            excluded=excluded,
        )
        if keep is not None:
            for name, shape, blocks in self._read(models, received, kept):
                vectors = [(torch.from_numpy(neurons) @ block.basis + block.received).float() for block in blocks]
                keep(name, torch.cat(vectors, dim=1).reshape(-1, *shape))
        self.rounds += 1
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the map's state between rounds, without the neurons, as plain values."""
        # Of the settings only those on which stored neurons depend.
        return {"settings": {"grid": list(self.grid), "seed": self.seed}, "rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of a map with other settings; the message names the first setting that differs.
        """
        checks.same_settings("a map", state["settings"], self.state_dict()["settings"])
        self.rounds = int(state["rounds"])

    def _train(self, sums: _Sums, strengths: Array, *, start_at_mean: bool) -> Array:
        """Return the neurons after this round, each as coefficients of the sites' models and the neurons' starts."""
        num_sites, num_neurons = len(strengths), len(self._sq_steps)
        neurons = np.eye(num_neurons, num_sites + num_neurons, k=num_sites)
        if start_at_mean:
            neurons *= SAMPLE_SPREAD * sums.spread()
            neurons[:, :num_sites] = 1.0 / num_sites
        for _ in range(self.epochs):
            stay, mixed = pull(sums.sq_distances(neurons), strengths, self._sq_steps, eta=self.eta, sigma=self.sigma)
            neurons *= stay[:, None]
            neurons[:, :num_sites] += mixed
        return neurons

    def _add_up(self, models: Mapping[str, State], received: State, before: State | None) -> _Sums:
        """Return the inner products of all local models and neurons' starts, from one pass over the models."""
        sums = _Sums(len(models), len(self._sq_steps))
        for _, _, blocks in self._read(models, received, before):
            for block in blocks:
                sums.add(block)
        checks.refuse({
            "the models have no floating tensor to place on the map": not sums.count,
            "the received model is not finite": not math.isfinite(sums.sq_received),
        })  # fmt: skip
        return sums

    def _read(
        self, models: Mapping[str, State], received: State, before: State | None
    ) -> Iterator[tuple[str, torch.Size, Iterator[_Block]]]:
        """Yield name, shape and blocks of every tensor of all models.

        Each block comes with the same block of the neurons' starts.
        """
        for t, (name, base, local) in enumerate(_side_by_side(models, received)):
            yield name, base.shape, self._blocks(t, base, local, self._check_neurons(before, name, base.shape))

    def _blocks(self, t: int, received: Tensor, local: list[Tensor], before: Tensor | None) -> Iterator[_Block]:
        flat = [tensor.reshape(-1) for tensor in local]
        for b, part in enumerate(received.reshape(-1).split(_BLOCK)):
            here, base = slice(b * _BLOCK, b * _BLOCK + len(part)), part.double()
            models = torch.stack([vector[here].double() for vector in flat])
            # The received model is subtracted first, so that distances between models close to it lose no precision.
            if before is not None:
                start = before[:, here].double() - base
            else:
                start = self._random(t, b, len(part)) - (base if self.init == "uniform" else 0.0)
            yield _Block(base, models, torch.cat([models - base, start]))

    def _check_neurons(self, before: State | None, name: str, shape: torch.Size) -> Tensor | None:
        if before is None:
            return None
        checks.refuse({
            f"'kept' has no neurons for tensor {name!r}; pass all that the last round gave to 'keep'":
                name not in before,
        })  # fmt: skip
        neurons = before[name].detach().cpu()
        checks.shape(f"kept neurons of tensor {name!r}", neurons, len(self._sq_steps), *shape)
        checks.refuse({f"kept neurons of tensor {name!r} are not finite": not bool(torch.isfinite(neurons).all())})
        return neurons.reshape(len(neurons), -1)

    def _random(self, t: int, b: int, length: int) -> Tensor:
        """Return the random start of all neurons for block b of tensor t; every call returns the same numbers."""
        # The two upper words of the counter identify the block, so that no two blocks share random numbers.
        rng = np.random.Generator(
            np.random.Philox(
                counter=np.array([0, 0, b, t], np.uint64), key=np.array([self.seed, self.rounds], np.uint64)
            )
        )
        draw = rng.standard_normal if self.init == "sample" else rng.random
        return torch.from_numpy(draw((len(self._sq_steps), length), dtype=np.float32)).double()


# --- the pass over the models -------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Store the same block of parameters of every model and neuron, in float64."""

    received: Tensor  # values of the received model, (n,)
    vectors: Tensor  # values of the local models, (sites, n)
    basis: Tensor  # offsets from the received model of local models, then of neurons' starts, (sites + neurons, n)


class _Sums:
    """Accumulate the inner products over all parameters, from which the map is trained without the models."""

    def __init__(self, num_sites: int, num_neurons: int) -> None:
        self.sites, self.count, self.sq_received = num_sites, 0, 0.0
        #: Of each site's model: squared norm, inner product with the received model, and sum of its parameters.
        self.squares, self.dots, self.totals = np.zeros((3, num_sites))
        self.products = np.zeros((num_sites + num_neurons, num_sites + num_neurons))

    def add(self, block: _Block) -> None:
        self.count += len(block.received)
        self.sq_received += float(block.received @ block.received)
        self.squares += (block.vectors * block.vectors).sum(dim=1).numpy()
        self.dots += (block.vectors @ block.received).numpy()
        self.totals += block.vectors.sum(dim=1).numpy()
        self.products += (block.basis @ block.basis.T).numpy()

    def sq_distances(self, others: Array, ones: Array | None = None) -> Array:
        r"""Return the squared distances of points from other points, (ones, others), all given by their coefficients.

        The distance is computed as :math:`|x|^2 - 2 x y + |y|^2`, since an array of all differences would be too large.

        Args:
            others: coefficients of the points that distances are measured to.
            ones: coefficients of the points that distances are measured from; ``None`` for the sites' points.
        """
        rows = self.products[: self.sites] if ones is None else ones @ self.products
        squares = rows.diagonal() if ones is None else (rows * ones).sum(axis=1)
        far = (others @ self.products * others).sum(axis=1)
        return np.asarray(np.maximum(squares[:, None] - 2 * rows @ others.T + far, 0.0))  # rounding may give -1e-20

    def spread(self) -> float:
        """Return the standard deviation over all parameters of all local models on the map."""
        return math.sqrt(max(self.squares.mean() / self.count - (self.totals.mean() / self.count) ** 2, 0.0))


def _side_by_side(models: Mapping[str, State], received: State) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
    """Yield name, received tensor and each site's tensor, for every floating tensor that is not empty."""
    known = {site: set(model) for site, model in models.items()}  # asking a lazy model for a name may read a tensor
    for name in received:
        base = received[name].detach().cpu()
        if is_statistic(name) or not base.is_floating_point() or not base.numel():
            continue
        tensors = []
        for site, model in models.items():
            checks.refuse({
                f"site {site!r}: tensor {name!r} is missing, the received model has it": name not in known[site],
            })  # fmt: skip
            tensor = model[name].detach().cpu()
            checks.refuse({
                f"site {site!r}: tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, the received model "
                f"has {base.dtype} of shape {tuple(base.shape)}":
                    tensor.shape != base.shape or not tensor.is_floating_point(),
            })  # fmt: skip
            tensors.append(tensor)
        yield name, base, tensors
