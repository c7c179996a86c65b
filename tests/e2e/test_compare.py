"""Test ``fairflare compare`` as users call it: uninterrupted, killed, and resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.long]

QUICK = ["--rounds", "2", "--sites", "2", "--at-once", "2", "--set", "local_epochs=1", "--set", "image_size=[32,32]"]
QUICK += ["--set", "phantom_cases=0.2"]


def command(folder: Path, rows: list[str], *options: str) -> list[str]:
    program = [sys.executable, "-m", "fairflare.cli", "compare", *rows, "--out", str(folder)]
    return [*program, "--task", "segmentation", *QUICK, *options]


def compare(folder: Path, rows: list[str], *options: str, code: int = 0) -> str:
    done = subprocess.run(command(folder, rows, *options), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def processes_of(folder: Path) -> list[int]:
    """Return the processes of runs that work in ``folder``, which hold its logs open."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                files = [str(file.readlink()) for file in (process / "fd").iterdir()]
            except OSError:
                continue
            if any(file.startswith(str(folder)) for file in files):
                found.append(int(process.name))
    return found


def test_a_comparison(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    text = compare(folder, ["fed_avg", "fed_prox:mu=0.5"], "--seeds", "1")
    assert text.index("2 runs to do, ") < text.index("1/2 fed_")
    assert "2/2 fed_" in text
    assert "fed_prox (mu=0.5)" in text
    assert "one seed" in (folder / "differences.csv").read_text()
    assert "| fed_prox (mu=0.5) | " in (folder / "table.md").read_text()
    assert "| fed_prox (mu=0.5) | average | " in (folder / "differences.md").read_text()
    (session,) = json.loads((folder / "provenance.json").read_text())["sessions"]
    assert session["runs"] == ["fed_avg-seed0", "fed_prox_mu_0.5-seed0"]
    assert session["command"][:4] == ["fairflare", "compare", "fed_avg", "fed_prox:mu=0.5"]
    results = {
        path.name: json.loads((path / "server/simulate_job/fairflare/results.json").read_text())
        for path in (folder / "runs").iterdir()
    }
    assert sorted(results) == ["fed_avg-seed0", "fed_prox_mu_0.5-seed0"]
    # The same model to start from: the sites measured it the same.
    first, second = (results[name]["rounds"][0]["validation"] for name in sorted(results))
    assert first == second
    # And the same draws of the same test images.
    assert {len(values) for one in results.values() for values in one["resampled"].values()} == {200}
    assert not list(folder.rglob("fairflare_state")), "what is needed to go on is gone once a run is done"
    # Again: nothing is repeated; another row and seed are added.
    times = {path: path.stat().st_mtime for path in folder.rglob("results.json")}
    text = compare(folder, ["fed_avg", "fed_prox:mu=0.5", "fed_prox:mu=1"], "--seeds", "1")
    assert "2 of 3 runs are done already" in text
    assert "1/1" not in text
    assert all(path.stat().st_mtime == before for path, before in times.items())
    sessions = json.loads((folder / "provenance.json").read_text())["sessions"]
    assert [one["runs"] for one in sessions] == [session["runs"], ["fed_prox_mu_1-seed0"]]
    # Other settings under the same name are not taken for these.
    text = compare(folder, ["fed_avg"], "--seeds", "1", "--set", "batch_size=3", code=2)
    assert "holds a run of other settings (plan.settings.batch_size: None, now 3)" in text


def test_a_run_that_fails_is_named_and_the_others_are_compared(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    text = compare(folder, ["fed_avg", "fed_prox:learning_rate=1e30"], "--seeds", "1", code=1)
    assert "fed_prox_learning_rate_1e_30-seed0: failed" in text
    assert "lower learning_rate" in text
    assert (folder / "table.md").read_text().count("| fed_") == 1


def test_a_comparison_in_the_simulator_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Check the resume: FLARE empties the simulator's folder at its start, so state for the resume is beside it."""
    folder = tmp_path / "c"
    options = ["--seeds", "1", "--rounds", "4", "--simulator", "2"]
    place = folder / "runs" / "fed_avg-seed0"
    run_folder = place / "simulator" / "server" / "simulate_job" / "fairflare"
    kill(folder, ["fed_avg"], options, lambda: '"round_done"' in read(run_folder / "progress.jsonl"))
    assert (place / "run.json").is_file()
    compare(folder, ["fed_avg"], *options)
    results = json.loads((run_folder / "results.json").read_text())
    assert results["resumed"], "it began again"
    assert len(results["rounds"]) == 4
    assert "1 of 1 runs are done already" in compare(folder, ["fed_avg"], *options)
    text = compare(folder, ["fed_avg"], *options, "--set", "batch_size=3", code=2)
    assert "holds a run of other settings (plan.settings.batch_size: None, now 3)" in text
    (place / "run.json").unlink()  # as of a version that kept it where FLARE removed it
    text = compare(folder, ["fed_avg"], *options, code=2)
    assert "holds a run of other settings (there is no run.json that tells them)" in text


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def kill(folder: Path, rows: list[str], options: list[str], when: Callable[[], bool]) -> None:
    """Start a comparison, kill it, and wait until its runs have ended."""
    log = folder.with_name("killed.log")
    with log.open("ab") as output:
        process = subprocess.Popen(command(folder, rows, *options), stdout=output, stderr=output)
    try:
        end = time.monotonic() + 200
        while not when() and time.monotonic() < end:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    end = time.monotonic() + 60
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.2)
    assert not processes_of(folder), "a run outlived the comparison"


@pytest.mark.walk
def test_killed_and_started_again_gives_the_same_table(tmp_path: Path) -> None:
    rows = ["fed_avg", "fed_lwr", "fed_prox:mu=0.5"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    compare(whole, rows, "--seeds", "2")
    for number in range(1, 4):
        kill(parts, rows, ["--seeds", "2"], lambda n=number: len(list(parts.rglob("FL_global_model.pt"))) >= n)
    compare(parts, rows, "--seeds", "2")
    for name in ("table.csv", "differences.csv"):
        assert (parts / name).read_text() == (whole / name).read_text()


MINIATURES = {
    "fed_lwr": (["fed_avg", "fed_lwr"], {"image_size": [32, 32], "phantom_cases": 0.2},
                ["site-1", "site-2", "Avg.", "Std."]),
    "fed_mrl": (["fed_avg", "fed_prox"], {"image_size": [64, 64], "phantom_samples": 300, "phantom_test": 60,
                                          "phantom_own_test": 100}, ["ACC", "AUC", "Pre", "Recall", "F1"]),
    "fed_mas": (["fed_avg", "bsm_fl"], {"image_size": [32, 32], "phantom_samples": 600, "phantom_test": 200,
                                        "phantom_own_test": 100}, ["Head", "Medium", "Tail", "All", "B-acc"]),
    "fed_mas_isic": (["fed_lc", "bsm_fl"], {"image_size": [32, 32], "phantom_samples": 300, "phantom_test": 80,
                                            "phantom_own_test": 100}, ["Light", "Dark", "Avg", "B-Acc"]),
    "fed_ism": (["fed_avg", "fed_ism"],
                {"image_size": [32, 32], "max_pool": False, "phantom_samples": 300, "phantom_test": 80,
                 "phantom_own_test": 100, "test_last": 2},
                ["clean ACC", "clean AUC", "corrupted ACC", "corrupted AUC", "average ACC", "average AUC"]),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("preset", list(MINIATURES))
def test_a_papers_table_ends_in_its_columns(preset: str, tmp_path: Path) -> None:
    methods, settings, columns = MINIATURES[preset]
    more = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    short = ["--rounds", "2", "--seeds", "1", "--sites", "2", "--bootstrap", "0", "--set", "local_epochs=1"]
    told = ["compare", *methods, "--preset", preset, *short, *more, "--out", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "fairflare.cli", *told], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out" / "paper_table.md").read_text(encoding="utf-8")
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in head] == ["method", *columns]
    assert [row[0].strip() for row in rows] == methods
    assert "ABSENT" not in table
    assert all(re.match(r"\d+\.\d\d", cell.strip()) for row in rows for cell in row[1:]), table
    assert columns[-1] in done.stdout


def test_a_comparison_as_json(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    started = command(folder, ["fed_avg", "fed_prox"], "--seeds", "1", "--json")
    done = subprocess.run(started, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {*found} == {"version", "folder", "runs", "comparison"}
    assert found["runs"] == [
        {"name": name, "state": "completed", "reason": ""} for name in ("fed_avg-seed0", "fed_prox-seed0")
    ]
    table = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    for row, line in zip(found["comparison"]["rows"], table, strict=True):
        assert (row["label"], row["average"]["mean"]) == (line["method"], pytest.approx(float(line["average mean"])))
        figure = rf"{row['label']}-seed0: completed in \d+ s, dice {row['average']['mean']:.3f} on average"
        assert re.search(figure, done.stderr), "its figure as it came"
    assert "2 rows x 1 seed: 2 runs to do, 2 at once, in " in done.stderr


def test_runs_at_a_time_give_the_figures_of_one_after_the_other(tmp_path: Path) -> None:
    texts = {}
    for jobs in ("1", "2"):  # the later --jobs counts
        texts[jobs] = compare(
            tmp_path / jobs, ["fed_avg", "fed_prox:mu=0.5"], "--seeds", "1", "--metric", "loss", "--jobs", jobs
        )
        assert f"2 runs to do, {jobs} at once" in texts[jobs]
        assert re.search(r"^fed_avg-seed0: begun, log: .*run\.log$", texts[jobs], re.MULTILINE)
    for name in ("table.csv", "differences.csv"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
