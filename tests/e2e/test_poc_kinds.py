"""One method of each kind in FLARE's POC mode: one model, parts that stay at the sites, another model for each site,
training at the server. Each gives the figures and the bits of a run in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.federation.transports.local import run_local
from fairflare.recipes import FairRecipe, StatsRecipe

from .poc_tools import SERVER, PocSystem, poc_system
from .test_every_job import ALSO, CLASSES, TINY, TONES, model_of

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(600)]

SITES = ["site-1", "site-2"]
KINDS = {
    "one model": ("q_fed_avg", TINY),
    "parts stay at the sites": ("ditto", TINY),
    "another model for each site": ("cgsv", TINY),
    "training at the server": ("creff", {**CLASSES, **ALSO["creff"], **TONES}),
}


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PocSystem]:
    with poc_system(tmp_path_factory.mktemp("poc"), SITES) as system:
        for name in (SERVER, *SITES):
            system.allow(name)
        for name in SITES:
            system.edit_local(name, "fairflare.json", lambda c: c.update(num_threads=1))
        system.start()
        yield system
        system.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_of_each_kind(kind: str, poc: PocSystem, tmp_path: Path) -> None:
    method, tiny = KINDS[kind]
    recipe = FairRecipe(
        method, sites=SITES, num_rounds=3, packaging="preinstalled", min_sites=2,
        settings={**FOR_HOSPITALS, **tiny, "local_epochs": 1},
    )  # fmt: skip
    recipe.export(str(tmp_path / "jobs"))
    job = poc.submit(tmp_path / "jobs" / recipe.name)
    said = poc.wait(job, 400)
    assert "FINISHED:COMPLETED" in said
    workspace = poc.download(job)
    results = json.loads((workspace / "fairflare" / "results.json").read_text())
    assert results["status"] == "completed"
    assert [(r["accepted"], r["left_out"]) for r in results["rounds"]] == [(SITES, [])] * 3

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = run_local(recipe.plan, tmp_path / "here")
    finally:
        torch.set_num_threads(threads)
    document = json.loads((here / "results.json").read_text())
    assert results["test"] == document["test"]
    assert results["groups"] == document["groups"]
    assert (results["groups"] is not None) == ("groups" in tiny)
    expected, found = model_of(here.parent), model_of(workspace)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_the_statistics_job(poc: PocSystem, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert CliRunner().invoke(app, ["phantom", "prostate", "--sites", "2", "-o", str(data)]).exit_code == 0
    assert CliRunner().invoke(app, ["stats", "-d", str(data), "-o", str(tmp_path / "here")]).exit_code == 0
    for name in SITES:
        poc.edit_local(name, "fairflare.json", lambda c, site=name: c.update(data_root=str(data / site)))
    try:
        StatsRecipe(sites=SITES).export(str(tmp_path / "jobs"))
        job = poc.submit(tmp_path / "jobs" / "stats")
        assert "FINISHED:COMPLETED" in poc.wait(job, 200)
    finally:
        for name in SITES:
            poc.edit_local(name, "fairflare.json", lambda c: c.pop("data_root"))
    told = (poc.download(job) / "fairflare" / "stats.json").read_text()
    assert told == (tmp_path / "here" / "stats.json").read_text()
