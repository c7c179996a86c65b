"""Test averages and updates of model states against plain loops, and every refusal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fairflare.core import states as states_module
from fairflare.core.aggregation import tensor_mean
from fairflare.core.states import (
    Aggregate,
    add_update,
    check_state,
    difference,
    layerwise_average,
    sq_norm,
    weighted_average,
)

State = dict[str, torch.Tensor]
SHAPES = {"conv.weight": (3, 2, 2), "conv.bias": (3,), "bn.running_mean": (3,), "scale": (), "empty": (0, 2)}


def make_state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    state["bn.running_var"] = torch.rand(3, generator=generator).to(dtype)
    state["bn.num_batches_tracked"] = torch.tensor(7 * seed % 5)
    state["mask"] = torch.tensor([seed % 2 == 0, False])
    return state


def make_states(count: int, dtype: torch.dtype = torch.float32) -> dict[str, State]:
    return {f"site-{index}": make_state(index, dtype) for index in range(count)}


def random_weights(sites: Mapping[str, object], seed: int = 0) -> dict[str, float]:
    share = np.random.default_rng(seed).dirichlet([1.0] * len(sites))
    return dict(zip(sites, share.tolist(), strict=True))


def copies(states: Mapping[str, State]) -> dict[str, State]:
    return {site: {name: t.clone() for name, t in state.items()} for site, state in states.items()}


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(bits(a[k]), bits(b[k])) for k in a
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return bytes, in which -0 is not 0."""
    return tensor.reshape(-1).view(torch.uint8)


def naive_average(states: Mapping[str, State], weights: Mapping[str, float]) -> State:
    """Average one number after the other, in float64."""
    result = {}
    for name, like in next(iter(states.values())).items():
        out = torch.empty(like.numel(), dtype=torch.float64)
        for index in range(like.numel()):
            numbers = {site: float(state[name].reshape(-1)[index]) for site, state in sorted(states.items())}
            if like.is_floating_point():
                out[index] = sum(weights[site] * number for site, number in numbers.items())
            else:
                out[index] = max(numbers.values())
        result[name] = out.to(like.dtype).reshape(like.shape)
    return result


class Lazy(Mapping[str, torch.Tensor]):
    """Make a new tensor at every access and count them, like a state on disk."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.reads = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads += 1
        return self.state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)

    def __contains__(self, name: object) -> bool:
        return name in self.state


# weighted_average


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equals_a_naive_loop(count):
    states = make_states(count)
    weights = random_weights(states)
    assert same_bits(weighted_average(states, weights), naive_average(states, weights))


@pytest.mark.parametrize("held", [0, 40, 100, 2**20])
def test_how_many_sites_are_added_at_once_changes_no_bit(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that no more is held from one site to the next than stated."""
    states, most = make_states(7, torch.float64), 0
    weights = random_weights(states)
    names = list(states["site-0"])
    expected = naive_average(states, weights)
    monkeypatch.setattr(tensor_mean, "_BLOCK", 5)
    monkeypatch.setattr(states_module, "HELD", held)
    add = states_module.WeightedMean.add

    def watched(mean: Any, tensor: torch.Tensor, weight: float) -> None:
        nonlocal most
        add(mean, tensor, weight)
        most = max(most, sum(flat.nbytes for flat, _ in mean._waiting))

    monkeypatch.setattr(states_module.WeightedMean, "add", watched)
    assert same_bits(weighted_average(states, weights), expected)
    assert most <= held
    assert (held == 0) == (most == 0)
    by_layer = layerwise_average(states, dict.fromkeys(names, weights), {name: name for name in names})
    assert same_bits(by_layer, expected)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(5)), st.integers(0, 99))
def test_any_order_of_the_sites_gives_equal_bits(order, seed):
    states = make_states(5, torch.float64)  # the cast to float32 would hide the order of the sum
    before = copies(states)
    weights = random_weights(states, seed)
    shuffled = {f"site-{index}": states[f"site-{index}"] for index in order}
    expected = weighted_average(states, weights)
    assert same_bits(weighted_average(shuffled, weights), expected)
    assert all(same_bits(states[site], before[site]) for site in states)


