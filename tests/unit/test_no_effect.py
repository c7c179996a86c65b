"""Test the messages about a method without effect: in log, results, table, page and comparison."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.reporting.documents import RoundRecord, RunResults
from fairflare.reporting.no_effect import same_weights, short_step, zero_everywhere
from fairflare.reporting.results import read_results
from fairflare.reporting.table import fairness_table
from fairflare_lab.compare.comparison import compare
from tests.unit.report_runs import read

TINY: dict[str, Any] = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.3, "local_epochs": 1}


@pytest.mark.parametrize(("step", "warns"), [(1.0, False), (0.01, False), (0.0099, True), (0.0, True), (1.7, False)])
def test_a_step_of_less_than_a_hundredth(step: float, warns: bool) -> None:
    found = short_step(step)
    assert bool(found) == warns
    for warned in found:
        assert (warned.site, warned.kind, warned.value, warned.used) == ("", "short step", 1 - step, step)
        assert f"a step of {step:.2g} of the sites' mean change: the model hardly moves" in warned.text


def of(**sites: float) -> RoundRecord:
    return RoundRecord(0, site_weights=sites)


def by_layer(*layers: Sequence[float]) -> RoundRecord:
    named = {f"l{k}": {s: {"weight": w} for s, w in zip("abc", found, strict=False)} for k, found in enumerate(layers)}
    return RoundRecord(0, layers=named)


@pytest.mark.parametrize(
    ("rounds", "says"),
    [
        ([of(a=0.5, b=0.5)], "in its only round"),
        ([of(a=0.5, b=0.5), of(a=1 / 3, b=1 / 3, c=1 / 3)], "in all 2 rounds"),
        ([of(a=0.504, b=0.496), of(a=0.496, b=0.504)], "in all 2 rounds"),
        ([of(a=0.5, b=0.5), of(a=1.0)], "in its only round"),  # of one site there is nothing to weigh
        ([by_layer((0.5, 0.5), (0.5, 0.5))], "in its only round"),
        ([of(a=0.506, b=0.494)], None),
        ([of(a=0.5, b=0.5), of(a=0.6, b=0.4)], None),
        ([of(a=0.6, b=0.4), of(a=0.5, b=0.5)], None),
        ([by_layer((0.5, 0.5), (0.5, 0.5)), by_layer((0.5, 0.5), (0.6, 0.4))], None),
        ([of(a=1.0)], None),
        ([RoundRecord(0)], None),
        ([], None),
    ],
)
def test_weights_that_never_differ(rounds: list[RoundRecord], says: str | None) -> None:
    found = same_weights(rounds)
    assert len(found) == (says is not None)
    for warned in found:
        assert warned.kind == "same weights"
        assert f"the same weight for every site {says} (within 1 %)" in warned.text


def test_a_metric_that_is_0_everywhere() -> None:
    test = {"a": {"dice": 0.0, "rare": 0.0, "iou": 0.0}, "b": {"dice": 0.0, "rare": None, "iou": 1e-9}, "c": {}}
    assert zero_everywhere(read(test=test), ["dice", "rare", "iou", "none"]) == ["dice", "rare"]


def test_which_methods_mean_to_weigh() -> None:
    found = {name: make_plan(name).rule.weighs for name in all_methods()}
    assert [name for name, weighs in found.items() if not weighs] == [
        "bsm_fl", "bsm_kd", "cffl", "cgsv", "creff", "crt", "ditto", "fed_avg", "fed_avg_m", "fed_bn", "fed_dyn",
        "fed_lc", "fed_lesam", "fed_lf", "fed_mgda", "fed_opt", "fed_prox", "fed_rdn", "flex_fair", "ldam",
        "logit_adjustment", "moon", "scaffold", "solo",
    ]  # fmt: skip
    assert not make_plan("fed_ism", settings={"saga": False}).rule.weighs
    assert not make_plan("fed_mrl", settings={"weighting": "samples"}).rule.weighs


def run(method: str, folder: Path, settings: dict[str, Any], rounds: int = 2) -> RunResults:
    plan = make_plan(method, sites=2, num_rounds=rounds, settings={**TINY, **settings})
    results = read_results(run_local(plan, folder))
    assert results.status == "completed"
    return results


def test_a_frozen_run_says_so_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the paper's L with Adam in a network of usual size."""
    monkeypatch.delenv("FAIRFLARE_REPORT", raising=False)  # with the page
    caplog.set_level(logging.INFO)
    results = run("q_fed_avg", tmp_path, {"lipschitz": 1e6})
    steps = [record.values["step"] for record in results.rounds]
    assert max(steps) < 1e-2
    text = "of the sites' mean change: the model hardly moves"
    for record, step in zip(results.rounds, steps, strict=True):
        (warned,) = [w for w in record.warnings if w.kind == "short step"]
        assert (warned.site, warned.used) == ("", pytest.approx(step))
    assert sum(text in entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING) == 2
    shown = " ".join(fairness_table(results).split())
    assert f"every site in rounds 0-1: a step of {min(steps):.2g} {text}" in shown
    (page,) = tmp_path.rglob("report.html")
    assert "the model hardly moves" in page.read_text()
    compared = " ".join(compare([results], style="text").split())
    assert "q_fed_avg: short step (in 1 of its 1 runs)." in compared


def test_the_default_moves_and_is_silent(tmp_path: Path) -> None:
    results = run("q_fed_avg", tmp_path, {})
    assert [record.values["step"] >= 0.5 - 1e-9 for record in results.rounds] == [True, True]
    assert not {w.kind for r in results.rounds for w in r.warnings} & {"short step", "same weights"}


def test_weights_that_stay_uniform_are_told_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check q = 0, which takes the losses out of the weights."""
    caplog.set_level(logging.INFO)
    results = run("q_fed_avg", tmp_path, {"q": 0.0})
    assert [[w.kind for w in record.warnings] for record in results.rounds] == [[], ["same weights"]]
    text = "the same weight for every site in all 2 rounds (within 1 %): what the method weighs by made no difference"
    assert f"every site in round 1: {text}" in " ".join(fairness_table(results).split())
    assert sum(text in entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING) == 1
    assert "q_fed_avg: same weights (in 1 of its 1 runs)." in compare([results])
    plain = run("fed_avg", tmp_path / "b", {"weighting": "uniform"})
    assert [record.warnings for record in plain.rounds] == [[], []]  # it was asked for


def test_0_at_every_site_stands_in_table_page_and_comparison(tmp_path: Path) -> None:
    results = run("fed_avg", tmp_path, {}, rounds=1)
    assert "Nothing was learnt" not in fairness_table(results)
    results.cells = [replace(cell, value=0.0) for cell in results.cells]  # the loss too, of which less is better
    del results.columns
    line = "Nothing was learnt: Dice is 0 at every site."
    assert line in " ".join(fairness_table(results).split())
    assert compare([results], style="text").startswith(
        "Nothing was learnt: Dice is 0 at every site (in 1 of 1 run of fed_avg).\n"
    )
