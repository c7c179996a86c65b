"""Signs that a site does not go with the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import median_abs_deviation

from fairflare.core.aggregation.suspicion import contradicted, lower_than_others, points_away


def test_far_below_the_others() -> None:
    values = {"a": 0.8, "b": 0.82, "c": 0.78, "d": 0.2, "e": 0.81}
    assert lower_than_others(values, 0.2) == {"d"}
    assert lower_than_others({**values, "e": 0.25}, 0.2) == {"d", "e"}  # two do not hide one another
    assert lower_than_others({k: values[k] for k in "abd"}, 0.2) == set()  # of three nobody can say
    assert lower_than_others({**values, "c": math.nan, "e": math.inf}, 0.2) == set()
    assert lower_than_others({k: -v for k, v in values.items()}, 0.2) == set()  # only below


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_rule_of_three_deviations(seed: int) -> None:
    values = {str(k): float(v) for k, v in enumerate(np.random.default_rng(seed).normal(size=7))}
    expected = set()
    for site, value in values.items():
        others = np.array([v for k, v in values.items() if k != site])
        if value < np.median(others) - max(3 * median_abs_deviation(others, scale="normal"), 0.1):
            expected.add(site)
    # scipy's 1.4826... has more digits
    assert lower_than_others(values, 0.1) == expected


def test_its_own_model_says_otherwise() -> None:
    received = {"a": 0.8, "b": 0.9, "c": 0.85, "d": 0.1}
    assert contradicted(received, {"d": 0.8}, 0.2) == {"d"}
    assert contradicted(received, {"d": 0.4}, 0.2) == set()  # its images are hard
    assert contradicted(received, {"a": 0.9}, 0.2) == set()  # the common model is nearly as good
    assert contradicted(received, {}, 0.2) == set()
    assert contradicted({"d": 0.1}, {"d": 0.9}, 0.2) == set()
    # Of unequal sites the middle one counts, .6, not the best: .5 is within .2 of it.
    assert contradicted({"a": 0.95, "b": 0.6, "c": 0.55, "d": 0.1}, {"d": 0.5}, 0.2) == {"d"}
    assert contradicted({"a": 0.95, "b": 0.6, "c": 0.55, "d": 0.1}, {"d": 0.39}, 0.2) == set()


def test_the_heaviest_points_away() -> None:
    cosines = {"a": 0.6, "b": 0.5, "c": 0.55, "d": -0.4}
    heavy = {"a": 0.2, "b": 0.2, "c": 0.2, "d": 0.4}
    assert points_away(cosines, heavy, -0.1) == {"d"}
    assert points_away({**cosines, "d": -0.05}, heavy, -0.1) == set()
    assert points_away(cosines, {"a": 0.4, "b": 0.2, "c": 0.2, "d": 0.2}, -0.1) == set()
    assert points_away(cosines, dict.fromkeys("abcd", 0.25), -0.1) == set()
    assert points_away({**cosines, "a": -0.5, "b": -0.3}, heavy, -0.1) == set()  # not alone
    assert points_away({k: cosines[k] for k in "abd"}, heavy, -0.1) == set()
    assert points_away({}, {}, -0.1) == set()
