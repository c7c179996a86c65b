r"""Compute intervals and p-values for a mean difference over seeds that were all tested on the same patients.

A difference depends on the seed and on the patients of the test splits. Over n seeds its mean has the variance

.. math:: V = A + B, \quad A = s^2 / n,

where :math:`s` is the standard deviation over the seeds and :math:`B` the part of the variance that all seeds share,
since they are tested on the same patients (:func:`shared_variance`). A has n - 1 degrees of freedom, and B about as
many as there are patients (:math:`\nu`). The ratio t of the difference to its standard error is therefore compared with
a mixture of two t distributions, with the shares of the variance as weights:
:math:`p = \frac{A}{V} P(|t_{n-1}| > t) + \frac{B}{V} P(|t_\nu| > t)`. The interval contains the values whose p is above
0.05, so that it excludes 0 exactly if p is below 0.05. Two seeds may be close to each other by chance, so that A seems
small; with two seeds, the weights are therefore the roots of the shares.

A single t distribution with intermediate degrees of freedom, as by Welch and Satterthwaite, gives too narrow intervals
with two or three seeds, the more so the smaller p is (``benchmarks/bench_intervals.py`` compares both). Cochran weights
critical values, while this module weights probabilities.

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

from fairflare.base.checks import refuse
from fairflare.core.statistics.intervals import LEVEL, ROUNDING, reach, remove_skew

POWER = 0.8  # power with which the smallest visible difference is detected

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Store mean differences over seeds, with standard errors and degrees of freedom; the arrays have one shape.

    Attributes:
        mean: mean difference over the seeds.
        error: standard error of ``mean``, the root of V.
        share: A / V, share of the variance over the seeds; 1 if the variance over patients is unknown.
        seeds_df, patients_df: degrees of freedom of A and of B.
        skew: skewness of the mean's distribution, through the choice of patients.
    """

    mean: Array
    error: Array
    share: Array
    seeds_df: int
    patients_df: Array
    skew: Array

    @property
    def p(self) -> Array:
        """Return two-sided p-values: 1 for equal figures, NaN for a difference whose standard error is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t = remove_skew(self.mean / self.error, self.skew)
        return np.where(np.abs(self.mean) <= ROUNDING, 1.0, np.where(self.error > ROUNDING, self.tails(t), np.nan))

    @property
    def ends(self) -> tuple[Array, Array]:
        """Return the ends of the confidence interval at :data:`LEVEL`; NaN where nothing varies."""
        below, above = reach(self.quantile(1 - LEVEL), self.skew)
        error = np.where(self.error > ROUNDING, self.error, np.nan)
        return self.mean - below * error, self.mean + above * error

    def tails(self, t: npt.ArrayLike) -> Array:
        """Return the probability of a ratio of mean to error farther from 0 than ``t >= 0`` if the true mean is 0."""
        from scipy.special import stdtr

        t = np.asarray(t, float)
        power = 0.5 if self.seeds_df == 1 else 1.0
        of_seeds, of_patients = self.share**power, (1 - self.share) ** power
        both = of_seeds * stdtr(self.seeds_df, -t) + of_patients * stdtr(self.patients_df, -t)
        return np.asarray(2 * both / (of_seeds + of_patients))

    def quantile(self, p: float) -> Array:
        """Return the t for which :meth:`tails` returns ``p``, in (0, 1)."""
        from scipy.special import stdtrit

        ends = [np.broadcast_to(stdtrit(df, 1 - p / 2), self.share.shape) for df in (self.seeds_df, self.patients_df)]
        for share, end in ((1, ends[0]), (0, ends[1])):
            if np.all(self.share == share):
                return end
        low, high = np.minimum(*ends), np.maximum(*ends)  # the quantile lies between those of both distributions
        for _ in range(60):
            middle = (low + high) / 2
            above = self.tails(middle) > p
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.asarray(high)

    def smallest(self, tests: int = 1) -> Array:
        """Return the smallest true difference that data of this kind detect with probability :data:`POWER`.

        The result is NaN where nothing varies.

        Args:
            tests: number of tests among which the p-value is corrected (:func:`holm`).
        """
        seen = (self.quantile((1 - LEVEL) / tests) + self.quantile(2 * (1 - POWER))) * self.error
        return np.where(self.error > ROUNDING, seen, np.nan)


def estimate(
    values: npt.ArrayLike,
    shared: npt.ArrayLike = np.nan,
    patients_df: npt.ArrayLike = np.inf,
    skew: npt.ArrayLike = 0.0,
) -> Estimate:
    """Estimate the mean over seeds of paired differences, or of any figure, with its uncertainty.

    Args:
        values: differences or figures of each seed, (..., seeds), finite.
        shared: result of :func:`shared_variance`, (...); NaN if unknown, and the uncertainty is that over seeds alone.
            With one seed, the uncertainty is that over the patients alone and concerns these models, not the method.
        patients_df: (...), degrees of freedom of ``shared``.
        skew: (...), skewness of the mean over draws of the patients.

    Raises:
        ValueError: there is one seed, and ``shared`` is unknown.
    """
    array = np.asarray(values, float)
    count = array.shape[-1]
    refuse({f"an interval needs at least 2 seeds, got {count}": count < 2 and np.isnan(shared).any()})
    of_seeds = array.var(-1, ddof=1) / count if count > 1 else np.zeros(array.shape[:-1])
    of_patients = np.nan_to_num(np.broadcast_to(np.asarray(shared, float), of_seeds.shape), nan=0.0)
    total = of_seeds + of_patients
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(of_patients > 0, of_seeds / total, 1.0)
    seeds_df = max(count - 1, 1)
    df = np.where(share < 1, np.broadcast_to(np.asarray(patients_df, float), of_seeds.shape), float(seeds_df))
    return Estimate(array.mean(-1), np.sqrt(total), share, seeds_df, df, np.asarray(skew, float) * (1 - share) ** 1.5)


def shared_variance(drawn: npt.ArrayLike) -> Array:
    """Estimate the variance of the mean over seeds that is due to the choice of patients alone.

    The estimate is the mean covariance of two seeds over the draws. The variance of the mean over seeds would be too
    large, since differences between the seeds' models on single patients are part of the variance over the seeds as
    well.

    Args:
        drawn: differences for resampled patients, (..., seeds, draws); a draw has the same patients for every seed; at
            least two draws.

    Returns:
        The variance, (...); 0 if the estimate would be negative. With one seed, the variance of this seed over the
        draws.
    """
    array = np.asarray(drawn, float)
    seeds, draws = array.shape[-2:]
    centred = array - array.mean(-1, keepdims=True)
    of_mean = np.square(centred.mean(-2)).sum(-1) / (draws - 1)
    if seeds == 1:
        return np.asarray(of_mean)
    of_each = np.square(centred).sum(-1).mean(-1) / (draws - 1)
    return np.asarray(np.maximum((seeds * of_mean - of_each) / (seeds - 1), 0.0))


def aggregate_sites(
    values: npt.ArrayLike, higher_is_better: bool, axis: int = -1, where: npt.ArrayLike = True
) -> dict[str, Array]:
    """Return average, population standard deviation and worst value over the sites that ``where`` selects.

    If no site is selected, average and standard deviation are NaN, and the worst value is infinite.
    """
    array, counts = np.asarray(values, float), np.asarray(where, bool)
    worst = (
        array.min(axis, where=counts, initial=np.inf)
        if higher_is_better
        else array.max(axis, where=counts, initial=-np.inf)
    )
    return {"average": array.mean(axis, where=counts), "std": array.std(axis, where=counts), "worst": worst}
