"""Test the largest entries of a change, and how they travel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflare.core.aggregation.entries import (
    WHICH,
    add_entries,
    change_between,
    largest,
    largest_overall,
    pack_entries,
    unpack_entries,
)
from fairflare.core.states import sq_norm

numbers = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(numbers, st.integers(0, 50))
def test_exactly_so_many_and_none_left_out_is_larger(values: list[float], count: int) -> None:
    tensor = torch.tensor(values)
    mask = largest(tensor, count)
    assert int(mask.sum()) == min(count, len(values))
    if mask.any() and not mask.all():
        assert tensor.abs()[~mask].max() <= tensor.abs()[mask].min()
    least = tensor.abs()[mask].min() if mask.any() else None
    ties = [i for i, v in enumerate(values) if abs(v) == least]
    kept = [i for i in ties if mask[i]]
    assert kept == ties[: len(kept)]  # the first of equal ones


@settings(max_examples=30, deadline=None)
@given(numbers, st.integers(0, 50))
def test_packed_and_unpacked(values: list[float], count: int) -> None:
    tensor, like = torch.tensor(values), {"w": torch.zeros(len(values))}
    mask = largest(tensor, count)
    download = pack_entries("w", tensor, mask)
    if not download:
        assert not mask.any()
        return
    assert (WHICH in "".join(download)) == (not mask.all())
    ((name, found, numbers_),) = unpack_entries(download, like)
    assert name == "w"
    assert torch.equal(found, mask)
    assert torch.equal(numbers_, tensor[mask])


def test_over_all_tensors() -> None:
    state = {"a": torch.tensor([[1.0, -9.0]]), "b": torch.tensor([3.0, 2.0, -4.0])}
    masks = largest_overall(state, 3)
    assert {name: mask.tolist() for name, mask in masks.items()} == {"a": [False, True], "b": [True, False, True]}
    assert largest_overall({}, 3) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_added_where_they_came_less_the_own_part(dtype: torch.dtype) -> None:
    own = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype), "still": torch.ones(1)}
    change = torch.tensor([[0.5, -2.0], [0.25, 1.0]], dtype=dtype)
    download = pack_entries("w", change, largest(change, 2))
    mine = {"w": torch.full((2, 2), 4.0, dtype=dtype)}
    found = add_entries(own, download, mine, 0.25)
    assert found["w"].tolist() == [[1.0, -1.0], [3.0, 4.0]]
    assert found["w"].dtype == dtype
    assert found["still"] is own["still"]
    assert own["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert add_entries(own, {}) == own


def test_what_does_not_fit_is_refused() -> None:
    like = {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match="'x' came, which the model does not have"):
        add_entries(like, {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="'w': 2 numbers came for 3 places"):
        add_entries(like, {"w": torch.zeros(2)})


def test_the_change_between_two_models_leaves_out_integers_and_what_is_not_named() -> None:
    now = {"w": torch.tensor([1.5]), "n": torch.tensor(7), "mean": torch.tensor([1.0])}
    before = {"w": torch.tensor([1.0]), "n": torch.tensor(3), "mean": torch.tensor([0.0])}
    steps = change_between(now, before, {"w", "n"})
    assert {name: tensor.tolist() for name, tensor in steps.items()} == {"w": [0.5]}


def test_a_squared_norm_changes_nothing() -> None:
    state = {"w": torch.tensor([3.0, -4.0], dtype=torch.float64)}
    assert sq_norm(state) == 25
    assert state["w"].tolist() == [3.0, -4.0]
