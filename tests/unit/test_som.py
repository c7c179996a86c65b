"""The self-organizing map: the specification's example, its forms against each other, a loop and MiniSom."""

from __future__ import annotations

import doctest
import io
import math
import weakref
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflare.core import som
from fairflare.core.som import SelfOrganizingMap, SomResult, model_similarity, som_weights

pytestmark = pytest.mark.usefixtures("one_thread")

State = dict[str, torch.Tensor]
FORMS = ("plain", "gram", "sketch")


def models(num_sites: int, seed: int = 0, *, large: int = 0, scale: float = 0.1) -> tuple[dict[str, State], State]:
    """Local models and the received one; with a batch norm, and with a tensor of more than one block if large."""
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


class Federation:
    """Rounds of a map; for the Gram form with the neurons handed on."""

    def __init__(self, **options: Any) -> None:
        self.som = SelfOrganizingMap(**options)
        self.kept: State | None = None

    def step(self, states: Mapping[str, Any], received: Any, **options: Any) -> SomResult:
        if self.som.form != "gram":
            return self.som.step(states, received, **options)
        written: State = {}
        result = self.som.step(states, received, kept=self.kept, keep=written.__setitem__, **options)
        self.kept = written
        return result


def assert_same(one: SomResult, other: SomResult, rel: float = 1e-8) -> None:
    assert one.weights == pytest.approx(other.weights, rel=rel)
    assert one.similarity == pytest.approx(other.similarity, rel=rel)
    assert one.bmu == other.bmu
    assert one.excluded == other.excluded
    for site, distances in one.sq_distances.items():
        np.testing.assert_allclose(distances, other.sq_distances[site], rtol=rel)
    np.testing.assert_allclose(one.u_matrix, other.u_matrix, rtol=rel)


# the specification's example


TWO = ({"A": {"w": torch.tensor([1.0, 0.0])}, "B": {"w": torch.tensor([0.0, 1.0])}}, {"w": torch.tensor([1.0, 0.0])})
START = {"w": torch.tensor([[0.8, 0.2], [0.2, 0.8]], dtype=torch.float64)}


@pytest.mark.parametrize("form", ["plain", "gram"])
def test_worked_example(form):
    result = SelfOrganizingMap((1, 2), sigma_0=1.0, form=form).step(*TWO, kept=START)
    assert result.similarity == {"A": 1.0, "B": 0.5}
    assert result.bmu == {"A": (0, 0), "B": (0, 1)}
    assert result.sq_distances["A"] == pytest.approx(np.array([[0.130423, 0.847631]]), abs=1e-6)
    assert result.sq_distances["B"] == pytest.approx(np.array([[1.108962, 0.243586]]), abs=1e-6)
    assert result.weights == pytest.approx({"A": 0.696999, "B": 0.303001}, abs=1e-6)


def test_worked_example_neurons():
    plain = SelfOrganizingMap((1, 2), sigma_0=1.0)
    plain.step(*TWO, kept=START)
    assert plain.neurons is not None
    np.testing.assert_allclose(plain.neurons, [[0.744635, 0.255365], [0.348989, 0.651011]], atol=1e-6)
    written: State = {}
    SelfOrganizingMap((1, 2), sigma_0=1.0, form="gram").step(*TWO, kept=START, keep=written.__setitem__)
    torch.testing.assert_close(written["w"], plain.neurons)


def test_worked_example_weights_alone():
    distances = {"A": [0.130423, 0.847631], "B": [1.108962, 0.243586]}
    alpha = som_weights(distances, {"A": 1.0, "B": 0.5})
    assert alpha == pytest.approx({"A": 0.696999, "B": 0.303001}, abs=1e-6)
    equal = som_weights({"A": [3.0, 3.0], "B": [3.0, 3.0]}, {"A": 1.0, "B": 0.5})
    assert equal == pytest.approx({"A": 0.666667, "B": 0.333333}, abs=1e-6)


def test_doctests():
    assert doctest.testmod(som).failed == 0


# against a loop written from the specification, and against MiniSom


