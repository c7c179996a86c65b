"""Define a FLARE Recipe for every method; the job folders in ``jobs/`` are their export with default settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.job_config.script_runner import FrameworkType

from fairflare.base.checks import refuse
from fairflare.base.task import Task
from fairflare.federation.plan.plan import Plan, plan_run
from fairflare.federation.plan.request import RunRequest
from fairflare.federation.plan.run_settings import RunSettings, usual_waits
from fairflare.federation.plan.task_files import BUNDLE_TASK, TASKS_BY_KIND, check_carried
from fairflare.flare.export.job import PERSISTOR, TENSORBOARD, JobRecipe, make_job
from fairflare.flare.export.packaging import package_request
from fairflare.flare.stock_tasks import SUBMIT_MODEL
from fairflare.flare.tracking import TensorBoard
from fairflare.methods.base.catalog import file_of
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.training import LocalTraining

#: Arguments of :class:`FairRecipe` that are no settings: neither of the method, nor of its task, nor of the run.
OPTIONS = ("name", "packaging", "task", "sites", "small", "paper", "train_like", "task_file", "monai_bundle", "isolate")
MLFLOW_RECEIVER = "nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver"  # mlflow may be absent


class FairRecipe(JobRecipe):
    """Define a FLARE job of any method, from typed parts, or from a method's name and settings.

    .. code-block:: python

        FairRecipe(rule=FedISM(rho=0.05), task=ClassificationTask(image_size=(48, 48)), run=RunSettings(num_rounds=2))
        FairRecipe("fed_ism", settings={"rho": 0.05, "image_size": [48, 48]}, num_rounds=2)

    Args:
        method: name of a method, as in ``fairflare list``; default: the method that has ``rule`` and ``training`` as
            its halves, or, if no method has both, a new method of the rule's name.
        rule, training: server half and site half as objects, used unchanged; a half that is not given is as in the
            method's quick job, with the values that both halves share.
        name: name of the job; default: the method's.
        packaging: ``"task_file"``: the job carries ``app/custom/task.py`` and sites must permit custom code;
            ``"preinstalled"``: no custom code, sites need the package and its classes in their allow list;
            ``"bundle"``: the job carries the whole package. A ``"preinstalled"`` job is for hospitals: one site's
            influence is bounded (:data:`fairflare.federation.plan.bounds.FOR_HOSPITALS`); ``settings`` override this.
        task: ``"segmentation"`` or ``"classification"``, or a task as an object; default: the task of the method's
            paper.
        run: rounds, quorum, seed and timeouts as an object; arguments about the run are then not allowed.
        sites: number of sites (named ``site-1`` ...), their names, or ``None`` for every connected site; 0: as many as
            the method's small job has.
        settings: settings of the method's halves and of the task, by name; see
            :func:`fairflare.federation.plan.plan.make_plan`.
        small: False: settings that are not given are those of the paper.
        paper: name of the paper whose settings are used if ``small`` is False (``--paper NAME``); default: the first
            paper with a table that has the method.
        train_like: another method whose set-up this one gets (task, network, data, local training, rounds, number of
            sites), so that the two can be compared.
        task_file: a Python file with a class ``Task``: your own network and data.
        monai_bundle: folder of a MONAI bundle, whose network, loss, optimizer, transforms and metric are used.
        num_rounds: number of communication rounds; default: that of the method's small job.
        min_sites: number of usable results that a round needs; also FLARE's ``min_clients``. Default: 2.
        phase_timeout: seconds for each of train, anchor, norms and validate; for check at most ten minutes. Default:
            3600.
        isolate: whether a site performs each task in a child process.
        options: further settings of :class:`fairflare.federation.plan.run_settings.RunSettings` by name.

    Raises:
        ValueError: a method, task, packaging or setting is unknown (the message suggests the nearest), or a value is
            out of range or given twice.
    """

    framework = FrameworkType.PYTORCH  # read by FLARE's helpers (cross-site evaluation)

    def __init__(
        self,
        method: str | None = None,
        *,
        rule: Rule | None = None,
        training: LocalTraining | None = None,
        name: str | None = None,
        packaging: str = "task_file",
        task: str | Task | None = None,
        run: RunSettings | None = None,
        sites: int | Sequence[str] | None = 0,
        settings: Mapping[str, Any] | None = None,
        small: bool = True,
        paper: str | None = None,
        train_like: str | None = None,
        task_file: str | Path | None = None,
        monai_bundle: str | Path | None = None,
        num_rounds: int | None = None,
        min_sites: int | None = None,
        phase_timeout: float | None = None,
        isolate: bool = False,
        **options: Any,
    ) -> None:
        if run is None:
            options = {**usual_waits(min_sites, phase_timeout), **options}
        else:
            singly = [("min_sites", min_sites), ("train_timeout", phase_timeout)]
            options |= {key: value for key, value in singly if value is not None}
        request = RunRequest.make(
            method=method, rule=rule, training=training, task=task, run=run, sites=sites, settings=settings,
            small=small, paper=paper, train_like=train_like, task_file=task_file, monai_bundle=monai_bundle,
            **{"label": name, "num_rounds": num_rounds, **options},
        )  # fmt: skip
        self._define(plan_run(package_request(request, packaging)), packaging, name, isolate=isolate)

    @classmethod
    def make(cls, plan: Plan, packaging: str = "task_file") -> FairRecipe:
        """Return the recipe of a plan that is made already."""
        recipe = cls.__new__(cls)
        recipe._define(plan, packaging)
        return recipe

    def _define(self, plan: Plan, packaging: str, name: str | None = None, *, isolate: bool = False) -> None:
        self.plan = plan
        check_carried(plan.task, plan.task_file)
        if packaging == "preinstalled":
            none = "is custom code; packaging 'preinstalled' carries none: set packaging='task_file'"
            refuse({
                f"a method file {none}": file_of(plan.method) is not None,
                f"your own task {none}": plan.task_file not in (BUNDLE_TASK, *TASKS_BY_KIND.values()),
            })  # fmt: skip
        super().__init__(make_job(plan, name or plan.method.name, packaging, isolate=isolate))
        self._job.comp_ids = {"persistor_id": PERSISTOR}  # FLARE's helpers look for the persistor's id here

    def add_cse_validator_if_needed(self) -> None:
        """Let the sites' executor answer requests for local models; FLARE's ``add_cross_site_evaluation`` calls this.

        The executor sends a local model only if the site's own file has ``"submit_model": true``.
        """
        for defined in self._job._deploy_map["@ALL"].app_config.executors:
            if SUBMIT_MODEL not in defined.tasks:
                defined.tasks.append(SUBMIT_MODEL)

    def finalize(self) -> None:
        """Keep one TensorBoard receiver in the job: FLARE's own, if ``add_experiment_tracking`` has added it.

        Raises:
            ValueError: ``add_experiment_tracking`` has added FLARE's MLflow receiver, which drops the server's values.
        """
        components = self._job._deploy_map["server"].app_config.components
        if any(
            f"{type(component).__module__}.{type(component).__name__}" == MLFLOW_RECEIVER
            for component in components.values()
        ):
            raise ValueError(
                "FLARE's MLflow receiver drops what a server sends, so there would be no curves; leave it out: they "
                "are in TensorBoard's files and in results.json"
            )
        if any(isinstance(other, TensorBoard.__base__) for key, other in components.items() if key != TENSORBOARD):
            components.pop(TENSORBOARD, None)

    def _apply_per_site_config(self, config: dict[str, dict[str, Any]]) -> None:
        raise ValueError(
            f"{type(self).__name__}: all sites get the same job, so nothing can be set for {', '.join(sorted(config))} "
            "alone. What is a site's own (data, device, threads) stands in its local/fairflare.json; for SimEnv in the "
            "block 'sites' of that file in the workspace (docs/data.md)"
        )