def test_tensors_of_many_blocks():
    """Check blocks with an odd rest, and other strides: equal to NumPy for any number of threads."""
    generator = torch.Generator().manual_seed(0)
    wide = {f"s{k}": torch.randn(257, 401, generator=generator) for k in range(3)}
    states = {site: {"w": t.t(), "v": t[::2]} for site, t in wide.items()}
    weights = {"s0": 0.1, "s1": 0.3, "s2": 0.6}
    average = weighted_average(states, weights)
    for name in ("w", "v"):
        expected = sum(weights[s] * states[s][name].double().numpy() for s in sorted(states))
        np.testing.assert_array_equal(average[name].numpy(), np.asarray(expected).astype(np.float32))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert same_bits(weighted_average(states, weights), average)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_kept(dtype):
    states = {f"s{k}": make_state(k, dtype) for k in range(3)}
    average = weighted_average(states, random_weights(states))
    assert {name: t.dtype for name, t in average.items()} == {name: t.dtype for name, t in states["s0"].items()}
    assert same_bits(average, naive_average(states, random_weights(states)))


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_mixed_precision_is_promoted_whatever_the_order(order):
    half, single = torch.tensor([1.0]).half(), torch.tensor([1.0 + 2**-20])
    states = {order[0]: {"w": half}, order[1]: {"w": single}}
    average = weighted_average(states, {"A": 0.5, "B": 0.5})
    assert average["w"].dtype == torch.float32
    assert average["w"].item() == 1.0 + 2**-21


def test_running_var_is_floored_unless_it_is_an_update():
    states = {s: {"bn.running_var": torch.tensor([-0.5, 1.0]), "w": torch.tensor([-0.5])} for s in "AB"}
    weights = {"A": 0.5, "B": 0.5}
    average = weighted_average(states, weights)
    assert average["bn.running_var"].tolist() == [0.0, 1.0]
    assert average["w"].tolist() == [-0.5]
    assert weighted_average(states, weights, updates=True)["bn.running_var"].tolist() == [-0.5, 1.0]


def test_one_site_is_copied():
    state = make_state(1)
    average = weighted_average({"A": state}, {"A": 1.0})
    assert same_bits(average, state)
    for tensor in average.values():
        tensor.fill_(1)
    assert same_bits(state, make_state(1))


def test_parameters_need_no_detaching():
    module = torch.nn.Linear(2, 1)
    average = weighted_average({"A": dict(module.named_parameters())}, {"A": 1.0})
    assert not average["weight"].requires_grad


def test_every_tensor_is_read_once():
    states = {site: Lazy(state) for site, state in make_states(3).items()}
    weighted_average(states, random_weights(states))
    assert [state.reads for state in states.values()] == [len(make_state(0))] * 3


# layerwise_average


def test_layerwise_takes_every_tensor_from_the_average_of_its_layer():
    states = make_states(4)
    owner = {name: name.split(".")[0] for name in states["site-0"] if name != "mask"}  # integers need no owner
    rho = {layer: random_weights(states, seed) for seed, layer in enumerate(set(owner.values()) | {"not a layer"})}
    average = layerwise_average(states, rho, owner)
    assert list(average) == list(states["site-0"])
    for name, layer in owner.items():
        assert torch.equal(average[name], weighted_average(states, rho[layer])[name])


def test_layerwise_errors():
    states = {"A": {"w": torch.ones(1)}, "B": {"w": torch.ones(1)}}
    half = {"A": 0.5, "B": 0.5}
    with pytest.raises(ValueError, match="no layer in layer_weights"):
        layerwise_average(states, {}, {"w": "x"})
    with pytest.raises(ValueError, match="tensor 'w' has no owner layer"):
        layerwise_average(states, {"x": half}, {"v": "x"})
    with pytest.raises(ValueError, match="tensor 'w' belongs to layer 'y'"):
        layerwise_average(states, {"x": half}, {"w": "y"})
    with pytest.raises(ValueError, match="weights of layer 'x' must sum to 1"):
        layerwise_average(states, {"x": {"A": 0.5, "B": 0.4}}, {"w": "x"})
    with pytest.raises(ValueError, match=r"of layer 'x' of site 'B' must .*got nan"):
        layerwise_average(states, {"x": {"A": 0.5, "B": math.nan}}, {"w": "x"})
    with pytest.raises(ValueError, match=r"layer 'y' and .* layer 'x' must.*: 'B'"):
        layerwise_average(states, {"x": half, "y": {"A": 1.0}}, {"w": "x"})


