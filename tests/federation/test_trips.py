"""Test that a value is checked once, when it arrives, and not again in each sum."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.bench_trips import Trip, measured, whole

from fairflare.base.settings import build
from fairflare.federation.collecting.collector import Collector
from fairflare.federation.plan.bounds import FOR_HOSPITALS, Bounds
from fairflare.methods.base.catalog import all_methods

from .examples import whole_round

MOST = 0.15  # of the calls of an aggregation


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(**FOR_HOSPITALS)], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("method", ["fed_lwr", "fed_avg"])
def test_few_calls_of_a_sum_are_checks(
    method: str, bounds: Bounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trip = Trip()
    monkeypatch.setattr(Collector, "aggregate", whole(trip, Collector.aggregate))
    made = all_methods()[method]
    whole_round(build(made.rule, made.server), tmp_path, bounds=bounds)
    assert trip.trips == 1
    assert trip.calls.total() > 150
    assert 0 < trip.share < MOST, f"{trip.share:.0%} of {trip.calls.total()} calls: {trip.calls.most_common(12)}"


@pytest.mark.long
def test_every_trip_of_the_bench_is_taken() -> None:
    assert all(trip.trips and trip.calls for trip in measured(["mix=0.5"]).values())
