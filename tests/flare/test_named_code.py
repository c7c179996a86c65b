"""Test that a job without the right to bring code names no code: every class, every setting, real entry points.

FLARE's own authorizer and builder make the components, as in a job's process; the server begins its rounds and a site
does its tasks with whatever they let through.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import pickle
import pkgutil
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.fuel.utils.json_scanner import Node
from nvflare.private.fed.utils.fed_utils import authorize_build_component
from nvflare.private.json_configer import ConfigContext, JsonConfigurator

import fairflare
from fairflare.base.settings import field_names, hints_of, parts_of
from fairflare.exchange.messages import TASK_ANCHOR, TASK_CHECK, TASK_TRAIN, TASK_VALIDATE
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.site.worker import SiteWorker
from fairflare.flare.export.provision import job_classes
from fairflare.flare.export.recipes import FairRecipe
from fairflare.flare.export.script_recipe import ScriptRecipe
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.tasks.base import Task
from tests.federation.network import Line, Network, says_nothing
from tests.methods.support import request

WIDE = ["nvflare.", "fairflare."]  # of kits made by hand; with it a job may still name no code through a class
TINY: dict[str, dict[str, Any]] = {
    "ClassificationTask": {
        "image_size": [33, 33], "features": [4, 4, 8, 8], "phantom": "fundus", "phantom_samples": 60,
        "phantom_test": 40, "projector_dim": 96,
    },
    "SegmentationTask": {"image_size": [32, 32], "features": [4, 4, 4, 4, 4, 4], "phantom_cases": 0.05},
    "VolumeClassificationTask": {"features": [4, 4, 8, 8], "phantom_cases": 0.5},
    "VolumeSegmentationTask": {"features": [4, 4, 4, 4, 4, 4], "phantom_cases": 0.1, "patches": 1},
    "ScriptTask": {"model": "torch.nn.Identity"},
    "RoundsController": {
        "task": {"path": "fairflare.tasks.classification.ClassificationTask", "args": {}},
        "rule": {"path": "fairflare.methods.fed_avg.FedAvg", "args": {}},
    },
    "FairAggregator": {"rule": {"path": "fairflare.methods.fed_avg.FedAvg", "args": {}}},
    "SiteExecutor": {
        "task": {"path": "fairflare.tasks.classification.ClassificationTask", "args": {}},
        "training": {"path": "fairflare.methods.base.training.LocalTraining", "args": {}},
    },
}  # fmt: skip
for _of in ("RoundsController", "SiteExecutor"):
    TINY[_of]["task"]["args"] = TINY["ClassificationTask"]


class Trap:
    """Make a folder where code that a job names would leave a trace, and one outside of all that a run owns.

    The module ``canary_module`` writes a file when it is imported, another when its class is called; ``evil.pt`` writes
    one when it is unpickled, ``evil.py`` when it is run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.traces, self.outside = folder, folder / "traces", folder / "outside"
        for place in (self.traces, self.outside, folder / "modules"):
            place.mkdir(parents=True)

        def touch(name: str, indent: str = "") -> str:
            return f"{indent}open({str(self.traces / name)!r}, 'w').close()\n"

        (folder / "modules" / "canary_module.py").write_text(
            f"import torch\n{touch('imported')}"
            f"class Canary(torch.nn.Module):\n"
            f"    def __init__(self, **more):\n{touch('called', ' ' * 8)}        super().__init__()\n"
            f"def write(**more):\n{touch('called', '    ')}"
        )
        (self.outside / "evil.py").write_text(f"{touch('run')}class Task: pass\n")
        (self.outside / "evil.pt").write_bytes(pickle.dumps(_Evil(str(self.traces / "unpickled"))))
        self.before = sorted(self.outside.rglob("*"))

    @property
    def texts(self) -> list[str]:
        """Return hostile values for a text setting, wherever the text may lead."""
        deep = "../" * 12 + str(self.outside).lstrip("/")
        return [
            "subprocess.Popen", "os.system", "canary_module.Canary", "canary_module", "canary_module:Canary",
            "timm:hf-hub:canary/module", "$__import__('canary_module')", "{0.__class__.__init__.__globals__}",
            "(a+)+$", str(self.outside / "evil.pt"), str(self.outside / "evil.py"), f"{deep}/evil.pt", f"{deep}/new",
            str(self.outside / "new"),
        ]  # fmt: skip

    @property
    def values(self) -> list[Any]:
        """Return hostile values for any setting; FLARE builds a dict that names a class."""
        named: list[Any] = [{key: "canary_module.Canary", "args": {}} for key in ("path", "class_path")]
        named += [{"path": "subprocess.Popen", "args": self.popen}, {"name": "Popen"}, {"_target_": "subprocess.Popen"}]
        return [*self.texts, *([text] for text in self.texts), *({"site-1": text} for text in self.texts[:4]), *named]

    @property
    def popen(self) -> dict[str, Any]:
        """Return the arguments with which ``subprocess.Popen`` would leave a trace."""
        return {"args": ["touch", str(self.traces / "started")]}

    def check(self, what: str) -> None:
        found = sorted(path.name for path in self.traces.iterdir())
        assert not found, f"{what}: the code ran ({', '.join(found)})"
        assert "canary_module" not in sys.modules, f"{what}: the module was imported"
        assert sorted(self.outside.rglob("*")) == self.before, f"{what}: something was written outside"


