r"""FedMRL's aggregation weights from a self-organizing map of the sites' models.

Neurons, points in the space of the models, are pulled towards the local models round by round. A site's weight
follows from how far its model lies from all neurons and from its cosine with the received model.

A neuron only moves towards local models, so it stays an affine combination of its start and of these; all the rules
ask for are distances, and these follow from inner products. One pass over the models, block by block, adds up the
inner products of all local models and all starts (a 45 x 45 matrix for 20 sites and 25 neurons); the map is then
trained on coefficients alone. Random starts are not stored: a counter-based generator makes the block that is needed
from (seed, round, tensor, block). What must outlive a round are 25 points in general position, which nothing shorter
than 25 vectors describes: they go tensor by tensor to ``keep`` and come back as ``kept``.

No result depends on what the sites are called: they pull together (:func:`pull`), not one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fairflare.base import checks
from fairflare.core.weighting import normalise

__all__ = ["SelfOrganizingMap", "SomResult", "grid_sq_steps", "model_similarity", "pull", "som_weights", "u_matrix"]

Array: TypeAlias = npt.NDArray[np.float64]
#: A model: a state dict, which may read a tensor from disk when it is asked for.
State: TypeAlias = Mapping[str, Tensor]

INITS = ("sample", "uniform")
SPACES = ("weights", "updates")

#: Statistics of a batch norm: part of the model, not of its parameters.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
#: Spread of the starts around the mean model, in standard deviations of the parameters.
SAMPLE_SPREAD = 0.01
#: Distances that differ by less than this share of the largest are a tie.
TIE = 1e-10
#: Numbers per block: with 45 vectors in float64 a block takes 12 MB.
_BLOCK = 2**15


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


def grid_sq_steps(rows: int, columns: int) -> Array:
    """Squared distances between the cells of a grid, (cells, cells), cells row by row."""
    cells = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
    return np.asarray(((cells[:, None] - cells) ** 2).sum(axis=-1), np.float64)


def pull(sq_distances: Array, strengths: Array, sq_steps: Array, *, eta: float, sigma: float) -> tuple[Array, Array]:
    r"""One pass over the sites: how far each of them pulls each neuron.

    .. math:: b_h = \arg\min_n \lVert v_h - m_n \rVert, \quad
              a_{hn} = \min\bigl(1, \eta t_h \exp(-\lVert n - b_h \rVert^2 / (2 \sigma^2))\bigr), \quad
              m_n \leftarrow k_n m_n + (1 - k_n) \frac{\sum_h a_{hn} v_h}{\sum_h a_{hn}}, \quad
              k_n = \prod_h (1 - a_{hn})

    One site alone makes the specification's step :math:`m_n + a_n (v - m_n)`. Of several the neuron keeps the share of
    itself that their steps in turn would leave it, but no site has the advantage of the last one.

    Args:
        sq_distances: of every site to every neuron, (sites, neurons).
        strengths: t_h, ``>= 0``, (sites,): number of sites times s-hat.
        sq_steps: of :func:`grid_sq_steps`, (neurons, neurons).
        eta: learning rate, ``> 0``.
        sigma: radius of the neighbourhood, ``> 0``.

    Returns:
        kept and mixed, (neurons,) and (neurons, sites): neuron n becomes ``kept[n] * m[n] + mixed[n] @ v``.

    Source:
        Sahoo et al., section 3.3, read as (MRL-4) to (MRL-6) of our specification, as one batch update; in the paper
        the sites pull in turn, so that a site's place in the list counts.
    """
    near = np.exp(-sq_steps[_nearest(sq_distances)] / (2.0 * sigma**2))
    rates = np.minimum(1.0, eta * strengths[:, None] * near)
    kept = np.prod(1.0 - rates, axis=0)
    total = rates.sum(axis=0)
    shares = np.divide(rates, total, out=np.zeros_like(rates), where=total > 0)
    return kept, ((1.0 - kept) * shares).T


def u_matrix(sq_between: Array, sq_steps: Array) -> Array:
    """Mean distance of each neuron to its up to eight neighbours, (neurons,); 0 without a neighbour.

    ``sq_between``: their squared distances, (neurons, neurons); ``sq_steps``: of :func:`grid_sq_steps`.
    """
    beside = (sq_steps > 0) & (sq_steps <= 2)
    means: Array = (np.sqrt(sq_between) * beside).sum(axis=1) / np.maximum(beside.sum(axis=1), 1)
    return means


def som_weights(
    sq_distances: Mapping[str, npt.ArrayLike], similarity: Mapping[str, float], *, sigma_w: float = 1.0
) -> dict[str, float]:
    r"""Aggregation weights from the distances to the neurons and the similarity to the received model.

    .. math:: \alpha_h = \hat s_h u_h / \sum_j \hat s_j u_j, \quad
              u_h = \frac{1}{N} \sum_{ij} \exp\bigl(-D^2_{h,ij} / (2 \sigma_w^2 \bar S)\bigr)

    with :math:`\hat s` the similarities scaled to sum 1 and :math:`\bar S` the mean of all :math:`D^2`.

    Args:
        sq_distances: D^2 by site: squared distances to all neurons, of one shape; finite, ``>= 0``.
        similarity: s by site, ``>= 0``; the same sites. All 0 count as all equal.
        sigma_w: width, ``> 0``.

    Returns:
        alpha by site, sum 1. Equal distances leave the similarities: alpha = s-hat.

    Raises:
        ValueError: no site, different sites, or a value out of range (names the site).

    Source:
        Sahoo et al., section 3.3 and Eq. (10), read as (MRL-9) of our specification. The factor 1/H of Eq. (10) is
        left out: with weights that sum to 1 it would shrink the model.

    Example:
        >>> som_weights({"A": [[0.0, 2.0]], "B": [[1.0, 1.0]]}, {"A": 0.5, "B": 0.5})["A"] > 0.5
        True
    """
    checks.same_names("distances", sq_distances, "similarities", similarity)
    checks.number("sigma_w", sigma_w, above=0)
    sites = sorted(sq_distances)
    rows = [np.asarray(sq_distances[site], dtype=np.float64).reshape(-1) for site in sites]
    for site, row in zip(sites, rows, strict=True):
        checks.shape(f"squared distances of site {site!r}", row, rows[0].size or "neurons")
        checks.number(f"least squared distance of site {site!r}", float(row.min()), low=0)
        checks.number(f"largest squared distance of site {site!r}", float(row.max()), low=0)
    checks.numbers("similarity", similarity, low=0)
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

    Each round, with :math:`\hat s` the similarities scaled to sum 1, H sites, and
    ``sigma = max(sigma_min, sigma_0 exp(-kappa r))``: ``epochs`` times :func:`pull` with strengths
    :math:`H \hat s_h`, then :func:`som_weights` of the distances to the trained neurons.

    Args:
        grid: rows and columns, each ``>= 1``.
        sigma_0, kappa, sigma_min: radius of the neighbourhood: start ``> 0``, decay ``>= 0`` per round, floor
            ``> 0``.
        eta: learning rate, ``> 0``.
        epochs: passes over the sites in a round, ``>= 1``.
        sigma_w: width in :func:`som_weights`, ``> 0``.
        init: where neurons start. ``"sample"``: at the mean of the first round's vectors plus 0.01 times their
            standard deviation (one number, over all sites and parameters) times N(0, 1). ``"uniform"``: U[0, 1),
            the paper's "random"; every real model is then nearly equally far from all neurons.
        space: ``"weights"``: the map lives among the models, and s_h is the similarity of local and received
            model. ``"updates"``: among local minus received, and s_h is the similarity of a site's update to the
            mean one; shows differences where the cosines of the models are all close to 1.
        restart: begin every round with new neurons; only the round counter is kept.
        seed: of the starts, ``>= 0``.

    Raises:
        ValueError: an argument out of range (names it and the value).

    Source:
        Sahoo et al., section 3.3, read as (MRL-3) to (MRL-9) of our specification. The paper gives no formula for the
        influence; the authors' code computes a map and aggregates without it.
    """

    def __init__(
        self,
        grid: Sequence[int] = (5, 5),
        *,
        sigma_0: float = 2.0,
        kappa: float = 0.1,
        sigma_min: float = 0.5,
        eta: float = 0.5,
        epochs: int = 1,
        sigma_w: float = 1.0,
        init: Literal["sample", "uniform"] = "sample",
        space: Literal["weights", "updates"] = "weights",
        restart: bool = False,
        seed: int = 0,
    ) -> None:
        if len(grid) != 2:
            raise ValueError(f"grid must be rows and columns, got {tuple(grid)}")
        self.grid = (checks.whole("rows of the grid", grid[0]), checks.whole("columns of the grid", grid[1]))
        self.sigma_0 = checks.number("sigma_0", sigma_0, above=0)
        self.kappa = checks.number("kappa", kappa, low=0)
        self.sigma_min = checks.number("sigma_min", sigma_min, above=0)
        self.eta = checks.number("eta", eta, above=0)
        self.epochs = checks.whole("epochs", epochs)
        self.sigma_w = checks.number("sigma_w", sigma_w, above=0)
        self.init, self.space = checks.choice("init", init, INITS), checks.choice("space", space, SPACES)
        self.restart = restart
        self.seed = int(checks.number("seed", seed, low=0, below=2**63, whole=True))
        #: Rounds done.
        self.rounds = 0
        self._sq_steps = grid_sq_steps(*self.grid)

    @property
    def sigma(self) -> float:
        """Radius of the neighbourhood in the next round."""
        return max(self.sigma_min, self.sigma_0 * math.exp(-self.kappa * self.rounds))

    def step(
        self,
        states: Mapping[str, State],
        received: State,
        *,
        kept: State | None = None,
        keep: Callable[[str, Tensor], object] | None = None,
    ) -> SomResult:
        """One round: trains the map on the local models and weights the sites.

        Args:
            states: local model by site, after training; its floating tensors count but for the statistics of batch
                norms. Read side by side, one tensor of each at a time, and once more with ``keep``.
            received: the model the sites started from.
            kept: neurons to begin with, ``{tensor name: (rows * columns, *shape)}``; in every round after the first
                what went to ``keep`` in the round before, unless the map restarts.
            keep: called with the name of each tensor and the trained neurons' part of it, (rows * columns, *shape),
                float32. Must not overwrite ``kept`` while a round may still be repeated.

        Returns:
            Weights and what a picture of the map needs. A site whose model is not finite is left out.

        Raises:
            ValueError: no (usable) site, tensors that differ from the received model's (names site and tensor), a
                received model that is not finite, or neurons that are missing or of another shape. The map is then
                unchanged.
        """
        if self.rounds and kept is None and not self.restart:
            raise ValueError(f"the map needs the neurons that it handed to keep in round {self.rounds - 1}")
        checks.not_empty("states to place on the map", states)
        models = {site: states[site] for site in sorted(states)}
        sums = self._add_up(models, received, kept)
        excluded = tuple(site for site, square in zip(models, sums.squares, strict=True) if not math.isfinite(square))
        if len(excluded) == len(models):
            raise ValueError(f"no site has a finite model: {', '.join(map(repr, excluded))}")
        if excluded:  # rare: once more without them
            models = {site: model for site, model in models.items() if site not in excluded}
            sums = self._add_up(models, received, kept)

        sites = list(models)
        similarity = dict(zip(sites, sums.similarities(self.space), strict=True))
        strengths = len(sites) * np.array(list(normalise(similarity).values()))
        neurons = self._trained(sums, strengths, start_at_mean=kept is None and self.init == "sample")
        distances = sums.sq_distances(sums.points, neurons)
        by_site = dict(zip(sites, distances.reshape(-1, *self.grid), strict=True))
        result = SomResult(
            weights=som_weights(by_site, similarity, sigma_w=self.sigma_w),
            similarity=similarity,
            bmu={site: divmod(n, self.grid[1]) for site, n in zip(sites, _nearest(distances).tolist(), strict=True)},
            sq_distances=by_site,
            u_matrix=u_matrix(sums.sq_distances(neurons, neurons), self._sq_steps).reshape(self.grid),
            sigma=self.sigma,
            excluded=excluded,
        )
        if keep is not None:
            for name, shape, blocks in self._read(models, received, kept):
                vectors = [(torch.from_numpy(neurons) @ block.basis + block.origin).float() for block in blocks]
                keep(name, torch.cat(vectors, dim=1).reshape(-1, *shape))
        self.rounds += 1
        return result

    def state_dict(self) -> dict[str, Any]:
        """What goes on from round to round, but for the neurons: plain values."""
        settings = {"grid": list(self.grid), "space": self.space, "seed": self.seed}  # say what kept neurons mean
        return {"settings": settings, "rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave.

        Raises:
            ValueError: the state is of a map with other settings (names the first).
        """
        checks.same_settings("a map", state["settings"], self.state_dict()["settings"])
        self.rounds = int(state["rounds"])

    def _trained(self, sums: _Sums, strengths: Array, *, start_at_mean: bool) -> Array:
        """The neurons after this round, as coefficients of the sites' points and the starts."""
        num_sites, num_neurons = len(strengths), len(self._sq_steps)
        neurons = np.eye(num_neurons, num_sites + num_neurons, k=num_sites)
        if start_at_mean:
            neurons *= SAMPLE_SPREAD * sums.spread()
            neurons[:, :num_sites] = 1.0 / num_sites
        for _ in range(self.epochs):
            distances = sums.sq_distances(sums.points, neurons)
            stay, mixed = pull(distances, strengths, self._sq_steps, eta=self.eta, sigma=self.sigma)
            neurons *= stay[:, None]
            neurons[:, :num_sites] += mixed
        return neurons

    def _add_up(self, models: Mapping[str, State], received: State, kept: State | None) -> _Sums:
        """One pass over all models."""
        sums = _Sums(len(models), len(self._sq_steps))
        for _, _, blocks in self._read(models, received, kept):
            for block in blocks:
                sums.add(block)
        if not sums.count:
            raise ValueError("the models have no floating tensor to place on the map")
        if not math.isfinite(sums.sq_received):
            raise ValueError("the received model is not finite")
        return sums

    def _read(
        self, models: Mapping[str, State], received: State, kept: State | None
    ) -> Iterator[tuple[str, torch.Size, Iterator[_Block]]]:
        """All models tensor by tensor (name, shape) and block by block, with the same block of the neurons' starts."""
        for t, (name, base, local) in enumerate(_side_by_side(models, received)):
            yield name, base.shape, self._blocks(t, base, local, self._checked(kept, name, base.shape))

    def _blocks(self, t: int, received: Tensor, local: list[Tensor], kept: Tensor | None) -> Iterator[_Block]:
        flat = [tensor.reshape(-1) for tensor in local]
        for b, part in enumerate(received.reshape(-1).split(_BLOCK)):
            here, base = slice(b * _BLOCK, b * _BLOCK + len(part)), part.double()
            models = torch.stack([vector[here].double() for vector in flat])
            updates = models - base
            # Points are counted from an origin near them: subtracting first keeps the digits of distances.
            origin = base if self.space == "weights" else torch.zeros_like(base)
            if kept is not None:
                start = kept[:, here].double() - origin
            else:
                start = self._random(t, b, len(part)) - (origin if self.init == "uniform" else 0.0)
            vectors = models if self.space == "weights" else updates
            yield _Block(base, vectors, origin, torch.cat([updates, start]))

    def _checked(self, kept: State | None, name: str, shape: torch.Size) -> Tensor | None:
        if kept is None:
            return None
        if name not in kept:
            raise ValueError(f"kept neurons lack tensor {name!r}")
        neurons = kept[name].detach().cpu()
        checks.shape(f"kept neurons of tensor {name!r}", neurons, len(self._sq_steps), *shape)
        if not bool(torch.isfinite(neurons).all()):
            raise ValueError(f"kept neurons of tensor {name!r} are not finite")
        return neurons.reshape(len(neurons), -1)

    def _random(self, t: int, b: int, length: int) -> Tensor:
        """Random numbers for block b of tensor t of all neurons, the same ones whenever they are asked for."""
        # The two upper words of the counter say where: no block can run into the numbers of another one.
        counter = np.array([0, 0, b, t], dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(counter=counter, key=np.array([self.seed, self.rounds], np.uint64)))
        draw = rng.standard_normal if self.init == "sample" else rng.random
        return torch.from_numpy(draw((len(self._sq_steps), length), dtype=np.float32)).double()


# --- the pass over the models -------------------------------------------------------------------------------


class _Block(NamedTuple):
    """The same stretch of every vector, float64."""

    received: Tensor  # (n,)
    vectors: Tensor  # (sites, n): what is on the map: models or updates
    origin: Tensor  # (n,): what points are counted from; the received model, or 0 among updates
    basis: Tensor  # (sites + neurons, n): the sites' points, the starts; random ones before they are scaled and moved


class _Sums:
    """Sums over all parameters: all that training the map needs to know of the models."""

    def __init__(self, num_sites: int, num_neurons: int) -> None:
        self.count, self.sq_received = 0, 0.0
        #: Of the vectors on the map: squared norm, inner product with the received model, sum.
        self.squares, self.dots, self.totals = np.zeros((3, num_sites))
        self.products = np.zeros((num_sites + num_neurons, num_sites + num_neurons))
        #: The sites' points as coefficients.
        self.points = np.eye(num_sites, num_sites + num_neurons)

    def add(self, block: _Block) -> None:
        self.count += len(block.received)
        self.sq_received += float(block.received @ block.received)
        self.squares += (block.vectors * block.vectors).sum(dim=1).numpy()
        self.dots += (block.vectors @ block.received).numpy()
        self.totals += block.vectors.sum(dim=1).numpy()
        self.products += (block.basis @ block.basis.T).numpy()

    def sq_distances(self, ones: Array, others: Array) -> Array:
        """Squared distances of points given by their coefficients, (ones, others)."""
        ways = ones[:, None] - others
        return np.asarray(np.maximum(((ways @ self.products) * ways).sum(axis=-1), 0.0))  # rounding may leave -1e-20

    def spread(self) -> float:
        """Standard deviation over all numbers of all vectors on the map."""
        mean = self.totals.mean() / self.count
        return math.sqrt(max(self.squares.mean() / self.count - mean**2, 0.0))

    def similarities(self, space: str) -> list[float]:
        """s_h of every site."""
        if space == "weights":
            pairs = zip(self.dots.tolist(), self.squares.tolist(), strict=True)
            return [model_similarity(dot, square, self.sq_received) for dot, square in pairs]
        between = self.products[: len(self.points), : len(self.points)]
        mean, with_mean = float(between.mean()), between.mean(axis=1).tolist()
        return [model_similarity(dot, float(between[h, h]), mean) for h, dot in enumerate(with_mean)]


def _side_by_side(models: Mapping[str, State], received: State) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
    """Name, received tensor and the tensor of each site; floating tensors that are not empty."""
    known = {site: set(model) for site, model in models.items()}  # asking a lazy model itself may read the tensor
    for name in received:
        base = received[name].detach().cpu()
        if name.rpartition(".")[2] in STATISTICS or not base.is_floating_point() or not base.numel():
            continue
        tensors = []
        for site, model in models.items():
            if name not in known[site]:
                raise ValueError(f"site {site!r}: tensor {name!r} is missing, the received model has it")
            tensor = model[name].detach().cpu()
            if tensor.shape != base.shape or not tensor.is_floating_point():
                raise ValueError(
                    f"site {site!r}: tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, the received "
                    f"model has {base.dtype} of shape {tuple(base.shape)}"
                )
            tensors.append(tensor)
        yield name, base, tensors


def _nearest(sq_distances: Array) -> npt.NDArray[np.intp]:
    """For each row the first of its nearest neurons."""
    limits = sq_distances.min(axis=1) + TIE * sq_distances.max(axis=1)
    return np.asarray(np.argmax(sq_distances <= limits[:, None], axis=1))
