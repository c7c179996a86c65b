"""Test that compare, show, the report page and CSV files of one folder have the same figures and words."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fairflare.base.cases.resampling import units_of
from fairflare.cli.commands import app
from fairflare.reporting.results import read_document, read_results
from fairflare_lab.cli.compare.tables import report as _report
from fairflare_lab.compare.differences import MEASURES
from fairflare_lab.page.write import write_report
from tests.unit.report_runs import document, read_all, write_comparison
from tests.unit.test_report import Read

VERDICTS = ("better", "worse", "within noise", "cannot tell", "one seed", "other sites")
SITES = {"site-1": 12, "site-2": 20, "site-3": 15}  # patients, three images each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make six seeds, and rows with every verdict; ``noisy`` gains with every seed, but not over patients."""
    rng = np.random.default_rng(0)
    made = tmp_path_factory.mktemp("comparison")
    hard = {site: rng.normal(0.6, 0.1, count) for site, count in SITES.items()}
    taste = {site: rng.normal(0.02, 0.25, count) for site, count in SITES.items()}
    runs = []
    for name in ("fed_avg", "good", "bad", "noisy", "even", "wild", "short", "lacking"):
        for seed in range(1 if name == "short" else 6):
            luck = rng.normal(0, 1.5 if name == "wild" else 0.004)
            gain = {"good": 0.08, "bad": -0.08, "short": 0.3}.get(name, 0.0) + luck
            scores, resampled, told = {}, {}, {}
            for site, count in SITES.items():
                if name == "lacking" and site == "site-2":
                    continue
                of_patients = hard[site] + gain + (taste[site] if name == "noisy" else 0)
                images = np.repeat(of_patients, 3) + rng.normal(0, 0.02, 3 * count)
                units = units_of([("patient", str(k // 3)) for k in range(3 * count)], 3 * count)
                scores[site] = float(images.mean())
                resampled[site] = [float(images[one].mean()) for one in units.draw(site, 200)]
                told[site] = {"unit": units.kind, "count": count}
            head = {"resampled": resampled, "resampled_units": told, "info": {"synthetic": False}}
            runs.append(document(name, seed, scores, **head))
            if name == "lacking":
                runs[-1]["info"]["sites"] = list(SITES)
    write_comparison(made, runs)
    return made


def in_order(folder: Path) -> list[Path]:
    """Return the paths of the runs, the reference first."""
    return sorted((folder / "runs").iterdir(), key=lambda path: (not path.name.startswith("fed_avg"), path.name))


def cells_of(text: str) -> dict[tuple[str, str], list[str]]:
    """Return row and measure of the Markdown table of differences -> its other cells."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 7 and cells[1] in MEASURES:
            found[cells[0], cells[1]] = cells[2:]
    return found


def test_one_folder_gives_one_set_of_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = in_order(folder)
    runs = [read_results(path / "server/simulate_job/fairflare") for path in paths]
    runner: Any = SimpleNamespace(all=[], folder=folder, results=lambda: runs)
    monkeypatch.setenv("COLUMNS", "200")
    assert _report(runner, "fed_avg", None)[0] == 0
    capsys.readouterr()
    with (folder / "differences.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    of_compare = {(row["method"], row["measure"]): row for row in rows}
    words = {key: row["verdict"] for key, row in of_compare.items() if key[1] in MEASURES}
    assert {word for (_, measure), word in words.items() if measure == "average"} == set(VERDICTS)
    assert words["noisy", "average"] == "within noise"  # U1: the page called it better

    # The tables of the page are the same numbers, to the last digit.
    write_report(folder, folder / "report", overwrite=True)
    page = Read((folder / "report" / "index.html").read_text(encoding="utf-8"))
    for name in ("differences", "differences_sites"):
        with (folder / "report" / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                own = of_compare.pop((row["method"], row["measure"]))
                assert row == own
    assert not of_compare

    # Compare's Markdown, show's and the page's HTML are these numbers rounded.
    of_compare = {(row["method"], row["measure"]): row for row in rows}
    shown = CliRunner().invoke(app, ["show", "--markdown", *map(str, paths)])
    assert shown.exit_code == 0, shown.output
    markdown = cells_of((folder / "differences.md").read_text(encoding="utf-8"))
    assert markdown == cells_of(shown.output)
    assert {key: cells[1].lstrip("*! ") for key, cells in markdown.items()} == words
    assert all(cells[1].startswith("* ") == (words[key] == "better") for key, cells in markdown.items())
    for key, cells in markdown.items():
        own = of_compare[key]
        told = [float(text) for text in re.findall(r"[+-][\d.]+", cells[0])]
        exact = [float(own[name]) for name in ("mean", "low", "high") if own[name]]
        assert told == pytest.approx(exact, abs=0.051)  # one decimal at least
    html = {(row[0], row[1]): row for row in page.tables["differences"][1:]}
    for key, row in html.items():
        assert row[3].lstrip("*! ") == words[key]
    table = (folder / "table.csv").read_text(encoding="utf-8")
    assert CliRunner().invoke(app, ["show", "--csv", *map(str, paths)]).output.strip() == table.strip()
    results = (folder / "report" / "tables" / "results.csv").read_text(encoding="utf-8")
    for ours, theirs in zip(csv.DictReader(table.splitlines()), csv.DictReader(results.splitlines()), strict=True):
        for measure in MEASURES:
            assert ours[f"{measure} mean"] == theirs[f"{measure} mean"]


def test_compare_says_why_there_are_no_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [document(name, 0, {"site-1": 0.5, "site-2": 0.6}) for name in ("good", "bad")]
    runner: Any = SimpleNamespace(all=[], folder=tmp_path, results=lambda: read_all(runs))
    assert _report(runner, "fed_avg", None)[0] == 0
    assert "no differences: no run of fed_avg completed" in capsys.readouterr().err
    assert not (tmp_path / "differences.csv").exists()


@pytest.mark.long
def test_a_run_with_damaged_draws_is_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    runs = [read_document(path / "server/simulate_job/fairflare") for path in in_order(folder)]
    chosen = [run for run in runs if run["info"]["label"] in ("fed_avg", "noisy")]
    for number, (part, odd) in enumerate({"values": [0.5, "x"], "site": 7, "count": "3"}.items()):
        chosen[number]["vectors"][0][part] = odd
    page = Read(write_report(write_comparison(tmp_path, chosen), tmp_path / "r").read_text(encoding="utf-8"))
    for told in (
        "vectors[0].values[1] is no number",
        "vectors[0].site is no text",
        "vectors[0].count is no whole number",
    ):
        assert told in page.words
    assert f"Runs {len(chosen) - 3}" in page.words
