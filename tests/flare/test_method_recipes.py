"""Test the recipes of single methods: their arguments, and FLARE's own helpers on them."""

from __future__ import annotations

import inspect
import json
import pickle
import pydoc
import re
import typing
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
from fairflare.base.described import describe_settings
from fairflare.base.settings import parts_of, values_of
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.flare.export.method_recipes import class_names
from fairflare.flare.export.recipes import FairRecipe
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.fed_bn import FedBNTraining
from fairflare.methods.fed_ism import FedISM, SharpnessAwareTraining
from fairflare.recipes import FedAvgRecipe, FedISMRecipe, FedMRLRecipe, PocEnv
from fairflare.tasks.classification import ClassificationTask

NAMES = {method.name: name for name, method in class_names().items()}
#: Tasks of a site in every job of ours.
OF_A_RUN = ["check", "train", "anchor", "norms", "validate", "keys", "mask", "release"]
SHAPES = ("fed_avg", "fed_lwr", "fed_mas", "fed_mrl", "crt")  # presets, parts, classes, two phases, own rounds


def class_of(method: str) -> Any:
    """Return a method's recipe class, which is made when it is asked for: all of them take seconds."""
    return getattr(fairflare.recipes, NAMES[method])


# ------------------------------------------------------------------------------------------------ the classes


def test_names_are_those_of_the_papers() -> None:
    assert {name: class_of(name).__name__.removesuffix("Recipe") for name in NAMES} == {
        "afl": "AFL", "bsm_fl": "BSMFL", "bsm_kd": "BSMKD", "cffl": "CFFL", "cgsv": "CGSV", "creff": "CReFF",
        "crt": "CRT", "ditto": "Ditto", "fair_fed": "FairFed", "fair_lora": "FairLoRA",
        "fed_avg": "FedAvg", "fed_avg_m": "FedAvgM", "fed_awa": "FedAWA", "fed_dyn": "FedDyn", "fed_heal": "FedHEAL",
        "fed_bn": "FedBN", "fed_ce": "FedCE", "fed_ga": "FedGA",
        "fed_ism": "FedISM", "fed_ism_plus_l": "FedISMPlusL",
        "fed_ism_plus_s": "FedISMPlusS", "fed_lc": "FedLC", "fed_lesam": "FedLESAM", "fed_lf": "FedLF",
        "fed_lwr": "FedLWR", "fed_lwr_cosine": "FedLWRCosine",
        "fed_lwr_last_layer": "FedLWRLastLayer", "fed_mas": "FedMAS", "fed_mgda": "FedMGDA",
        "fed_mrl": "FedMRL", "fed_nova": "FedNova",
        "fed_opt": "FedOpt", "fed_pid": "FedPID",
        "fed_prox": "FedProx", "fed_rdn": "FedRDN", "flex_fair": "FlexFair", "group_dro": "GroupDRO", "ldam": "LDAM",
        "logit_adjustment": "LogitAdjustment", "loss_weights": "LossWeights", "moon": "MOON",
        "q_fed_avg": "QFedAvg", "scaffold": "SCAFFOLD", "solo": "Solo",
    }  # fmt: skip


def test_the_module_is_as_any_other() -> None:
    assert set(fairflare.recipes.__all__) >= {*class_names(), "FairRecipe", "PocEnv", "RunSettings", "ScriptRecipe"}
    assert set(fairflare.recipes.__all__) <= set(dir(fairflare.recipes))
    everything: dict[str, Any] = {}
    exec("from fairflare.recipes import *", everything)
    assert everything["CGSVRecipe"] is fairflare.recipes.CGSVRecipe
    with pytest.raises(AttributeError, match="has no attribute 'FedIsmRecipe'"):
        fairflare.recipes.FedIsmRecipe  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'FedIsmRecipe'"):
        exec("from fairflare.recipes import FedIsmRecipe")


