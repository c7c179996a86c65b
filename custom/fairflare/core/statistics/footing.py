r"""Make metrics of sites that annotate different structures comparable (put them on one footing).

A *cell* is a pair of a site and a structure that the site annotates and that some of its images show. A mean over a
site's own cells depends as much on the site's structures as on the model, so that such means cannot rank sites with
different structures.

Source:
    Comparison over shared cells, and additive adjustment :math:`y_{ks} = u_k + v_s` (site k, structure s) by least
    squares, as for an unbalanced two-way layout (Scheffe, The Analysis of Variance, 1959, chapter 4).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from fairflare.base.checks import MAX_NAMES, few, group_by_key
from fairflare.base.metric import metric_name

Cells: TypeAlias = Mapping[str, Mapping[str, float]]  # values by site, then by structure
Metrics: TypeAlias = Mapping[str, Mapping[str, float]]  # metrics by site, then by name of the metric
Reports: TypeAlias = dict[str, dict[str, Any]]  # reports by site
OWN = "own/"  # prefix of the name of a site's mean over its own cells; the metric's name is the comparable figure's
LEAST_LOSS = 1e-10  # lower bound of a loss, which keeps ratios of losses finite
OF_PART: Mapping[str, str] = {"balanced_accuracy": "recall"}  # name of the metric by class, if unlike the mean's
SHARED, ADJUSTED = "shared", "adjusted"  # methods: mean over shared structures, or additive adjustment


def name_structures(how: str, shared: Sequence[str]) -> str:
    """Return text in brackets, to follow a metric's name: the structures over which sites' figures are computed."""
    return f" ({f'over: {few(shared, MAX_NAMES)}' if how == SHARED else how})"


@dataclass(frozen=True)
class Footing:
    """Define, for all rounds of a run, which structures of which sites are compared.

    Attributes:
        of: names of the structures that each site annotates and whose images show them, by site; a site without
            structures is not compared.
        primary: name of the primary metric.
        empty: names of structures that do not count, as none of the site's images shows them, by site.
    """

    of: Mapping[str, frozenset[str]]
    primary: str = ""
    empty: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Return whether sites are compared by other figures than plain means, as some structures do not count."""
        return any(self.empty.values()) or len({*self.of.values()}) > 1

    @cached_property
    def shared(self) -> list[str]:
        """Return the structures that all compared sites have; sites are compared by the mean over these structures."""
        return sorted(
            frozenset.intersection(*([structures for structures in self.of.values() if structures] or [frozenset()]))
        )

    @cached_property
    def parts(self) -> list[list[str]]:
        """Return groups of sites that are linked by common structures, the largest first; one group: all are linked."""
        return _parts(self.of)

    @property
    def bridges(self) -> list[str]:
        """Return the sites without which other sites would not be linked, so that these could not be compared."""
        if self.shared:
            return []
        without = {site: {k: structures for k, structures in self.of.items() if k != site} for site in sorted(self.of)}
        return [s for s, others in without.items() if len(_parts(others)) > len(self.parts) - ([s] in self.parts)]

    def drop_empty(self, support: Mapping[str, Mapping[str, int]]) -> Footing:
        """Return a copy without each site's structures of which it has 0 images (``support``, by structure)."""
        supported = {
            k: frozenset(s for s in structures if support.get(k, {}).get(s, 1)) for k, structures in self.of.items()
        }
        empty = {
            site: {*self.empty.get(site, ()), *(structures - supported[site])} for site, structures in self.of.items()
        }
        return replace(self, of=supported, empty=empty)

    @property
    def how(self) -> str:
        """Return how figures are made comparable, :data:`SHARED` or :data:`ADJUSTED`; empty if plain means are used."""
        return (SHARED if self.shared else ADJUSTED) if self.differs else ""

    def as_dict(self) -> dict[str, Any]:
        """Return a description of how sites are compared, for the results file."""
        return {
            "how": self.how, "shared": self.shared,
            "structures": {site: sorted(names) for site, names in self.of.items()},
            "empty": {site: sorted(names) for site, names in self.empty.items()},
            "parts": self.parts, "bridges": self.bridges,
        }  # fmt: skip

    def list_compared(self, site: str) -> list[str]:
        """Return the structures over which a site's figure is computed, to compare it with other sites' figures."""
        return self.shared if self.shared and self.of.get(site) else sorted(self.of.get(site, ()))

    def figures(self, cells: Cells) -> dict[str, float]:
        r"""Return a figure of each site that can be compared with the figures of the sites with which it is linked.

        The figure is the mean over the shared structures or, if no structure is shared, :math:`u_k` of
        :func:`fit_effects`.

        Args:
            cells: values of a metric by site and structure; only structures in :attr:`of` count.

        Returns:
            The figure of each site of ``cells``. It is NaN if one of the site's cells has no value, since figures over
            other cells than in other rounds could not be compared.
        """
        comparable = {
            site: {name: cells[site].get(name, math.nan) for name in self.list_compared(site)} for site in cells
        }
        whole = {
            site: figures
            for site, figures in comparable.items()
            if figures and all(map(math.isfinite, figures.values()))
        }
        if self.shared:
            means = {site: statistics.fmean(figures.values()) for site, figures in whole.items()}
        else:
            fitted = (fit_effects({site: whole[site] for site in part}) for part in _parts(whole))
            means = {site: effect for effects in fitted for site, effect in effects.items()}
        return {site: means.get(site, math.nan) for site in cells}

    def make_comparable(self, metrics: Metrics) -> dict[str, dict[str, float]]:
        """Return the sites' metrics with means that can be compared, in place of means over each site's own structures.

        The means over a site's own structures get the name ``own/<metric>``. If all sites have the same structures, the
        metrics are returned unchanged.
        """
        names = {name: None for figures in metrics.values() for name in figures}
        evened = {site: dict(figures) for site, figures in metrics.items()}
        for name in names if self.differs else ():
            cells = self.cells(metrics, name)
            if any(cells.values()):
                for site, value in self.figures(cells).items():
                    alone = not cells[site] and self.of.get(site) == frozenset(self.shared)
                    if name in evened[site] and not (self.shared and alone):  # alone: the site's own mean is its figure
                        evened[site] |= {OWN + name: evened[site][name], name: value}
        return evened

    def cells(self, metrics: Metrics, name: str) -> dict[str, dict[str, float]]:
        """Return, by site and structure, the values whose mean is the metric called ``name``."""
        place, _, last = name.rpartition("/")
        start = f"{place}{'/' * bool(place)}{OF_PART.get(last, last)}_"
        every = {part: metric_name(start + part) for part in sorted(frozenset().union(*self.of.values()))}
        if len(every) == 1 and not any(key in figures for key in every.values() for figures in metrics.values()):
            every = dict.fromkeys(every, name)  # a task with one structure has no metrics by structure
        return {
            site: {
                part: figures[key] for part, key in every.items() if part in self.of.get(site, ()) and key in figures
            }
            for site, figures in metrics.items()
        }

    def reports(self, reports: Reports, kinds: Mapping[str, str], metrics: Metrics) -> Reports:
        r"""Return the sites' reports with losses and scores as if all sites had the same structures, for a rule.

        A loss is multiplied by :math:`\tilde F_k / F_k` (:func:`relative`) of the received model on the validation
        split, so that the loss measured there becomes :math:`\tilde F_k`. A score is raised by the difference between
        the comparable figure of the received model and the site's own mean; if not all sites are linked, scores do not
        change.

        Args:
            reports: reports by site.
            kinds: kind of each field that measures the labels: ``"loss"``, ``"score"``, ``"error"``; by name.
            metrics: metrics of the received model by site, as returned by :meth:`make_comparable`.

        Returns:
            The reports; a value is NaN if the site's figures by structure are unknown.
        """
        if not self.differs or not kinds:
            return reports
        losses = self.cells(metrics, "loss")
        factor = {
            k: ratio / max(average_known(losses[k].values()), LEAST_LOSS) for k, ratio in relative(losses).items()
        }
        corrected = {}
        for site, report in reports.items():
            figures, score = metrics[site], "accuracy" if "accuracy" in metrics[site] else self.primary
            away = figures[score] - figures[OWN + score] if OWN + score in figures and len(self.parts) < 2 else 0.0
            even = {
                "loss": (factor[site] if any(losses.values()) else 1.0, 0.0),
                "score": (1.0, away),
                "error": (1.0, -away),
            }
            corrected[site] = report | {
                name: report[name] * by + plus
                for name, kind in kinds.items() if report[name] is not None for by, plus in [even[kind]]
            }  # fmt: skip
        return corrected


