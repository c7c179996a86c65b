"""Export the test of given models, without training, as a FLARE job that carries the models to the server alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from fairflare.base.aspect import SUMS
from fairflare.base.checks import choice, refuse
from fairflare.base.settings import field_names, values_of
from fairflare.exchange.messages import TASK_CHECK, TASK_PLAN, TASK_VALIDATE
from fairflare.federation.plan.plan import Plan
from fairflare.federation.plan.run_settings import PlanRun, WithoutTraining
from fairflare.federation.plan.task_files import TASKS_BY_KIND
from fairflare.flare.evaluation import MODELS, EvaluationController, PlanController
from fairflare.flare.executor import SiteExecutor
from fairflare.flare.export.job import SERVER_CONFIG, Job, JobConfig, JobRecipe
from fairflare.flare.export.stats_recipe import PACKAGINGS

APP, SERVER_APP = "app", "app_server"


class EvaluateRecipe(JobRecipe):
    """Make the job of ``fairflare evaluate``, which asks sites to check their data and to test, and nothing else.

    Args:
        models: plan of the test and tensors of each model, see :mod:`fairflare.prediction.evaluating`; the plans have
            the model's name as label, and the same task and training.
        name: name of the job.
        packaging: ``"preinstalled"``: no custom code, sites have the package and its classes in their allow list;
            ``"bundle"``: the job carries the package and the task's file.

    Raises:
        ValueError: the packaging is unknown or cannot carry the task's own code, or the models have different tasks.
    """

    def __init__(
        self,
        models: Sequence[tuple[Plan, Mapping[str, torch.Tensor]]],
        *,
        name: str = "evaluate",
        packaging: str = "preinstalled",
    ) -> None:
        choice("packaging", packaging, PACKAGINGS)
        plan = models[0][0]
        refuse({
            **{
                f"the models have not the same {what}, and a job has one: export a job for each, and compare their "
                "downloads with `fairflare show`":
                    any(values_of(getattr(other, what)) != values_of(getattr(plan, what)) for other, _ in models)
                for what in ("task", "training")
            },
            "a task of your own is custom code, which a job with packaging 'preinstalled' cannot contain: add the "
            "option --bundle": packaging == "preinstalled" and plan.task_file not in TASKS_BY_KIND.values(),
        })  # fmt: skip
        states = {document.run.label: state for document, state in models}
        job = Job(_WithModels(states, plan, packaging, name))
        job.to_server(
            EvaluationController(
                task=plan.task,
                rule=plan.rule,
                models=[*states],
                **{key: getattr(plan.run, key) for key in field_names(WithoutTraining)},
            ),
            id="tests",
        )
        job.to_server(dict(SERVER_CONFIG))
        job.to_clients(SiteExecutor(task=plan.task, training=plan.training), tasks=[TASK_CHECK, TASK_VALIDATE])
        super().__init__(job)


class PlanRecipe(JobRecipe):
    """Make the job of ``fairflare plan``, which asks sites for counts of their cases, and nothing else.

    Args:
        plan: the run, with :class:`~fairflare.federation.plan.run_settings.PlanRun`.
        name, packaging: see :class:`EvaluateRecipe`.
    """

    def __init__(self, plan: Plan, *, name: str = "plan", packaging: str = "preinstalled") -> None:
        choice("packaging", packaging, PACKAGINGS)
        job = Job(JobConfig(plan, packaging, name))
        job.to_server(
            PlanController(
                task=plan.task, rule=plan.rule, **{key: getattr(plan.run, key) for key in field_names(PlanRun)}
            ),
            id="plans",
        )
        job.to_server(dict(SERVER_CONFIG))
        job.to_clients(
            SiteExecutor(task=plan.task, training=plan.training),
            tasks=[TASK_CHECK, TASK_PLAN, *(SUMS.tasks if plan.run.secure else ())],
        )
        super().__init__(job)


class _WithModels(JobConfig):
    """Configure a job in which the server has an app of its own, with the models."""

    def __init__(
        self, models: Mapping[str, Mapping[str, torch.Tensor]], plan: Plan, packaging: str, name: str
    ) -> None:  # fmt: skip
        super().__init__(plan, packaging, name, {SERVER_APP: ["server"], APP: list(plan.sites or ())})
        self.models = models

    def generate_job_config(self, job_root: str) -> None:
        super().generate_job_config(job_root)
        folder = Path(job_root) / self.job_name
        shutil.copytree(folder / APP, folder / SERVER_APP)
        (folder / SERVER_APP / MODELS).mkdir()
        for name, state in self.models.items():
            save_file(dict(state), folder / SERVER_APP / MODELS / f"{name}.safetensors")
