"""Methods learn at least what a plain loop over all images learns, less a margin; one that does not learn is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]
FILE = Path(__file__).parents[2] / "benchmarks" / "bench_quality.py"
ROUNDS = 3  # enough to tell; the page's figures are of 8


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_quality", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_fed_avg_and_q_fed_avg_keep_up(bench: Any) -> None:
    for one in bench.measure(["q_fed_avg", "fed_avg"], rounds=ROUNDS):
        assert one.centralised > 0.4  # else there was nothing to be learned
        assert not one.behind, one


def test_one_that_does_not_learn_is_named(bench: Any) -> None:
    """q-FedAvg with the paper's constant under Adam: steps of a ten-thousandth of the mean change."""
    (one,) = bench.measure(["q_fed_avg"], {"lipschitz": "rate"}, rounds=ROUNDS)
    assert one.behind
    assert one.reached < 0.3
