"""A FLARE Recipe for every method; the job folders in ``jobs/`` are their export with default settings."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.job_config.api import ClientApp, FedJob, ServerApp
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.recipe.spec import Recipe

import fairflare
from fairflare.flare.controller import RoundsController
from fairflare.flare.executor import TASKS, SiteExecutor
from fairflare.flare.tracking import TensorBoard
from fairflare.methods import get_method
from fairflare.tasks.base import Task

# Kinds of task: the file a job carries for each, with a class Task that the user may edit.
TASKS_BY_KIND = {
    kind: Path(__file__).with_name("templates") / f"{kind}_task.py" for kind in ("segmentation", "classification")
}
PACKAGINGS = ("task_file", "preinstalled", "bundle")
# A site asks for its next task this often; FLARE's default of 2 s would dominate short phases.
SERVER_CONFIG = {"server": {"task_request_interval": 0.05}}


class FairRecipe(Recipe):
    """Any method as a FLARE job.

    Args:
        method: a name of ``fairflare list``.
        name: of the job; default: the method's.
        task: ``"segmentation"`` or ``"classification"``; default: what the method's paper learns.
        num_rounds: communication rounds; default: the method's small job.
        sites: number of sites (named ``site-1`` ...), their names, or ``None`` for every connected site (``@ALL``),
            which is what a provisioned network wants; 0: as many as the method's small job has.
        min_sites: usable results a round needs; also FLARE's ``min_clients``.
        seed, experiment, straggler_grace, max_missed, keep_local_models: see :class:`RoundsController`.
        phase_timeout: seconds for each of train, anchor and validate.
        isolate: each task in a child process at the site.
        settings: arguments of the method's halves and of the task, by name, wherever they belong; on top of those
            of the method's small job (:attr:`Method.small`) unless ``small`` is False.
        small: False: the papers' settings, also for what is not named in ``settings``.
        task_file: a Python file with a class ``Task``; default: the packaged one of the kind of task.
        packaging: ``"task_file"``: the job carries ``app/custom/task.py`` and sites must permit custom code;
            ``"preinstalled"``: no custom code, sites need the package and ``fairflare.`` in their class allow list;
            ``"bundle"``: the job carries the whole package.

    Raises:
        ValueError: unknown method, task, packaging or setting (suggests the nearest).
    """

    def __init__(
        self,
        method: str,
        *,
        name: str | None = None,
        task: str | None = None,
        num_rounds: int | None = None,
        sites: int | Sequence[str] | None = 0,
        min_sites: int = 2,
        seed: int = 0,
        experiment: str = "",
        phase_timeout: float = 3600.0,
        straggler_grace: float = 0.0,
        max_missed: int = 2,
        keep_local_models: bool = False,
        isolate: bool = False,
        settings: Mapping[str, Any] | None = None,
        small: bool = True,
        task_file: str | Path | None = None,
        packaging: str = "task_file",
    ) -> None:
        chosen = get_method(method)
        kind = chosen.task if task is None else task
        if kind not in TASKS_BY_KIND:
            raise ValueError(f"task must be one of {tuple(TASKS_BY_KIND)}, got {kind!r}")
        if packaging not in PACKAGINGS:
            raise ValueError(f"packaging must be one of {PACKAGINGS}, got {packaging!r}")
        if packaging == "preinstalled" and task_file is not None:
            raise ValueError("a task file is custom code; packaging 'preinstalled' carries none")
        file = Path(task_file) if task_file else TASKS_BY_KIND[kind]
        task_class = load_task_class(file)
        # Another kind of task than the paper's has none of its small settings, but its length.
        quick = (chosen.small if kind == chosen.task else {}) if small else {}
        server, site, learns = route_settings(
            {**quick, **(settings or {})}, chosen.aggregator, chosen.training, task_class, method=chosen.name
        )
        if kind == chosen.task:
            learns = {**chosen.learns, **learns}
        self.site_names = site_list(chosen.num_sites if sites == 0 else sites)
        if self.site_names is not None and min_sites > len(self.site_names):
            raise ValueError(f"min_sites={min_sites}, but the job has {len(self.site_names)} site(s)")
        self.task = task_class(**learns)
        self.training = chosen.training(**{**chosen.site, **site})
        self.aggregator = chosen.aggregator(**{**chosen.server, **server})
        self.rounds: dict[str, Any] = {
            "num_rounds": chosen.num_rounds if num_rounds is None else num_rounds,
            "min_sites": min_sites,
            "seed": seed,
            "experiment": experiment,
            "train_timeout": phase_timeout,
            "anchor_timeout": phase_timeout,
            "validate_timeout": phase_timeout,
            "straggler_grace": straggler_grace,
            "max_missed": max_missed,
            "keep_local_models": keep_local_models,
            "label": name or chosen.name,
        }
        job = _FairJob(
            name or chosen.name,
            min_sites,
            sites=self.site_names,
            task=self.task,
            task_file=file,
            packaging=packaging,
        )
        controller = RoundsController(task=self.task, aggregator=self.aggregator, **self.rounds)
        job.to_server(controller, id="rounds")
        job.to_server(TensorBoard(), id="tensorboard")
        job.to_server(dict(SERVER_CONFIG))
        executor = SiteExecutor(self.task, self.training, isolate=isolate)
        job.to_clients(executor, tasks=list(TASKS))
        super().__init__(job)


class FedAvgRecipe(FairRecipe):
    """FedAvg.

    Args:
        weighting: ``"samples"`` or ``"uniform"`` (Fed-LWR, Eq. 1).
        settings, common: see :class:`FairRecipe`.
    """

    def __init__(self, *, weighting: str = "samples", settings: Mapping[str, Any] | None = None, **common: Any) -> None:
        super().__init__("fed_avg", settings={"weighting": weighting, **(settings or {})}, **common)


class FedLWRRecipe(FairRecipe):
    """Fed-LWR and its ablations.

    Args:
        variant: ``""``, ``"cosine"`` (v1) or ``"last_layer"`` (v2).
        preset: ``"paper"`` or ``"authors"``.
        cka_estimator: see :class:`fairflare.methods.fed_lwr.LayerSimilarityReport`; ``None``: the preset's.
        settings, common: see :class:`FairRecipe`.
    """

    def __init__(
        self,
        *,
        variant: str = "",
        preset: str = "paper",
        cka_estimator: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> None:
        chosen: dict[str, Any] = {"preset": preset, **(settings or {})}
        if cka_estimator is not None:
            chosen["cka_estimator"] = cka_estimator
        super().__init__("fed_lwr" + (f"_{variant}" if variant else ""), settings=chosen, **common)


# ------------------------------------------------------------------------------------------------ pieces


def site_list(sites: int | Sequence[str] | None) -> list[str] | None:
    """``3`` -> ``["site-1", "site-2", "site-3"]``; names are checked for repeats."""
    if sites is None:
        return None
    if isinstance(sites, int) and not isinstance(sites, bool):
        if sites < 1:
            raise ValueError(f"sites must be >= 1, got {sites}")
        return [f"site-{i}" for i in range(1, sites + 1)]
    names = [str(s) for s in sites]  # type: ignore[union-attr]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"sites must be different names, got {names}")
    return names


def init_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Constructor arguments of a class, those of its bases too where ``**kwargs`` passes them on."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        kinds = {p.kind for p in parameters.values()}
        for name, parameter in parameters.items():
            if name != "self" and parameter.kind in (
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.KEYWORD_ONLY,
            ):
                found.setdefault(name, parameter)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return found


def route_settings(
    settings: Mapping[str, Any], aggregator: type, training: type, task: type, *, method: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Gives each setting to the parts that have an argument of that name (``preset`` belongs to both halves).

    Raises:
        ValueError: nothing has such an argument (suggests the nearest).
    """
    parts: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    owners = [set(init_parameters(c)) for c in (aggregator, training, task)]
    owners[0].discard("min_sites")  # the controller's, once for both
    for key, value in settings.items():
        hit = False
        for part, names in zip(parts, owners, strict=True):
            if key in names:
                part[key] = value
                hit = True
        if not hit:
            known = sorted(set().union(*owners))
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"method {method!r} has no setting {key!r}{hint} Available: {', '.join(known)}")
    return parts


