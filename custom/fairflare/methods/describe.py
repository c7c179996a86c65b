"""Every setting of a method in words, for ``fairflare describe`` and the docs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fairflare.methods.catalog import get_method
from fairflare.settings import Setting, described, typed


def sections(name: str) -> dict[str, list[Setting]]:
    """Settings of a method's rule, its training and its task, by heading; defaults are those of the method's paper.

    Raises:
        ValueError: unknown method.
    """
    method = get_method(name)
    return {
        f"{method.title}, at the server: {method.rule.__name__}": _with(described(method.rule), method.server),
        f"{method.title}, at the sites: {method.training.__name__}": _with(described(method.training), method.site),
        f"{method.title}, task: {method.task}": _with(described(_task_class(method.task)), method.learns),
    }


def quick_job(name: str) -> str:
    """What a job that is quick to try has instead of the paper's settings."""
    method = get_method(name)
    given = [f"{key}={typed(value)}" for key, value in method.small.items()]
    return f"Without --paper a job has {method.num_rounds} rounds" + (f" and {', '.join(given)}." if given else ".")


def _with(found: list[Setting], chosen: Any) -> list[Setting]:
    return [replace(s, default=chosen[s.name], required=False) if s.name in chosen else s for s in found]


def _task_class(kind: str) -> type:
    if kind == "segmentation":
        from fairflare.tasks.segmentation import SegmentationTask

        return SegmentationTask
    from fairflare.tasks.classification import ClassificationTask

    return ClassificationTask
