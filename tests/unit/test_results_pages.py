"""Test the pages under docs/: tables are the stored ones, and sentences about noise have stored figures."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fairflare_lab.compare.comparison import compare, comparison_of
from fairflare_lab.compare.difference_table import difference_table
from tests.unit.report_runs import read_all

from ..loaded import loaded

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = sorted(path.stem for path in (RESULTS / "data").glob("*.csv"))


def load_tool() -> Any:
    return loaded("tools/write_results.py")


tool = load_tool()


def rows_of(page: str) -> list[dict[str, str]]:
    """Read without the tool."""
    with (RESULTS / "data" / f"{page}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_pages_are_up_to_date_and_every_claim_is_backed(capsys: pytest.CaptureFixture[str]) -> None:
    """Check the pages; if this fails: run ``python tools/write_results.py`` and correct the named sentences."""
    code = tool.main(["--check"])
    assert not capsys.readouterr().err
    assert code == 0


@pytest.mark.parametrize("page", PAGES)
def test_a_results_page_has_its_origin_and_no_table_of_its_own(page: str) -> None:
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    assert re.search(rf"<!-- table: {page}(/\w+)? origin -->", text)
    outside = tool.TABLE.sub("", text)
    assert not [line for line in outside.splitlines() if line.startswith("|")], "a table that nothing checks"
    assert f"({page}.md)" in (RESULTS / "README.md").read_text(encoding="utf-8")
    made_by = rf"^Version [\d.]+, commit [0-9a-f]{{40}}, \d{{4}}-\d\d-\d\d\.\nOther .* `data/{page}.json`\.$"
    assert re.search(made_by, text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_stored_figures_agree_with_each_other(page: str) -> None:
    origin = json.loads((RESULTS / "data" / f"{page}.json").read_text(encoding="utf-8"))
    rows = rows_of(page)
    values = {(r["table"], r["row"], r["measure"]): float(r["mean"]) for r in rows if not r["reference"]}
    keys = [(r["table"], r["row"], r["reference"], r["measure"], r["seeds"]) for r in rows]
    assert len(set(keys)) == len(keys)
    for r in rows:
        assert r["table"] in origin["tables"]
        assert r["row"] in origin["methods"]
        if not r["reference"]:
            continue
        mean = float(r["mean"])
        a, b = ((r["table"], row, r["measure"]) for row in (r["row"], r["reference"]))
        if a in values and b in values:  # paired by seed: the mean difference is the difference of the means
            assert mean == pytest.approx(values[a] - values[b], abs=1.6e-4)
        if r["low"]:
            low, high = float(r["low"]), float(r["high"])
            if origin["tables"][r["table"]]["over"] != "images":  # else percentiles of draws
                assert mean == pytest.approx((low + high) / 2, abs=1.1e-3)
            outside = low > 0 or high < 0
            better = "better" if (mean < 0) == (r["measure"] == "std") else "worse"
            if r["p_holm"]:  # corrected
                assert (r["verdict"] in ("better", "worse")) == (float(r["p_holm"]) < 0.05)
                assert outside or r["verdict"] != better
            elif min(abs(low), abs(high)) > 5.1e-4:  # not rounded onto 0
                assert r["verdict"] == (better if outside else "within noise")
    for (table, row, measure), average in values.items():
        sites = [v for (t, r, m), v in values.items() if (t, r) == (table, row) and m not in tool.MEASURES]
        if measure == "average" and sites:
            assert average == pytest.approx(sum(sites) / len(sites), abs=1.1e-4)


LOSS = '<!-- claim: privacy_cost/reds "FedISM+ (L), no noise" worst{} -->'
S = (
    "Fed-LWR lowers the worst site by 0.03, {} seed noise. "
    '<!-- claim: privacy_cost/reds "Fed-LWR, no noise" worst=-0.03{} -->'
)


@pytest.mark.parametrize(
    "text",
    [
        S.format("within", "~"),
        "The worst site loses 0.083, beyond\nseed noise. " + LOSS.format("=-0.083!"),
        'Gained, beyond noise. <!-- claim: unseen/white_cells "FedGA, adapted"\nvs "FedGA" average* --> Other words.',
        "Beyond noise means what it means. <!-- claim: none -->",
        'Adapted is above FedGA, beyond noise. <!-- claim: unseen/white_cells "FedGA, adapted" vs "FedGA" average* -->',
        "| beyond repair | no noise |",
    ],
)
def test_what_is_backed(text: str) -> None:
    assert tool.problems(text) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (S.format("beyond", "!"), "has -0.0334 [-0.103, +0.037] (within noise)"),
        (S.format("beyond", "~"), "no stored figure is beyond seed noise"),
        (S.format("within", "~").replace("seed ", ""), "no stored figure is within noise"),
        (S.format("within", "~").replace("0.03", "0.06"), "claims worst=-0.06~, but privacy_cost/reds"),
        (S.format("within", "~").replace("by 0.03", "by a little"), "the sentence does not say 0.03"),
        (S.format("within", "~").replace("-0.03~", "+0.03~"), "claims worst=+0.03~, but privacy_cost/reds"),
        (
            S.format("within", "~").replace('"Fed-LWR', '"FedX'),
            "has no worst of 'FedX, no noise' against 'FedAvg, no noise'; rows: ",
        ),
        ("FedX wins, beyond noise.", "no claim names the stored figure"),
        ("FedX wins, beyond noise. Then more. <!-- claim: none -->", "no claim names the stored figure"),
        ("FedX wins, beyond the luck of three seeds.", "say 'beyond noise' or 'within noise'"),
        ("FedX is significantly better.", "say 'beyond noise' or 'within noise'"),
        ("(L) loses. " + LOSS.format("!"), "the sentence does not say so"),
        ('Beyond noise. <!-- claim: nowhere "FedAvg" worst* -->', "no stored tables of 'nowhere'"),
        (
            'Beyond seed noise.\n<!-- claim: privacy_cost/reds "FedISM+ (L), no noise" worst! --> More.',
            "a claim begins a line",
        ),
    ],
)
def test_what_is_not_backed(text: str, why: str) -> None:
    assert why in (tool.problems(text) or [""])[0]


def test_tables_in_marks_are_not_edited_by_hand(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    text = (RESULTS / "privacy_cost.md").read_text(encoding="utf-8")
    edited = text.replace("-0.0170 [-0.059, +0.025] |", "-0.0170 [-0.059, -0.025] ! |")
    assert edited != text
    assert tool.written(edited) == text
    with pytest.raises(ValueError, match="lacks its"):
        tool.written(text.replace("<!-- end of table -->", "", 1))
    with pytest.raises(ValueError, match="says nothing of a table 'mian'"):
        tool.written(text.replace("privacy_cost/xray measures", "privacy_cost/mian measures"))


def test_the_worst_sites_of_some_rows() -> None:
    table = tool._worst(tool.load("all_methods"), "cells", ["FedAvg", "FedRDN"]).splitlines()
    assert table[2] == "| FedAvg | 0.619 | 0.569 |  |"
    assert table[3] == "| FedRDN | 0.720 | 0.645 | +0.0759 [-0.146, +0.298] |"


def test_holm_by_hand() -> None:
    """Check t(2, .975) = 4.3027: .10, .02, .05 of half width .01 have t 43, 8.6, 21.5 and p .0005, .013, .002."""

    def figure(row: str, mean: float, measure: str = "average") -> Any:
        interval = (mean - 0.0095, mean + 0.0095)  # half a digit below .01, which is added for the rounding
        return tool.Figure("t", row, "r", measure, "0 1 2", mean, math.nan, *interval, "better", math.nan, math.nan)

    figures = [figure("a", 0.1), figure("b", 0.02, "std"), figure("c", 0.05, "worst")]
    assert [kept.row for kept in tool.holm_keeps(figures)] == ["a", "b", "c"]
    figures.append(figure("d", 0.0099))  # p .051 is lost; b's .013 counts twice
    assert [kept.row for kept in tool.holm_keeps(figures)] == ["a", "b", "c"]
    figures += [figure("e", 0.0), figure("f", 0.0)]  # now .013 counts four times
    assert [kept.row for kept in tool.holm_keeps(figures)] == ["a", "c"]


def test_ranks_are_those_that_the_intervals_leave() -> None:
    """Rank five rows by hand: d lies wholly below all, b wholly above a, d and the reference."""
    told = {"a": (-0.10, -0.20, 0.05), "b": (0.20, 0.10, 0.30), "c": (-0.05, -0.15, 0.15), "d": (-0.4, -0.5, -0.3)}
    none = (math.nan,) * 4
    figures = [
        tool.Figure("t", row, "", m, "0 1", 0.5 + told.get(row, (0,))[0], math.nan, math.nan, math.nan, "", *none[:2])
        for row in ("r", *told)
        for m in tool.MEASURES
    ]
    figures += [tool.Figure("t", row, "r", m, "0 1", d, math.nan, low, high, "within noise", math.nan, math.nan)
                for row, (d, low, high) in told.items() for m in tool.MEASURES]  # fmt: skip
    about = {"title": "x", "metric": "dice", "over": "seeds+images", "reference": "r", "corrected": True}
    made = tool._ranks(tool.Stored("page", figures, {"tables": {"t": about}}), ["t"])
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in made.splitlines()[2:7]]
    ranks = [("b", "1 (1-2)"), ("r", "2 (2-4)"), ("c", "3 (1-4)"), ("a", "4 (2-4)"), ("d", "5 (5-5)")]
    assert [(row[0], row[1]) for row in cells] == ranks
    assert "Ranks are by the worst site" in made


# ------------------------------------------------------------------------------------------------ a new page


def run(label: str, seed: int, by_site: dict[str, float], draws: dict[str, list[float]]) -> dict[str, Any]:
    info = {
        "label": label, "config": {"seed": seed}, "seed": seed, "num_rounds": 2, "sites": sorted(by_site),
        "primary_metric": "dice", "shown_metrics": ["dice"], "higher_is_better": {"dice": True},
        "measured": "personal" if label == "own" else "common",
    }  # fmt: skip
    test = {site: {"dice": value} for site, value in by_site.items()}
    return {"status": "completed", "info": info, "test": test, "rounds": [], "left_out": [], "resampled": draws}


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Make a folder as ``fairflare compare`` leaves it, of three runs a row."""
    folder, runs = tmp_path / "comparison", []
    for label, gain in (("FedAvg", 0.0), ("own", 0.1)):
        for seed in (0, 1, 2):
            by_site = {"a": 0.5 + gain + 0.01 * seed * (1 + gain), "b": 0.7 + 0.01 * seed}
            draws = {site: [value + 0.001 * (k % 7) * (1 + gain) for k in range(40)] for site, value in by_site.items()}
            runs.append(run(label, seed, by_site, draws))
            place = folder / "runs" / f"{label}-seed{seed}"
            (place / "fairflare").mkdir(parents=True)
            (place / "run.json").write_text(json.dumps({"plan": {"label": label, "method": "solo", "seed": seed}}))
            (place / "fairflare" / "results.json").write_text(json.dumps(runs[-1]))
    read = read_all(runs)
    (folder / "table.csv").write_text(compare(read, style="csv") + "\n")
    found = comparison_of(read, reference="FedAvg").differences
    (folder / "differences.csv").write_text(difference_table(found, "FedAvg", style="csv") + "\n")
    session = {
        "started": "2026-01-02T03:04:05+00:00", "command": ["fairflare", "compare", "a b"], "commit": "c0ffee",
        "processor": "a processor", "accelerator": None, "versions": {"torch": "2"},
        "data": {"a": {"datalist": "1", "files": 3, "sha256": "5e" * 32}}, "runs": [],
    }  # fmt: skip
    (folder / "provenance.json").write_text(json.dumps({"sessions": [session, session]}))
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load_tool()
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "DATA", tmp_path / "data")
    return module


