"""Test ``fairflare evaluate``: given models get the final test's figures, bit by bit, and differences by patient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from fairflare.cli.commands import app
from fairflare.data.datalist import write_datalist
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import Place, WithoutTraining
from fairflare.federation.transports.local import run_local
from tests.bundles import train_config, two_sites, write_bundle
from tests.tiny import RESULTS, VOLUMES, model_in, run_document

CLASSES = ["naevus", "melanoma", "cyst"]
#: Settings of which each changes what a test gives; the model's file or its run tells them.
SETTINGS: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8], "num_classes": 3, "local_epochs": 1, "batch_size": 5,
    "groups": ["sex"],
}  # fmt: skip
#: Of the results, all that the final test says of the last model.
OF_TEST = (
    "test", "fairness", "inequality", "groups", "clinical", "global_test", "suppressed", "validation", "resampled",
)  # fmt: skip


def evaluate(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def refused(*arguments: Any) -> str:
    result = evaluate(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    return result.stderr.splitlines()[-1].removeprefix("error: ")


def pictures(root: Path, names: list[str] = CLASSES) -> Path:
    """Write images of two sites, several for each patient, and one list in the global test."""
    sites = {}
    for number, site in enumerate(("north", "south")):
        random, folder = np.random.default_rng(number), root / site
        folder.mkdir(parents=True)
        items = []
        for case in range(34):
            colour = random.uniform(0, 255, (40, 44, 3))
            colour[:, :, case % 3] *= 0.6
            Image.fromarray(colour.astype(np.uint8)).save(folder / f"{case}.png")
            sex = "FM"[case % 2]
            items.append(
                {"image": f"{case}.png", "label": case % 3, "patient": f"p{case // 2}", "attributes": {"sex": sex}}
            )
        splits = {"training": items[:10], "validation": items[10:14], "test": items[14:]}
        write_datalist(
            folder / "datalist.json",
            splits,
            class_names=names,
            attributes={"sex": {"kind": "category", "values": ["F", "M"]}},
        )
        sites[site] = {"data_root": str(folder)}
    (root / "fairflare.json").write_text(json.dumps({"sites": sites}))
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do two runs, ``one`` and ``two``, on the images in ``data``."""
    root = tmp_path_factory.mktemp("runs")
    local = json.loads((pictures(root / "data") / "fairflare.json").read_text())
    for name, rate in (("one", 1e-3), ("two", 3e-2)):
        plan = make_plan(
            "fed_avg", task="classification", sites=["north", "south"], num_rounds=2, bootstrap=50,
            settings={**SETTINGS, "learning_rate": rate},
        )  # fmt: skip
        run_local(plan, root / name, local)
    return root


