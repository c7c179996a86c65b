"""Test weight rules: the specifications' worked examples, degenerate cases, and general properties."""

from __future__ import annotations

import copy
import doctest
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflare.core import weighting
from fairflare.core.weighting import (
    capped_weights,
    dissimilarity_weights,
    feasible_bound,
    fedga_weights,
    layer_weights,
    mixed,
    moving_average,
    normalise,
    power_weights,
    rescue_weights,
    uniform_weights,
)

NAN, INF = math.nan, math.inf
by_site = st.dictionaries(st.text("ABCDEFG", min_size=1, max_size=3), st.floats(1e-6, 1e3), min_size=1, max_size=7)


def named(*values: float) -> dict[str, float]:
    return dict(zip("ABCDEFG", values, strict=False))


def one_layer(*deltas: float, **limits: float) -> dict[str, float]:
    return layer_weights({site: {"conv": delta} for site, delta in named(*deltas).items()}, **limits)["conv"]


def close(*values: float) -> object:
    return pytest.approx(named(*values), abs=1e-6)


# normalise


def test_normalise_divides_by_the_sum_and_sorts():
    assert list(normalise({"B": 3.0, "A": 1.0}).items()) == [("A", 0.25), ("B", 0.75)]


def test_negative_values_count_as_zero():
    assert normalise(named(-5.0, 1.0, 3.0)) == close(0.0, 0.25, 0.75)


def test_a_vanishing_sum_is_uniform_or_the_fallback():
    assert normalise(named(0.0, -1.0, 1e-13)) == close(1 / 3, 1 / 3, 1 / 3)
    assert normalise(named(0.0, 0.0), named(1.0, 4.0)) == close(0.2, 0.8)
    assert normalise(named(3e-12, 1e-12)) == close(0.75, 0.25)


def test_non_finite_values():
    assert normalise(named(1.0, NAN, 3.0, 8.0), non_finite="mean") == close(1 / 16, 4 / 16, 3 / 16, 8 / 16)
    assert normalise(named(1.0, INF, 3.0, 8.0), non_finite="median") == close(1 / 15, 3 / 15, 3 / 15, 8 / 15)
    assert normalise(named(NAN, NAN), non_finite="mean") == close(0.5, 0.5)
    with pytest.raises(ValueError, match=r"^value of site 'B'.* got nan$"):
        normalise(named(1.0, NAN))


def test_normalise_does_not_overflow():
    assert normalise(named(1e308, 1e308, 2e307)) == close(10 / 22, 10 / 22, 2 / 22)


def test_normalise_errors():
    with pytest.raises(ValueError, match=r"no site in the \w+ to weight"):
        normalise({})
    with pytest.raises(ValueError, match="same sites; only in values: 'B'"):
        normalise(named(0.0, 0.0), named(1.0))
    with pytest.raises(ValueError, match=r"^non_finite.* got 'zero'$"):
        normalise(named(1.0), non_finite="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no site in the \w+ to weight"):
        uniform_weights([])


# Fed-LWR, section 8, test 5


@pytest.mark.parametrize(
    ("deltas", "limits", "expected"),
    [
        ((0.9, 0.8, 0.5), {}, (0.125, 0.25, 0.625)),
        ((0.999, 0.98, 0.95), {"clip_min": 1e-4, "clip_max": 0.99}, (0.125, 0.25, 0.625)),
        ((0.999, 0.98, 0.95), {}, (0.014085, 0.281690, 0.704225)),
        ((1.0, 1.0, 1.0), {}, (1 / 3, 1 / 3, 1 / 3)),
        ((-0.2, 0.5, 0.9), {"clip_min": 1e-4}, (0.624977, 0.312520, 0.062504)),
        ((-0.2, 0.5, 0.9), {}, (1.0 / 1.6, 0.5 / 1.6, 0.1 / 1.6)),
        ((1.3, 0.5, 0.7), {}, (0.0, 0.625, 0.375)),  # 1.3 counts as 1
        ((0.2,), {}, (1.0,)),
    ],
)
def test_layer_weights_worked_examples(deltas, limits, expected):
    assert one_layer(*deltas, **limits) == close(*expected)


