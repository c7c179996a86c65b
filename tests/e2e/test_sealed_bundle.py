"""Train a sealed MONAI bundle where no custom code is permitted, kill it, and resume it to the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.flare.export.recipes import FairRecipe
from fairflare.methods.base.catalog import get_method
from fairflare.provision import SitePolicyBuilder
from tests.bundles import write_bundle, write_volumes

from .poc_tools import SERVER, PocSystem, end_processes, poc_system, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.walk]

SITES = ["site-1", "site-2", "site-3"]
ROUNDS = 3


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("data")
    return {site: write_volumes(root / site, seed=seed, counts=(2, 1, 1)) for seed, site in enumerate(SITES)}


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory, local: dict[str, Any]) -> Iterator[PocSystem]:
    with poc_system(tmp_path_factory.mktemp("poc"), SITES) as system:
        system.env["NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT"] = "3"
        own = {site: {**local[site], "min_cases": 1, "num_threads": 1} for site in SITES}
        builder = SitePolicyBuilder(site_settings=own)
        for name in (SERVER, *SITES):
            builder.lay(system.kit(name))
        system.start()
        yield system
        system.stop()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle") / "b")


def results_of(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "fairflare" / "results.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def test_with_its_code_it_is_refused(poc: PocSystem, bundle: Path, tmp_path: Path) -> None:
    FairRecipe("fed_avg", monai_bundle=bundle, sites=SITES, num_rounds=1).export(str(tmp_path))
    job = poc.submit(tmp_path / "fed_avg")
    poc.wait(job, 60)
    assert "BYOC not permitted" in poc.nvflare("job", "meta", job, check=False)


@pytest.mark.parametrize("method", ["fed_avg", "fed_lwr"])
def test_sealed_it_trains(poc: PocSystem, bundle: Path, local: dict[str, Any], method: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"monai_bundle": bundle, "sites": SITES, "num_rounds": ROUNDS}
    FairRecipe(method, packaging="preinstalled", experiment=method, **given).export(str(tmp_path / "jobs"))
    job = poc.submit(tmp_path / "jobs" / method)
    wait_for("the first round", lambda: results_of(poc.run_dir(job)).get("rounds"), 240)
    killed = end_processes(poc.mark, lambda command: job in command)
    assert len(killed) >= 2  # of the server and of sites
    poc.abort_jobs()
    again = poc.submit(tmp_path / "jobs" / method)
    said = poc.wait(again, 300)
    assert "FINISHED:COMPLETED" in said
    workspace = poc.download(again)
    results = results_of(workspace)
    assert [r["accepted"] for r in results["rounds"]] == [SITES] * ROUNDS
    settings = {**FOR_HOSPITALS, **get_method(method).preinstalled}
    plan = make_plan(method, settings=settings, **given)
    run_local(plan, tmp_path / "code", {"sites": {site: {**own, "min_cases": 1} for site, own in local.items()}})
    sealed, code = (torch.load(path, weights_only=True)["model"] for path in models(workspace, tmp_path / "code"))
    assert all(torch.equal(tensor, code[name]) for name, tensor in sealed.items())


def models(*folders: Path) -> list[Path]:
    return [next(folder.rglob("FL_global_model.pt")) for folder in folders]
