"""Refuse, before a run, methods and settings that do not work with secure sums (``secure="sums"``)."""

from __future__ import annotations

from fairflare.base.checks import first_of
from fairflare.base.task import Task
from fairflare.core.features.adapting import products_of
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.methods.base.home import tuned_part
from fairflare.methods.base.rule import Rule
from fairflare.methods.base.training import LocalTraining
from fairflare.privacy.sums.exposure import Limits


def check_secure(run: RunSettings, rule: Rule, training: LocalTraining | None, task: Task | None) -> None:
    """Check that a run with secure sums needs only declared numbers and sums from the sites, no site's own update.

    Args:
        run, rule, task: the run's settings, server half and task; ``task``: None where it is not checked.
        training: the method's site half; ``None`` if it is not known at the server.

    Raises:
        ValueError: something needs a single site's update; the message says what, and what to set.
    """
    most, half = Limits().max_weight, training or LocalTraining()
    if run.secure and (problem := first_of({
        f"{type(rule).__name__} cannot go with it: {rule.reads_models}; choose another method": bool(rule.reads_models),
        f"aggregate={run.aggregate!r} needs every site's model; leave it out": run.aggregate != "mean",
        f"max_weight={run.max_weight} would show a site's update; set it to {most} at most":
            isinstance(run.max_weight, float) and run.max_weight > most,
        "keep_local_models has nothing to keep; leave it out": run.keep_local_models,
        f"personalise={half.personalise!r} may send a site's own model; leave it out":
            bool(tuned_part(half.personalise)),
        "unlabelled weighs sites without a report, which is not built for sums; leave it out": bool(half.unlabelled),
        "adapters.average='product' needs every site's factors; set adapters.average=factors":
            task is not None and products_of(task) is not None,
    })):  # fmt: skip
        raise ValueError(f"secure='sums': {problem}")
