"""Collect the names that a task's file imports: those of :mod:`fairflare.base.task`, the splits, and ``DataError``."""

from fairflare.base.task import LOSS, Batches, Metric, SiteData, Task, evaluating
from fairflare.data.datalist import SPLITS, DataError

__all__ = ["LOSS", "SPLITS", "Batches", "DataError", "Metric", "SiteData", "Task", "evaluating"]
