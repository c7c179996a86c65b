"""Stack the values of runs in one array, from which every comparison computes a figure and its certainty."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fairflare.base.cases.resampling import UNITS
from fairflare.base.checks import group_by_key
from fairflare.core.statistics.intervals import LEAST, degrees, skewness, widen_draws
from fairflare.reporting.documents import RunResults
from fairflare_lab.statistics.seed_intervals import Estimate, estimate, shared_variance

VALUE, DRAWS = 0, slice(1, None)  # indices of the last axis of a value array

Array = npt.NDArray[np.floating]
Units: TypeAlias = tuple[str, int | None]  # unit that a site drew, and its number of such units
Draws: TypeAlias = tuple[Units, Sequence[float]]  # unit of the draws, and the metric on each draw
Row: TypeAlias = Mapping[int, Mapping[str, tuple[float, Draws | None]]]  # value and draws by seed and site
Figure: TypeAlias = Callable[[Array], Array]  # (rows, seeds, sites, 1 + draws) -> (seeds, 1 + draws)


class Contrast(NamedTuple):
    """Store a figure over the seeds, and how far the choice of test patients moves the figure.

    Attributes:
        values: values of the figure by seed, all finite.
        shared: variance due to the choice of test patients, which all seeds share; NaN if not known.
        df: degrees of freedom of ``shared``.
        skew: skewness of the mean over the seeds, through the choice of test patients.
    """

    values: Mapping[int, float]
    shared: float = math.nan
    df: float = math.inf
    skew: float = 0.0

    @classmethod
    def measure(cls, values: Mapping[int, float], drawn: Array, df: float) -> Contrast:
        """Return a figure with its variance over ``drawn`` (seeds, draws); NaN variance if too few draws are finite."""
        usable = drawn[:, np.isfinite(drawn).all(0)]
        if usable.shape[1] < LEAST:
            return cls(values)
        return cls(values, float(shared_variance(usable)), df, float(skewness(usable.mean(0))))

    @property
    def estimate(self) -> Estimate:
        return estimate([self.values[seed] for seed in sorted(self.values)], self.shared, self.df, self.skew)


@dataclass(frozen=True)
class Runs:
    """Store the values of several rows, paired by seed and site.

    Attributes:
        values: (rows, seeds, sites, 1 + draws): the measured value, then values on draws of the test patients; NaN
            where a value is missing.
        seeds, sites: seeds and sites along the axes of ``values``.
        units: units of the draws, by site, for sites where all runs have the same draws.
    """

    values: Array
    seeds: Sequence[int]
    sites: Sequence[str]
    units: Mapping[str, Units]

    @classmethod
    def stack(cls, rows: Sequence[Row]) -> Runs:
        """Stack rows in an array; draws of a site with one patient, or with different draws by run, are not used."""
        seeds = sorted({seed for row in rows for seed in row})
        sites = sorted({site for row in rows for by_site in row.values() for site in by_site})
        kinds = group_by_key(
            (site, None if draws is None else (draws[0], len(draws[1]))) for *_, site, _, draws in _entries(rows)
        )
        same = {site: kind for site in sites if len({*kinds[site]}) == 1 and (kind := kinds[site][0])}
        units = {site: unit for site, (unit, _) in same.items() if unit[1] != 1}
        many = max((count for _, count in same.values()), default=0)
        values = np.full((len(rows), len(seeds), len(sites), 1 + many), math.nan)
        for rank, seed, site, value, draws in _entries(rows):
            cell = values[rank, seeds.index(seed), sites.index(site)]
            cell[VALUE] = value
            if draws is not None and site in units:
                cell[1 : 1 + len(draws[1])] = draws[1]
        counts = [units[site][1] or math.inf if site in units else math.inf for site in sites]
        values[..., DRAWS] = widen_draws(values[..., VALUE], values[..., DRAWS], counts)
        return cls(values, seeds, sites, units)

    def select_site(self, site: str) -> Runs:
        """Return the same runs with the values of a single site only."""
        rank = self.sites.index(site)
        units = {site: self.units[site]} if site in self.units else {}
        return replace(self, values=self.values[:, :, [rank]], sites=[site], units=units)

    def contrast(self, figure: Figure) -> Contrast:
        """Return a figure of the runs, over the seeds for which it is finite.

        How far the choice of patients moves the figure is known only if all sites have draws. For the degrees of
        freedom the variance is split by site, with draws of one site and measured values of the other sites.
        """
        figures = _quiet(figure, self.values)
        has = np.isfinite(figures[:, VALUE])
        values = {seed: float(figures[k, VALUE]) for k, seed in enumerate(self.seeds) if has[k]}
        if not values or len(self.units) < len(self.sites):
            return Contrast(values)
        drawn, counts, parts = figures[has][:, DRAWS], [self.units[site][1] or math.inf for site in self.sites], [1.0]
        if len(self.sites) > 1:
            by_site = [_quiet(figure, self._draw_site(rank)) for rank in range(len(self.sites))]
            parts = [float(np.nanvar(one[has][:, DRAWS].mean(0))) for one in by_site]
        return Contrast.measure(values, drawn, float(degrees(parts, counts, drawn.shape[1])))

    def _draw_site(self, rank: int) -> Array:
        """Return the values with draws of one site, and with measured values in place of the other sites' draws."""
        return np.where((np.arange(len(self.sites)) == rank)[:, None], self.values, self.values[..., :1])


def _quiet(figure: Figure, values: Array) -> Array:
    """Return a figure, NaN where a seed or a model has no value, without NumPy's warning about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return figure(values)


def _entries(rows: Sequence[Row]) -> Iterator[tuple[int, int, str, float, Draws | None]]:
    for rank, row in enumerate(rows):
        for seed, by_site in row.items():
            for site, (value, draws) in by_site.items():
                yield rank, seed, site, value, draws


def draws_of(run: RunResults, site: str, metric: str) -> Draws | None:
    """Return a site's values of a metric on its draws, with the draws' unit; ``None`` for no draws of this metric."""
    drawn = next((v for v in run.vectors if v.site == site and v.metric == metric and v.unit in UNITS), None)
    if drawn is None:
        return None
    return (drawn.unit, drawn.count), [math.nan if v is None else v for v in drawn.values]