def test_layers_are_independent_and_keep_the_order_of_the_model():
    cka = {
        "B": {"up": 0.8, "down": 0.5, "out": 1.0},
        "A": {"up": 0.9, "down": 0.2, "out": 1.0},
        "C": {"up": 0.5, "down": 0.8, "out": 1.0},
    }
    weights = layer_weights(cka)
    assert list(weights) == ["up", "down", "out"]
    assert [list(rho) for rho in weights.values()] == [["A", "B", "C"]] * 3
    assert weights["up"] == close(0.125, 0.25, 0.625)
    assert weights["down"] == close(0.533333, 0.333333, 0.133333)
    assert weights["out"] == close(1 / 3, 1 / 3, 1 / 3)


def test_a_site_without_scores_gets_the_mean_of_the_layer():
    # C: mean of 0.2 and 0.6 at layer a, of 0.4 and 0.2 at layer b.
    cka = {"A": {"a": 0.8, "b": 0.6}, "B": {"a": 0.4, "b": 0.8}, "C": {"a": INF, "b": NAN}}
    assert layer_weights(cka)["a"] == close(0.2 / 1.2, 0.6 / 1.2, 0.4 / 1.2)
    assert layer_weights(cka)["b"] == close(0.4 / 0.9, 0.2 / 0.9, 0.3 / 0.9)


def test_no_score_at_all_is_uniform():
    assert one_layer(NAN, NAN, INF, NAN) == close(0.25, 0.25, 0.25, 0.25)
    assert one_layer(NAN, NAN, clip_max=0.99) == close(0.5, 0.5)


def test_small_dissimilarities_keep_their_digits():
    # 1 - delta of 1e-9 and 3e-9 in float32 would both be 0; in float64 they lose half of their digits.
    tiny = {"A": {"conv": 1e-9}, "B": {"conv": 3e-9}}
    cka = {site: {"conv": float(np.float32(1 - d["conv"]))} for site, d in tiny.items()}
    assert dissimilarity_weights(tiny)["conv"]["B"] == pytest.approx(0.75, rel=1e-12)
    assert layer_weights(cka)["conv"]["B"] == 0.5


def test_layer_weights_errors():
    with pytest.raises(ValueError, match="only in the scores of site 'B': 'x'"):
        layer_weights({"A": {"conv": 0.5}, "B": {"conv": 0.5, "x": 0.5}})
    with pytest.raises(ValueError, match="only in the scores of site 'A': 'x'"):
        layer_weights({"A": {"conv": 0.5, "x": 0.5}, "B": {"conv": 0.5}})
    with pytest.raises(ValueError, match=r"no site in the \w+ to weight"):
        layer_weights({})
    with pytest.raises(ValueError, match="no layer in the scores of site 'A'"):
        layer_weights({"A": {}})
    for limits, message in (
        ((-0.1, 1.0), r"clip_min must be in \[0, 1\), got -0\.1"),
        ((0.0, 1.1), r"clip_max must be in \(0, 1\], got 1\.1"),
        ((0.5, 0.5), r"^clip_max.* got 0\.5$"),
        ((0.0, NAN), r"clip_max must be in \(0, 1\], got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            one_layer(0.5, clip_min=limits[0], clip_max=limits[1])


@given(st.lists(st.lists(st.floats(-0.5, 1.5) | st.just(NAN), min_size=3, max_size=3), min_size=1, max_size=6))
def test_layer_weights_against_loops(scores):
    sites = list("ABCDEF"[: len(scores)])
    cka = {site: dict(zip(("a", "b", "c"), row, strict=True)) for site, row in zip(sites, scores, strict=True)}
    before = copy.deepcopy(cka)
    weights = layer_weights(cka)
    for layer in ("a", "b", "c"):
        one_minus = {}
        for site in sites:  # section 5 of the specification, line by line
            own = [d for d in cka[site].values() if not math.isnan(d)]
            others = [cka[s][layer] for s in sites if not math.isnan(cka[s][layer])]
            means = [np.mean(f) for f in ([d for d in cka[s].values() if not math.isnan(d)] for s in sites) if f]
            delta = cka[site][layer]
            if math.isnan(delta):
                delta = np.mean(own or others or means or [1.0])
            one_minus[site] = 1 - min(max(delta, 0.0), 1.0)
        total = sum(one_minus.values())
        expected = {s: d / total if total > 1e-9 else 1 / len(sites) for s, d in one_minus.items()}
        if total > 1e-9 or total <= 1e-13:  # in between, rounding decides
            assert weights[layer] == pytest.approx(expected, abs=1e-6)
        assert math.fsum(weights[layer].values()) == pytest.approx(1, abs=1e-12)
    assert layer_weights(dict(reversed(cka.items()))) == weights
    assert repr(cka) == repr(before)


# FedISM+, section 9, tests 4 to 7


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ((0.02, 0.04, 0.08), 0, (1 / 3, 1 / 3, 1 / 3)),
        ((0.02, 0.04, 0.08), 1, (0.142857, 0.285714, 0.571429)),
        ((0.02, 0.04, 0.08), 2, (0.047619, 0.190476, 0.761905)),
        ((0.5, 0.6, 1.0), 2, (0.155280, 0.223602, 0.621118)),
        ((-0.01, 0.02, 0.02), 2, (0.0, 0.5, 0.5)),
        ((-0.01, -3.0, 0.0), 2, (1 / 3, 1 / 3, 1 / 3)),
        ((NAN, 0.02, 0.04, 0.08), 1, (4 / 18, 2 / 18, 4 / 18, 8 / 18)),  # NaN: the median, 0.04
        ((NAN, INF), 2, (0.5, 0.5)),
        ((7.0,), 2, (1.0,)),
        ((1e200, 2e200), 2, (0.2, 0.8)),  # the square does not fit a float
    ],
)
def test_power_weights_worked_examples(values, q, expected):
    assert power_weights(named(*values), q) == close(*expected)


