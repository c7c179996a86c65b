"""Test secure sums in FLARE's POC mode, keys signed: the bits of one process, whatever site or server is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairflare.federation.transports.calls import LocalTransport
from fairflare.federation.transports.local import run_local
from fairflare.recipes import FairRecipe
from tests.tiny import run_document

from .conftest import TINY
from .poc_tools import SERVER, PocSystem, poc_system, wait_for
from .test_every_job import ALSO, CLASSES, TONES, model_of

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.xdist_group("poc_sums"), pytest.mark.timeout(1200)]

SITES = ["site-1", "site-2", "site-3", "site-4"]
GRACE, WAIT = 60.0, 500


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory, deaths: Path) -> Iterator[PocSystem]:
    with poc_system(tmp_path_factory.mktemp("poc"), SITES) as system:
        system.env |= {"NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "3", "FAIRFLARE_TEST_DEATHS": str(deaths)}
        for name in (SERVER, *SITES):
            system.allow(name)
        for name in SITES:
            system.edit_local(name, "fairflare.json", lambda c: c.update(num_threads=1))
        system.nvflare("poc", "start", "--no-wait")  # its session that waits gives up for good on a busy machine
        log = system.kit(SERVER) / "log.txt"
        wait_for("all sites", lambda: log.exists() and f"Total clients: {len(SITES)}" in log.read_text(), WAIT)
        yield system
        system.stop()


@pytest.fixture(autouse=True)
def no_job_left(poc: PocSystem) -> None:
    poc.abort_jobs()


def recipe_of(method: str, sites: int, **options: Any) -> FairRecipe:
    given = {"num_rounds": 2, "min_sites": 3, "straggler_grace": GRACE, "secure": "sums", **options}
    file = Path(__file__).with_name("dying_task.py")
    settings = {**TINY, "local_epochs": 1}
    return FairRecipe(method, name=f"{method}-{sites}", sites=SITES[:sites], task_file=file, settings=settings, **given)


def done(poc: PocSystem, recipe: FairRecipe, folder: Path) -> Path:
    """Do a job to its end, and return the server's run directory."""
    recipe.export(str(folder))
    job = poc.submit(folder / recipe.name)
    assert "FINISHED:COMPLETED" in poc.wait(job, WAIT)
    return poc.download(job)


def same(poc: PocSystem, workspace: Path, recipe: FairRecipe, folder: Path) -> dict[str, Any]:
    """Compare a job with the run in one process, bit for bit; return its results."""
    here = run_local(recipe.plan, folder)
    results, document = (run_document(path) for path in (workspace / "fairflare/results.json", here / "results.json"))
    assert results["status"] == "completed"
    told = f"Secure sums of {len(recipe.plan.sites or ())} sites, keys signed with certificates."
    assert results["info"]["sums"].startswith(told)
    assert results["test"] == document["test"]
    for what in ("accepted", "site_weights", "layers"):
        assert [r[what] for r in results["rounds"]] == [r[what] for r in document["rounds"]]
    expected, found = model_of(here.parent), model_of(workspace)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert not list(poc.workspace.rglob("sums.key"))  # the keys of an ended run are gone
    assert list(poc.workspace.rglob("sums.log"))
    return results


def lost(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str, int]) -> None:
    """Let sites of runs in this process die: site, task, round."""
    answer = LocalTransport._answer

    def dead(transport: Any, site: str, name: str, task: Any) -> Any:
        found = answer(transport, site, name, task)  # it does all but answer
        return "it died" if (site, name, task.current_round) in points else found

    monkeypatch.setattr(LocalTransport, "_answer", dead)


@pytest.mark.parametrize("method", ["fed_avg", "fed_ism_plus_l"])
def test_three_sites(method: str, poc: PocSystem, tmp_path: Path) -> None:
    recipe = recipe_of(method, 3)
    results = same(poc, done(poc, recipe, tmp_path / "jobs"), recipe, tmp_path / "here")
    assert [r["accepted"] for r in results["rounds"]] == [SITES[:3]] * 2


