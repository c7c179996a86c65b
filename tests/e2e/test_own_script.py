"""Test a user's own Client API script with our aggregator under FLARE's stock FedAvg controller and recipe."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from .conftest import ROOT, run_group

pytestmark = [pytest.mark.e2e, pytest.mark.long]

JOB = """
import os, sys
sys.path.insert(0, {examples!r})
os.chdir({examples!r})
from nvflare.recipe.sim_env import SimEnv
{code}
"""


def test_example_of_the_docs_runs_under_the_stock_controller(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own_script.md").read_text()
    (code,) = [part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FedAvgRecipe" in part]
    code = code.replace("SimEnv(num_clients=2)", f"SimEnv(num_clients=2, workspace_root={str(tmp_path / 'sim')!r})")
    script = tmp_path / "job.py"
    script.write_text(JOB.format(examples=str(ROOT / "docs" / "examples"), code=code))
    env = {**os.environ, "HOME": str(tmp_path)}
    status, log = run_group([sys.executable, str(script)], timeout=240, cwd=tmp_path, env=env)
    assert status == 0, log[-3000:]
    # Weights by sharpness, one line a round. The first model is drawn anew in each run, so either site may weigh more;
    # by numbers of images, which are equal, both rounds would print 0.5000.
    found = re.findall(r"round (\d), weights: site-1 (\d\.\d+), site-2 (\d\.\d+)", log)
    assert [int(number) for number, _, _ in found] == [0, 1], log[-3000:]
    for _, first, second in found:
        assert float(first) + float(second) == pytest.approx(1, abs=1e-3)
    assert {second for _, _, second in found} != {"0.5000"}
    (model,) = (tmp_path / "sim").rglob("FL_global_model.pt")
    state = torch.load(model, map_location="cpu", weights_only=True)["model"]
    assert all(bool(torch.isfinite(t).all()) for t in state.values())
