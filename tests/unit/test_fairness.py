"""Test the fairness summary against published tables and plain formulas."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflare.core.fairness import summarize

NAN = math.nan
# Test Dice of Fed-LWR's Tables 1 and 2 with the printed average and standard deviation.
PUBLISHED = {
    "Fed-LWR, prostate": ((91.92, 94.73, 93.22, 93.34, 94.06, 92.21), 93.25, 0.97),
    "FedAvg, prostate": ((85.84, 92.27, 93.58, 87.89, 92.47, 80.66), 88.78, 4.54),
    "FedCE (Multi.), prostate": ((89.85, 93.49, 92.21, 90.67, 93.66, 89.53), 91.57, 1.65),
    "Fed-LWR, fundus": ((85.89, 79.43, 92.42, 90.96), 87.17, 5.08),
    "Solo, fundus": ((82.01, 74.57, 91.26, 92.56), 85.10, 7.31),
}
by_site = st.dictionaries(st.text("ABCDEFG", min_size=1, max_size=4), st.floats(0.01, 1), min_size=1, max_size=25)


def named(*values: float) -> dict[str, float]:
    return {f"S{index:02d}": value for index, value in enumerate(values, start=1)}


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_rows(row):
    values, mean, std = PUBLISHED[row]
    summary = summarize(named(*values))
    assert summary.mean == pytest.approx(mean, abs=0.0051)
    assert summary.std == pytest.approx(std, abs=0.011)  # printed ones are cut, not rounded


def test_worked_by_hand():
    # 1, 2, 6: mean 3, deviations -2, -1, 3, variance 14/3; Jain 81 / (3 * 41); cv sqrt(14/3) / 3
    summary = summarize({"B": 2.0, "C": 6.0, "A": 1.0})
    assert summary.mean == 3
    assert summary.std == pytest.approx(math.sqrt(14 / 3))
    assert summary.jain == pytest.approx(81 / 123)
    assert summary.cv == pytest.approx(math.sqrt(14 / 3) / 3)
    assert (summary.worst_site, summary.best_site, summary.range) == ("A", "C", 5)


def reference(values: dict[str, float], higher: bool) -> tuple[str, str, float, float]:
    """Compute worst and best site, bottom and top decile, one after the other, without sorting tricks."""
    worst, best = min(values), min(values)
    for site in sorted(values):
        if values[site] < values[worst] if higher else values[site] > values[worst]:
            worst = site
        if values[site] > values[best] if higher else values[site] < values[best]:
            best = site
    count = max(1, len(values) // 10)
    left = list(values.values())
    bottom = [left.pop(left.index(min(left) if higher else max(left))) for _ in range(count)]
    left = list(values.values())
    top = [left.pop(left.index(max(left) if higher else min(left))) for _ in range(count)]
    return worst, best, sum(bottom) / count, sum(top) / count


@pytest.mark.parametrize("higher", [True, False])
@given(values=st.dictionaries(st.text("ABCDEFG", min_size=1, max_size=4), st.floats(-3, 3), min_size=1, max_size=45))
def test_the_worst_are_those_served_worst(higher, values):
    """Check that for a loss the highest values are the worst, in names, deciles and range alike."""
    summary = summarize(values, higher_is_better=higher)
    worst, best, bottom, top = reference(values, higher)
    assert (summary.worst_site, summary.best_site) == (worst, best)
    assert (summary.worst, summary.best) == (values[worst], values[best])
    assert summary.bottom_decile == pytest.approx(bottom, abs=1e-12)
    assert summary.top_decile == pytest.approx(top, abs=1e-12)
    assert summary.range == max(values.values()) - min(values.values())
    flipped = summarize({site: -value for site, value in values.items()}, higher_is_better=not higher)
    assert (flipped.worst_site, flipped.std, flipped.jain) == (worst, summary.std, summary.jain)


@pytest.mark.parametrize("higher", [True, False])
def test_ties_go_to_the_first_name(higher):
    summary = summarize({"C": 0.5, "A": 0.5, "B": 0.5}, higher_is_better=higher)
    assert (summary.worst_site, summary.best_site) == ("A", "A")


def test_equal_values_are_perfectly_even():
    summary = summarize(named(0.1, 0.1, 0.1))
    assert (summary.std, summary.jain, summary.cv, summary.range) == (0, 1, 0, 0)
    assert summarize(named(0.0, 0.0)).jain == 1


def test_one_site():
    summary = summarize({"A": 0.7})
    assert (summary.mean, summary.std, summary.worst_site, summary.jain, summary.cv) == (0.7, 0, "A", 1, 0)


def test_mean_zero_has_no_coefficient_of_variation():
    assert math.isnan(summarize(named(-1.0, 1.0)).cv)


def test_undefined_sites_are_excluded_and_named():
    summary = summarize({"C": NAN, "B": 0.5, "A": NAN, "D": 0.7})
    assert summary.excluded == ("A", "C")
    assert summary.num_sites == 2
    assert summary.mean == pytest.approx(0.6)
    assert summary.worst_site == "B"


def test_all_undefined():
    summary = summarize({"B": NAN, "A": NAN})
    assert (summary.num_sites, summary.excluded, summary.worst_site, summary.best_site) == (0, ("A", "B"), "", "")
    assert all(math.isnan(v) for v in (summary.mean, summary.std, summary.jain, summary.top_decile))


def test_errors():
    with pytest.raises(ValueError, match="no site in the values to summarize"):
        summarize({})
    with pytest.raises(ValueError, match=r"^value of site 'B'.* got -inf$"):
        summarize({"A": 0.5, "B": -math.inf})


def test_as_dict_is_plain():
    assert json.loads(json.dumps(summarize({"A": 0.5, "B": NAN}).as_dict()))["excluded"] == ["B"]


@given(by_site, st.floats(0.1, 10))
def test_properties(values, scale):
    before = dict(values)
    summary = summarize(values)
    x = list(values.values())
    assert summary.mean == pytest.approx(np.mean(x))
    assert summary.std == pytest.approx(np.std(x), abs=1e-12)
    assert summary.jain == pytest.approx(sum(x) ** 2 / (len(x) * sum(v * v for v in x)))
    assert 1 / len(x) - 1e-12 <= summary.jain <= 1 + 1e-12
    assert summary.worst <= summary.bottom_decile <= summary.mean + 1e-12
    assert summary.mean - 1e-12 <= summary.top_decile <= summary.best
    assert values[summary.worst_site] == min(x)
    assert summarize(dict(reversed(values.items()))) == summary
    scaled = summarize({site: scale * v for site, v in values.items()})
    assert scaled.cv == pytest.approx(summary.cv, abs=1e-9)
    assert scaled.range == pytest.approx(scale * summary.range, abs=1e-9)
    assert values == before
