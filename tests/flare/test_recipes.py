"""Test recipes: exported jobs and refusals."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.fuel.utils.component_builder import ComponentBuilder
from typer.testing import CliRunner

import fairflare
from fairflare.base.settings import field_names, values_of
from fairflare.cli.commands import app
from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.federation.plan.plan import site_list
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.methods.base.catalog import all_methods
from fairflare.recipes import FairRecipe, FedAvgRecipe, FedLWRRecipe
from tests.shapes import of_what_travels, one_each

ROOT = Path(__file__).parents[2]


class Builder(ComponentBuilder):
    """Run FLARE's builder of a job folder's components; we do not use ``name`` in place of ``path``."""

    def get_module_scanner(self):
        raise AssertionError("the job names a class without its module")


@pytest.fixture
def build(monkeypatch):
    """Return ``build(app_folder, config)`` -> the component, ``task`` being the app's own ``custom/task.py``."""

    def made(app: Path, config: dict) -> object:
        monkeypatch.syspath_prepend(str(app / "custom"))
        monkeypatch.delitem(sys.modules, "task", raising=False)
        try:
            return Builder().build_component(copy.deepcopy(config))
        finally:
            sys.modules.pop("task", None)

    return made


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


@pytest.mark.parametrize("name", list(all_methods()))
def test_every_job_starts_from_the_root_meta(name):
    root = json.loads((ROOT / "meta.json").read_text())
    meta = json.loads((ROOT / "jobs" / name / "meta.json").read_text())
    assert {k: meta[k] for k in root} == root
    assert meta["name"] == name
    assert meta["deploy_map"] == {"app": ["server", *site_list(all_methods()[name].num_sites)]}


@pytest.mark.parametrize("method", all_methods().values(), ids=lambda m: m.name)
def test_a_setting_means_one_thing(method):
    """Check that a name in task and halves, which would be set in both, is on the list of intended ones."""
    task = load_task_class(TASKS_BY_KIND[method.task])
    owners = [set(field_names(c)) for c in (method.rule, method.training, task)]
    shared = (owners[0] & owners[1]) | (owners[0] & owners[2]) | (owners[1] & owners[2])
    meant = {"preset", "rho", "tau", "learning_rate", "fairfed_mode", "stale_ok"}
    meant |= {"fairfed_attribute", "flexfair_over", "flexfair_measure", "dro_attribute"}
    assert shared <= meant, shared


def configs(folder: Path) -> tuple[dict, dict]:
    config = folder / "app" / "config"
    return (
        json.loads((config / "config_fed_server.json").read_text()),
        json.loads((config / "config_fed_client.json").read_text()),
    )


@pytest.mark.parametrize(
    "others",
    [{"optimizer": "sgd", "momentum": 0.5}, {"betas": [0.5, 0.75], "similarity": "cosine"}],
)
def test_every_exported_setting_is_read_back(others, tmp_path):
    """Check each argument, as one that is stored under another name would be lost without a message."""
    cosine = "similarity" in others
    cka = {} if cosine else {"cka_estimator": "minibatch_unbiased", "cka_passes": 3}
    changed = {
        **others, **cka, "preset": "authors", "cka_split": "val", "cka_batch_size": 5,
        "cka_max_samples": 9, "cka_memory": 12345,
        "learning_rate": 0.5, "weight_decay": 0.25, "batch_size": 3,
        "local_epochs": 6, "keep_optimizer_state": False, "max_grad_norm": 2.0, "augment": True, "clip_min": 0.125,
        "clip_max": 0.5,
    }  # fmt: skip
    FedLWRRecipe(settings=changed).export(str(tmp_path))
    server, client = configs(tmp_path / "fed_lwr")
    found = {
        **server["workflows"][0]["args"]["rule"]["args"],
        **client["executors"][0]["executor"]["args"]["training"]["args"],
    }
    assert {k: found[k] for k in changed} == changed


@pytest.mark.parametrize("name", one_each(of_what_travels))
def test_job_is_built_back_as_it_was(name, tmp_path, build):
    """Check that FLARE's own builder makes every setting of the plan from both configurations, parts included."""
    recipe = FairRecipe(name, num_rounds=7, seed=3, straggler_grace=1.5, isolate=True)
    recipe.export(str(tmp_path))
    app = tmp_path / name / "app"
    server, client = configs(tmp_path / name)
    controller = build(app, server["workflows"][0])
    executor = build(app, client["executors"][0]["executor"])
    plan = recipe.plan
    assert values_of(controller.rule) == values_of(plan.rule)
    assert type(controller.rule) is type(plan.rule)
    assert values_of(executor.training) == values_of(plan.training)
    assert executor.isolate is True
    for task in (controller.task, executor.task):
        assert type(task).__module__ == "task"
        assert values_of(task)["args"] == values_of(plan.task)["args"]
    for setting in field_names(type(plan.run)):
        assert getattr(controller, setting) == getattr(plan.run, setting), setting
    assert (controller.num_rounds, controller.seed, controller.straggler_grace) == (7, 3, 1.5)