def test_a_page_from_a_comparison(elsewhere: Any, comparison: Path, tmp_path: Path) -> None:
    elsewhere.take(comparison, "mine", "main", "my images")
    text = elsewhere.written((tmp_path / "mine.md").read_text(encoding="utf-8"))
    # By hand: site a gains .1, .101, .102 and the average half of that; the worst site is a.
    assert "| FedAvg | 0.6100 ± 0.0082 | 0.1000 ± 0.0000 | 0.5100 ± 0.0082 |  |  |  |" in text
    assert "| own | 0.6605 ± 0.0086 | 0.0495 ± 0.0004 | 0.6110 ± 0.0090 | +0.0505 [" in text
    assert re.search(r"\+0\.1010 \[\+0\.\d{3}, \+0\.\d{3}\] \*", text)
    assert "Version not recorded, commit c0ffee, 2026-01-02.\nOther versions, processor and checksums" in text
    origin = json.loads((tmp_path / "data" / "mine.json").read_text())
    assert (origin["processor"], origin["versions"]["torch"]) == ("a processor", "2")
    assert origin["data"]["a"]["sha256"] == "5e" * 32
    assert "fairflare compare 'a b'" in text
    assert "seeds and test cases" in text
    assert 'With each site\'s own model: "own".' in text
    backed = 'Better, beyond noise. <!-- claim: mine "own" average=+0.05* a=+0.10* -->'.replace(
        "Better", "By 0.05 and 0.10"
    )
    assert elsewhere.problems(backed) == []
    assert elsewhere.problems(backed.replace("* a", "~ a"))
    # A table more, and the same again: nothing twice.
    elsewhere.take(comparison, "mine", "again", "my images")
    elsewhere.take(comparison, "mine", "main", "my images")
    stored = elsewhere.load("mine")
    assert len(stored.figures) == 2 * (5 * 2 + 5)
    assert math.isclose(stored.find("again", "own", "a", "FedAvg").mean, 0.101)


