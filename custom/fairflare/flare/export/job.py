"""Turn a plan into a FLARE job by FLARE's own exporter, adapted to tasks and training scripts that a job carries."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.recipe.spec import ExecEnv, Recipe
from nvflare.recipe.utils import prepare_initial_ckpt

import fairflare
from fairflare.base.checks import refuse
from fairflare.base.disk.bundle_files import BUNDLE_FOLDER, copy_bundle
from fairflare.base.machine.one_run import refuse_inside_run, refuse_main
from fairflare.base.settings import field_names
from fairflare.exchange.messages import TASKS
from fairflare.federation.plan.plan import Plan, Script
from fairflare.flare.controller import RoundsController
from fairflare.flare.executor import SiteExecutor
from fairflare.flare.persistor import RunModels
from fairflare.flare.tracking import TensorBoard
from fairflare.methods.base.catalog import file_of, plugin_of
from fairflare.tasks import scripts

TENSORBOARD, PERSISTOR = "tensorboard", "persistor"  # ids of components in the job
# Seconds between a site's requests for its next task; FLARE's default of 2 s would dominate short phases.
SERVER_CONFIG = {"server": {"task_request_interval": 0.05}}
SCRIPT_END = 10.0  # seconds in which a script's process must end by itself after the job
#: File that a job carries beside a training script, so that the server may build the network that the job names.
SCRIPT_TASK = Path(scripts.__file__).parent / "templates" / "script_task.py"


class JobRecipe(Recipe):
    """Define a FLARE job that is not run by a process which belongs to a run itself."""

    def process_env(self, env: ExecEnv) -> None:
        """Refuse to run the job inside a run; FLARE calls this before it deploys the job.

        Raises:
            ValueError: this process belongs to a run.
        """
        refuse_inside_run()


class Job(FedJob):
    """Hold the components of a FLARE job, all of classes that every participant can import.

    Args:
        config: configuration of the job, with its name, number of sites and deploy map.
        packages: packages beside ``fairflare`` that sites have installed or get as a whole.
    """

    def __init__(self, config: FedJobConfig, *packages: str) -> None:
        super().__init__(name=config.job_name, min_clients=config.min_clients, meta_props=config.meta_props)
        self.job = config
        self.set_app_packages(["fairflare", *packages])

    def to(self, obj: Any, *target: Any, **options: Any) -> Any:
        """Add a component, as :class:`FedJob` does.

        Raises:
            ValueError: the component is of a class of the main script.
        """
        refuse_main(obj)
        return super().to(obj, *target, **options)


def make_job(plan: Plan, name: str, packaging: str, *, isolate: bool = False) -> FedJob:
    """Return a FLARE job with one app for server and sites; if the plan names sites, it is deployed to these alone.

    Args:
        plan: the run.
        name: name of the job.
        packaging: ``"task_file"``: the job carries ``app/custom/task.py`` (and a MONAI bundle beside it), or the
            training script; ``"preinstalled"``: no custom code; ``"bundle"``: the whole package too.
        isolate: whether a site performs each task in a child process.
    """
    # For "bundle", FLARE itself adds a plugin's files to the job.
    plugin = None if packaging == "bundle" else plugin_of(plan.method)
    job = Job(JobConfig(plan, packaging, name), *([plugin] if plugin else []))
    settings = {key: getattr(plan.run, key) for key in field_names(type(plan.run))}
    if plan.run.initial_ckpt:
        settings["initial_ckpt"] = _carry_checkpoint(plan.run.initial_ckpt, packaging, job)
    training = None if plan.script is None else plan.training
    job.to_server(RoundsController(task=plan.task, rule=plan.rule, training=training, **settings), id="rounds")
    job.to_server(TensorBoard(), id=TENSORBOARD)
    job.to_server(RunModels(), id=PERSISTOR)
    job.to_server(dict(SERVER_CONFIG))
    job.to_clients(
        SiteExecutor(task=plan.task, training=plan.training, isolate=isolate)
        if plan.script is None
        else script_executor(plan.script, packaging),
        tasks=list(TASKS),
    )
    return job


def script_executor(script: Script, packaging: str) -> ClientAPIExecutor:
    """Return FLARE's executor of training scripts, set up so that models pass without conversion or differences."""
    formats = {"params_exchange_format": ExchangeFormat.PYTORCH, "server_expected_format": ExchangeFormat.PYTORCH}
    path = str(script.path) if packaging == "preinstalled" else script.path.name
    if script.command is None:
        return ClientAPIExecutor("in_process", task_script_path=path, task_script_args=script.arguments, **formats)
    # The script's process starts in the app's folder. A site may have another system than the one that exports the job.
    place = path if packaging == "preinstalled" else f"custom/{path}"
    command = [*shlex.split(script.command), place, *shlex.split(script.arguments)]
    return ClientAPIExecutor("external_process", command=command, shutdown_timeout=SCRIPT_END, **formats)