def without_nothing(values: Any) -> Any:
    """Return settings without those that are ``None`` by default, which an export leaves out."""
    if isinstance(values, dict):
        return {key: without_nothing(value) for key, value in values.items() if value is not None}
    return values


def test_parts_are_nested_and_built_back(tmp_path, build):
    settings = {"mu_policy": "vdn", "mu_policy.actions": [0.0, 0.5], "mu_policy.gamma": 0.5, "weighting.grid": [2, 3]}
    recipe = FairRecipe("fed_mrl", settings={**settings, "weighting.init": "uniform", "mean_loss": "weighted"})
    recipe.export(str(tmp_path))
    server, _ = configs(tmp_path / "fed_mrl")
    rule = server["workflows"][0]["args"]["rule"]
    assert rule["path"] == "fairflare.methods.fed_mrl.FedMRL"
    assert sorted(rule["args"]) == ["fair_mean", "mean_loss", "mu_policy", "weighting"]
    assert rule["args"]["mu_policy"]["path"] == "fairflare.methods.parts.mu_policy.VdnMu"
    assert rule["args"]["mu_policy"]["args"]["actions"] == [0.0, 0.5]
    assert rule["args"]["mu_policy"]["args"]["gamma"] == 0.5
    assert (
        rule["args"]["mu_policy"]["args"]["learning_rate"] == 0.001
    )  # defaults are written too: the folder is there to edit
    assert rule["args"]["weighting"]["path"] == "fairflare.methods.parts.weightings.BySom"
    assert rule["args"]["weighting"]["args"]["grid"] == [2, 3]
    assert rule == without_nothing(json.loads(json.dumps(values_of(recipe.plan.rule))))
    built = build(tmp_path / "fed_mrl" / "app", rule)
    assert values_of(built) == values_of(recipe.plan.rule)
    assert [type(part) for part in (built.mu_policy, built.weighting)] == [
        type(part) for part in (recipe.plan.rule.mu_policy, recipe.plan.rule.weighting)
    ]
    other = FairRecipe("fed_mrl", settings={"mu_policy": "fixed", "weighting": "samples"})
    other.export(str(tmp_path / "other"))
    server, _ = configs(tmp_path / "other" / "fed_mrl")
    args = server["workflows"][0]["args"]["rule"]["args"]
    assert args["mu_policy"] == {"path": "fairflare.methods.parts.mu_policy.FixedMu", "args": {"by_site": {}}}
    assert args["weighting"] == {"path": "fairflare.methods.parts.weightings.BySamples", "args": {}}


def test_what_a_user_adds_to_the_recipe_is_exported(tmp_path, build):
    """Check FLARE's public way to add a privacy filter; the rest of the job does not change."""
    recipe = FedAvgRecipe(sites=3)
    recipe.add_client_output_filter(PercentilePrivacy(percentile=20, gamma=0.5), tasks=["train"])
    recipe.add_client_config({"max_memory": 3})
    recipe.export(str(tmp_path / "a"))
    server, client = configs(tmp_path / "a" / "fed_avg")
    (added,) = client.pop("task_result_filters")
    assert added["tasks"] == ["train"]
    (found,) = added["filters"]
    assert found["path"] == "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy"
    assert build(tmp_path / "a" / "fed_avg" / "app", found).percentile == 20
    assert client.pop("max_memory") == 3
    FedAvgRecipe(sites=3).export(str(tmp_path / "b"))
    plain_server, plain_client = configs(tmp_path / "b" / "fed_avg")
    assert plain_client.pop("task_result_filters") == []
    assert (server, client) == (plain_server, plain_client)


OWN_FILTER = """
from nvflare.apis.filter import Filter


class Rounded(Filter):
    def __init__(self, digits=3):
        super().__init__()
        self.digits = digits

    def process(self, shareable, fl_ctx):
        return shareable
"""