# refusals of both averages

BASE = {"w": torch.ones(2), "n": torch.tensor(1)}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"w": torch.ones(2)}, "'B': tensor 'n' is missing, site 'A' has"),
        (BASE | {"x": torch.ones(1)}, "'B': tensor 'x' is unexpected"),
        (BASE | {"w": torch.ones(2, 1)}, r"'B': .*'w' .*\(2, 1\), site 'A' has \(2,\)"),
        (BASE | {"w": torch.ones(2).int()}, "'B': tensor 'w' is torch.int32, .*float32"),
        (BASE | {"n": torch.tensor(1.0)}, "'B': tensor 'n' is torch.float32, .*int64"),
        (BASE | {"w": torch.ones(2) + 0j}, "site 'B': tensor 'w' is torch.complex64"),
        (BASE | {"w": torch.tensor([1.0, math.nan])}, "site 'B': tensor 'w' is not finite"),
        (BASE | {"w": torch.tensor([1.0, -math.inf])}, "site 'B': tensor 'w' is not finite"),
    ],
)
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_bad_state_is_refused_by_site_and_tensor(bad, message, weight):
    states = {"A": BASE, "B": bad, "C": BASE}
    with pytest.raises(ValueError, match=message):
        weighted_average(states, {"A": 0.5, "B": weight, "C": 0.5 - weight})


def test_a_bad_first_site_is_the_one_that_is_named():
    states = {"A": {"w": torch.tensor([math.nan])}, "B": {"w": torch.ones(1)}}
    with pytest.raises(ValueError, match="site 'A': tensor 'w' is not finite"):
        weighted_average(states, {"A": 0.5, "B": 0.5})
    with pytest.raises(ValueError, match=r"'A': tensor 'w' is .*complex64"):
        weighted_average({"A": {"w": torch.ones(1) + 0j}}, {"A": 1.0})


def test_large_finite_values_are_accepted():
    """Check a sum that overflows although no value is infinite."""
    big = torch.full((4,), 3e38)
    assert torch.equal(weighted_average({"A": {"w": big}}, {"A": 1.0})["w"], big)
    check_state({"w": big}, {"w": big}, "A")
    with pytest.raises(ValueError, match=r"average of tensor 'w' .* torch.float32"):
        weighted_average({"A": {"w": torch.tensor([3.4028234e38])}}, {"A": 1 + 9e-7})


def test_weights_and_states_must_be_of_the_same_sites():
    def average(sites: str, weights: Mapping[str, float]) -> None:
        weighted_average(dict.fromkeys(sites, BASE), weights)

    with pytest.raises(ValueError, match="same sites; only in the weights: 'B'"):
        average("A", {"A": 0.5, "B": 0.5})
    with pytest.raises(ValueError, match="same sites; only in the states: 'B'"):
        average("AB", {"A": 1.0})
    with pytest.raises(ValueError, match="no site in the states to average"):
        average("", {"A": 1.0})
    with pytest.raises(ValueError, match="no site in weights"):
        average("A", {})
    with pytest.raises(ValueError, match=r"weights must sum to 1, got 1.1"):
        average("AB", {"A": 0.5, "B": 0.6})
    with pytest.raises(ValueError, match=r"^weight of site 'B'.* got -0.5$"):
        average("AB", {"A": 1.5, "B": -0.5})


# updates


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_difference_and_add_update_are_inverse(dtype):
    received, local = make_state(1, dtype), make_state(2, dtype)
    local["bn.num_batches_tracked"] = received["bn.num_batches_tracked"] - 3
    update = difference(local, received, "A")
    back = add_update(received, update, "A")
    for name, tensor in local.items():
        assert back[name].dtype == tensor.dtype
        if tensor.is_floating_point():
            slack = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(back[name], tensor, rtol=slack, atol=slack)
        else:
            assert torch.equal(back[name], tensor)
    assert same_bits(received, make_state(1, dtype))


def test_difference_worked_by_hand():
    local = {"w": torch.tensor([3.0]), "n": torch.tensor([2], dtype=torch.uint8), "m": torch.tensor([False, True])}
    received = {"w": torch.tensor([1.0]), "n": torch.tensor([5], dtype=torch.uint8), "m": torch.tensor([True, True])}
    update = difference(local, received)
    assert {name: t.tolist() for name, t in update.items()} == {"w": [2.0], "n": [-3], "m": [-1, 0]}
    assert same_bits(add_update(received, update), local)


