"""Test FLARE's own filters in the simulator, each at one site: the run continues with their output and reports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SVT = {
    "path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy",
    "args": {"fraction": 0.5, "epsilon": 10.0, "noise_var": 10.0, "gamma": 0.01},
}
ALL_FILTERS: dict[str, list[dict[str, Any]]] = {
    "site-2": [{"path": "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy", "args": {"gamma": 0.1}}],
    "site-3": [SVT],
    "site-4": [{"path": "nvflare.app_common.filters.exclude_vars.ExcludeVars", "args": {"exclude_vars": "bias$"}}],
    "site-5": [
        {
            "path": "nvflare.app_common.filters.convert_weights.ConvertWeights",
            "args": {"direction": "diff_to_weights"},
        }
    ],
    "site-6": [{"path": "nvflare.app_common.filters.dxo_blocker.DXOBlocker", "args": {"data_kinds": ["METRICS"]}}],
}


def put_filters(job: Path, filters: dict[str, list[dict[str, Any]]]) -> None:
    """Give each of these sites an app of its own, as the simulator has no site with a privacy policy."""
    meta = json.loads((job / "meta.json").read_text())
    for site, chain in filters.items():
        app = job / f"app_{site}"
        shutil.copytree(job / "app", app)
        config = app / "config" / "config_fed_client.json"
        content = json.loads(config.read_text())
        content["task_result_filters"] = [{"tasks": ["train", "anchor", "validate"], "filters": chain}]
        config.write_text(json.dumps(content))
        meta["deploy_map"]["app"].remove(site)
        meta["deploy_map"][app.name] = [site]
    (job / "meta.json").write_text(json.dumps(meta))


def test_svt_privacy_at_one_of_three(job, simulate):
    folder = job("fed_avg", min_sites=3)
    put_filters(folder, {"site-3": [SVT]})
    run = simulate(folder, threads=3)
    assert run.code == 0, run.log[-3000:]
    assert run.results["status"] == "completed"
    sites = ["site-1", "site-2", "site-3"]
    for record in run.results["rounds"]:
        assert record["accepted"] == sites
        assert record["left_out"] == []
        notes = [note for note in record["notes"] if "went through" in note]
        assert len(notes) == 1
        assert notes[0].startswith("site 'site-3': its model went through 'SVTPrivacy'; ")
        assert 0 < float(notes[0].split("; ")[1].split(" %")[0]) <= 55
    assert sorted(run.results["test"]) == sites
    assert "site 'site-3': its model went through 'SVTPrivacy'" in run.log


@pytest.mark.walk
def test_every_filter_at_a_site_of_its_own(job, simulate):
    """Check with a two-phase method that models and reports about the anchor go through the filters of their kind."""
    folder = job("fed_lwr", sites=6, min_sites=5, settings={"local_epochs": 1})
    put_filters(folder, ALL_FILTERS)
    run = simulate(folder, threads=6)
    assert run.code == 0, run.log[-3000:]
    assert run.results["status"] == "completed"
    sites = [f"site-{number}" for number in range(1, 7)]
    for record in run.results["rounds"]:
        assert record["accepted"] == sites
        ((left),) = record["left_out"]
        assert (left["site"], left["phase"]) == ("site-6", "anchor")
        assert "TASK_RESULT_FILTER_ERROR: a filter at the site blocks this answer" in left["reason"]
        said = "\n".join(record["notes"])
        for site, name in (
            ("site-2", "PercentilePrivacy"),
            ("site-3", "SVTPrivacy"),
            ("site-4", "ExcludeVars"),
            ("site-5", "ConvertWeights"),
        ):
            assert f"site {site!r}: its model went through {name!r}" in said
        assert "did not come and count as unchanged" in said
        assert "site-1" not in said
        assert "site-6" not in said
        assert all(by_site["site-6"]["weight"] > 0 for by_site in record["layers"].values())
    # Its metrics stay at home, too.
    assert sorted(run.results["test"]) == sites[:5]
    assert [left["site"] for left in run.results["left_out"]] == ["site-6"]
    model = torch.load(run.workspace / "server" / "simulate_job" / "FL_global_model.pt", weights_only=True)["model"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.values())
    counters = [tensor for name, tensor in model.items() if name.endswith("num_batches_tracked")]
    assert all(tensor.dtype == torch.int64 and tensor.shape == () for tensor in counters)
