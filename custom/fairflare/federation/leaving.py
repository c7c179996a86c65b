"""What a site keeps at home although a task measured it: metrics by class, where the site's own file says so."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fairflare.core.task import metric_name
from fairflare.methods.training import SiteError

if TYPE_CHECKING:
    from fairflare.core.task import Task
    from fairflare.exchange.messages import SiteReply

log = logging.getLogger(__name__)
METRICS_BY_CLASS = "metrics_by_class"  # the setting in local/fairflare.json
#: In front of the names of the last model's metrics on the validation split.
VALIDATED = "validation.split/"  # no test list can be called so
AT_HOME = "classes_at_home"  # in a reply's stats: metrics by class were kept back
RESAMPLED = "resampled"  # in a reply's stats: the primary metric on draws of the test images


def sends_classes(site: str, settings: Mapping[str, Any]) -> bool:
    """The site's ``metrics_by_class``; default: True.

    Raises:
        SiteError: it is neither true nor false.
    """
    chosen = settings.get(METRICS_BY_CLASS, True)
    if not isinstance(chosen, bool):
        raise SiteError(f"site {site!r}: setting {METRICS_BY_CLASS!r} must be true or false, got {chosen!r:.80}")
    return chosen


def safely_named(site: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under the names that may leave a site, see :func:`fairflare.core.task.metric_name`.

    Raises:
        SiteError: two would have the same name (says which in this site's log only).
    """
    check_names(site, names := list(map(metric_name, metrics)))
    return dict(zip(names, metrics.values(), strict=True))


def check_names(site: str, names: Collection[str]) -> None:
    """Refuses metrics of which two would have one name.

    Raises:
        SiteError: says which in this site's log only.
    """
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SiteError(
            f"site {site!r}: more than one metric would be called {twice[0]!r}; rename a class or a group",
            public=f"site {site!r}: two of its metrics would have the same name; rename a class or a group there",
        )


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
        reply.stats.pop(RESAMPLED, None)
    reply.stats[AT_HOME] = True