class _Evil:
    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.trace),)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    found = Trap(tmp_path / "trap")
    monkeypatch.syspath_prepend(str(found.folder / "modules"))
    monkeypatch.chdir(tmp_path)
    yield found
    sys.modules.pop("canary_module", None)


def test_the_trap_springs(trap: Trap) -> None:
    trap.check("before")
    for act, trace in (
        (lambda: importlib.import_module("canary_module"), "imported"),
        (lambda: sys.modules["canary_module"].Canary(), "called"),
        (lambda: pickle.loads((trap.outside / "evil.pt").read_bytes()), "unpickled"),
        (lambda: subprocess.run(**trap.popen, check=True), "started"),
        (lambda: runpy.run_path(str(trap.outside / "evil.py")), "run"),
    ):
        act()
        with pytest.raises(AssertionError, match=trace):
            trap.check("then")
        (trap.traces / trace).unlink()
    with pytest.raises(AssertionError, match="imported"):
        trap.check("the module is there")
    del sys.modules["canary_module"]
    (trap.outside / "new").touch()
    with pytest.raises(AssertionError, match="outside"):
        trap.check("a file")


class Builder:
    """Run FLARE's builder and authorizer of a job without custom code."""

    def __init__(self, folder: Path, allowed: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "resources.json").write_text(json.dumps({"class_allow_list": allowed}))
        (folder / "meta.json").write_text(json.dumps({"name": "job"}))
        config = folder / "config.json"
        config.write_text("{}")
        workspace = SimpleNamespace(
            get_resources_file_path=lambda: str(folder / "resources.json"), get_root_dir=lambda: str(folder),
            get_job_meta_path=lambda job: str(folder / "meta.json"),
        )  # fmt: skip
        context = FLContext()
        context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
        context.set_prop(FLContextKey.CURRENT_JOB_ID, "job", private=False, sticky=False)
        self.configurator = JsonConfigurator(str(config), ["nvflare"], ["apis", "app_common", "widgets"])
        self.configurator.set_component_build_authorizer(authorize_build_component, fl_ctx=context, event_handlers=[])

    def __call__(self, path: str, args: Any) -> Any:
        told = json.loads(json.dumps({"path": path, "args": args}))
        return self.configurator.authorize_and_build_component(told, ConfigContext(), Node(told))


