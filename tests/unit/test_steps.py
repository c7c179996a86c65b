"""A step along the average change, of some length, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from fairflare.core.states import Step, difference, stepped_average, weighted_average

from .test_states import make_state, make_states, random_weights

TRAINED = {"conv.weight", "conv.bias", "scale", "empty"}


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("length", [0.0, 0.3, 1.0, 2.5])
def test_a_step_against_plain_loops(length: float, updates: bool) -> None:
    received, states = make_state(99), make_states(3)
    if updates:
        states = {site: difference(state, received) for site, state in states.items()}
    weights, buffers = random_weights(states), random_weights(states, 1)
    step = Step(length, TRAINED, None if updates else received, buffers)
    found = stepped_average(states, weights, step)
    plain = {name: weighted_average(states, w, updates=updates) for name, w in (("t", weights), ("b", buffers))}
    for name, tensor in found.items():
        if name not in TRAINED:
            assert torch.equal(tensor, plain["b"][name]), name
            continue
        total = sum(weights[site] * states[site][name].double() for site in states)
        start = 0.0 if updates else received[name].double()
        torch.testing.assert_close(tensor.double(), start + length * (total - start), rtol=0, atol=1e-6)
    if length == 0 and not updates:
        assert all(torch.equal(found[name], received[name]) for name in TRAINED)


def test_a_whole_step_is_the_average() -> None:
    received, states = make_state(99), make_states(3)
    weights = random_weights(states)
    found = stepped_average(states, weights, Step(1.0, TRAINED, received, weights))
    for name, tensor in weighted_average(states, weights).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_step_beyond_the_type_is_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    states = {site: {"w": torch.tensor([v, 1.0])} for site, v in (("a", 3e38), ("b", -3e38))}
    step = Step(100.0, {"w"}, {"w": torch.zeros(2)}, {"a": 0.9, "b": 0.1})
    found = stepped_average(states, {"a": 0.9, "b": 0.1}, step)
    assert found["w"].tolist() == [torch.finfo(torch.float32).max, 100.0]
    assert "a step of 100 takes tensor 'w' beyond torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(math.nan, {"w"}, None, {"a": 1.0}), "step must be finite and >= 0, got nan"),
        (Step(-1.0, {"w"}, None, {"a": 1.0}), "step must be finite and >= 0, got -1"),
        (Step(2.0, {"w"}, None, {"a": 0.5}), "weights must sum to 1"),
        (Step(2.0, {"w"}, None, {"b": 1.0}), "'b'"),
    ],
)
def test_a_step_that_is_none(step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stepped_average({"a": {"w": torch.ones(1)}}, {"a": 1.0}, step)


def test_variances_of_updates_may_fall() -> None:
    """A running variance has no floor where it is a change, as behind FLARE's FedAvg; a model's is never below 0."""
    states = {"a": {"w": torch.ones(2), "bn.running_var": torch.tensor([-0.4, 0.2])},
              "b": {"w": torch.ones(2), "bn.running_var": torch.tensor([-0.2, 0.4])}}  # fmt: skip
    weights = {"a": 0.5, "b": 0.5}
    found = stepped_average(states, weights, Step(0.5, frozenset({"w"}), None, weights))
    torch.testing.assert_close(found["bn.running_var"], torch.tensor([-0.3, 0.3]))
    received = {name: torch.zeros_like(tensor) for name, tensor in states["a"].items()}
    models = stepped_average(states, weights, Step(0.5, frozenset({"w"}), received, weights))
    assert models["bn.running_var"][0] >= 0
