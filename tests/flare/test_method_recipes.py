"""The recipes of one method each: what they take, and FLARE's own helpers on them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.job_def import JobMetaKey
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.recipe.utils import (
    add_cross_site_evaluation,
    add_experiment_tracking,
    add_final_global_evaluation,
    set_per_site_config,
    set_recipe_meta,
)

import fairflare.recipes
from fairflare import results
from fairflare.core.settings import values_of
from fairflare.federation.describe import sections
from fairflare.flare.recipes import FairRecipe
from fairflare.methods.catalog import all_methods
from fairflare.recipes import FedAvgRecipe, FedISMRecipe, FedMRLRecipe, PocEnv

ROOT = Path(__file__).parents[2]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("write_recipes", ROOT / "tools" / "write_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


WRITE = generator()
CLASSES = {name: getattr(fairflare.recipes, WRITE.class_name(name)) for name in all_methods()}


def test_committed_recipes_are_what_the_declarations_say() -> None:
    """If this fails: ``python tools/write_recipes.py``."""
    folder = ROOT / "custom" / "fairflare" / "recipes"
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")} == WRITE.contents()


def test_names() -> None:
    names = {cls.__name__ for cls in CLASSES.values()}
    assert len(names) == len(all_methods())
    assert names >= {
        "BSMFLRecipe", "BSMKDRecipe", "FedAvgRecipe", "FedISMRecipe", "FedISMPlusLRecipe", "FedISMPlusSRecipe",
        "FedLWRRecipe", "FedLWRCosineRecipe", "FedLWRLastLayerRecipe", "FedMASRecipe", "FedMRLRecipe", "FedProxRecipe",
        "AFLRecipe", "QFedAvgRecipe", "FedCERecipe", "FedBNRecipe", "DittoRecipe", "MoonRecipe", "CRTRecipe",
    }  # fmt: skip


def same_plan(one: Any, other: Any) -> None:
    for part in ("rule", "training", "task", "run"):
        assert values_of(getattr(one, part)) == values_of(getattr(other, part))
    assert one.sites == other.sites


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(CLASSES[name].__init__).parameters.items())[1:])


@pytest.mark.parametrize("name", list(all_methods()))
def test_every_setting_is_an_argument_with_its_default_and_meaning(name: str) -> None:
    found = parameters(name)
    documented = set(re.findall(r"^ {4}(\w+):", inspect.getdoc(CLASSES[name]) or "", re.MULTILINE))
    assert set(found) <= documented
    described = {s.name.replace(".", "_") for group in sections(name).values() for s in group}
    assert described <= set(found)
    assert {"num_rounds", "sites", "seed", "straggler_grace", "packaging", "small"} <= set(found)


@pytest.mark.parametrize("name", list(all_methods()))
def test_the_defaults_that_are_shown_are_those_that_hold(name: str) -> None:
    same_plan(CLASSES[name]().plan, FairRecipe(name).plan)
    shown = {key: p.default for key, p in parameters(name).items() if key not in ("phantom_sites", "name")}
    same_plan(CLASSES[name](**shown).plan, FairRecipe(name).plan)


def test_what_is_given_goes_before_the_papers() -> None:
    quick = FedISMRecipe().plan.training.local_epochs
    paper = FedISMRecipe(small=False).plan
    assert paper.training.local_epochs != quick
    assert FedISMRecipe(small=False, local_epochs=quick).plan.training.local_epochs == quick
    assert paper.run.num_rounds == FairRecipe("fed_ism", small=False).plan.run.num_rounds


def test_settings_reach_their_halves() -> None:
    plan = FedISMRecipe(rho=0.07, q=3.0, learning_rate=0.5, image_size=(64, 64), num_rounds=2, sites=["a", "b"]).plan
    assert (plan.rule.rho, plan.training.rho, plan.rule.q) == (0.07, 0.07, 3.0)
    assert (plan.training.learning_rate, plan.task.image_size, plan.run.num_rounds) == (0.5, (64, 64), 2)
    assert (plan.sites, plan.task.phantom_sites) == (["a", "b"], 2)
    policy = FedMRLRecipe(mu_policy="vdn", mu_policy_gamma=0.5, weighting_grid=[3, 2]).plan.rule
    assert (policy.mu_policy.kind, policy.mu_policy.gamma) == ("vdn", 0.5)
    assert tuple(policy.weighting.grid) == (3, 2)
    assert FedAvgRecipe(task="classification", settings={"phantom": "fundus"}).plan.task.phantom == "fundus"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"roh": 1}, TypeError, "FedISMRecipe has no argument 'roh'; did you mean 'rho'"),
        ({"rho": "x"}, ValueError, "rho must be a number >= 0, got 'x'"),
        ({"num_rounds": 0}, ValueError, "num_rounds must be an integer >= 1, got 0"),
        ({"sites": 1}, ValueError, r"min_sites=2, but the job has 1 site"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FedISMRecipe(**given)


# ------------------------------------------------------------------------------------------------ FLARE's helpers


def exported(recipe: Any, folder: Path) -> tuple[dict, dict, dict]:
    recipe.export(str(folder))
    app = folder / recipe.name / "app" / "config"
    files = (app / "config_fed_server.json", app / "config_fed_client.json", folder / recipe.name / "meta.json")
    server, client, meta = (json.loads(path.read_text()) for path in files)
    return server, client, meta


def receivers(server: dict) -> list[str]:
    return [c["path"] for c in server["components"] if "tracking" in c["path"]]


@pytest.mark.parametrize("name", list(all_methods()))
def test_cross_site_evaluation_is_added_to_any_recipe(name: str, tmp_path: Path) -> None:
    recipe = CLASSES[name](sites=2)
    add_cross_site_evaluation(recipe)
    server, client, _ = exported(recipe, tmp_path)
    assert [w["path"].rpartition(".")[2] for w in server["workflows"]] == ["RoundsController", "CrossSiteModelEval"]
    (locator,) = [c for c in server["components"] if c["path"].endswith("PTFileModelLocator")]
    assert locator["args"]["pt_persistor_id"] in [c["id"] for c in server["components"]]
    assert client["executors"][0]["tasks"] == ["check", "train", "anchor", "norms", "validate", "submit_model"]
    with pytest.raises(RuntimeError, match="already been added"):
        add_cross_site_evaluation(recipe)


def test_without_local_models_none_is_asked_for(tmp_path: Path) -> None:
    recipe = FedAvgRecipe(sites=2)
    add_final_global_evaluation(recipe)
    server, client, _ = exported(recipe, tmp_path)
    assert server["workflows"][1]["args"]["submit_model_task_name"] == ""
    assert client["executors"][0]["tasks"] == ["check", "train", "anchor", "norms", "validate"]


def test_one_tensorboard_receiver(tmp_path: Path) -> None:
    assert receivers(exported(FedAvgRecipe(), tmp_path / "a")[0]) == ["fairflare.flare.tracking.TensorBoard"]
    recipe = FedAvgRecipe()
    add_experiment_tracking(recipe, "tensorboard", {"tb_folder": "curves"})
    server, _, _ = exported(recipe, tmp_path / "b")
    assert receivers(server) == ["nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver"]


def test_a_filter_for_one_task_of_a_recipe_of_one_method(tmp_path: Path) -> None:
    recipe = FedISMRecipe(sites=2)
    recipe.add_client_output_filter(PercentilePrivacy(percentile=20, gamma=0.5), tasks=["train"])
    _, client, _ = exported(recipe, tmp_path)
    (added,) = client["task_result_filters"]
    assert (added["tasks"], added["filters"][0]["args"]["percentile"]) == (["train"], 20)
    with pytest.raises(ValueError, match="applies to all clients"):
        recipe.add_client_output_filter(PercentilePrivacy(), clients=["site-1"])


def test_settings_of_one_site_alone_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing can be set for site-1, site-2 alone.* local/fairflare\.json"):
        set_per_site_config(FedAvgRecipe(sites=2), {"site-2": {"device": "cpu"}, "site-1": {}})


def test_gpus_that_a_job_wants_stand_in_its_meta(tmp_path: Path) -> None:
    recipe = FedAvgRecipe(sites=["north", "south"])
    wanted = {"north": {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 8}}
    set_recipe_meta(recipe, JobMetaKey.RESOURCE_SPEC, wanted)
    meta = exported(recipe, tmp_path)[2]
    assert meta["resource_spec"] == wanted
    assert meta["deploy_map"] == {"app": ["server", "north", "south"]}


# ------------------------------------------------------------------------------------------------ a model to start from


def test_a_model_to_start_from_travels_or_lies_on_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    torch.save({"w": torch.ones(1)}, "models/start.pt")
    server, _, _ = exported(FedAvgRecipe(initial_ckpt="models/start.pt"), tmp_path / "a")
    assert server["workflows"][0]["args"]["initial_ckpt"] == "start.pt"
    carried = tmp_path / "a" / "fed_avg" / "app" / "custom" / "start.pt"
    assert carried.read_bytes() == Path("models/start.pt").read_bytes()
    server, _, _ = exported(FedAvgRecipe(initial_ckpt="/there/start.pt", packaging="preinstalled"), tmp_path / "b")
    assert server["workflows"][0]["args"]["initial_ckpt"] == "/there/start.pt"
    assert not (tmp_path / "b" / "fed_avg" / "app" / "custom").exists()
    with pytest.raises(ValueError, match=r"initial_ckpt 'models/start\.pt' would travel in the job.*absolute path"):
        FedAvgRecipe(initial_ckpt="models/start.pt", packaging="preinstalled")
    with pytest.raises(ValueError, match=r"initial_ckpt 'models/gone\.pt' does not exist here"):
        FedAvgRecipe(initial_ckpt="models/gone.pt")


# ------------------------------------------------------------------------------------------------ results


class Finished:
    """A FLARE ``Run`` that is over."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get_job_id(self) -> str:
        return "abc"

    def get_status(self) -> str:
        return "RUNNING"

    def get_result(self, timeout: float = 0.0) -> str | None:
        return None if self.folder is None else str(self.folder)


def test_results_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"job abc has no result \(status RUNNING\)"):
        results.of(Finished(None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is gone: .*use fairflare\.recipes\.PocEnv"):
        results.of(Finished(tmp_path / "gone"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no results\.json in"):
        results.of(Finished(tmp_path))  # type: ignore[arg-type]


def test_a_poc_keeps_what_flare_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = tmp_path / "poc" / "abc" / "workspace"
    download.mkdir(parents=True)
    (download / "x").write_text("1")
    found: list[str | None] = [str(download.parent), None]
    monkeypatch.setattr("fairflare.flare.environments.StockPocEnv.get_job_result", lambda *args: found.pop(0))
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))
    env = PocEnv(num_clients=2, results=tmp_path / "kept")
    assert env.get_job_result("abc") == str(tmp_path / "kept" / "abc")
    assert (tmp_path / "kept" / "abc" / "workspace" / "x").read_text() == "1"
    assert env.get_job_result("abc") is None