def _carry_checkpoint(checkpoint: str, packaging: str, job: FedJob) -> str:
    """Return the path of an initial checkpoint as it stands in the job.

    By FLARE's rule an absolute path is a path at the server, and any other path is a local file that the job carries.
    """
    if Path(checkpoint).is_absolute():
        return checkpoint
    refuse({
        f"initial_ckpt {checkpoint!r} would travel in the job, which packaging 'preinstalled' does not allow; put the "
        "file on the server and give its absolute path": packaging == "preinstalled",
        f"initial_ckpt {checkpoint!r} does not exist here; give a file that the job is to carry, or the absolute path "
        "of one on the server": not Path(checkpoint).is_file(),
    })  # fmt: skip
    return str(prepare_initial_ckpt(checkpoint, job))


class JobConfig(FedJobConfig):
    """Write a job's configuration so that the task's class path is that of the task file which the job carries.

    FLARE itself would name the class by the file from which it was loaded.

    Args:
        plan, packaging, name: as for :func:`make_job`.
        places: the job's deploy map; default: one app for the server and the plan's sites.
    """

    def __init__(self, plan: Plan, packaging: str, name: str, places: dict[str, list[str]] | None = None) -> None:
        if plan.sites is not None:
            places = places or {"app": ["server", *plan.sites]}
        super().__init__(name, plan.run.min_sites, meta_props=None if places is None else {"deploy_map": places})
        self.plan, self.packaging = plan, packaging

    def _get_class_path(self, obj: Any, custom_dir: str) -> str:
        carries = self.packaging != "preinstalled"
        if obj is not self.plan.task or (self.plan.script is not None and not carries):
            return str(super()._get_class_path(obj, custom_dir))
        if carries:
            return "task.Task" if self.plan.script is None else f"{SCRIPT_TASK.stem}.Task"
        base = type(obj).__mro__[1]  # the packaged base class of the template's class ``Task``
        return f"{base.__module__}.{base.__name__}"

    def generate_job_config(self, job_root: str) -> None:
        super().generate_job_config(job_root)
        if self.packaging == "preinstalled":
            return
        custom = Path(job_root) / self.job_name / "app" / "custom"
        custom.mkdir(parents=True, exist_ok=True)
        if self.plan.script is not None:
            shutil.copyfile(self.plan.script.path, custom / self.plan.script.path.name)
            shutil.copyfile(SCRIPT_TASK, custom / SCRIPT_TASK.name)
        else:
            shutil.copyfile(self.plan.task_file, custom / "task.py")
        if (method_file := file_of(self.plan.method)) is not None:
            shutil.copyfile(method_file, custom / method_file.name)
        if self.plan.monai_bundle is not None:
            copy_bundle(self.plan.monai_bundle, custom.with_name(BUNDLE_FOLDER))  # for YAML as in carry_package
        if self.packaging == "bundle":
            carry_package(custom)


def carry_package(custom: Path) -> None:
    """Copy the package ``fairflare`` into the custom code of a job, without what no participant reads.

    ``nvflare job submit`` parses each YAML file there, and stops for want of a package that neither has installed.
    """
    shutil.copytree(
        Path(fairflare.__file__).parent,
        custom / "fairflare",
        ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.yaml", "examples"),
        dirs_exist_ok=True,
    )
