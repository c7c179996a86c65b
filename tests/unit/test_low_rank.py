"""Test averages of low-rank adapters against NumPy, in float64, with dense products."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from fairflare.core.aggregation.low_rank import ROW, Products, average_products, pairs_of
from fairflare.core.features.layers import layers_of
from fairflare.core.states import Movement, layerwise_average, weighted_average

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
WEIGHTS = {"a": 0.2, "b": 0.5, "c": 0.3}
RANKS = {"a": 2, "b": 4, "c": 3}


def made(out: int, inputs: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Factors:
    rng = np.random.default_rng(seed)
    return {
        site: (
            torch.tensor(rng.normal(size=(rank, inputs)), dtype=dtype),
            torch.tensor(rng.normal(size=(out, rank)), dtype=dtype),
        )
        for site, rank in RANKS.items()
    }


def dense(factors: Factors, weights: dict[str, float]) -> Any:
    """Compute the mean product, one number at a time."""
    first_a, first_b = next(iter(factors.values()))
    total = np.zeros((len(first_b), first_a.shape[1]))
    for site, (a, b) in factors.items():
        for row, column in itertools.product(range(len(b)), range(a.shape[1])):
            total[row, column] += weights[site] * float(sum(x * y for x, y in zip(b[row], a[:, column], strict=True)))
    return total


@pytest.mark.parametrize("shape", [(20, 15), (5, 40), (40, 5), (3, 3)])
def test_at_full_rank_it_is_the_mean_of_the_dense_products(shape: tuple[int, int]) -> None:
    factors = made(*shape)
    found = average_products(factors, WEIGHTS, 9)
    np.testing.assert_allclose((found.b @ found.a).numpy(), dense(factors, WEIGHTS), atol=1e-12)
    assert found.lost < 1e-12 * found.whole
    assert found.a.shape == (9, shape[1])
    assert found.b.shape == (shape[0], 9)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_truncation_and_its_error_are_those_of_numpys_svd(rank: int) -> None:
    factors = made(20, 15)
    found = average_products(factors, WEIGHTS, rank)
    u, values, v = np.linalg.svd(dense(factors, WEIGHTS))
    best = (u[:, :rank] * values[:rank]) @ v[:rank]
    np.testing.assert_allclose((found.b @ found.a).numpy(), best, atol=1e-12)
    assert found.lost / found.whole == pytest.approx(np.sqrt((values[rank:] ** 2).sum() / (values**2).sum()), rel=1e-10)
    np.testing.assert_allclose(found.a.norm(dim=1).numpy(), ROW, rtol=1e-12)  # as at LoRA's start


def test_a_site_that_learned_nothing_leaves_directions_that_can_be_learned() -> None:
    a, b = made(20, 15)["b"]
    found = average_products({"a": (a, torch.zeros_like(b)), "b": (a, torch.zeros_like(b))}, {"a": 0.4, "b": 0.6}, 4)
    assert not found.b.any()
    assert (found.lost, found.whole) == (0.0, 0.0)
    np.testing.assert_allclose(found.a.norm(dim=1).numpy(), ROW, rtol=1e-12)


def test_the_dense_matrix_is_never_made() -> None:
    size = 40_000  # of float64 numbers it would take 12.8 GB
    factors = made(size, size)
    found = average_products(factors, WEIGHTS, 9)
    rows, columns = [0, 7, size - 1], [3, size - 2]
    wanted = sum(WEIGHTS[s] * b[rows].numpy() @ a[:, columns].numpy() for s, (a, b) in factors.items())
    np.testing.assert_allclose((found.b[rows] @ found.a[:, columns]).numpy(), wanted, atol=1e-9)


def test_the_order_of_sites_does_not_matter_and_inputs_stay() -> None:
    factors = made(20, 15)
    before = {site: (a.clone(), b.clone()) for site, (a, b) in factors.items()}
    one = average_products(factors, WEIGHTS, 3)
    other = average_products({s: factors[s] for s in "cab"}, {s: WEIGHTS[s] for s in "bca"}, 3)
    assert torch.equal(one.a, other.a)
    assert torch.equal(one.b, other.b)
    for site, pair in factors.items():
        assert all(torch.equal(x, y) for x, y in zip(pair, before[site], strict=True))


def test_what_cannot_be_averaged_is_refused() -> None:
    factors = made(20, 15)
    a, b = factors["a"]
    with pytest.raises(ValueError, match=r"'c': factors A \(2, 14\) .*'a' \(2, 15\)"):
        average_products({**factors, "c": (a[:, :14], b)}, WEIGHTS, 2)
    with pytest.raises(ValueError, match="site 'b': a factor is not finite"):
        average_products({**factors, "b": (a * torch.nan, b)}, WEIGHTS, 2)
    with pytest.raises(ValueError, match="weights"):
        average_products(factors, {"a": 1.0}, 2)
    with pytest.raises(ValueError, match="rank"):
        average_products(factors, WEIGHTS, 0)


def test_an_error_of_a_product_of_zeros_is_0() -> None:
    assert Products({"fc": (0.0, 0.0)}).errors() == {"fc": 0.0}
    assert Products({"fc": (0.0, 0.0)}).error == Products().error == 0.0


# ------------------------------------------------------------------------------------------------ within the one sum


def states(dtype: torch.dtype = torch.float32) -> dict[str, dict[str, torch.Tensor]]:
    """Return models with a plain tensor, an adapted linear layer, and an adapted convolution of 3x3."""
    rng = np.random.default_rng(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.normal(size=shape), dtype=dtype)

    return {
        site: {
            "head.weight": drawn(2, 3),
            "fc.lora_A.default.weight": drawn(2, 8),
            "fc.lora_B.default.weight": drawn(6, 2),
            "conv.lora_A.default.weight": drawn(3, 4, 3, 3),
            "conv.lora_B.default.weight": drawn(5, 3, 1, 1),
            "conv.count": torch.tensor(len(site)),
        }
        for site in WEIGHTS
    }


def best(found: dict[str, dict[str, torch.Tensor]], layer: str, weights: dict[str, float], rank: int) -> Any:
    pairs = {
        site: (state[f"{layer}.lora_A.default.weight"].flatten(1), state[f"{layer}.lora_B.default.weight"].flatten(1))
        for site, state in found.items()
    }
    u, values, v = np.linalg.svd(dense(pairs, weights))
    left = np.sqrt((values[rank:] ** 2).sum())
    return (u[:, :rank] * values[:rank]) @ v[:rank], left, np.sqrt((values**2).sum())


def moving(products: Products, names: Any) -> Movement:
    types = {name: torch.float32 for name in names if "count" not in name}
    return Movement(lambda change: change, types, lambda: None, products=products)


def test_the_sum_by_sites_averages_products_and_all_else_as_ever() -> None:
    given, products = states(), Products()
    found = weighted_average(given, WEIGHTS, movement=moving(products, given["a"]))
    plain = weighted_average(given, WEIGHTS)
    assert list(found) == list(plain)
    assert torch.equal(found["head.weight"], plain["head.weight"])
    assert found["conv.count"] == 1
    lost = whole = 0.0
    for layer, rank in (("fc", 2), ("conv", 3)):
        a, b = (found[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
        assert a.dtype == torch.float32
        assert a.shape == given["a"][f"{layer}.lora_A.default.weight"].shape
        wanted, left, norm = best(given, layer, WEIGHTS, rank)
        np.testing.assert_allclose((b.flatten(1) @ a.flatten(1)).numpy(), wanted, atol=1e-5)
        assert products.errors()[layer] == pytest.approx(left / norm, rel=1e-5)
        lost, whole = lost + left**2, whole + norm**2
    assert products.error == pytest.approx(np.sqrt(lost / whole), rel=1e-5)


def test_the_sum_by_layers_takes_the_weights_of_the_adapted_layer() -> None:
    given, products = states(), Products()
    by_layer = {"head": WEIGHTS, "fc": {"a": 0.7, "b": 0.1, "c": 0.2}, "conv": {"a": 0.0, "b": 0.5, "c": 0.5}}
    owner = layers_of(given["a"])
    assert set(owner.values()) == set(by_layer)
    found = layerwise_average(given, by_layer, owner, movement=moving(products, owner))
    for layer, rank in (("fc", 2), ("conv", 3)):
        a, b = (found[f"{layer}.lora_{factor}.default.weight"].flatten(1) for factor in "AB")
        np.testing.assert_allclose((b @ a).numpy(), best(given, layer, by_layer[layer], rank)[0], atol=1e-5)


def test_an_error_names_the_layer() -> None:
    given = states()
    given["b"]["conv.lora_A.default.weight"][0] = torch.inf
    with pytest.raises(ValueError, match="layer 'conv': site 'b': a factor is not"):
        weighted_average(given, WEIGHTS, movement=moving(Products(), given["a"]))


def test_pairs_are_told_by_their_names() -> None:
    names = ["x.lora_A.default.weight", "lora_A.weight", "y.lora_B.default.weight", "x.lora_B.default.weight"]
    assert pairs_of(names) == {"x": (names[0], names[3])}
