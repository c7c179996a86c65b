"""Test PyTorch Lightning itself, which no other test's environment has (extra `lightning`)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from fairflare.recipes import ScriptRecipe

from .conftest import ROOT, run_group, run_simulator

pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.e2e
EXAMPLE = (ROOT / "docs" / "examples" / "train_lightning.py").read_text()
TRAINER = re.search(r"\n( +trainer = pl\.Trainer\(.*\)\n)", EXAMPLE)
SHOWN = "        print(f'made {trainer.global_step - before} steps', flush=True)\n        site.send()\n"


def simulated(folder: Path, method: str, text: str, **settings: object) -> tuple[list[int], dict]:
    """Return the optimizer steps that Lightning counted, and the results, of three rounds at two sites."""
    fit = "        trainer.fit(module, train)\n"
    text = text.replace(fit, f"        before = trainer.global_step\n{fit}").replace("        site.send()\n", SHOWN)
    (folder / "train_lightning.py").write_text(text)
    recipe = ScriptRecipe(
        method, train_script=folder / "train_lightning.py", model="Net", sites=2, num_rounds=3, **settings
    )
    recipe.export(str(folder / "jobs"))
    run = run_simulator(folder, folder / "jobs" / method, threads=2, timeout=240)
    return [int(number) for number in re.findall(r"made (\d+) steps", run.log)], run.results


@pytest.mark.parametrize("method", ["fed_avg", "fed_prox"])
def test_the_documented_loop_trains_in_every_round(method: str, tmp_path: Path) -> None:
    """Check the number of steps: 32 images in batches of 8 are 4 steps."""
    assert TRAINER is not None
    made, results = simulated(tmp_path, method, EXAMPLE)
    assert made == [4] * 6
    assert results["status"] == "completed"
    for record in results["rounds"]:
        assert record["left_out"] == record["warnings"] == []
        assert {site: said["num_steps"] for site, said in record["train"].items()} == {"site-1": 4, "site-2": 4}


@pytest.mark.parametrize("method", ["fed_avg", "fed_prox"])
def test_one_trainer_for_all_rounds_is_no_training(method: str, tmp_path: Path) -> None:
    assert TRAINER is not None
    once = TRAINER[1].removeprefix("    ")
    text = EXAMPLE.replace(TRAINER[1], "").replace("    while site.receive", f"{once}    while site.receive")
    made, results = simulated(tmp_path, method, text)
    assert made == [4, 4, 0, 0]
    assert results["status"] == "failed"
    assert len(results["rounds"]) == 1
    assert "'site-1', 'site-2': it sent back the model that it received in round 1" in results["reason"]


HELLO = """
import nvflare.client.lightning as flare
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    model = Net()
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    flare.patch(trainer)
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
    while flare.is_running():
        before = trainer.global_step
        trainer.fit(model, DataLoader(data, batch_size=8 if flare.get_site_name() == "site-1" else 16))
        print(f"made {trainer.global_step - before} steps", flush=True)
"""
JOB = """
import sys, os
os.chdir({folder!r}); sys.path.insert(0, {folder!r})
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv
from fairflare.flare.aggregator import FairAggregator
from fairflare.methods.fed_avg import FedAvg
from hello import Net

recipe = FedAvgRecipe(
    name="hello", model=Net(), min_clients=2, num_rounds=2, train_script="hello.py",
    aggregator=FairAggregator(rule=FedAvg()), server_expected_format="pytorch",
)
recipe.execute(SimEnv(num_clients=2, workspace_root={sim!r}))
"""


def test_flares_patched_trainer_with_our_aggregator(tmp_path: Path) -> None:
    """Check FLARE's hello-lightning: its callback counts steps, by which our aggregator weighs the sites, 4 to 2."""
    (tmp_path / "hello.py").write_text(HELLO)
    script = tmp_path / "job.py"
    script.write_text(JOB.format(folder=str(tmp_path), sim=str(tmp_path / "sim")))
    env = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    status, log = run_group([sys.executable, str(script)], timeout=240, cwd=tmp_path, env=env)
    assert status == 0, log[-3000:]
    assert sorted(map(int, re.findall(r"made (\d+) steps", log))) == [2, 2, 4, 4], log[-3000:]
    assert re.findall(r"round (\d), weights: site-1 (\S+), site-2 (\S+)", log) == [
        ("0", "0.6667", "0.3333"), ("1", "0.6667", "0.3333"),
    ]  # fmt: skip
    assert "left out" not in log
