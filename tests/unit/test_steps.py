"""Test the steps of methods from the trained tensors' mean change (``Movement``), against plain loops."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from fairflare.core.states import Aggregate, Made, Movement, difference, layerwise_average, weighted_average

from .test_states import make_state, make_states, random_weights

TRAINED = {"conv.weight", "conv.bias", "scale", "empty"}
State = Mapping[str, torch.Tensor]


def scaled(change: State, by: float) -> State:
    return Made(change, lambda name: change[name] * by)


def movement(move: Any, like: State, received: State | None, buffers: Any = None) -> Movement:
    types = {name: tensor.dtype for name, tensor in like.items() if name in TRAINED or name == "w"}
    return Movement(move, types, lambda: received, buffers)


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("length", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("kind", ["mean", "median"])
def test_a_step_against_plain_loops(length: float, updates: bool, kind: Any) -> None:
    received, states = make_state(99), make_states(3)
    if updates:
        states = {site: difference(state, received) for site, state in states.items()}
    weights, buffers = random_weights(states), random_weights(states, 1)
    moved = movement(partial(scaled, by=length), states[min(states)], None if updates else received, buffers)
    average = partial(weighted_average, states, updates=updates, how=Aggregate(kind))
    found = average(weights, movement=moved)
    plain = {name: average(w) for name, w in (("t", weights), ("b", buffers))}
    for name, tensor in found.items():
        if name not in TRAINED:
            assert torch.equal(tensor, plain["b"][name]), name
            continue
        total = plain["t"][name].double()
        if kind == "mean":
            total = sum(weights[site] * states[site][name].double() for site in states)
        start = 0.0 if updates else received[name].double()
        torch.testing.assert_close(tensor.double(), start + length * (total - start), rtol=0, atol=1e-6)
        assert tensor.dtype == plain["t"][name].dtype
    if length == 0 and not updates:
        assert all(torch.equal(found[name], received[name]) for name in TRAINED)
    assert moved.length == pytest.approx(length)


def test_a_change_that_is_given_back_is_the_plain_average_to_the_bit() -> None:
    received, states = make_state(99), make_states(3)
    weights = random_weights(states)
    moved = movement(lambda change: change, received, received)
    plain = weighted_average(states, weights)
    for name, tensor in weighted_average(states, weights, movement=moved).items():
        assert torch.equal(tensor, plain[name])
    assert moved.length == 1.0


def test_weights_by_layer_move_too() -> None:
    received, states = make_state(99), make_states(3)
    owner = {name: name.rpartition(".")[0] for name in received}
    layers = {layer: random_weights(states, seed) for seed, layer in enumerate(dict.fromkeys(owner.values()))}
    found = layerwise_average(states, layers, owner, movement=movement(partial(scaled, by=0.5), received, received))
    for name, whole in layerwise_average(states, layers, owner).items():
        expected = (received[name] + whole) / 2 if name in TRAINED else whole
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def test_each_mean_is_made_once_and_one_tensor_after_the_other() -> None:
    reads: list[str] = []

    class Counted(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            reads.append(name)
            return super().__getitem__(name)

    states = {site: Counted(w=torch.ones(3), b=torch.ones(2)) for site in "ab"}
    half = Movement(partial(scaled, by=0.5), dict.fromkeys("wb", torch.float32), lambda: None)
    found = weighted_average(states, {"a": 0.5, "b": 0.5}, updates=True, movement=half)
    assert found["w"].tolist() == [0.5] * 3
    assert reads == ["w", "w", "b", "b"]


def test_a_step_beyond_the_type_is_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    states = {site: {"w": torch.tensor([v, 1.0])} for site, v in (("a", 3e38), ("b", -3e38))}
    moved = movement(partial(scaled, by=100.0), states["a"], {"w": torch.zeros(2)})
    found = weighted_average(states, {"a": 0.9, "b": 0.1}, movement=moved)
    assert found["w"].tolist() == [torch.finfo(torch.float32).max, 100.0]
    assert "the change takes tensor 'w' beyond torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("move", "buffers", "message"),
    [
        (lambda change: {}, None, r"what move\(\) gives .* 'w'"),
        (lambda change: {"w": torch.ones(1)}, None, r"move\(\) gives .*'w' has shape \(1,\)"),
        (lambda change: {"w": change["w"] / 0}, None, r"move\(\) gives .*'w' is not finite"),
        (lambda change: change, {"a": 0.5}, "weights must sum to 1"),
        (lambda change: change, {"b": 1.0}, "'b'"),
    ],
)
def test_what_no_change_can_be(move: Any, buffers: Any, message: str) -> None:
    states = {"a": {"w": torch.ones(2)}}
    with pytest.raises(ValueError, match=message):
        weighted_average(states, {"a": 1.0}, movement=movement(move, states["a"], {"w": torch.zeros(2)}, buffers))


def test_variances_of_updates_may_fall() -> None:
    """Check that a change of a running variance has no floor, as behind FLARE's FedAvg, while a model's has 0."""
    states = {"a": {"w": torch.ones(2), "bn.running_var": torch.tensor([-0.4, 0.2])},
              "b": {"w": torch.ones(2), "bn.running_var": torch.tensor([-0.2, 0.4])}}  # fmt: skip
    weights, half = {"a": 0.5, "b": 0.5}, partial(scaled, by=0.5)
    found = weighted_average(states, weights, updates=True, movement=movement(half, states["a"], None))
    torch.testing.assert_close(found["bn.running_var"], torch.tensor([-0.3, 0.3]))
    received = {name: torch.zeros_like(tensor) for name, tensor in states["a"].items()}
    models = weighted_average(states, weights, movement=movement(half, states["a"], received))
    assert models["bn.running_var"][0] >= 0
