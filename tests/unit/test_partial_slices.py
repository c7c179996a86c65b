"""Test slices (output rows, input columns) that are averaged over the sites that own them, against a slow loop."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairflare.core.aggregation.partial_slices import PartialSlices
from fairflare.core.aggregation.tensor_mean import MEAN, Aggregate
from fairflare.core.features.layers import input_tensors, output_tensors
from fairflare.core.states import State, weighted_average
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.plan.bounds import Bounds

RECEIVED = {"head.weight": torch.tensor([[0.0, 0.0], [0.0, 0.0]]), "head.bias": torch.tensor([5.0, 6.0])}


def averaged(
    rows: PartialSlices, states: Mapping[str, State], weights: dict[str, float], how: Aggregate = MEAN, **more: Any
) -> State:
    even = rows.average_slices(states, lambda name: weights, RECEIVED, how, **more)
    return weighted_average(even, weights, how=how)


def test_the_worked_number() -> None:
    """Expect 2 for the row that its one annotator (weight .25) trained to 2; averaged over all it is 1.25."""
    like = {"head.weight": torch.ones(2, 1), "head.bias": torch.ones(2)}
    states = {"a": {name: tensor.clone() for name, tensor in like.items()}, "b": like}
    states["a"]["head.weight"][1], states["a"]["head.bias"][1] = 2.0, 2.0
    weights = {"a": 0.25, "b": 0.75}
    found = PartialSlices(tuple(like), (frozenset(), frozenset("b"))).average_slices(states, lambda name: weights, like)
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
    even = PartialSlices(("w", "b"), silent).average_slices(states, lambda name: weights, received)
    found, wanted = weighted_average(even, weights), slow(states, weights, silent, received)
    assert [*found] == [*received]
    for name in received:
        assert found[name].reshape(-1).tolist() == pytest.approx(wanted[name], abs=1e-6)


def test_a_row_that_nobody_annotates_is_kept_to_the_bit() -> None:
    states = {k: {name: torch.rand_like(t) for name, t in RECEIVED.items()} for k in "abc"}
    weights = {"a": 0.1, "b": 0.2, "c": 0.7}
    found = averaged(PartialSlices(tuple(RECEIVED), (frozenset("abc"), frozenset())), states, weights)
    for name, tensor in RECEIVED.items():
        assert torch.equal(found[name][0], tensor[0])
        assert torch.equal(found[name][1], weighted_average(states, weights)[name][1])
    of_no_weight = averaged(
        PartialSlices(("head.bias",), (frozenset("ab"), frozenset())), states, {**weights, "c": 0.0, "a": 0.8}
    )
    assert of_no_weight["head.bias"][0] == RECEIVED["head.bias"][0]


def test_nothing_is_done_where_all_annotate_all_or_the_layer_is_unknown() -> None:
    states = {k: {name: torch.rand_like(t) for name, t in RECEIVED.items()} for k in "ab"}
    for rows in (PartialSlices(tuple(RECEIVED), (frozenset(), frozenset("z"))), PartialSlices((), (frozenset("a"),))):
        found = rows.average_slices(states, lambda name: {}, RECEIVED)
        assert all(found[site] is states[site] for site in states)


@pytest.mark.parametrize("how", [Aggregate("median"), Aggregate("trimmed_mean", 0.34)])
def test_one_wrong_annotator_of_three_does_not_decide_a_row(how: Aggregate) -> None:
    """Combine the annotators as the run combines sites: filling in their mean would hide two honest ones."""
    states = {
        k: {"head.bias": torch.tensor([value, 0.0])}
        for k, value in zip("abcde", (1.0, 1.2, 1e9, 0.0, 0.0), strict=True)
    }
    rows = PartialSlices(("head.bias",), (frozenset("de"), frozenset()))
    found = averaged(rows, states, dict.fromkeys("abcde", 0.2), how)["head.bias"]
    assert 1.0 <= found[0] <= 1.2 + 1e-6


def test_renormalised_weights_keep_their_bound() -> None:
    states = {k: {"head.bias": torch.tensor([value, 0.0])} for k, value in zip("abc", (0.0, 1.0, 7.0), strict=True)}
    rows = PartialSlices(("head.bias",), (frozenset("c"), frozenset()))
    weights = {"a": 0.1, "b": 0.3, "c": 0.6}
    assert averaged(rows, states, weights)["head.bias"][0] == pytest.approx(0.75)
    limit = Influence(Bounds(max_weight=0.6), 3).bound_made
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


def columns_of(values: dict[str, list[float]]) -> dict[str, State]:
    """Return states with a weight of one output, whose columns have these values."""
    return {
        site: {"in.weight": torch.tensor(row, dtype=torch.float32).reshape(1, -1, 1, 1, 1)}
        for site, row in values.items()
    }


@pytest.mark.parametrize(
    ("how", "weights", "wanted"),
    [
        (MEAN, (0.5, 0.3, 0.2), 1.375),  # (.5 * 1 + .3 * 2) / .8; over all sites it would be 2.9
        (Aggregate("median"), (0.5, 0.3, 0.2), 1.0),  # .625 of the weight lies at 1
        (Aggregate("median"), (0.4, 0.4, 0.2), 1.5),  # half lies at 1, half at 2
        (Aggregate("trimmed_mean", 0.25), (0.5, 0.3, 0.2), 1.25),  # .375 of 1 and .125 of 2 lie between the quarters
    ],
)
def test_the_worked_column(how: Aggregate, weights: tuple[float, ...], wanted: float) -> None:
    """Expect the third site, which has no second channel, to have no part in its column."""
    states, of = columns_of({"a": [4, 1], "b": [4, 2], "c": [4, 9]}), dict(zip("abc", weights, strict=True))
    columns = PartialSlices(("in.weight",), (frozenset(), frozenset("c")), axis=1)
    even = columns.average_slices(states, lambda name: of, columns_of({"r": [0, 7]})["r"], how)
    assert weighted_average(even, of, how=how)["in.weight"].flatten().tolist() == pytest.approx([4, wanted])
    assert states["c"]["in.weight"].flatten().tolist() == [4, 9]


def test_a_column_that_nobody_has_in_a_round_stays() -> None:
    states, received = columns_of({"a": [1, 1], "b": [3, 1]}), columns_of({"r": [0, 7]})["r"]
    columns = PartialSlices(("in.weight",), (frozenset(), frozenset("ab")), axis=1)
    even = columns.average_slices(states, lambda name: {"a": 0.5, "b": 0.5}, received)
    assert weighted_average(even, {"a": 0.5, "b": 0.5})["in.weight"].flatten().tolist() == [2, 7]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("how", [MEAN, Aggregate("median"), Aggregate("trimmed_mean", 0.2)])
def test_columns_are_those_of_plain_arrays(seed: int, how: Aggregate) -> None:
    """Compare with NumPy, column by column, where only the owners' arrays are looked at."""
    rng = np.random.default_rng(seed)
    sites, shape = "abcdef"[: rng.integers(2, 7)], (3, int(rng.integers(1, 5)), 2)
    arrays, old = {site: rng.normal(size=shape) for site in sites}, rng.normal(size=shape)
    weights = dict(zip(sites, rng.dirichlet(np.ones(len(sites))).tolist(), strict=True))
    lacking = tuple(frozenset(site for site in sites if rng.random() < 0.4) for _ in range(shape[1]))
    found = weighted_average(
        PartialSlices(("w",), lacking, axis=1).average_slices(
            {site: {"w": torch.from_numpy(array)} for site, array in arrays.items()},
            lambda name: weights, {"w": torch.from_numpy(old)}, how,
        ), weights, how=how,
    )["w"].numpy()  # fmt: skip
    for number, without in enumerate(lacking):
        owners = [site for site in sites if site not in without]
        column = old[:, number]
        if owners:
            own = np.array([arrays[site][:, number].ravel() for site in owners])
            shares = np.array([weights[site] for site in owners])
            column = np.reshape([middle(values, shares / shares.sum(), how) for values in own.T], column.shape)
        np.testing.assert_allclose(found[:, number], column, atol=1e-12)


