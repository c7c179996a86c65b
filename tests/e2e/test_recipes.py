"""Test our recipes with FLARE's own helpers and environments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nvflare.recipe import SimEnv
from nvflare.recipe.utils import add_cross_site_evaluation, add_experiment_tracking

from fairflare import results
from fairflare.recipes import FedAvgRecipe

from .conftest import ROOT, TINY
from .poc_tools import ADMIN, PocSystem


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["job.py"])


@pytest.mark.long
def test_cross_site_evaluation_has_the_numbers_of_our_own_test(tmp_path):
    """Check FLARE's ``validate`` of the stored models, and ``submit_model`` of the one site that allows it."""
    recipe = FedAvgRecipe(sites=2, num_rounds=2, local_epochs=1, **TINY)
    add_cross_site_evaluation(recipe)
    add_experiment_tracking(recipe, "tensorboard")
    local = tmp_path / "fed_avg" / "local"
    local.mkdir(parents=True)
    (local / "fairflare.json").write_text(json.dumps({"sites": {"site-1": {"submit_model": True}, "site-2": {}}}))
    run = recipe.run(SimEnv(num_clients=2, workspace_root=str(tmp_path)))
    document = results.of(run)
    assert document.status == "completed"
    assert "site-2" in results.table(document)
    folder = Path(run.get_result()) / "server" / "simulate_job"
    found = json.loads((folder / "cross_site_val" / "cross_val_results.json").read_text())
    assert set(found) == {"site-1", "site-2"}
    for site, by_model in found.items():
        assert set(by_model) == {"SRV_FL_global_model.pt", "SRV_best_FL_global_model.pt", "site-1"}
        tested = {c.metric: c.value for c in document.cells if (c.model, c.split, c.site) == ("last", "test", site)}
        assert by_model["SRV_FL_global_model.pt"] == tested
        assert set(by_model["site-1"]) == set(tested)
        assert by_model["site-1"] != tested
    assert len(list((folder / "tb_events").rglob("events*"))) == 1  # one receiver
    assert not list((folder / "app_server").glob("*.pt"))  # the models lie once, in the run's folder


TWO_RUNS = """
import json
import sys
from nvflare.recipe import ProdEnv
from fairflare import results
from fairflare.recipes import FedAvgRecipe, PocEnv

project, user, settings = sys.argv[1:]
sys.argv[1:] = []

def recipe():
    return FedAvgRecipe(sites=["north", "south"], num_rounds=1, local_epochs=1, **json.loads(settings))

poc = PocEnv(clients=["north", "south"], project_conf_path=project, username=user, results="kept")
run = recipe().run(poc)
network = ProdEnv(startup_kit_location=poc._get_admin_startup_kit_path(), username=user)
documents = [results.of(recipe().run(network)), results.of(run)]
print("FOLDER", run.get_result())
print("TESTS", json.dumps([
    sorted((c.site, c.metric, c.value) for c in document.cells if (c.model, c.split) == ("last", "test"))
    for document in documents
]))
"""


@pytest.mark.walk
@pytest.mark.timeout(400)
def test_results_of_a_poc_outlive_it_and_a_running_network_is_asked_the_same_way(tmp_path):
    system = PocSystem(tmp_path / "system", ["north", "south"])
    script = tmp_path / "two_runs.py"
    script.write_text(TWO_RUNS)
    out = tmp_path / "out.txt"
    command = [sys.executable, str(script), str(system.write_project()), ADMIN, json.dumps(TINY)]
    try:
        with out.open("wb") as log:  # services inherit the streams, so these are a file and no pipe
            done = subprocess.run(
                command, cwd=tmp_path, env=system.env, stdout=log, stderr=log, timeout=350, check=False
            )
    finally:
        system.close()
    text = out.read_text(errors="replace")
    assert done.returncode == 0, text[-3000:]
    folder = Path(re.findall(r"^FOLDER (.*)$", text, re.MULTILINE)[0])
    assert folder.parent == tmp_path / "kept"
    assert (folder / "workspace" / "FL_global_model.pt").is_file()
    assert not system.workspace.exists()  # FLARE has removed it
    first, second = json.loads(re.findall(r"^TESTS (.*)$", text, re.MULTILINE)[0])
    assert first == second
    assert {site for site, *_ in first} == {"north", "south"}


@pytest.mark.long
def test_the_first_example_of_the_recipes_page(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)[0]
    names: dict = {"__name__": "__main__"}
    exec(compile(code, "recipes.md", "exec"), names)
    assert names["document"].status == "completed"
    assert {c.site for c in names["document"].cells if c.split == "test"} == {"site-1", "site-2"}
    assert "site-2 " in capfd.readouterr().out
    assert (tmp_path / "runs" / "fed_ism" / "server" / "simulate_job" / "best_FL_global_model.pt").is_file()