def reference_round(v, g, m, similarity, *, rows, columns, sigma, eta, epochs, sigma_w):
    """(MRL-3) to (MRL-9) line by line on lists of vectors. Slow on purpose."""
    total = sum(similarity)
    m = [row.copy() for row in m]
    cells = [(i, j) for i in range(rows) for j in range(columns)]
    for _ in range(epochs):
        for h in range(len(v)):
            distances = [math.dist(v[h], m[n]) for n in range(len(cells))]
            b = cells[distances.index(min(distances))]
            for n, (i, j) in enumerate(cells):
                near = math.exp(-((i - b[0]) ** 2 + (j - b[1]) ** 2) / (2 * sigma**2))
                a = min(1.0, eta * len(v) * similarity[h] / total * near)
                m[n] = m[n] + a * (v[h] - m[n])
    d2 = [[float(np.sum((v[h] - m[n]) ** 2)) for n in range(len(cells))] for h in range(len(v))]
    mean = sum(map(sum, d2)) / (len(v) * len(cells))
    u = [sum(math.exp(-x / (2 * sigma_w**2 * mean)) for x in row) / len(cells) for row in d2]
    scores = [s * x for s, x in zip(similarity, u, strict=True)]
    return m, d2, [score / sum(scores) for score in scores]


@pytest.mark.parametrize(("eta", "epochs"), [(0.5, 1), (1.7, 2)])
def test_the_plain_form_is_the_loop(eta, epochs):
    rng = np.random.default_rng(1)
    options = {"sigma_0": 1.5, "kappa": 0.3, "eta": eta, "epochs": epochs, "sigma_w": 0.7, "storage": "float64"}
    plain = SelfOrganizingMap((2, 3), **options)
    neurons = list(rng.normal(size=(6, 8)))
    kept: Any = {"w": torch.from_numpy(np.stack(neurons))}
    for r in range(4):
        v, g = rng.normal(size=(3, 8)), rng.normal(size=8)
        similarity = [(1 + x @ g / np.linalg.norm(x) / np.linalg.norm(g)) / 2 for x in v]
        sigma = max(0.5, 1.5 * math.exp(-0.3 * r))
        settings_ = {"rows": 2, "columns": 3, "sigma": sigma, "eta": eta, "epochs": epochs, "sigma_w": 0.7}
        neurons, d2, alpha = reference_round(list(v), g, neurons, similarity, **settings_)
        states = {site: {"w": torch.from_numpy(x)} for site, x in zip("ABC", v, strict=True)}
        result = plain.step(states, {"w": torch.from_numpy(g)}, kept=kept if r == 0 else None)
        assert result.sigma == pytest.approx(sigma, rel=1e-12)
        assert list(result.weights.values()) == pytest.approx(alpha, rel=1e-10)
        np.testing.assert_allclose([result.sq_distances[s].reshape(-1) for s in "ABC"], d2, rtol=1e-10, atol=1e-20)


@pytest.mark.parametrize("form", ["plain", "gram"])
def test_minisom_gives_the_same_map(form):
    """Same decay and neighbourhood; with a zero received model all similarities are 1/2 and drop out."""
    minisom = pytest.importorskip("minisom")
    rng = np.random.default_rng(2)
    data, start, rounds = rng.normal(size=(6, 9)), rng.normal(size=(4, 3, 9)), 7
    theirs = minisom.MiniSom(
        4,
        3,
        9,
        sigma=1.4,
        learning_rate=0.4,
        decay_function=lambda rate, t, _: rate * math.exp(-0.05 * t),
    )
    theirs._sigma_decay_function = lambda sigma, t, _: max(0.5, sigma * math.exp(-0.2 * t))
    theirs._weights = start.copy()
    theirs.train(data, rounds, use_epochs=True)

    ours = Federation(
        grid=(4, 3), sigma_0=1.4, kappa=0.2, eta=0.4, eta_decay=0.05, form=form, storage="float64", space="weights"
    )
    states = {f"site-{k}": {"w": torch.from_numpy(row)} for k, row in enumerate(data)}
    zero = {"w": torch.zeros(9, dtype=torch.float64)}
    placed: Any = {"w": torch.from_numpy(start.reshape(12, 9))}
    for r in range(rounds):
        if form == "gram":
            ours.kept = placed if r == 0 else ours.kept
            result = ours.step(states, zero)
        else:
            result = ours.step(states, zero, kept=placed if r == 0 else None)
    final = ours.som.neurons if ours.kept is None else ours.kept["w"]
    np.testing.assert_allclose(final, theirs.get_weights().reshape(12, 9), rtol=1e-10, atol=1e-12)
    assert result.bmu == {f"site-{k}": tuple(map(int, theirs.winner(row))) for k, row in enumerate(data)}
    map_ = theirs.distance_map(scaling="mean")
    np.testing.assert_allclose(result.u_matrix / result.u_matrix.max(), map_, rtol=1e-10)


