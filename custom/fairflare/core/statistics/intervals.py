r"""Compute intervals of shares and of paired differences, and the spread of figures without each part of the cases.

All functions take arrays and work element by element. For the mean of a skewed difference Student's ratio t of mean to
error is not enough: where the rare large differences are missing among few cases, the mean is too low and the error too
small. A difference is told from 0 only if t and Hall's transformed ratio both are far from 0, with the skewness
:math:`\gamma` of the mean's distribution: :math:`t + \gamma / 6 + \gamma t^2 / 3 + \gamma^2 t^3 / 27`.

Sources: Rao and Wu, "Resampling inference with complex survey data", JASA 1988; Satterthwaite, "An approximate
distribution of estimates of variance components", Biometrics Bulletin 1946; Hall, "On the removal of skewness by
transformation", Journal of the Royal Statistical Society B 1992.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

LEVEL = 0.95  # confidence level of intervals
FEW = 5  # least number of cases of a site or group for a verdict
LEAST = 20  # least number of draws of test cases from which a variance is computed
ROUNDING = 1e-12  # a difference, an error or a variance of at most this counts as 0: rounding of equal figures
Array = npt.NDArray[np.float64]


def wilson(hits: Array, count: Array, error: float) -> Array:
    """Return shares (hits of trials), each with Wilson's confidence interval.

    Args:
        hits, count: number of hits and number of trials of each share, (parts,).
        error: error probability, 1 minus the confidence level.

    Returns:
        (parts, 3): share, lower and upper end; NaN where ``count`` is 0.
    """
    z = -NormalDist().inv_cdf(error / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = hits / count
        middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
        reach = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return np.stack([share, middle - reach, middle + reach], 1)


def widen_draws(values: npt.ArrayLike, drawn: npt.ArrayLike, units: npt.ArrayLike) -> Array:
    r"""Rescale resampled values around the measured value, since draws of m patients vary too little.

    The standard deviation of draws is too small by the factor :math:`\sqrt{(m-1)/m}`.

    Args:
        values: measured values, (..., sites).
        drawn: values of resampled patients, (..., sites, draws).
        units: number of patients or images of each site, (sites,), above 1; inf: unknown.
    """
    count = np.asarray(units, float)[..., None]
    centre = np.asarray(values, float)[..., None]
    with np.errstate(invalid="ignore"):
        factor = np.where(np.isinf(count), 1.0, np.sqrt(count / (count - 1)))
    return np.asarray(centre + factor * (np.asarray(drawn, float) - centre))


def degrees(variances: npt.ArrayLike, units: npt.ArrayLike, draws: int) -> Array:
    """Return the degrees of freedom of a variance that is a sum over sites; a low, safe number.

    It is half of Satterthwaite's, as differences of few cases are not normally distributed: with all of it, skewed
    differences around 0 are called different in up to 12 of 100 tests (``benchmarks/bench_verdicts.py``).

    Args:
        variances: part of each site in the variance, (..., sites).
        units: number of patients or images of each site, (sites,), above 1; inf: unknown.
        draws: number of draws from which the variance was estimated, which limits the degrees of freedom.
    """
    parts = np.asarray(variances, float)
    of_sites = 2 * (np.square(parts) / (np.asarray(units, float) - 1)).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 / (np.where(of_sites > 0, of_sites / np.square(parts.sum(-1)), 0.0) + 1 / (draws - 1))


def skewness(drawn: npt.NDArray[np.floating]) -> Array:
    """Return the skewness of values along the last axis; 0 where they are equal."""
    off = drawn - drawn.mean(-1, keepdims=True)
    return np.asarray((off**3).mean(-1) / np.maximum(np.sqrt(np.square(off).mean(-1)), ROUNDING) ** 3)


def remove_skew(t: Array, skew: Array) -> Array:
    """Return the size of a ratio t of mean to error, or of Hall's transformed ratio if that is nearer to 0."""
    return np.minimum(np.abs(t), np.abs(t + skew / 6 + skew * t**2 / 3 + skew**2 * t**3 / 27))


