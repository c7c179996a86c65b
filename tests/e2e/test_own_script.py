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
    # Weights by sharpness, one line a round; site-2's noisy images make its loss the sharper one.
    found = re.findall(r"round (\d), weights: site-1 (\d\.\d+), site-2 (\d\.\d+)", log)
    assert [int(number) for number, _, _ in found] == [0, 1], log[-3000:]
    for _, first, second in found:
        assert float(first) + float(second) == pytest.approx(1, abs=1e-3)
    assert float(found[-1][2]) != pytest.approx(0.5, abs=1e-3)
    (model,) = (tmp_path / "sim").rglob("FL_global_model.pt")
    state = torch.load(model, map_location="cpu", weights_only=True)["model"]
    assert all(bool(torch.isfinite(t).all()) for t in state.values())


SCRIPT = """
import nvflare.client as flare
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)


if __name__ == "__main__":
    flare.init()
    while flare.is_running():
        received = flare.receive()
        update = {name: torch.full_like(torch.as_tensor(value), 0.1) for name, value in received.params.items()}
        accuracy = 0.5 + 0.1 * received.current_round + (0.1 if flare.get_site_name() == "site-1" else 0.0)
        flare.send(
            flare.FLModel(
                params=update, params_type="DIFF", metrics={"accuracy": accuracy}, current_round=received.current_round
            )
        )
"""
STOPPED = """
import os, sys
sys.path.insert(0, {folder!r})
os.chdir({folder!r})
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv
from fairflare.flare.aggregator import FairAggregator
from fairflare.methods.fed_avg import FedAvg
from constant import Net

recipe = FedAvgRecipe(
    name="stopped", model=Net(), min_clients=2, num_rounds=9, train_script="constant.py", stop_cond="accuracy >= 0.7",
    aggregator=FairAggregator(rule=FedAvg()), server_expected_format="pytorch", enable_tensor_disk_offload=True,
)
recipe.execute(SimEnv(num_clients=2, workspace_root={sim!r}))
"""


def test_flares_recipe_stops_by_the_metrics_of_our_aggregator(tmp_path: Path) -> None:
    """Check that ``stop_cond`` sees the mean over the sites: 0.55, 0.65, 0.75."""
    (tmp_path / "constant.py").write_text(SCRIPT)
    script = tmp_path / "job.py"
    script.write_text(STOPPED.format(folder=str(tmp_path), sim=str(tmp_path / "sim")))
    status, log = run_group(
        [sys.executable, str(script)], timeout=240, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert status == 0, log[-3000:]
    assert "Stopping at round=2 out of total_rounds=9" in log, log[-3000:]
    assert "Round 3 started" not in log
    (model,) = (tmp_path / "sim").rglob("FL_global_model.pt")
    assert sorted(torch.load(model, map_location="cpu", weights_only=True)["model"]) == ["layer.bias", "layer.weight"]