def middle(values: np.ndarray, shares: np.ndarray, how: Aggregate) -> float:
    """Combine one number of each site by loops: cut the weight from both ends, and average what is left."""
    order = np.argsort(values)
    trim = {"mean": 0.0, "median": 0.5, "trimmed_mean": how.trim}[how.kind]
    left, parts = 0.0, []
    for value, share in zip(values[order], shares[order], strict=True):
        parts.append((value, max(0.0, min(left + share, 1 - trim) - max(left, trim)), left, left + share))
        left += share
    if how.kind == "median":
        inside = [value for value, _, low, high in parts if low < 0.5 < high]
        return inside[0] if inside else sum(v for v, _, low, high in parts if 0.5 in (low, high)) / 2
    return sum(value * share for value, share, *_ in parts) / sum(share for _, share, *_ in parts)


class Given(nn.Module):
    """Give its input to a convolution, and to another operation."""

    def __init__(self, also: Any) -> None:
        super().__init__()
        self.first, self.also = nn.Conv2d(3, 3, 1), also

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.also(self.first, x)  # type: ignore[no-any-return]


def test_input_columns_are_those_of_all_convolutions_of_the_input() -> None:
    inputs = torch.zeros(1, 3, 4, 4)
    assert input_tensors(nn.Sequential(nn.Identity(), nn.Conv2d(3, 2, 1), nn.Conv2d(2, 3, 1)), inputs) == ["1.weight"]
    twice = nn.ModuleDict({"late": nn.Conv2d(2, 3, 1), "early": nn.Conv2d(3, 2, 3), "skip": nn.Conv2d(3, 3, 1)})
    twice.forward = lambda x: twice["late"](twice["early"](x)).sum() + twice["skip"](x.float().contiguous()).sum()  # type: ignore[assignment]
    assert input_tensors(twice, inputs) == ["early.weight", "skip.weight"]
    tied = nn.ModuleDict({"one": nn.Conv2d(3, 2, 1)})
    tied["other"] = tied["one"]
    tied.forward = lambda x: tied["one"](x)  # type: ignore[assignment]
    assert input_tensors(tied, inputs) == ["one.weight", "other.weight"]


@pytest.mark.parametrize(
    ("also", "named"),
    [
        (lambda first, x: first(x - 0.5), "sub"),
        (lambda first, x: first(x.sub_(0.5)), "sub_"),
        (lambda first, x: torch.cat([first(x), x]), "cat"),
        (lambda first, x: first(x) + x[:, :1], "__getitem__"),
        (lambda first, x: nn.functional.conv2d(x, torch.ones(3, 1, 1, 1), groups=3), "conv2d"),
        (lambda first, x: first(x) + nn.functional.avg_pool2d(input=x, kernel_size=1), "avg_pool2d"),
    ],
)
def test_a_network_whose_input_goes_elsewhere_too_is_refused(also: Any, named: str) -> None:
    with pytest.raises(ValueError, match=rf"given to torch\S*\.{named}, not to conv"):
        input_tensors(Given(also), torch.zeros(1, 3, 4, 4))
