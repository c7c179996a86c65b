"""Test output rows that are averaged over the sites that annotate them, against a slow loop."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from fairflare.core.aggregation.output_rows import OutputRows
from fairflare.core.aggregation.tensor_mean import MEAN, Aggregate
from fairflare.core.features.layers import output_tensors
from fairflare.core.states import State, weighted_average
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.plan.bounds import Bounds

RECEIVED = {"head.weight": torch.tensor([[0.0, 0.0], [0.0, 0.0]]), "head.bias": torch.tensor([5.0, 6.0])}


def averaged(
    rows: OutputRows, states: Mapping[str, State], weights: dict[str, float], how: Aggregate = MEAN, **more: Any
) -> State:
    even = rows.of_annotators(states, lambda name: weights, RECEIVED, how, **more)
    return weighted_average(even, weights, how=how)


def test_the_worked_number() -> None:
    """Expect 2 for the row that its one annotator (weight .25) trained to 2; averaged over all it is 1.25."""
    like = {"head.weight": torch.ones(2, 1), "head.bias": torch.ones(2)}
    states = {"a": {name: tensor.clone() for name, tensor in like.items()}, "b": like}
    states["a"]["head.weight"][1], states["a"]["head.bias"][1] = 2.0, 2.0
    weights = {"a": 0.25, "b": 0.75}
    found = OutputRows(tuple(like), (frozenset(), frozenset("b"))).of_annotators(states, lambda name: weights, like)
    assert weighted_average(found, weights)["head.weight"].tolist() == [[1.0], [2.0]]
    assert weighted_average(found, weights)["head.bias"].tolist() == [1.0, 2.0]
    assert weighted_average(states, weights)["head.weight"].tolist() == [[1.0], [1.25]]
    assert states["b"]["head.weight"].tolist() == [[1.0], [1.0]]  # what the sites sent is not changed


def slow(
    states: Mapping[str, State], weights: dict[str, float], silent: tuple[frozenset[str], ...], received: State
) -> dict[str, list[float]]:
    """Average number by number, with Python's sums."""
    found = {}
    for name, tensor in received.items():
        flat, width = [], tensor[0].numel()
        for place in range(tensor.numel()):
            row = place // width
            among = [k for k in states if name == "body" or k not in silent[row]]
            total = sum(weights[k] for k in among)
            old = tensor.reshape(-1)[place].item()
            values = [weights[k] * states[k][name].reshape(-1)[place].item() for k in among]
            flat.append(sum(values) / total if total else old)
        found[name] = flat
    return found


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_a_slow_loop(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sites, count = "abcd"[: draw.randint(1, 4)], draw.randint(1, 4)
    received = {"body": torch.randn(3), "w": torch.randn(count, 2, 3), "b": torch.randn(count)}
    states = {k: {name: torch.randn_like(t) for name, t in received.items()} for k in sites}
    raw = {k: draw.choice([0.0, 1.0, 2.0]) for k in sites}
    raw["a"] = 0.5
    weights = {k: v / sum(raw.values()) for k, v in raw.items()}
    silent = tuple(frozenset(k for k in sites if draw.random() < 0.5) for _ in range(count))
    even = OutputRows(("w", "b"), silent).of_annotators(states, lambda name: weights, received)
    found, wanted = weighted_average(even, weights), slow(states, weights, silent, received)
    assert [*found] == [*received]
    for name in received:
        assert found[name].reshape(-1).tolist() == pytest.approx(wanted[name], abs=1e-6)


def test_a_row_that_nobody_annotates_is_kept_to_the_bit() -> None:
    states = {k: {name: torch.rand_like(t) for name, t in RECEIVED.items()} for k in "abc"}
    weights = {"a": 0.1, "b": 0.2, "c": 0.7}
    found = averaged(OutputRows(tuple(RECEIVED), (frozenset("abc"), frozenset())), states, weights)
    for name, tensor in RECEIVED.items():
        assert torch.equal(found[name][0], tensor[0])
        assert torch.equal(found[name][1], weighted_average(states, weights)[name][1])
    of_no_weight = averaged(
        OutputRows(("head.bias",), (frozenset("ab"), frozenset())), states, {**weights, "c": 0.0, "a": 0.8}
    )
    assert of_no_weight["head.bias"][0] == RECEIVED["head.bias"][0]


def test_nothing_is_done_where_all_annotate_all_or_the_layer_is_unknown() -> None:
    states = {k: {name: torch.rand_like(t) for name, t in RECEIVED.items()} for k in "ab"}
    for rows in (OutputRows(tuple(RECEIVED), (frozenset(), frozenset("z"))), OutputRows((), (frozenset("a"),))):
        found = rows.of_annotators(states, lambda name: {}, RECEIVED)
        assert all(found[site] is states[site] for site in states)


@pytest.mark.parametrize("how", [Aggregate("median"), Aggregate("trimmed_mean", 0.34)])
def test_one_wrong_annotator_of_three_does_not_decide_a_row(how: Aggregate) -> None:
    """Combine the annotators as the run combines sites: filling in their mean would hide two honest ones."""
    states = {
        k: {"head.bias": torch.tensor([value, 0.0])}
        for k, value in zip("abcde", (1.0, 1.2, 1e9, 0.0, 0.0), strict=True)
    }
    rows = OutputRows(("head.bias",), (frozenset("de"), frozenset()))
    found = averaged(rows, states, dict.fromkeys("abcde", 0.2), how)["head.bias"]
    assert 1.0 <= found[0] <= 1.2 + 1e-6


def test_renormalised_weights_keep_their_bound() -> None:
    states = {k: {"head.bias": torch.tensor([value, 0.0])} for k, value in zip("abc", (0.0, 1.0, 7.0), strict=True)}
    rows = OutputRows(("head.bias",), (frozenset("c"), frozenset()))
    weights = {"a": 0.1, "b": 0.3, "c": 0.6}
    assert averaged(rows, states, weights)["head.bias"][0] == pytest.approx(0.75)
    limit = Influence(Bounds(max_weight=0.6), 3).of_made
    assert averaged(rows, states, weights, bounded=limit)["head.bias"][0] == pytest.approx(0.6)


class Net(nn.Module):
    """Have a layer called like a head that is none, and an output layer that is not the last one registered."""

    def __init__(self, after: nn.Module | None = None, twice: bool = False) -> None:
        super().__init__()
        self.out, self.head = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
        self.body, self.after, self.twice = nn.Conv2d(1, 3, 1), after, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(x)
        aside = self.head(found) if not self.twice else self.out(found)
        made = self.out(found + 0 * aside.mean())
        return made if self.after is None else self.after(made)  # type: ignore[no-any-return]


def test_the_output_layer_is_the_one_whose_output_is_the_networks() -> None:
    inputs = torch.zeros(1, 1, 4, 4)
    assert output_tensors(Net(), inputs, 2) == ["out.weight", "out.bias"]
    assert output_tensors(Net(nn.Identity()), inputs, 2) == ["out.weight", "out.bias"]
    assert output_tensors(nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)), inputs, 3) == ["1.weight"]
    for model, rows in ((Net(nn.Softmax(1)), 2), (Net(nn.Conv2d(2, 3, 1)), 2), (Net(twice=True), 2), (Net(), 3)):
        assert output_tensors(model, inputs, rows) == []
    parametrized = Net()
    nn.utils.parametrizations.weight_norm(parametrized.out)
    assert output_tensors(parametrized, inputs, 2) == []