def test_add_update_rounds_integers_that_a_filter_made_floats():
    state = {"n": torch.tensor(10), "w": torch.tensor([1.0], dtype=torch.float16)}
    update = {"n": torch.tensor(3.7), "w": torch.tensor([0.5], dtype=torch.float64)}
    local = add_update(state, update)
    assert local["n"].item() == 14
    assert local["n"].dtype == torch.int64
    assert local["w"].dtype == torch.float16
    assert local["w"].item() == 1.5


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"w": torch.ones(2)}, "'A': tensor 'n' is missing, the global"),
        (BASE | {"x": torch.ones(1)}, "site 'A': tensor 'x' is unexpected"),
        (BASE | {"w": torch.ones(1)}, r"'A': tensor 'w' .*\(1,\), .* has \(2,\)"),
        (BASE | {"w": torch.ones(2).long()}, "'A': tensor 'w' is torch.int64, .*float32"),
        (BASE | {"w": torch.tensor([math.inf, 0])}, "'w' is not finite after adding"),
        (BASE | {"n": torch.tensor(math.nan)}, "site 'A': tensor 'n' is not finite"),
    ],
)
def test_add_update_errors(update, message):
    with pytest.raises(ValueError, match=message):
        add_update(BASE, update, "A")


def test_check_state():
    check_state(make_state(1), make_state(2), "A")
    with pytest.raises(ValueError, match="'A': tensor 'n' is missing, the global"):
        check_state({"w": torch.ones(2)}, BASE, "A")
    with pytest.raises(ValueError, match=r"'A': tensor 'w' .*\(3,\), .* has \(2,\)"):
        check_state(BASE | {"w": torch.ones(3)}, BASE, "A")
    with pytest.raises(ValueError, match=r"'A': tensor 'n' is torch.float32, .*int64"):
        check_state(BASE | {"n": torch.tensor(1.0)}, BASE, "A")
    with pytest.raises(ValueError, match="site 'A': tensor 'w' is not finite"):
        check_state(BASE | {"w": torch.tensor([math.nan, 1])}, BASE, "A")
    with pytest.raises(ValueError, match="site 'A': tensor 'w' is not finite"):
        difference(BASE | {"w": torch.tensor([math.nan, 1])}, BASE, "A")


def test_a_late_value_in_a_large_tensor_is_seen():
    large = torch.zeros(100_001)
    large[-1] = math.nan
    with pytest.raises(ValueError, match="site 'A': tensor 'w' is not finite"):
        check_state({"w": large}, {"w": torch.zeros(100_001)}, "A")


# sq_norm


def test_sq_norm_worked_by_hand():
    update = {"w": torch.tensor([[3.0, 4.0]]), "v": torch.tensor(2.0).half(), "n": torch.tensor(100)}
    assert sq_norm(update) == 29.0
    assert sq_norm({}) == 0.0
    assert sq_norm({"e": torch.empty(0)}) == 0.0


@pytest.mark.long
def test_sq_norm_is_accurate():
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) + 100
    expected = math.fsum(float(v) ** 2 for v in x)
    assert sq_norm({"w": x}) == pytest.approx(expected, rel=1e-13)
    assert sq_norm({"h": torch.full((4,), 6e4).half()}) == pytest.approx(4 * 6e4**2, rel=1e-3)  # beyond float16


def test_sq_norm_errors():
    with pytest.raises(ValueError, match="squared norm of tensor 'w' is not finite"):
        sq_norm({"w": torch.tensor([math.nan])})


# ------------------------------------------------------------------------------------------------ median, trimmed mean