@pytest.mark.parametrize("name", SHAPES)
def test_a_class_is_as_any_other(name: str) -> None:
    cls = class_of(name)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert f"{cls.__module__}.{cls.__qualname__}" == f"fairflare.recipes.{cls.__name__}"
    assert typing.get_type_hints(cls.__init__) == {key: p.annotation for key, p in parameters(name).items()}
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert f"|  {cls.__name__}(*, name: str | None = None, packaging: str = 'task_file'" in text
    assert all_methods()[name].source in " ".join(text.replace("|", " ").split())
    assert inspect.isclass(cls)
    assert issubclass(cls, FairRecipe)


def same_plan(one: Any, other: Any) -> None:
    for part in ("rule", "training", "task", "run"):
        assert values_of(getattr(one, part)) == values_of(getattr(other, part))
    assert one.sites == other.sites


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(class_of(name).__init__).parameters.items())[1:])


@pytest.mark.parametrize("name", SHAPES)
def test_every_signature_is_the_declared_settings(name: str) -> None:
    """Check that no argument is missing or added, and that types are the declared ones."""
    method = all_methods()[name]
    found = parameters(name)
    assert set(found) <= set(re.findall(r"^ {4}(\w+):", inspect.getdoc(class_of(name)) or "", re.MULTILINE))
    task = load_task_class(TASKS_BY_KIND[method.task])
    parts: dict[str, Any] = {}
    for cls in (RunSettings, method.rule, method.training, task):
        for setting in describe_settings(cls):
            if (cls, setting.name) != (RunSettings, "norm_statistics"):  # the run follows the sites' half
                parts.setdefault(setting.name.replace(".", "_"), (cls, setting))
    of_recipe = set(inspect.signature(FairRecipe).parameters) - {
        "method", "rule", "training", "run", "phase_timeout", "options",
    }  # fmt: skip
    assert set(found) == of_recipe | set(parts) - {"label", "method"}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in found.values())
    assert "phantom_sites" not in found or found["phantom_sites"].default is None  # as many as the run has
    assert not [key for key, p in found.items() if p.default is inspect.Parameter.empty]
    for key, (cls, setting) in parts.items():
        if key in ("label", "method") or setting.only:
            continue
        declared = typing.get_type_hints(cls, include_extras=True)[setting.name]
        if typing.get_origin(declared) is typing.Annotated:
            declared = typing.get_args(declared)[0]
        if declared in (int, float, str, bool):
            assert found[key].annotation == (declared | None if key == "phantom_sites" else declared), key
        elif typing.get_origin(declared) is typing.Literal:
            assert found[key].annotation == declared, key
        elif parts_of(cls, setting.name):
            assert set(typing.get_args(found[key].annotation)) == set(parts_of(cls, setting.name)), key
        else:  # something in brackets: the same plain types, in an order of no importance
            inside = set(re.findall(r"[a-z]+", str(found[key].annotation))) - TYPING
            assert (type(None) in typing.get_args(found[key].annotation)) == ("nothing" in setting.wanted)
            wanted = set(re.findall(r"[a-z]+", setting.wanted)) & set(WORDS)
            assert {WORDS[word] for word in wanted} <= inside, (key, found[key].annotation)


#: Of what :func:`describe_settings` says of a type; and what a type's text has besides its plain types.
WORDS = {"integer": "int", "number": "float", "text": "str"}
TYPING = {"collections", "abc", "typing"}


def test_what_the_papers_have_is_said_where_it_differs() -> None:
    doc = " ".join((class_of("fed_lwr").__doc__ or "").split())
    assert "each a multiple of 16 >= 32 (paper: ``(384, 384)``)" in doc
    assert "an integer >= 1 (paper: ``200``)" in doc
    assert "learning_rate: step size of the optimizer; a number > 0. " in doc  # the same in both
    assert "weighting_grid" in (class_of("fed_mrl").__doc__ or "")
    assert "with weighting=som, default ``" in " ".join((class_of("fed_mrl").__doc__ or "").split())


