"""Withhold measured values at a site: metrics by class where its own file says so, and values of too few cases.

Every reply of a site passes :meth:`Gate.keep_home` before it is sent.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fairflare.base.cases.floor import Floor, may_leave
from fairflare.base.task import Metric, Task, metric_name
from fairflare.core.cells import SUPPRESSED as WITHHELD
from fairflare.core.cells import Cell
from fairflare.exchange.messages import (
    SPLIT_TEST,
    STATUS_OK,
    TASK_CHECK,
    TASK_NORMS,
    TASK_PLAN,
    TASK_VALIDATE,
    SiteReply,
    SiteTask,
)
from fairflare.federation.site import case_counts, clinical, groups, norm_moments
from fairflare.federation.site.replies import (
    AT_HOME,
    DRAWN_UNITS,
    IN_REPORT,
    IN_STATS,
    NUM_UNITS,
    RESAMPLED,
    STATS,
)
from fairflare.federation.site.sampling import CLASSES, ERROR, STRUCTURE_SUPPORT, STRUCTURES, SUPPORT
from fairflare.methods.base.catalog import fields_of
from fairflare.methods.base.reports import SUPPRESSED, TRAINING, VALIDATION, ByClass, Field
from fairflare.methods.base.training import SiteError

log = logging.getLogger(__name__)
METRICS_BY_CLASS = "metrics_by_class"  # name of the site's setting: whether metrics by class may leave
MIN_CASES = "min_cases"  # name of a setting of the site and of the run; the larger value counts
TRAINS_BELOW = "train_below_min_cases"  # name of the site's setting: train with fewer cases than min_cases
OF_ALL_RECORDS = ("train_loss", "epoch_losses")  # names of the values that are of all training images
#: Names of values in a reply's ``stats`` that reveal class counts if the primary metric is computed over classes. The
#: standard error does so, for example, if a model guesses.
OF_DRAWS = (RESAMPLED, DRAWN_UNITS, NUM_UNITS, ERROR, "own_gain")


def safely_named(site: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names that may leave a site, see :func:`fairflare.base.task.metric_name`.

    Raises:
        SiteError: two metrics would have the same name (which one stands in this site's log only).
    """
    check_names(site, names := list(map(metric_name, metrics)))
    return dict(zip(names, metrics.values(), strict=True))


def check_names(site: str, names: Collection[str]) -> None:
    """Raise an error when two metrics of a site would have the same name.

    Raises:
        SiteError: two names are equal (which one stands in this site's log only).
    """
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise SiteError(
            f"site {site!r}: more than one metric would be called {twice[0]!r}; rename a class or a group",
            public=f"site {site!r}: two of its metrics would have the same name; rename a class or a group there",
        )