def test_intervals_without_images_are_said_to_be_over_seeds(elsewhere: Any, comparison: Path) -> None:
    file = comparison / "differences.csv"
    rows = list(csv.DictReader(file.read_text().splitlines()))
    for row in rows:
        row["images_sd"] = ""
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    elsewhere.take(comparison, "mine", "main", "my images")
    assert elsewhere.load("mine").about("main")["over"] == "seeds"
    assert elsewhere.problems('Beyond noise. <!-- claim: mine "own" average* -->')


@pytest.mark.parametrize("changed", ["commit", "data", "processor"])
def test_a_comparison_of_two_codes_or_data_is_no_page(elsewhere: Any, comparison: Path, changed: str) -> None:
    path = comparison / "provenance.json"
    content = json.loads(path.read_text())
    content["sessions"][1][changed] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="made with 2 codes, machines or data"):
        elsewhere.take(comparison, "mine", "main", "my images")


def test_a_figure_that_a_site_keeps_is_said_to_be_kept(elsewhere: Any, comparison: Path, tmp_path: Path) -> None:
    file = comparison / "table.csv"
    text = file.read_text()
    assert text.count("0.51,") == 2  # site a and the worst of FedAvg
    file.write_text(re.sub(r"0\.51,[^,]*,", "suppressed,,", text, count=1))
    elsewhere.take(comparison, "mine", "main", "my images")
    page = elsewhere.written((tmp_path / "mine.md").read_text(encoding="utf-8"))
    assert "| FedAvg | suppressed | 0.7100 ± 0.0082 |" in page


