"""Make the plan of a run whose sites train with their own script; other runs: :mod:`.federation.plan.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base.checks import refuse
from fairflare.base.settings import build
from fairflare.federation.plan.plan import Plan, Script, make_plan
from fairflare.methods.base.catalog import get_method
from fairflare.tasks.scripts import ScriptTask

#: Settings of local training that are refused for such a run, because the script's own training loop decides them.
OF_THE_LOOP = (
    "optimizer", "learning_rate", "weight_decay", "betas", "momentum", "local_epochs", "local_steps",
    "keep_optimizer_state", "augment", "schedule", "nesterov",
)  # fmt: skip


def make_script_plan(
    method: str,
    script: Script,
    *,
    model: str,
    model_args: Mapping[str, Any] | None = None,
    primary_metric: str = "accuracy",
    metrics: Mapping[str, Mapping[str, Any]] | None = None,
    sites: int | Sequence[str] | None = 0,
    settings: Mapping[str, Any] | None = None,
    **run: Any,
) -> Plan:
    """Make the plan of a run whose sites train with their own script.

    Args:
        method: name of a method, as in ``fairflare list``.
        script: the training script of the sites.
        model: class of the network: ``"Net"`` in the script, or ``"package.module.Net"`` in an installed package.
        model_args: arguments of that class.
        primary_metric: name of the primary metric among the metrics that the script measures.
        metrics: declarations of the metrics, as for :class:`fairflare.tasks.scripts.ScriptTask`.
        sites: sites as for :func:`fairflare.federation.plan.plan.make_plan`.
        settings: settings of the method's halves, without those that the script's loop decides (optimizer, epochs...).
        run: settings of :class:`fairflare.federation.plan.run_settings.RunSettings`.

    Raises:
        ValueError: as for :func:`fairflare.federation.plan.plan.make_plan`; or the script's loop decides a given
            setting, or the method has a model of its own at every site.
    """
    chosen = get_method(method)
    vain = [name for name in settings or {} if name in OF_THE_LOOP]
    refuse({
        f"{', '.join(vain)}: the script's own loop decides this; set it in {script.path.name}": vain,
        f"method {chosen.name!r} has a model of its own at every site, which a script's loop does not do; take "
        "fairflare's own recipe (fairflare run, or the method's class in fairflare.recipes)":
            build(chosen.training, chosen.site).home.model,
    })  # fmt: skip
    task = ScriptTask(
        model=model if "." in model else f"{script.path.stem}.{model}",
        model_args=dict(model_args or {}),
        metric=primary_metric,
        metrics={name: dict(entry) for name, entry in (metrics or {}).items()},
    )
    return make_plan(method, task=task, script=script, sites=sites, settings=settings, **run)