def test_norms_class_gradients_and_groups_are_sums(poc: PocSystem, tmp_path: Path) -> None:
    """Compare all that is opened as sums with the run in one process to the bit, and with the plain run to 1e-6."""
    few = {"partition": "iid", "phantom_samples": 240, "phantom_test": 80, "phantom_own_test": 80, "local_epochs": 1}
    settings = {**CLASSES, **TONES, **ALSO["creff"], **few, "bootstrap": 0, "norm_statistics": "recalibrated"}
    given = {"num_rounds": 1, "min_sites": 3, "straggler_grace": GRACE, "settings": settings, "sites": SITES}
    recipe = FairRecipe("creff", name="creff-4", secure="sums", **given)
    workspace = done(poc, recipe, tmp_path / "jobs")
    results = same(poc, workspace, recipe, tmp_path / "here")
    plain = run_local(FairRecipe("creff", name="plain", max_weight=0.5, **given).plan, tmp_path / "plain")
    expected, found = model_of(plain.parent), model_of(workspace)
    largest = {name: float((found[name].double() - of.double()).abs().max()) for name, of in expected.items()}
    print(f"largest difference of sums to the plain run: {max(largest.values()):.2g}")
    assert max(largest.values()) < 1e-6, largest
    assert any("running_var" in name for name in largest)
    assert all(r["values"]["classes"] >= 3 for r in results["rounds"])
    assert all(r["details"]["norms"]["images"].keys() == {*SITES} for r in results["rounds"])
    tones = [run_document(run)["groups"]["pooled"]["tone"]["groups"]
             for run in (workspace / "fairflare", plain)]  # fmt: skip
    for tone, of in tones[1].items():
        assert tones[0][tone] == pytest.approx(of, abs=1e-6, nan_ok=True)
    assert sum(of["images"] for of in tones[0].values()) > 100


def test_a_site_killed_in_mask(poc: PocSystem, deaths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a whole site, which is then away for the rest of the job."""
    recipe = recipe_of("fed_ism_plus_l", 4, max_missed=1)
    recipe.export(str(tmp_path / "jobs"))
    deaths.joinpath("site-3.mask.1.hold").touch()
    job = poc.submit(tmp_path / "jobs" / recipe.name)
    wait_for("site-3 in mask", (deaths / "site-3.mask.1.reached").exists, WAIT)
    killed = poc.end_site("site-3")
    for part in ("sub_start.sh", "client_train", "worker_process"):
        assert any(part in command for command in killed), killed
    poc.wait(job, WAIT)
    workspace = poc.download(job)
    poc.start_site("site-3")
    (key,) = poc.workspace.rglob("sums.key")
    assert key.is_relative_to(poc.kit("site-3"))  # the end of the run never came; it goes after a week
    key.unlink()
    lost(monkeypatch, ("site-3", "mask", 1), ("site-3", "validate", 2))
    results = same(poc, workspace, recipe, tmp_path / "here")
    assert [(x["site"], x["phase"]) for x in results["rounds"][1]["left_out"]] == [("site-3", "mask")]


def test_a_job_ended_in_release_and_a_server_killed_before_its_checkpoint(
    poc: PocSystem, deaths: Path, tmp_path: Path
) -> None:
    """Submit the job until it is done; sites redo a round whose sum was open by the update that they kept."""
    recipe = recipe_of("fed_lwr", 4, experiment="e")
    recipe.export(str(tmp_path / "jobs"))
    for point in ("site-2.release.0", "server.save.2"):
        (deaths / point).touch()
        job = poc.submit(tmp_path / "jobs" / recipe.name)
        assert "FINISHED:COMPLETED" not in poc.wait(job, WAIT)
        assert not (deaths / point).exists()
    results = same(poc, done(poc, recipe, tmp_path / "again"), recipe, tmp_path / "here")
    assert results["info"]["resumed_at_round"] == 1
    assert [r["accepted"] for r in results["rounds"]] == [SITES] * 2


def test_a_process_killed_in_train_in_mask_and_in_release(
    poc: PocSystem, deaths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a site's process of a task die in each; the site is back in the next round, in release at once."""
    points = [("site-4", "train", 0), ("site-4", "mask", 1), ("site-4", "release", 2)]
    for point in points:
        deaths.joinpath(".".join(map(str, point))).touch()
    recipe = recipe_of("fed_avg", 4, num_rounds=3)
    # A child process takes each task of the site, so that its death costs a task; else FLARE ends the job.
    poc.edit_local("site-4", "fairflare.json", lambda c: c.update(isolate=True))
    workspace = done(poc, recipe, tmp_path / "jobs")
    poc.edit_local("site-4", "fairflare.json", lambda c: c.update(isolate=False))
    assert not any(deaths.joinpath(".".join(map(str, point))).exists() for point in points)
    lost(monkeypatch, *points[:2])
    results = same(poc, workspace, recipe, tmp_path / "here")
    assert [r["accepted"] for r in results["rounds"]] == [SITES[:3], SITES[:3], SITES]
    left = [(x["site"], x["phase"], r["current_round"]) for r in results["rounds"] for x in r["left_out"]]
    assert left == points
    assert all("killed by SIGKILL" in x["reason"] for r in results["rounds"] for x in r["left_out"])
