"""One method of each way to send tensors in FLARE's POC mode; test_every_job.py has all methods, in the simulator.

A frozen encoder, which every participant reads from a file of its own, does not travel; each job gives the figures and
the bits of a run in one process in which all travels. One method of each kind that keeps something is killed on the
way. And a site without that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.data.preparers.__main__ import main as prepare
from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.recipes import FairRecipe, StatsRecipe
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from tests.shapes import of_what_travels, one_each
from tests.tiny import run_document

from .poc_tools import SERVER, PocSystem, end_processes, poc_system, wait_for
from .test_every_job import ALSO, CLASSES, TINY, TONES, model_of

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(600)]

SITES = ["site-1", "site-2"]
FINDINGS = ["effusion", "edema", "mass"]
#: Phase and round in which every process of the job is ended: two phases, parts that stay, training at the server, and
#: agents, map and its neurons there.
KILLED = {"fed_lwr": ("anchor", 1), "ditto": ("train", 1), "creff": ("train", 1), "fed_mrl": ("train", 1)}


def settings_of(method: str) -> dict[str, Any]:
    tiny = TINY if all_methods()[method].task == "segmentation" else CLASSES
    # FairLoRA's adapters freeze all else by themselves.
    own = {} if method == "fair_lora" else {"freeze": "encoder"}
    groups = TONES if method == "creff" else {}
    return {**tiny, **ALSO.get(method, {}), **groups, **own}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write networks of another training for all participants; ``wrong``: a network of a third training."""
    folder, found = tmp_path_factory.mktemp("encoders"), {}
    tasks = {"wrong": SegmentationTask(**TINY), "segmentation": SegmentationTask(**TINY)}
    of_classes = {name: CLASSES[name] for name in ("image_size", "features", "max_pool")}
    tasks["classification"] = ClassificationTask(**of_classes)
    for seed, (name, task) in enumerate(tasks.items()):
        torch.manual_seed(seed)
        state = {key: tensor for key, tensor in task.build_model().state_dict().items() if not key.startswith("head.")}
        torch.save(state, folder / f"{name}.pt")
        found[name] = str(folder / f"{name}.pt")
    return found


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PocSystem]:
    with poc_system(tmp_path_factory.mktemp("poc"), SITES) as system:
        system.env["NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT"] = "3"  # for word of a site that is gone
        for name in (SERVER, *SITES):
            system.allow(name)
        for name in SITES:
            system.edit_local(name, "fairflare.json", lambda c: c.update(num_threads=1))
        system.start()
        yield system
        system.stop()


def give(poc: PocSystem, **by_name: str) -> None:
    """Give each participant the encoder's file; a participant that is not named gets the file of ``all``."""
    for name in (SERVER, *SITES):
        path = by_name.get(name.replace("-", "_"), by_name["all"])
        poc.edit_local(name, "fairflare.json", lambda c, path=path: c.update(initial_weights=path))


def frozen(method: str, **options: Any) -> FairRecipe:
    settings = {**FOR_HOSPITALS, **settings_of(method), "local_epochs": 1, "initial_keys": {}}
    given = {"num_rounds": 3, "min_sites": 2, **options}
    return FairRecipe(method, sites=SITES, packaging="preinstalled", settings=settings, **given)


def results_of(workspace: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_document(workspace / "fairflare")
    return found


def killed(poc: PocSystem, folder: Path, phase: tuple[str, int]) -> None:
    """Submit a job, and kill its processes at the server and at the sites when the sites are asked in a phase."""
    job = poc.submit(folder)
    events = poc.run_dir(job) / "fairflare" / "progress.jsonl"

    def asked() -> bool:
        lines = events.read_text().splitlines() if events.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]
        return any(e["kind"] == "phase" and (e["phase"], e["current_round"]) == phase for e in told)

    wait_for(f"{phase[0]} of round {phase[1]}", asked, 240, period=0.02)
    ended = end_processes(poc.mark, lambda command: job in command)
    assert len(ended) == 1 + len(SITES), ended
    assert "FINISHED:COMPLETED" not in poc.wait(job, 120)


