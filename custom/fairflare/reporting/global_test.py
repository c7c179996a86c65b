"""Compute the global test: the common model's metrics on images that belong to no site alone (``test_global``).

A list that several sites have is measured at one of them. If sites have different lists, the figures over all lists
are computed from sums, for two kinds of metrics: means over images, and recalls of classes with the means of recalls.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fairflare.base.cases.sampling import MEAN_RECALL
from fairflare.base.task import metric_name
from fairflare.core.cells import GLOBAL, Cell
from fairflare.reporting.standing import ComparedSite, Said

ALL = "all"  # name of the mean over groups of classes, as in fairflare.tasks.scores.metrics


def global_test(
    tests: Mapping[str, Mapping[str, float]],
    sampling: Mapping[str, Said],
    measured: Sequence[Sequence[str]],
    left_out: Mapping[str, str],
    info: Mapping[str, Any],
    means: Collection[str],
    groups: Mapping[str, Sequence[int]],
) -> tuple[list[Cell], dict[str, Any]]:
    """Return the cells and ``global_test`` of ``results.json``, made of the sites' answers (``docs/results.md``).

    Args:
        tests: ``{site: {metric: value}}`` of the sites that measured a list each.
        sampling: figures of each site on the sampling error of the primary metric, by site.
        measured: for each list the sites that have it; the site that measured it comes first.
        left_out: reason for each site that could not measure its list, by site.
        info: ``info`` of the results, of which ``primary_metric`` and ``metric_range`` are used.
        means: names of the metrics that are means over images.
        groups: numbers of the classes in each group of classes, by the group's name.
    """
    metric, reason = str(info["primary_metric"]), "; ".join(left_out[site] for site in sorted(left_out))
    sites = [
        ComparedSite(name, figures.get(metric, math.nan), sampling.get(name) or {}, figures, metric)
        for name, figures in sorted(tests.items())
    ]
    if not sites:
        return [], {"reason": reason, "lists": []}
    whole = sites[0] if len(sites) == 1 else _pool_lists(sites, means, groups)
    low, high = info.get("metric_range") or (None, None)
    ends = whole.interval(-math.inf if low is None else low, math.inf if high is None else high)
    more: dict[str, Any] = {"low": ends[0], "high": ends[1], "cases": whole.said.get("test_cases")}
    cells = [
        Cell(name, split=GLOBAL, value=value, **(more if name == metric else {}))
        for name, value in sorted(whole.metrics.items())
    ]
    return cells, {"reason": reason, "lists": [
        {"measured_at": having[0], "sites": sorted(having), "images": (sampling.get(having[0]) or {}).get("images")}
        for having in measured
    ]}  # fmt: skip


def _pool_lists(
    sites: Sequence[ComparedSite], means: Collection[str], groups: Mapping[str, Sequence[int]]
) -> ComparedSite:
    """Return the figures over all lists together, without those that sums cannot give or that a site lacks."""
    numbers: dict[str, Any] = {
        key: None if None in known else sum(known)
        for key in ("images", "test_cases") for known in [[site.said.get(key) for site in sites]]
    }  # fmt: skip
    pooled: dict[str, float] = {}
    if numbers["images"]:
        shares = [site.said["images"] / numbers["images"] for site in sites]
        for name in set.intersection(*(set(site.metrics) for site in sites)) & set(means):
            pooled[name] = math.fsum(share * site.metrics[name] for share, site in zip(shares, sites, strict=True))
        errors = [site.said.get("standard_error") for site in sites]
        if sites[0].metric in means and None not in errors:
            numbers["standard_error"] = math.hypot(*(share * e for share, e in zip(shares, errors, strict=True)))
    if all(site.right for site in sites):
        right = sum((Counter(site.right) for site in sites), Counter[str]())
        support = sum((Counter(site.support) for site in sites), Counter[str]())
        numbers["class_support"] = {name: support[name] for name in sites[0].said["class_support"]}
        recalls = {c: right[name] / n for c, (name, n) in enumerate(numbers["class_support"].items()) if n}
        pooled |= {
            metric_name(f"recall_{name}"): recalls[c] for c, name in enumerate(numbers["class_support"]) if c in recalls
        }
        pooled[MEAN_RECALL] = statistics.fmean(recalls.values())
        of_groups = {
            group: statistics.fmean(recalls[c] for c in members if c in recalls)
            for group, members in groups.items() if recalls.keys() & {*members}
        }  # fmt: skip
        pooled |= {**of_groups, **({ALL: statistics.fmean(of_groups.values())} if of_groups else {})}
    return ComparedSite("", pooled.get(sites[0].metric, math.nan), numbers, pooled, sites[0].metric)