# the forms against each other


@pytest.mark.parametrize(("space", "init"), list(product(som.SPACES, som.INITS)))
def test_gram_equals_plain(space, init):
    options = {"space": space, "init": init, "storage": "float64", "seed": 5}
    plain, gram = Federation(form="plain", **options), Federation(form="gram", **options)
    for r in range(4):
        states, received = models(2 + r, seed=r, large=35000)  # sites join, and two blocks in one tensor
        assert_same(plain.step(states, received), gram.step(states, received))


@pytest.mark.parametrize("space", som.SPACES)
def test_where_neurons_start(space):
    """Mean + 0.01 std N(0, 1), or U[0, 1): fresh numbers in every block, tensor, neuron and restarted round."""
    states, received = models(3, large=70000)
    still = {"space": space, "eta": 1e-300, "storage": "float64", "restart": True, "form": "gram", "grid": (1, 3)}
    vectors = {n: torch.stack([s[n].double() for s in states.values()]) for n in ("conv.weight", "fc.weight")}
    if space == "updates":
        vectors = {name: v - received[name].double() for name, v in vectors.items()}
    spread = torch.cat([v.reshape(3, -1) for v in vectors.values()], dim=1).std(correction=0)
    drawn: dict[str, list[torch.Tensor]] = {}
    for init in som.INITS:
        map_ = SelfOrganizingMap(init=init, **still)
        drawn[init] = []
        for _ in range(2):
            written: State = {}
            map_.step(states, received, keep=written.__setitem__, names=["conv.weight", "fc.weight"])
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
    assert 0.999 < float(uniform.max()) < 1
    for numbers_ in (normal, uniform):
        blocks = torch.cat([numbers_[:, : 2**15], numbers_[:, 2**15 : 2**16]])  # 6 rows of two blocks
        assert float((torch.corrcoef(blocks) - torch.eye(12)).abs().max()) < 0.03


@pytest.mark.parametrize("storage", ["float32", "float64"])
def test_gram_equals_plain_over_a_federation(storage):
    """Models that come closer and closer, as in a training that converges."""
    plain, gram = Federation(form="plain", storage=storage), Federation(form="gram", storage=storage)
    _, received = models(0)
    generator = torch.Generator().manual_seed(0)
    for r in range(8):
        states = {
            site: {n: t + 0.3**r * torch.randn(t.shape, generator=generator) for n, t in received.items()}
            for site in "ABCD"
        }
        one, other = plain.step(states, received), gram.step(states, received)
        assert one.weights == pytest.approx(other.weights, abs=1e-8)
        assert one.bmu == other.bmu
        received = {n: sum(one.weights[s] * states[s][n] for s in states) for n in received}


def test_restart_keeps_only_the_count_of_rounds():
    plain, gram = SelfOrganizingMap(restart=True), SelfOrganizingMap(restart=True, form="gram")
    for r in range(3):
        states, received = models(3, seed=r)
        assert_same(plain.step(states, received), gram.step(states, received))
        assert plain.neurons is None
    fresh = SelfOrganizingMap().step(states, received)
    assert plain.sigma < SelfOrganizingMap().sigma
    assert plain.step(states, received).weights != fresh.weights  # other starts, smaller radius


