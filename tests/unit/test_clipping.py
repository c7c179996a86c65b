"""Test updates that are far larger than other updates: their norm, the view that is read, and untouched tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflare.core.aggregation.clipping import COUNTERS, PARAMETERS, STATISTICS, VARIANCES, Clip, limit_changes

RECEIVED = {
    "conv.weight": torch.tensor([[1.0, -2.0], [0.5, 3.0]]),
    "bn.running_mean": torch.tensor([0.0, 1.0]),
    "bn.running_var": torch.tensor([1.0, 2.0]),
    "bn.num_batches_tracked": torch.tensor(10),
    "index": torch.tensor([0, 1, 2]),
}


def moved(by: float, statistics: float = 0.1, steps: int = 5) -> dict[str, torch.Tensor]:
    return {
        "conv.weight": RECEIVED["conv.weight"] + by,
        "bn.running_mean": RECEIVED["bn.running_mean"] + statistics,
        "bn.running_var": RECEIVED["bn.running_var"] + statistics,
        "bn.num_batches_tracked": RECEIVED["bn.num_batches_tracked"] + steps,
        "index": RECEIVED["index"].clone(),
    }


def naive(states: Mapping[str, Any], received: Mapping[str, Any], factor: float) -> dict[str, dict[str, torch.Tensor]]:
    """Clip in float64 with everything in memory, for floating tensors."""
    groups = [[n for n in received if "running" in n], [n for n in received if received[n].is_floating_point()]]
    groups[1] = [n for n in groups[1] if n not in groups[0]]
    result: dict[str, dict[str, torch.Tensor]] = {site: {} for site in states}
    for names in groups:
        changes = {s: {n: states[s][n].double() - received[n].double() for n in names} for s in states}
        norms = {s: math.sqrt(sum(float((c**2).sum()) for c in by.values())) for s, by in changes.items()}
        ordered = sorted(norms.values())
        middle = len(ordered) // 2
        median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        for site, by in changes.items():
            scale = min(1.0, factor * median / norms[site]) if norms[site] else 1.0
            for name, change in by.items():
                result[site][name] = received[name].double() + scale * change
                if name.endswith("running_var"):
                    result[site][name] = result[site][name].clamp(min=0)
    return result


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-10, 10)), min_size=1, max_size=6),
    st.floats(1, 5),
    st.randoms(use_true_random=False),
)
def test_it_is_what_loops_in_float64_give_in_any_order(sizes: Any, factor: float, random: Any) -> None:
    states = {f"s{i}": moved(*size) for i, size in enumerate(sizes)}
    found, clips = limit_changes(states, RECEIVED, factor)
    expected = naive(states, RECEIVED, factor)
    for site, tensors in expected.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[site][name].double(), tensor, atol=1e-4, rtol=1e-5)
    names = list(states)
    random.shuffle(names)
    again, same = limit_changes({name: states[name] for name in names}, RECEIVED, factor)
    assert same == clips
    assert all(torch.equal(again[s][n], found[s][n]) for s in names for n in RECEIVED)


def test_who_does_not_exceed_is_left_alone() -> None:
    states = {"a": moved(0.1), "b": moved(-0.2), "c": moved(0.29)}
    found, clips = limit_changes(states, RECEIVED, 3.0)
    assert clips == []
    assert all(found[site] is states[site] for site in states)


def test_one_liar_of_three_is_scaled_to_the_multiple_of_the_median() -> None:
    states = {"a": moved(0.1), "b": moved(0.2), "c": moved(1e6)}
    found, (clip,) = limit_changes(states, RECEIVED, 3.0)
    assert clip == Clip("c", PARAMETERS, pytest.approx(2e6, rel=1e-6), pytest.approx(1.2, rel=1e-5))
    assert found["a"] is states["a"]
    torch.testing.assert_close(found["c"]["conv.weight"], RECEIVED["conv.weight"] + 0.6)
    assert torch.equal(found["c"]["bn.running_mean"], states["c"]["bn.running_mean"])  # another kind


def test_running_statistics_are_looked_at_apart() -> None:
    """Check that a wild variance is neither hidden in the parameters' norm nor counted as it."""
    states = {"a": moved(0.1), "b": moved(0.1), "c": moved(0.1, statistics=-1e6)}
    found, clips = limit_changes(states, RECEIVED, 3.0)
    assert [(c.site, c.what) for c in clips] == [("c", STATISTICS), ("c", VARIANCES)]
    assert clips[1].value == pytest.approx(-1e6, rel=1e-5)
    assert torch.equal(found["c"]["conv.weight"], states["c"]["conv.weight"])
    torch.testing.assert_close(found["c"]["bn.running_var"], RECEIVED["bn.running_var"] - 0.3)


def test_a_variance_below_zero_counts_as_zero() -> None:
    states = {"a": moved(0.1, statistics=-1.5), "b": moved(0.1, statistics=-1.5)}
    found, clips = limit_changes(states, RECEIVED, 3.0)
    assert [(c.site, c.what, c.value, c.used) for c in clips] == [(s, VARIANCES, -0.5, 0.0) for s in "ab"]
    assert found["a"]["bn.running_var"].tolist() == [0.0, 0.5]
    assert found["a"]["bn.running_mean"].tolist() == [-1.5, -0.5]


