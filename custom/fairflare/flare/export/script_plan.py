"""A run whose sites train with a script of their own, as :mod:`fairflare.federation.plan.plan` makes others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base.settings import build, field_names
from fairflare.exchange.sent_tensors import ALL
from fairflare.federation.plan.bounds import Bounds
from fairflare.federation.plan.plan import Plan, Script, check_idle, check_run, following, route_settings, site_list
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.methods.base.catalog import get_method
from fairflare.methods.base.training import LocalTraining
from fairflare.tasks.scripts import ScriptTask

OF_THE_RUN = ("recalibration", "anchor_as", "exchange", "update_dtype")
#: Settings of a site half that its loop decides, which is the script's.
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
    """Puts such a run together.

    Args:
        method: a name of ``fairflare list``.
        script: of the sites.
        model: class of the network: ``"Net"`` of the script, or ``"package.module.Net"`` of one that is installed.
        model_args: arguments of that class.
        primary_metric: of what the script measures.
        metrics: of :class:`fairflare.tasks.scripts.ScriptTask`.
        sites: as for :func:`fairflare.federation.plan.plan.make_plan`.
        settings: of the method's halves; not what the script's loop decides (optimizer, epochs and so on).
        run: of :class:`fairflare.federation.plan.run_settings.RunSettings`.

    Raises:
        ValueError: as for :func:`fairflare.federation.plan.plan.make_plan`; a setting that the loop decides; a method
            that has a model of its own at every site.
    """
    chosen = get_method(method)
    given = dict(settings or {})
    vain = [name for name in given if name in OF_THE_LOOP]
    if vain:
        raise ValueError(f"{', '.join(vain)}: the script's own loop decides this; set it in {script.path.name}")
    if build(chosen.training, chosen.site).home.model:
        raise ValueError(
            f"method {chosen.name!r} has a model of its own at every site, which a script's loop does not do; take "
            "fairflare's own recipe (fairflare run, or the method's class in fairflare.recipes)"
        )
    if (statistics := run.pop("norm_statistics", None)) is not None:
        given["norm_statistics"] = statistics
    bounds = {name: given.pop(name) for name in (*field_names(Bounds), *OF_THE_RUN) if name in given}
    server, site, _ = route_settings(given, chosen, LocalTraining)
    names = site_list(chosen.num_sites if sites == 0 else sites)
    wanted = {key: value for key, value in {**run, **bounds}.items() if value is not None}
    settings_of_run = RunSettings(**{"num_rounds": chosen.num_rounds, "label": chosen.name, **chosen.run, **wanted})
    if settings_of_run.exchange != ALL:
        raise ValueError(f"exchange={settings_of_run.exchange!r}: a script's own loop trains the whole model; leave it")
    if settings_of_run.crt_rounds:
        raise ValueError("crt_rounds: a script's own loop does not train a classifier alone; set crt_rounds=0")
    rule = build(chosen.rule, {**chosen.server, **server})
    training = build(chosen.training, {**chosen.site, **site})
    settings_of_run = following(settings_of_run, training)
    check_run(rule, settings_of_run)
    check_idle(chosen, (rule, training, settings_of_run), settings or {})
    if names is not None and settings_of_run.min_sites > len(names):
        raise ValueError(f"min_sites={settings_of_run.min_sites}, but the job has {len(names)} site(s)")
    return Plan(
        method=chosen,
        task=ScriptTask(
            model=model if "." in model else f"{script.path.stem}.{model}",
            model_args=dict(model_args or {}),
            metric=primary_metric,
            metrics={name: dict(entry) for name, entry in (metrics or {}).items()},
        ),
        rule=rule,
        training=training,
        run=settings_of_run,
        sites=names,
        task_file=script.path,
        script=script,
    )
