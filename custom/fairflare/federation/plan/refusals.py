"""Refuse, before the first round, a run whose aspects cannot be used together, or not with its method or task."""

from __future__ import annotations

from typing import Any

from fairflare.base.aspect import refusals
from fairflare.base.settings import field_names
from fairflare.base.task import Task
from fairflare.core.features.adapting import products_of
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.methods.base.rule import MakesTensors, Rule, SendsParts
from fairflare.methods.base.training import LocalTraining


def facts_of(
    run: RunSettings, rule: Rule, training: LocalTraining | None, task: Task | None, **more: Any
) -> dict[str, Any]:
    """Return the facts that :mod:`fairflare.base.aspect` speaks of: settings of a run, and facts about its parts.

    Args:
        run, rule: the run's settings and the method's server half.
        training: the method's site half; ``None`` if it is not known at the server.
        task: the task; ``None`` where it is not looked at.
        more: further facts, which take the place of these.
    """
    from fairflare.privacy.sums.exposure import Limits  # a slow import

    site_half, most, heaviest = training or LocalTraining(), Limits().max_weight, run.max_weight
    return {
        **{name: getattr(run, name) for name in field_names(RunSettings)},
        **{name: getattr(site_half, name) for name in field_names(LocalTraining)},
        "rule": type(rule).__name__,
        "reads_models": rule.reads_models,
        "only_mean": rule.only_mean,
        "moves": type(rule).move is not Rule.move,
        "own_models": isinstance(rule, SendsParts),
        "makes_tensors": isinstance(rule, MakesTensors),
        "revealing_weight": most if isinstance(heaviest, float) and heaviest > most else None,
        "products": task is not None and products_of(task) is not None,
        "classless": task is not None and task.has_classes is False,
        "inconsistent": type(task).__name__ if task is not None and (not task.consistency or task.findings) else "",
        "whose": "",
        "other": "",
        **more,
    }


def refuse_run(facts: dict[str, Any]) -> None:
    """Refuse a run by the first row of the table of aspects that holds.

    Raises:
        ValueError: the row's text: what cannot be used together, and what to set.
    """
    for text in refusals(facts):
        raise ValueError(text)
