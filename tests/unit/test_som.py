"""Test the self-organizing map: the spec's example, vectors in float64, MiniSom, and independence of names."""

from __future__ import annotations

import io
import math
import weakref
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflare.core import som
from fairflare.core.som import (
    SelfOrganizingMap,
    SomResult,
    grid_sq_steps,
    model_similarity,
    pull,
    som_weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")

State = dict[str, torch.Tensor]


def models(num_sites: int, seed: int = 0, *, large: int = 0, scale: float = 0.1) -> tuple[dict[str, State], State]:
    """Return local models and the received one; with a batch norm, and if large a tensor of several blocks."""
    generator = torch.Generator().manual_seed(seed)
    received = {
        "conv.weight": torch.randn(6, 5, generator=generator),
        "norm.weight": torch.randn(7, generator=generator),
        "norm.running_mean": torch.randn(7, generator=generator),
        "norm.num_batches_tracked": torch.tensor(3),
        "fc.weight": torch.randn(40 + large, generator=generator),
    }
    states = {
        f"site-{k}": {
            name: t + (k + 1) * scale * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t + k
            for name, t in received.items()
        }
        for k in range(num_sites)
    }
    return states, received


INITS = ("sample", "uniform")


class Federation:
    """Do rounds of a map, whose neurons are handed on."""

    def __init__(self, **options: Any) -> None:
        self.som = SelfOrganizingMap(**options)
        self.kept: State | None = None

    def step(self, states: Mapping[str, Any], received: Any) -> SomResult:
        written: State = {}
        result = self.som.step(states, received, kept=self.kept, keep=written.__setitem__)
        self.kept = written
        return result


def assert_same(one: SomResult, other: SomResult, rel: float = 1e-12) -> None:
    assert one.weights == pytest.approx(other.weights, rel=rel)
    assert one.similarity == pytest.approx(other.similarity, rel=rel)
    assert one.bmu == other.bmu
    assert one.excluded == other.excluded
    assert one.sigma == other.sigma
    for site, distances in one.sq_distances.items():
        np.testing.assert_allclose(distances, other.sq_distances[site], rtol=rel)


# the specification's example


def step_by_step(neurons, vectors, strengths, sq_steps, **options):
    """Compute the spec's order: one site after the other, each alone in a pull."""
    for v, strength in zip(vectors, strengths, strict=True):
        distances = np.array([[np.sum((v - m) ** 2) for m in neurons]])
        kept, mixed = pull(distances, np.array([strength]), sq_steps, **options)
        neurons = np.stack([k * m + share * v for k, m, (share,) in zip(kept, neurons, mixed, strict=True)])
    return neurons


def test_worked_example():
    v = {"A": np.array([1.0, 0.0]), "B": np.array([0.0, 1.0])}
    received, start = np.array([1.0, 0.0]), np.array([[0.8, 0.2], [0.2, 0.8]])
    similarity = {site: model_similarity(float(x @ received), float(x @ x), 1.0) for site, x in v.items()}
    assert similarity == {"A": 1.0, "B": 0.5}
    strengths = [2 * s / 1.5 for s in similarity.values()]
    neurons = step_by_step(start, v.values(), strengths, grid_sq_steps(1, 2), eta=0.5, sigma=1.0)
    np.testing.assert_allclose(neurons, [[0.744635, 0.255365], [0.348989, 0.651011]], atol=1e-6)
    distances = {site: np.sum((neurons - x) ** 2, axis=1) for site, x in v.items()}
    np.testing.assert_allclose(distances["A"], [0.130423, 0.847631], atol=1e-6)
    np.testing.assert_allclose(distances["B"], [1.108962, 0.243586], atol=1e-6)
    assert som_weights(distances, similarity) == pytest.approx({"A": 0.696999, "B": 0.303001}, abs=1e-6)


def test_worked_example_in_one_batch():
    """Check by hand: a is 2/3 and 2/3 e^-1/2 for A, 1/3 e^-1/2 and 1/3 for B; neuron 1 keeps 1/3 (1 - 0.2022)."""
    states = {"A": {"w": torch.tensor([1.0, 0.0])}, "B": {"w": torch.tensor([0.0, 1.0])}}
    start = {"w": torch.tensor([[0.8, 0.2], [0.2, 0.8]], dtype=torch.float64)}
    written: State = {}
    map_ = SelfOrganizingMap((1, 2), sigma_0=1.0)
    result = map_.step(states, {"w": torch.tensor([1.0, 0.0])}, kept=start, keep=written.__setitem__)
    near = math.exp(-0.5)
    expected = []
    for first, (a, b) in ((0.8, (2 / 3, 1 / 3 * near)), (0.2, (2 / 3 * near, 1 / 3))):
        stays = (1 - a) * (1 - b)
        x = stays * first + (1 - stays) * a / (a + b)
        expected.append([x, 1 - x])
    np.testing.assert_allclose(written["w"], expected, rtol=1e-6)
    assert expected[0][0] == pytest.approx(0.775999, abs=1e-6)
    assert result.bmu == {"A": (0, 0), "B": (0, 1)}
    distances = {s: [sum((a - b) ** 2 for a, b in zip(v, m, strict=True)) for m in expected] for s, v in
                 (("A", (1, 0)), ("B", (0, 1)))}  # fmt: skip
    assert result.weights == pytest.approx(som_weights(distances, {"A": 1.0, "B": 0.5}), rel=1e-12)


# the pull


def test_minisom_gives_the_same_map():
    """Compare with MiniSom, which goes through the data in turn, by pulls of one site each with its decay."""
    minisom = pytest.importorskip("minisom")
    rng = np.random.default_rng(2)
    data, start, rounds = rng.normal(size=(6, 9)), rng.normal(size=(4, 3, 9)), 7
    theirs = minisom.MiniSom(
        4, 3, 9, sigma=1.4, learning_rate=0.4, decay_function=lambda rate, t, _: rate * math.exp(-0.05 * t)
    )
    theirs._sigma_decay_function = lambda sigma, t, _: max(0.5, sigma * math.exp(-0.2 * t))
    theirs._weights = start.copy()
    theirs.train(data, rounds, use_epochs=True)

    neurons, sq_steps = start.reshape(12, 9), grid_sq_steps(4, 3)
    for r in range(rounds):
        options = {"eta": 0.4 * math.exp(-0.05 * r), "sigma": max(0.5, 1.4 * math.exp(-0.2 * r))}
        neurons = step_by_step(neurons, data, np.ones(6), sq_steps, **options)
    np.testing.assert_allclose(neurons, theirs.get_weights().reshape(12, 9), rtol=1e-10, atol=1e-12)


def test_a_pull_leaves_what_all_orders_would_leave():
    """Check neurons so far apart that winners stay: the share that a neuron keeps does not depend on the order."""
    vectors = np.array([[0.0], [100.0], [101.0]])
    neurons, strengths = np.array([[1.0], [99.0]]), np.array([0.5, 1.0, 1.5])
    sq_steps, options = grid_sq_steps(1, 2), {"eta": 0.1, "sigma": 0.4}
    distances = (vectors - neurons.T) ** 2
    kept, mixed = pull(distances, strengths, sq_steps, **options)
    batch = kept * neurons[:, 0] + mixed @ vectors[:, 0]
    turns = [
        step_by_step(neurons, vectors[list(order)], strengths[list(order)], sq_steps, **options)[:, 0]
        for order in permutations(range(3))
    ]
    assert np.ptp(np.stack(turns), axis=0).min() > 0.01  # the order counts there
    moved = np.zeros_like(neurons)  # a neuron at 0 among sites at 1 ends at the share that it gave away
    given_away = step_by_step(moved, np.ones((3, 1)), strengths, sq_steps, eta=0.1, sigma=1e9)[:, 0]
    everywhere, _ = pull((np.ones((3, 1)) - moved.T) ** 2, strengths, sq_steps, eta=0.1, sigma=1e9)
    np.testing.assert_allclose(1 - everywhere, given_away, rtol=1e-12)
    assert (np.min(turns, axis=0) - 1e-9 <= batch).all()
    assert (batch <= np.max(turns, axis=0) + 1e-9).all()


def test_pulls_with_full_strength_and_with_none():
    sq_steps = grid_sq_steps(1, 2)
    kept, mixed = pull(np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([9.0, 9.0]), sq_steps, eta=1.0, sigma=0.01)
    np.testing.assert_array_equal(kept, [0, 1])  # the neighbour is out of reach: exp(-5000) is 0
    np.testing.assert_array_equal(mixed, [[0.5, 0.5], [0, 0]])


# against explicit vectors


class Reference:
    """Compute (MRL-3) to (MRL-9) line by line on float64 vectors, with the batch update; slow on purpose."""

    def __init__(self, *, grid=(5, 5), sigma_0=2.0, kappa=0.1, sigma_min=0.5, eta=0.5, epochs=1, sigma_w=1.0,
                 init="sample", seed=0) -> None:  # fmt: skip
        self.cells = [(i, j) for i in range(grid[0]) for j in range(grid[1])]
        self.grid, self.eta, self.epochs, self.sigma_w = grid, eta, epochs, sigma_w
        self.radius = lambda r: max(sigma_min, sigma_0 * math.exp(-kappa * r))
        self.init, self.seed = init, seed
        self.rounds, self.neurons = 0, None

    def step(self, states, received) -> SomResult:
        sites = sorted(states)
        g = self._flat(received)
        v = [self._flat(states[site]) for site in sites]
        if self.neurons is None:
            self.neurons = self._starts(v, received)
        m = self.neurons
        cosines = [float(x @ g) / math.sqrt(float(x @ x) * float(g @ g)) for x in v]
        s = [(1 + c) / 2 for c in cosines]
        sigma = self.radius(self.rounds)
        for _ in range(self.epochs):
            pulls = []
            for h, x in enumerate(v):
                b = self.cells[self._winner(x, m)]
                near = [math.exp(-((i - b[0]) ** 2 + (j - b[1]) ** 2) / (2 * sigma**2)) for i, j in self.cells]
                pulls.append([min(1.0, self.eta * len(v) * s[h] / sum(s) * x) for x in near])
            for n in range(len(m)):
                stays = math.prod(1 - a[n] for a in pulls)
                mean = sum(a[n] * x for a, x in zip(pulls, v, strict=True)) / sum(a[n] for a in pulls)
                m[n] = stays * m[n] + (1 - stays) * mean
        d2 = [[float(np.sum((x - n) ** 2)) for n in m] for x in v]
        mean = sum(map(sum, d2)) / (len(v) * len(m))
        scores = [s[h] * sum(math.exp(-x / (2 * self.sigma_w**2 * mean)) for x in d2[h]) for h in range(len(v))]
        result = SomResult(
            weights={site: score / sum(scores) for site, score in zip(sites, scores, strict=True)},
            similarity=dict(zip(sites, s, strict=True)),
            bmu={site: self.cells[self._winner(x, m)] for site, x in zip(sites, v, strict=True)},
            sq_distances={site: np.array(row).reshape(self.grid) for site, row in zip(sites, d2, strict=True)},
            sigma=sigma,
        )
        self.rounds += 1
        self.neurons = [n.astype(np.float32).astype(np.float64) for n in m]  # as they are kept
        return result

    def _flat(self, state):
        names = [n for n, t in state.items() if t.is_floating_point() and "running" not in n]
        return np.concatenate([state[n].double().numpy().reshape(-1) for n in names])

    def _winner(self, x, m):
        distances = [math.dist(x, n) for n in m]
        return distances.index(min(distances))

    def _starts(self, v, received):
        """The package's own random numbers: tensor t and block b say where in the stream of seed and round."""
        parts = []
        for t, name in enumerate(n for n in received if received[n].is_floating_point() and "running" not in n):
            for b, first in enumerate(range(0, received[name].numel(), som._BLOCK)):
                counter = np.array([0, 0, b, t], dtype=np.uint64)
                key = np.array([self.seed, self.rounds], dtype=np.uint64)
                rng = np.random.Generator(np.random.Philox(counter=counter, key=key))
                shape = (len(self.cells), min(som._BLOCK, received[name].numel() - first))
                draw = rng.standard_normal if self.init == "sample" else rng.random
                parts.append(draw(shape, dtype=np.float32).astype(np.float64))
        drawn = np.concatenate(parts, axis=1)
        return list(np.mean(v, axis=0) + 0.01 * np.std(v) * drawn if self.init == "sample" else drawn)


@pytest.mark.parametrize("options", [
    {},
    {"grid": (2, 3), "sigma_0": 1.5, "kappa": 0.3, "eta": 1.7, "epochs": 3, "sigma_w": 0.7},
    {"grid": (1, 1)},
])  # fmt: skip
@pytest.mark.parametrize("init", INITS)
def test_inner_products_give_what_vectors_give(monkeypatch, init, options):
    """Check sites that join and models that come closer, as in a training; two tensors have two blocks."""
    monkeypatch.setattr(som, "_BLOCK", 29)
    options = {"init": init, "seed": 5, **options}
    ours, plain = Federation(**options), Reference(**options)
    for r in range(3):
        states, received = models(2 + r, seed=r, scale=0.5**r)
        assert_same(ours.step(states, received), plain.step(states, received))
        kept = torch.cat([t.reshape(t.shape[0], -1) for t in ours.kept.values()], dim=1)
        np.testing.assert_allclose(kept, np.stack(plain.neurons), rtol=2e-7, atol=1e-9)
        plain.neurons = list(kept.double().numpy())  # a float64 bit may have rounded to another float32


def test_where_neurons_start():
    """Check mean + 0.01 std N(0, 1), or U[0, 1): fresh numbers in every block, tensor, neuron and seed."""
    states, received = models(3, large=70000)
    names = ["conv.weight", "fc.weight"]
    states = {site: {name: state[name] for name in names} for site, state in states.items()}
    received = {name: received[name] for name in names}
    vectors = {n: torch.stack([s[n].double() for s in states.values()]) for n in names}
    spread = torch.cat([v.reshape(3, -1) for v in vectors.values()], dim=1).std(correction=0)
    drawn: dict[str, list[torch.Tensor]] = {}
    for init in INITS:
        drawn[init] = []
        for seed in range(2):
            written: State = {}
            map_ = SelfOrganizingMap((1, 3), init=init, eta=1e-300, seed=seed)
            map_.step(states, received, keep=written.__setitem__)
            noise = written["fc.weight"]
            if init == "sample":
                noise = (noise - vectors["fc.weight"].mean(dim=0)) / (0.01 * spread)
                small = (written["conv.weight"] - vectors["conv.weight"].mean(dim=0)) / (0.01 * spread)
                assert not torch.allclose(small.reshape(3, -1), noise[:, :30], atol=0.1)
            drawn[init].append(noise)
    normal = torch.cat(drawn["sample"])
    assert float(normal.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(normal.std()) == pytest.approx(1.0, abs=0.02)
    uniform = torch.cat(drawn["uniform"])
    assert 0 <= float(uniform.min()) < 0.001
    assert 0.999 < float(uniform.max()) <= 1
    for numbers_ in (normal, uniform):
        blocks = torch.cat([numbers_[:, : 2**15], numbers_[:, 2**15 : 2**16]])  # 6 rows of two blocks
        assert float((torch.corrcoef(blocks) - torch.eye(12)).abs().max()) < 0.03


def test_a_later_round_needs_the_neurons():
    states, received = models(3)
    once = SelfOrganizingMap()
    once.step(states, received)
    with pytest.raises(ValueError, match="needs `kept`: pass the neurons"):
        once.step(states, received)


# how models come


class Lazy(Mapping[str, torch.Tensor]):
    """Make a tensor when it is asked for, and count how many are alive."""

    alive: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._state[name].clone()
        Lazy.alive.add(tensor)
        Lazy.most = max(Lazy.most, len(Lazy.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def test_one_tensor_of_each_model_is_held():
    states, received = models(4, large=1000)
    lazy = {site: Lazy(state) for site, state in states.items()}
    Lazy.most = 0
    result = SelfOrganizingMap().step(lazy, Lazy(received), keep=lambda *_: None)
    assert_same(result, SelfOrganizingMap().step(states, received), rel=0)
    # While the next tensors are read, those of the step before may still be referred to.
    assert Lazy.most <= 2 * (len(states) + 1)


# what always holds


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 999))
def test_weights_sum_to_one(num_sites, seed):
    states, received = models(num_sites, seed, scale=10.0 ** (seed % 5 - 3))
    result = SelfOrganizingMap((3, 2), seed=seed).step(states, received)
    assert math.fsum(result.weights.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(w >= 0 for w in result.weights.values())
    assert all(0 <= s <= 1 for s in result.similarity.values())
    assert list(result.weights) == sorted(states)


numbers = st.floats(0, 1e200)


def test_the_order_of_arrival_changes_no_bit():
    states, received = models(5)
    backwards = dict(reversed(states.items()))
    assert_same(SelfOrganizingMap().step(states, received), SelfOrganizingMap().step(backwards, received), rel=0)


def test_the_radius_shrinks_to_its_floor():
    federation = Federation(sigma_0=2.0, kappa=0.1, sigma_min=0.5)
    radii = [federation.step(*models(1, seed=r)).sigma for r in range(20)]
    assert radii[0] == 2.0
    assert radii[5] == pytest.approx(2 * math.exp(-0.5))
    assert radii == sorted(radii, reverse=True)
    assert radii[-1] == 0.5


def test_distances_that_differ_by_rounding_are_a_tie():
    """Check a second neuron nearer by one part in 1e12: no site may win or lose by that."""
    distances = np.array([[1.0 + 1e-12, 1.0, 4.0]])
    kept, _ = pull(distances, np.ones(1), grid_sq_steps(1, 3), eta=0.5, sigma=1.0)
    np.testing.assert_allclose(1 - kept, 0.5 * np.exp([0, -0.5, -2]), rtol=1e-12)
    kept, _ = pull(distances + np.array([1e-6, 0, 0]), np.ones(1), grid_sq_steps(1, 3), eta=0.5, sigma=1.0)
    np.testing.assert_allclose(1 - kept, 0.5 * np.exp([-0.5, 0, -0.5]), rtol=1e-12)


# resume


def test_resume_is_bit_identical():
    whole, first, second = (Federation(seed=3) for _ in range(3))
    for r in range(5):
        states, received = models(3, seed=r)
        expected = whole.step(states, received)
        if r == 2:
            file = io.BytesIO()
            torch.save({"som": first.som.state_dict(), "kept": first.kept}, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            second.som.load_state_dict(loaded["som"])
            second.kept = loaded["kept"]
        result = (first if r < 2 else second).step(states, received)
        assert result.weights == expected.weights
        assert all((d == expected.sq_distances[s]).all() for s, d in result.sq_distances.items())
        assert result.sigma == expected.sigma


@pytest.mark.parametrize(("other", "message"), [({"grid": (5, 4)}, "grid"), ({"seed": 1}, "seed")])
def test_a_state_of_another_map_is_refused(other, message):
    state = SelfOrganizingMap().state_dict()
    with pytest.raises(ValueError, match=f"state is of a map with {message}"):
        SelfOrganizingMap(**other).load_state_dict(state)


def test_a_failed_round_leaves_the_map_as_it_was():
    states, received = models(2)
    one, other = Federation(), Federation()
    one.step(states, received)
    other.step(states, received)
    broken = states | {"site-1": states["site-1"] | {"fc.weight": torch.ones(3)}}
    kept = one.kept
    with pytest.raises(ValueError, match=r"site 'site-1': tensor 'fc\.weight'"):
        one.step(broken, received)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        one.som.step(states, received, kept=kept, keep=full)
    assert one.som.rounds == 1
    assert_same(one.step(states, received), other.step(states, received), rel=0)


# degenerate input


def test_models_of_zeros():
    zeros = {"w": torch.zeros(20)}
    federation = Federation()
    for _ in range(2):
        result = federation.step({"A": zeros, "B": zeros}, zeros)
        assert result.weights == {"A": 0.5, "B": 0.5}
        assert result.similarity == {"A": 0.5, "B": 0.5}
        assert result.bmu == {"A": (0, 0), "B": (0, 0)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_left_out(bad):
    states, received = models(3, large=35000)
    without, with_bad = Federation(), Federation()
    for r in range(2):
        broken = {name: t.clone() for name, t in states["site-1"].items()}
        broken["fc.weight"][-1 - r] = bad
        result = with_bad.step(states | {"site-1": broken}, received)
        assert result.excluded == ("site-1",)
        expected = without.step({s: states[s] for s in ("site-0", "site-2")}, received)
        assert result.weights == expected.weights
        assert result.bmu == expected.bmu
    assert all(torch.equal(t, without.kept[n]) for n, t in with_bad.kept.items())


def test_huge_and_half_precision_models():
    states, received = models(3)
    huge = {s: {n: t.double() * 1e100 for n, t in state.items()} for s, state in states.items()}
    result = SelfOrganizingMap().step(huge, {n: t.double() * 1e100 for n, t in received.items()})
    assert result.weights == pytest.approx(SelfOrganizingMap().step(states, received).weights, rel=1e-9)
    half = {s: {n: t.half() for n, t in state.items()} for s, state in states.items()}
    wide = {s: {n: t.float() for n, t in state.items()} for s, state in half.items()}
    assert_same(SelfOrganizingMap().step(half, received), SelfOrganizingMap().step(wide, received), rel=0)


def test_bad_rounds():
    states, received = models(2)
    map_ = SelfOrganizingMap()
    nan = {name: t * math.nan for name, t in received.items()}
    for arguments, message in [
        (({}, received), "no site"),
        ((states, nan), "the received model is not finite"),
        ((dict.fromkeys("AB", nan), received), "no site has a finite model: 'A', 'B'"),
        (({"A": {}}, received), "site 'A': tensor 'conv.weight' is missing"),
        (({"A": {"w": torch.tensor([1])}}, {"w": torch.tensor([1])}), "no floating tensor"),
        (({"A": {"w": torch.tensor([1])}}, {"w": torch.tensor([1.0])}), "site 'A': tensor 'w' is torch.int64"),
        (({"A": {"w": torch.ones(2)}}, {"w": torch.ones(3)}), r"\(2,\), the received model .*\(3,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            map_.step(*arguments)
    for kept, message in [
        ({}, r"'kept' .*no neurons .*'conv\.weight'"),
        (
            {"conv.weight": torch.zeros(2, 6, 5)},
            "'conv.weight' must .*25, 6, 5., got .2",
        ),
        ({"conv.weight": torch.full((25, 6, 5), math.inf)}, "'conv.weight' are not finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            map_.step(states, received, kept=kept)
    assert map_.rounds == 0


@pytest.mark.parametrize(("options", "message"), [({"seed": 2**63}, "seed must be an integer")])
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        SelfOrganizingMap(**options)


def test_bad_weights():
    for arguments, message in [
        (({}, {}), "no site"),
        (({"A": [1.0]}, {"B": 1.0}), "same sites; only in distances: 'A'"),
        (
            ({"A": [1.0], "B": [1.0, 2.0]}, {"A": 1.0, "B": 1.0}),
            r"distances of site 'B' must .*got \(2,\)",
        ),
        (({"A": [math.nan]}, {"A": 1.0}), "squared distance of site 'A'.* got nan$"),
        (({"A": [-1.0]}, {"A": 1.0}), "squared distance of site 'A'.* got -1.0$"),
        (({"A": [1.0]}, {"A": -1.0}), "similarity of site 'A'"),
    ]:
        with pytest.raises(ValueError, match=message):
            som_weights(*arguments)
    with pytest.raises(ValueError, match="sigma_w must be finite and > 0, got 0"):
        som_weights({"A": [1.0]}, {"A": 1.0}, sigma_w=0)
    assert som_weights({"A": [0.0], "B": [0.0]}, {"A": 3.0, "B": 1.0}) == {"A": 0.75, "B": 0.25}
    assert som_weights({"A": [1.0], "B": [1.0]}, {"A": 0.0, "B": 0.0}) == {"A": 0.5, "B": 0.5}
    # exp(-2e5) and less are 0 in float64: only their ratio counts, here 1 to exp(-1e-5 / (2 * 1e-6 * 1.000005))
    narrow = som_weights({"A": [1.0], "B": [1.00001]}, {"A": 0.5, "B": 0.5}, sigma_w=1e-3)
    assert narrow["B"] / narrow["A"] == pytest.approx(math.exp(-5 / 1.000005), rel=1e-9)
    assert model_similarity(0.0, 0.0, 1.0) == 0.5
    assert model_similarity(-2.0, 1.0, 4.0) == 0.0