def test_a_sketch_keeps_distances():
    """Neurons placed far apart: each squared distance within 10 % with 4096 buckets (about 2 % expected)."""
    states, received = models(4, large=20000, scale=0.5)
    generator = torch.Generator().manual_seed(1)
    kept = {
        name: t + torch.arange(25).reshape(25, *[1] * t.dim()) * 0.2 * torch.randn(25, *t.shape, generator=generator)
        for name, t in received.items()
        if t.is_floating_point()
    }
    exact = SelfOrganizingMap(form="plain", eta=1e-300).step(states, received, kept=kept)
    rough = SelfOrganizingMap(form="sketch", eta=1e-300).step(states, received, kept=kept)
    assert rough.similarity == exact.similarity
    assert rough.bmu == exact.bmu
    assert rough.weights == pytest.approx(exact.weights, abs=0.01)
    for site in states:
        np.testing.assert_allclose(rough.sq_distances[site], exact.sq_distances[site], rtol=0.1)
    state = SelfOrganizingMap(form="sketch", sketch_size=64)
    state.step(states, received)
    assert state.state_dict()["neurons"].shape == (25, 64)


# how models come


@pytest.mark.parametrize("form", FORMS)
def test_iterables_and_functions_give_what_dicts_give(form):
    states, received = models(3)

    def tensors(state: State) -> list[torch.Tensor]:
        return [t for name, t in state.items() if "running" not in name and t.is_floating_point()]

    one = SelfOrganizingMap(form=form).step(states, received)
    lists = {site: tensors(state) for site, state in states.items()}
    assert_same(one, SelfOrganizingMap(form=form).step(lists, tensors(received)), rel=0)
    functions = {site: (lambda state=state: iter(tensors(state))) for site, state in states.items()}
    assert_same(one, SelfOrganizingMap(form=form).step(functions, lambda: iter(tensors(received))), rel=0)
    once = {site: iter(lists[site]) for site in lists}
    assert_same(one, SelfOrganizingMap(form=form).step(once, iter(tensors(received))), rel=0)


def test_an_iterator_cannot_be_read_twice():
    with pytest.raises(ValueError, match="read twice"):
        SelfOrganizingMap(form="gram").step({"A": iter([torch.ones(3)])}, [torch.ones(3)], keep=lambda *_: None)


def test_one_vector_may_be_the_model():
    states = {"A": torch.tensor([1.0, 2.0]), "B": torch.tensor([2.0, 1.0])}
    named = {site: {"w": v} for site, v in states.items()}
    received = torch.tensor([1.0, 1.0])
    assert_same(SelfOrganizingMap().step(states, received), SelfOrganizingMap().step(named, {"w": received}), rel=0)