def test_a_users_own_filter_travels_with_the_job(tmp_path, monkeypatch, build):
    (tmp_path / "rounded_filter.py").write_text(OWN_FILTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    from rounded_filter import Rounded

    recipe = FedAvgRecipe(sites=3)
    recipe.add_client_output_filter(Rounded(digits=5), tasks=["train"])
    recipe.export(str(tmp_path / "jobs"))
    folder = tmp_path / "jobs" / "fed_avg"
    assert files(folder / "app" / "custom") == ["rounded_filter.py", "task.py"]
    _, client = configs(folder)
    assert build(folder / "app", client["task_result_filters"][0]["filters"][0]).digits == 5


def test_a_job_that_is_made_again_replaces_the_first(tmp_path):
    FairRecipe("fed_avg", sites=2).export(str(tmp_path))
    recipe = FairRecipe("fed_avg", sites=4, name="fed_avg")
    for _ in range(2):
        recipe.export(str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fed_avg"]
        meta = json.loads((tmp_path / "fed_avg" / "meta.json").read_text())
        assert meta["deploy_map"] == {"app": ["server", "site-1", "site-2", "site-3", "site-4"]}
        assert (tmp_path / "fed_avg" / "app" / "custom" / "task.py").is_file()
    FairRecipe("fed_avg", name="mine", min_sites=3).export(str(tmp_path))
    meta = json.loads((tmp_path / "mine" / "meta.json").read_text())
    assert (meta["name"], meta["min_clients"]) == ("mine", 3)
    assert configs(tmp_path / "mine")[0]["workflows"][0]["args"]["label"] == "mine"


@pytest.mark.parametrize(
    ("kind", "base"), [("segmentation", "SegmentationTask"), ("classification", "ClassificationTask")]
)
def test_preinstalled_carries_no_code_and_bundle_the_package(tmp_path, kind, base, build):
    FedAvgRecipe(packaging="preinstalled", sites=None, task=kind).export(str(tmp_path / "a"))
    folder = tmp_path / "a" / "fed_avg"
    assert not (folder / "app" / "custom").exists()
    server, client = configs(folder)
    path = f"fairflare.tasks.{kind}.{base}"
    assert server["workflows"][0]["args"]["task"]["path"] == path
    assert client["executors"][0]["executor"]["args"]["task"]["path"] == path
    assert type(build(folder / "app", server["workflows"][0]).task).__name__ == base
    assert json.loads((folder / "meta.json").read_text())["deploy_map"] == {"app": ["@ALL"]}
    FedAvgRecipe(packaging="bundle", task=kind).export(str(tmp_path / "b"))
    custom = tmp_path / "b" / "fed_avg" / "app" / "custom"
    assert (custom / "task.py").read_bytes() == TASKS_BY_KIND[kind].read_bytes()
    package = Path(fairflare.__file__).parent
    # No YAML, at which `nvflare job submit` stops, and no examples: no participant reads them.
    carried = [name for name in files(package) if not name.startswith("examples/") and not name.endswith(".yaml")]
    assert files(custom / "fairflare") == carried
    assert "tasks/bundles/sealed_classes.txt" in carried
    assert not [name for name in carried if name.endswith((".yml", ".yaml", ".json", ".conf"))]  # what it parses
    assert not list(custom.rglob("__pycache__"))


OWN_TASK = """
from fairflare.tasks.segmentation import SegmentationTask

print("read")


class Task(SegmentationTask):
    def build_model(self):
        return "my network"
"""


def test_a_users_task_file_becomes_the_jobs_task(tmp_path, monkeypatch, build):
    """Check any name and folder of the file, also with another module of the same name."""
    mine = tmp_path / "my code" / "second-try.py"
    mine.parent.mkdir()
    mine.write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    recipe = FairRecipe("fed_avg", task_file="my code/second-try.py", sites=["a", "b"], settings={"features": [4] * 6})
    recipe.export("jobs")
    app = tmp_path / "jobs" / "fed_avg" / "app"
    assert files(app / "custom") == ["task.py"]
    assert (app / "custom" / "task.py").read_text() == OWN_TASK
    server, client = configs(tmp_path / "jobs" / "fed_avg")
    for config in (server["workflows"][0]["args"]["task"], client["executors"][0]["executor"]["args"]["task"]):
        assert config["path"] == "task.Task"
        task = build(app, config)
        assert task.build_model() == "my network"
        assert task.features == (4,) * 6


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"method": "fed_lwrr"}, "^unknown method 'fed_lwrr'"),
        ({"method": "fed_lwr", "settings": {"clip_mx": 1}}, "no setting 'clip_mx'"),
        ({"method": "fed_avg", "settings": {"weighting": "size"}}, "weighting must be one of"),
        ({"method": "fed_avg", "min_sites": 7}, r"min_sites=7, but the job has 6 site"),
        ({"method": "fed_avg", "sites": ["a", "a"]}, "sites must be one or more different"),
        ({"method": "fed_avg", "packaging": "zip"}, "packaging must be one of"),
        ({"method": "fed_avg", "task_file": "nowhere.py"}, "task file nowhere.py does not exist"),
        ({"method": "fed_avg", "packaging": "preinstalled", "task_file": "x.py"}, "'preinstalled' carries none"),
        ({"method": "fed_avg", "sites": 2.5}, "sites must be an integer >= 1, got 2.5"),
        ({"method": "fed_avg", "sites": "abc"}, "sites must be an integer >= 1, got 'abc'"),
        ({"method": "fed_avg", "sites": -1}, "sites must be an integer >= 1, got -1"),
        ({"method": "fed_avg", "phase_timeout": 0}, "timeout must be a number > 0, got 0"),
        ({"method": "fed_avg", "max_mised": 1}, "no setting 'max_mised'"),
    ],
)
def test_mistakes_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        FairRecipe(**kwargs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define a class Task"),
        ("Task = 3\n", "must define a class Task"),
        ("class Task:\n    pass\n", "must define a class Task"),
        ("class Task(:\n", r"mine\.py cannot be run: SyntaxError"),
        ("import nothing_of_this_name\n", r"mine\.py cannot .*'nothing_of"),
    ],
)
def test_task_file_without_a_task(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        FairRecipe("fed_avg", task_file=path)


def test_an_exported_job_bounds_what_a_site_can_do(tmp_path, build):
    options = ["--set", "max_weight=0.3", "--set", "max_samples=null"]
    done = CliRunner().invoke(app, ["export", "fed_avg", "--out", str(tmp_path), "--preinstalled", *options])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "fed_avg"
    controller = build(folder / "app", configs(folder)[0]["workflows"][0])
    assert (controller.max_weight, controller.max_samples, controller.max_update_norm) == (0.3, None, 3.0)
    plan = FairRecipe("fed_avg", packaging="preinstalled", max_samples=7, max_update_norm=None).plan
    assert (plan.run.max_weight, plan.run.max_samples, plan.run.max_update_norm) == ("auto", 7, None)


@pytest.mark.parametrize("options", [[], ["--bundle"], ["--preinstalled"]])
def test_every_export_of_the_command_line_has_bounds_and_says_how_to_lift_them(tmp_path, build, options):
    done = CliRunner().invoke(app, ["export", "fed_avg", "--out", str(tmp_path / "a"), "--sites", "6", *options])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "a" / "fed_avg"
    arguments = configs(folder)[0]["workflows"][0]["args"]
    assert {name: arguments.get(name) for name in FOR_HOSPITALS} == FOR_HOSPITALS
    (line,) = [
        line for line in done.output.splitlines() if line.startswith("bounds on what a site can do to a round: ")
    ]
    assert "max_weight 0.25 (auto, 6 sites), max_excess 0.16, max_samples 100000, max_update_norm 3 " in line
    lift = line.partition("simulation: ")[2].split()
    assert lift[::2] == ["--set"] * 4
    free = CliRunner().invoke(app, ["export", "fed_avg", "--out", str(tmp_path / "b"), "--sites", "6", *options, *lift])
    assert free.exit_code == 0, free.output
    assert "bounds on" not in free.output
    assert not FOR_HOSPITALS.keys() & configs(tmp_path / "b" / "fed_avg")[0]["workflows"][0]["args"].keys()
    every = CliRunner().invoke(app, ["export", "fed_avg", "--out", str(tmp_path / "c"), *options])
    assert "max_weight auto (min(0.4, 1.5/K), K the sites that take part)" in every.output


def test_recipes_and_the_simulator_are_as_the_papers(tmp_path):
    """Check that the source of a paper's figures does not change unnoticed."""
    for packaging in ("task_file", "bundle"):
        run = FairRecipe("fed_avg", packaging=packaging, max_weight=0.5).plan.run
        assert (run.max_weight, run.max_excess, run.max_samples, run.max_update_norm) == (0.5, None, None, None)
    FairRecipe("fed_avg").export(str(tmp_path / "plain"))
    assert not FOR_HOSPITALS.keys() & configs(tmp_path / "plain" / "fed_avg")[0]["workflows"][0]["args"].keys()
