"""Collect what a task is written with, to import from one place: :mod:`fairflare.base.task`, splits, data errors."""

from fairflare.base.task import LOSS, Batches, Metric, SiteData, Task, evaluating
from fairflare.data.datalist import SPLITS, DataError

__all__ = ["LOSS", "SPLITS", "Batches", "DataError", "Metric", "SiteData", "Task", "evaluating"]
