"""Test the page of a comparison that leaves sites out, and the leads of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fairflare.core.statistics.group_sums import sums_of
from fairflare.reporting.documents import RunResults
from fairflare.reporting.layout import MISSING
from fairflare_lab.compare.group_gaps import collect_left_out, gap_table
from fairflare_lab.compare.left_out import Unseen
from fairflare_lab.compare.unseen import Certainty, unseen_of
from fairflare_lab.page.material import Material, read_material
from fairflare_lab.page.write import build, write_report
from tests.sections import groups_before
from tests.unit.report_runs import document, read, write_comparison, write_run
from tests.unit.test_report import Read

SEEN = {"A": 0.8, "B": 0.7, "C": 0.6}
UNSEEN = {"A": 0.5, "B": 0.6, "C": 0.4}
NOISE = [0.0, 0.03, -0.02]


def runs(seeds: int = 3) -> list[tuple[dict[str, Any], Unseen]]:
    found = []
    for seed in range(seeds):
        for site in SEEN:
            values = {other: value + NOISE[seed] for other, value in SEEN.items() if other != site}
            figures = {"dice": UNSEEN[site] - NOISE[seed]}
            found.append((document("fed_avg", seed, values), Unseen(site=site, metrics=figures, adapted={"dice": 0.6})))
    return found


def as_read(found: Sequence[tuple[Any, ...]]) -> list[tuple[RunResults, Unseen]]:
    return [(read(**results), unseen) for results, unseen, *_ in found]


def half(sure: Certainty) -> float:
    return (sure.high - sure.low) / 2


def held_out(folder: Path) -> Path:
    for results, unseen in runs():
        place = folder / "runs" / f"fed_avg-seed{results['info']['seed']}-without-{unseen.site}"
        write_run(place, results)
        unseen.write(place / "server" / "simulate_job" / "fairflare")
    return folder


def test_the_intervals_are_over_the_seeds() -> None:
    (row,) = unseen_of(as_read(runs())).rows
    by_seed = {
        "seen": 0.7 + np.array(NOISE), "unseen": 0.5 - np.array(NOISE), "gap": 0.2 + 2 * np.array(NOISE),
        "gain": 0.6 - (0.5 - np.array(NOISE)),
    }  # fmt: skip
    for name, values in by_seed.items():
        low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
        assert row.sure[name].mean == pytest.approx(values.mean())
        assert (row.sure[name].low, row.sure[name].high) == pytest.approx((low, high))
    assert row.over == "3 seeds"


def test_a_gap_without_a_figure_where_a_model_was_trained_has_no_interval() -> None:
    found = runs()
    found[0][0]["test"] = {site: {"dice": None} for site in found[0][0]["test"]}
    (row,) = unseen_of(as_read(found)).rows
    assert row.figures["gap"].mean == pytest.approx(0.2 + np.mean([2 * noise for noise in NOISE[1:]])), (
        "of the other two seeds"
    )
    assert {*row.sure} == {"unseen", "gain"}


def test_gap_and_gain_of_one_seed_are_over_the_same_patients() -> None:
    """Check that a site's luck with patients is in seen, unseen and adapted alike: only adaptation scatters."""
    made = np.random.default_rng(1)
    luck, more = made.normal(0, 0.1, (3, 200)), made.normal(0, 0.02, (3, 200))
    found = runs(1)
    for results, unseen in found:
        at = "ABC".index(unseen.site)
        results["resampled"] = {
            s: (results["test"][s]["dice"] + luck["ABC".index(s)]).tolist() for s in results["test"]
        }
        results["resampled_units"] = {s: {"unit": "patients", "count": 10} for s in results["test"]}
        unseen.resampled, unseen.unit, unseen.units = (UNSEEN[unseen.site] + luck[at]).tolist(), "patients", 10
        unseen.adapted_resampled = (0.6 + luck[at] + more[at]).tolist()
    (row,) = unseen_of(as_read(found)).rows
    assert row.over == "the test patients of one seed"
    scatter = float((luck * np.sqrt(10 / 9)).mean(0).std(ddof=1))
    assert 1.9 * scatter < half(row.sure["unseen"]) < 2.4 * scatter
    assert not half(row.sure["gap"]) > 1e-9
    assert row.sure["gain"].mean == pytest.approx(0.1)
    scatter = float((more * np.sqrt(10 / 9)).mean(0).std(ddof=1))
    assert 1.9 * scatter < half(row.sure["gain"]) < 2.4 * scatter
    for _, unseen in found:
        unseen.adapted_resampled = []  # of an older run: one seed and no draws of the adapted model
    assert np.isnan(unseen_of(as_read(found)).rows[0].sure["gain"].low)


