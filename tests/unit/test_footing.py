"""Test sites with different annotated structures on one footing: the spec's numbers, limits, direction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fairflare.core.statistics.footing import Footing, fit_effects, relative
from fairflare.core.weighting import power_weights
from fairflare.reporting.values import are_linked
from tests.unit.report_runs import read

ABC = Footing({"A": frozenset({"s1"}), "B": frozenset({"s2"}), "C": frozenset({"s1", "s2"})}, "dice")
DICE = {"A": {"dice_s1": 0.8}, "B": {"dice_s2": 0.6}, "C": {"dice_s1": 0.7, "dice_s2": 0.5}}
MEANS = {"A": 0.8, "B": 0.6, "C": 0.6}
LOSSES = {"A": {"loss_s1": 0.2}, "B": {"loss_s2": 0.4}, "C": {"loss_s1": 0.3, "loss_s2": 0.5}}
OWN_LOSS = {"A": 0.2, "B": 0.4, "C": 0.4}


def measured(cells: Any, means: Any, name: str = "dice") -> dict[str, dict[str, float]]:
    return {site: {name: means[site], **cells[site]} for site in cells}


def footing(**of: str) -> Footing:
    return Footing({site: frozenset(names.split()) for site, names in of.items()}, "dice")


def test_adjusted_as_worked_in_the_specification() -> None:
    found = ABC.make_comparable(measured(DICE, MEANS))
    assert {site: of["dice"] for site, of in found.items()} == pytest.approx({"A": 0.7, "B": 0.7, "C": 0.6})
    assert {site: of["own/dice"] for site, of in found.items()} == MEANS
    assert ABC.how == "adjusted"


def test_the_comparison_rests_on_the_one_site_that_links_the_others() -> None:
    assert ABC.bridges == ["C"]
    assert footing(A="s1 s2", B="s1 s2", C="s1", D="s2").bridges == []
    assert footing(A="s1", B="s2").bridges == []
    assert footing(A="s1 s2", B="s1", C="s1 s3").bridges == []  # all have s1


def test_shared_structures_alone_are_compared_where_there_are_any() -> None:
    # B marks s1 and s2, and is the worst in s2, which A does not have
    of = footing(A="s1", B="s1 s2")
    values = {"A": {"dice": 0.5, "dice_s1": 0.5}, "B": {"dice": 0.45, "dice_s1": 0.8, "dice_s2": 0.1}}
    assert {site: m["dice"] for site, m in of.make_comparable(values).items()} == {"A": 0.5, "B": 0.8}
    assert of.how == "shared"


def test_a_site_is_never_judged_by_a_structure_that_it_does_not_have() -> None:
    of = footing(A="s1", B="s1 s2", C="s1 s2")
    values = {"A": {"dice": 0.4, "dice_s1": 0.8, "dice_s2": 0.0}}  # it sent what is not its own
    values |= {site: {"dice": 0.6, "dice_s1": 0.7, "dice_s2": 0.5} for site in "BC"}
    found = of.make_comparable(values)
    assert min(found, key=lambda site: found[site]["dice"]) != "A"
    assert found["A"]["dice"] == 0.8
    assert "s2" not in of.cells(values, "dice")["A"]


def test_sites_that_no_structure_links_are_parts() -> None:
    of = footing(A="s1", B="s2 s3", C="s3", D="")
    assert of.parts == [["B", "C"], ["A"]]
    found = of.figures({"A": {"s1": 0.9}, "B": {"s2": 0.4, "s3": 0.6}, "C": {"s3": 0.7}, "D": {}})
    assert found["A"] == pytest.approx(0.9)
    assert found["C"] - found["B"] == pytest.approx(0.1)
    assert math.isnan(found["D"])


def test_equal_sets_change_nothing() -> None:
    of = footing(A="s1 s2", B="s1 s2")
    values = {"A": {"dice": 0.45, "dice_s1": 0.3, "dice_s2": 0.6}, "B": {"dice": 0.1, "dice_s1": 0.1, "dice_s2": 0.1}}
    assert of.make_comparable(values) == values
    assert not of.how
    reports = {"A": {"probe_loss": 0.3}, "B": {"probe_loss": 0.7}}
    assert of.reports(reports, {"probe_loss": "loss"}, values) is reports


def test_what_no_image_marks_does_not_count_though_all_have_the_same_then() -> None:
    of = footing(A="s1 s2", B="s1 s2").drop_empty({"A": {"s2": 0}, "B": {"s1": 4, "s2": 0}})
    values = {site: {"dice": 0.95, "dice_s1": 0.9, "dice_s2": 1.0} for site in "AB"}
    assert of.how == "shared"
    assert [m["dice"] for m in of.make_comparable(values).values()] == [0.9, 0.9]
    assert not footing(A="s1 s2", B="s1 s2").drop_empty({"A": {"s2": 3}}).how


def test_of_a_single_structure_a_site_whose_images_mark_none_has_no_figure() -> None:
    found = (
        footing(A="s1", B="s1").drop_empty({"B": {"s1": 0}}).make_comparable({"A": {"dice": 0.7}, "B": {"dice": 1.0}})
    )
    assert found["A"]["dice"] == 0.7
    assert math.isnan(found["B"]["dice"])


def test_own_means_are_never_ranked() -> None:
    test = {"A": {"dice": 0.7, "own/dice": 0.8, "auc": 0.9}}
    one, two = (read(test=test, footing={"parts": parts}) for parts in ([["A", "B"]], [["A"], ["B"]]))
    assert are_linked(one, "dice")
    assert not are_linked(two, "dice")
    assert are_linked(two, "auc")
    assert not are_linked(one, "own/dice")


def test_a_cell_without_a_value_leaves_the_site_without_a_figure() -> None:
    values = {"A": {"dice": 0.8, "dice_s1": 0.8}, "B": {"dice": 0.6, "dice_s1": math.nan, "dice_s2": 0.6}}
    found = footing(A="s1", B="s1 s2").make_comparable(values)
    assert found["A"]["dice"] == 0.8
    assert math.isnan(found["B"]["dice"])


@pytest.mark.parametrize("seed", range(5))
def test_what_is_additive_is_found_back(seed: int) -> None:
    random = np.random.default_rng(seed)
    u, v = random.random(6), random.random(4)
    v -= v.mean()
    has = random.random((6, 4)) < 0.6
    has[:, 0] |= ~has.any(1)
    has[0] = True  # links all
    cells = {f"site-{k}": {f"s{s}": u[k] + v[s] for s in range(4) if has[k, s]} for k in range(6)}
    assert list(fit_effects(cells).values()) == pytest.approx(u.tolist())


def test_metrics_of_test_lists_and_of_classes() -> None:
    of = footing(A="x", B="x y")
    values = {
        "A": {"clean/dice": 0.5, "clean/dice_x": 0.5, "balanced_accuracy": 0.9, "recall_x": 0.9, "accuracy": 0.9},
        "B": {"clean/dice": 0.4, "clean/dice_x": 0.6, "clean/dice_y": 0.2, "balanced_accuracy": 0.5, "recall_x": 0.7,
              "recall_y": 0.3, "accuracy": 0.4},
    }  # fmt: skip
    found = of.make_comparable(values)
    assert found["B"]["clean/dice"] == 0.6
    assert found["B"]["own/clean/dice"] == 0.4
    assert found["B"]["balanced_accuracy"] == 0.7
    assert found["B"]["accuracy"] == 0.4


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("q", "plain", "even"),
    [(1, (0.2, 0.4, 0.4), (0.28125, 0.3125, 0.40625)), (2, (1 / 9, 4 / 9, 4 / 9), (0.231429, 0.285714, 0.482857))],
)
def test_weights_as_worked_in_the_specification(q: float, plain: tuple[float, ...], even: tuple[float, ...]) -> None:
    assert list(power_weights(OWN_LOSS, q).values()) == pytest.approx(plain)
    reports = {site: {"probe_loss": loss} for site, loss in OWN_LOSS.items()}
    metrics = ABC.make_comparable(measured(LOSSES, OWN_LOSS, "loss"))
    found = ABC.reports(reports, {"probe_loss": "loss"}, metrics)
    losses = {site: report["probe_loss"] for site, report in found.items()}
    assert losses == pytest.approx({"A": 0.8, "B": 0.888889, "C": 1.155556}, abs=1e-6)
    assert list(power_weights(losses, q).values()) == pytest.approx(even, abs=1e-6)


def test_a_structure_of_one_site_is_neutral() -> None:
    assert relative({"A": {"s1": 0.01}, "B": {"s2": 0.9}}) == {"A": 1.0, "B": 1.0}


def test_a_loss_of_zero_stays_finite() -> None:
    assert all(map(math.isfinite, relative({"A": {"s1": 0.0}, "B": {"s1": 0.0}}).values()))


def test_losses_stay_where_no_site_tells_them_by_structure() -> None:
    metrics = {site: {"loss": loss} for site, loss in OWN_LOSS.items()}
    reports = {site: {"probe_loss": loss} for site, loss in OWN_LOSS.items()}
    assert ABC.reports(reports, {"probe_loss": "loss"}, metrics) == reports
    one = {**metrics, "A": {"loss": 0.2, "loss_s1": 0.2}}
    found = ABC.reports(reports, {"probe_loss": "loss"}, one)
    assert found["A"]["probe_loss"] == 1.0
    assert math.isnan(found["B"]["probe_loss"])  # a rule takes the others' mean


def test_scores_get_the_comparable_figures_distance() -> None:
    metrics = ABC.make_comparable(measured(DICE, MEANS))
    reports = {site: {"score": value, "miss": 1 - value, "steps": 3} for site, value in MEANS.items()}
    found = ABC.reports(reports, {"score": "score", "miss": "error"}, metrics)
    assert {s: r["miss"] for s, r in found.items()} == pytest.approx({"A": 0.3, "B": 0.3, "C": 0.4})
    assert {s: r["score"] for s, r in found.items()} == pytest.approx({"A": 0.7, "B": 0.7, "C": 0.6})
    apart = footing(A="s1", B="s2")
    two = {site: measured(DICE, MEANS)[site] for site in "AB"}
    assert (
        apart.reports({s: reports[s] for s in "AB"}, {"score": "score"}, apart.make_comparable(two))["A"]["score"]
        == 0.8
    )