@dataclass
class Gate:
    """Remove from a site's replies the values that must not leave the site.

    Args:
        site: name of the site, for its own log.
        task: the learning task, which declares its metrics; the primary metric and the loss may leave also where
            ``classes`` is False.
        training: the method's site half; the rules that belong to it declare the fields of its report.
        classes: whether metrics by class may leave.
        floor: decides whether splits and classes of the site's data have enough cases.
    """

    site: str
    task: Task
    training: Any
    classes: bool
    floor: Floor

    def keep_home(self, request: SiteTask, reply: SiteReply) -> None:
        """Remove from a reply the values that must not leave the site, and record the removal in its ``stats``.

        A failed reply and one to ``check`` are not changed: that task leaves such values out by itself.
        """
        if reply.status != STATUS_OK or request.name == TASK_CHECK:
            return
        if not self.classes:
            self._keep_classes_home(reply)
        # In place of a table of outcomes, send the figures computed from it, without those of too few cases.
        tables = [key for key in (groups.TABLE, clinical.TABLE) if key in reply.stats]
        sent = [reply.stats.pop(key).sent(self.floor.least, self.classes) for key in tables]
        reply.stats |= {name: value for told, _ in sent for name, value in told.items()}
        held = [
            *(name for _, kept in sent for name in kept),
            *reply.stats.pop(groups.HELD, ()),
            *self._withhold_report(request, reply),
            *self._withhold_stats(request, reply),
        ]
        reply.metrics = self._withhold_metrics(reply.metrics)
        if held:
            reply.stats[SUPPRESSED] = sorted(held)

    # -- metrics by class

    def _keep_classes_home(self, reply: SiteReply) -> None:
        """Remove from a reply every metric by class, and the names and counts of classes.

        A metric that the task does not declare counts as one by class. Values on draws of the test images are removed
        too, unless the primary metric is a mean over images.
        """
        if kept := {(cell.split, cell.metric): cell.value for cell in reply.metrics if not self._plain(cell.metric)}:
            # The level is below FLARE's default, since a site may stream its log to the server.
            log.debug("site %s: metrics that stay at home: %s", self.site, kept)
        reply.metrics = [cell for cell in reply.metrics if self._plain(cell.metric)]
        # The spread of many resampled values of a metric over classes reveals the class counts.
        for key in (CLASSES, SUPPORT, STRUCTURES, STRUCTURE_SUPPORT, *(() if self._mean_of_images() else OF_DRAWS)):
            reply.stats.pop(key, None)
        reply.stats[AT_HOME] = True

    def _plain(self, name: str) -> bool:
        found = self._declared.get(name)
        return name in (self.task.primary_metric, "loss") or (found is not None and not found.by_class)

    # -- too few cases

    def _withhold_metrics(self, metrics: list[Cell]) -> list[Cell]:
        """Return cells without the values of too few cases, and a cell with the reason for every withheld metric.

        Declared metrics that were not measured are among these, in the order of the names: what is missing, or stands
        elsewhere, would reveal that a class has no image.
        """
        if self.floor.least <= 1:
            return metrics
        names = [name for name in self._declared if self.classes or self._plain(name)]
        places = {(cell.split, cell.metric) for cell in metrics}
        places |= {(split, name) for split in {cell.split for cell in metrics} for name in names}
        withheld = sorted(place for place in places if not self._may_leave(*place))
        shown = [cell for cell in metrics if (cell.split, cell.metric) not in withheld]
        return [*shown, *(Cell(name, split=split, reason=WITHHELD) for split, name in withheld)]

    def _may_leave(self, split: str, name: str) -> bool:
        found = self._declared.get(name)
        of_classes = found.of_classes if found else None
        plain = name in (self.task.primary_metric, "loss") or (found and not found.by_class and of_classes is None)
        hidden = self.floor.hidden(split)
        # Structures of synthetic images are not counted (``hidden`` is None); metrics over structures may then leave.
        plain = plain or (hidden is None and self.task.has_classes is False and of_classes is not None)
        return self.floor.holds(split) and bool(plain or may_leave(of_classes, hidden))

    def _withhold_report(self, request: SiteTask, reply: SiteReply) -> Iterator[str]:
        fields: dict[str, Field] = {}
        if self.floor.least > 1:
            of_task = {TASK_NORMS: norm_moments.FIELDS, TASK_PLAN: case_counts.FIELDS}.get(request.name)
            half = type(getattr(self.training, "training", self.training))
            fields = fields_of(half) if of_task is None else {field.name: field for field in of_task}
        for name, value in list(reply.report.items()):
            splits = self.training.made_of(name) if name in fields else None
            if name in fields and splits is None:
                splits = fields[name].of
            if isinstance(value, ByClass):
                splits = (value.split,)
                reply.report[name] = value.sent(self.floor.shown(value.split, value.rows))
            if value is not None and not self._hold(splits):
                del reply.report[name]
                yield IN_REPORT + name

    def _withhold_stats(self, request: SiteTask, reply: SiteReply) -> Iterator[str]:
        fields, few = {field.name: field for field in STATS}, self.floor.least > 1
        hidden = self.floor.hidden(SPLIT_TEST) if few and request.name == TASK_VALIDATE else None
        # The names and counts of classes leave out a class with too few cases, and must not show that it has none.
        odd = dict.fromkeys((CLASSES, SUPPORT), few and (hidden is None or bool(hidden)))
        if not self._mean_of_images():
            odd |= dict.fromkeys(OF_DRAWS, few and hidden is None and self.task.has_classes is not False)
        # Training losses are over all training images, those of hidden classes included.
        odd |= dict.fromkeys(OF_ALL_RECORDS, few and bool(self.floor.hidden("training")))
        for name in list(reply.stats):
            if odd.get(name) or not self._hold(fields[name].of if name in fields else None):
                del reply.stats[name]
                yield IN_STATS + name
        if not self._hold({TASK_VALIDATE: (SPLIT_TEST,), TASK_NORMS: TRAINING}.get(request.name, ())):
            reply.num_samples = None
            yield "num_samples"

    def _hold(self, splits: tuple[str, ...] | None) -> bool:
        every = (*TRAINING, *VALIDATION, *self.floor.data.test_splits)
        return all(map(self.floor.holds, every if splits is None else splits))

    # -- internal parts

    @cached_property
    def _declared(self) -> dict[str, Metric]:
        return {metric.name: metric for metric in self.task.declared_metrics()}

    def _mean_of_images(self) -> bool:
        own = self._declared.get(self.task.primary_metric)
        return own is not None and own.mean_of_images
