"""Test a trainer of FLARE's introduction: unchanged with our aggregator, and little changed in a two-phase method."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from fairflare.recipes import ScriptRecipe

from .conftest import ROOT, run_group, run_simulator

EXAMPLES = ROOT / "docs" / "examples"
PLAIN, FAIR = "hello_flare.py", "hello_flare_fair.py"
MOST = 8  # changed lines

JOB = """
import os, sys
sys.path.insert(0, {examples!r})
os.chdir({examples!r})
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv
from hello_flare import Net
import torch
torch.manual_seed(0)
torch.save(Net().state_dict(), {start!r})
{imports}
recipe = FedAvgRecipe(
    name="hello", model=Net(), min_clients=2, num_rounds=2, train_script="hello_flare.py", initial_ckpt={start!r}{more},
)
recipe.execute(SimEnv(num_clients=2, workspace_root={sim!r}))
"""
OURS = (
    "from fairflare.flare.aggregator import FairAggregator\nfrom fairflare.methods.fed_avg import FedAvg",
    ', aggregator=FairAggregator(rule=FedAvg()), server_expected_format="pytorch"',
)


def changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """Return added and removed lines; empty lines and the docstring at the top do not count."""
    found = list(difflib.ndiff(before.splitlines()[1:], after.splitlines()[1:]))
    new, gone = ([line[2:] for line in found if line.startswith(mark) and line[2:].strip()] for mark in ("+ ", "- "))
    return new, gone


def test_few_lines_are_new() -> None:
    new, _ = changed((EXAMPLES / PLAIN).read_text(), (EXAMPLES / FAIR).read_text())
    assert len(new) <= MOST, new
    page = (ROOT / "docs" / "own_script.md").read_text()
    (diff,) = [part for part in re.findall(r"```diff\n(.*?)```", page, re.DOTALL) if "site.receive" in part]
    assert {line[1:].strip() for line in diff.splitlines() if line.startswith("+")} == {line.strip() for line in new}


@pytest.mark.e2e
@pytest.mark.long
def test_the_trainer_as_it_is_with_our_aggregator(tmp_path: Path) -> None:
    """Check that FLARE's own mean and ours are equal, as both sites have as many images."""
    models = {}
    for name, (imports, more) in {"stock": ("", ""), "ours": OURS}.items():
        sim, script = tmp_path / name, tmp_path / f"{name}.py"
        start = str(tmp_path / "start.pt")
        script.write_text(JOB.format(examples=str(EXAMPLES), sim=str(sim), imports=imports, more=more, start=start))
        env = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        status, log = run_group([sys.executable, str(script)], timeout=240, cwd=tmp_path, env=env)
        assert status == 0, log[-3000:]
        (file,) = sim.rglob("FL_global_model.pt")
        models[name] = torch.load(file, map_location="cpu", weights_only=True)["model"]
    assert models["stock"].keys() == models["ours"].keys()
    for key, tensor in models["stock"].items():
        other = torch.as_tensor(models["ours"][key])
        torch.testing.assert_close(other, torch.as_tensor(tensor), atol=1e-5, rtol=1e-4)


@pytest.mark.e2e
@pytest.mark.long
def test_in_our_rounds(tmp_path: Path) -> None:
    """Check Fed-LWR, which asks sites twice a round; test_script_in_rounds has a loss and step of a method's own."""
    recipe = ScriptRecipe("fed_lwr", train_script=EXAMPLES / FAIR, model="Net", sites=2, num_rounds=6)
    recipe.export(str(tmp_path / "jobs"))
    run = run_simulator(tmp_path, tmp_path / "jobs" / "fed_lwr", threads=2, timeout=200)
    assert run.code == 0, run.log[-3000:]
    results = run.results
    assert results["status"] == "completed", results
    assert [record["left_out"] for record in results["rounds"]] == [[]] * 6
    steps = [[of["num_steps"] for of in record["train"].values()] for record in results["rounds"]]
    assert steps == [[steps[0][0]] * 2] * 6  # as many in every round, at both sites
    assert steps[0][0] > 0
    assert sorted(results["test"]) == ["site-1", "site-2"]
    assert results["test"]["site-1"]["accuracy"] > 0.5  # of four classes
    assert all(record["layers"] for record in results["rounds"])
