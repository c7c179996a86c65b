"""Test a site's process that is killed within an epoch: another process continues the round with the same bits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import ROOT, TINY
from .poc_tools import MARK, end_processes, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long]

#: One round of one site, in this process or in a child of it; the update goes into a file.
SITE = """
import json, logging, pathlib, sys
import torch
logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
from fairflare.exchange.messages import SiteTask, clean_state
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.isolation import perform_isolated
from fairflare.methods.base.training import LocalTraining
from tests.e2e.waiting_task import Task

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    task = Task(**given["task"])
    torch.manual_seed(0)
    state = clean_state(task.build_model().state_dict())
    worker = {"site": "site-1", "task": task, "training": LocalTraining(batch_size=2, local_epochs=2),
              "settings": given["settings"], "state_folder": pathlib.Path(given["state"]), "num_threads": 1}
    request = SiteTask("train", state, 0, 1, 0)
    if given["isolate"]:
        reply = perform_isolated(worker, request, lambda: False)
    else:
        reply = SiteWorker(**worker).perform(request)
    assert reply.status == "ok", reply.reason
    metrics, losses = repr(reply.metrics), reply.stats["epoch_losses"]
    torch.save({"update": reply.update, "metrics": metrics, "losses": losses}, given["out"])
"""


def start(folder: Path, mark: str, out: str, **given: Any) -> subprocess.Popen[bytes]:
    script = folder / "site.py"
    script.write_text(SITE)
    said = {"task": TINY, "state": str(folder / "state"), "out": str(folder / out), "isolate": False, **given}
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(script), json.dumps(said)], cwd=folder, env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def same(whole_file: Path, broken_file: Path) -> bool:
    whole, broken = (torch.load(file, weights_only=True) for file in (whole_file, broken_file))
    assert (whole["metrics"], whole["losses"]) == (broken["metrics"], broken["losses"])
    return all(torch.equal(tensor, broken["update"][name]) for name, tensor in whole["update"].items())


def test_killed_within_an_epoch(tmp_path: Path) -> None:
    """Kill the site's process, then the process of its task, and compare with a training that nobody interrupted."""
    mark = uuid.uuid4().hex
    try:
        whole = start(tmp_path, mark, "whole", settings={})
        assert whole.wait(240) == 0, (tmp_path / "log").read_text()[-2000:]
        for isolate in (False, True):
            place = tmp_path / f"isolated {isolate}"
            place.mkdir()
            settings = {"save_seconds": 1e-9, "wait": {"folder": str(place), "batch": 4}}
            first = start(place, mark, "broken", settings=settings, isolate=isolate)
            wait_for("the fourth batch", (place / "reached").exists, 240)
            assert list((place / "state").rglob("half_done.000000.pt"))
            killed = int((place / "reached").read_text())
            assert (killed == first.pid) != isolate
            os.kill(killed, signal.SIGKILL)
            if isolate:  # the next child goes on by itself
                assert first.wait(240) == 0, (place / "log").read_text()[-2000:]
            else:
                assert first.wait(60) == -signal.SIGKILL
                again = start(place, mark, "broken", settings=settings)
                assert again.wait(240) == 0, (place / "log").read_text()[-2000:]
            assert same(tmp_path / "whole", place / "broken")
            # Keeping takes at most a fiftieth of the time, so not every step is kept.
            assert re.search(r"round 0 goes on behind [1-4] of its steps", (place / "log").read_text())
    finally:
        end_processes(mark)
