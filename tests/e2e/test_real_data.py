"""Test real multi-site images: segmentation through the simulator, classification in one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fairflare.federation.transports.local import run_local
from fairflare.recipes import FairRecipe

pytestmark = [pytest.mark.e2e, pytest.mark.long]
GROUPS = {
    "nuclei": ["brightfield1024", "fluo256", "fluo360", "fluo520", "histology256x320"],
    "white-cells": ["BCCD", "CellaVision", "JTSC"],
}


@pytest.mark.parametrize(("dataset", "method"), [("nuclei", "fed_lwr"), ("white-cells", "fed_avg")])
def test_per_site_folders_train_end_to_end(job, simulate, real_data, tmp_path, dataset, method):
    out = tmp_path / dataset
    subprocess.run(
        [sys.executable, "-m", "fairflare.data.preparers", dataset, "--source", str(real_data), "--out", str(out)],
        check=True,
        capture_output=True,
    )
    local = json.loads((out / "fairflare.json").read_text())
    assert sorted(local["sites"]) == GROUPS[dataset]
    folder = job(method, sites=GROUPS[dataset], num_rounds=1, settings={"in_channels": 3, "local_epochs": 1})
    run = simulate(folder, threads=len(GROUPS[dataset]), local=local)
    assert run.code == 0, run.log[-3000:]
    results = run.results
    assert sorted(results["test"]) == GROUPS[dataset]
    assert results["info"]["synthetic"] is False
    assert "SYNTHETIC" not in run.log
    assert results["rounds"][0]["accepted"] == GROUPS[dataset]
    samples = {s: v["num_samples"] for s, v in results["rounds"][0]["train"].items()}
    for name in GROUPS[dataset]:
        (site_list,) = (out / name).glob("datalist.json")
        assert samples[name] == len(json.loads(site_list.read_text())["training"])


@pytest.mark.parametrize(("dataset", "classes"), [("red-cells", 12), ("cell-types", 5)])
def test_long_tailed_cells_with_fed_mas(real_data, tmp_path, dataset, classes):
    """Run classification in one process, which gives the simulator's bits; most sites lack some of the classes."""
    out = tmp_path / dataset
    command = [sys.executable, "-m", "fairflare.data.preparers", dataset, "--source", str(real_data), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    local = json.loads((out / "fairflare.json").read_text())
    for block in local["sites"].values():
        block["classes"] = "all"  # one study looked for all classes; prepare asks, as it cannot know that
    settings = {"num_classes": classes, "image_size": [32, 32], "features": [4, 4, 8, 8], "local_epochs": 1}
    recipe = FairRecipe("fed_mas", sites=sorted(local["sites"]), num_rounds=1, settings=settings)
    results = json.loads((run_local(recipe.plan, tmp_path / "run", local) / "results.json").read_text())
    assert results["status"] == "completed"
    assert sorted(results["test"]) == sorted(local["sites"])
    assert results["info"]["synthetic"] is False
    factors = {site: report["rescue_factor"] for site, report in results["rounds"][0]["reports"].items()}
    total = sum(factors.values())
    assert results["rounds"][0]["site_weights"] == pytest.approx({s: f / total for s, f in factors.items()}, abs=1e-6)