@pytest.fixture(scope="module")
def tested(runs: Path) -> dict[str, Any]:
    """Return the document that ``--json`` prints about both models; results are in ``evaluated``."""
    out = runs / "evaluated"
    ran = evaluate(
        runs / "one", runs / "two", "--last", "-d", runs / "data", "-o", out, "--set", 'groups=["sex"]',
        "--set", "bootstrap=50", "--json",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.usefixtures("tested")
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_figures_of_the_final_test_to_the_bit(runs: Path, name: str) -> None:
    of_run, of_model = run_document(runs / name / RESULTS), run_document(runs / "evaluated" / name / RESULTS)
    assert of_run["groups"]["sites"]
    assert {key: of_model[key] for key in OF_TEST} == {key: of_run[key] for key in OF_TEST}
    assert (of_model["status"], of_model["rounds"], of_model["best"]) == ("completed", [], None)
    assert of_model["info"]["title"] == f"given model '{name}', tested without training"
    # The site half tests with the run's batches.
    assert of_model["info"]["config"]["training"]["args"]["batch_size"] == 5
    kept = [path.name for path in (runs / "evaluated").rglob("*") if path.suffix in (".pt", ".safetensors")]
    assert kept == []


def test_differences_are_of_the_patients(runs: Path, tested: dict[str, Any]) -> None:
    compared = tested["comparison"]
    assert compared["reference"] == "one"
    assert {d["measure"] for d in compared["differences"]} == {"average", "std", "worst", "north", "south"}
    draws = {name: run_document(runs / "evaluated" / name / RESULTS)["resampled"] for name in ("one", "two")}
    for d in compared["differences"]:
        assert d["low"] < d["mean"] < d["high"]
        assert d["verdict"] in ("better", "worse", "within noise", "cannot tell")
        if d["measure"] in draws["one"]:
            of_site = np.subtract(draws["two"][d["measure"]], draws["one"][d["measure"]])
            assert d["images_sd"] == pytest.approx(of_site.std(ddof=1) * np.sqrt(10 / 9))  # ten patients
    shown = CliRunner().invoke(app, ["show", *(str(runs / "evaluated" / name) for name in ("one", "two"))])
    assert "over the test patients (bootstrap, 10 a site)" in " ".join(shown.output.split())


def test_runs_of_one_seed_still_say_nothing_of_noise(runs: Path) -> None:
    shown = CliRunner().invoke(app, ["show", *(str(runs / name) for name in ("one", "two")), "--json"])
    assert {d["verdict"] for d in json.loads(shown.stdout)["comparison"]["differences"]} == {"one seed"}


def test_a_state_dict_with_a_task(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "bare.pt"
    torch.save(model_in(runs / "two" / RESULTS), file)
    said = refused(file, "-d", runs / "data", "-o", tmp_path)
    assert "does not say what it was trained for" in said
    assert "give --task with the settings that it was trained with (--set), or --task-file" in said
    said = refused(file, "-d", runs / "data", "-o", tmp_path, "--task", "classification", "--set", "num_classes=3")
    assert "bare.pt does not fit the network of its task" in said
    names = ("image_size", "features", "num_classes", "batch_size")
    of_task = [text for name in names for text in ("--set", f"{name}={json.dumps(SETTINGS[name])}")]
    ran = evaluate(file, "-d", runs / "data", "-o", tmp_path, "--task", "classification", *of_task)
    assert ran.exit_code == 0, ran.output
    assert "44x40 RGB images are read as 32x32 RGB\n" in ran.stderr  # as `run` says
    assert run_document(tmp_path / "bare" / RESULTS)["test"] == run_document(runs / "two" / RESULTS)["test"]


def test_some_of_the_sites(runs: Path, tmp_path: Path) -> None:
    ran = evaluate(runs / "one", "--last", "-d", runs / "data", "-o", tmp_path, "--sites", "south")
    assert ran.exit_code == 0, ran.output
    assert "given model 'one', tested without training\n" in ran.stdout  # a test has no seed
    of_run = run_document(runs / "one" / RESULTS)["test"]
    assert run_document(tmp_path / "one" / RESULTS)["test"] == {"south": of_run["south"]}


def test_what_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "code.pt").write_bytes(b"not tensors")
    data = ("-d", runs / "data", "-o", tmp_path)
    assert "holds pickled objects, which are refused" in refused(tmp_path / "code.pt", *data)
    assert refused(runs / "one", "-o", tmp_path).startswith("give --data, or --job")
    assert refused(runs / "one", *data, "--json", "--job", tmp_path) == "--json and --job exclude each other"
    assert refused(runs / "one", *data, "--bundle") == "--bundle goes with --job"
    assert "must be one or more different names" in refused(runs / "one", runs / "one", *data)
    assert "has no setting 'crt_rounds'" in refused(runs / "one", *data, "--set", "crt_rounds=1")
    wrong = refused(runs / "one", *data, "--set", "foo=1")
    assert "foo" in wrong
    assert "was made with fairflare" not in wrong  # by this very version
    for unknown in ((), ("--sites", "all")):
        assert "the sites are not known" in refused(runs / "one", "--job", tmp_path / "jobs", *unknown)
    assert evaluate(runs / "one", *data).exit_code == 0
    assert refused(runs / "one", *data).endswith("; give --overwrite to replace it, or another --out")


@pytest.mark.parametrize("wrong", ["classes", "no test"])
def test_sites_that_do_not_fit_the_model(wrong: str, runs: Path, tmp_path: Path) -> None:
    """Check that the run ends with the site's name, or continues without the site."""
    data = pictures(tmp_path / "data")
    file = data / "south" / "datalist.json"
    content = json.loads(file.read_text())
    content |= {"class_names": CLASSES[::-1]} if wrong == "classes" else {"test": []}
    file.write_text(json.dumps(content))
    ran = evaluate(runs / "one", "-d", data, "-o", tmp_path / "out")
    assert ran.exit_code == 1
    names = "names the classes cyst, melanoma, naevus, and the given model naevus, melanoma, cyst"
    why = names if wrong == "classes" else "split 'test' is empty"
    reason = run_document(tmp_path / "out" / "one" / RESULTS)["reason"]
    assert reason.startswith("check, before any test: ")
    assert "submit the job" not in reason
    assert "site 'south'" in reason
    assert why in reason or "the datalists name the classes differently" in reason
    ran = evaluate(runs / "one", "-d", data, "-o", tmp_path / "out", "--no-require-all-sites")
    assert (ran.exit_code, wrong) in ((0, "no test"), (1, "classes"))  # no side is that of most sites


def test_no_model_is_tested_where_one_does_not_fit_the_sites(runs: Path, tmp_path: Path) -> None:
    plan = make_plan("fed_avg", task="segmentation", sites=2, num_rounds=1, settings=VOLUMES)
    run_local(plan, tmp_path / "masks")
    said = refused(runs / "one", tmp_path / "masks", "-d", runs / "data", "-o", tmp_path / "out")
    assert said.startswith("site 'north': ")
    assert "numbers of classes are for a job with task=classification" in said
    assert not (tmp_path / "out").exists()


def test_all_sites_name_other_classes(runs: Path, tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", CLASSES[::-1])
    assert evaluate(runs / "one", "-d", data, "-o", tmp_path / "out").exit_code == 1
    reason = run_document(tmp_path / "out" / "one" / RESULTS)["reason"]
    for site in ("north", "south"):
        assert f"site {site!r}: its datalist names the classes cyst, melanoma, naevus, and the given model" in reason


def test_the_job_gives_models_to_the_server_alone(runs: Path, tmp_path: Path) -> None:
    places = (runs / "one", runs / "two")
    ran = evaluate(*places, "--last", "--sites", "north,south", "--job", tmp_path, "--set", "bootstrap=5")
    assert ran.exit_code == 0, ran.output
    job = tmp_path / "evaluate"
    assert json.loads((job / "meta.json").read_text())["deploy_map"] == {
        "app_server": ["server"], "app": ["north", "south"]
    }  # fmt: skip
    assert sorted(path.name for path in (job / "app").iterdir()) == ["config"]  # no custom code, no model
    for name in ("one", "two"):
        state = load_file(job / "app_server" / "models" / f"{name}.safetensors")
        assert all(torch.equal(state[key], tensor) for key, tensor in model_in(runs / name / RESULTS).items())
    (executor,) = json.loads((job / "app" / "config" / "config_fed_client.json").read_text())["executors"]
    assert executor["tasks"] == ["check", "validate"]
    (workflow,) = json.loads((job / "app_server" / "config" / "config_fed_server.json").read_text())["workflows"]
    assert workflow["path"] == "fairflare.flare.evaluation.EvaluationController"
    assert (workflow["args"]["models"], workflow["args"]["bootstrap"]) == (["one", "two"], 5)


def test_a_job_is_of_one_task(runs: Path, tmp_path: Path) -> None:
    plan = make_plan("fed_avg", task="classification", sites=["north", "south"], num_rounds=1,
                     settings={**SETTINGS, "features": [4, 4, 8, 4]})  # fmt: skip
    run_local(plan, tmp_path / "other", json.loads((runs / "data" / "fairflare.json").read_text()))
    said = refused(runs / "one", tmp_path / "other", "--sites", "north,south", "--job", tmp_path / "jobs")
    assert said.startswith("the models have not the same task, and a job has one")


def test_a_bundle_with_its_model(tmp_path: Path) -> None:
    local = two_sites(tmp_path / "sites")
    (tmp_path / "fairflare.json").write_text(json.dumps(local))
    bundle = write_bundle(tmp_path / "organ", train_config())
    plan = make_plan("fed_avg", monai_bundle=bundle, sites=2, num_rounds=1)
    of_run = run_document(run_local(plan, tmp_path / "run", local))
    torch.save(model_in(tmp_path / "run" / RESULTS), bundle / "models" / "model.pt")
    for place, more in ((bundle, ()), (tmp_path / "run", ("--monai-bundle", bundle, "--last"))):
        ran = evaluate(place, "-d", tmp_path / "fairflare.json", "-o", tmp_path / "out", *more)
        assert ran.exit_code == 0, ran.output
        assert run_document(tmp_path / "out" / place.name / RESULTS)["test"] == of_run["test"]
    assert "MONAI bundle" in refused(tmp_path / "run", "-d", tmp_path, "-o", tmp_path / "x")
    said = refused(bundle, "--sites", "a,b", "--job", tmp_path / "jobs")
    assert said == (
        "a task of your own is custom code, which a job with packaging 'preinstalled' cannot contain: add the option "
        "--bundle"
    )


def test_the_servers_own_weights_give_way_to_the_given_model(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path, "job", settings={"initial_weights": "/encoder.pt"})
    assert place.initial_weights(WithoutTraining(initial_ckpt="/model.pt")) == "/model.pt"
