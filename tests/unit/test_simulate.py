"""Test the simulator's process of the command line: its messages, and FLARE's loss of a site."""

from __future__ import annotations

import io
import os
import signal
import sys
import time

import pytest
from rich.console import Console

from fairflare.cli.run import simulate as module
from fairflare.recipes import FairRecipe

LINES = [
    "2026-11-23 00:54:54,401 - ERROR - Execute exception: OSError: [Errno 98] Address already in use",
    "ERROR - run_client_thread error: RuntimeError: Failed to create connection to the child process in "
    "SimulatorClientRunner, timeout: 60.0",
    "2026-11-23 03:53:14,315 - ERROR - Communication error with client site-4: [Errno 104] Connection reset by peer",
]
#: Loses a site in its first attempts and would wait for it for ever, as FLARE's simulator does. What it says of that
#: comes in two parts, and once more while it is stopped. The third attempt ends by itself.
SIMULATOR = """
import os, pathlib, signal, sys, time
folder, lost, code, line = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with (folder / "attempts").open("a") as f:
    f.write("x")
attempt = len((folder / "attempts").read_text())
events = folder / "ws/server/simulate_job/fairflare/progress.jsonl"
events.parent.mkdir(parents=True, exist_ok=True)
time.sleep(0.5 * (attempt > 1))  # whoever reads the events of the attempt before has done so by now
events.write_text('{"kind": "other", "of": "%s"}\\n' % ("x" * 7 * attempt) * 3 * attempt)
print("attempt", attempt, flush=True)

def again(*_):
    print("[while it is stopped]", line, flush=True)
    os._exit(1)

signal.signal(signal.SIGTERM, again)
if attempt <= lost:
    print(line[:50], end="", flush=True)
    time.sleep(0.5)
    print(line[50:], flush=True)
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(1 if attempt == 3 else 600)
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return ``run(times_lost, code)`` -> exit code, attempts, the terminal's text, the log."""

    def started(lost, code, line=LINES[0]):
        command = [sys.executable, "-c", SIMULATOR, str(tmp_path), str(lost), str(code), line]
        monkeypatch.setattr(module, "_command", lambda *arguments: command)
        screen = io.StringIO()
        recipe = FairRecipe("fed_avg", sites=2)
        log = tmp_path / "run[1].log"
        given = module.simulate(recipe, tmp_path / "ws", 2, {}, log, Console(file=screen, width=300))
        assert ("run[1].log" in screen.getvalue()) == ("Started again" in screen.getvalue())
        return given, len((tmp_path / "attempts").read_text()), screen.getvalue(), log.read_text()

    return started


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_loses_no_site_runs_once(run, code):
    assert run(0, code)[:2] == (code, 1)


@pytest.mark.parametrize("line", LINES)
def test_a_run_that_loses_a_site_is_started_again(run, tmp_path, line):
    """Check that the next attempt's output begins on a new line."""
    code, attempts, screen, log = run(1, 0, line)
    assert (code, attempts) == (0, 2)
    assert screen.count("FLARE's simulator lost a site") == 1
    assert "Started again (2 of 3)." in screen
    shown = [log.index(text) for text in ("attempt 1", "[while it is stopped]", "Started again (2 of 3).", "attempt 2")]
    assert shown == sorted(shown)
    _wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("code", [0, 3])
def test_the_third_attempt_goes_on_without_the_site(run, code):
    given, attempts, screen, _ = run(9, code)
    assert (given, attempts) == (code, 3)
    assert screen.count("Started again") == 2


def test_ctrl_c_while_a_lost_run_is_stopped_ends_it(run, tmp_path, monkeypatch):
    stop, stopped = module._stop, []

    def interrupted(process):
        stopped.append(process)
        if len(stopped) == 1:
            raise KeyboardInterrupt
        stop(process)

    monkeypatch.setattr(module, "_stop", interrupted)
    assert run(1, 0)[:2] == (130, 1)
    _wait_until_gone(int((tmp_path / "pid").read_text()))


def _wait_until_gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} was left running")