def acts_beside_the_others(name: str, key: str, default: Any) -> bool:
    """Return whether a default can be given; a default without effect is refused in these words."""
    try:
        class_of(name)(**{key: default})
    except ValueError as error:
        if f"{key}={default!r} would do nothing" in str(error):
            return False
        raise
    return True


@pytest.mark.parametrize("name", ["fed_avg", "fed_lwr", "fed_ism_plus_l", "fed_mrl", "crt", "creff", "cgsv"])
def test_the_defaults_that_are_shown_are_those_that_hold(name: str) -> None:
    same_plan(class_of(name)().plan, FairRecipe(name).plan)
    shown = {key: p.default for key, p in parameters(name).items() if key not in ("phantom_sites", "name")}
    acting = {key: default for key, default in shown.items() if acts_beside_the_others(name, key, default)}
    same_plan(class_of(name)(**acting).plan, FairRecipe(name).plan)


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
        ({"roh": 1}, TypeError, "^FedISMRecipe has no argument 'roh'"),
        ({"rho": "x"}, ValueError, "rho must be a number >= 0, got 'x'"),
        ({"sites": 1}, ValueError, r"min_sites=2, but the job has 1 site"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FedISMRecipe(**given)


# ------------------------------------------------------------------------------------------------ of typed parts


def test_typed_parts_are_what_they_say() -> None:
    """Check the first example of docs/recipes.md, with no settings of the quick job."""
    rule, training = FedISM(rho=0.05), SharpnessAwareTraining(learning_rate=2e-3)
    task, run = ClassificationTask(image_size=(48, 48)), RunSettings(num_rounds=2, seed=4)
    recipe = FairRecipe(rule=rule, training=training, task=task, run=run, sites=2)
    plan = recipe.plan
    assert plan.rule is rule
    assert plan.training is training
    assert (recipe.name, plan.run.label, plan.sites) == ("fed_ism", "fed_ism", ["site-1", "site-2"])
    assert values_of(plan.task)["args"] == {**values_of(task)["args"], "phantom_sites": 2}
    assert values_of(plan.run)["args"] == {**values_of(run)["args"], "label": "fed_ism", "method": "fed_ism"}
    assert isinstance(plan.task, ClassificationTask)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"rule": FedISM(rho=0.1, tau=0.5, variant="L")}, "fed_ism_plus_l"),
        ({"rule": FedISM(rho=0.1, tau=0.5)}, "fed_ism_plus_s"),
        ({"rule": FedISM(rho=0.3)}, "fed_ism"),
        ({"rule": FedAvg()}, "fed_avg"),
        ({"rule": FedAvg(), "training": FedBNTraining()}, "fed_bn"),
        ({"training": SharpnessAwareTraining()}, "fed_ism"),
        ({"method": "fed_ism_plus_l", "rule": FedISM(rho=0.1)}, "fed_ism_plus_l"),
    ],
)
def test_the_method_of_parts(given: dict[str, Any], name: str) -> None:
    assert FairRecipe(**given).plan.method.name == name


def test_a_part_that_is_not_given_is_the_methods() -> None:
    plan = FairRecipe(rule=FedISM(rho=0.2, q=1.0)).plan
    quick = FairRecipe("fed_ism").plan
    assert plan.training.rho == 0.2  # what the halves share
    assert values_of(plan.training)["args"] == {**values_of(quick.training)["args"], "rho": 0.2}
    assert values_of(plan.task) == values_of(quick.task)
    assert plan.run.num_rounds == quick.run.num_rounds
    assert FairRecipe(training=SharpnessAwareTraining(rho=0.3)).plan.rule.rho == 0.3
    crt = FairRecipe("crt", run=RunSettings(num_rounds=2)).plan
    assert (crt.run.num_rounds, crt.run.crt_rounds) == (2, 10)  # else it would be FedAvg
    assert FairRecipe("crt", run=RunSettings(crt_rounds=3)).plan.run.crt_rounds == 3


def test_a_rule_that_no_method_has() -> None:
    class SampleSquares(FedAvg):
        pass

    plan = FairRecipe(rule=SampleSquares()).plan
    assert (plan.method.name, plan.run.label, type(plan.training)) == (
        "sample_squares",
        "sample_squares",
        LocalTraining,
    )


