"""What a task is made of, to import from one place: the seam (:mod:`fairflare.core.task`), splits, data errors."""

from fairflare.core.task import Batches, SiteData, Task, evaluating
from fairflare.data.datalist import SPLITS, DataError

__all__ = ["SPLITS", "Batches", "DataError", "SiteData", "Task", "evaluating"]
