"""Test the inner products of sites' changes, and the shortest weighted mean that is found from them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fairflare.core.aggregation import updates
from fairflare.core.aggregation.min_norm import min_norm

pytestmark = pytest.mark.usefixtures("one_thread")
OWNER = {"a.weight": "a", "a.bias": "a", "b.weight": "b", "c.running_var": "c"}


def test_gram_against_plain_vectors_in_groups_of_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check five sites, all at once and two at a time: by layer, of the trained tensors alone, in float64."""
    g = torch.Generator().manual_seed(1)
    received = {
        "a.weight": torch.randn(200, 300, generator=g), "n": torch.tensor(3), "a.bias": torch.randn(5, generator=g),
        "b.weight": torch.randn((), generator=g), "c.running_var": torch.ones(4),
    }  # fmt: skip
    states = {
        site: {
            k: t + torch.randn(t.shape, generator=g) if t.is_floating_point() else t + 1 for k, t in received.items()
        }
        for site in "EDCBA"
    }

    def flat(names: list[str]) -> np.ndarray:
        moved = [[(states[s][n].double() - received[n].double()).reshape(-1) for n in names] for s in sorted(states)]
        return np.stack([torch.cat(parts).numpy() for parts in moved])

    for held in (updates.HELD, 4 * 4 * 60_000):
        monkeypatch.setattr(updates, "HELD", held)
        found = updates.gram(states, received, {"a.weight", "a.bias", "b.weight", "n"}, OWNER)
        for layer, names in (("a", ["a.weight", "a.bias"]), ("b", ["b.weight"])):
            assert torch.equal(found[layer], found[layer].T)
            np.testing.assert_allclose(found[layer].numpy(), flat(names) @ flat(names).T, rtol=1e-13, atol=1e-9)
        assert not found["c"].any()
    zero = {site: dict(received) for site in "AB"} | {"C": states["C"]}
    alone = updates.gram(zero, received, {"a.bias"}, OWNER)["a"]
    assert int((alone != 0).sum()) == 1


def test_changes_that_cancel_have_no_direction() -> None:
    """Check changes whose sum is of rounding, several times, and two whose sum is a thousandth of them."""
    weights = {"a": 0.3, "b": 0.7, "c": 0.9}
    for seed in range(6):
        a, b = torch.randn(2, 1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        states = {"a": {"w": a}, "b": {"w": b}, "c": {"w": -(0.3 * a + 0.7 * b) / 0.9}}
        (products,) = updates.gram(states, None, {"w"}, {"w": ""}).values()
        assert set(updates.cosines(products, weights, leave_out=False).values()) == {0.0}
    change = torch.randn(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for factor, none in ((-1 / 3, True), (-0.333, False)):
        (products,) = updates.gram({"a": {"w": change}, "b": {"w": factor * change}}, None, {"w"}, {"w": ""}).values()
        found = updates.cosines(products, {"a": 1.0, "b": 3.0}, leave_out=False)
        assert found == pytest.approx({"a": 0.0, "b": 0.0} if none else {"a": 1.0, "b": -1.0}, abs=1e-9)


def faces(products: np.ndarray) -> float:
    """Return the least squared length over the simplex by solving every face of it."""
    best, n = np.inf, len(products)
    for count in range(1, n + 1):
        for chosen in itertools.combinations(range(n), count):
            part = products[np.ix_(chosen, chosen)]
            system = np.block([[part, np.ones((count, 1))], [np.ones((1, count)), np.zeros((1, 1))]])
            weights = np.linalg.lstsq(system, np.r_[np.zeros(count), 1.0], rcond=None)[0][:count]
            if weights.min() >= -1e-9:
                best = min(best, float(weights @ part @ weights))
    return best


def test_min_norm_against_all_faces() -> None:
    rng = np.random.default_rng(3)
    for case in range(60):
        n = int(rng.integers(2, 6))
        vectors = rng.normal(size=(n, int(rng.integers(1, 7)))) + rng.choice([0.0, 1.0])
        products = torch.from_numpy(vectors @ vectors.T)
        found = min_norm(products, torch.full((n,), 1 / n, dtype=torch.float64)).numpy()
        assert found.min() >= 0, case
        assert found.sum() == pytest.approx(1, abs=1e-12)
        assert found @ products.numpy() @ found == pytest.approx(faces(products.numpy()), abs=1e-7)


@pytest.mark.parametrize("reach", [0.005, 0.05, 1.0])
def test_min_norm_of_a_hundred_against_scipy(reach: float) -> None:
    rng = np.random.default_rng(4)
    vectors = rng.normal(size=(100, 400)) * rng.uniform(0.2, 3, (100, 1)) + 0.2
    products, start = vectors @ vectors.T, np.full(100, 0.01)
    found = min_norm(torch.from_numpy(products), torch.from_numpy(start), reach).numpy()
    assert found.min() >= max(0.01 - reach, 0) - 1e-15
    assert found.max() <= 0.01 + reach + 1e-15
    limits = [(max(0.01 - reach, 0.0), min(0.01 + reach, 1.0))] * 100
    sums = {"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(100)}
    best = minimize(
        lambda x: x @ products @ x, start, jac=lambda x: 2 * products @ x, bounds=limits, constraints=[sums],
        method="SLSQP", options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert found @ products @ found == pytest.approx(best.fun, rel=1e-6)


def test_min_norm_where_little_can_be_done() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert min_norm(one.reshape(1, 1) * 4, one).tolist() == [1.0]
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert torch.equal(min_norm(torch.ones(3, 3, dtype=torch.float64), even), even)  # equal vectors
    assert torch.equal(min_norm(torch.full((3, 3), torch.inf, dtype=torch.float64), even), even)
    opposite = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert min_norm(opposite, torch.tensor([0.9, 0.1], dtype=torch.float64)).tolist() == pytest.approx([0.5, 0.5])
    products = torch.tensor([[1, 0.8, -0.6], [0.8, 1, 0], [-0.6, 0, 1]], dtype=torch.float64)
    for reach, expected in ((0.0, (1 / 3,) * 3), (0.1, (0.333333, 0.233333, 0.433333)), (1.0, (0.5, 0.0, 0.5))):
        assert min_norm(products, even, reach).tolist() == pytest.approx(expected, abs=1e-6)