def cases(cls: type, trap: Trap) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return arguments of a class with a canary in one of them, and dicts of arguments that would make it act.

    A setting that the class has from another class that jobs name is tried there.
    """
    given = TINY.get(cls.__name__, {})
    hints = hints_of(cls)
    bases = [base for base in cls.__mro__[1:] if f"{base.__module__}.{base.__qualname__}" in job_classes()]
    own = [name for name in field_names(cls) if not any(hints_of(b).get(name) == hints.get(name, b) for b in bases)]
    free = [name for name in field_names(cls) if Any in _leaves(hints.get(name, Any))]
    for name in own:
        for value in trap.values:
            yield name, {**given, name: value}
            for other in free:
                if other != name:
                    yield name, {**given, name: value, other: trap.popen}
    yield "class_attributes", {**given, "class_attributes": {"args": {"path": "subprocess.Popen", "args": trap.popen}}}
    yield "unknown", {**given, "not_a_setting": {"path": "subprocess.Popen", "args": trap.popen}}


def _leaves(hint: Any) -> set[Any]:
    if hint is Any or get_origin(hint) is Literal:
        return {hint}
    inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return set().union(*map(_leaves, inner)) if inner else {hint}


def enter(component: Any, folder: Path, trap: Trap) -> None:
    """Call the entry points of server and site, with one part that a job has named."""
    task, rule, run, training = Line(), FedAvg(), RunSettings(), LocalTraining(batch_size=16, local_steps=1)
    if isinstance(component, RunSettings):  # the controller
        task, rule, run = component.task, component.rule, component  # type: ignore[attr-defined]
    elif isinstance(component, Task):
        task = component  # type: ignore[assignment]
    elif isinstance(component, Rule):
        rule = component  # type: ignore[assignment]
    elif isinstance(component, LocalTraining):
        training, task = component, _small()
    elif hasattr(component, "training"):  # the executor
        task, training = component.task, component.training
    elif isinstance(component, TBAnalyticsReceiver):
        workspace = SimpleNamespace(get_run_dir=lambda job: str(folder))
        engine = SimpleNamespace(get_workspace=lambda: workspace)
        _attempt(lambda: component.initialize(SimpleNamespace(get_engine=lambda: engine, get_job_id=lambda: "job")))
        return
    half = {"path": f"{type(training).__module__}.{type(training).__name__}", "args": {}}
    place = Place(folder / "run", folder / "kept", "job", {}, half, folder / "run" / "custom")
    place.run_dir.mkdir(parents=True)
    network = Network(lambda *what: says_nothing(), ["site-1"])
    _attempt(Rounds(task, rule, run, network, place).run)
    if isinstance(component, (Rule, RunSettings)):
        return
    site = folder / "site"
    try:
        worker = SiteWorker("site-1", task, training, {"device": "cpu", "phantom": True}, site)
    except ValueError:
        return
    state = {} if isinstance(task, Line) else _state(task)
    for name in (TASK_CHECK, TASK_VALIDATE, TASK_TRAIN, TASK_ANCHOR):
        worker.perform(request(name, state, experiment="e", run="r"))


def _small() -> Any:
    from fairflare.tasks.classification import ClassificationTask

    return ClassificationTask(**TINY["ClassificationTask"])


def _state(task: Task) -> dict[str, torch.Tensor]:
    try:
        return dict(task.build_model().state_dict())
    except ValueError:
        return {}


def _attempt(what: Any) -> None:
    with contextlib.suppress(Exception):  # a refusal, or a run that cannot go on: what counts is what ran
        what()


@pytest.mark.many
@pytest.mark.parametrize("path", job_classes())
def test_no_setting_of_a_class_that_a_job_names_is_run(path: str, trap: Trap, tmp_path: Path) -> None:
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    build = Builder(tmp_path / "flare", WIDE)
    trap.check("before")
    for number, (setting, args) in enumerate(cases(cls, trap)):
        what = f"{name}.{setting}={args.get(setting)!r:.120}"
        try:
            component = build(path, args)
        except Exception:  # the authorizer's, the builder's or the class's own refusal
            trap.check(what)
            continue
        trap.check(f"{what}, built")
        enter(component, tmp_path / f"e{number}", trap)
        trap.check(f"{what}, at server and site")


def test_the_packaged_list_admits_nothing_else_of_the_package(tmp_path: Path, trap: Trap) -> None:
    """Check functions and imported names too, as FLARE calls functions as readily as classes."""
    build = Builder(tmp_path / "flare", job_classes())
    admitted, names = set(), 0
    modules = [info.name for info in pkgutil.walk_packages(fairflare.__path__, "fairflare.")]
    for module in modules:
        if module.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module)).items():
            if not callable(value):
                continue
            names += 1
            config = {"path": f"{module}.{name}"}
            if not authorize_build_component(
                config, None, None, build.configurator.build_auth_kwargs["fl_ctx"], []
            ):  # fmt: skip
                admitted.add(config["path"])
    assert admitted == set(job_classes())
    assert names > 2000
    for path in (
        "fairflare.flare.export.job.ClientAPIExecutor",
        "fairflare.federation.plan.plan.make_plan",
        "subprocess.Popen",
    ):
        with pytest.raises(Exception, match="not in allow_list"):
            build(path, {})


def test_what_a_job_without_code_names_is_on_the_packaged_list(tmp_path: Path) -> None:
    listed, seen = set(job_classes()), set()
    for method in all_methods():
        FairRecipe(method, packaging="preinstalled").export(str(tmp_path / method))
        for config in (tmp_path / method).rglob("config_fed_*.json"):
            seen |= set(_paths(json.loads(config.read_text())))
    script = ScriptRecipe("fed_lwr", train_script="/own/train.py", model="own.Net", packaging="preinstalled")
    script.export(str(tmp_path / "script"))
    seen |= set(_paths(json.loads(next((tmp_path / "script").rglob("config_fed_server.json")).read_text())))
    assert {path for path in seen if path.startswith("fairflare.")} <= listed
    assert {"fairflare.methods.fed_lwr.FedLWR", "fairflare.tasks.scripts.ScriptTask"} <= seen
    for path in sorted(listed):  # and the other kinds of a part
        module, _, name = path.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        for field in field_names(cls):
            kinds = {f"{p.__module__}.{p.__name__}" for p in parts_of(cls, field).values()}
            assert {kind for kind in kinds if kind.startswith("fairflare.")} <= listed


def _paths(value: Any) -> Iterator[str]:
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _paths(entry)
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        yield value["path"]


# ------------------------------------------------------------------------------------------------ a script's network


def start(folder: Path, task: Any, server: dict[str, Any] | None = None) -> str:
    """Return why the rounds do not begin; empty: the model is built, and an error comes later."""
    place = Place(folder, folder / "kept", "job", server or {})
    folder.mkdir(parents=True, exist_ok=True)
    try:
        Rounds(task, FedAvg(), RunSettings(), Network(lambda *what: says_nothing(), []), place).run()
    except Exception as error:
        return "" if "no site is connected" in str(error) else str(error)
    raise AssertionError("it cannot have gone on")


def script_task(model: str, tmp_path: Path, **more: Any) -> Any:
    return Builder(tmp_path / "flare", WIDE)("fairflare.tasks.scripts.ScriptTask", {"model": model, **more})


def test_a_network_is_built_where_the_servers_own_list_has_it(tmp_path: Path, trap: Trap) -> None:
    linear = {"in_features": 2, "out_features": 1}
    for listed in (["torch.nn.Linear"], ["torch.nn."], ["own.Net", "torch.nn."]):
        task = script_task("torch.nn.Linear", tmp_path, model_args=linear)
        assert start(tmp_path / "s", task, {"networks": listed}) == ""
    for server in ({}, {"networks": []}, {"networks": ["torch.nn.Lin", "torch.nn", "torch.nn.Linear.x", "nn.Linear"]}):
        task = script_task("torch.nn.Linear", tmp_path, model_args=linear)
        why = start(tmp_path / "s", task, server)
        assert "model 'torch.nn.Linear' is named by a job without code of its own" in why
        assert "put it under 'networks' in the server's local/fairflare.json" in why
    for wrong in ("torch.nn.", [1], ["Linear"]):
        why = start(tmp_path / "s", script_task("torch.nn.Linear", tmp_path), {"networks": wrong})
        assert why.startswith("'networks' in the server's local/fairflare.json must be a list of classes")


@pytest.mark.parametrize("model", ["subprocess.Popen", "os.system", "torch.hub.load", "canary_module.write"])
def test_only_a_network_is_called_even_where_the_list_is_careless(model: str, tmp_path: Path, trap: Trap) -> None:
    task = script_task(model, tmp_path, model_args=trap.popen if "Popen" in model else {})
    listed = {"networks": [f"{model.rpartition('.')[0]}."]}
    assert "must be a class of torch.nn.Module" in start(tmp_path / "s", task, listed)
    assert {path.name for path in trap.traces.iterdir()} <= {"imported"}  # the server listed that module


def test_a_job_that_carries_its_script_builds_its_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the subclass in ``script_task.py``, which only a job with custom code has."""
    script = tmp_path / "own_train.py"
    script.write_text("import torch\n\n\nclass Net(torch.nn.Linear):\n    pass\n")
    linear = {"in_features": 2, "out_features": 1}
    ScriptRecipe("fed_avg", train_script=script, model="Net", model_args=linear).export(str(tmp_path / "job"))
    custom = tmp_path / "job" / "fed_avg" / "app" / "custom"
    assert sorted(path.name for path in custom.iterdir()) == ["own_train.py", "script_task.py"]
    server = json.loads((custom.parent / "config" / "config_fed_server.json").read_text())
    (told,) = (w["args"]["task"] for w in server["workflows"])
    assert told["path"] == "script_task.Task"
    monkeypatch.syspath_prepend(str(custom))
    made = importlib.import_module("script_task").Task(**told["args"])
    assert start(tmp_path / "s", made) == ""
    for name in ("script_task", "own_train"):
        sys.modules.pop(name, None)
    script = script.rename(tmp_path / "script_task.py")
    with pytest.raises(ValueError, match=r"has a file script_task\.py of its own"):
        ScriptRecipe("fed_avg", train_script=script, model="Net")


