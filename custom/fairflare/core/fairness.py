"""Measure how evenly a metric is spread over the sites."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from math import nan
from typing import Any, TypeVar

import numpy as np

from fairflare.base import checks

T = TypeVar("T")


@dataclass(frozen=True)
class FairnessSummary:
    """Describe the spread of one metric over the sites, each site counting once whatever its size.

    Attributes:
        num_sites: number of sites with a value; the figures below are computed over these sites.
        excluded: sorted names of the sites whose value is NaN, without those in ``suppressed``.
        mean: unweighted mean.
        std: population standard deviation (``ddof=0``), as in the tables of Fed-LWR and FedISM+.
        worst, worst_site: value and name of the site that is served worst; on a tie the first name.
        best, best_site: value and name of the site that is served best; on a tie the first name.
        range: distance between best and worst, ``>= 0``.
        jain: Jain's index ``(sum x)^2 / (K sum x^2)``; 1 when all values are equal, also when all are 0.
        cv: coefficient of variation, std over absolute mean; NaN if the mean is 0 and the values are not.
        bottom_decile: mean over the worst tenth of the sites, rounded down but at least one.
        top_decile: mean over the best tenth of the sites, rounded down but at least one.
        higher_is_better: the metric's direction; ``None`` if not declared; then no worst, best or decile is given.
        suppressed: sorted names of the sites that withhold their value because it rests on too few cases.
    """

    num_sites: int
    excluded: tuple[str, ...]
    mean: float
    std: float
    worst: float
    worst_site: str
    best: float
    best_site: str
    range: float
    jain: float
    cv: float
    bottom_decile: float
    top_decile: float
    higher_is_better: bool | None = True
    suppressed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as a plain dict for JSON; NaN stays NaN and must be written as null."""
        return asdict(self) | {"excluded": list(self.excluded), "suppressed": list(self.suppressed)}


#: Whether a higher value is better, by the exact name of a metric of the packaged tasks. Used for results written by
#: versions that did not record directions yet; the direction of any other metric in such results is unknown.
BEFORE_RECORDED: Mapping[str, bool] = {
    **dict.fromkeys(
        (
            "dice", "volume_dice", "iou", "accuracy", "balanced_accuracy", "recall", "precision", "f1", "f1_macro",
            "f1_harmonic", "precision_macro", "auc_ovo", "auc_ovr", "head", "medium", "tail", "all", "recall_<class>",
            "dice_<class>", "volume_dice_<class>", "iou_<class>",
        ),
        True,
    ),
    "loss": False,
}  # fmt: skip


def declared_as(metric: str, known: Mapping[str, T]) -> T | None:
    """Return the declaration for a metric from a mapping by metric name, or ``None`` if nothing is declared.

    Args:
        metric: name of the metric, also with the name of a test list in front (``clean/loss``).
        known: declarations by metric name; the key ``dice_<class>`` holds for every name that begins with ``dice_``.
    """
    parts = metric.split("/")
    names = ["/".join(parts[first:]) for first in range(len(parts))]
    families = {family.partition("<")[0]: value for family, value in known.items() if "<" in family[1:]}
    of_family = (families[start] for name in names for start in families if name.startswith(start))
    return next(chain((known[name] for name in names if name in known), of_family), None)


def higher_is_better(metric: str, declared: Mapping[str, bool] | None = None) -> bool | None:
    """Return whether a higher value of a metric is better, as its task declares; of a loss, lower values are better.

    The result is ``None`` if no direction is declared: it is not guessed.

    Args:
        metric: name of the metric, also with the name of a test list in front (``clean/loss``).
        declared: ``{metric: direction}``.
    """
    return declared_as(metric, {"loss": False, **(declared or {})})


def summarize(
    per_site: Mapping[str, float],
    *,
    higher_is_better: bool | None = True,
    suppressed: Collection[str] = (),
    linked: bool = True,
) -> FairnessSummary:
    """Return the mean, spread and extremes of a metric over the sites.

    Args:
        per_site: ``{site: value}``; NaN means undefined at that site, which is then left out and counted.
        higher_is_better: False for losses and error rates, where the worst site has the highest value; ``None`` if the
            direction is not known, and no site is called worst or best.
        suppressed: sites that withhold their value, which is NaN here.
        linked: whether the sites' values can be compared; False: they measure different structures
            (:attr:`fairflare.core.statistics.footing.Footing.parts`), so that the summary has no spread, no worst and
            no best.

    Returns:
        The summary; when every site is NaN its figures are NaN, ``num_sites`` is 0 and the site names are
        empty.

    Raises:
        ValueError: no site, or an infinite value (names the site).

    Example:
        >>> s = summarize({"A": 0.9, "B": 0.8, "C": 0.4})
        >>> s.worst_site, round(s.mean, 6), round(s.std, 6), round(s.jain, 6)
        ('C', 0.7, 0.216025, 0.913043)
    """
    checks.not_empty("the values to summarize", per_site)
    given = {site: per_site[site] for site in sorted(per_site)}
    without = [site for site, value in given.items() if isinstance(value, float) and math.isnan(value)]
    home = tuple(site for site in without if site in suppressed)
    excluded = tuple(site for site in without if site not in suppressed)
    values = checks.numbers("value", {site: v for site, v in given.items() if site not in without})
    sites = list(values)
    if not sites:
        return FairnessSummary(0, excluded, nan, nan, nan, "", nan, "", nan, nan, nan, nan, nan, higher_is_better, home)

    sign = -1.0 if higher_is_better is False else 1.0
    worst_site = min(sites, key=lambda site: sign * values[site])  # on a tie, min and max return the first site
    best_site = max(sites, key=lambda site: sign * values[site])
    x = np.array([values[site] for site in sites])
    ranked = np.sort(sign * x) * sign  # values from the worst to the best
    tenth = max(1, len(sites) // 10)
    mean, std = float(x.mean()), float(x.std())
    if x.min() == x.max():
        std, jain = 0.0, 1.0  # exact values, where rounding of the mean would leave 1e-17
    else:
        scaled = x / np.abs(x).max()  # scaling keeps the squares finite
        jain = float(scaled.sum() ** 2 / (len(sites) * np.square(scaled).sum()))
    linked = linked and (len(sites) > 1 or len(given) == 1)  # a single value of several sites cannot be compared
    known = higher_is_better is not None and linked
    if not linked:
        std = jain = nan
    return FairnessSummary(
        num_sites=len(sites),
        excluded=excluded,
        mean=mean,
        std=std,
        worst=values[worst_site] if known else nan,
        worst_site=worst_site if known else "",
        best=values[best_site] if known else nan,
        best_site=best_site if known else "",
        range=abs(values[best_site] - values[worst_site]) if linked else nan,
        jain=jain,
        cv=0.0 if std == 0 else (std / abs(mean) if mean != 0 else nan),
        bottom_decile=float(ranked[:tenth].mean()) if known else nan,
        top_decile=float(ranked[-tenth:].mean()) if known else nan,
        higher_is_better=higher_is_better,
        suppressed=home,
    )
