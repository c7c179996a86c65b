"""Test the advice and the promise of benchmarks/advice.py in worlds whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest

DARK, BRIGHT = {"distance": 0.1, "images": 5.0}, {"distance": 0.4, "images": 5.0}


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import advice

    return advice


def test_a_figure_that_decides_is_found_on_the_other_families(advice: ModuleType) -> None:
    far, near = {"FedRDN": 0.2, "AFL": -0.1}, {"FedRDN": -0.1, "AFL": 0.05}
    gains = {"a": far, "b": far, "c": near, "d": near}
    figures = {"a": BRIGHT, "b": BRIGHT, "c": DARK, "d": DARK}
    verdicts = advice.judge(gains, figures)
    assert {family: choice for family, (_, choice, _) in verdicts.items()} == {
        "a": "FedRDN", "b": "FedRDN", "c": "AFL", "d": "AFL",
    }  # fmt: skip
    assert {family: elsewhere for family, (*_, elsewhere) in verdicts.items()} == {
        "a": "AFL", "b": "AFL", "c": "FedRDN", "d": "FedRDN",
    }  # fmt: skip
    assert verdicts["a"][0] == advice.Advice("distance", 0.25, "AFL", "FedRDN")


def test_without_a_split_that_helps_one_row_is_for_all(advice: ModuleType) -> None:
    gains = {"a": {"FedRDN": 0.2, "AFL": 0.1}, "b": {"FedRDN": 0.3, "Fed-MAS": 0.9}}
    rule = advice.fit(gains, {"a": DARK, "b": DARK})
    assert (rule.below, rule.above, rule.threshold) == ("FedRDN", "FedRDN", math.inf)


def test_the_promise_by_hand(advice: ModuleType) -> None:
    # without 0: median 2.5, distance 2.5; without 1: 2.5 and 1.5; without 4: 1 and 3; without 2: 2.5 (0 1 4 9) -> .5;
    # without 9: 1.5 and 7.5; rank ceil(6 * .8) = 5 of five
    assert advice.promise({"a": 0.0, "b": 1.0, "c": 2.0, "d": 4.0, "e": 9.0}) == (2.0 - 7.5, 2.0 + 7.5)
    assert advice.promise({"a": 0.0, "b": 1.0, "c": 2.0}) == (-math.inf, math.inf)