@pytest.mark.parametrize("method", sorted({*one_each(of_what_travels), *KILLED}))
def test_a_method_with_what_is_trained_alone(
    method: str, poc: PocSystem, files: dict[str, str], tmp_path: Path
) -> None:
    file = files[all_methods()[method].task]
    give(poc, all=file)
    recipe = frozen(method, exchange="trainable", experiment=method)
    recipe.export(str(tmp_path / "jobs"))
    if method in KILLED:
        killed(poc, tmp_path / "jobs" / recipe.name, KILLED[method])
    job = poc.submit(tmp_path / "jobs" / recipe.name)
    said = poc.wait(job, 400)
    assert "FINISHED:COMPLETED" in said
    workspace = poc.download(job)
    results = results_of(workspace)
    assert results["status"] == "completed"
    assert results["info"].get("resumed_at_round") == (1 if method in KILLED else None)
    assert [(r["accepted"], r["left_out"]) for r in results["rounds"]] == [(SITES, [])] * recipe.plan.run.rounds_in_all

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = run_local(frozen(method).plan, tmp_path / "here", {"initial_weights": file})
    finally:
        torch.set_num_threads(threads)
    document = run_document(here)
    assert results["test"] == document["test"]
    assert results["groups"] == document["groups"]
    assert (results["groups"] is not None) == ("groups" in settings_of(method))
    assert [r["layers"] for r in results["rounds"]] == [r["layers"] for r in document["rounds"]]
    assert [r["site_weights"] for r in results["rounds"]] == [r["site_weights"] for r in document["rounds"]]
    expected, found = model_of(here.parent), model_of(workspace)
    assert found.keys() < expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    read = torch.load(file, weights_only=True)
    stayed = [name for name in expected if name not in found]
    assert stayed
    assert all(torch.equal(expected[name], read[name.replace(".base_layer.", ".")]) for name in stayed)


@pytest.mark.parametrize("kind", ["wrong", "absent"])
def test_a_site_without_the_right_encoder(kind: str, poc: PocSystem, files: dict[str, str], tmp_path: Path) -> None:
    """Check that the site is named, and that the run ends, or continues without the site where the job allows it."""
    theirs = files["wrong"] if kind == "wrong" else str(tmp_path / "absent.pt")
    give(poc, all=files["segmentation"], site_2=theirs)
    goes_on = {"require_all_sites": False, "min_sites": 1} if kind == "wrong" else {}
    recipe = frozen("fed_avg", num_rounds=1, exchange="trainable", **goes_on)
    recipe.export(str(tmp_path / "jobs"))
    job = poc.submit(tmp_path / "jobs" / recipe.name)
    said = poc.wait(job, 200)
    results = results_of(poc.download(job))
    if kind == "absent":
        assert "FINISHED:COMPLETED" not in said
        assert results["status"] == "failed"
        assert "site 'site-2': its network, of which only a part is sent, cannot be built here" in results["reason"]
        assert theirs not in json.dumps(results)
        return
    assert "FINISHED:COMPLETED" in said
    assert results["status"] == "completed"
    (record,) = results["rounds"]
    assert record["accepted"] == ["site-1"]
    (out,) = record["left_out"]
    assert out["site"] == "site-2"
    assert "the part of the network that is not sent (exchange='trainable') differs" in out["reason"]


def models_at(poc: PocSystem) -> set[Path]:
    """Return the files of models in the sites' folders."""
    return {path for site in SITES for path in poc.kit(site).rglob("*") if path.suffix in (".pt", ".safetensors")}