class Lazy(Mapping[str, torch.Tensor]):
    """Makes a tensor when it is asked for; knows how many are alive."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
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


def test_the_gram_form_holds_one_tensor_per_model():
    states, received = models(4, large=1000)
    lazy = {site: Lazy(state) for site, state in states.items()}
    Lazy.most = 0
    result = SelfOrganizingMap(form="gram").step(lazy, Lazy(received), keep=lambda *_: None)
    assert_same(result, SelfOrganizingMap(form="plain").step(states, received))
    # While the next tensors are read, those of the step before may still be referred to.
    assert Lazy.most <= 2 * (len(states) + 1)


def test_only_parameters_count():
    states, received = models(3)
    one = SelfOrganizingMap().step(states, received)
    for state in states.values():
        state["norm.running_mean"] = torch.full((7,), math.nan)
        state["norm.num_batches_tracked"] = torch.tensor(99)
    assert_same(one, SelfOrganizingMap().step(states, received), rel=0)
    names = ["conv.weight", "norm.weight", "fc.weight"]
    assert_same(one, SelfOrganizingMap().step(states, received, names=names), rel=0)
    fewer = SelfOrganizingMap().step(states, received, names=["fc.weight"])
    assert fewer.weights != one.weights


def test_inputs_are_not_changed():
    states, received = models(3)
    before = {site: {n: t.clone() for n, t in state.items()} for site, state in states.items()}
    for form in FORMS:
        SelfOrganizingMap(form=form).step(states, received)
    assert all(torch.equal(t, before[site][n]) for site, state in states.items() for n, t in state.items())


def test_the_global_generators_are_not_touched():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for form, init in product(FORMS, som.INITS):
        SelfOrganizingMap(form=form, init=init).step(*models(2))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


# what always holds


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 999), st.sampled_from(FORMS), st.sampled_from(som.SPACES))
def test_weights_sum_to_one(num_sites, seed, form, space):
    states, received = models(num_sites, seed, scale=10.0 ** (seed % 5 - 3))
    result = SelfOrganizingMap((3, 2), form=form, space=space, seed=seed, sketch_size=50).step(states, received)
    assert math.fsum(result.weights.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(w >= 0 for w in result.weights.values())
    assert all(0 <= s <= 1 for s in result.similarity.values())
    assert list(result.weights) == sorted(states)
    assert np.isfinite(result.u_matrix).all()


numbers = st.floats(0, 1e200)


@given(st.lists(st.tuples(st.floats(0, 1), numbers, numbers, numbers), min_size=1, max_size=6), st.randoms())
def test_som_weights_permute_with_the_sites(rows, random):
    named = dict(zip("ABCDEF", rows, strict=False))
    alpha = som_weights({k: row[1:] for k, row in named.items()}, {k: row[0] for k, row in named.items()})
    assert math.fsum(alpha.values()) == pytest.approx(1.0, abs=1e-12)
    other = list(named)
    random.shuffle(other)
    renamed = {new: named[old] for new, old in zip(named, other, strict=True)}
    beta = som_weights({k: row[1:] for k, row in renamed.items()}, {k: row[0] for k, row in renamed.items()})
    assert {old: beta[new] for new, old in zip(named, other, strict=True)} == pytest.approx(alpha, abs=1e-9)


@given(st.floats(0.01, 1), st.lists(st.floats(0, 100), min_size=3, max_size=3), st.floats(0.01, 10))
def test_a_nearer_or_more_similar_site_never_weighs_less(s, distances, more):
    far = [d + more for d in distances]
    alpha = som_weights({"A": distances, "B": far}, {"A": s, "B": s})
    assert alpha["A"] >= alpha["B"]
    alpha = som_weights({"A": distances, "B": distances}, {"A": s + more, "B": s})
    assert alpha["A"] > alpha["B"]


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_arrival_does_not_matter(form):
    states, received = models(5)
    one, other = SelfOrganizingMap(form=form), SelfOrganizingMap(form=form)
    backwards = dict(reversed(states.items()))
    assert_same(one.step(states, received), other.step(backwards, received), rel=0)


@pytest.mark.parametrize("form", FORMS)
def test_permutation_of_sites_permutes_the_weights(form):
    """Exactly when the most similar pulls first. In the order of the names, the later ones pull last: a little."""
    states, received = models(4)
    names = sorted(states)
    renamed = {new: states[old] for new, old in zip(names, names[2:] + names[:2], strict=True)}

    def weights(order: str) -> tuple[list[float], list[float]]:
        one = SelfOrganizingMap(form=form, order=order).step(states, received).weights
        other = SelfOrganizingMap(form=form, order=order).step(renamed, received).weights
        return [one[old] for old in names[2:] + names[:2]], [other[new] for new in names]

    same, again = weights("similarity")
    assert again == pytest.approx(same, rel=1e-9)
    same, again = weights("name")
    assert again == pytest.approx(same, abs=0.05)
    assert again != pytest.approx(same, abs=1e-6)


def test_the_radius_shrinks_to_its_floor():
    som_ = SelfOrganizingMap(sigma_0=2.0, kappa=0.1, sigma_min=0.5)
    radii = []
    for r in range(20):
        radii.append(som_.step(*models(1, seed=r)).sigma)
    assert radii[0] == 2.0
    assert radii[5] == pytest.approx(2 * math.exp(-0.5))
    assert radii == sorted(radii, reverse=True)
    assert radii[-1] == 0.5


def test_u_matrix_of_two_clusters():
    """A 1 x 4 map whose neurons stay where they are: distances 0, 10, 0 among neighbours."""
    kept = {"w": torch.tensor([[0.0], [0.0], [10.0], [10.0]])}
    result = SelfOrganizingMap((1, 4), eta=1e-300).step({"A": {"w": torch.zeros(1)}}, {"w": torch.ones(1)}, kept=kept)
    np.testing.assert_allclose(result.u_matrix, [[0.0, 5.0, 5.0, 0.0]])
    assert result.bmu == {"A": (0, 0)}  # the first of two at the same place


# resume


@pytest.mark.parametrize(("form", "space"), list(product(FORMS, som.SPACES)))
def test_resume_is_bit_identical(form, space):
    whole, first, second = (Federation(form=form, space=space, seed=3, sketch_size=30) for _ in range(3))
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


@pytest.mark.parametrize(
    ("other", "message"),
    [({"grid": (5, 4)}, "grid"), ({"form": "sketch"}, "form"), ({"seed": 1}, "seed"), ({"space": "updates"}, "space")],
)
def test_a_state_of_another_map_is_refused(other, message):
    state = SelfOrganizingMap().state_dict()
    with pytest.raises(ValueError, match=f"state is of a map with {message}"):
        SelfOrganizingMap(**other).load_state_dict(state)


def test_a_failed_round_leaves_the_map_as_it_was():
    som_ = SelfOrganizingMap()
    states, received = models(2)
    som_.step(states, received)
    before = som_.state_dict()
    broken = states | {"site-1": states["site-1"] | {"fc.weight": torch.ones(3)}}
    with pytest.raises(ValueError, match=r"site 'site-1': tensor 'fc\.weight'"):
        som_.step(broken, received)
    assert torch.equal(before["neurons"], som_.state_dict()["neurons"])
    assert som_.rounds == 1


# degenerate input


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("space", som.SPACES)
def test_one_site_has_all_the_weight(form, space):
    federation = Federation(form=form, space=space)
    for r in range(3):
        assert federation.step(*models(1, seed=r)).weights == {"site-0": 1.0}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("space", som.SPACES)
def test_identical_models_weigh_the_same(form, space):
    states, received = models(1)
    same = dict.fromkeys("ABC", states["site-0"])
    assert Federation(form=form, space=space).step(same, received).weights == pytest.approx(dict.fromkeys("ABC", 1 / 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("space", som.SPACES)
def test_models_of_zeros(form, space):
    zeros = {"w": torch.zeros(20)}
    federation = Federation(form=form, space=space)
    for _ in range(2):
        result = federation.step({"A": zeros, "B": zeros}, zeros)
        assert result.weights == {"A": 0.5, "B": 0.5}
        assert result.similarity == {"A": 0.5, "B": 0.5}
        assert result.bmu == {"A": (0, 0), "B": (0, 0)}
        assert not result.u_matrix.any()


def test_a_zero_model_among_others():
    states, received = models(2)
    states["zero"] = {name: torch.zeros_like(t) for name, t in received.items()}
    for form in FORMS:
        result = SelfOrganizingMap(form=form).step(states, received)
        assert result.similarity["zero"] == 0.5
        assert 0 < result.weights["zero"] < 1


def test_opposite_models_leave_uniform_weights():
    received = {"w": torch.tensor([1.0, 2.0])}
    states = {site: {"w": torch.tensor([-1.0, -2.0])} for site in "AB"}
    assert SelfOrganizingMap().step(states, received).weights == pytest.approx({"A": 0.5, "B": 0.5})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_left_out(form, bad):
    states, received = models(3, large=35000)
    without = Federation(form=form)
    with_bad = Federation(form=form)
    for r in range(2):
        broken = {name: t.clone() for name, t in states["site-1"].items()}
        broken["fc.weight"][-1 - r] = bad
        result = with_bad.step(states | {"site-1": broken}, received)
        assert result.excluded == ("site-1",)
        expected = without.step({s: states[s] for s in ("site-0", "site-2")}, received)
        assert result.weights == pytest.approx(expected.weights, rel=1e-12)
        assert result.bmu == expected.bmu


def test_huge_and_half_precision_models():
    states, received = models(3)
    huge = {s: {n: t.double() * 1e100 for n, t in state.items()} for s, state in states.items()}
    result = SelfOrganizingMap(form="plain", storage="float64").step(
        huge, {n: t.double() * 1e100 for n, t in received.items()}
    )
    assert math.fsum(result.weights.values()) == pytest.approx(1.0)
    half = {s: {n: t.half() for n, t in state.items()} for s, state in states.items()}
    assert_same(SelfOrganizingMap().step(half, received), SelfOrganizingMap(form="gram").step(half, received))


def test_bad_rounds():
    states, received = models(2)
    som_ = SelfOrganizingMap()
    nan = {name: t * math.nan for name, t in received.items()}
    for arguments, message in [
        (({}, received), "no site"),
        ((states, nan), "the received model is not finite"),
        ((dict.fromkeys("AB", nan), received), "no site has a finite model: 'A', 'B'"),
        (({"A": {}}, received), "site 'A': tensor 'conv.weight' is missing"),
        (({"A": {"w": torch.tensor([1])}}, {"w": torch.tensor([1])}), "no floating tensor"),
        (({"A": {"w": torch.tensor([1])}}, {"w": torch.tensor([1.0])}), "site 'A': tensor 'w' is torch.int64"),
        (({"A": [torch.ones(2)]}, [torch.ones(2), torch.ones(1)]), "site 'A': tensor 1 is missing"),
        (({"A": [torch.ones(2), torch.ones(1)]}, [torch.ones(2)]), "site 'A' has more tensors"),
        (({"A": [torch.ones(2)]}, {"w": torch.ones(2)}), "site 'A': the model must come in the same form"),
    ]:
        with pytest.raises(ValueError, match=message):
            som_.step(*arguments)
    with pytest.raises(ValueError, match="'absent' is not in the received model"):
        som_.step(states, received, names=["absent"])
    with pytest.raises(ValueError, match="keep is for form 'gram'"):
        som_.step(states, received, keep=lambda *_: None)
    with pytest.raises(ValueError, match=r"kept neurons lack tensor 'conv\.weight'"):
        som_.step(states, received, kept={})
    with pytest.raises(ValueError, match=r"kept neurons of tensor 'conv.weight' have shape \(2, 6, 5\)"):
        som_.step(states, received, kept={"conv.weight": torch.zeros(2, 6, 5)})
    gram = SelfOrganizingMap(form="gram")
    gram.step(states, received)
    with pytest.raises(ValueError, match="needs the neurons that round 0 handed to keep"):
        gram.step(states, received)
    som_.step(states, received)
    with pytest.raises(ValueError, match="neurons have 77 numbers, the models 30"):
        som_.step(states, received, names=["conv.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": ()}, "grid must be two whole numbers"),
        ({"grid": (0, 5)}, r"grid must be two whole numbers >= 1, got \(0, 5\)"),
        ({"sigma_0": 0.0}, "sigma_0 must be finite and > 0, got 0.0"),
        ({"eta": math.nan}, "eta must be finite"),
        ({"kappa": -1.0}, "kappa must be finite and >= 0"),
        ({"epochs": 0}, "epochs must be a whole number >= 1"),
        ({"init": "zeros"}, "unknown init 'zeros'; Available: 'sample', 'uniform'"),
        ({"form": "fast"}, "unknown form"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        SelfOrganizingMap(**options)


def test_bad_weights():
    for arguments, message in [
        (({}, {}), "no site"),
        (({"A": [1.0]}, {"B": 1.0}), "distances are of sites"),
        (({"A": [1.0], "B": [1.0, 2.0]}, {"A": 1.0, "B": 1.0}), "site 'B' has 2 distances"),
        (({"A": [math.nan]}, {"A": 1.0}), "squared distances of site 'A' must be finite"),
        (({"A": [1.0]}, {"A": -1.0}), "similarity of site 'A'"),
    ]:
        with pytest.raises(ValueError, match=message):
            som_weights(*arguments)
    with pytest.raises(ValueError, match="sigma_w must be finite and > 0, got 0"):
        som_weights({"A": [1.0]}, {"A": 1.0}, sigma_w=0)
    assert som_weights({"A": [0.0], "B": [0.0]}, {"A": 3.0, "B": 1.0}) == {"A": 0.75, "B": 0.25}
    assert som_weights({"A": [1.0], "B": [1.0]}, {"A": 0.0, "B": 0.0}) == {"A": 0.5, "B": 0.5}
    assert model_similarity(0.0, 0.0, 1.0) == 0.5
    assert model_similarity(-2.0, 1.0, 4.0) == 0.0
