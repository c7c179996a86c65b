"""Compute how certain it is that a site is behind: an interval for each site, and a test for more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fairflare.base.cases.sampling import BINS, MEAN_RECALL, SHARES
from fairflare.base.checks import true_texts
from fairflare.base.task import metric_name
from fairflare.core.statistics.footing import ADJUSTED, OWN, SHARED, Footing
from fairflare.core.statistics.inequality import (
    SitesCompared,
    errors_test,
    mean_interval,
    mean_of_shares_interval,
    permutation_test,
    scores_test,
    share_interval,
)
from fairflare.core.statistics.intervals import FEW, LEVEL
from fairflare.reporting.documents import CASES, ERRORS, TESTS, WITHIN, Inequality, RunResults
from fairflare.reporting.layout import number, p_value
from fairflare.reporting.values import are_compared, collect_by_site

NOWHERE = Footing({})
Said = Mapping[str, Any]  # figures of a site about chance, see federation/site/sampling.py
MIXED = "their mix of classes and by sampling"
NEEDED = (
    f"An interval needs two test cases and a standard error above 0 that the site sends, the test {FEW} cases at two "
    "sites or more."
)
SAID = ("images", "standard_error", "case_scores", "class_support", "structure_support")


def standing(
    test: Mapping[str, Mapping[str, float]],
    sampling: Mapping[str, Said],
    info: Mapping[str, Any],
    footing: Footing = NOWHERE,
) -> tuple[dict[str, Any] | None, dict[str, tuple[float, float]]]:
    """Return how each site compares with the others in the primary metric, and the interval of each site's value.

    Args:
        test: ``{site: {metric: value}}`` of the last model.
        sampling: figures of each site on the sampling error of its metrics, by site.
        info: ``info`` of the results, of which ``primary_metric``, ``higher_is_better`` and ``metric_range`` are used.
        footing: describes which structures of which sites are compared; adjusted figures have no interval or test.

    Returns:
        ``inequality`` of ``results.json``, and the ends of the intervals by site, NaN for none; ``None`` and no
        interval if no site reports figures about chance.
    """
    if not sampling:
        return None, {}
    metric = str(info["primary_metric"])
    higher = bool((info.get("higher_is_better") or {}).get(metric, True))
    least, most = info.get("metric_range") or (0, 1)
    low, high = _or(least, -math.inf), _or(most, math.inf)
    values = {s: value for s, of in sorted(test.items()) if math.isfinite(value := _or(of.get(metric), math.nan))}
    sites = [ComparedSite(name, values[name], sampling.get(name) or {}, test[name], metric) for name in values]
    moved = [site for site in sites if OWN + metric in site.metrics]
    for site in moved:  # only classes by which the sites are compared count
        compared = footing.list_compared(site.name)
        site.support, site.right = (
            {name: count for name, count in counts.items() if name in compared} for counts in (site.support, site.right)
        )
    known = not moved or footing.how != ADJUSTED  # the error of an adjustment is not known
    found = _test_sites(sites, low, high, higher) if known else None
    common = _common(sites)
    by_site: dict[str, dict[str, Any]] = {
        site.name: {
            **{key: site.said.get(key) for key in SAID}, "expected": None, "p_value": None,
            "common": site.mean_recall(common) if common else None,
        } for site in sites
    }  # fmt: skip
    ends = {site.name: site.interval(low, high) if known else (math.nan, math.nan) for site in sites}
    result: dict[str, Any] = {
        "metric": metric, "level": LEVEL, "test": None, "p_value": None, "std": None, "chance_std": None,
        "gap": None, "gap_site": None, "chance_gap": None, "behind": [], "ahead": [],
        "common_classes": common, "sites": by_site,
    }  # fmt: skip
    if found is None:
        return result, ends
    name, tested, outcome = found
    for site, expected, p in zip(tested, outcome.expected.tolist(), outcome.p_sites.tolist(), strict=True):
        by_site[site.name] |= {"expected": expected, "p_value": p}
    gaps = {s.name: (by_site[s.name]["expected"] - s.value) * (1 if higher else -1) for s in tested}
    clear = [site for site in gaps if by_site[site]["p_value"] <= 1 - LEVEL]
    last = max(gaps, key=gaps.__getitem__)
    return result | {
        "test": name,
        "p_value": outcome.p_value,
        "std": statistics.pstdev(site.value for site in tested),
        "chance_std": outcome.chance_std,
        "gap": gaps[last],
        "gap_site": last,
        "chance_gap": outcome.chance_gap,
        "behind": [site for site in clear if gaps[site] > 0],
        "ahead": [site for site in clear if not gaps[site] > 0],
    }, ends


class ComparedSite:
    """Store a site's value together with the figures that the site reported about it."""

    def __init__(self, name: str, value: float, said: Said, metrics: Mapping[str, float], metric: str) -> None:
        self.name, self.value, self.said, self.metric, self.metrics = name, value, said, metric, metrics
        #: Whether each image is a case of its own, so that counts of images are counts of independent observations.
        self.single = said.get("test_cases") is not None and said["test_cases"] == said.get("images")
        self.support: dict[str, int] = {c: n for c, n in (said.get("class_support") or {}).items() if n}
        right = {
            name: _or(metrics.get(metric_name(f"recall_{name}")), math.nan) * images
            for name, images in self.support.items()
        }
        #: Number of correctly classified images of each class; empty if not known.
        self.right = {name: round(count) for name, count in right.items() if math.isfinite(count)}
        if len(self.right) < len(self.support) or any(abs(right[n] - k) > 1e-3 for n, k in self.right.items()):
            self.right = {}

    def interval(self, low: float, high: float) -> tuple[float, float]:
        """Return the confidence interval (lower, upper end) of the site's value at the level :data:`LEVEL`.

        Both ends are NaN if the interval cannot be computed: with fewer than two test cases, an unknown number of
        them, or no standard error.

        Args:
            low, high: ends of the metric's range.
        """
        cases = self.said.get("test_cases")
        if cases is None or cases < 2:
            return math.nan, math.nan
        if self.single and self.metric in SHARES and (self.right or self.scores_of_shares):
            return share_interval(min(self.value * cases, cases), cases)
        if self.single and self.metric == MEAN_RECALL and self.right:
            return mean_of_shares_interval(list(self.right.values()), list(self.support.values()))
        return mean_interval(self.value, _or(self.said.get("standard_error"), math.nan), cases, low, high)

    @property
    def scores_of_shares(self) -> bool:
        """Return whether every case's score is 1 (right) or 0 (wrong), none in between."""
        return not any((self.said.get("case_scores") or [1] * BINS)[1:-1])

    def mean_recall(self, classes: Sequence[str]) -> float | None:
        """Return the mean recall over some classes, or ``None`` if the recall of one of them is not known."""
        known = [self.right[name] / self.support[name] for name in classes if name in self.right]
        return statistics.fmean(known) if known and len(known) == len(classes) else None


