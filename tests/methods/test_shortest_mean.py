"""Test FedMGDA+ and FedLF: worked numbers, changes of 0, opposite changes, equal losses, bounds, buffers, one site."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fairflare.core.aggregation.min_norm import evening, fair_factors
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.plan.bounds import Bounds
from fairflare.methods.base.rule import RoundInputs, Rule
from fairflare.methods.fed_lf import FedLF
from fairflare.methods.fed_mgda import FedMGDA

OWNER = {"one": "1", "two": "2", "mean": "1"}
Changes = dict[str, dict[str, Any]]


def given(changes: Changes, losses: Any = (), **bounds: Any) -> RoundInputs:
    states = {s: {n: torch.tensor(v, dtype=torch.float64) for n, v in of.items()} for s, of in changes.items()}
    told = {s: {"probe_loss": loss} for s, loss in zip(sorted(changes), losses or [1.0] * len(changes), strict=True)}
    influence = Influence(Bounds(**bounds), len(changes))
    return RoundInputs(
        0, 3, sorted(changes), dict.fromkeys(changes, 5), told, {}, states, OWNER, updates=True,
        parameters={"one", "two"}, moderated=influence.moderated, bounded=influence.bound_made,
    )  # fmt: skip


def step(rule: Rule, inputs: RoundInputs) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the change that a rule makes of the sites' changes, and its weighing."""
    weighing = rule.weigh(inputs)
    assert weighing.sites is not None
    mean = {
        n: sum(w * inputs.states[s][n] for s, w in weighing.sites.items())
        for n in ("one", "two")
        if n in inputs.states[inputs.sites[0]]
    }
    moved = rule.move(mean)  # type: ignore[arg-type]
    return {name: moved[name] for name in moved}, weighing


THREE: Changes = {"a": {"one": (3.0, 0.0)}, "b": {"one": (1.6, 1.2)}, "c": {"one": (-3.0, 4.0)}}


@pytest.mark.parametrize(
    ("reach", "shares", "expected"),
    [
        (0.0, (1 / 3, 1 / 3, 1 / 3), (0.4, 0.466667)),
        (0.1, (0.333333, 0.233333, 0.433333), (0.26, 0.486667)),
        (1.0, (0.5, 0.0, 0.5), (0.2, 0.4)),
    ],
)
def test_fed_mgda_of_the_spec(reach: float, shares: Any, expected: Any) -> None:
    found, weighing = step(FedMGDA(reach=reach, server_rate=1.0), given(THREE))
    assert found["one"].tolist() == pytest.approx(expected, abs=1e-6)
    assert list(weighing.buffers.values()) == pytest.approx(shares, abs=1e-6)
    own = step(FedMGDA(reach=reach), given(THREE))[0]["one"]
    assert own.tolist() == pytest.approx([x * (3 + 2 + 5) / 3 for x in expected], abs=1e-5)  # their mean length


def test_fed_mgda_without_a_direction() -> None:
    """Check a change of 0, which is left out; two that are opposite; none at all; and one site, which is FedAvg."""
    found, weighing = step(FedMGDA(server_rate=1.0, reach=1.0), given({**THREE, "d": {"one": (0.0, 0.0)}}))
    assert found["one"].tolist() == pytest.approx((0.2, 0.4), abs=1e-6)
    assert weighing.buffers["d"] == weighing.sites["d"] == 0
    found, _ = step(FedMGDA(reach=1.0), given({"a": {"one": (1.0, 2.0)}, "b": {"one": (-3.0, -6.0)}}))
    assert found["one"].abs().max() < 1e-12
    found, weighing = step(FedMGDA(), given({"a": {"one": (0.0, 0.0)}, "b": {"one": (0.0, 0.0)}}))
    assert (found["one"].tolist(), weighing.sites) == ([0.0, 0.0], {"a": 0.5, "b": 0.5})
    found, weighing = step(FedMGDA(), given({"a": {"one": (1.0, 2.0)}}))
    assert (found["one"].tolist(), weighing.values) == ([1.0, 2.0], {"step": 1.0})


TWO: Changes = {"a": {"one": (3.0, 4.0), "two": (1.0, 0.0)}, "b": {"one": (5.0, 0.0), "two": (-1.0, 2.0)}}


