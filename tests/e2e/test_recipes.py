"""Our recipes with FLARE's own helpers and environments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nvflare.recipe import SimEnv
from nvflare.recipe.utils import add_cross_site_evaluation, add_experiment_tracking

from fairflare import results
from fairflare.recipes import FedAvgRecipe

from .conftest import TINY


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["job.py"])


def test_cross_site_evaluation_has_the_numbers_of_our_own_test(tmp_path):
    """FLARE's ``validate`` of the stored models, and ``submit_model`` of the one site that allows it."""
    recipe = FedAvgRecipe(sites=2, num_rounds=2, local_epochs=1, **TINY)
    add_cross_site_evaluation(recipe)
    add_experiment_tracking(recipe, "tensorboard")
    local = tmp_path / "fed_avg" / "local"
    local.mkdir(parents=True)
    (local / "fairflare.json").write_text(json.dumps({"sites": {"site-1": {"submit_model": True}, "site-2": {}}}))
    run = recipe.run(SimEnv(num_clients=2, workspace_root=str(tmp_path)))
    document = results.of(run)
    assert document["status"] == "completed"
    assert "site-2" in results.table(document)
    folder = Path(run.get_result()) / "server" / "simulate_job"
    found = json.loads((folder / "cross_site_val" / "cross_val_results.json").read_text())
    assert set(found) == {"site-1", "site-2"}
    for site, by_model in found.items():
        assert set(by_model) == {"SRV_FL_global_model.pt", "SRV_best_FL_global_model.pt", "site-1"}
        assert by_model["SRV_FL_global_model.pt"] == document["test"][site]
        assert set(by_model["site-1"]) == set(document["test"][site])
        assert by_model["site-1"] != document["test"][site]
    assert len(list((folder / "tb_events").rglob("events*"))) == 1  # one receiver
    assert not list((folder / "app_server").glob("*.pt"))  # the models lie once, in the run's folder