def test_power_weights_errors():
    with pytest.raises(ValueError, match="q must be finite and >= 0, got -1"):
        power_weights(named(1.0), -1)
    with pytest.raises(ValueError, match=r"no site in the \w+ to weight"):
        power_weights({}, 1)


@given(by_site, st.floats(0, 10), st.floats(0.01, 100))
def test_power_weights_properties(values, q, scale):
    weights = power_weights(values, q)
    assert math.fsum(weights.values()) == pytest.approx(1, abs=1e-12)
    ranked = [weights[site] for site in sorted(values, key=values.__getitem__)]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(ranked))
    assert power_weights({s: scale * v for s, v in values.items()}, q) == pytest.approx(weights, abs=1e-9)
    assert power_weights(dict(reversed(values.items())), q) == weights


def test_moving_average_of_the_specification():
    first = moving_average(power_weights(named(0.02, 0.04, 0.08), 2), None, 0.5)
    assert first == close(0.047619, 0.190476, 0.761905)
    assert moving_average(power_weights(named(0.04, 0.04, 0.04), 2), first, 0.5) == close(0.190476, 0.261905, 0.547619)


def test_moving_average_keeps_absent_sites_and_starts_new_ones():
    memory = moving_average(named(0.4, 0.6), named(0.2, 0.3, 0.5), 0.5)
    assert memory == close(0.3, 0.45, 0.5)
    assert normalise({site: memory[site] for site in "AB"}) == close(0.4, 0.6)
    assert moving_average({"B": 0.4, "D": 0.6}, named(0.2, 0.8), 0.25) == pytest.approx({"A": 0.2, "B": 0.7, "D": 0.6})


def test_moving_average_limits_and_errors():
    assert moving_average(named(0.1, 0.9), named(0.5, 0.5), 1.0) == named(0.1, 0.9)
    assert moving_average(named(0.1, 0.9), named(0.5, 0.5), 0.0) == named(0.5, 0.5)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\], got 1.5"):
        moving_average(named(1.0), None, 1.5)
    with pytest.raises(ValueError, match=r"^weight of site 'B'.* got nan$"):
        moving_average(named(0.5, NAN), None, 0.5)
    with pytest.raises(ValueError, match=r"^previous weight of site 'A'.* got -1"):
        moving_average(named(0.5), named(-1.0), 0.5)


# Fed-MAS, sections 4 and 8


@pytest.mark.parametrize(
    ("rf", "expected"),
    [
        ((1.0, 3.0, 4.0), (0.125, 0.375, 0.5)),
        ((0.0, 0.0), (0.5, 0.5)),
        ((1.0, NAN, 3.0), (1 / 6, 2 / 6, 3 / 6)),  # NaN: the mean of the others, 2
        ((5.0,), (1.0,)),
    ],
)
def test_rescue_weights(rf, expected):
    assert rescue_weights(named(*rf)) == close(*expected)