@pytest.mark.parametrize("seeds", [1, 2])
def test_figures_that_are_always_the_same_are_no_certainty(seeds: int) -> None:
    """Check a model that predicts one class, whose balanced accuracy is 0.5 for any seed and patients."""
    found = [(results, unseen) for results, unseen in runs(seeds) if unseen.site == "A"]
    for results, unseen in found:
        results["test"] = {site: {"dice": 0.5} for site in results["test"]}
        results["resampled"] = {site: [0.5] * 200 for site in results["test"]}
        results["resampled_units"] = {site: {"unit": "patients", "count": 3} for site in results["test"]}
        unseen.metrics, unseen.adapted = {"dice": 0.5}, {"dice": 0.9}
        unseen.resampled, unseen.unit, unseen.units, unseen.adapted_resampled = [0.5] * 200, "patients", 3, [0.9] * 200
    of = unseen_of(as_read(found))
    (row,) = of.rows
    assert row.over == ""
    assert all(np.isnan([sure.low, sure.high]).all() for sure in row.sure.values())
    page = build(Material([], "dice", True, "", [], "", [], [], unseen=of))
    assert page.title == "1 site left out"
    assert page.first == ["95 % intervals (fed_avg): none, as neither seeds nor draws of test cases scatter."]


def test_the_page_of_left_out_sites(tmp_path: Path) -> None:
    page = write_report(held_out(tmp_path / "c"), tmp_path / "out").read_text()
    assert "3 sites left out in turn" in page
    assert "95 % intervals (fed_avg): over 3 seeds; of other hospitals they say nothing." in page
    cells = Read(page).tables["unseen"]
    assert dict(zip(*cells, strict=True)) | {"seen": "0.70 ± 0.02", "unseen": "0.50 ± 0.02", "gain": "0.10 ± 0.02"} == (
        dict(zip(*cells, strict=True))
    )


