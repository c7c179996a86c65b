"""Who gains from joining: figures, intervals and sentences, against scipy and plain loops."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.core.statistics.intervals import certainty
from fairflare.reporting.compare.matrix import (
    Matrix,
    RunMatrix,
    TestedModel,
    joining_in_words,
    matrix_of,
    matrix_table,
)
from fairflare.reporting.page.matrix import draw_matrix
from fairflare.reporting.page.style import drawn
from fairflare.reporting.page.write import write_report
from tests.unit.report_runs import document, write_comparison

SITES = ("A", "B", "C")
ALONE = {"A": 0.50, "B": 0.80, "C": 0.60}
TOGETHER = {"A": 0.70, "B": 0.60, "C": 0.59}


def moved(values: dict[str, float], by: float) -> dict[str, float]:
    return {site: value + by for site, value in values.items()}


def run(label: str, seed: int, values: dict[str, float], *, alone: bool = False) -> tuple[dict[str, Any], RunMatrix]:
    measured = {"info": {"measured": "personal" if alone else "common"}}
    tests = {site: {"dice": value} for site, value in values.items()}
    models = [TestedModel(of="", tests=tests)]
    if alone:  # away from home a model is worth half
        models = [
            TestedModel(of=of, tests={s: {"dice": v if s == of else v / 2} for s, v in values.items()}) for of in SITES
        ]
    return document(label, seed, values, **measured), RunMatrix(alone=alone, models=models)


def runs(seeds: int = 3) -> list[tuple[dict[str, Any], RunMatrix]]:
    noise = [0.0, 0.011, -0.007]
    return [
        one
        for seed in range(seeds)
        for one in (
            run("fed_avg", seed, moved(TOGETHER, noise[seed])),
            run("solo", seed, moved(ALONE, noise[(seed + 1) % 3]), alone=True),
        )
    ]


def test_the_differences_are_those_of_a_paired_t_test() -> None:
    found = {one.site: one for one in matrix_of(runs()).joining}
    noise = np.array([0.0, 0.011, -0.007])
    for site in SITES:
        differ = TOGETHER[site] + noise - (ALONE[site] + np.roll(noise, -1))
        low, high = stats.t.interval(0.95, 2, differ.mean(), stats.sem(differ))
        one = found[site]
        assert one.difference == pytest.approx(differ.mean())
        assert (one.low, one.high) == (pytest.approx(low), pytest.approx(high))
        assert one.p == pytest.approx(stats.ttest_1samp(differ, 0).pvalue)
    p = sorted((one.p or 1, site) for site, one in found.items())
    least = max(1.0 * 3 * p[0][0], 0.0)
    assert found[p[0][1]].p_holm == pytest.approx(least)
    assert [found[site].verdict for site in SITES] == ["gains", "loses", "within noise"]


def test_who_would_be_better_alone_is_named_with_how_sure_it_is() -> None:
    first, of_method = joining_in_words(matrix_of(runs()))
    assert first.startswith("Better alone: B with fed_avg (0.601, alone 0.801; -0.200 [-0.239, -0.161]")
    assert "95 % over 3 seeds, p (Holm) = 0.0" in first
    assert of_method.startswith("fed_avg: 1 of 3 sites are shown to gain (A), 1 to lose; lower than alone, which may")
    assert "C (0.591, alone 0.601" in of_method


def test_of_one_seed_the_test_patients_say_how_sure_it_is() -> None:
    found = runs(1)
    generator = np.random.default_rng(0)
    draws = generator.normal(0, 0.02, (2, 3, 200))
    for index, (results, _) in enumerate(found):
        values = TOGETHER if index == 0 else moved(ALONE, 0.011)
        results["resampled"] = {s: (values[s] + draws[index, k]).tolist() for k, s in enumerate(SITES)}
        results["resampled_units"] = {site: {"unit": "patients", "count": 20} for site in SITES}
    (a, b, c) = matrix_of(found).joining
    scatter = np.std(draws[0, 1] - draws[1, 1], ddof=1) * math.sqrt(20 / 19)
    df = 1 / (1 / 19 + 1 / 199)  # of 20 patients, known from 200 draws
    assert b.high is not None
    assert b.high - b.difference == pytest.approx(stats.t.ppf(0.975, df) * scatter, rel=1e-6)
    assert b.over == "20 test patients of one seed"
    assert (a.verdict, b.verdict, c.verdict) == ("gains", "loses", "within noise")


def test_without_seeds_and_draws_nothing_is_called_sure() -> None:
    found = matrix_of(runs(1))
    assert {one.verdict for one in found.joining} == {"not known"}
    first, second = joining_in_words(found)
    assert first == "No site is shown to be better alone."
    assert "B (0.600, alone 0.811; one seed and no draws of its test cases: how sure is not known)" in second


@pytest.mark.parametrize("higher", [True, False])
def test_less_is_a_gain_where_less_is_better(higher: bool) -> None:
    found = runs()
    for results, _ in found:
        results["info"]["higher_is_better"] = {"dice": higher, "loss": False}
    verdicts = {one.site: one.verdict for one in matrix_of(found).joining}
    assert verdicts["B"] == ("loses" if higher else "gains")


def test_the_table_has_every_model_at_every_site() -> None:
    rows = list(csv.DictReader(matrix_table(matrix_of(runs()), style="csv").splitlines()))
    assert [row["model"] for row in rows] == ["A alone", "B alone", "C alone", "fed_avg: common model"]
    shift = (0.011 - 0.007) / 3
    assert float(rows[0]["A mean"]) == pytest.approx(0.50 + shift)
    assert float(rows[0]["B mean"]) == pytest.approx((0.80 + shift) / 2)
    assert float(rows[3]["worst"]) == pytest.approx(0.59 + shift)


def test_the_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = matrix_of(runs())
    found.write(tmp_path)
    told = json.loads((tmp_path / "matrix.json").read_text())
    assert told["schema_version"] == 1
    assert Matrix.model_validate(told) == found


def test_the_picture_has_the_figures_in_its_cells() -> None:
    svg = drawn("matrix", lambda: draw_matrix(matrix_of(runs())), files=False).inline
    for figure in ("0.50", "0.40", "0.70", "SYNTHETIC"):
        assert f">{figure}" in svg or figure in svg


def test_without_what_sites_have_alone_nothing_is_said_of_joining() -> None:
    found = matrix_of([one for one in runs() if not one[1].alone])
    assert not found.joining
    assert "nothing is said of joining" in found.notes[0]


def test_the_page_has_the_matrix(tmp_path: Path) -> None:
    found = runs()
    folder = write_comparison(tmp_path / "c", [results for results, _ in found])
    for results, tested in found:
        info = results["info"]
        tested.write(folder / "runs" / f"{info['label']}-seed{info['seed']}/server/simulate_job/fairflare")
    page = write_report(folder, tmp_path / "out").read_text()
    assert "Alone or together" in page
    assert "Better alone: B with fed_avg" in page
    assert (tmp_path / "out" / "figures" / "matrix.svg").is_file()
    assert (tmp_path / "out" / "tables" / "joining.csv").is_file()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--hold-out", "each"], "--matrix and --hold-out exclude each other"),
        (["--simulator", "2"], "leave --simulator out"),
        (["--sites", "all"], "no model of one goes to another, and there is no matrix"),
    ],
)
def test_where_there_is_no_matrix(options: list[str], told: str, tmp_path: Path) -> None:
    given = ["compare", "fed_avg", "--matrix", "--sites", "3", "--out", str(tmp_path / "c"), *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert told in result.stderr


def test_certainty_of_a_mean_over_sites_is_a_t_interval_over_the_seeds() -> None:
    values = np.array([[0.5, 0.7], [0.6, 0.6], [0.4, 0.9]])
    found = certainty(values, None, [math.inf, math.inf])
    low, _ = stats.t.interval(0.95, 2, values.mean(1).mean(), stats.sem(values.mean(1)))
    assert found.mean - found.half == pytest.approx(low)
    assert (found.seeds, found.patients) == (True, False)
    assert math.isnan(certainty([[0.5], [0.5]], np.full((2, 1, 20), 0.5), [9]).half)  # nothing scatters: not known
