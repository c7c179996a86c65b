"""The simulator's process as the command line runs it: what it says, and what happens when FLARE loses a site."""

from __future__ import annotations

import io
import os
import sys
import time

import pytest
from rich.console import Console

from fairflare.cli import simulate as module
from fairflare.recipes import FairRecipe

#: Two sites are lost, one after the other; the simulator of FLARE would go on waiting for them.
LOSES_A_SITE = """
import pathlib, sys, time
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x")
print("attempt", len(tries.read_text()), flush=True)
if len(tries.read_text()) <= int(sys.argv[2]):
    for _ in range(2):
        print(sys.argv[5], flush=True)
    pathlib.Path(sys.argv[3]).write_text(str(__import__("os").getpid()))
    time.sleep(600)
sys.exit(int(sys.argv[4]))
"""

LINES = [
    "2026-11-23 00:54:54,401 - ERROR - Execute exception: OSError: [Errno 98] Address already in use",
    "ERROR - run_client_thread error: RuntimeError: Failed to create connection to the child process in "
    "SimulatorClientRunner, timeout: 60.0",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(times_lost, code)`` -> exit code, attempts, what the terminal shows, the log."""

    def started(lost, code, line=LINES[0]):
        tries = tmp_path / "tries"
        tries.write_text("")
        command = [sys.executable, "-c", LOSES_A_SITE, str(tries), str(lost), str(tmp_path / "pid")]
        command += [str(code), line]
        monkeypatch.setattr(module, "_command", lambda *arguments: command)
        screen = io.StringIO()
        recipe = FairRecipe("fed_avg", sites=2)
        log = tmp_path / "run.log"
        given = module.simulate(recipe, tmp_path / "ws", 2, {}, log, Console(file=screen, width=300))
        return given, len(tries.read_text()), screen.getvalue(), log.read_text()

    return started


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_loses_no_site_runs_once(run, code):
    assert run(0, code)[:2] == (code, 1)


@pytest.mark.parametrize("line", LINES)
def test_a_run_that_loses_a_site_is_started_again(run, tmp_path, line):
    code, attempts, screen, log = run(2, 0, line)
    assert (code, attempts) == (0, 3)
    assert screen.count("FLARE's simulator lost a site") == 2
    assert "Started again (3 of 3)." in screen
    for text in ("attempt 1", "attempt 2", "attempt 3", "Started again (2 of 3)."):
        assert text in log
    _wait_until_gone(int((tmp_path / "pid").read_text()))


def test_it_gives_up_after_three(run):
    code, attempts, screen, _ = run(9, 0)
    assert (code, attempts) == (1, 3)
    assert "Given up." in screen


def _wait_until_gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} was left running")