def test_a_checkpoint_of_the_job_is_one_that_it_carries(tmp_path: Path, trap: Trap) -> None:
    carried = tmp_path / "run" / "custom"
    carried.mkdir(parents=True)
    (carried / "own.pt").touch()
    place = Place(tmp_path / "run", tmp_path / "kept", "job", {}, None, carried)
    assert place.initial_weights(RunSettings(initial_ckpt="own.pt")) == str(carried / "own.pt")
    assert place.initial_weights(RunSettings(initial_ckpt="/models/a.pt")) == "/models/a.pt"
    (carried / "link.pt").symlink_to(trap.outside / "evil.pt")
    for out in ("../../trap/outside/evil.pt", "link.pt", "sub/../../x"):
        with pytest.raises(ValueError, match="leads out of the files"):
            place.initial_weights(RunSettings(initial_ckpt=out))


# ------------------------------------------------------------------------------------------------ where text is code

#: Every place of the package where a text that is no literal is imported, run, matched as a pattern or filled in, and
#: whose text it is. A new one fails the test below until somebody has said so.
PLACES = {
    "fairflare/base/aspect.py row.text.format_map": "rows of the module",
    "fairflare/base/machine/one_run.py REFUSAL.format": "a text of the module",
    "fairflare/methods/base/home.py re.search": "personalise of the job, on names of the network's tensors",
    "fairflare/reporting/sites/own_models.py words.format": "texts of the module",
    "fairflare/tasks/bundles/bundle_config.py re.compile": "names of the bundle's own modules, escaped",
    "fairflare_lab/cli/compare/provenance.py subprocess.run": "git, with arguments of the module",
    "fairflare_lab/page/style.py re.sub": "colours of the module",
    "fairflare/cli/run/simulate.py subprocess.Popen": "our own interpreter and FLARE's simulator",
    "fairflare/core/similarity/store.py TOO_SMALL.format": "a text of the module",
    "fairflare/data/listing/attributes.py re.sub": "a text of the module",
    "fairflare/privacy/sums/journal.py why.format": "texts of the module",
    "fairflare/data/listing/checking.py re.compile": "two texts of the module",
    "fairflare/data/patients.py re.search": "--group of the user's own command line",
    "fairflare/data/dicom_files.py re.match": "patterns of the module",
    "fairflare/data/preparers/contents.py (CONVERTERS.get(kind) or content or 'no image').format": "module's texts",
    "fairflare/data/preparers/listed.py re.compile": "the same",
    "fairflare/data/preparers/listed.py re.search": "the same",
    "fairflare/data/preparers/names.py re.compile": "names of the user's own command line, escaped",
    "fairflare/data/preparers/trees.py NOT_TAKEN.format": "a text of the module",
    "fairflare/data/preparers/writing.py NO_KEY.format": "a text of the module",
    "fairflare/examples/poc/allow.py subprocess.run": "fairflare's own commands, of an example that a person runs",
    "fairflare/exchange/sent_tensors.py re.compile": "exchange of the job, on names of the network's tensors",
    "fairflare/exchange/sent_tensors.py re.search": "the same",
    "fairflare/federation/plan/task_files.py importlib.util.spec_from_file_location": "the user's --task-file",
    "fairflare/federation/plan/site_training.py importlib.import_module": "only a LocalTraining of ours is made",
    "fairflare/methods/base/catalog.py importlib.import_module": "our methods; the user's --method-file",
    "fairflare/federation/plan/papers.py yaml.load": "the package's own files, by a safe loader",
    "fairflare/methods/base/site_run.py re.fullmatch": "escaped",
    "fairflare/prediction/export.py ConfigParser": "a bundle that the same function has written",
    "fairflare/prediction/recall.py importlib.import_module": "a packaged Task, and only of the package",
    "fairflare/tasks/adapters.py re.compile": "adapters' patterns of the job, on names of the network's parts",
    "fairflare/tasks/adapters.py re.search": "the same",
    "fairflare/tasks/bundles/bundle_config.py ConfigParser": "a bundle is code: a job's task.py says where",
    "fairflare/tasks/classification.py re.sub": "names of the module",
    "fairflare/tasks/freezing.py re.search": "freeze of the job, on names of the network's parameters",
    "fairflare/tasks/networks.py importlib.import_module": "MONAI's networks, named by our tasks",
    "fairflare/tasks/pretrained.py re.sub": "initial_keys of the job, on names of a checkpoint's tensors",
    "fairflare/tasks/priors.py re.fullmatch": "a text of the package",
    "fairflare/tasks/scripts.py importlib.import_module": "on the server's own list, or of a job that carries code",
}


