r"""Compute metrics of groups of people and the gaps between groups, from sums alone (:mod:`.group_sums`).

With two classes the second class is the positive one, as in scikit-learn. With more, each class is taken against the
rest: metrics are means over the classes, and gaps are the largest over the classes. A value that is undefined (a group
without the class, a sum that a site withholds) is NaN and is left out of means and gaps.

Sources: equalised odds and equal opportunity, Hardt et al., NeurIPS 2016; equity-scaled metrics, Luo et al., "Harvard
Glaucoma Fairness", IEEE TMI 2024, and FairSeg, ICLR 2024: :math:`ES = m / (1 + \sum_g |m - m_g|)`; expected calibration
error, Guo et al., ICML 2017; Brier, 1950 (summed over classes: of two classes twice the one-sided form).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np

from fairflare.base.checks import group_by_key
from fairflare.core.statistics.group_sums import (
    BRIER,
    CALIBRATION,
    CASES,
    CONFUSION,
    DICE,
    HISTOGRAM,
    IMAGES,
    Array,
    Sums,
)

K = TypeVar("K", bound=Hashable)
#: Names of metrics for which the worst group is reported and an equity-scaled value is computed.
SCALED = ("accuracy", "auc", "dice")
WITHIN = "_within"  # suffix of a gap's name for the gap within the sites, see :func:`gap_within`
LABELS: Mapping[str, str] = {
    "equalised_odds": "largest gap in sensitivity or in false positives",
    "equal_opportunity": "largest gap in sensitivity",
    "demographic_parity": "largest gap in how often a class is told",
}


def positives(classes: int) -> list[int]:
    """Return the positive classes: the second one of two classes, else each class (taken against the rest)."""
    return [1] if classes == 2 else list(range(classes))


def _ratio(over: Array, under: Array) -> Array:
    return np.asarray(np.divide(over, under, out=np.full(np.shape(over), np.nan), where=np.asarray(under) > 0))


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def rates(sums: Sums) -> dict[str, Array]:
    """Return ``sensitivity``, ``specificity`` and the share of predictions (``told``) of each positive class.

    ``told`` is the share of images for which the model predicts the class.
    """
    tp, fp, fn, tn = sums[CONFUSION][positives(len(sums[CONFUSION]))].T
    positive_rate = _ratio(tp + fp, tp + fp + fn + tn)
    return {"sensitivity": _ratio(tp, tp + fn), "specificity": _ratio(tn, tn + fp), "told": positive_rate}


def areas(sums: Sums) -> tuple[Array, Array]:
    """Return the area under the ROC curve of each positive class, and a bound of the error by the histogram's bins.

    Pairs of images within one bin count as ties, by one half. The error of each such pair is at most one half, so that
    the bound is half the share of these pairs.
    """
    positive, negative = (sums[HISTOGRAM][positives(len(sums[HISTOGRAM])), side] for side in (0, 1))
    below = np.cumsum(negative, 1) - negative
    pairs = positive.sum(1) * negative.sum(1)
    tied = (positive * negative).sum(1) / 2
    return _ratio((positive * below).sum(1) + tied, pairs), _ratio(tied, pairs)


def metrics_of(sums: Sums) -> dict[str, float]:
    """Return the metrics of a group that its sums allow, by name; NaN if undefined.

    For classes: ``accuracy``, ``sensitivity``, ``specificity``, ``auc`` with ``auc_error`` (bound of its error),
    ``ece``, ``brier``. For a segmentation: ``dice`` with ``dice_std`` over images, both means over structures.
    """
    metrics: dict[str, float] = {}
    if CALIBRATION in sums:
        count, confidence, right = sums[CALIBRATION].T
        images = count.sum()
        totals = {"accuracy": right.sum(), "ece": np.abs(confidence - right).sum(), "brier": sums[BRIER]}
        metrics = {name: float(_ratio(total, images)) for name, total in totals.items()}
    if CONFUSION in sums:
        metrics |= {name: _mean(of_classes) for name, of_classes in rates(sums).items() if name != "told"}
    if HISTOGRAM in sums:
        area, error = areas(sums)
        metrics |= {"auc": _mean(area), "auc_error": _mean(error)}
    if DICE in sums:
        images, total, squares = sums[DICE].T
        means = _ratio(total, images)
        spread = np.sqrt(np.maximum(_ratio(squares, images) - means**2, 0))
        metrics |= {"dice": _mean(means), "dice_std": _mean(spread)}
    return metrics


def images_of(sums: Sums) -> float:
    """Return the number of images of a group; NaN if the site withholds the number."""
    return float(sums[IMAGES])


def cases_of(sums: Sums) -> float:
    """Return the number of cases (patients) that a group's images belong to.

    NaN: the site withholds the number, or the sums do not contain it.
    """
    return float(sums[CASES][0]) if CASES in sums else math.nan


def _gap(values: Sequence[Array]) -> float:
    """Return the largest difference between groups in any class; NaN if no class has two groups with a value."""
    known = [column[np.isfinite(column)] for column in np.stack(values).T]
    return max([float(column.max() - column.min()) for column in known if column.size > 1], default=math.nan)


def gaps_of(groups: Mapping[str, Sums], whole: Sums) -> dict[str, float]:
    """Return the gaps between groups of people, by name of the gap.

    Args:
        groups: sums by group, without the group of people whose group is unknown.
        whole: sums over all images.

    Returns:
        The gaps of :data:`LABELS`, and ``<metric>_gap`` (best minus worst group) and ``es_<metric>`` (equity-scaled
        value) for each metric of :data:`SCALED`, as far as the sums allow. NaN: fewer than two groups have a value.
    """
    gaps: dict[str, float] = {}
    if groups and all(CONFUSION in sums for sums in groups.values()):
        rates_of_groups = [rates(sums) for sums in groups.values()]
        by_rate = {
            name: _gap([one[name] for one in rates_of_groups]) for name in ("sensitivity", "specificity", "told")
        }
        odds = [gap for gap in (by_rate["sensitivity"], by_rate["specificity"]) if math.isfinite(gap)]
        gaps = {
            "equalised_odds": max(odds, default=math.nan), "equal_opportunity": by_rate["sensitivity"],
            "demographic_parity": by_rate["told"],
        }  # fmt: skip
    alike = _same_structures(groups, whole)
    of_all, of_each = metrics_of(alike[0]), list(map(metrics_of, alike[1:]))
    for name in (name for name in SCALED if name in of_all):
        values = [value for one in of_each if math.isfinite(value := one.get(name, math.nan))]
        scaled = of_all[name] / (1 + math.fsum(abs(of_all[name] - value) for value in values))
        both = (max(values) - min(values), scaled) if len(values) > 1 else (math.nan, math.nan)
        gaps |= {f"{name}_gap": both[0], f"es_{name}": both[1]}
    return gaps


def _same_structures(groups: Mapping[str, Sums], whole: Sums) -> list[Sums]:
    """Return the sums over all images, then each group's sums, without structures that a group has no images of.

    A gap in Dice over different structures would be a gap between the structures. Groups that report no structure are
    ignored here.
    """
    known = [group[DICE][:, 0] > 0 for group in groups.values() if DICE in group]
    both = np.logical_and.reduce([has for has in known if has.any()] or [np.ones(len(whole.get(DICE, ())), bool)])
    return [{**group, DICE: group[DICE][both]} if DICE in group else group for group in (whole, *groups.values())]


def find_undefined_rates(groups: Mapping[str, Sums]) -> dict[str, list[str]]:
    """Return the rates (sensitivity, false positives) that are undefined in a group of people, with these groups.

    A rate is undefined if the group has no image of the class, or none of any other class.

    Args:
        groups: sums by group, as in :func:`gaps_of`.

    Returns:
        ``{"sensitivity <class>" or "false positives <class>": groups}``; empty if both rates are defined in all groups.
    """
    of_groups = ((g, rates(s), len(s[CONFUSION])) for g, s in groups.items() if CONFUSION in s and images_of(s) > 0)
    lacking = (
        (group, label, [math.isnan(measured[name][rank]) for name in ("sensitivity", "specificity")])
        for group, measured, classes in of_groups
        for rank, label in enumerate(positives(classes))
    )
    return group_by_key(
        (f"{'sensitivity' if lacks[0] else 'false positives'} {label}", group)
        for group, label, lacks in lacking
        if sum(lacks) == 1  # if both are undefined, the class is withheld by a site
    )


def gap_within(
    sites: Mapping[str, Mapping[str, Mapping[str, float]]], name: str
) -> tuple[float, str, dict[str, float]]:
    r"""Return the gap between groups within the sites, from which differences between the sites are removed.

    .. math:: D_{ab} = \sum_s w_s (m_{sa} - m_{sb}) / \sum_s w_s, \quad w_s = n_{sa} n_{sb} / (n_{sa} + n_{sb})

    over the sites s that have both groups a and b, where n is a group's number of cases and m its metric. The gap is
    the largest :math:`\lvert D_{ab} \rvert`.

    Args:
        sites: ``{site: {group: figures}}``: metrics and the number of ``cases`` of each group, without the group of
            people whose group is unknown.
        name: name of the metric.

    Returns:
        The gap, the name of the group with the lower value, and how far that group is behind at each site that has
        both. If no site has a value for two groups, NaN, an empty name and no site.

    Source:
        The weights of Mantel and Haenszel's risk difference: Greenland and Robins, Biometrics 1985.
    """
    widest: tuple[float, str, dict[str, float]] = (math.nan, "", {})
    for a, b in combinations(dict.fromkeys(group for groups in sites.values() for group in groups), 2):
        both: dict[str, tuple[float, float]] = {}
        for site, means in sites.items():
            differ = means.get(a, {}).get(name, math.nan) - means.get(b, {}).get(name, math.nan)
            if math.isfinite(differ):
                n, m = (means[group][CASES] for group in (a, b))
                both[site] = (differ, n * m / (n + m))
        weight = math.fsum(w for _, w in both.values())
        mean = math.fsum(d * w for d, w in both.values()) / weight if weight > 0 else math.nan
        if not abs(mean) <= widest[0] and math.isfinite(mean):
            sign = 1 if mean > 0 else -1
            widest = (abs(mean), b if mean > 0 else a, {site: sign * d for site, (d, _) in both.items()})
    return widest


def worst_of(groups: Mapping[str, Sums]) -> dict[str, str]:
    """Return the group with the lowest value of each metric of :data:`SCALED`; on a tie the first group."""
    alike = dict(zip(groups, map(metrics_of, _same_structures(groups, {})[1:]), strict=True))
    known = {
        name: {group: of[name] for group, of in alike.items() if math.isfinite(of.get(name, math.nan))}
        for name in SCALED
    }
    return {name: min(of, key=of.__getitem__) for name, of in known.items() if len(of) > 1}


def exponentiate(weights: Mapping[K, float], losses: Mapping[K, float], rate: float) -> dict[K, float]:
    r"""Return a step of exponentiated gradient: :math:`q_g \leftarrow q_g \exp(\eta L_g) / Z`.

    Args:
        weights: q, weight of each group, sum 1. A group without weight enters with the mean weight; if no group has a
            weight, all are equal.
        losses: L, loss of each group, finite. A group without loss keeps its weight; the groups with a loss share the
            sum of their weights anew.
        rate: step size eta.
    """
    mean = sum(weights.values()) / len(weights) if weights else 1.0
    before = {**weights, **{key: mean for key in losses if key not in weights}}
    held = math.fsum(before[key] for key in losses)
    highest = max(losses.values(), default=0.0)  # subtracting the highest loss keeps exp finite
    moved = {key: before[key] * math.exp(rate * (loss - highest)) for key, loss in losses.items()}
    total = math.fsum(moved.values())
    after = {**before, **({key: held * value / total for key, value in moved.items()} if total > 0 else {})}
    whole = math.fsum(after.values())
    return {key: value / whole for key, value in after.items()}