def structure_of(metric: str, names: Collection[str]) -> str:
    """Return the structure in ``names`` with which a metric's name ends; empty if the name ends with none of them."""
    return max((name for name in names if metric.endswith(f"_{metric_name(name)}")), key=len, default="")


def _parts(structures: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return groups of sites that share structures, also by way of other sites; the largest first, then by name."""
    from scipy.sparse.csgraph import connected_components

    sites = sorted(site for site in structures if structures[site])
    if not sites:
        return []
    linked = np.array([[not frozenset(structures[a]).isdisjoint(structures[b]) for b in sites] for a in sites])
    parts = group_by_key(zip(connected_components(linked)[1].tolist(), sites, strict=True))
    return sorted(parts.values(), key=lambda part: (-len(part), part))


def fit_effects(cells: Cells) -> dict[str, float]:
    r"""Return each site's effect :math:`u_k` in the additive model over the cells of linked sites.

    .. math:: \min \sum (y_{ks} - u_k - v_s)^2, \quad \sum_s v_s = 0

    A structure that only one site has does not influence the comparison: its :math:`v_s` takes up the residual.

    Example:
        >>> found = fit_effects({"A": {"s1": 0.8}, "B": {"s2": 0.6}, "C": {"s1": 0.7, "s2": 0.5}})
        >>> {site: round(value, 6) for site, value in found.items()}
        {'A': 0.7, 'B': 0.7, 'C': 0.6}
    """
    sites, names = sorted(cells), sorted({name for figures in cells.values() for name in figures})
    known = [(site, name, cells[site][name]) for site in sites for name in sorted(cells[site])]
    left = np.zeros((len(known) + 1, len(sites) + len(names)))
    for row, (site, name, _) in enumerate(known):
        left[row, [sites.index(site), len(sites) + names.index(name)]] = 1
    left[-1, len(sites) :] = 1
    solved = np.linalg.lstsq(left, np.array([*(value for _, _, value in known), 0.0]), rcond=None)[0]
    return dict(zip(sites, solved[: len(sites)].tolist(), strict=True))


def relative(losses: Cells) -> dict[str, float]:
    r"""Return each site's loss relative to the mean losses of its structures over the sites.

    .. math:: \tilde F_k = \frac{1}{|A_k|} \sum_{s \in A_k} F_{ks} / \bar F_s

    :math:`A_k` are the structures of site k, and :math:`\bar F_s` is the mean loss over the sites that have s; for a
    structure of a single site the ratio is 1. NaN: no loss of the site is known.

    Example:
        >>> found = relative({"A": {"s1": 0.2}, "B": {"s2": 0.4}, "C": {"s1": 0.3, "s2": 0.5}})
        >>> {site: round(value, 6) for site, value in found.items()}
        {'A': 0.8, 'B': 0.888889, 'C': 1.155556}
    """
    floored = {
        site: {name: max(v, LEAST_LOSS) for name, v in by_name.items() if math.isfinite(v)}
        for site, by_name in losses.items()
    }
    names = sorted({name for by_name in floored.values() for name in by_name})
    means = {name: average_known(by_name[name] for by_name in floored.values() if name in by_name) for name in names}
    return {site: average_known(by_name[name] / means[name] for name in by_name) for site, by_name in floored.items()}


def average_known(values: Iterable[float]) -> float:
    """Return the mean of those values that are finite; NaN if none is."""
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan
