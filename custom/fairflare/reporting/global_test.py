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
from fairflare.reporting.standing import Said, Site

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
    metric, told = str(info["primary_metric"]), "; ".join(left_out[site] for site in sorted(left_out))
    of = [Site(name, found.get(metric, math.nan), sampling.get(name) or {}, found, metric) for name, found in
          sorted(tests.items())]  # fmt: skip
    if not of:
        return [], {"reason": told, "lists": []}
    whole = of[0] if len(of) == 1 else _pooled(of, means, groups)
    low, high = info.get("metric_range") or (None, None)
    ends = whole.interval(-math.inf if low is None else low, math.inf if high is None else high)
    more: dict[str, Any] = {"low": ends[0], "high": ends[1], "cases": whole.said.get("test_cases")}
    cells = [
        Cell(name, split=GLOBAL, value=value, **(more if name == metric else {}))
        for name, value in sorted(whole.metrics.items())
    ]
    lists = [
        {"measured_at": sites[0], "sites": sorted(sites), "images": (sampling.get(sites[0]) or {}).get("images")}
        for sites in measured
    ]
    return cells, {"reason": told, "lists": lists}


def _pooled(of: Sequence[Site], means: Collection[str], groups: Mapping[str, Sequence[int]]) -> Site:
    """Return the figures over all lists together, without those that sums cannot give or that a site lacks."""
    counts = {key: [site.said.get(key) for site in of] for key in ("images", "test_cases")}
    said: dict[str, Any] = {key: None if None in known else sum(known) for key, known in counts.items()}
    found: dict[str, float] = {}
    if said["images"]:
        shares = [site.said["images"] / said["images"] for site in of]
        for name in set.intersection(*(set(site.metrics) for site in of)) & set(means):
            found[name] = math.fsum(share * site.metrics[name] for share, site in zip(shares, of, strict=True))
        errors = [site.said.get("standard_error") for site in of]
        if of[0].metric in means and None not in errors:
            said["standard_error"] = math.hypot(*(share * e for share, e in zip(shares, errors, strict=True)))
    if all(site.right for site in of):
        right, support = Counter[str](), Counter[str]()
        for site in of:
            right.update(site.right)
            support.update(site.support)
        said["class_support"] = {name: support[name] for name in of[0].said["class_support"]}
        recalls = {c: right[name] / n for c, (name, n) in enumerate(said["class_support"].items()) if n}
        names = list(said["class_support"])
        found |= {metric_name(f"recall_{names[c]}"): recall for c, recall in recalls.items()}
        found[MEAN_RECALL] = statistics.fmean(recalls.values())
        by_group = {group: [recalls[c] for c in members if c in recalls] for group, members in groups.items()}
        of_groups = {group: statistics.fmean(own) for group, own in by_group.items() if own}
        found |= {**of_groups, **({ALL: statistics.fmean(of_groups.values())} if of_groups else {})}
    return Site("", found.get(of[0].metric, math.nan), said, found, of[0].metric)