def test_only_sites_and_measures_are_taken_and_all_runs_must_be_in_the_table(elsewhere: Any, comparison: Path) -> None:
    file = comparison / "table.csv"
    head, *rows = file.read_text().splitlines()
    file.write_text("\n".join([f"{head},share mean,share sd", *(f"{row},0.5,0.1" for row in rows)]) + "\n")
    elsewhere.take(comparison, "mine", "main", "my images")
    assert {figure.measure for figure in elsewhere.load("mine").figures} == {"a", "b", "average", "std", "worst"}
    extra = comparison / "runs" / "own-seed3" / "fairflare"
    extra.mkdir(parents=True)
    (extra / "results.json").write_text(json.dumps(run("own", 3, {"a": 0.5, "b": 0.5}, {})))
    with pytest.raises(ValueError, match="not of all 7 runs"):
        elsewhere.take(comparison, "mine", "main", "my images")


def test_a_folder_without_differences_is_no_page(elsewhere: Any, comparison: Path) -> None:
    (comparison / "differences.csv").unlink()
    with pytest.raises(ValueError, match=r"differences\.csv is missing"):
        elsewhere.take(comparison, "mine", "main", "my images")


@pytest.mark.parametrize(
    ("sites", "rounds", "seeds", "expected"),
    [
        ([1], [1], [4], "1 row, seed 4, 1 round, 1 site: 1 run, 1 min of run time in all."),
        ([3, 2], [5, 5], [1, 0], "1 row, seeds 0, 1, 5 rounds, 2 sites or 3 sites: 2 runs, 1 min of run time in all."),
    ],
)
def test_what_ran_says_how_many_of_each(sites: list[int], rounds: list[int], seeds: list[int], expected: str) -> None:
    runs = [
        {"info": {"label": "fed_avg", "seed": seed, "num_rounds": several, "sites": list(range(number))}}
        for number, several, seed in zip(sites, rounds, seeds, strict=True)
    ]
    assert tool.what_ran(runs) == expected