def reach(limit: Array, skew: Array) -> tuple[Array, Array]:
    """Return how many errors an interval reaches to both sides: what :func:`remove_skew` maps to ``limit``."""
    bent = np.where(np.abs(skew) < 1e-6, 1.0, skew)  # of a smaller skewness the transformation moves nothing
    ends = [3 * sign * (np.cbrt(1 + bent * (sign * limit - bent / 6)) - 1) / bent for sign in (1, -1)]
    below, above = np.maximum(np.where(bent == skew, ends, limit), limit)
    return below, above


def paired_gain(gain: float, draws: Array, units: int) -> list[float]:
    """Return a gain, the ends of its interval, its two-sided p-value, and its standard error, from bootstrap draws.

    The estimate is that of ``fairflare compare`` for one pair of models.

    Args:
        gain: gain of one model over another on the same cases.
        draws: the gain on draws of the cases with replacement; an undefined gain (NaN) does not count.
        units: number of cases, ``>= 1``.

    Returns:
        five numbers. All but the first are NaN with one case, with fewer than :data:`LEAST` defined draws, or if the
        gain never varies; p is NaN with fewer than :data:`FEW` cases.
    """
    from scipy.special import stdtr, stdtrit

    known = draws[np.isfinite(draws)]
    wide = widen_draws([gain], known[None], [units if units > 1 else np.nan])[0]
    error = float(wide.std(ddof=1)) if len(known) >= LEAST else 0.0
    if not error > ROUNDING:
        return [gain, *[float("nan")] * 4]
    skew, df = skewness(wide), degrees([1.0], [units], len(known))
    below, above = reach(stdtrit(df, (1 + LEVEL) / 2), skew)
    p = 2 * float(stdtr(df, -remove_skew(np.array(gain / error), skew))) if units >= FEW else float("nan")
    return [gain, gain - error * float(below), gain + error * float(above), p, error]


def holm(p: npt.ArrayLike) -> Array:
    """Correct p-values for their number, so that in at most 5 % of families any is below 0.05 by chance.

    Args:
        p: p-values, (..., tests); each family of tests is along the last axis.
    """
    probabilities = np.asarray(p, float)
    order = np.argsort(probabilities, -1)
    scaled = np.take_along_axis(probabilities, order, -1) * np.arange(probabilities.shape[-1], 0, -1)
    stepped = np.minimum(np.maximum.accumulate(scaled, -1), 1.0)
    return np.take_along_axis(stepped, np.argsort(order, -1), -1)


def rescale_folds(without: npt.ArrayLike) -> Array:
    r"""Rescale figures measured without each part of the cases in turn, so that they spread as repeated draws would.

    The sample variance of the rescaled figures is the jackknife's, :math:`\frac{F - 1}{F} \sum_f (x_f - \bar x)^2`.

    Args:
        without: figures, (..., parts); the last axis is over the part that was left out.

    Source:
        Kott, "The delete-a-group jackknife", Journal of Official Statistics 2001.
    """
    estimates = np.asarray(without, float)
    parts = estimates.shape[-1]
    return np.asarray((parts - 1) / np.sqrt(parts) * (estimates - estimates.mean(-1, keepdims=True)))


def degrees_of_folds(parts: int, cases: float) -> float:
    """Return the degrees of freedom of a variance that is computed by :func:`rescale_folds`; a low, safe number.

    The number is at most half the number of parts, since a part has few cases of a group and their mean is not normally
    distributed. With this number, equal methods are called different in fewer than 5 of 100 comparisons
    (``benchmarks/bench_group_verdicts.py``).

    Args:
        parts: number of parts into which the cases are divided.
        cases: number of cases of the smallest group, above 1.
    """
    return min(parts // 2, cases - 1)
