"""Test a site with ``"isolate": true``: the death of the process that trains costs one task, not the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from .conftest import ROOT, TINY
from .poc_tools import MARK, end_processes, processes, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long]

HELD_TASK = Path(__file__).with_name("held_task.py")


def test_killed_child_is_one_failed_task_and_the_site_is_back_next_round(job, simulate, tmp_path):
    hold = tmp_path / "hold"
    hold.mkdir()
    mark = uuid.uuid4().hex
    errors: list[BaseException] = []

    def kill() -> None:
        try:
            reached = hold / "reached"
            wait_for("site-2 in the middle of train", reached.exists, 150)
            child = int(reached.read_text())
            running = processes(mark)
            # A process of its own, not the one that talks to the server.
            assert "multiprocessing" in running[child], running
            os.kill(child, signal.SIGKILL)
        except BaseException as e:
            errors.append(e)

    killer = threading.Thread(target=kill)
    killer.start()
    local = {"sites": {"site-2": {"isolate": True, "hold": {"folder": str(hold), "phase": "train", "times": 1}}}}
    folder = job("fed_avg", sites=2, num_rounds=2, min_sites=1, task_file=HELD_TASK)
    run = simulate(folder, threads=2, local=local, env={MARK: mark})
    killer.join(200)
    assert not errors, errors
    assert run.code == 0, run.log[-3000:]
    results = run.results
    assert results["status"] == "completed"
    first, second = results["rounds"]
    assert first["accepted"] == ["site-1"]
    (left,) = first["left_out"]
    assert (left["site"], left["phase"]) == ("site-2", "train")
    assert "killed by SIGKILL" in left["reason"]
    assert "out of memory?" in left["reason"]
    assert second["accepted"] == ["site-1", "site-2"]
    assert second["left_out"] == []
    assert sorted(results["test"]) == ["site-1", "site-2"]
    assert "round 0, train: site 'site-2' left out" in run.log
    # Not the whole phase timeout of an hour: the death is seen at once.
    train = next(p for p in first["phases"] if p["name"] == "train")
    assert train["seconds"] < 120


PARENT = """
import json, pathlib, sys
from fairflare.exchange.messages import SiteTask
from fairflare.federation.transports.isolation import perform_isolated
from fairflare.methods.base.training import LocalTraining
from tests.e2e.held_task import Task

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    task = Task(**given["task"])
    worker = {"site": "site-1", "task": task, "training": LocalTraining(), "settings": {"hold": given["hold"]},
              "state_folder": pathlib.Path(given["hold"]["folder"]) / "state"}
    perform_isolated(worker, SiteTask("train", task.build_model().state_dict(), 0, 1, 0), lambda: False)
"""


def test_child_does_not_outlive_its_parent(tmp_path):
    """Check that a killed client leaves no process behind that trains on with the site's memory."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    mark = uuid.uuid4().hex
    given = {"task": TINY, "hold": {"folder": str(tmp_path), "phase": "train", "times": 1}}
    parent = subprocess.Popen(
        [sys.executable, str(script), json.dumps(given)],
        cwd=tmp_path, env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for("child in the middle of train", (tmp_path / "reached").exists, 90)
        child = int((tmp_path / "reached").read_text())
        assert {parent.pid, child} <= set(processes(mark))
        parent.kill()
        parent.wait()
        wait_for("end of the child", lambda: child not in processes(mark), 10)
    finally:
        parent.kill()
        parent.wait()
        end_processes(mark)