def test_methods_stand_as_they_were_compared(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for label in ("a_last", "b_first"):
        for results, unseen in runs():
            results["info"]["label"] = label
            unseen.adapted = {"dice": UNSEEN[unseen.site] - 0.1}
            place = folder / "runs" / f"{label}-seed{results['info']['seed']}-without-{unseen.site}"
            write_run(place, results)
            unseen.write(place / "server" / "simulate_job" / "fairflare")
    assert [row.label for row in read_material(folder).unseen.rows] == ["a_last", "b_first"]  # type: ignore[union-attr]
    (folder / "unseen.csv").write_text("method,seeds\nb_first,3\na_last,3\n")
    material = read_material(folder)
    assert [row.label for row in material.unseen.rows] == ["b_first", "a_last"]  # type: ignore[union-attr]
    page = build(material)
    assert [row[0] for row in page.sections[0].parts[0].rows] == ["b_first", "a_last"]


def test_both_kinds_of_runs_have_one_page(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path, [document("fed_avg", seed, SEEN) for seed in range(3)])
    material = read_material(held_out(folder))
    assert len(material.runs) == 3
    assert {"results", "unseen"} < {section.name for section in build(material).sections}


# ------------------------------------------------------------------------------------------------ groups of people


def told_of(labels: Any, scores: Any, groups: Any) -> dict[str, dict[str, Any]]:
    of = {
        f"sex={name}": sums_of(labels, scores, groups == k, 20, 5) for k, name in enumerate(["F", "M", "unknown"])
    }  # fmt: skip
    return {name: {kind: values.tolist() for kind, values in sums.items()} for name, sums in of.items()}


def people(label: str = "fed_avg", right: float = 0.6) -> list[tuple[dict[str, Any], Unseen, Any]]:
    """Return two seeds of three left-out sites: M is right in ``right`` of the images, F in 9 of 10."""
    found = []
    for seed in range(2):
        for number, site in enumerate(SEEN):
            made = np.random.default_rng([seed, number])
            labels, groups = made.integers(0, 2, 60), made.integers(0, 2, 60)
            hit = made.random(60) < np.where(groups == 1, right, 0.9)
            first = np.where((labels == 0) == hit, 0.8, 0.2)
            scores = np.stack([first, 1 - first], 1)
            results = document(label, seed, {other: 0.8 for other in SEEN if other != site})
            gap, ends = 0.05 + 0.01 * number, [0.0, 0.1]
            results["groups"] = {
                "attributes": {"sex": ["F", "M", "unknown"]}, "group_bins": 20, "calibration_bins": 5, "sites": {},
                "pooled": {"sex": {"gaps": {"accuracy_gap": gap}, "gap_intervals": {"accuracy_gap": ends}}}, "kept": {},
            }  # fmt: skip
            told = told_of(labels, scores, groups)
            unseen = Unseen(site=site, metrics={"dice": 0.5}, groups=told)
            found.append((results, unseen, (hit, groups)))
    return found


def test_gaps_at_left_out_sites_are_those_of_all_their_images_together() -> None:
    found = people()
    rows = collect_left_out(as_read(found))
    assert [*rows] == ["fed_avg"]
    for seed in range(2):
        hit, groups = (np.concatenate([one[2][k] for one in found[3 * seed : 3 * seed + 3]]) for k in range(2))
        shares = [hit[groups == k].mean() for k in range(2)]
        of = groups_before(rows["fed_avg"][seed])["pooled"]["sex"]
        assert of["gaps"]["accuracy_gap"] == pytest.approx(shares[0] - shares[1], abs=1e-12)
        assert of["groups"]["M"]["images"] == (groups == 1).sum()
        assert of["worst"]["accuracy"] == "M"
    assert collect_left_out(as_read(found[:-1]))["fed_avg"][0].info.seed == 0
    assert len(collect_left_out(as_read(found[:-1]))["fed_avg"]) == 1  # seed 1 lacks a site
    table = gap_table(rows, "fed_avg")
    cells = {row[2]: row for row in table.rows if row[0] == "accuracy_gap"}
    assert [*cells] == [*rows]
    assert cells["fed_avg"][6].text == MISSING  # type: ignore[union-attr]


def test_sums_that_stay_at_a_left_out_site_are_in_no_gap(tmp_path: Path) -> None:
    found = people()
    for _, unseen, _ in found:
        if unseen.site == "A":
            unseen.groups["sex=M"] = {
                kind: np.full(np.shape(of), np.nan).tolist() for kind, of in unseen.groups["sex=M"].items()
            }
            unseen.groups_kept = ["sex=M"]
    for results, unseen, _ in found:  # as the files have it
        unseen.write(tmp_path)
        found[[one[0] for one in found].index(results)] = (results, Unseen.read(tmp_path), None)
    of = groups_before(collect_left_out(as_read(found))["fed_avg"][0])
    assert of["kept"] == {"A": ["sex=M"]}
    assert of["sites"]["A"]["sex"]["groups"]["M"].get("accuracy") is None
    counts = [of["sites"][site]["sex"]["groups"]["M"]["images"] for site in "BC"]
    assert of["pooled"]["sex"]["groups"]["M"]["images"] == sum(counts)


def test_who_did_not_ask_has_no_groups_at_left_out_sites() -> None:
    assert collect_left_out(as_read(runs())) == {}
