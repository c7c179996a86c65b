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
from unittest import mock

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fairflare.cli.commands import app
from tests.tiny import run_document

pytestmark = [pytest.mark.e2e, pytest.mark.long]

QUICK = ["--rounds", "2", "--sites", "2", "--at-once", "2", "--set", "local_epochs=1", "--set", "image_size=[32,32]"]
QUICK += ["--set", "phantom_cases=0.2"]


def command(folder: Path, rows: list[str], *options: str) -> list[str]:
    program = [sys.executable, "-m", "fairflare.cli", "compare", *rows, "--out", str(folder)]
    return [*program, "--task", "segmentation", *QUICK, *options]


def compare(folder: Path, rows: list[str], *options: str, code: int = 0) -> str:
    """Compare in this process, whose imports are done; the runs have processes of their own."""
    return called(command(folder, rows, *options)[3:], code).output


def called(words: list[str], code: int = 0) -> Result:
    with mock.patch.object(sys, "argv", ["fairflare", *words]):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return done


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
    assert "2 rows x 1 seed: 2 runs to do, 2 at once, in " in text
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
        path.name: run_document(path / "server/simulate_job/fairflare/results.json")
        for path in (folder / "runs").iterdir()
    }
    assert sorted(results) == ["fed_avg-seed0", "fed_prox_mu_0.5-seed0"]
    # The same model to start from: the sites measured it the same.
    first, second = (results[name]["rounds"][0]["validation"] for name in sorted(results))
    assert first == second
    # And the same draws of the same test images.
    assert {len(values) for one in results.values() for values in one["resampled"].values()} == {200}
    assert not list(folder.rglob("fairflare_state")), "what is needed to go on is gone once a run is done"
    # One run after the other gives the same figures; the later --jobs counts.
    one = compare(tmp_path / "one", ["fed_avg", "fed_prox:mu=0.5"], "--seeds", "1", "--jobs", "1")
    assert "2 runs to do, 1 at once" in one
    assert re.search(r"^fed_avg-seed0: begun, log: .*run\.log$", one, re.MULTILINE)
    assert re.search(r"^1/2 fed_avg-seed0: completed in \d+ s; 1 left, about \d+ min$", one, re.MULTILINE)
    for metric in ("dice", "loss"):
        for place in (folder, tmp_path / "one"):
            text = compare(place, ["fed_avg", "fed_prox:mu=0.5"], "--seeds", "1", "--metric", metric)
            assert "2 of 2 runs are done already" in text
        for name in ("table.csv", "differences.csv"):
            assert (folder / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    # Again, as JSON: nothing is repeated; a row is added, and another that fails, which is named.
    times = {path: path.stat().st_mtime for path in folder.rglob("results.json")}
    rows = ["fed_avg", "fed_prox:mu=0.5", "fed_prox:mu=1", "fed_prox:learning_rate=1e30"]
    done = called(command(folder, rows, "--seeds", "1", "--json")[3:], code=1)
    assert "2 of 4 runs are done already" in done.stderr
    assert [number for number in range(1, 5) if f"{number}/4 fed_" in done.stderr] == [3, 4]
    assert all(path.stat().st_mtime == before for path, before in times.items())
    sessions = json.loads((folder / "provenance.json").read_text())["sessions"]
    added = ["fed_prox_mu_1-seed0", "fed_prox_learning_rate_1e_30-seed0"]
    assert [one["runs"] for one in sessions] == [session["runs"], added]
    assert f"{added[1]}: failed" in done.stderr
    assert "lower learning_rate" in done.stderr
    assert (folder / "table.md").read_text().count("| fed_") == 3
    found = json.loads(done.stdout)
    assert {*found} == {"version", "folder", "runs", "comparison"}
    assert [(run["name"], run["state"]) for run in found["runs"]] == [
        ("fed_avg-seed0", "completed"), ("fed_prox_mu_0.5-seed0", "completed"),
        (added[0], "completed"), (added[1], "failed"),
    ]  # fmt: skip
    assert [bool(run["reason"]) for run in found["runs"]] == [False, False, False, True]
    table = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    for row, line in zip(found["comparison"]["rows"], table, strict=True):
        assert (row["label"], row["average"]["mean"]) == (line["method"], pytest.approx(float(line["average mean"])))
    assert re.search(rf"{added[0]}: completed in \d+ s(; 1 left, about 1 min)?\n", done.stderr)
    # Other settings under the same name are not taken for these.
    text = compare(folder, ["fed_avg"], "--seeds", "1", "--set", "batch_size=3", code=2)
    assert "holds a run of other settings (plan.settings.batch_size: None, now 3)" in text


def test_a_comparison_in_the_simulator_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Check the resume: FLARE empties the simulator's folder at its start, so state for the resume is beside it."""
    folder = tmp_path / "c"
    options = ["--seeds", "1", "--rounds", "3", "--simulator", "2"]
    place = folder / "runs" / "fed_avg-seed0"
    run_folder = place / "simulator" / "server" / "simulate_job" / "fairflare"
    kill(folder, ["fed_avg"], options, lambda: '"round_done"' in read(run_folder / "progress.jsonl"))
    assert (place / "run.json").is_file()
    compare(folder, ["fed_avg"], *options)
    results = run_document(run_folder)
    assert results["resumed"], "it began again"
    assert len(results["rounds"]) == 3
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


MINIATURES = {
    "fed_lwr": (["fed_avg", "fed_lwr"], {"image_size": [32, 32], "phantom_cases": 0.2},
                ["site-1", "site-2", "Avg.", "Std."]),
    "fed_ism": (["fed_avg", "fed_ism"],
                {"image_size": [32, 32], "max_pool": False, "phantom_samples": 300, "phantom_test": 80,
                 "phantom_own_test": 100, "test_last": 2},
                ["clean ACC", "clean AUC", "corrupted ACC", "corrupted AUC", "average ACC", "average AUC"]),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("preset", list(MINIATURES))
def test_a_papers_table_ends_in_its_columns(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    methods, settings, columns = MINIATURES[preset]
    more = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    short = ["--rounds", "2", "--seeds", "1", "--sites", "2", "--bootstrap", "0", "--set", "local_epochs=1"]
    done = called(["compare", *methods, "--preset", preset, *short, *more, "--out", "out"])
    table = (tmp_path / "out" / "paper_table.md").read_text(encoding="utf-8")
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in head] == ["method", *columns]
    assert [row[0].strip() for row in rows] == methods
    assert "ABSENT" not in table
    assert all(re.match(r"\d+\.\d\d", cell.strip()) for row in rows for cell in row[1:]), table
    assert columns[-1] in done.stdout