def test_rescue_weights_errors():
    with pytest.raises(ValueError, match=r"^rescue factor of site 'B'.* got -2"):
        rescue_weights(named(1.0, -2.0))


# FedGA, baselines section 14

THIRD = named(1 / 3, 1 / 3, 1 / 3)


@pytest.mark.parametrize(
    ("gaps", "step", "centre", "expected"),
    [
        ((0.1, 0.3, 0.5), 0.05 / 3 * 299 / 300, True, (0.316722, 0.333333, 0.349944)),
        ((0.1, 0.3, 0.8), 0.1, True, (0.258333, 0.308333, 0.433333)),
        ((0.1, 0.3, 0.8), 0.2 / 3, False, (0.310606, 0.325758, 0.363636)),
        ((0.3, 0.3, 0.3), 0.1, True, (1 / 3, 1 / 3, 1 / 3)),
        ((0.1, 0.1 + 1e-17, 0.1), 0.3, True, (1 / 3, 1 / 3, 1 / 3)),
        ((0.0, 0.0, 0.0), 0.3, False, (1 / 3, 1 / 3, 1 / 3)),
        ((0.1, NAN, 0.5), 0.1, True, (1 / 3 - 0.1, 1 / 3, 1 / 3 + 0.1)),
        ((NAN, NAN, NAN), 0.1, True, (1 / 3, 1 / 3, 1 / 3)),
        ((-1.0, 0.0, 1.0), 0.5, True, (0.0, 2 / 7, 5 / 7)),  # raw -1/6, 1/3, 5/6; clipped to sum 7/6
    ],
)
def test_fedga_worked_examples(gaps, step, centre, expected):
    assert fedga_weights(THIRD, named(*gaps), step, centre=centre) == close(*expected)


def test_fedga_absent_and_new_sites():
    # C is absent and keeps 0.5; A and B share the other half: 0.2 - 0.1 and 0.3 + 0.1.
    assert fedga_weights(named(0.2, 0.3, 0.5), named(0.0, 1.0), 0.1) == close(0.1, 0.4, 0.5)
    # C is new: 1/3 beside 0.5 and 0.5 makes 0.375, 0.375, 0.25; equal gaps then move nothing.
    assert fedga_weights(named(0.5, 0.5), named(1.0, 1.0, 1.0), 0.1) == close(0.375, 0.375, 0.25)
    assert fedga_weights({}, named(0.0, 2.0), 0.1) == close(0.4, 0.6)
    assert fedga_weights(named(1.0), named(3.0), 0.1) == named(1.0)


def test_fedga_errors():
    with pytest.raises(ValueError, match="no site in the gaps"):
        fedga_weights(THIRD, {}, 0.1)
    with pytest.raises(ValueError, match=r"step must be finite and >= 0, got -0\.1"):
        fedga_weights(THIRD, named(1.0), -0.1)
    with pytest.raises(ValueError, match=r"weights must sum to 1, got 0\.5"):
        fedga_weights(named(0.5), named(1.0), 0.1)
    with pytest.raises(ValueError, match=r"^weight of site 'A'.* got -1"):
        fedga_weights(named(-1.0, 2.0), named(1.0), 0.1)


@given(by_site, st.dictionaries(st.sampled_from("ABCDEFG"), st.floats(-5, 5), min_size=1), st.floats(0, 2))
def test_fedga_sums_to_one_and_order_does_not_matter(values, gaps, step):
    weights = normalise(values)
    moved = fedga_weights(weights, gaps, step)
    assert math.fsum(moved.values()) == pytest.approx(1, abs=1e-9)
    assert min(moved.values()) >= 0
    assert set(moved) == set(weights) | set(gaps)
    assert fedga_weights(dict(reversed(weights.items())), dict(reversed(gaps.items())), step) == moved


# the largest share


def naive_cap(weights: dict[str, float], bound: float) -> dict[str, float]:
    """Compute min(b, c w) with c by bisection; where other sites have no weight at all, they share the rest."""
    bound = max(bound, 1 / len(weights))
    if max(weights.values()) <= bound:
        return weights

    def total(c: float) -> float:
        return math.fsum(min(bound, c * w) for w in weights.values())

    some = sum(w > 0 for w in weights.values())
    if some * bound < 1:
        rest = (1 - some * bound) / (len(weights) - some)
        return {site: bound if w > 0 else rest for site, w in weights.items()}
    low, high = 1.0, 1.0
    while total(high) < 1 - 1e-13:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < 1 else (low, middle)
    return {site: min(bound, high * w) for site, w in weights.items()}


shares = st.one_of(
    by_site.map(normalise),
    st.dictionaries(st.text("ABCDEFG", min_size=1, max_size=3), st.floats(0, 5), min_size=2).map(
        lambda logs: normalise({site: 10.0 ** -(10 * log) for site, log in logs.items()})
    ),
    st.dictionaries(st.text("ABCDEFG", min_size=1, max_size=3), st.sampled_from([0.0, 1.0, 7.0]), min_size=1).map(
        normalise
    ),
)


@pytest.mark.parametrize(
    ("weights", "bound", "expected"),
    [
        ((0.7, 0.2, 0.1), 0.5, (0.5, 1 / 3, 1 / 6)),
        ((0.7, 0.2, 0.1), 0.4, (0.4, 0.4, 0.2)),
        ((0.6, 0.3, 0.1), 0.4, (0.4, 0.4, 0.2)),  # what is cut lifts the second over the bound
        ((0.9999992, 0.0000004, 0.0000004), 0.5, (0.5, 0.25, 0.25)),
        ((1.0, 0.0, 0.0), 0.5, (0.5, 0.25, 0.25)),
        ((0.5, 0.5, 0.0, 0.0), 0.4, (0.4, 0.4, 0.1, 0.1)),
        ((0.7, 0.2, 0.1), 0.2, (1 / 3, 1 / 3, 1 / 3)),  # cannot hold
        ((1.0,), 0.4, (1.0,)),
        ((0.9, 0.1), 0.4, (0.5, 0.5)),
    ],
)
def test_capped_weights_worked_examples(weights, bound, expected):
    assert capped_weights(named(*weights), bound) == close(*expected)


@given(shares, st.floats(0.01, 1), st.randoms(use_true_random=False))
def test_capped_weights(weights, bound, random):
    before = dict(weights)
    capped = capped_weights(weights, bound)
    used = feasible_bound(len(weights), bound)
    assert weights == before
    assert list(capped) == list(weights)
    assert math.fsum(capped.values()) == pytest.approx(1, abs=1e-12)
    assert min(capped.values()) >= 0
    assert max(capped.values()) <= used + 1e-12
    assert capped == pytest.approx(naive_cap(weights, bound), abs=1e-9)
    if max(weights.values()) <= used:
        assert capped == weights
    ordered = sorted(weights, key=weights.__getitem__)
    assert all(capped[low] <= capped[high] for low, high in pairwise(ordered))
    for site, weight in weights.items():
        assert capped[site] >= min(weight, used) - 1e-12  # only who is above the bound loses
    names = list(weights)
    random.shuffle(names)
    assert capped_weights({name: weights[name] for name in names}, bound) == capped
    assert capped_weights(capped, bound) == pytest.approx(capped, abs=1e-12)


def test_capped_weights_errors():
    with pytest.raises(ValueError, match="bound must be in \\(0, 1\\], got 0"):
        capped_weights(named(1.0), 0)
    with pytest.raises(ValueError, match="no site in weights"):
        capped_weights({}, 0.5)
    with pytest.raises(ValueError, match=r"weights must sum to 1, got 0\.5"):
        capped_weights(named(0.25, 0.25), 0.5)


# all rules


@pytest.mark.parametrize(
    "rule",
    [
        normalise,
        rescue_weights,
        uniform_weights,
        lambda values: power_weights(values, 2.0),
        lambda values: moving_average(normalise(values), normalise(values), 0.3),
    ],
    ids=["normalise", "rescue", "uniform", "power", "moving average"],
)
@given(values=by_site)
def test_weights_sum_to_one_in_any_order_and_leave_the_input(rule, values):
    before = dict(values)
    weights = rule(values)
    assert list(weights) == sorted(values)
    assert math.fsum(weights.values()) == pytest.approx(1, abs=1e-12)
    assert min(weights.values()) >= 0
    assert rule(dict(reversed(values.items()))) == weights
    assert values == before
    renamed = rule({f"x{site}": value for site, value in values.items()})
    assert renamed == {f"x{site}": weight for site, weight in weights.items()}