def test_fed_lf_of_the_spec() -> None:
    assert evening(torch.tensor([1.0, 3.0], dtype=torch.float64)).tolist() == pytest.approx(
        (-0.134164, 0.044721), abs=1e-6
    )
    found, weighing = step(FedLF(), given(TWO, (1.0, 3.0)))
    step_of = torch.cat([found["one"], found["two"]])
    assert step_of.tolist() == pytest.approx((3.932579, -2.060487, 0.143737, 1.126301), abs=2e-6)
    along = [float(torch.cat([torch.tensor(v) for v in of.values()]).double() @ step_of) for of in TWO.values()]
    assert along == pytest.approx((3.699529, 21.771761), abs=1e-5)
    assert min(weighing.details["factors"]["1"].values()) < 0  # the site with the smaller loss
    assert weighing.sites == {"a": 0.5, "b": 0.5}  # of the buffers


@pytest.mark.parametrize("losses", [(2.0, 2.0), (0.1 + 0.2, 0.3), (0.0, 0.0)])
def test_fed_lf_of_equal_losses_has_no_evening_direction(losses: Any) -> None:
    """Check that equal losses, up to the last digit, give the shortest mean of the changes alone."""
    found, _ = step(FedLF(), given(TWO, losses))
    assert found["one"][0] / found["one"][1] == pytest.approx(2.0)  # half of each, as both are of length 5


def test_fed_lf_leaves_out_what_does_not_move() -> None:
    """Check a layer that no site trains, a site that trains one layer alone, one site, and changes that cancel."""
    frozen = {s: {"one": of["one"], "two": (0.0, 0.0)} for s, of in TWO.items()}
    found, _ = step(FedLF(), given(frozen, (1.0, 3.0)))
    assert found["two"].tolist() == [0.0, 0.0]
    assert found["one"].norm() == pytest.approx(torch.tensor([4.0, 2.0]).norm())
    part = {**TWO, "b": {"one": (5.0, 0.0), "two": (0.0, 0.0)}}
    assert bool(torch.isfinite(step(FedLF(), given(part, (1.0, 3.0)))[0]["two"]).all())
    assert step(FedLF(), given({"a": TWO["a"]}, (1.0,)))[0]["one"].tolist() == pytest.approx([3.0, 4.0])
    opposite = {"a": TWO["a"], "b": {name: tuple(-x for x in value) for name, value in TWO["a"].items()}}
    found, _ = step(FedLF(), given(opposite, (1.0, 1.0)))
    assert found["one"].abs().max() < 1e-9


def test_fed_lf_holds_no_site_above_the_bound() -> None:
    six = {f"s{k}": {"one": (1.0 + k, float(k % 2)), "two": (1.0, float(k - 3))} for k in range(6)}
    losses = (0.1, 0.2, 0.1, 0.2, 0.1, 9.0)

    def largest(**bounds: Any) -> float:
        factors = FedLF().weigh(given(six, losses, **bounds)).details["factors"]
        return max(max(map(abs, of.values())) / sum(map(abs, of.values())) for of in factors.values())

    assert largest() > 0.3
    assert largest(max_weight=0.25) == pytest.approx(0.25)


def test_a_change_that_float64_cannot_square_counts_as_none() -> None:
    changes = {**TWO, "c": {"one": (1e200, 0.0), "two": (0.0, 1.0)}}
    assert bool(torch.isfinite(step(FedLF(), given(changes, (1.0, 3.0, 2.0)))[0]["one"]).all())
    assert step(FedMGDA(), given(changes))[1].sites["c"] >= 0


def test_the_shortest_mean_is_against_no_site() -> None:
    g = torch.Generator().manual_seed(5)
    for _ in range(20):
        vectors = torch.randn(6, 40, generator=g, dtype=torch.float64) * torch.rand(6, 1, generator=g).double()
        products = vectors @ vectors.T
        fair = evening(torch.rand(6, generator=g, dtype=torch.float64))
        factors = fair_factors(products, fair)
        assert float((products @ factors).min()) >= -1e-8 * float(products.diagonal().max())
