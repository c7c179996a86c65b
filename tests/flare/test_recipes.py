"""Recipes: what they export, and what they refuse."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fairflare.methods import all_methods
from fairflare.recipes import (
    TASKS_BY_KIND,
    FairRecipe,
    FedAvgRecipe,
    FedLWRRecipe,
    init_parameters,
    load_task_class,
    site_list,
)

ROOT = Path(__file__).parents[2]


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


@pytest.mark.parametrize("name", list(all_methods()))
def test_committed_jobs_are_the_recipes_export(name, tmp_path):
    """Mend with ``fairflare export NAME --sites 0 --out jobs``."""
    FairRecipe(name).export(str(tmp_path))
    committed, fresh = ROOT / "jobs" / name, tmp_path / name
    assert files(committed) == files(fresh)
    _, differ, errors = filecmp.cmpfiles(committed, fresh, files(fresh), shallow=False)
    assert differ == []
    assert errors == []


@pytest.mark.parametrize("name", list(all_methods()))
def test_every_job_starts_from_the_root_meta(name):
    root = json.loads((ROOT / "meta.json").read_text())
    meta = json.loads((ROOT / "jobs" / name / "meta.json").read_text())
    assert {k: meta[k] for k in root} == root
    assert meta["name"] == name
    assert meta["deploy_map"] == {"app": ["server", *site_list(all_methods()[name].num_sites)]}


@pytest.mark.parametrize("method", all_methods().values(), ids=lambda m: m.name)
def test_a_setting_means_one_thing(method):
    """A name that task and halves share would be set in both; those that are meant to be are listed."""
    task = load_task_class(TASKS_BY_KIND[method.task])
    owners = [set(init_parameters(c)) for c in (method.aggregator, method.training, task)]
    shared = (owners[0] & owners[1]) | (owners[0] & owners[2]) | (owners[1] & owners[2])
    assert shared <= {"preset", "rho", "tau"}, shared


def configs(folder: Path) -> tuple[dict, dict]:
    config = folder / "app" / "config"
    return (
        json.loads((config / "config_fed_server.json").read_text()),
        json.loads((config / "config_fed_client.json").read_text()),
    )


def test_settings_reach_the_parts_they_belong_to(tmp_path):
    recipe = FedLWRRecipe(
        preset="authors", num_rounds=7, sites=["north", "south"], seed=3,
        settings={"clip_max": 0.999, "learning_rate": 0.01, "image_size": [96, 96]},
    )  # fmt: skip
    recipe.export(str(tmp_path))
    server, client = configs(tmp_path / "fed_lwr")
    rounds = server["workflows"][0]["args"]
    assert rounds["num_rounds"] == 7
    assert rounds["seed"] == 3
    assert rounds["aggregator"]["args"]["preset"] == "authors"
    assert rounds["aggregator"]["args"]["clip_max"] == 0.999
    executor = client["executors"][0]["executor"]["args"]
    assert executor["training"]["args"]["preset"] == "authors"
    assert executor["training"]["args"]["learning_rate"] == 0.01
    assert executor["task"]["args"]["image_size"] == rounds["task"]["args"]["image_size"] == [96, 96]
    assert executor["task"]["path"] == "task.Task"
    meta = json.loads((tmp_path / "fed_lwr" / "meta.json").read_text())
    assert meta["deploy_map"] == {"app": ["server", "north", "south"]}


def test_every_exported_setting_is_read_back(tmp_path):
    """An argument kept under another name would be lost without a word."""
    changed = {
        "preset": "authors", "cka_estimator": "full_unbiased", "cka_split": "val", "cka_batch_size": 5,
        "cka_passes": 3, "cka_max_samples": 9, "cosine_mode": "matrix", "cka_memory": 12345,
        "optimizer": "sgd",
        "learning_rate": 0.5, "weight_decay": 0.25, "betas": [0.5, 0.75], "momentum": 0.5, "batch_size": 3,
        "local_epochs": 6, "keep_optimizer_state": False, "max_grad_norm": 2.0, "augment": True, "clip_min": 0.125,
        "clip_max": 0.5, "layer_granularity": "block",
    }  # fmt: skip
    FedLWRRecipe(settings=changed).export(str(tmp_path))
    server, client = configs(tmp_path / "fed_lwr")
    found = {
        **server["workflows"][0]["args"]["aggregator"]["args"],
        **client["executors"][0]["executor"]["args"]["training"]["args"],
    }
    assert {k: found[k] for k in changed} == changed


def test_preinstalled_carries_no_code_and_bundle_the_package(tmp_path):
    FedAvgRecipe(packaging="preinstalled", sites=None).export(str(tmp_path / "a"))
    folder = tmp_path / "a" / "fed_avg"
    assert not (folder / "app" / "custom").exists()
    server, _ = configs(folder)
    assert server["workflows"][0]["args"]["task"]["path"] == "fairflare.tasks.segmentation.SegmentationTask"
    assert json.loads((folder / "meta.json").read_text())["deploy_map"] == {"app": ["@ALL"]}
    FedAvgRecipe(packaging="bundle").export(str(tmp_path / "b"))
    custom = tmp_path / "b" / "fed_avg" / "app" / "custom"
    assert (custom / "task.py").is_file()
    assert (custom / "fairflare" / "flare" / "controller.py").is_file()
    assert not list(custom.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"method": "fed_lwrr"}, "unknown method 'fed_lwrr'; did you mean 'fed_lwr'"),
        ({"method": "fed_lwr", "settings": {"clip_mx": 1}}, "no setting 'clip_mx'; did you mean 'clip_max'"),
        ({"method": "fed_avg", "settings": {"weighting": "size"}}, "weighting must be one of"),
        ({"method": "fed_avg", "min_sites": 7}, r"min_sites=7, but the job has 6 site"),
        ({"method": "fed_avg", "sites": ["a", "a"]}, "sites must be different names"),
        ({"method": "fed_avg", "packaging": "zip"}, "packaging must be one of"),
        ({"method": "fed_avg", "task_file": "nowhere.py"}, "task file nowhere.py does not exist"),
    ],
)
def test_mistakes_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        FairRecipe(**kwargs)


def test_task_file_without_a_task(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match="must define a class Task"):
        FairRecipe("fed_avg", task_file=path)


def command_line(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "fairflare.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_command_line_lists_and_exports(tmp_path):
    listed = command_line("list", cwd=tmp_path)
    assert listed.returncode == 0
    for name in all_methods():
        assert name in listed.stdout
    out = command_line("export", "fed_lwr", "--out", "jobs", "--set", "clip_max=0.9", "--preinstalled", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    server, _ = configs(tmp_path / "jobs" / "fed_lwr")
    assert server["workflows"][0]["args"]["aggregator"]["args"]["clip_max"] == 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "fed_lwrr"], "did you mean 'fed_lwr'"),
        (["run", "fed_lwr", "--set", "clip_max"], "--set wants KEY=VALUE"),
        (["run", "fed_lwr", "--data", "none.json"], "none.json"),
        (["show", "."], "no results.json"),
    ],
)
def test_command_line_mistakes_are_one_line(tmp_path, arguments, message):
    done = command_line(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