def test_bounds_of_a_hospitals_job_go_into_typed_runs() -> None:
    run = FairRecipe(rule=FedAvg(), run=RunSettings(max_weight=0.3), packaging="preinstalled", min_sites=None).plan.run
    assert (run.max_weight, run.max_samples, run.max_update_norm) == (0.3, 100_000, 3.0)
    free = FairRecipe(
        rule=FedAvg(), run=RunSettings(), packaging="preinstalled", settings={"max_weight": None}
    ).plan.run
    assert (free.max_weight, free.max_samples) == (None, 100_000)


class Own(ClassificationTask):
    pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "a method's name, or .*rule and training"),
        ({"rule": FedISM(rho=0.3), "training": SharpnessAwareTraining()}, "rho is 0.3 in FedISM and 0.05 in"),
        ({"method": "fed_avg", "rule": FedISM()}, "^rule of method 'fed_avg'.* got a FedISM$"),
        ({"rule": FedISM(), "settings": {"rho": 1.0}}, r"an object: set 'rho' there, in FedISM\("),
        (
            {"rule": FedAvg(), "run": RunSettings(), "num_rounds": 3},
            "is given as an object: set 'num_rounds'",
        ),
        ({"rule": FedAvg(), "run": RunSettings(), "min_sites": 3}, "is given as an object: set 'min_sites'"),
        (
            {"rule": FedAvg(), "run": RunSettings(), "phase_timeout": 3},
            "given as an object: set 'train_timeout'",
        ),
        (
            {"rule": FedAvg(), "task": ClassificationTask(), "settings": {"image_size": [32, 32]}},
            "set 'image_size' there",
        ),
        ({"rule": FedAvg(), "task": Own()}, "named Task .*Own of .*: name it Task"),
        ({"rule": FedAvg(), "task": ClassificationTask(), "task_file": "x.py"}, "exclude each other"),
        ({"rule": FedAvg(), "task": ClassificationTask(), "monai_bundle": "x"}, "exclude each other"),
    ],
)
def test_what_is_given_twice_or_does_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FairRecipe(**given)


