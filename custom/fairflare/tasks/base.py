"""What a task is made of, to import from one place: the seam (:mod:`fairflare.base.task`), splits, data errors."""

from fairflare.base.task import LOSS, Batches, Metric, SiteData, Task, evaluating
from fairflare.data.datalist import SPLITS, DataError

__all__ = ["LOSS", "SPLITS", "Batches", "DataError", "Metric", "SiteData", "Task", "evaluating"]
