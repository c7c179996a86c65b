"""Test that methods learn at least as much as a plain loop less a margin, and that failures are named."""

from __future__ import annotations

from typing import Any

import pytest

from ..loaded import loaded

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]
ROUNDS = 3  # enough to tell; the page's figures are of 8


@pytest.fixture(scope="module")
def bench() -> Any:
    return loaded("benchmarks/bench_quality.py")


def test_fed_avg_and_q_fed_avg_keep_up(bench: Any) -> None:
    for one in bench.measure(["q_fed_avg", "fed_avg"], rounds=ROUNDS):
        assert one.centralised > 0.4  # else there was nothing to be learned
        assert not one.behind, one


def test_one_that_does_not_learn_is_named(bench: Any) -> None:
    """Check q-FedAvg with the paper's constant under Adam: steps of a ten-thousandth of the mean change."""
    (one,) = bench.measure(["q_fed_avg"], {"lipschitz": "rate"}, rounds=ROUNDS)
    assert one.behind
    assert one.reached < 0.3
