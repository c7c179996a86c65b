"""kill -9 of FLARE's simulator, server and sites at once, in the middle of a round; then the same command again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.transports.local import run_local

from .conftest import run_simulator, tiny_recipe
from .poc_tools import MARK, end_processes, processes, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.walk]

#: Task, settings, and the phase of round 1 in which everything dies.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fed_lwr": ({}, "anchor"),  # two phases; the sites keep local models and moments
    "fed_mrl": ({"mu_policy": "qmix", "weighting": "som"}, "train"),  # agents, map and its neurons at the server
}
CLASSES = {
    "image_size": [32, 32],
    "max_pool": False,
    "features": [4, 4, 8, 8],
    "phantom_samples": 200,
    "phantom_test": 60,
}


def recipe_of(method: str, experiment: str) -> Any:
    settings = {**CASES[method][0], "local_epochs": 1}
    if method == "fed_mrl":
        from fairflare.recipes import FairRecipe

        return FairRecipe(
            method, sites=3, num_rounds=3, experiment=experiment, settings={**CLASSES, **settings}, min_sites=3
        )
    return tiny_recipe(method, num_rounds=3, experiment=experiment, settings=settings, min_sites=3)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "server" / "simulate_job" / "FL_global_model.pt"
    model: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)["model"]
    return model


def kill_when(root: Path, job: Path, phase: str, local: dict[str, Any]) -> None:
    """Starts the simulator and kills all of its processes when the sites were asked for ``phase`` of round 1."""
    workspace, mark = root / "killed", uuid.uuid4().hex
    (workspace / "local").mkdir(parents=True)
    (workspace / "local" / "fairflare.json").write_text(json.dumps(local))
    command = [str(Path(sys.executable).with_name("nvflare")), "simulator", str(job), "-w", str(workspace), "-t", "3"]
    environment = {**os.environ, "HOME": str(root), MARK: mark}
    events = workspace / "server" / "simulate_job" / "fairflare" / "progress.jsonl"

    def asked() -> bool:
        lines = events.read_text().splitlines() if events.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]
        return any(e["kind"] == "phase" and (e["phase"], e["current_round"]) == (phase, 1) for e in told)

    with (root / "killed.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=root)
        try:
            wait_for(f"{phase} of round 1", asked, 240, period=0.02)
            time.sleep(0.3)  # the sites are at it
            assert process.poll() is None
            assert len(processes(mark)) > 3, "server and three sites"
        finally:
            end_processes(mark)
            process.wait(30)
    results = json.loads(events.with_name("results.json").read_text())
    assert results["status"] == "running"  # cut off


@pytest.mark.parametrize("method", list(CASES))
def test_killed_and_started_again_gives_the_bits_of_an_uninterrupted_run(tmp_path: Path, method: str) -> None:
    whole = recipe_of(method, "whole")
    run_local(whole.plan, tmp_path / "whole")
    recipe = recipe_of(method, "parts")
    recipe.export(str(tmp_path / "jobs"))
    job = tmp_path / "jobs" / recipe.name
    local = {"state_root": str(tmp_path / "sites"), "checkpoint_root": str(tmp_path / "server")}
    kill_when(tmp_path, job, CASES[method][1], local)
    again = run_simulator(tmp_path, job, threads=3, name="again", local=local)
    assert again.code == 0, again.log[-3000:]
    assert "experiment 'parts': going on at round 1 of 3" in again.log
    expected, found = model_of(tmp_path / "whole"), model_of(again.workspace)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    results = again.results
    assert [record["current_round"] for record in results["rounds"]] == [0, 1, 2]
    assert all(record["left_out"] == [] for record in results["rounds"])
    uncut = json.loads((tmp_path / "whole/server/simulate_job/fairflare/results.json").read_text())
    assert results["test"] == uncut["test"]
    assert [r["site_weights"] for r in results["rounds"]] == [r["site_weights"] for r in uncut["rounds"]]
    assert [r["layers"] for r in results["rounds"]] == [r["layers"] for r in uncut["rounds"]]