def test_a_task_of_ones_own_as_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from fairflare.tasks.classification import ClassificationTask\n\n\nclass Task(ClassificationTask):\n    pass\n"
    )
    (tmp_path / "own_classes.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    from own_classes import Task  # type: ignore[import-not-found]

    recipe = FairRecipe("fed_ism", task=Task(image_size=(32, 32)), sites=2)
    server, _, _ = exported(recipe, tmp_path / "jobs")
    assert server["workflows"][0]["args"]["task"]["path"] == "task.Task"
    assert server["workflows"][0]["args"]["task"]["args"]["image_size"] == [32, 32]
    assert (tmp_path / "jobs" / "fed_ism" / "app" / "custom" / "task.py").read_text() == text
    with pytest.raises(ValueError, match="your own task is custom code"):
        FairRecipe("fed_ism", task=Task(), packaging="preinstalled")


def test_a_task_of_a_task_file_does_not_become_the_packaged_one(tmp_path: Path) -> None:
    """Check also that a task file does not become another file that was read under the same name."""
    base = "from fairflare.tasks.classification import ClassificationTask\n\n\nclass Task(ClassificationTask):\n"
    (tmp_path / "mine.py").write_text(base + "    def build_model(self):\n        return 'mine'\n")
    own = FairRecipe("fed_ism", task_file=tmp_path / "mine.py").plan.task
    with pytest.raises(ValueError, match="module of its own, or give task_file"):
        FairRecipe("fed_ism", task=own)
    packaged = FairRecipe("fed_ism").plan.task
    assert values_of(FairRecipe("fed_ism", task=packaged).plan.task) == values_of(packaged)


# ------------------------------------------------------------------------------------------------ FLARE's helpers


def exported(recipe: Any, folder: Path) -> tuple[dict, dict, dict]:
    recipe.export(str(folder))
    app = folder / recipe.name / "app" / "config"
    files = (app / "config_fed_server.json", app / "config_fed_client.json", folder / recipe.name / "meta.json")
    server, client, meta = (json.loads(path.read_text()) for path in files)
    return server, client, meta


def receivers(server: dict) -> list[str]:
    return [c["path"] for c in server["components"] if "tracking" in c["path"]]


@pytest.mark.parametrize("name", ["fed_avg", "fed_lwr", "fed_mrl", "crt", "cgsv"])
def test_cross_site_evaluation_is_added_to_any_recipe(name: str, tmp_path: Path) -> None:
    recipe = class_of(name)(sites=2)
    add_cross_site_evaluation(recipe)
    server, client, _ = exported(recipe, tmp_path)
    assert [w["path"].rpartition(".")[2] for w in server["workflows"]] == ["RoundsController", "CrossSiteModelEval"]
    (locator,) = [c for c in server["components"] if c["path"].endswith("PTFileModelLocator")]
    assert locator["args"]["pt_persistor_id"] in [c["id"] for c in server["components"]]
    assert client["executors"][0]["tasks"] == [*OF_A_RUN, "submit_model"]
    with pytest.raises(RuntimeError, match="already been added"):
        add_cross_site_evaluation(recipe)


def test_without_local_models_none_is_asked_for(tmp_path: Path) -> None:
    recipe = FedAvgRecipe(sites=2)
    add_final_global_evaluation(recipe)
    server, client, _ = exported(recipe, tmp_path)
    assert server["workflows"][1]["args"]["submit_model_task_name"] == ""
    assert client["executors"][0]["tasks"] == OF_A_RUN


def test_one_tensorboard_receiver(tmp_path: Path) -> None:
    assert receivers(exported(FedAvgRecipe(), tmp_path / "a")[0]) == ["fairflare.flare.tracking.TensorBoard"]
    recipe = FedAvgRecipe()
    add_experiment_tracking(recipe, "tensorboard", {"tb_folder": "curves"})
    server, _, _ = exported(recipe, tmp_path / "b")
    assert receivers(server) == ["nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver"]


def test_flares_mlflow_receiver_is_refused_as_it_would_write_nothing(tmp_path: Path) -> None:
    recipe = FedAvgRecipe()
    receiver = type("MLflowReceiver", (), {"__module__": "nvflare.app_opt.tracking.mlflow.mlflow_receiver"})
    recipe._job._deploy_map["server"].app_config.components["tracking"] = receiver()
    with pytest.raises(ValueError, match="MLflow receiver drops"):
        recipe.export(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_settings_of_one_site_alone_are_refused() -> None:
    with pytest.raises(ValueError, match=r"for site-1, site-2 alone.*local/fair"):
        set_per_site_config(FedAvgRecipe(sites=2), {"site-2": {"device": "cpu"}, "site-1": {}})
    with pytest.raises(ValueError, match="applies to all clients"):
        FedISMRecipe(sites=2).add_client_output_filter(PercentilePrivacy(), clients=["site-1"])


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
    with pytest.raises(ValueError, match=r"initial_ckpt 'models/start\.pt' would"):
        FedAvgRecipe(initial_ckpt="models/start.pt", packaging="preinstalled")
    with pytest.raises(ValueError, match=r"initial_ckpt 'models/gone\.pt' does not"):
        FedAvgRecipe(initial_ckpt="models/gone.pt")


# ------------------------------------------------------------------------------------------------ results


class Finished:
    """Stand in for a FLARE ``Run`` that is over."""

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
    monkeypatch.setattr("fairflare.flare.export.environments.StockPocEnv.get_job_result", lambda *args: found.pop(0))
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))
    env = PocEnv(num_clients=2, results=tmp_path / "kept")
    assert env.get_job_result("abc") == str(tmp_path / "kept" / "abc")
    assert (tmp_path / "kept" / "abc" / "workspace" / "x").read_text() == "1"
    assert env.get_job_result("abc") is None
