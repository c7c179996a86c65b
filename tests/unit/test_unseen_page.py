"""The page of a comparison that leaves sites out, and the leads of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fairflare.reporting.compare.unseen import Unseen, unseen_of
from fairflare.reporting.page.material import only_left_out, read_material
from fairflare.reporting.page.unseen import unseen_page
from fairflare.reporting.page.write import build, write_report
from tests.unit.report_runs import document, write_comparison, write_run

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


def held_out(folder: Path) -> Path:
    for results, unseen in runs():
        place = folder / "runs" / f"fed_avg-seed{results['info']['seed']}-without-{unseen.site}"
        write_run(place, results)
        unseen.write(place / "server" / "simulate_job" / "fairflare")
    return folder


def test_the_intervals_are_over_the_seeds() -> None:
    (row,) = unseen_of(runs()).rows
    by_seed = {
        "seen": 0.7 + np.array(NOISE), "unseen": 0.5 - np.array(NOISE), "gap": 0.2 + 2 * np.array(NOISE),
        "gain": 0.6 - (0.5 - np.array(NOISE)),
    }  # fmt: skip
    for name, values in by_seed.items():
        low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
        assert row.sure[name].mean == pytest.approx(values.mean())
        assert row.sure[name].half == pytest.approx((high - low) / 2)
    assert row.over == "3 seeds"


def test_the_gap_of_one_seed_is_over_the_same_patients() -> None:
    """A site's luck with its patients is in seen and unseen alike, so it is not in the gap."""
    luck = np.random.default_rng(0).normal(0, 0.1, (3, 200))
    found = runs(1)
    for results, unseen in found:
        test = results["test"]
        draws = {s: (test[s]["dice"] + luck["ABC".index(s)]).tolist() for s in test}
        results["resampled"] = draws
        results["resampled_units"] = {site: {"unit": "patients", "count": 10} for site in draws}
        own = UNSEEN[unseen.site] + luck["ABC".index(unseen.site)]
        unseen.resampled, unseen.unit, unseen.units = own.tolist(), "patients", 10
    (row,) = unseen_of(found).rows
    assert row.over == "the test patients of one seed"
    scatter = float((luck * np.sqrt(10 / 9)).mean(0).std(ddof=1))
    assert 1.9 * scatter < row.sure["unseen"].half < 2.4 * scatter
    assert not row.sure["gap"].half > 1e-9


def test_the_gain_of_one_seed_is_over_the_same_patients() -> None:
    """Of a model and the adapted one on the same draws: only what adaptation itself does differently scatters."""
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
    (row,) = unseen_of(found).rows
    assert row.sure["gain"].mean == pytest.approx(0.1)
    scatter = float((more * np.sqrt(10 / 9)).mean(0).std(ddof=1))
    assert 1.9 * scatter < row.sure["gain"].half < 2.4 * scatter
    for _, unseen in found:
        unseen.adapted_resampled = []  # of an older run: one seed and no draws of the adapted model
    assert np.isnan(unseen_of(found).rows[0].sure["gain"].half)


def test_the_page_of_left_out_sites(tmp_path: Path) -> None:
    page = write_report(held_out(tmp_path / "c"), tmp_path / "out").read_text()
    assert "3 sites left out in turn" in page
    assert "Unseen hospitals: fed_avg has 0.51" not in page
    assert "fed_avg has 0.50 ± 0.06 at sites that it was not trained at and 0.70 ± 0.06 at those that it was" in page
    assert "over 3 seeds" in page
    assert "With norm statistics of its own images a site has 0.600 (0.10 ± 0.06 more, beyond noise)" in page
    assert (tmp_path / "out" / "figures" / "unseen.svg").is_file()


def test_methods_stand_as_they_were_compared_and_the_first_leads(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for label in ("a_last", "b_first"):
        for results, unseen in runs():
            results["info"]["label"] = label
            unseen.adapted = {"dice": UNSEEN[unseen.site] - 0.1}
            place = folder / "runs" / f"{label}-seed{results['info']['seed']}-without-{unseen.site}"
            write_run(place, results)
            unseen.write(place / "server" / "simulate_job" / "fairflare")
    found = only_left_out(folder)
    assert found is not None
    assert [row.label for row in found[0].rows] == ["a_last", "b_first"]
    (folder / "unseen.csv").write_text("method,seeds\nb_first,3\na_last,3\n")
    found = only_left_out(folder)
    assert found is not None
    assert [row.label for row in found[0].rows] == ["b_first", "a_last"]
    page = unseen_page(*found)
    assert page.leads[0].text.startswith("Unseen hospitals: b_first has ")
    assert " less, beyond noise)" in page.leads[0].text
    assert "(-" not in page.leads[0].text
    (words,) = page.sections[0].words  # what leads is not said again
    assert words.startswith("a_last has ")


def test_both_kinds_of_runs_have_one_page(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path, [document("fed_avg", seed, SEEN) for seed in range(3)])
    material = read_material(held_out(folder))
    assert len(material.runs) == 3
    assert [lead.section for lead in build(material).leads] == ["results", "unseen"]


def test_groups_of_people_have_their_place_in_the_middle(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path, [document("fed_avg", seed, SEEN) for seed in range(3)])
    material = read_material(held_out(folder))
    values = {"F": {"auc": 0.8}, "M": {"auc": 0.6}}
    of = {
        "all": {"auc": 0.7},
        "groups": values,
        "worst": {"auc": "M"},
        "gaps": {"auc_gap": 0.2},
        "cases": {"F": 9, "M": 8},
    }
    material.runs[0].document["groups"] = {
        "attributes": {"sex": ["F", "M"]}, "kept": {}, "pooled": {"sex": of}, "sites": {"site-1": {"sex": of}},
    }  # fmt: skip
    leads = build(material).leads
    assert [lead.section for lead in leads] == ["results", "groups", "unseen"]
    told = "By sex, the lowest auc with fed_avg is that of M, 0.200 below the best (how sure is not known)."
    assert leads[1].text == f"Between groups of people: {told}"
    assert leads[1].picture is not None
    assert leads[1].picture.alt == (
        "auc by sex: F from 0.800 (site-1) to 0.800 (site-1), 0.800 over all sites; "
        "M from 0.600 (site-1) to 0.600 (site-1), 0.600 over all sites."
    )
    assert leads[1].picture.caption.startswith("Of fed_avg, seed 0. ")
    section = next(section for section in build(material).sections if section.name == "groups")
    assert not section.words  # said once, at the head
    assert leads[1].picture.name == "groups_of_sex"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(material.runs[0].document, "groups", None)
        assert [lead.section for lead in build(material).leads] == ["results", "unseen"]
