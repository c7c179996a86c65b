"""Test jobs in FLARE's POC mode with one server and three sites as processes, and the death of one of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.federation.server.planning import PLAN
from fairflare.federation.transports.local import run_local
from fairflare.recipes import FairRecipe, ScriptRecipe, StatsRecipe
from fairflare.tasks.volumes.plan_file import read_plan
from tests.bundles import METADATA, train_config, write_volumes
from tests.federation.test_channels import volumes
from tests.tiny import run_document
from tests.unit.test_nnunet_task import plan

from .conftest import ROOT, TINY
from .poc_tools import SERVER, PocSystem, poc_system, processes, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.xdist_group("poc")]  # they share one POC

SITES = ["site-1", "site-2", "site-3"]
CHANNELS = ["T2w", "ADC"]  # site-3 lacks the second
# The held task counts trainings by their epochs, so a round has one.
HELD: dict[str, Any] = {
    "min_sites": 2,
    "settings": {"local_epochs": 1},
    "task_file": Path(__file__).with_name("held_task.py"),
}


@pytest.fixture(scope="module")
def poc(tmp_path_factory):
    with poc_system(tmp_path_factory.mktemp("poc"), SITES) as system:
        # How long FLARE waits, after our run has ended, for word from a site that is gone (default: 15 minutes).
        system.env["NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT"] = "3"
        system.env["FAIRFLARE_REPORT"] = "1"  # other tests leave the page out
        for name in (SERVER, *SITES):
            system.allow(name)
        system.start()
        yield system
        left = processes(system.mark)
        assert left, "the POC system went down by itself"
        said = system.stop()
        # The shell wrappers look every five seconds whether they are still needed.
        wait_for(f"end of all processes after `nvflare poc stop`: {said}", lambda: not processes(system.mark), 120)


@pytest.fixture(autouse=True)
def no_job_left(poc):
    """End the job of a failed test, so that the next test does not fail too."""
    poc.abort_jobs()


def results_of(workspace: Path) -> dict[str, Any]:
    return run_document(workspace / "fairflare")


def run_with_a_lost_site(poc: PocSystem, folder: Path, hold: Path, timeout: float) -> tuple[dict[str, Any], str, str]:
    """Submit a job, kill site-3 where its setting holds it, and return (results, log, FLARE's output)."""
    job = poc.submit(folder)
    wait_for("site-3 in the middle of its task", (hold / "reached").exists, 240)
    killed = poc.end_site("site-3")
    started = time.monotonic()
    # The wrapper that would restart it, the client's parent process, the job's process.
    for part in ("sub_start.sh", "client_train", "worker_process"):
        assert any(part in command for command in killed), killed

    def ended() -> bool:
        path = poc.run_dir(job) / "fairflare" / "results.json"
        return not path.exists() or json.loads(path.read_text())["status"] != "running"

    wait_for("end of the run without site-3", ended, timeout)
    seconds = time.monotonic() - started
    assert seconds < timeout
    said = poc.wait(job, 120)
    workspace = poc.download(job)
    return results_of(workspace), (workspace / "log.txt").read_text(), said


def test_published_job_runs_to_the_end(poc, job):
    """Prepare, start, submit, wait and download, with the package installed and no custom code."""
    job_id = poc.submit(job("fed_lwr", packaging="preinstalled", min_sites=3))
    said = poc.wait(job_id, 300)
    assert "FINISHED:COMPLETED" in said
    workspace = poc.download(job_id)
    results = results_of(workspace)
    assert results["status"] == "completed"
    assert sorted(results["test"]) == SITES
    assert all(0 <= values["dice"] <= 1 for values in results["test"].values())
    assert results["left_out"] == []
    assert [(r["current_round"], r["accepted"], r["left_out"]) for r in results["rounds"]] == [
        (0, SITES, []),
        (1, SITES, []),
    ]
    assert list((workspace / "tb_events").rglob("events*"))
    assert (workspace / "FL_global_model.pt").exists()
    assert "worst site" in (workspace / "log.txt").read_text()
    page = (workspace / "fairflare" / "report.html").read_text(encoding="utf-8")
    assert "<td>completed</td>" in page
    assert "Rounds</dt><dd>2</dd>" in page


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write volumes for each site, a MONAI bundle with YAML files that FLARE could not parse, and a run."""
    root = tmp_path_factory.mktemp("places")
    own = {site: write_volumes(root / site, seed=seed, counts=(2, 1, 1)) for seed, site in enumerate(SITES)}
    pairs = {site: volumes(root / site[-1], CHANNELS) for site in SITES[:2]}
    pairs["site-3"] = volumes(root / "3", CHANNELS[:1], channels=CHANNELS[:1])
    bundle = root / "bundle"
    (bundle / "configs").mkdir(parents=True)
    (bundle / "configs" / "train.yaml").write_text(yaml.safe_dump(train_config(), sort_keys=False))
    (bundle / "configs" / "metadata.yml").write_text(yaml.safe_dump(METADATA))
    (bundle / "folds.json").write_text("[[1, 2], [3]]")  # of the author's own: a list, which FLARE's parser refuses
    settings = {**TINY, "local_epochs": 1}
    run_local(FairRecipe("fed_avg", sites=SITES, num_rounds=1, settings=settings).plan, root / "run")
    return {"own": own, "channels": pairs, "bundle": bundle, "run": root / "run"}


def job_of(kind: str, places: dict[str, Any], out: Path) -> Path:
    """Write a job of a kind into a folder, as its user does, and return its folder."""
    what, _, packaging = kind.partition(", ")
    if what == "evaluate":
        options = ["--bundle"] if packaging else []
        given = ["evaluate", str(places["run"]), "--last", "--sites", ",".join(SITES), "--job", str(out), *options]
        assert (made := CliRunner().invoke(app, given)).exit_code == 0, made.output
        return out / "evaluate"
    if what == "plan":
        asked = ["--set", "num_classes=2", "--set", "min_cases=1"]
        made = CliRunner().invoke(app, ["plan", "--sites", ",".join(SITES), "--job", str(out), *asked])
        assert made.exit_code == 0, made.output
        return out / "plan"
    short: dict[str, Any] = {"sites": SITES, "num_rounds": 1, "min_sites": 3}
    carried = {"packaging": packaging} if packaging in ("bundle", "preinstalled") else {}
    if what == "stats":
        recipe: Any = StatsRecipe(sites=SITES, **carried)
    elif what == "script":
        script = ROOT / "docs" / "examples" / "hello_flare_fair.py"
        own_process = {"launch_external_process": True, "command": sys.executable} if packaging == "process" else {}
        recipe = ScriptRecipe("fed_avg", train_script=script, model="Net", **short, **own_process)
    elif what == "channels":
        settings = {"channels": CHANNELS, "features": [4, 4, 8, 8, 8, 4], "patches": 1, "local_epochs": 1}
        recipe = FairRecipe("fed_avg", task="volume_segmentation", settings=settings, **short)
    elif what == "nnunet":
        settings = {"plan": plan(), "num_classes": 2, "local_steps": 1, "batch_size": 1, "overlap": 0.0}
        recipe = FairRecipe("fed_avg", task="nnunet", settings=settings, **short, **carried)
    elif what == "MONAI bundle":
        recipe = FairRecipe("fed_avg", monai_bundle=places["bundle"], **short, **carried)
    else:
        recipe = FairRecipe("fed_avg", settings={**TINY, "local_epochs": 1}, **short, **carried)
    recipe.export(str(out))
    return out / recipe.name


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "plain, bundle",
        "MONAI bundle, bundle",
        "evaluate",
        "evaluate, bundle",
        "stats",
        "plan",
        "channels",
        "nnunet, preinstalled",
        "script",
        "script, process",
    ],
)
def test_every_kind_of_job_is_submitted(kind: str, poc: PocSystem, places: dict[str, Any], tmp_path: Path) -> None:
    """Submit each kind of job with ``nvflare job submit``, which parses files of a job, and see it complete."""
    data = places["channels" if kind == "channels" else "own"]
    if kind.startswith(("MONAI", "stats", "plan", "channels", "nnunet")):
        for site in SITES:
            poc.edit_local(site, "fairflare.json", lambda c, block=data[site]: c.update(block))
    try:
        job_id = poc.submit(job_of(kind, places, tmp_path / "jobs"))
        assert "FINISHED:COMPLETED" in poc.wait(job_id, 300)
    finally:
        for site in SITES:
            for key in ("data_root", "channels"):
                poc.edit_local(site, "fairflare.json", lambda c, key=key: c.pop(key, None))
    workspace = poc.download(job_id)
    if kind.startswith("stats"):
        document = json.loads((workspace / "fairflare" / "stats.json").read_text())
        assert sorted(document["sites"]) == SITES
        return
    if kind == "plan":
        planned = read_plan(json.loads((workspace / "fairflare" / PLAN).read_text()))
        assert planned.full.batch_size >= 2
        return
    (found,) = workspace.rglob("results.json")
    results = run_document(found)
    assert (results["status"], sorted(results["test"])) == ("completed", SITES)
    if kind == "channels":
        assert results["info"]["channels"] == {"T2w": SITES, "ADC": SITES[:2]}


def test_site_killed_in_the_middle_of_train(poc, job, tmp_path):
    """Kill site-3 in train of round 1, after a round of three sites: the timeout ends the wait, two sites continue."""
    hold = tmp_path / "hold"
    hold.mkdir()
    poc.edit_local(
        "site-3", "fairflare.json", lambda c: c.update(hold={"folder": str(hold), "phase": "train", "times": 2})
    )
    # The first round has to start three processes in this time.
    timeout = 45
    folder = job("fed_lwr", num_rounds=3, phase_timeout=timeout, max_missed=1, **HELD)
    # One phase waits for site-3; its six working phases take seconds.
    results, log, said = run_with_a_lost_site(poc, folder, hold, timeout + 30)
    assert results["status"] == "completed"
    assert sorted(results["test"]) == ["site-1", "site-2"]
    asked = [(r["sites"], r["accepted"]) for r in results["rounds"]]
    two = ["site-1", "site-2"]
    assert asked == [(SITES, SITES), (SITES, two), (two, two)]
    left_out = [(r["current_round"], x["site"], x["phase"]) for r in results["rounds"] for x in r["left_out"]]
    assert left_out == [(1, "site-3", "train"), (2, "site-3", "train")]
    assert results["rounds"][2]["left_out"][0]["reason"].startswith("not asked: ")
    (lost,) = results["rounds"][1]["left_out"]
    assert f"no answer within {timeout}" in lost["reason"]
    (train,) = (p for p in results["rounds"][1]["phases"] if p["name"] == "train")
    assert timeout <= train["seconds"] < timeout + 2
    assert (train["asked"], train["answered"]) == (3, 2)
    assert f"round 1, train: site 'site-3' left out: no answer within {timeout}" in log
    assert "site 'site-3' gave no answer in time in 1 phase" in log
    assert "FINISHED:COMPLETED" in said


def test_site_that_does_not_allow_the_package(poc, job):
    """Remove our classes from the allow list of one site: the job fails, and the site's log names the class."""
    poc.start_site("site-3")
    poc.edit_local("site-3", "fairflare.json", lambda c: c.clear())
    poc.allow("site-3", yes=False)
    job_id = poc.submit(job("fed_lwr", packaging="preinstalled", min_sites=3))
    said = poc.wait(job_id, 240)
    assert "FINISHED:ABNORMAL" in said
    assert "terminal state FAILED" in said
    results = poc.download(job_id) / "fairflare" / "results.json"
    assert not results.exists() or json.loads(results.read_text())["status"] != "completed"
    console = (poc.kit("site-3") / "poc_console.log").read_text()
    assert "Component 'fairflare.flare.executor.SiteExecutor'" in console
    assert "is not in allow_list" in console
