"""A FLARE Recipe for every method; the job folders in ``jobs/`` are their export with default settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.job_config.script_runner import FrameworkType
from nvflare.recipe.spec import Recipe

from fairflare.core.checks import choice, nearest
from fairflare.core.settings import field_names
from fairflare.federation.influence import FOR_HOSPITALS
from fairflare.federation.plan import make_plan
from fairflare.federation.run_settings import RunSettings
from fairflare.flare.job import PACKAGINGS, PERSISTOR, TENSORBOARD, make_job
from fairflare.flare.stock_tasks import SUBMIT_MODEL
from fairflare.methods.catalog import get_method

#: Arguments of :class:`FairRecipe` that are neither settings of the method and its task nor of the run.
OPTIONS = ("name", "packaging", "task", "sites", "small", "train_like", "task_file", "monai_bundle", "isolate")
MLFLOW_RECEIVER = "nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver"  # mlflow may not be installed

_Init = TypeVar("_Init", bound=Callable[..., None])


class FairRecipe(Recipe):
    """Any method as a FLARE job.

    Args:
        method: a name of ``fairflare list``.
        name: of the job; default: the method's.
        packaging: ``"task_file"``: the job carries ``app/custom/task.py`` and sites must permit custom code;
            ``"preinstalled"``: no custom code, sites need the package and ``fairflare.`` in their class allow list;
            ``"bundle"``: the job carries the whole package. A ``"preinstalled"`` job is for hospitals: one site's
            influence is bounded in it (:data:`fairflare.federation.influence.FOR_HOSPITALS`); ``settings`` go before.
        task: ``"segmentation"`` or ``"classification"``; default: what the method's paper learns.
        sites: their number (named ``site-1`` ...), their names, or ``None`` for every connected site; 0: as many as the
            method's small job has.
        settings: of the method's halves and of the task, by name; see :func:`fairflare.federation.plan.make_plan`.
        small: False: the paper's settings for whatever is not given.
        train_like: another method whose set-up this one gets (task, network, data, local training, rounds, number of
            sites), so that the two can be compared.
        task_file: a Python file with a class ``Task``: your own network and data.
        monai_bundle: folder of a MONAI bundle: network, loss, optimizer, transforms and metric are its own.
        num_rounds: communication rounds; default: the method's small job.
        min_sites: usable results a round needs; also FLARE's ``min_clients``.
        phase_timeout: seconds for each of train, anchor, norms and validate; for check at most ten minutes.
        isolate: each task in a child process at the site.
        run: further settings of :class:`fairflare.federation.run_settings.RunSettings`: ``seed``, ``experiment``,
            ``initial_ckpt``, ``straggler_grace``, ``max_missed``, ``check_timeout``, ``require_all_sites``,
            ``keep_local_models``, ``norm_statistics``, ``recalibration``, ``anchor_as``, ``max_weight``,
            ``max_samples``, ``max_update_norm``.

    Raises:
        ValueError: unknown method, task, packaging or setting (suggests the nearest), or a value out of range.
    """

    framework = FrameworkType.PYTORCH  # FLARE's helpers (cross-site evaluation) look at it

    def __init__(
        self,
        method: str,
        *,
        name: str | None = None,
        packaging: str = "task_file",
        task: str | None = None,
        sites: int | Sequence[str] | None = 0,
        settings: Mapping[str, Any] | None = None,
        small: bool = True,
        train_like: str | None = None,
        task_file: str | Path | None = None,
        monai_bundle: str | Path | None = None,
        num_rounds: int | None = None,
        min_sites: int = 2,
        phase_timeout: float = 3600.0,
        isolate: bool = False,
        **run: Any,
    ) -> None:
        choice("packaging", packaging, PACKAGINGS)
        if packaging == "preinstalled" and task_file is not None:
            raise ValueError("a task file is custom code; packaging 'preinstalled' carries none")
        if packaging == "preinstalled" and monai_bundle is not None:
            raise ValueError("a MONAI bundle is custom code; packaging 'preinstalled' carries none")
        if packaging == "preinstalled":
            hospitals = {**FOR_HOSPITALS, **get_method(method).preinstalled}
            settings = {**hospitals, **{k: run.pop(k) for k in FOR_HOSPITALS if k in run}, **(settings or {})}
        timeouts = dict.fromkeys(
            ("train_timeout", "anchor_timeout", "norms_timeout", "validate_timeout"), phase_timeout
        )
        timeouts["check_timeout"] = min(RunSettings().check_timeout, phase_timeout)
        self.plan = make_plan(
            method,
            task=task,
            sites=sites,
            settings=settings,
            small=small,
            train_like=train_like,
            task_file=task_file,
            monai_bundle=monai_bundle,
            num_rounds=num_rounds,
            min_sites=min_sites,
            **{"label": name, **timeouts, **run},
        )
        super().__init__(make_job(self.plan, name or self.plan.method.name, packaging, isolate=isolate))
        self._job.comp_ids = {"persistor_id": PERSISTOR}  # where FLARE's helpers look for it

    def add_cse_validator_if_needed(self) -> None:
        """FLARE's ``add_cross_site_evaluation`` calls it: the sites' executor is asked for local models too.

        It gives none unless the site's own file says ``"submit_model": true``.
        """
        for defined in self._job._deploy_map["@ALL"].app_config.executors:
            if SUBMIT_MODEL not in defined.tasks:
                defined.tasks.append(SUBMIT_MODEL)

    def finalize(self) -> None:
        """One TensorBoard receiver: FLARE's, where ``add_experiment_tracking`` added it, takes the place of ours. In
        place of its MLflow receiver, which drops what a server sends, there is ours with the same settings.
        """
        components = self._job._deploy_map["server"].app_config.components
        for key, component in components.items():
            if f"{type(component).__module__}.{type(component).__name__}" == MLFLOW_RECEIVER:
                from fairflare.flare.mlflow_tracking import MLflow

                components[key] = MLflow.like(component)
        others = [c for key, c in components.items() if key != TENSORBOARD]
        if any(isinstance(component, TBAnalyticsReceiver) for component in others):
            components.pop(TENSORBOARD, None)

    def _apply_per_site_config(self, config: dict[str, dict[str, Any]]) -> None:
        raise ValueError(
            f"{type(self).__name__}: all sites get the same job, so nothing can be set for {', '.join(sorted(config))} "
            "alone. What is a site's own (data, device, threads) stands in its local/fairflare.json; for SimEnv in the "
            "block 'sites' of that file in the workspace (docs/data.md)"
        )


class MethodRecipe(FairRecipe):
    """Base of the recipes of one method each, which ``tools/write_recipes.py`` writes.

    Attributes:
        method: of ``fairflare list``.
        dotted: arguments that are settings of a part: ``{"weighting_grid": "weighting.grid"}``.
    """

    method: ClassVar[str]
    dotted: ClassVar[Mapping[str, str]] = {}


def only_what_is_given(init: _Init) -> _Init:
    """Makes a recipe of the arguments that its caller gave; those it did not are the quick job's, or the paper's."""

    @wraps(init)
    def made(self: MethodRecipe, **given: Any) -> None:
        known = [name for name in inspect.signature(init).parameters if name != "self"]
        for name in given:
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{nearest(name, known)}")
        settings = dict(given.pop("settings", None) or {})
        options = {name: given.pop(name) for name in (*OPTIONS, *field_names(RunSettings)) if name in given}
        for name, value in given.items():
            if name in self.dotted and value is None:
                continue
            settings[self.dotted.get(name, name)] = value
        FairRecipe.__init__(self, self.method, settings=settings, **options)

    return made  # type: ignore[return-value]
