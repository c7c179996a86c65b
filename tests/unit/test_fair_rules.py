"""Test formulas of the weighting baselines: the spec's numbers, limits, and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflare.core.aggregation import updates
from fairflare.core.aggregation.fair_rules import (
    AccumulatedSteps,
    add_newcomers,
    contributions,
    fair_fed_gaps,
    fair_fed_weights,
    finite_or_mean,
    minus_state,
    most_accumulated,
    nova_weights,
    q_step,
    simplex_projection,
    update_share,
)
from fairflare.core.aggregation.updates import squared_norms
from fairflare.core.weighting import power_weights

NAN = math.nan


def named(*values):
    return dict(zip("ABCDEF", values, strict=False))


def close(*values):
    return pytest.approx(named(*values), abs=1e-6)


# ------------------------------------------------------------------------------------------------ FedNova


def accumulated(steps, **how):
    found = AccumulatedSteps()
    for _ in range(steps):
        found.add(**how)
    return found.total


@pytest.mark.parametrize(
    ("steps", "how", "expected"),
    [
        (2, {"momentum": 0.9}, 2.9),
        (5, {"momentum": 0.9}, 13.1441),
        (5, {"pull": 0.01}, 4.900995),
        (7, {}, 7.0),
        (0, {"momentum": 0.9}, 0.0),
        (2, {"momentum": 0.9, "nesterov": True}, 1.9 + 2.71),  # 1 + rho, 1 + rho + rho^2
    ],
)
def test_accumulated_steps_of_the_spec(steps, how, expected):
    assert accumulated(steps, **how) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_accumulated_steps_are_what_the_optimizer_does(momentum, nesterov, mu):
    """Check SGD itself: with independent unknown gradients g_s, the weights of all of them."""
    rate, steps = 0.2, 6
    weights = []
    for s in range(steps):
        w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        sgd = torch.optim.SGD([w], lr=rate, momentum=momentum, nesterov=nesterov and momentum > 0)
        for step in range(steps):
            w.grad = float(step == s) + mu * w.detach()  # the received model is 0
            sgd.step()
        weights.append(-float(w.detach()) / rate)
    found = accumulated(steps, momentum=momentum, nesterov=nesterov and momentum > 0, pull=rate * mu)
    assert found == pytest.approx(sum(weights), rel=1e-12)


def test_nothing_accumulates_more_than_the_most():
    for steps in (1, 2, 9):
        assert accumulated(steps, momentum=1.0, nesterov=True) == pytest.approx(most_accumulated(steps))
        assert accumulated(steps, momentum=0.99, nesterov=True) < most_accumulated(steps)


@pytest.mark.parametrize(
    ("local", "norms", "expected"),
    [((0.8, 0.2), (2.0, 8.0), 0.5), ((0.8, 0.2), (2.0, 2.0), 0.5), ((0.8, 0.8), (2.0, 8.0), 0.6875)],
)
def test_nova_of_the_spec(local, norms, expected):
    weights, step = nova_weights(named(0.5, 0.5), named(*norms))
    assert sum(weights.values()) == pytest.approx(1)
    change = sum(weights[site] * (w - 1.0) for site, w in named(*local).items())
    assert 1.0 + step * change == pytest.approx(expected)


def test_nova_of_equal_norms_is_fed_avg_bit_by_bit():
    shares = named(0.1, 0.2, 0.7)
    assert nova_weights(shares, named(3.7, 3.7, 3.7)) == (shares, 1.0)


def test_nova_refuses_a_norm_of_0():
    with pytest.raises(ValueError, match=r"^norm of site 'B'.* got 0"):
        nova_weights(named(0.5, 0.5), named(1.0, 0.0))


# ------------------------------------------------------------------------------------------------ q-FedAvg


@pytest.mark.parametrize(("q", "expected"), [(0.0, 0.85), (1.0, 0.857143), (2.0, 0.867647)])
def test_q_fed_avg_of_the_spec(q, expected):
    losses, local = named(1.0, 2.0), named(0.9, 0.8)
    step = q_step(losses, {site: (w - 1.0) ** 2 for site, w in local.items()}, q, 10.0)
    change = sum(a * (local[site] - 1.0) for site, a in power_weights(losses, q).items())
    assert 1.0 + step * change == pytest.approx(expected, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-3, 50), st.floats(0, 1e3)), min_size=1, max_size=5),
    st.floats(0.01, 5),
    st.floats(0.1, 1e4),
)
def test_q_step_is_the_ratio_as_printed(sites, q, lipschitz):
    losses = named(*(f for f, _ in sites))
    squares = named(*(s for _, s in sites))
    h = sum(q * f ** (q - 1) * lipschitz**2 * squares[site] + lipschitz * f**q for site, f in losses.items())
    expected = lipschitz * sum(f**q for f in losses.values()) / h
    assert q_step(losses, squares, q, lipschitz) == pytest.approx(expected, rel=1e-9)


# ------------------------------------------------------------------------------------------------ AFL


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.433333333, 0.533333333, 0.733333333), (0.2, 0.3, 0.5)),
        ((1 / 3 + 0.5, 1 / 3 + 1, 1 / 3 + 3), (0.0, 0.0, 1.0)),
        ((0.2, 0.9, 1.4), (0.0, 0.25, 0.75)),
        ((5.0,), (1.0,)),
    ],
)
def test_projection_of_the_spec(values, expected):
    assert simplex_projection(named(*values)) == close(*expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4), st.sampled_from([0.0, 0.3, 1.0]))
def test_projection_is_the_nearest(values, mass):
    """Check random points of the simplex, none of which is nearer."""
    found = np.array(list(simplex_projection(named(*values), mass).values()))
    assert found.sum() == pytest.approx(mass, abs=1e-9)
    assert found.min() >= 0
    others = np.random.default_rng(0).dirichlet([0.5] * len(values), 200) * mass
    distances = ((others - np.array(values)) ** 2).sum(1)
    assert ((found - np.array(values)) ** 2).sum() <= distances.min() + 1e-9


def test_newcomers_get_the_mean():
    assert add_newcomers({}, "BA") == close(0.5, 0.5)
    assert add_newcomers(named(0.2, 0.8), "A") == named(0.2, 0.8)
    # C: 0.5, and 1.5 are projected to 1: each 1/6 less.
    assert add_newcomers(named(0.2, 0.8), "ABC") == close(0.2 - 1 / 6, 0.8 - 1 / 6, 0.5 - 1 / 6)


def test_a_value_that_is_none():
    assert finite_or_mean(named(1.0, NAN, 4.0)) == named(1.0, 2.5, 4.0)
    assert finite_or_mean(named(1.0, NAN, 4.0), named(9.0, 7.0)) == named(1.0, 7.0, 4.0)
    assert finite_or_mean(named(NAN, math.inf)) == named(1.0, 1.0)


def test_who_is_there_shares_what_they_held():
    assert update_share(named(0.2, 0.3, 0.5), named(3.0, 1.0)) == close(0.375, 0.125, 0.5)
    assert update_share(named(0.2, 0.3, 0.5), named(-3.0, 0.0)) == close(0.25, 0.25, 0.5)


# ------------------------------------------------------------------------------------------------ FairFed

SHARES = named(0.1, 0.3, 0.6)
ACCURACIES = named(0.6, 0.8, 0.9)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.1, (0.087333, 0.307333, 0.605333)), (1.0, (0.0, 0.363636, 0.636364)), (0.0, (0.1, 0.3, 0.6))],
)
def test_fair_fed_of_the_spec(beta, expected):
    gaps = fair_fed_gaps(ACCURACIES, SHARES)
    assert gaps == close(0.24, 0.04, 0.06)
    assert fair_fed_weights(SHARES, gaps, beta) == close(*expected)


def test_fair_fed_of_fedism():
    gaps = fair_fed_gaps(ACCURACIES, SHARES, summed=False)
    assert gaps == close(0.54, 0.56, 0.36)
    assert fair_fed_weights(SHARES, gaps, 1.0) == close(0.046667, 0.226667, 0.726667)


def test_fair_fed_without_numbers():
    assert fair_fed_gaps(named(NAN, NAN), named(0.5, 0.5)) == named(0.0, 0.0)
    gaps = fair_fed_gaps(named(0.6, NAN, 0.9), SHARES)  # of the two: 0.857143
    assert gaps == close(0.257143, 0.15, 0.042857)
    assert fair_fed_weights(SHARES, gaps, 0.1)["B"] == pytest.approx(0.3)
    assert fair_fed_weights(named(0.5, 0.5), named(1e9, 1e9), 1.0) == close(0.5, 0.5)
    assert fair_fed_weights(named(0.0, 0.0), named(0.3, 0.3), 1.0) == close(0.0, 0.0)


# ------------------------------------------------------------------------------------------------ FedCE

DELTAS = {"A": (1.0, 0.0), "B": (0.0, 1.0), "C": (1.0, 1.0)}


def test_fed_ce_of_the_spec():
    states = {site: {"w": torch.tensor(d), "other": torch.tensor([9.0])} for site, d in DELTAS.items()}
    (products,) = updates.gram(states, None, {"w"}, {"w": ""}).values()
    cosines = updates.cosines(products, dict.fromkeys(DELTAS, 1 / 3), leave_out=True)
    assert cosines == close(0.447214, 0.447214, 1.0)
    directions = {site: max(1 - c, 0.0) for site, c in cosines.items()}
    scores = {site: 1 - m for site, m in named(0.9, 0.8, 0.7).items()}
    assert contributions(directions, scores, multiply=False, floor=1e-6) == pytest.approx(
        named(0.333333, 0.416667, 0.25), abs=2e-6
    )
    found = contributions(directions, scores, multiply=True, floor=1e-6)
    assert found == pytest.approx(named(0.333333, 0.666667, 0.0), abs=5e-6)
    assert found["C"] > 0
    assert contributions(directions, named(0.0, 0.0, 0.0), multiply=False, floor=0.0) == close(5 / 12, 5 / 12, 1 / 6)


def test_cosines_against_plain_vectors():
    """Check models with another start, several tensors, and weights that do not sum to 1."""
    g = torch.Generator().manual_seed(3)
    received = {"a": torch.randn(40_000, generator=g), "n": torch.tensor(4), "b": torch.randn(3, 2, generator=g)}
    states = {
        site: {
            k: t + torch.randn(t.shape, generator=g) if t.is_floating_point() else t + 1 for k, t in received.items()
        }
        for site in "ABC"
    }
    weights = named(0.5, 0.1, 0.8)
    flat = {
        site: torch.cat([(state[k].double() - received[k].double()).reshape(-1) for k in ("a", "b")])
        for site, state in states.items()
    }
    mean = sum(weights[site] * v for site, v in flat.items())
    expected = {s: float(torch.cosine_similarity(v, mean - weights[s] * v, dim=0)) for s, v in flat.items()}
    layers = updates.gram(states, received, {"a", "b", "n"}, {"a": "one", "b": "two"})
    assert updates.cosines(layers["one"] + layers["two"], weights, leave_out=True) == pytest.approx(expected, rel=1e-12)
    assert squared_norms(states, received, {"a", "b"}) == pytest.approx({s: float(v @ v) for s, v in flat.items()})
    assert squared_norms(states, None, {"b"})["A"] == pytest.approx(float(states["A"]["b"].double().square().sum()))


def test_a_cosine_that_is_not_defined_is_0():
    zero, one, far = torch.zeros(2), torch.ones(2), torch.full((2,), 1e300, dtype=torch.float64)
    for deltas in ((zero, one), (one, zero), (one,), (far, far)):
        states = {site: {"w": d} for site, d in zip("AB", deltas, strict=False)}
        (products,) = updates.gram(states, None, {"w"}, {"w": ""}).values()
        assert set(updates.cosines(products, dict.fromkeys(states, 0.5), leave_out=True).values()) == {0.0}


def test_the_model_without_one_site():
    received = {"w": torch.tensor([1.0]), "bn.running_var": torch.tensor([0.1]), "n": torch.tensor(7)}
    own = {"w": torch.tensor([2.0]), "bn.running_var": torch.tensor([4.0]), "n": torch.tensor(3)}
    found = minus_state(received, own, 0.25)
    assert found["w"].item() == pytest.approx(0.666667, abs=1e-6)
    assert found["bn.running_var"].item() == pytest.approx(1e-5)
    assert found["n"].item() == 7
    assert received["w"].item() == 1.0
