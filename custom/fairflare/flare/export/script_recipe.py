"""Define a FLARE Recipe, with any method, for sites that train with their own script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairflare.base.checks import choice, refuse
from fairflare.federation.plan.bounds import FOR_HOSPITALS
from fairflare.federation.plan.plan import Script
from fairflare.federation.plan.run_settings import TIMEOUTS
from fairflare.flare.export.job import SCRIPT_TASK, JobRecipe, make_job
from fairflare.flare.export.packaging import PACKAGINGS
from fairflare.flare.export.script_plan import make_script_plan
from fairflare.methods.base.catalog import get_method


class ScriptRecipe(JobRecipe):
    """Define a FLARE job of any method whose sites run a training script, by FLARE's Client API executor.

    Args:
        method: name of a method, as in ``fairflare list``.
        train_script: path of the script, which uses :class:`fairflare.client.Site`. The job carries the script; with
            packaging ``"preinstalled"`` the path is an absolute path at every site.
        model: class of the network, which the server builds: ``"Net"`` in the script (whose top level must then only
            define names), or ``"package.module.Net"``.
        model_args: arguments of that class, plain values.
        primary_metric: name of the primary metric among the metrics that the script measures.
        metrics: ``{name: {"higher_is_better": True, "low": 0, "high": 1, "unit": ""}}`` for all metrics of the script
            but accuracy and the loss; limits that are not given are [0, 1], ``None`` for no limit.
        script_args: arguments of the script's command line.
        launch_external_process: whether the script runs in its own process, not in the site's job process.
        command: command of that process's interpreter, which every site needs on its path.
        name: name of the job; default: the method's.
        packaging: ``"task_file"``: the job carries the script; ``"preinstalled"``: no custom code, see
            :class:`fairflare.flare.export.recipes.FairRecipe`; ``"bundle"``: the script and the whole package.
        sites: number of sites (named ``site-1`` ...), their names, or ``None`` for every connected site; 0: as many as
            the method's small job has.
        settings: settings of the method's halves; the script decides optimizer, epochs and the like.
        num_rounds, min_sites, phase_timeout, run: as for :class:`fairflare.flare.export.recipes.FairRecipe`.

    Raises:
        ValueError: the script does not exist; a method, packaging or setting is unknown (the message suggests the
            nearest), or a value is out of range.
    """

    def __init__(
        self,
        method: str,
        *,
        train_script: str | Path,
        model: str,
        model_args: Mapping[str, Any] | None = None,
        primary_metric: str = "accuracy",
        metrics: Mapping[str, Mapping[str, Any]] | None = None,
        script_args: str = "",
        launch_external_process: bool = False,
        command: str = "python3 -u",
        name: str | None = None,
        packaging: str = "task_file",
        sites: int | Sequence[str] | None = 0,
        settings: Mapping[str, Any] | None = None,
        num_rounds: int | None = None,
        min_sites: int = 2,
        phase_timeout: float = 3600.0,
        **run: Any,
    ) -> None:
        choice("packaging", packaging, PACKAGINGS)
        script, carried = Path(train_script), packaging != "preinstalled"
        refuse({
            "packaging 'preinstalled' carries no code: train_script must be an absolute path at the sites and model a "
            f"class of an installed package, got {str(script)!r} and {model!r}":
                not carried and not (script.is_absolute() and "." in model),
            f"train_script must be a Python file, got {str(script)!r}":
                carried and not (script.is_file() and script.suffix == ".py"),
            f"train_script: the job has a file {script.name} of its own; call the script otherwise":
                carried and script.name == SCRIPT_TASK.name,
        })  # fmt: skip
        if not carried:
            settings = {
                **FOR_HOSPITALS,
                **get_method(method).preinstalled,
                **{name: run.pop(name) for name in FOR_HOSPITALS if name in run},
                **(settings or {}),
            }
        self.plan = make_script_plan(
            method,
            Script(script, script_args, command if launch_external_process else None),
            model=model,
            model_args=model_args,
            primary_metric=primary_metric,
            metrics=metrics,
            sites=sites,
            settings=settings,
            **{
                "num_rounds": num_rounds,
                "min_sites": min_sites,
                "label": name,
                **dict.fromkeys(TIMEOUTS, phase_timeout),
                **run,
            },
        )
        super().__init__(make_job(self.plan, name or self.plan.method.name, packaging))