def _test_sites(
    sites: Sequence[ComparedSite], low: float, high: float, higher: bool
) -> tuple[str, list[ComparedSite], SitesCompared] | None:
    """Return the test that most sites can take part in, these sites and its result; ``None`` if fewer than two can."""
    enough = [s for s in sites if (s.said.get("test_cases") or 0) >= FEW]
    ways: list[tuple[str, list[ComparedSite], Callable[[list[ComparedSite]], SitesCompared]]] = [
        (
            WITHIN, [s for s in enough if s.single and s.right and s.metric in (*SHARES, MEAN_RECALL)],
            lambda tested: _test_within_classes(tested, higher),
        ),
        (
            CASES, [s for s in enough if s.said.get("case_scores") is not None],
            lambda tested: _test_cases(tested, low, high, higher),
        ),
        (ERRORS, [s for s in enough if (s.said.get("standard_error") or 0) > 0], lambda of: errors_test(
            [s.value for s in of], [s.said["standard_error"] for s in of], [s.said["test_cases"] for s in of],
            low=low, high=high, higher_is_better=higher,
        )),
    ]  # fmt: skip
    name, tested, test = max(ways, key=lambda way: len(way[1]))  # on a tie the first test
    return (name, tested, test(tested)) if len(tested) > 1 else None


def _test_within_classes(sites: Sequence[ComparedSite], higher: bool) -> SitesCompared:
    names = sorted({name for site in sites for name in site.support})
    right, total = (
        np.array([[of.get(name, 0) for name in names] for of in counts], np.int64)
        for counts in ([site.right for site in sites], [site.support for site in sites])
    )
    shares = total.astype(np.float64) if sites[0].metric in SHARES else (total > 0).astype(np.float64)
    return permutation_test(right, total, shares / shares.sum(1, keepdims=True), higher_is_better=higher)


def _test_cases(sites: Sequence[ComparedSite], low: float, high: float, higher: bool) -> SitesCompared:
    counts = np.array([site.said["case_scores"] for site in sites], np.int64)
    total = counts.sum(1, keepdims=True)
    if sites[0].metric in SHARES and all(site.scores_of_shares for site in sites):  # the last bin has the right cases
        return permutation_test(counts[:, -1:], total, np.ones(total.shape), higher_is_better=higher)
    found = scores_test(counts, ((np.arange(BINS) + 0.5) / BINS).tolist(), higher_is_better=higher)
    values, width = np.array([site.value for site in sites]), high - low
    mean = float(np.average(values, weights=total[:, 0]))  # values are not rounded to bins
    # A site between this mean and the one weighted by errors, which the test is about, is on no side of both.
    sides = (values - mean) * (values - low - width * found.expected) > 0
    return replace(
        found, expected=np.full(len(sites), mean), p_sites=np.where(sides, found.p_sites, 1.0),
        chance_std=width * found.chance_std, chance_gap=width * found.chance_gap,
    )  # fmt: skip


