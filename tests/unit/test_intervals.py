"""Test intervals and p-values against scipy and naive loops, and by how often they cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fairflare.core.statistics.intervals import degrees, holm, paired_gain, reach, remove_skew, skewness, widen_draws
from fairflare_lab.statistics.seed_intervals import aggregate_sites, estimate, shared_variance

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_over_seeds_alone_it_is_students_t(seeds: int) -> None:
    values = RNG.normal(0.02, 0.01, seeds)
    found = estimate(values)
    expected = stats.ttest_1samp(values, 0)
    interval = expected.confidence_interval(0.95)
    assert float(found.p) == pytest.approx(expected.pvalue, rel=1e-12)
    assert [float(end) for end in found.ends] == pytest.approx([interval.low, interval.high], rel=1e-12)


@pytest.mark.parametrize(("seeds", "power"), [(2, 0.5), (3, 1.0), (7, 1.0)])
def test_with_patients_it_is_a_mixture(seeds: int, power: float) -> None:
    values = RNG.normal(0.03, 0.01, seeds)
    shared, df = 0.006**2, 17.5
    of_seeds = np.var(values, ddof=1) / seeds
    first, second = of_seeds**power, shared**power
    t = values.mean() / math.sqrt(of_seeds + shared)
    parts = stats.t.sf(t, seeds - 1), stats.t.sf(t, df)
    found = estimate(values, shared, df)
    assert float(found.p) == pytest.approx(2 * (first * parts[0] + second * parts[1]) / (first + second), rel=1e-10)
    assert float(found.error) == pytest.approx(math.sqrt(of_seeds + shared))


def test_p_is_below_its_level_where_the_interval_leaves_out_zero() -> None:
    values = RNG.normal(0.03, 0.02, (4000, 3))
    found = estimate(values, np.abs(RNG.normal(0, 0.01, 4000)) ** 2, 20, RNG.normal(0, 0.7, 4000))
    low, high = found.ends
    outside = (low > 0) | (high < 0)
    assert 200 < outside.sum() < 3800
    assert np.array_equal(outside, found.p < 0.05)
    for level in (0.4, 0.05, 0.003):
        assert found.tails(found.quantile(level)) == pytest.approx(np.full(4000, level), rel=1e-9)


def test_equal_figures_are_no_difference() -> None:
    assert float(estimate([0.1 + 0.2 - 0.3, 0.0, 0.0]).p) == 1  # 5.6e-17
    assert float(estimate([0.0, 0.0]).p) == 1
    same = estimate([0.1, 0.1])  # nothing scatters: no certainty
    assert np.isnan([same.p, *same.ends, same.smallest(), same.smallest(3)]).all()
    with pytest.raises(ValueError, match="at least 2 seeds, got 1"):
        estimate([0.1])


def test_what_seeds_share_is_their_covariance() -> None:
    drawn = RNG.normal(0, 1, (4, 50)) + RNG.normal(0, 2, 50)
    covariances = np.cov(drawn)
    apart = [covariances[i, j] for i in range(4) for j in range(4) if i != j]
    assert float(shared_variance(drawn)) == pytest.approx(np.mean(apart))
    assert float(shared_variance(np.stack([drawn[0], -drawn[0]]))) == 0
    # What differs between the seeds is in their own scatter, and not counted twice.
    nothing = np.mean([float(shared_variance(RNG.normal(0, 1, (3, 400)))) for _ in range(200)])
    assert nothing < 0.03


def test_draws_of_few_patients_are_widened() -> None:
    """Check that the variance over all draws of m values is (m - 1) / m of their mean's unbiased variance."""
    values = np.array([0.2, 0.5, 0.9])
    every = np.stack(np.meshgrid(*[values] * 3)).reshape(3, -1).mean(0)
    wide = widen_draws([values.mean()], every[None], [3])[0]
    assert wide.var() == pytest.approx(values.var(ddof=1) / 3)
    assert wide.mean() == pytest.approx(values.mean())
    assert widen_draws([values.mean()], every[None], [math.inf])[0] == pytest.approx(every, rel=1e-14)


def test_degrees_of_freedom_of_a_sum() -> None:
    welch = stats.ttest_ind([0.1, 0.5, 0.3, 0.9], [0.2, 0.21, 0.25], equal_var=False).df
    parts = [np.var([0.1, 0.5, 0.3, 0.9], ddof=1) / 4, np.var([0.2, 0.21, 0.25], ddof=1) / 3]
    assert float(degrees(parts, [4, 3], 10**12)) == pytest.approx(welch / 2)
    assert float(degrees(parts, [math.inf, math.inf], 201)) == pytest.approx(200)
    assert float(degrees([0.0, 0.0], [4, 3], 201)) == pytest.approx(200)


@pytest.mark.parametrize("skew", [0.0, 1e-9, 0.3, -0.3, 1.4, -1.4])
def test_the_ends_are_where_the_nearer_of_both_ratios_reaches_its_limit(skew: float) -> None:
    """Check both ends against a search for the ratio whose own and whose transformed size are 2.3."""
    found = [float(end) for end in reach(np.array(2.3), np.array(skew))]
    for far, sign in zip(found, (1, -1), strict=True):
        t = sign * far
        halls = t + skew / 6 + skew * t * t / 3 + skew * skew * t**3 / 27
        assert min(abs(t), abs(halls)) == pytest.approx(2.3, abs=1e-8)
        assert float(remove_skew(np.array(t), np.array(skew))) == pytest.approx(2.3, abs=1e-8)
        assert float(remove_skew(np.array(t * 0.999), np.array(skew))) < 2.3
    assert min(found) == pytest.approx(2.3)
    assert (max(found) > 2.4) == (abs(skew) > 0.1), "on the side where the rare values would be"


def test_a_paired_gain_is_the_estimate_of_one_seed() -> None:
    cases = np.array([0.3, 0.0, 0.1, 0.0, 0.05, 0.9])
    draws = RNG.choice(cases, (1000, 6)).mean(1)
    gain, low, high, p, error = paired_gain(cases.mean(), np.append(draws, np.nan), 6)
    wide = cases.mean() + math.sqrt(6 / 5) * (draws - cases.mean())
    assert error == pytest.approx(wide.std(ddof=1))
    assert float(skewness(wide)) == pytest.approx(stats.skew(draws))
    df = 1 / (2 / 5 + 1 / 999)
    of = estimate([gain], error**2, df, stats.skew(draws))
    assert (p, low, high) == pytest.approx((float(of.p), *map(float, of.ends)))
    assert gain - low > 1.05 * (t_end := stats.t.ppf(0.975, df) * error) or gain - low == pytest.approx(t_end)
    assert high - gain > 1.1 * (gain - low), "the rare gain is a large one"
    assert np.isnan(paired_gain(0.1, draws, 4)[3]), "no verdict on four cases"
    assert np.isfinite(paired_gain(0.1, draws, 4)[:3]).all()
    for few in (paired_gain(0.1, draws, 1), paired_gain(0.1, draws[:19], 6), paired_gain(0.1, np.full(99, 0.1), 6)):
        assert (few[0], np.isnan(few[1:]).all()) == (0.1, True)


def naive_holm(p: list[float]) -> list[float]:
    found, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda k: p[k])):
        largest = max(largest, min(1.0, p[index] * (len(p) - rank)))
        found[index] = largest
    return found


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    many = RNG.uniform(0, 1, (50, 7)) ** 3
    assert holm(many) == pytest.approx(np.array([naive_holm(list(row)) for row in many]))


def test_measures_of_sites() -> None:
    found = aggregate_sites([[0.9, 0.5, 0.7], [0.1, 0.2, 0.3]], higher_is_better=False)
    assert found["average"] == pytest.approx([0.7, 0.2])
    assert found["std"] == pytest.approx([math.sqrt(0.08 / 3), math.sqrt(0.02 / 3)])
    assert found["worst"] == pytest.approx([0.9, 0.3])
    assert aggregate_sites([0.9, 0.5], higher_is_better=True)["worst"] == 0.5
