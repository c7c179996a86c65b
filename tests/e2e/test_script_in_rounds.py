"""Test a site's own training script in our rounds, with FLARE's own executors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fairflare.recipes import ScriptRecipe

from .conftest import ROOT, SimulatorRun, run_simulator

pytestmark = [pytest.mark.e2e, pytest.mark.long]
EXAMPLES = ROOT / "docs" / "examples"


def run_script(root: Path, method: str, *, outside: bool = False, name: str = "ws", **more: Any) -> SimulatorRun:
    """Run the example with two sites and two rounds, by the published command."""
    script = "train_fair_mas.py" if method == "fed_mas" else "train_fair.py"
    recipe = ScriptRecipe(
        method,
        **{"train_script": EXAMPLES / script, "model": "Net", "sites": 2, "num_rounds": 2, **more},
        launch_external_process=outside,
        keep_local_models=True,
    )
    recipe.export(str(root / name))
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run = run_simulator(root, root / name / method, threads=2, name=f"{name}_run", timeout=200, env=path)
    assert run.code == 0, run.log[-3000:]
    return run


def complete(run: SimulatorRun) -> list[dict[str, Any]]:
    """Return the rounds of a run in which every site took part from beginning to end."""
    results = run.results
    assert results["status"] == "completed", results
    assert sorted(results["test"]) == ["site-1", "site-2"]
    rounds: list[dict[str, Any]] = results["rounds"]
    for record in rounds:
        assert record["left_out"] == [], record["left_out"]
        assert sorted(record["validation"]) == ["site-1", "site-2"]
    return rounds


def local_models(run: SimulatorRun, number: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for path in (run.folder / "local_models" / f"round_{number:04d}").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[file.metadata()["site"]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def check_model(run: SimulatorRun, weights: dict[str, dict[str, float]]) -> None:
    """Check that the last model is the sum of the last local models with these weights (by layer and site)."""
    path = run.workspace / "server" / "simulate_job" / "FL_global_model.pt"
    model = torch.load(path, weights_only=True)["model"]
    local = local_models(run, len(run.results["rounds"]) - 1)
    assert sorted(local) == ["site-1", "site-2"]
    for name, tensor in model.items():
        if tensor.is_floating_point():
            shares = weights.get(name.rpartition(".")[0]) or weights[""]
            expected = sum(shares[site] * local[site][name].double() for site in local)
            torch.testing.assert_close(tensor.double(), expected, atol=1e-5, rtol=0)


def lwr_weights(run: SimulatorRun) -> dict[tuple[int, str], dict[str, float]]:
    """Return the weights of Eq. 5 from the reported scores, after a check of the records."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for record in run.results["rounds"]:
        for layer, by_site in record["layers"].items():
            total = sum(of["dissimilarity"] for of in by_site.values())
            shares = {site: of["dissimilarity"] / total for site, of in by_site.items()}
            assert {site: of["weight"] for site, of in by_site.items()} == pytest.approx(shares, abs=2e-6)
            found[record["current_round"], layer] = shares
    return found


@pytest.fixture(scope="module")
def lwr(tmp_path_factory: pytest.TempPathFactory) -> SimulatorRun:
    return run_script(tmp_path_factory.mktemp("lwr"), "fed_lwr")


@pytest.mark.walk
def test_fed_lwr_in_a_process_of_its_own_gives_the_same_bits(lwr: SimulatorRun, tmp_path: Path) -> None:
    run = run_script(tmp_path, "fed_lwr", outside=True)
    assert [r["validation"] for r in complete(run)] == [r["validation"] for r in complete(lwr)]
    assert lwr_weights(run) == lwr_weights(lwr)
    assert run.results["test"] == lwr.results["test"]
    for site, state in local_models(run, 1).items():
        assert all(torch.equal(tensor, local_models(lwr, 1)[site][name]) for name, tensor in state.items())


def test_fed_ism_in_a_process_of_its_own(tmp_path: Path) -> None:
    run = run_script(tmp_path, "fed_ism_plus_s", outside=True)
    average: dict[str, float] = {}
    for record in complete(run):
        sharpness = {site: report["sharpness"] for site, report in record["reports"].items()}
        assert all(value > 0 for value in sharpness.values())
        fresh = {site: value**2 / sum(v**2 for v in sharpness.values()) for site, value in sharpness.items()}
        average = {site: 0.5 * w + 0.5 * average.get(site, w) for site, w in fresh.items()}
        assert record["site_weights"] == pytest.approx(average, rel=1e-9)
    check_model(run, {"": average})


@pytest.mark.walk
def test_a_script_that_ends_costs_only_its_site(tmp_path: Path) -> None:
    """Check that a script that ends at one site costs only that site; the other site continues."""
    text = (EXAMPLES / "train_fair.py").read_text()
    line = "        model.train()\n"
    assert text.count(line) == 1
    script = tmp_path / "breaks.py"
    script.write_text(text.replace(line, line + "        assert site.name != 'site-2', 'no disk'\n"))
    run = run_script(tmp_path, "fed_lwr", train_script=script, min_sites=1)
    results = run.results
    assert results["status"] == "completed"
    for record in results["rounds"]:
        assert [x["site"] for x in record["left_out"]] == ["site-2"]
        assert list(record["validation"]) == ["site-1"]
