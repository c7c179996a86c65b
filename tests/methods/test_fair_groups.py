"""Methods that act on groups of people: against slow references, and in runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.fair_fed import FairFed
from fairflare.reporting.results import read_results
from tests.federation.test_groups import SITES, SMALL, federation

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(reports: dict[str, dict[str, Any]], samples: dict[str, int]) -> RoundInputs:
    sites = sorted(reports)
    return RoundInputs(0, 2, sites, samples, reports, {}, {}, {})


def report(accuracy: float, table: Any = None) -> dict[str, Any]:
    if table is None:
        return {"accuracy": accuracy, "groups": None, "group_counts": None}
    rows = np.asarray(table, float)
    return {"accuracy": accuracy, "groups": float(len(rows)), "group_counts": rows.reshape(-1).tolist()}


def of_two_classes(tp: int, fp: int, fn: int, tn: int) -> list[list[int]]:
    """Of both classes, as a site counts them."""
    return [[tn, fn, fp, tp], [tp, fp, fn, tn]]


SAMPLES = {"a": 100, "b": 300, "c": 600}
TABLES = {
    "a": [of_two_classes(8, 1, 2, 9), of_two_classes(4, 3, 6, 7)],
    "b": [of_two_classes(20, 5, 20, 35), of_two_classes(30, 5, 10, 35)],
}


@pytest.mark.parametrize("gap", ["equalised_odds", "equal_opportunity"])
def test_fair_fed_goes_by_the_gap_of_counts(gap: str) -> None:
    def slow(tables: list[Any]) -> float:
        tpr, fpr = [], []
        for group in range(2):
            tp, fp, fn, tn = (sum(table[group][1][k] for table in tables) for k in range(4))
            tpr.append(tp / (tp + fn))
            fpr.append(fp / (fp + tn))
        odds = [abs(tpr[0] - tpr[1])] + ([abs(fpr[0] - fpr[1])] if gap == "equalised_odds" else [])
        return max(odds)

    accuracies = {"a": 0.6, "b": 0.8, "c": 0.9}
    reports = {site: report(accuracies[site], TABLES.get(site)) for site in accuracies}  # c keeps its counts
    rule = FairFed(fairfed_beta=0.5, fairfed_attribute="sex", fairfed_gap=gap)
    found = rule.weigh(inputs(reports, SAMPLES))
    whole = slow(list(TABLES.values()))
    mean = 0.84  # by samples
    delta = {site: abs(whole - slow([table])) for site, table in TABLES.items()} | {"c": abs(mean - 0.9)}
    middle = sum(delta.values()) / 3
    omega = {site: max(SAMPLES[site] / 1000 - 0.5 * (delta[site] - middle), 0) for site in delta}
    total = sum(omega.values())
    assert found.sites == pytest.approx({site: value / total for site, value in omega.items()}, abs=1e-12)
    assert found.details["group_gap_of_all"] == pytest.approx(whole, abs=1e-12)
    assert math.isnan(found.details["group_gap"]["c"])


def test_without_an_attribute_fair_fed_is_as_it_was() -> None:
    reports = {site: report(value) for site, value in {"a": 0.6, "b": 0.8, "c": 0.9}.items()}
    found = FairFed(fairfed_beta=0.1).weigh(inputs(reports, SAMPLES))
    assert found.sites == pytest.approx({"a": 0.087333333333, "b": 0.307333333333, "c": 0.605333333333}, abs=1e-9)
    assert set(found.details) == {"accuracy_gap", "omega"}


def test_a_site_with_other_numbers_of_classes_goes_by_its_accuracy() -> None:
    odd = [[[1, 2, 3, 4]] * 3] * 2
    tables = {**TABLES, "c": odd}
    reports = {site: report(0.8, tables[site]) for site in tables}
    found = FairFed(fairfed_attribute="sex").weigh(inputs(reports, SAMPLES))
    assert math.isnan(found.details["group_gap"]["c"])
    with pytest.raises(ReportError, match="site 'c': field 'group_counts' has 7 entries, of 2 groups"):
        FairFed(fairfed_attribute="sex").check_report({"groups": 2.0, "group_counts": [1.0] * 7}, "c", None)


def test_fair_fed_with_an_attribute_runs(tmp_path: Path) -> None:
    local = federation(tmp_path / "data")
    local["sites"]["site-2"]["min_cases"] = 3  # of six validation images each sex has four and two: both stay
    of_task = {**SMALL, "fairfed_attribute": "sex", "fairfed_beta": 1.0}
    plan = make_plan("fair_fed", task="classification", sites=SITES, num_rounds=2, settings=of_task)
    results = read_results(run_local(plan, tmp_path / "run", local))
    told = results["rounds"][0]["details"]
    assert told["group_gap"]["site-1"] is not None
    assert told["group_gap"]["site-2"] is None
    assert told["group_gap_of_all"] == told["group_gap"]["site-1"]
    with pytest.raises(ValueError, match="fairfed_attribute needs fairfed_mode='original'"):
        FairFed(fairfed_mode="fedism", fairfed_attribute="sex")
