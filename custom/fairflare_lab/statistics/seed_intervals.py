r"""Intervals and p-values for a mean difference over seeds, all of which were tested on the same patients.

A difference moves with the seed and with the patients of the test splits. Over n seeds its mean has the variance

.. math:: V = A + B, \quad A = s^2 / n,

:math:`s` the standard deviation over the seeds and :math:`B` what all seeds share, since they are tested on the same
patients (:func:`shared_variance`). A is known from n - 1 degrees of freedom, B from as many as there are patients. The
difference over its standard error is therefore looked up in a mixture of two t distributions, with the shares of the
variance as weights: :math:`p = \frac{A}{V} P(|t_{n-1}| > t) + \frac{B}{V} P(|t_\nu| > t)`. The interval holds the
values whose p is above 0.05, so that it leaves out 0 exactly where p is below 0.05. Two seeds may lie close to each
other by luck, and A seem small: with two, the weights are the roots of the shares.

Welch's and Satterthwaite's one t distribution of in-between degrees covers less than it says with two or three seeds,
the more so the smaller p is (``benchmarks/bench_intervals.py`` has both). Cochran weighs the critical values where we
weigh the probabilities.

All functions take arrays and work element by element.

Source:
    Cochran, "Approximate significance levels of the Behrens-Fisher test", Biometrics 1964; Holm, "A simple sequentially
    rejective multiple test procedure", Scandinavian Journal of Statistics 1979; Bloom, "Minimum detectable effects",
    Evaluation Review 1995.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairflare.core.statistics.intervals import LEVEL

POWER = 0.8  # of the smallest difference that is called visible
ROUNDING = 1e-12  # a mean difference below is none: what is left of equal figures

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Store mean differences and their certainty; the fields are arrays of one shape.

    Attributes:
        mean: over the seeds.
        error: its standard error, the root of V.
        share: A / V, of the seeds; 1 where nothing is known of the patients.
        seeds_df, patients_df: degrees of freedom of both parts.
    """

    mean: Array
    error: Array
    share: Array
    seeds_df: int
    patients_df: Array

    @property
    def p(self) -> Array:
        """Two-sided; 1 of equal figures, NaN of a difference that never scatters: that is no certainty."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(self.mean) / self.error
        known = np.where(self.error > ROUNDING, self.tails(t), np.nan)
        return np.where(np.abs(self.mean) <= ROUNDING, 1.0, known)

    @property
    def half(self) -> Array:
        """Half the width of the interval at :data:`LEVEL`; NaN where :attr:`p` is."""
        return np.where(np.isnan(self.p), np.nan, self.quantile(1 - LEVEL) * self.error)

    def tails(self, t: npt.ArrayLike) -> Array:
        """Return the probability of a value farther from 0 than ``t >= 0``."""
        from scipy.special import stdtr

        t = np.asarray(t, float)
        power = 0.5 if self.seeds_df == 1 else 1.0
        of_seeds, of_patients = self.share**power, (1 - self.share) ** power
        both = of_seeds * stdtr(self.seeds_df, -t) + of_patients * stdtr(self.patients_df, -t)
        return np.asarray(2 * both / (of_seeds + of_patients))

    def quantile(self, p: float) -> Array:
        """Return the t whose :meth:`tails` are ``p``, in (0, 1)."""
        from scipy.special import stdtrit

        ends = [np.broadcast_to(stdtrit(df, 1 - p / 2), self.share.shape) for df in (self.seeds_df, self.patients_df)]
        for share, end in ((1, ends[0]), (0, ends[1])):
            if np.all(self.share == share):
                return end
        low, high = np.minimum(*ends), np.maximum(*ends)  # between those of both distributions
        for _ in range(60):
            middle = (low + high) / 2
            above = self.tails(middle) > p
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.asarray(high)

    def smallest(self, tests: int = 1) -> Array:
        """Return the smallest true difference that such data would show in :data:`POWER` of all cases.

        NaN as :attr:`p`.

        Args:
            tests: among so many the first one must stand by itself (:func:`holm`).
        """
        seen = (self.quantile((1 - LEVEL) / tests) + self.quantile(2 * (1 - POWER))) * self.error
        return np.where(np.isnan(self.p), np.nan, seen)


def estimate(values: npt.ArrayLike, shared: npt.ArrayLike = np.nan, patients_df: npt.ArrayLike = np.inf) -> Estimate:
    """Estimate the mean of paired differences, or of any figure.

    Args:
        values: (..., seeds), finite.
        shared: (...), :func:`shared_variance`; NaN: not known, and the estimate is over seeds alone. Of one seed it is
            over the patients alone: of these models, not of the method.
        patients_df: (...), degrees of freedom of ``shared``.

    Raises:
        ValueError: one seed, and nothing is known of the patients.
    """
    found = np.asarray(values, float)
    count = found.shape[-1]
    if count < 2 and np.isnan(shared).any():
        raise ValueError(f"an interval needs at least 2 seeds, got {count}")
    of_seeds = found.var(-1, ddof=1) / count if count > 1 else np.zeros(found.shape[:-1])
    of_patients = np.nan_to_num(np.broadcast_to(np.asarray(shared, float), of_seeds.shape), nan=0.0)
    total = of_seeds + of_patients
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(of_patients > 0, of_seeds / total, 1.0)
    df = np.broadcast_to(np.asarray(patients_df, float), of_seeds.shape)
    seeds_df = max(count - 1, 1)
    return Estimate(found.mean(-1), np.sqrt(total), share, seeds_df, np.where(share < 1, df, float(seeds_df)))


def shared_variance(drawn: npt.ArrayLike) -> Array:
    """Estimate the variance of the mean over seeds that stems from the patients alone.

    It is the mean covariance of two seeds over the draws. (The variance of the mean over seeds would count twice what
    one seed's model does on one patient and another's does not: that is in the scatter over the seeds as well.)

    Args:
        drawn: (..., seeds, draws) differences, the same patients in a draw for every seed; at least two draws.

    Returns:
        (...), 0 where it would be negative; of one seed its variance.
    """
    found = np.asarray(drawn, float)
    seeds, draws = found.shape[-2:]
    centred = found - found.mean(-1, keepdims=True)
    of_mean = np.square(centred.mean(-2)).sum(-1) / (draws - 1)
    if seeds == 1:
        return np.asarray(of_mean)
    of_each = np.square(centred).sum(-1).mean(-1) / (draws - 1)
    return np.asarray(np.maximum((seeds * of_mean - of_each) / (seeds - 1), 0.0))


def widened(values: npt.ArrayLike, drawn: npt.ArrayLike, units: npt.ArrayLike) -> Array:
    r"""Put draws at their due distance: those of m patients scatter by :math:`\sqrt{(m-1)/m}` too little.

    Args:
        values: (..., sites) as measured.
        drawn: (..., sites, draws).
        units: (sites,) number of patients or images of each, above 1; inf: not known.

    Source:
        Rao and Wu, "Resampling inference with complex survey data", JASA 1988.
    """
    count = np.asarray(units, float)[..., None]
    centre = np.asarray(values, float)[..., None]
    with np.errstate(invalid="ignore"):
        factor = np.where(np.isinf(count), 1.0, np.sqrt(count / (count - 1)))
    return np.asarray(centre + factor * (np.asarray(drawn, float) - centre))


def degrees(variances: npt.ArrayLike, units: npt.ArrayLike, draws: int) -> Array:
    """Give the degrees of freedom of a variance that is a sum over sites.

    Args:
        variances: (..., sites), the part of each.
        units: (sites,) number of patients or images of each, above 1; inf: not known.
        draws: number of draws, which know it no better than that.

    Source:
        Satterthwaite, "An approximate distribution of estimates of variance components", Biometrics Bulletin 1946.
    """
    parts = np.asarray(variances, float)
    of_sites = (np.square(parts) / (np.asarray(units, float) - 1)).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 / (np.where(of_sites > 0, of_sites / np.square(parts.sum(-1)), 0.0) + 1 / (draws - 1))


def holm(p: npt.ArrayLike) -> Array:
    """Correct p-values for their number, so that one of them is below 0.05 by luck in 5 % of families at most.

    Args:
        p: (..., tests).
    """
    found = np.asarray(p, float)
    order = np.argsort(found, -1)
    factors = found.shape[-1] - np.arange(found.shape[-1])
    stepped = np.minimum(np.maximum.accumulate(np.take_along_axis(found, order, -1) * factors, -1), 1.0)
    corrected = np.empty_like(stepped)
    np.put_along_axis(corrected, order, stepped, -1)
    return corrected


def of_sites(
    values: npt.ArrayLike, higher_is_better: bool, axis: int = -1, where: npt.ArrayLike = True
) -> dict[str, Array]:
    """Give average, population standard deviation and worst along an axis, of the sites that ``where`` says.

    Where it says none, the first two are NaN, and the worst is infinite.
    """
    found, of = np.asarray(values, float), np.asarray(where, bool)
    worst = (
        found.min(axis, where=of, initial=np.inf) if higher_is_better else found.max(axis, where=of, initial=-np.inf)
    )
    return {"average": found.mean(axis, where=of), "std": found.std(axis, where=of), "worst": worst}