def test_examples_in_the_documentation():
    assert doctest.testmod(weighting).failed == 0
    assert doctest.testmod(weighting).attempted > 0


# ------------------------------------------------------------------------------------- mixed with uniform ones


def test_mixed_by_hand() -> None:
    # 0.7 * (0.9, 0.1, 0) + 0.3 / 3
    assert mixed({"a": 0.9, "b": 0.1, "c": 0.0}, 0.3) == pytest.approx({"a": 0.73, "b": 0.17, "c": 0.1}, rel=1e-12)
    assert mixed({"a": 0.9, "b": 0.1}, 1) == {"a": 0.5, "b": 0.5}
    with pytest.raises(ValueError, match="share must"):
        mixed({"a": 1.0}, 1.5)
    with pytest.raises(ValueError, match="sum"):
        mixed({"a": 0.5}, 0.5)


@given(by_site.map(normalise), st.floats(0, 1))
def test_mixed_weights_stay_weights_in_the_same_order(given: dict[str, float], share: float) -> None:
    found = mixed(given, share)
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    assert min(found.values()) >= 0
    ranked = [found[site] for site in sorted(given, key=lambda s: given[s])]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(ranked))
    assert mixed(given, 0.0) == given
    assert mixed(given, 1.0) == pytest.approx(uniform_weights(given), rel=1e-12)


# ------------------------------------------------------------------------------------------------ coalitions


def test_no_group_holds_more_than_its_share_and_the_bound() -> None:
    from itertools import combinations

    from fairflare.core.weighting import excess_of, tempered_weights

    for seed in range(50):
        raw = np.random.default_rng(seed).dirichlet([0.3] * 7)
        weights = {str(k): float(w) for k, w in enumerate(raw / raw.sum())}
        found = tempered_weights(weights, 0.16)
        assert math.fsum(found.values()) == pytest.approx(1)
        for size in range(1, 7):
            most = max(sum(found[s] for s in group) for group in combinations(found, size))
            assert most <= size / 7 + 0.16 + 1e-12
        # The excess is half the distance to equal weights, and the order by size stays.
        assert excess_of(weights) == pytest.approx(0.5 * sum(abs(w - 1 / 7) for w in weights.values()))
        assert sorted(found, key=found.get) == sorted(weights, key=weights.get)
        assert excess_of(found) == pytest.approx(min(0.16, excess_of(weights)))


def test_weights_within_the_bound_keep_their_bits() -> None:
    from fairflare.core.weighting import tempered_weights

    weights = {"a": 0.1 + 0.2, "b": 0.3, "c": 0.4 - 1e-17}
    assert tempered_weights(weights, 0.1) == weights
    assert tempered_weights({"a": 1.0}, 0.1) == {"a": 1.0}
    with pytest.raises(ValueError, match="excess"):
        tempered_weights(weights, 0)
    with pytest.raises(ValueError, match="sum to 1"):
        tempered_weights({"a": 0.2, "b": 0.2}, 0.1)


def test_every_site_may_have_a_bound_of_its_own() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.1, "d": 0.1}
    found = capped_weights(weights, {"a": 0.25, "b": 1.0, "c": 1.0, "d": 1.0})
    assert found == pytest.approx({"a": 0.25, "b": 0.45, "c": 0.15, "d": 0.15})
    found = capped_weights(weights, {"a": 0.25, "b": 0.4, "c": 1.0, "d": 1.0})
    assert found == pytest.approx({"a": 0.25, "b": 0.4, "c": 0.175, "d": 0.175})
    assert capped_weights(weights, dict.fromkeys(weights, 0.01)) == pytest.approx(dict.fromkeys(weights, 0.25))
    assert capped_weights(weights, dict.fromkeys(weights, 0.4)) == capped_weights(weights, 0.4)
    with pytest.raises(ValueError, match="bounds"):
        capped_weights(weights, {"a": 0.25})