def findings_in(folder: Path) -> Path:
    """Write pictures of both sites, and a table of their findings, some of them uncertain or empty; prepare them."""
    folder.mkdir()
    rng, rows = np.random.default_rng(0), [["image", "site", "patient", *FINDINGS]]
    for number in range(96):
        of: list[Any] = [number // 2 >> bit & 1 for bit in range(3)]
        picture = rng.normal(100, 12, (32, 32)) + 80 * np.repeat([*of, 0], 8)[:, None]
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        of[0] = -1 if number % 24 == 4 else of[0]
        of[1] = "" if number % 24 == 7 else of[1]
        rows.append([f"{number}.png", SITES[number % 2], f"p{number // 4}", *of])
    (folder / "table.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    data = folder.parent / "data"
    given = ["--source", str(folder), "--csv", str(folder / "table.csv"), "--classes", *FINDINGS, "--out", str(data)]
    assert prepare(["images", *given, "--uncertain", "ignore", "--blank", "missing"]) == 0
    return data


def test_several_findings_from_a_table_to_the_page(poc: PocSystem, tmp_path: Path) -> None:
    """Check that prepared labels with findings, some not known, give the figures of a run in one process."""
    data = findings_in(tmp_path / "pictures")
    checked = CliRunner().invoke(app, ["check-data", str(data)])
    assert (checked.exit_code, "0 problem(s)" in checked.output) == (0, True), checked.output
    local = json.loads((data / "fairflare.json").read_text())
    for place, site in enumerate(SITES):
        listed = json.loads((data / site / "datalist.json").read_text())
        labels = [entry["label"] for split in ("training", "validation", "test") for entry in listed[split]]
        assert [sum(label[k] is None for label in labels) for k in range(3)] == [4 * (k == place) for k in range(3)]
    settings = {
        "findings": FINDINGS, "image_size": [32, 32], "in_channels": 1, "features": [4, 4, 8, 8], "max_pool": False,
        "local_epochs": 1,
    }  # fmt: skip
    recipe = FairRecipe(
        "fed_lwr",
        task="classification",
        sites=SITES,
        packaging="preinstalled",
        settings=settings,
        num_rounds=2,
        min_sites=2,
    )
    recipe.export(str(tmp_path / "jobs"))
    for name in (SERVER, *SITES):
        own = local["sites"].get(name, {})
        poc.edit_local(name, "fairflare.json", lambda c: c.pop("initial_weights", None))
        poc.edit_local(name, "fairflare.json", lambda c, own=own: c.update(own))
    try:
        job = poc.submit(tmp_path / "jobs" / recipe.name)
        assert "FINISHED:COMPLETED" in poc.wait(job, 300)
    finally:
        for name in SITES:
            poc.edit_local(name, "fairflare.json", lambda c: c.pop("data_root"))
    workspace = poc.download(job)
    results = results_of(workspace)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = run_local(recipe.plan, tmp_path / "here", local)
    finally:
        torch.set_num_threads(threads)
    document = run_document(here)
    assert {key: results[key] for key in ("test", "clinical", "footing")} == {
        key: document[key] for key in ("test", "clinical", "footing")
    }
    assert all({f"auc_{name}" for name in FINDINGS} <= own.keys() for own in results["test"].values())
    page = tmp_path / "page"
    assert CliRunner().invoke(app, ["report", str(workspace), "--out", str(page)]).exit_code == 0
    text = (page / "index.html").read_text()
    assert all(name in text for name in (*FINDINGS, *SITES))


def test_the_statistics_job(poc: PocSystem, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert CliRunner().invoke(app, ["phantom", "prostate", "--sites", "2", "-o", str(data)]).exit_code == 0
    assert CliRunner().invoke(app, ["stats", "-d", str(data), "-o", str(tmp_path / "here")]).exit_code == 0
    blocks = json.loads((data / "fairflare.json").read_text())["sites"]  # with what was annotated, as stats reads it
    for name in SITES:
        poc.edit_local(name, "fairflare.json", lambda c, own=blocks[name]: c.update(own))
    try:
        StatsRecipe(sites=SITES).export(str(tmp_path / "jobs"))
        job = poc.submit(tmp_path / "jobs" / "stats")
        assert "FINISHED:COMPLETED" in poc.wait(job, 200)
    finally:
        for name in SITES:
            poc.edit_local(name, "fairflare.json", lambda c, own=blocks[name]: [c.pop(key) for key in own])
    told = (poc.download(job) / "fairflare" / "stats.json").read_text()
    assert told == (tmp_path / "here" / "stats.json").read_text()


def test_the_job_of_given_models(poc: PocSystem, tmp_path: Path) -> None:
    """Without custom code; it gives the bits of a run's final test, and no file of a model is at a site."""
    data = tmp_path / "data"
    assert CliRunner().invoke(app, ["phantom", "prostate", "--sites", "2", "-o", str(data)]).exit_code == 0
    local = json.loads((data / "fairflare.json").read_text())
    runs, names = {}, ("one", "two")
    for seed, name in enumerate(names):
        settings = {"image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "local_epochs": 1}
        recipe = FairRecipe("fed_avg", sites=SITES, num_rounds=1, seed=seed, settings=settings, bootstrap=50)
        runs[name] = run_document(run_local(recipe.plan, tmp_path / name, local))
    for name in SITES:
        poc.edit_local(name, "fairflare.json", lambda c, site=name: c.update(data_root=str(data / site)))
    places = [str(tmp_path / name) for name in names]
    what = ["--last", "--sites", ",".join(SITES), "--job", str(tmp_path / "jobs"), "--set", "bootstrap=50"]
    assert (made := CliRunner().invoke(app, ["evaluate", *places, *what])).exit_code == 0, made.output
    before = models_at(poc)
    try:
        job = poc.submit(tmp_path / "jobs" / "evaluate")
        assert "FINISHED:COMPLETED" in poc.wait(job, 200)
        assert models_at(poc) <= before  # of other jobs
    finally:
        for name in SITES:
            poc.edit_local(name, "fairflare.json", lambda c: c.pop("data_root"))
    downloaded = poc.download(job)
    folders = [downloaded / "evaluation" / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        found = results_of(folder)
        for key in ("test", "inequality", "fairness", "resampled"):
            assert found[key] == runs[name][key]
    shown = json.loads(CliRunner().invoke(app, ["show", *map(str, folders), "--json"]).stdout)["comparison"]
    assert all(difference["p"] is not None for difference in shown["differences"])
