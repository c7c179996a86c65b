"""Test FedCostWAvg, FedPIDAvg and FedPID: worked numbers, sites that come and go, odd costs, what is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.fed_pid import FedPID, ReportCost

from .own import SITES, Plane, Points, run

SAMPLES = {"a": 50, "b": 30, "c": 20, "d": 100}
COSTS = ((1.0, 1.0, 1.0), (0.8, 0.9, 0.5), (0.6, 0.85, 0.55))
FORMS = ("fed_cost_w_avg", "fed_pid_avg", "fed_pid")


def rounds(form: Any, costs: Sequence[Mapping[str, float]], rule: FedPID | None = None) -> list[dict[str, float]]:
    """Return a rule's weights in rounds with these costs by site."""
    rule, found = rule or FedPID(form=form), []
    for number, told in enumerate(costs):
        reports: dict[str, dict[str, Any]] = {site: {"cost": cost} for site, cost in told.items()}
        weights = rule.weigh(RoundInputs(number, 9, sorted(told), SAMPLES, reports, {}, {}, {})).sites
        assert weights is not None
        assert math.fsum(weights.values()) == pytest.approx(1)
        found.append(weights)
    return found


def named(costs: Sequence[Sequence[float]] = COSTS) -> list[dict[str, float]]:
    return [dict(zip("abc", told, strict=True)) for told in costs]


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("fed_cost_w_avg", (0.451944, 0.310367, 0.237689)),
        ("fed_pid_avg", (0.618333, 0.263194, 0.118472)),  # 0.708333, .285694, .005972 with a negative number as it is
        ("fed_pid", (0.625, 0.240, 0.135)),
    ],
)
def test_worked_numbers_and_a_run_that_was_killed(form: Any, wanted: Any) -> None:
    found = rounds(form, named())
    assert found[0] == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    assert list(found[2].values()) == pytest.approx(wanted, abs=6e-7)
    first, second = FedPID(form=form), FedPID(form=form)
    rounds(form, named()[:2], first)
    second.load_state_dict(first.state_dict())
    assert rounds(form, named()[2:], second) == found[2:]


@pytest.mark.parametrize("form", FORMS)
def test_costs_belong_to_sites_by_name(form: Any) -> None:
    """Check a site that is absent in the second round: its cost of the first round is the one before the third."""
    costs = named()
    del costs[1]["b"]
    skipped = rounds(form, costs)[2]
    costs[1]["b"] = 1.0  # as if it had said the same again
    if form == "fed_pid_avg":
        repeated = FedPID(form=form)
        rounds(form, costs[:2], repeated)
        repeated._costs["b"].pop()
        assert skipped == rounds(form, costs[2:], repeated)[0]
    else:
        assert skipped == pytest.approx(rounds(form, costs)[2])


@pytest.mark.parametrize("form", FORMS)
def test_a_new_site_counts_as_the_mean_of_the_others(form: Any) -> None:
    costs = [*named()[:2], {**named()[2], "d": 0.7}]
    n = {"a": 0.25, "b": 0.15, "c": 0.1, "d": 0.5}
    fall = {"a": 0.2, "b": 0.05, "d": 0.2 / 3, "c": 0.0}  # the mean is of the numbers as they are, -0.05 too
    ratio = {"a": 0.8 / 0.6, "b": 0.9 / 0.85, "c": 0.5 / 0.55}
    ratio["d"] = sum(ratio.values()) / 3
    gained = {"a": 0.4, "b": 0.15, "c": 0.45, "d": 1 / 3}
    total = {"a": 2.4, "b": 2.75, "c": 2.05, "d": 0.7}
    for site, weight in rounds(form, costs)[2].items():
        if form == "fed_cost_w_avg":
            wanted = 0.5 * n[site] + 0.5 * ratio[site] / sum(ratio.values())
        else:
            third = total if form == "fed_pid_avg" else gained
            wanted = 0.45 * n[site] + 0.45 * fall[site] / sum(fall.values()) + 0.1 * third[site] / sum(third.values())
        assert weight == pytest.approx(wanted), site


@pytest.mark.parametrize("form", FORMS)
def test_odd_costs(form: Any) -> None:
    """Check costs that rise everywhere, that are 0, that are no number, and a site by itself."""
    rises = rounds(form, named([(0.5, 0.5, 0.5), (0.6, 0.6, 0.6)]))[1]
    assert rises == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, abs=0.1)
    if form == "fed_pid":
        assert rises == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    zero = rounds(form, named([(0.5, 0.5, 0.5), (0.0, 0.5, 0.5), (0.0, 0.5, 0.5)]))
    assert all(weight >= 0 for told in zero for weight in told.values())
    unknown = rounds(form, named([(math.nan,) * 3, (math.nan,) * 3]))
    assert unknown[1] == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})
    again = rounds(form, named([(1.0, 1.0, 1.0), (0.8, math.nan, 0.6), (0.7, 0.5, 0.5)]))
    assert again[2]["b"] > again[1]["b"]  # its cost before the NaN counts
    assert rounds(form, [{"a": 1.0}, {"a": 0.5}]) == [{"a": 1.0}, pytest.approx({"a": 1.0})]


def test_the_sum_is_of_the_last_six_costs() -> None:
    rule = FedPID()
    costs = [(1.0 - 0.01 * n, 1.0 - 0.02 * n, 1.0) for n in range(9)]
    found = rounds("", named(costs), rule)[-1]
    for k, site in enumerate("abc"):
        total = [math.fsum(told[k] for told in costs[3:]) for k in range(3)]
        wanted = 0.45 * (0.5, 0.3, 0.2)[k] + 0.45 * (1 / 3, 2 / 3, 0.0)[k] + 0.1 * total[k] / sum(total)
        assert found[site] == pytest.approx(wanted)


def test_the_cost_is_of_the_trained_model(tmp_path: Path) -> None:
    task = Plane(norm="none")
    made, sites = run(tmp_path, ReportCost(optimizer="sgd", learning_rate=0.5), task=task, rule=FedPID(), num_rounds=1)
    start = made.net.tasks[0].params
    for site in SITES:
        model, points = task.build_model(), Points(site)
        update = sites.sent[site, "train", 0].params
        model.load_state_dict({name: tensor + update[name] for name, tensor in start.items()})
        loss = torch.nn.functional.cross_entropy(model(points.inputs), points.targets)
        assert made.results["rounds"][0]["reports"][site]["cost"] == pytest.approx(float(loss.detach()), rel=1e-5)