def _sites(count: int, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return {
        f"s{k}": {
            "w": torch.randn(3, 50, generator=g),
            "half": torch.randn(40, generator=g).half(),
            "bn.running_var": torch.rand(5, generator=g),
            "bn.num_batches_tracked": torch.tensor(10 + k),
            "flag": torch.tensor([k % 2 == 0, True, False]),
        }
        for k in range(count)
    }


def _column(states: dict[str, dict[str, torch.Tensor]], name: str) -> np.ndarray:
    return np.stack([state[name].double().numpy() for state in states.values()])


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_median_of_equal_weights_is_numpys(count: int) -> None:
    states = _sites(count)
    found = weighted_average(states, dict.fromkeys(states, 1 / count), how=Aggregate("median"))
    for name in ("w", "half", "bn.running_var"):
        assert found[name].dtype == states["s0"][name].dtype
        expected = torch.from_numpy(np.median(_column(states, name), axis=0)).to(found[name].dtype)
        assert torch.equal(found[name], expected)
    assert int(found["bn.num_batches_tracked"]) == 10 + (count - 1) // 2  # the lower one of two
    assert found["flag"].tolist() == [count in (1, 5), True, False]


@pytest.mark.parametrize("cut", [1, 2])
def test_the_trimmed_mean_of_equal_weights_is_scipys(cut: int) -> None:
    states = _sites(6)
    how = Aggregate("trimmed_mean", cut / 6)
    found = weighted_average(states, dict.fromkeys(states, 1 / 6), how=how)
    np.testing.assert_allclose(found["w"].numpy(), trim_mean(_column(states, "w"), cut / 6 + 1e-9), atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_weights_count_like_copies(seed: int) -> None:
    """Check weights 3/10, 1/10 ... as the plain median and trimmed mean of three copies, one ..."""
    states, copies = _sites(4, seed), dict(zip(("s0", "s1", "s2", "s3"), (3, 1, 4, 2), strict=True))
    weights = {site: count / 10 for site, count in copies.items()}
    column = np.repeat(_column(states, "w"), list(copies.values()), axis=0)
    for how, expected in (
        (Aggregate("median"), np.median(column, axis=0)),
        (Aggregate("trimmed_mean", 0.2), trim_mean(column, 0.2 + 1e-9)),
    ):
        found = weighted_average(states, weights, how=how)["w"]
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
        owner = {"w": "one", "half": "one", "bn.running_var": "one"}
        assert torch.equal(layerwise_average(states, {"one": weights}, owner, how=how)["w"], found)


def test_one_site_cannot_move_a_median_far() -> None:
    states = _sites(5)
    honest = np.stack([states[f"s{k}"]["w"].numpy() for k in range(4)])
    states["s4"] = {**states["s4"], "w": torch.full((3, 50), 1e30), "bn.num_batches_tracked": torch.tensor(2**60)}
    states["s4"]["bn.running_var"] = torch.full((5,), -1e6)
    for how in (Aggregate("median"), Aggregate("trimmed_mean", 0.25)):
        found = weighted_average(states, dict.fromkeys(states, 0.2), how=how)
        assert (found["w"].numpy() <= honest.max(0)).all()
        assert (found["w"].numpy() >= honest.min(0)).all()
        assert int(found["bn.num_batches_tracked"]) == 12
        assert (found["bn.running_var"] >= 0).all()
    updates = weighted_average(states, dict.fromkeys(states, 0.2), how=Aggregate("median"), updates=True)
    lowest = {site: {**state, "bn.running_var": torch.full((5,), -1.0)} for site, state in states.items()}
    assert (weighted_average(lowest, dict.fromkeys(states, 0.2), how=Aggregate("median"))["bn.running_var"] == 0).all()
    found = weighted_average(lowest, dict.fromkeys(states, 0.2), how=Aggregate("median"), updates=True)
    assert (found["bn.running_var"] == -1).all()  # an update may be negative
    assert updates.keys() == states["s0"].keys()


def test_a_median_of_something_else_is_refused() -> None:
    states = _sites(3)
    weights = dict.fromkeys(states, 1 / 3)
    states["s1"]["w"] = torch.full((3, 50), float("nan"))
    with pytest.raises(ValueError, match="site 's1': tensor 'w' is not finite"):
        weighted_average(states, weights, how=Aggregate("median"))
    states["s1"]["w"] = torch.zeros(2, 50)
    with pytest.raises(ValueError, match="site 's1': tensor 'w'"):
        weighted_average(states, weights, how=Aggregate("median"))


def test_the_median_holds_one_tensor_of_all_sites() -> None:
    read: list[str] = []

    class Lazy(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    states = {site: Lazy(state) for site, state in _sites(4).items()}
    weighted_average(states, dict.fromkeys(states, 0.25), how=Aggregate("median"))
    assert read == [name for name in states["s0"] for _ in states]