def load_task_class(path: Path) -> type[Task]:
    """The class ``Task`` of a task file.

    Raises:
        ValueError: no such file, or no such class in it.
    """
    if not path.is_file():
        raise ValueError(f"task file {path} does not exist")
    spec = importlib.util.spec_from_file_location("fairflare_task_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"task file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, "Task", None)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise ValueError(f"task file {path} must define a class Task (a subclass of fairflare.tasks.base.Task)")
    return found


class _FairJobConfig(FedJobConfig):
    """Writes the task as ``task.Task`` and puts our custom code, and only that, into the app."""

    task: Task
    task_file: Path
    packaging: str

    def _get_class_path(self, obj: Any, custom_dir: str) -> str:
        if obj is self.task:
            if self.packaging == "preinstalled":
                base = type(obj).__mro__[1]  # the packaged class that the template's Task subclasses
                return f"{base.__module__}.{base.__name__}"
            return "task.Task"
        return f"{type(obj).__module__}.{type(obj).__name__}"

    def _values_differ(self, default_val: Any, attr_val: Any) -> bool:
        # Every setting is written, also where it is the default: a job folder is what a user edits.
        return attr_val is not None or default_val is not None

    def _get_client_app(self, config_dir: str, custom_dir: str, fed_app: Any) -> None:
        super()._get_client_app(config_dir, custom_dir, fed_app)
        for config in Path(config_dir).glob("*.json"):
            if not (text := config.read_text(encoding="utf-8")).endswith("\n"):
                config.write_text(text + "\n", encoding="utf-8")
        if self.packaging == "preinstalled":
            return
        custom = Path(custom_dir)
        custom.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.task_file, custom / "task.py")
        if self.packaging == "bundle":
            shutil.copytree(
                Path(fairflare.__file__).parent,
                custom / "fairflare",
                ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
                dirs_exist_ok=True,
            )


class _FairJob(FedJob):
    """One app for server and sites, deployed to named sites when there are names."""

    def __init__(
        self,
        name: str,
        min_clients: int,
        *,
        sites: list[str] | None,
        task: Task,
        task_file: Path,
        packaging: str,
    ) -> None:
        super().__init__(name=name, min_clients=min_clients)
        self.job = _FairJobConfig(job_name=name, min_clients=min_clients)
        self.job.task = task
        self.job.task_file = task_file
        self.job.packaging = packaging
        self._sites = sites

    def _set_all_app(self, client_app: ClientApp, server_app: ServerApp) -> None:
        super()._set_all_app(client_app, server_app)
        if self._sites is not None:
            self.job.deploy_map = dict.fromkeys(["server", *self._sites], "app")