def test_every_place_where_text_becomes_code_is_known() -> None:
    root = Path(fairflare.__file__).parents[1]  # both packages
    files = sorted(root.rglob("*.py"))
    found = {f"{file.relative_to(root)} {p}" for file in files for p in _text_as_code(ast.parse(file.read_text()))}
    assert sorted(found) == sorted(PLACES)


@pytest.mark.parametrize(
    ("code", "places"),
    [
        ("importlib.import_module(name)", ["importlib.import_module"]),
        ("importlib.import_module('json')", []),
        ("torch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load"]),
        ("torch.load(path, weights_only=True)", []),
        ("np.load(path, allow_pickle=False)", []),
        ("text.format(x)", ["text.format"]),
        ("'{}'.format(x)", []),
        ("re.search(pattern, x)", ["re.search"]),
        ("eval(x)", ["eval"]),
    ],
)
def test_the_list_of_places_sees_what_it_is_to_see(code: str, places: list[str]) -> None:
    assert list(_text_as_code(ast.parse(code))) == places


CODE = (
    "importlib.import_module", "importlib.util.spec_from_file_location", "__import__", "eval", "exec", "compile",
    "pickle.load", "pickle.loads", "torch.load", "np.load", "numpy.load", "yaml.load", "os.system", "subprocess.run",
    "subprocess.Popen", "subprocess.call", "subprocess.check_output", "runpy.run_path", "re.compile", "re.match",
    "re.search", "re.fullmatch", "re.sub", "re.findall", "re.split", "re.finditer", "torch.hub.load", "joblib.load",
    "ast.literal_eval", "locate", "pydoc.locate", "ConfigParser", "load_class", "instantiate_class",
)  # fmt: skip
SAFE = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


def _text_as_code(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
        if name in CODE and not literal:
            wanted = SAFE.get(name)
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            if wanted is None or given.get(wanted[0]) is not wanted[1]:
                yield name
        of = node.func.value if isinstance(node.func, ast.Attribute) else ast.Constant("")
        if name.endswith((".format", ".format_map")) and not isinstance(of, ast.Constant):
            yield name
