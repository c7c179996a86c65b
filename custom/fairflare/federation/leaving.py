"""What a site keeps at home although a task measured it: metrics by class, where the site's own file says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fairflare.methods.training import SiteError

if TYPE_CHECKING:
    from fairflare.core.task import Task
    from fairflare.exchange.messages import SiteReply

log = logging.getLogger(__name__)
METRICS_BY_CLASS = "metrics_by_class"  # the setting in local/fairflare.json
#: In front of the names of the last model's metrics on the validation split.
VALIDATED = "validation split/"
AT_HOME = "classes_at_home"  # in a reply's stats: metrics by class were kept back
RESAMPLED = "resampled"  # in a reply's stats: the primary metric on draws of the test images
DRAWN_UNITS, NUM_UNITS = "drawn_units", "num_units"  # and what was drawn (patients, images), and how many there are


def sends_classes(site: str, settings: Mapping[str, Any]) -> bool:
    """The site's ``metrics_by_class``; default: True.

    Raises:
        SiteError: it is neither true nor false.
    """
    chosen = settings.get(METRICS_BY_CLASS, True)
    if not isinstance(chosen, bool):
        raise SiteError(f"site {site!r}: setting {METRICS_BY_CLASS!r} must be true or false, got {chosen!r:.80}")
    return chosen


def keep_classes_home(site: str, reply: SiteReply, task: Task, test_splits: Iterable[str]) -> None:
    """Takes out of a reply every metric that its task does not declare as not by class, and says so in its stats.

    Values on draws of the test images stay too, unless the primary metric is a mean over images.

    Args:
        site: for its own log.
        reply: is changed.
        task: declares its metrics; the primary one and the loss always leave.
        test_splits: of the site; the metrics of ``test_<name>`` are called ``<name>/<metric>``.
    """
    leave = {metric.name for metric in task.declared_metrics() if not metric.by_class} | {task.primary_metric, "loss"}
    prefixes = [VALIDATED, *(split.removeprefix("test_") + "/" for split in test_splits if split != "test")]
    leave |= {prefix + name for prefix in prefixes for name in leave}
    kept = sorted(set(reply.metrics) - leave)
    if kept:  # below what FLARE's log has by default: where a site streams its log, that leaves too
        log.debug("site %s: metrics that stay at home: %s", site, {name: reply.metrics[name] for name in kept})
        reply.metrics = {name: value for name, value in reply.metrics.items() if name in leave}
    # Of a metric over classes, many values tell how many there are.
    if not any(metric.name == task.primary_metric and metric.mean_of_images for metric in task.declared_metrics()):
        for key in (RESAMPLED, DRAWN_UNITS, NUM_UNITS):
            reply.stats.pop(key, None)
    reply.stats[AT_HOME] = True