def _common(sites: Sequence[ComparedSite]) -> list[str] | None:
    """Return the classes common to all sites that report classes; ``None`` if all have the same, or none reports."""
    of = [set(site.support) for site in sites if site.support]
    return None if not of or all(own == of[0] for own in of) else sorted(set.intersection(*of))


def _or(value: Any, otherwise: float) -> float:
    """Return a value as a float if it is a number, else ``otherwise``."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


# ------------------------------------------------------------------------------------------------ words


def standing_notes(results: RunResults) -> list[str]:
    """Return sentences on what the sites' comparison rests on: spread, missing intervals and tests, classes.

    The first sentence of :func:`note_footing` is left out, since it is said first.
    """
    found = results.inequality
    adjusted = results.footing.how == ADJUSTED and are_compared(results, found.metric)
    lacking = [name for name, site in found.sites.items() if None in (site.low, site.p_value) and not adjusted]
    without = f"Without an interval, or not in the test of who is behind: {', '.join(lacking)}. {NEEDED}"
    return [
        *([_note_spread(found)] if found.test else []), *[without] * bool(lacking), *_note_classes(found),
        *note_footing(results)[1:],
    ]  # fmt: skip


def note_footing(results: RunResults) -> list[str]:
    """Return sentences on the structures over which sites are compared, if sites annotate different structures."""
    footing, metric = results.footing, results.info.primary_metric
    if not footing.how or not are_compared(results, metric):
        return []
    structures = "; ".join(f"{site}: {', '.join(names) or 'none'}" for site, names in footing.structures.items())
    basis = (
        f"those that all have: {', '.join(footing.shared)}."
        if footing.how == SHARED
        else "no common one: each is adjusted, the site's part in a sum of those of site and structure (least "
        "squares). How sure that is is not known, so that there are no intervals and no test of who is behind."
    )
    outputs = "; ".join(
        f"{name}: {', '.join(sites) or 'no site, it stays as it was'}"
        for name, sites in (results.info.output_rows or {}).items()
    )
    values = {site: value for site, value in collect_by_site(results, metric).items() if math.isfinite(value)}
    ranks = {tuple(part): sorted((values[site], site) for site in part if site in values) for part in footing.parts}
    return true_texts({
        f"The sites annotate, or mark, different structures, classes or findings ({structures}). Figures of sites rest "
        f"on {basis}": True,
        f"The model's output row of a structure or finding is averaged over the sites that annotate it ({outputs}).": (
            outputs
        ),
        f"That the others can be compared rests on {' and on '.join(footing.bridges)} alone.": footing.bridges,
        **{
            f"No structure links {', '.join(part)} with other sites; ranked within: "
            f"{', '.join(f'{site} {number(value)}' for value, site in order)}.": len(ranks) > 1
            for part, order in ranks.items()
        },
    })  # fmt: skip


def find_test(results: RunResults, metric: str) -> Inequality:
    """Return the section ``inequality`` of results if it has a significance test of ``metric``, else an empty one."""
    found = results.inequality
    return found if found.metric == metric and found.test else Inequality()


def more_unequal(found: Inequality) -> bool:
    """Return whether the sites as a whole differ by more than chance although no single site is shown to be behind."""
    return not found.behind and not found.ahead and found.p_value <= 1 - found.level


def _note_spread(found: Inequality) -> str:
    away = [site.value - site.expected for site in found.sites.values() if site.expected is not None]
    more = f"; their distances from what is expected of each have {number(statistics.pstdev(away))}"
    return (
        f"Standard deviation between these sites {number(found.std)}, between equally good ones "
        f"{number(found.chance_std)} by {sources(found)} ({TESTS[found.test]}: p {p_value(found.p_value)})"
        f"{more if sources(found) == MIXED else ''}."
    )


def sources(found: Inequality) -> str:
    """Return in words what makes the values of equally good sites differ: sampling, and the classes that they have."""
    expected = {number(site.expected) for site in found.sites.values() if site.expected is not None}
    return MIXED if len(expected) > 1 else "sampling alone"


def _note_classes(found: Inequality) -> list[str]:
    common = found.common_classes
    if not common:
        apart = "The sites' test images have no class in common: their averages over classes are of different things."
        return [] if common is None else [apart]
    recalls = {name: site.common for name, site in found.sites.items() if site.common is not None}
    shown = {name: number(value) for name, value in recalls.items()}  # compared as the sentence shows them
    worst = f"; lowest at {min(recalls, key=recalls.__getitem__)}" if len({*shown.values()}) > 1 else ""
    return [
        f"The sites' test images have different classes, so their averages are of different things. Mean recall of "
        f"the {len(common)} class{'es' if len(common) > 1 else ''} that all have ({', '.join(common)}): "
        f"{', '.join(f'{name} {value}' for name, value in shown.items())}{worst}."
    ]
