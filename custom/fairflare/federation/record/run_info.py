"""Describe a run: the settings that are compared on resume, the ``info`` of its results, and package versions."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairflare import __version__
from fairflare.base.aspect import RETRAINING
from fairflare.base.disk.files import sha256_of
from fairflare.base.settings import values_of
from fairflare.base.task import Metric, Task
from fairflare.exchange.sent_tensors import ALL
from fairflare.federation.plan.bounds import bounds_of
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.plan.site_training import training_of
from fairflare.federation.record.task_record import origin
from fairflare.methods.base.catalog import all_methods, method_of
from fairflare.methods.base.rule import FollowsNumRounds, Rule
from fairflare.methods.base.training import LocalTraining


def config_of(run: RunSettings, place: Place, rule: Rule, task: Task) -> dict[str, Any]:
    """Return the settings of a run that must not change when its experiment is resumed."""
    return {
        "num_rounds": run.num_rounds,
        "seed": run.seed,
        "norm_statistics": run.norm_statistics,
        "rule": values_of(rule),
        "task": values_of(task),
        "training": place.site_half,
        **({} if run.exchange == ALL else {"exchange": run.exchange}),
        **({"retraining": {name: getattr(run, name) for name in RETRAINING.settings}} if run.crt_rounds else {}),
    }


def info_of(
    run: RunSettings,
    place: Place,
    rule: Rule,
    task: Task,
    connected: Sequence[str],
    expected: Sequence[str],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the section ``info`` of a run's results, see ``docs/results_reference.md``."""
    method = type(rule).__name__
    return {
        "experiment": run.experiment,
        "job_id": place.job_id,
        "method": method,
        "label": run.label or method,
        **_what_is_run(run, rule, training_of(place.site_half), task),
        "primary_metric": task.primary_metric,
        "shown_metrics": list(task.shown_metrics),
        **directions_of(task.by_name()),
        "metric_range": [task.primary.low, task.primary.high],
        "num_rounds": run.num_rounds,
        **({"crt_rounds": run.crt_rounds} if run.crt_rounds else {}),
        "min_sites": run.min_sites,
        "bounds": bounds_of(run, len({*expected, *connected})),
        "best_by": run.best_by,
        "seed": run.seed,
        "sites": sorted({*expected, *connected}),
        "connected": list(connected),
        "config": dict(config),
        "task_file": source_of(task),
        "versions": versions(),
    }


def _what_is_run(run: RunSettings, rule: Rule, training: LocalTraining | None, task: Task) -> dict[str, str]:
    """Return the run's title, the kind of task, and a note where the method is trained without its own loss."""
    label, called = run.label, all_methods().get(run.method)
    same = called and type(rule) is called.rule and (training is None or type(training) is called.training)
    method = called if called and same else method_of(rule, training)
    title = method.title + (" + cRT" if run.crt_rounds and "crt_rounds" not in method.run else "")
    packaged, user_code = origin(type(task))
    loss = method.site.get("criterion", "task")
    used = getattr(training, "criterion", loss)
    title += f" with {used}" if loss == "task" != used else ""
    title += f" ({method.name})" if label in ("", method.name) else f', run "{label}"'
    without = f"{method.name} without its own loss: criterion={used!r} (its own: {loss!r})"
    return {
        "title": title if run.num_rounds else f"given model {label!r}, tested without training",
        "kind": packaged.split(".")[-2].replace("_", " ") + (", with code of its own" if user_code else ""),
        "without": without if used != loss != "task" else "",
    }


def directions_of(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Any]]:
    """Return whether a higher value is better, for each metric, and the unit of each metric that has one."""
    units = {name: metric.unit for name, metric in metrics.items() if metric.unit}
    return {
        "higher_is_better": {name: metric.higher_is_better for name, metric in metrics.items()},
        **({"units": units} if units else {}),
    }


def source_of(task: Task) -> dict[str, str] | None:
    """Return the name and checksum of the file that defines a task's class, or ``None`` if there is no such file.

    For a task of a MONAI bundle, ``monai_bundle_sha256`` is the checksum over the bundle's files.
    """
    try:
        path = Path(inspect.getfile(type(task)))
        source = {"name": path.name, "sha256": sha256_of(path)}
    except (OSError, TypeError):
        return None
    bundle = getattr(task, "monai_bundle_sha256", None)
    return source if bundle is None else {**source, "monai_bundle_sha256": bundle}


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python, and of the packages that the results depend on."""
    from importlib.metadata import PackageNotFoundError, version

    by_package = dict.fromkeys(("nvflare", "torch", "monai", "numpy"), "not installed")
    for name in by_package:
        with suppress(PackageNotFoundError):
            by_package[name] = version(name)
    return {"fairflare": __version__, "python": platform.python_version(), **by_package}


def following_rounds(rule: object, site_half: Any) -> list[str]:
    """Return settings whose effect in a round depends on ``num_rounds``, such as ``training.schedule``."""
    return [
        f"{half}.{setting}"
        for half, component in (("rule", rule), ("training", training_of(site_half)))
        if isinstance(component, FollowsNumRounds)
        for setting in component.follows_num_rounds()
    ]
