"""Test sites in several processes at a time: the same bits as one after the other, and no files are left."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.server.rounds import Stopped
from fairflare.federation.transports.local import run_local
from tests.tiny import RESULTS, VOLUMES, model_in, run_document, without_times

from .slow_task import SlowTask
from .test_local import TINY


def made(method: str, **more: Any) -> Plan:
    kind, settings = ("segmentation", VOLUMES) if method == "fed_lwr" else ("classification", TINY)
    return make_plan(method, task=kind, sites=3, settings=settings, num_rounds=2, **more)


def assert_nobody_left() -> None:
    assert multiprocessing.active_children() == []


@pytest.mark.long
@pytest.mark.parametrize("method", ["fed_lwr", "ditto"])
def test_the_same_bits(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check two phases, and a model of each site's own; the sites' lines are in the log."""
    one = run_document(run_local(made(method), tmp_path / "one"))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        some = run_document(run_local(made(method), tmp_path / "some", jobs=2))
    assert_nobody_left()
    assert without_times(one) == without_times(some)
    first, second = model_in(tmp_path / "one" / RESULTS), model_in(tmp_path / "some" / RESULTS)
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    assert {f"site site-{k}" for k in (1, 2, 3)} <= {message.partition(":")[0] for message in caplog.messages}


@pytest.mark.long
def test_a_task_file_and_a_site_without_data(tmp_path: Path) -> None:
    """Check a task's class that no process can import, and a fault of one site, which costs that site its rounds."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from fairflare.tasks.classification import ClassificationTask\nclass Task(ClassificationTask): ...\n"
    )
    plan = made("fed_avg", task_file=file, require_all_sites=False, min_sites=2)
    local = {"phantom": True, "sites": {"site-2": {"data_root": str(tmp_path / "nowhere"), "phantom": False}}}
    found = run_document(run_local(plan, tmp_path / "run", local, jobs=2))
    assert_nobody_left()
    assert [record["accepted"] for record in found["rounds"]] == [["site-1", "site-3"]] * 2
    assert "the data folder does not exist" in json.dumps(found["rounds"][0]["left_out"])


def slow(folder: Path, **more: Any) -> tuple[Plan, dict[str, Any]]:
    """Make three sites, of which the second is slow and writes the id of its process."""
    quick = {"folder": str(folder / "quick"), "seconds": 0, "deaf": False}
    (folder / "quick").mkdir()
    own = {"slow": {"folder": str(folder), "seconds": 0.03, "deaf": False, **more}}
    plan = make_plan(
        "fed_avg",
        task="segmentation",
        sites=3,
        settings={"batch_size": 2, "local_epochs": 1},
        num_rounds=2,
        min_sites=2,
    )
    return replace(plan, task=SlowTask()), {"slow": quick, "sites": {"site-2": own}}


@pytest.mark.long
def test_a_process_that_dies_costs_its_site_the_round(tmp_path: Path) -> None:
    plan, local = slow(tmp_path)
    started: list[int] = []
    killed: list[int] = []

    def kills_once() -> bool:
        if started and not killed and (tmp_path / "reached").exists():
            killed.append(int((tmp_path / "reached").read_text()))
            os.kill(killed[0], signal.SIGKILL)
        return False

    class Watches(Listener):
        def round_started(self, current_round: int) -> None:
            (tmp_path / "reached").unlink(missing_ok=True)  # of the check, or the round before
            started.append(current_round)

    found = run_document(
        run_local(plan, tmp_path / "run", local, listeners=[Watches()], should_stop=kills_once, jobs=2)
    )
    assert_nobody_left()
    assert next(record["accepted"] for record in found["rounds"]) == ["site-1", "site-3"]
    (left_out,) = found["rounds"][0]["left_out"]
    assert left_out["reason"] == "site 'site-2': the process of task 'train' was killed by SIGKILL; out of memory?"
    assert "site-2" in found["rounds"][1]["accepted"]  # in a process of its own again


@pytest.mark.many
@pytest.mark.parametrize("deaf", [False, True])
def test_a_run_that_is_stopped_leaves_no_process(deaf: bool, tmp_path: Path) -> None:
    plan, local = slow(tmp_path, deaf=deaf)
    at: list[float] = []

    def should_stop() -> bool:
        if (tmp_path / "reached").exists() and not at:
            at.append(time.monotonic())
        return bool(at)

    with pytest.raises(Stopped):
        run_local(plan, tmp_path / "run", local, should_stop=should_stop, jobs=2)
    assert time.monotonic() - at[0] < 15  # to the end it would be 20 s and more (600 s deaf)
    assert_nobody_left()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "reached").read_text()), 0)