@pytest.mark.parametrize("value", [2**62, -(2**62), -(2**63)])
def test_counters_and_constants(value: int) -> None:
    states = {"a": moved(0.1), "b": moved(0.1), "c": moved(0.1)}
    states["c"]["bn.num_batches_tracked"] = torch.tensor(value)
    states["c"]["index"] = torch.tensor([0, 1, 99])
    found, (clip,) = limit_changes(states, RECEIVED, 3.0)
    assert (clip.site, clip.what) == ("c", COUNTERS)
    assert abs(int(found["c"]["bn.num_batches_tracked"]) - 10) == 15
    assert found["c"]["index"].tolist() == [0, 1, 2]  # nobody else changed it
    assert found["c"]["index"].dtype == torch.long


def test_the_limit_of_counters_is_a_whole_number_below() -> None:
    """Check 1.5 times the median 5, which is 7.5: the eighth step is one too many."""
    start = {"bn.num_batches_tracked": torch.tensor(10)}
    states = {s: {"bn.num_batches_tracked": torch.tensor(10 + n)} for s, n in (("a", 5), ("b", 5), ("c", 7), ("d", 8))}
    states["e"] = {"bn.num_batches_tracked": torch.tensor(12)}
    found, clips = limit_changes(states, start, 1.5)
    assert clips == [Clip("d", COUNTERS, 8.0, 7.0)]
    assert int(found["d"]["bn.num_batches_tracked"]) == 17
    assert int(found["c"]["bn.num_batches_tracked"]) == 17


def test_booleans_nobody_else_changed_stay() -> None:
    states = {s: {"mask": torch.tensor([True, False])} for s in "abc"}
    states["c"] = {"mask": torch.tensor([True, True])}
    found, _ = limit_changes(states, {"mask": torch.tensor([True, False])}, 3.0)
    assert found["c"]["mask"].tolist() == [True, False]
    assert found["c"]["mask"].dtype == torch.bool


@pytest.mark.parametrize(
    ("dtype", "huge"),
    [(torch.float16, 6e4), (torch.float32, 3e38), (torch.float64, 1.7e308), (torch.float64, -1.7e308)],
)
def test_what_float64_cannot_square_counts_as_no_change(dtype: torch.dtype, huge: float) -> None:
    received = {"w": torch.tensor([1.0, -huge if dtype == torch.float64 else 1.0], dtype=dtype)}
    states = {s: {"w": received["w"] + torch.tensor([0.01, 0.0], dtype=dtype)} for s in "ab"}
    states["c"] = {"w": torch.full((2,), huge, dtype=dtype)}
    found, _ = limit_changes(states, received, 3.0)
    assert found["c"]["w"].dtype == dtype
    torch.testing.assert_close(found["c"]["w"], received["w"], atol=0.05, rtol=0)


def test_updates_need_no_received_model() -> None:
    states = {s: {k: moved(0.1)[k] - v for k, v in RECEIVED.items()} for s in "ab"}
    states["c"] = {k: -1e6 * v if v.is_floating_point() else v for k, v in states["a"].items()}
    found, clips = limit_changes(states, None, 2.0)
    assert {(c.site, c.what) for c in clips} == {("c", PARAMETERS), ("c", STATISTICS)}
    torch.testing.assert_close(found["c"]["conv.weight"], torch.full((2, 2), -0.2))
    torch.testing.assert_close(found["c"]["bn.running_var"], torch.full((2,), -0.2))  # an update may be negative


def test_two_sites_cannot_say_who_lies() -> None:
    states = {"a": moved(0.1), "b": moved(1e6)}
    found, clips = limit_changes(states, RECEIVED, 2.0)
    assert clips == []
    assert found["b"] is states["b"]


class Counted(dict[str, Any]):
    """Define a state that counts how often each tensor is read."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.reads: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.reads.append(name)
        return super().__getitem__(name)


def test_a_view_reads_a_tensor_when_it_is_asked_for() -> None:
    states = {"a": Counted(moved(0.1)), "b": Counted(moved(0.1)), "c": Counted(moved(1e6))}
    found, _ = limit_changes(states, RECEIVED, 3.0)
    assert states["c"].reads == list(RECEIVED)  # once, to measure
    assert list(found["c"]) == list(RECEIVED)
    assert len(found["c"]) == len(RECEIVED)
    assert "conv.weight" in found["c"]
    assert "x" not in found["c"]
    assert states["c"].reads == list(RECEIVED)
    first, second = found["c"]["conv.weight"], found["c"]["conv.weight"]
    assert torch.equal(first, second)
    assert first is not second
    assert states["c"].reads[len(RECEIVED) :] == ["conv.weight"] * 2


@pytest.mark.parametrize("factor", [0.5, 0, math.nan, math.inf, True])
def test_a_factor_below_one_would_scale_most_sites(factor: Any) -> None:
    with pytest.raises(ValueError, match="factor must be"):
        limit_changes({"a": moved(1)}, RECEIVED, factor)


def test_nobody() -> None:
    assert limit_changes({}, RECEIVED, 2.0) == ({}, [])
