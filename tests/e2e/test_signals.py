"""Test real signals to real runs: the results, the exit code, and the files that are left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from fairflare.base.disk.locks import hold_lock
from fairflare.base.disk.temporary import OWNER, OwnedFolder, sweep
from fairflare.reporting.results import find_results
from tests.tiny import FUNDUS as TINY
from tests.tiny import run_document

pytestmark = pytest.mark.e2e
SETTINGS = [part for key, value in TINY.items() for part in ("--set", f"{key}={json.dumps(value)}")]
TRAINS = ["run", "fed_avg", "--task", "classification", "--sites", "2", "--rounds", "5000", *SETTINGS]
SIGTERM = "the run was ended by SIGTERM (`kill`, a scheduler's time limit, a container that was stopped)"


class Running:
    """Run a command in a process group, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = Path((folder / "place").read_text()) if (folder / "place").exists() else Path(mkdtemp())
        (folder / "place").write_text(str(self.temporary))  # a short path: Python has sockets there
        environment = {**os.environ, "TMPDIR": str(self.temporary), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        self.log = folder / "out.txt"
        with self.log.open("ab") as out:
            command = [sys.executable, "-m", "fairflare.cli", *arguments]
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=folder, env=environment, start_new_session=True
            )

    def wait_for(self, what: str, true: Callable[[], Any], timeout: float = 120) -> None:
        end = time.monotonic() + timeout
        while not true():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, f"{what} did not happen: {self.said}"
            time.sleep(0.05)

    def end(self, number: int, *, group: bool = False, timeout: float = 60) -> int:
        """Send a signal, and return the exit code."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        return self.process.wait(timeout)

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def left(self) -> list[str]:
        """Return temporary files, except those that libraries keep for the next process."""
        found = [path.name for path in self.temporary.iterdir()]
        return sorted(name for name in found if name.startswith(("fairflare", "nvflare", "pymp", "tmp")))

    def alive(self) -> list[int]:
        """Return the live processes of the group."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.process.pid and fields[0] != "Z":
                found.append(int(path.parent.name))
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started = []

    def begin(*arguments: str, folder: str = "a") -> Running:
        started.append(Running(tmp_path / folder, *arguments))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None or running.alive():
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(30)
        shutil.rmtree(running.temporary, ignore_errors=True)


def rounds_done(workspace: Path) -> int:
    events = workspace / "server" / "simulate_job" / "fairflare" / "progress.jsonl"
    return events.read_text().count('"round_done"') if events.exists() else 0


def results_of(workspace: Path) -> dict[str, Any]:
    return run_document(find_results(workspace))


def check_ended(run: Running, results: Mapping[str, Any], code: int, reason: str) -> None:
    assert run.process.returncode == code, run.said
    assert (results["status"], results["reason"]) == ("failed", reason)
    assert results["finished"]
    assert results["rounds"]
    assert "Traceback" not in run.said
    assert "Stopped. " in run.said
    assert run.left == []
    check_gone(run)


def check_gone(run: Running) -> None:
    """Check that no process is left, not even Python's helper process, which ends after its parent."""
    end = time.monotonic() + 20
    while run.alive() and time.monotonic() < end:
        time.sleep(0.1)
    assert run.alive() == []


@pytest.mark.long
def test_a_second_signal_ends_it_at_once_and_is_in_the_results(start: Callable[..., Running], tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        "import pathlib, time\n"
        "from fairflare.tasks.classification import ClassificationTask\n\n\n"
        "class Task(ClassificationTask):\n"
        "    def loss(self, *given):\n"
        f"        pathlib.Path({str(tmp_path / 'busy')!r}).touch()\n"
        "        time.sleep(60)\n"
    )
    run = start(
        *TRAINS, "--in-process", "--jobs", "1", "-w", "run", "--task-file", str(task), "--set", "criterion=task"
    )
    run.wait_for("the loss", (tmp_path / "busy").exists)
    os.kill(run.process.pid, signal.SIGTERM)
    run.wait_for("it is heard", lambda: "stopping; a second signal ends it at once" in run.said)
    run.end(signal.SIGTERM, timeout=30)
    results = results_of(run.folder / "run")
    assert (run.process.returncode, results["status"], results["reason"]) == (143, "failed", SIGTERM), run.said
    assert run.left == []


@pytest.mark.long
def test_a_run_in_flares_simulator(start: Callable[..., Running]) -> None:
    """Check SIGTERM; what a signal is called is the same in one process."""
    run = start(*TRAINS, "-w", "run")
    workspace = run.folder / "run"
    run.wait_for("a round", lambda: rounds_done(workspace) > 0, 240)
    assert [name for name in run.left if name.startswith("fairflare-sim-")]
    assert not [name for name in run.left if not name.startswith("fairflare-sim-")]  # FLARE's are in there
    run.end(signal.SIGTERM)
    check_ended(run, results_of(workspace), 143, SIGTERM)


@pytest.mark.long
def test_a_simulator_that_is_killed_is_in_the_results(start: Callable[..., Running]) -> None:
    """Check a simulator that is killed, for instance by the kernel for memory, while the command line survives."""
    run = start(*TRAINS, "-w", "run")
    workspace = run.folder / "run"
    run.wait_for("a round", lambda: rounds_done(workspace) > 0, 240)
    found = [p for p in Path("/proc").glob("[0-9]*/stat") if _parent(p) == run.process.pid]
    (simulator,) = (int(path.parent.name) for path in found)
    os.killpg(simulator, signal.SIGKILL)
    assert run.process.wait(60) == 1
    results = results_of(workspace)
    assert results["status"] == "failed"
    assert results["reason"].startswith("FLARE's simulator ended with code -9 in the middle of the run")
    assert run.left == []


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.long
def test_a_comparison(start: Callable[..., Running]) -> None:
    arguments = [*TRAINS[2:4], "--sites", "2", "--rounds", "5000", *SETTINGS]
    run = start("compare", "fed_avg", "fed_prox", "--out", "c", "--seeds", "1", "--at-once", "2", *arguments)
    runs = [run.folder / "c" / "runs" / f"{name}-seed0" for name in ("fed_avg", "fed_prox")]
    run.wait_for("rounds", lambda: all(rounds_done(place) > 0 for place in runs), 240)
    run.end(signal.SIGTERM)
    assert run.process.returncode == 143, run.said
    assert "Stopped. The same command goes on from here." in run.said
    for place in runs:
        found = results_of(place)
        assert found["status"] == "failed"
        assert found["reason"] == "the comparison was stopped; the same command goes on with this run"
    assert run.left == []
    check_gone(run)


@pytest.mark.long
def test_what_a_killed_run_left_is_removed_at_the_next_start(start: Callable[..., Running]) -> None:
    run = start(*TRAINS, "--in-process", "--jobs", "2", "-w", "run")
    run.wait_for("a round", lambda: rounds_done(run.folder / "run") > 0)
    run.end(signal.SIGKILL)
    check_gone(run)
    left = run.left
    assert [name.rsplit("-", 1)[0] for name in left] == ["fairflare-models", "fairflare-sites"]
    models = [
        path for path in run.temporary.rglob("*") if path.suffix in (".pt", ".safetensors") or path.name == "model"
    ]
    assert models
    other = run.temporary / "fairflare-sites-of-somebody"  # nobody knows whose: an earlier version's, another program's
    other.mkdir()
    following = start(*[*TRAINS[:-1], TRAINS[-1], "--in-process", "--jobs", "1", "-w", "next"])
    following.wait_for("a round", lambda: rounds_done(following.folder / "next") > 0)
    for name in left:
        assert (
            f"removed {run.temporary / name}, which a dead process left (process {run.process.pid})" in following.said
        )
    assert other.is_dir()
    assert not [path for path in models if path.exists()]
    mine = [name for name in following.left if name != other.name]
    assert mine  # its own stay
    os.kill(following.process.pid, signal.SIGSTOP)  # alive, but it trains no more
    third = start(*TRAINS, "--in-process", "--jobs", "1", "-w", "third")  # and a run beside it takes nothing away
    third.wait_for("a round", lambda: rounds_done(third.folder / "third") > 0)
    assert set(mine) <= set(following.left)
    os.kill(following.process.pid, signal.SIGCONT)
    for one in (following, third):
        one.end(signal.SIGTERM)


def test_a_folder_whose_owner_may_live_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with OwnedFolder("sites") as own:
        assert sweep() == []
        assert own.path.is_dir()
    assert not own.path.exists()
    dead, empty, link, held = (tmp_path / f"fairflare-{name}" for name in ("dead", "empty", "link", "held"))
    for folder in (dead, empty, held):
        folder.mkdir()
    (dead / OWNER).write_text("process 1")
    (dead / "model.pt").touch()
    (empty / OWNER).touch()  # it is just being made
    link.symlink_to(dead)
    with hold_lock(held / OWNER, "process 2", needed=True):
        (found,) = sweep()
    assert found == f"removed {dead}, which a dead process left (process 1)"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fairflare-empty", "fairflare-held", "fairflare-link"]
