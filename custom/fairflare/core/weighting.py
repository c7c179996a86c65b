"""Compute aggregation weights from the sites' reports, by one rule for each method.

Every rule is a pure function of dicts keyed by site name. The weights that a function returns are in sorted order of
the sites, ``>= 0`` and sum to 1 unless its docstring says otherwise; no argument is changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, get_args

from fairflare.base import checks

NonFinite: TypeAlias = Literal["raise", "mean", "median"]

#: Sites' values with a sum at or below this one carry no information about the sites: all weights are then equal.
MIN_SUM = 1e-12
CKA_RANGE = (-1.01, 1.5)  # range of CKA estimates: an unbiased one may lie outside of [0, 1] and is then clipped
#: Rounding tolerance: a weight that exceeds its bound by no more than this is not cut.
CAP_TOLERANCE = 1e-12
#: Floor of a measured sharpness or loss before its logarithm, as in FedISM+.
POWER_FLOOR = 1e-10


def uniform_weights(sites: Iterable[str]) -> dict[str, float]:
    """Return aggregation weights that are the same for every site.

    Raises:
        ValueError: no site.
    """
    names = sorted(checks.not_empty("the sites to weight", set(sites)))
    return dict.fromkeys(names, 1.0 / len(names))


def normalise(
    values: Mapping[str, float],
    fallback: Mapping[str, float] | None = None,
    *,
    non_finite: NonFinite = "raise",
) -> dict[str, float]:
    """Return values scaled to sum 1, in float64.

    Args:
        values: any numbers by site; negative ones count as 0.
        fallback: weights in place of uniform ones when the values sum to ``MIN_SUM`` or less; same sites. It
            is normalised itself.
        non_finite: treatment of NaN and infinite values: ``"raise"`` an error, or replace them by the ``"mean"`` or
            ``"median"`` of the finite values (if no value is finite: uniform weights).

    Returns:
        Weights by site.

    Raises:
        ValueError: no site, a non-finite value under ``"raise"`` (names the site), or other sites in
            ``fallback``.
    """
    checks.choice("non_finite", non_finite, get_args(NonFinite))
    clipped = {site: max(value, 0.0) for site, value in _replace_non_finite(values, non_finite).items()}
    largest = max(clipped.values())
    if largest > 1e150:  # scaling keeps the sum finite
        clipped = {site: value / largest for site, value in clipped.items()}
    total = math.fsum(clipped.values())
    if total > MIN_SUM:
        return {site: value / total for site, value in clipped.items()}
    if fallback is None:
        return uniform_weights(clipped)
    checks.same_names("fallback", fallback, "values", clipped)
    return normalise(fallback)


def ramp(current_round: int, num_rounds: int) -> float:
    r"""Return the share of their full weight that unlabelled images have in a round, in (0, 1].

    .. math:: \lambda(t) = \exp(-5 (1 - \min(t, R) / R)^2), \quad R = \lceil 0.3 T \rceil

    Args:
        current_round: number t of the round, from 0.
        num_rounds: number T of rounds.

    Source:
        Tarvainen and Valpola, NeurIPS 2017; R as in FedIRM's code (Liu et al., MICCAI 2021): 30 of 100 rounds.
    """
    rising = max(1, math.ceil(0.3 * num_rounds))
    return math.exp(-5 * (1 - min(current_round, rising) / rising) ** 2)


def counted_samples(labelled: float, unlabelled: float, share: float) -> float:
    """Return the number of samples that a site is weighed by: labelled + share * kappa * unlabelled, with kappa = 0.5.

    Args:
        labelled, unlabelled: numbers of images, ``>= 0``.
        share: the round's :func:`ramp`, in (0, 1].

    Source:
        The weight is FairFlare's own; neither mean teacher nor FixMatch has one by site.
    """
    return labelled + share * 0.5 * unlabelled


def layer_weights(
    cka: Mapping[str, Mapping[str, float]], *, clip_min: float = 0.0, clip_max: float = 1.0
) -> dict[str, dict[str, float]]:
    r"""Return weights per layer and site from the similarity of a local model's features to the average model's.

    .. math:: \rho_k^m = (1 - \tilde\delta_k^m) / \sum_i (1 - \tilde\delta_i^m), \quad
              \tilde\delta = \mathrm{clip}(\delta, \text{clip\_min}, \text{clip\_max})

    A score that is NaN or infinite is replaced by the mean of the site's finite scores; at a site without
    any, by the mean over the sites that have one at that layer; if no site has any, the weights are uniform.
    A layer whose dissimilarities sum to ``MIN_SUM`` or less (all scores 1) has uniform weights.

    Args:
        cka: ``{site: {layer: delta}}``, similarity (CKA) of the local model with the anchor on the site's own images,
            measured after local training; the same layers at every site. The weights depend on ``1 - delta``, which
            loses digits if delta is near 1: :func:`dissimilarity_weights` takes ``1 - delta`` as measured.
        clip_min, clip_max: limits of delta, ``0 <= clip_min < clip_max <= 1``. 0 and 1 are Eq. (5) as
            printed; the authors' code has 1e-4 and 0.99.

    Returns:
        ``{layer: {site: rho}}``, layers in the order of the first site; sums to 1 in every layer.

    Raises:
        ValueError: no site, no layer, sites with different layers (names them), limits out of range, or a delta
            that is no CKA: a finite one lies in :data:`CKA_RANGE`.

    Source:
        Yan et al., MICCAI 2024 (Fed-LWR), Eq. (5). The authors' code adds 1e-9 to the sum; ours does not.

    Example:
        >>> layer_weights({"A": {"conv": 0.75}, "B": {"conv": 0.25}})
        {'conv': {'A': 0.25, 'B': 0.75}}
    """
    measured = {
        site: {layer: 1.0 - _delta(site, layer, delta) for layer, delta in scores.items()}
        for site, scores in cka.items()
    }
    return dissimilarity_weights(measured, clip_min=clip_min, clip_max=clip_max)


def _delta(site: str, layer: str, value: float) -> float:
    where = f"delta of site {site!r}, layer {layer!r}"
    delta = checks.real(where, value)
    return checks.number(where, delta, low=CKA_RANGE[0], high=CKA_RANGE[1]) if math.isfinite(delta) else delta


def dissimilarity_weights(
    dissimilarity: Mapping[str, Mapping[str, float]], *, clip_min: float = 0.0, clip_max: float = 1.0
) -> dict[str, dict[str, float]]:
    """Return the weights of :func:`layer_weights`, from ``1 - delta`` itself.

    ``1 - delta`` keeps its digits when delta is close to 1.

    Args:
        dissimilarity: ``{site: {layer: 1 - delta}}``; the same layers at every site.
        clip_min, clip_max: limits of *delta*, as in :func:`layer_weights`.

    Returns:
        ``{layer: {site: rho}}``; degenerate cases and errors as in :func:`layer_weights`.
    """
    clip_min = checks.number("clip_min", clip_min, low=0, below=1)
    clip_max = checks.number("clip_max", clip_max, above=clip_min, high=1)
    layers = _check_same_layers(dissimilarity)
    sites = sorted(dissimilarity)
    finite = {site: {layer: float(d) for layer, d in dissimilarity[site].items() if math.isfinite(d)} for site in sites}
    site_mean = {site: statistics.fmean(scores.values()) for site, scores in finite.items() if scores}

    weights = {}
    for layer in layers:
        present = [finite[site][layer] for site in sites if layer in finite[site]]
        others = statistics.fmean(present or site_mean.values() or [0.0])
        scores = {site: finite[site].get(layer, site_mean.get(site, others)) for site in sites}
        weights[layer] = normalise({s: min(max(d, 1.0 - clip_max), 1.0 - clip_min) for s, d in scores.items()})
    return weights


def power_weights(values: Mapping[str, float], q: float) -> dict[str, float]:
    r"""Return weights in proportion to a power of each site's sharpness or loss, FedISM+'s SAGA.

    .. math:: \tilde w_k = \tilde x_k^q / \sum_j \tilde x_j^q, \quad \tilde x_k = \max(x_k, 10^{-10})

    computed as a softmax of ``q log x``. A non-finite value counts as the median of the finite ones.

    Args:
        values: sharpness S or perturbed loss L by site, of the *received* model, measured before local
            training.
        q: exponent, ``>= 0``; 0 gives uniform weights, 2 is FedISM's default.

    Returns:
        Weights by site; uniform when every value is at the floor.

    Raises:
        ValueError: no site, or q out of range.

    Source:
        Wu et al. (FedISM+), the normalisation of SAGA. Their code adds 1e-10 after a first normalisation.

    Example:
        >>> power_weights({"A": 3.0, "B": 1.0}, 0)
        {'A': 0.5, 'B': 0.5}
    """
    q = checks.number("q", q, low=0)
    logs = {site: q * math.log(max(x, POWER_FLOOR)) for site, x in _replace_non_finite(values, "median").items()}
    highest = max(logs.values())
    return normalise({site: math.exp(log - highest) for site, log in logs.items()})


def tilted_weights(shares: Mapping[str, float], losses: Mapping[str, float], tilt: float) -> dict[str, float]:
    r"""Return weights that grow exponentially with the loss: TERM's, and FedEBA+'s with tilt = 1 / tau.

    .. math:: a_k = p_k e^{t F_k} / \sum_j p_j e^{t F_j}

    Args:
        shares: p of each site, ``>= 0``.
        losses: F of the received model; one that is not finite counts as the mean of the finite ones.
        tilt: t, finite; 0: the shares, below 0: sites with a lower loss weigh more.

    Source:
        Li et al., ICLR 2021 (TERM); Wang et al., arXiv 2301.12407 (FedEBA+).

    Example:
        >>> tilted_weights({"A": 0.5, "B": 0.5}, {"A": 2.0, "B": 1.0}, 0)
        {'A': 0.5, 'B': 0.5}
    """
    exponents = {site: tilt * loss for site, loss in _replace_non_finite(losses, "mean").items()}
    highest = max(exponents.values())
    return normalise({site: shares[site] * math.exp(exponent - highest) for site, exponent in exponents.items()})


def proportional_weights(
    shares: Mapping[str, float], losses: Mapping[str, float], bound: float, least: float
) -> dict[str, float]:
    r"""Return weights that grow as a loss nears its bound: the slope of PropFair's :math:`-\sum_k p_k \log(M - F_k)`.

    .. math:: a_k \propto p_k / \max(M - F_k, \epsilon)

    Args:
        shares: p of each site, ``>= 0``.
        losses: F of the received model; one that is not finite counts as the mean of the finite ones.
        bound: M, above the losses of all sites.
        least: epsilon, ``> 0``. Losses above M - epsilon have one and the same weight, the largest.

    Source:
        Zhang et al., TMLR 2023; beyond M - epsilon the ``huber`` form of their code.

    Example:
        >>> proportional_weights({"A": 0.5, "B": 0.5}, {"A": 1.75, "B": 1.25}, 2.0, 0.2)
        {'A': 0.75, 'B': 0.25}
    """
    return normalise({
        site: shares[site] / max(bound - loss, least) for site, loss in _replace_non_finite(losses, "mean").items()
    })  # fmt: skip


def blended_weights(
    shares: Mapping[str, float], parts: Iterable[tuple[float, Mapping[str, float]]]
) -> dict[str, float]:
    r"""Return a weighted sum of several shares of each site, the rule of FedCostWAvg and FedPIDAvg.

    .. math:: a_k = \sum_i c_i \, x_{ik} / \sum_j x_{ij}

    Args:
        shares: shares by site, used for a part whose numbers sum to 0.
        parts: c, with a sum of 1, and x by site; a negative x counts as 0, one that is not finite as the mean of the
            finite ones.

    Example:
        >>> blended_weights({"A": 0.5, "B": 0.5}, [(0.5, {"A": 3.0, "B": 1.0}), (0.5, {"A": -1.0, "B": 0.0})])
        {'A': 0.625, 'B': 0.375}
    """
    parts_by_site = [(part, normalise(values, shares, non_finite="mean")) for part, values in parts]
    return {site: math.fsum(part * share_of[site] for part, share_of in parts_by_site) for site in sorted(shares)}


def moving_average(weights: Mapping[str, float], previous: Mapping[str, float] | None, beta: float) -> dict[str, float]:
    r"""Return the exponential moving average of weights, by site name.

    .. math:: w_k \leftarrow \beta \tilde w_k + (1 - \beta) w_k

    Args:
        weights: this round's weights of the sites that took part.
        previous: result of this function in the last round; None or empty at the first use.
        beta: share of this round, in [0, 1].

    Returns:
        The new average, to be given as ``previous`` in the next round: sites that took part are updated (a new site
        starts at its weight), absent sites keep their entry. The average need not sum to 1; the weights to use are
        ``normalise({site: memory[site] for site in weights})``.

    Raises:
        ValueError: beta out of range, or a non-finite or negative entry (names the site).
    """
    beta = checks.number("beta", beta, low=0, high=1)
    memory = checks.numbers("previous weight", previous or {}, low=0)
    for site, new in checks.numbers("weight", weights, low=0).items():
        memory[site] = beta * new + (1.0 - beta) * memory[site] if site in memory else new
    return dict(sorted(memory.items()))


def rescue_weights(rf: Mapping[str, float]) -> dict[str, float]:
    r"""Return weights in proportion to the rescue factor, Fed-MAS.

    .. math:: a_k = RF_k / \sum_j RF_j

    Args:
        rf: rescue factor by site, ``>= 0``. A factor that is not finite counts as the mean of the finite factors.

    Returns:
        Weights by site; uniform when every factor is 0.

    Raises:
        ValueError: no site, or a negative factor (names the site).

    Source:
        Elbatel et al., DeCaF @ MICCAI 2023 (Fed-MAS), Eq. (5).

    Example:
        >>> rescue_weights({"A": 3.0, "B": 1.0})
        {'A': 0.75, 'B': 0.25}
    """
    checks.numbers("rescue factor", {site: value for site, value in rf.items() if math.isfinite(value)}, low=0)
    return normalise(rf, non_finite="mean")


def fedga_weights(
    weights: Mapping[str, float], gaps: Mapping[str, float], step: float, *, centre: bool = True
) -> dict[str, float]:
    r"""Return one step of generalisation adjustment, FedGA.

    .. math:: a_k \leftarrow a_k + d\,(G_k - \bar G) / \max_j |G_j - \bar G|

    then clipped to [0, 1] and normalised.

    Args:
        weights: ``a_k`` of the round before, by site; ``>= 0``, sum 1.
        gaps: ``G_k`` of the sites that took part: loss of the aggregated model minus loss of the site's own
            model, on the site's data. A non-finite one counts as the mean, so that its weight does not move.
        step: d, ``>= 0``; 0.05 / K times the share of rounds left in FedISM's re-implementation.
        centre: subtract the mean gap, as in the paper; False is the authors' published code.

    Returns:
        The new weights of all sites, sum 1. An absent site keeps its weight; the sites that took part share the sum of
        their former weights. A new site enters with 1 / K. If all gaps are equal, no weight changes.

    Raises:
        ValueError: no site, a weight or step out of range, or weights that do not sum to 1.
    """
    checks.not_empty("the gaps", gaps)
    step = checks.number("step", step, low=0)
    memory = checks.shares(weights) if weights else {}
    new = set(gaps) - set(memory)
    if new:
        memory = normalise(memory | dict.fromkeys(new, 1.0 / (len(memory) + len(new))))

    finite = {site: float(gap) for site, gap in gaps.items() if math.isfinite(gap)}
    mean = statistics.fmean(finite[site] for site in sorted(finite)) if finite and centre else 0.0
    pulls = {site: finite[site] - mean if site in finite else 0.0 for site in sorted(gaps)}
    largest = max(map(abs, pulls.values()))
    # Equal gaps leave deviations of rounding size, which the division would turn into a full step.
    if largest <= 1e-12 * max((abs(gap) for gap in finite.values()), default=0.0):
        return dict(sorted(memory.items()))
    moved = {site: min(max(memory[site] + step * pull / largest, 0.0), 1.0) for site, pull in pulls.items()}
    return update_share(memory, moved)


def update_share(memory: Mapping[str, float], fresh: Mapping[str, float]) -> dict[str, float]:
    """Return the remembered weights; the sites in ``fresh`` divide the sum of their own weights anew.

    Sites that are not in ``fresh`` keep their weights.

    Args:
        memory: weight of each site, ``>= 0``; includes all sites of ``fresh``.
        fresh: number of each site; the sum is shared in proportion to these numbers, of which a negative one counts as
            0. If all are 0, the shares are equal.
    """
    held = math.fsum(memory[site] for site in fresh)
    return dict(sorted({**memory, **{site: held * share for site, share in normalise(fresh).items()}}.items()))


def capped_weights(weights: Mapping[str, float], bound: float | Mapping[str, float]) -> dict[str, float]:
    r"""Return weights of which none exceeds its bound; the excess goes to other sites in proportion to their weights.

    .. math:: w'_k = \min(b_k, c\,w_k), \quad c \ge 1 \text{ such that } \textstyle\sum_k w'_k = 1

    Weights above their bound are set to the bound and the others are scaled to share the rest, until none exceeds its
    bound. The result is the vector on the capped simplex that is nearest to the weights in relative entropy.

    Args:
        weights: by site, finite, ``>= 0``, sum 1 within 1e-6.
        bound: largest share of a site, in (0, 1], or one bound for each site. A bound below 1 / K cannot hold for all
            sites and counts as 1 / K.

    Returns:
        New weights in the order given; the same values, bit by bit, if none exceeds its bound by more than 1e-12. With
        one bound for all sites the order of the weights by size is kept. If only sites of weight 0 are left to take the
        excess, they share it equally.

    Raises:
        ValueError: no site, a weight out of range, another sum, a bound out of range, or none for a site.

    Source:
        Warmuth and Kuzmin, "Randomized Online PCA Algorithms ...", JMLR 9 (2008), capping algorithm (Algorithm 4).

    Example:
        >>> capped_weights({"A": 0.75, "B": 0.125, "C": 0.125}, 0.5)
        {'A': 0.5, 'B': 0.25, 'C': 0.25}
    """
    given = checks.shares(weights)
    if not isinstance(bound, Mapping):
        bound = dict.fromkeys(given, bound)
    elif bound.keys() != given.keys():
        checks.same_names("the bounds", bound, "the weights", given)
    feasible = {most: feasible_bound(len(given), most) for most in set(bound.values())}
    bounds = {site: feasible[bound[site]] for site in given}
    if all(weight <= bounds[site] + CAP_TOLERANCE for site, weight in given.items()):
        return given
    capped_by_site, capped = dict(given), set[str]()
    while len(capped) < len(given):
        free = {site: weight for site, weight in given.items() if site not in capped}
        rest, total = max(1.0 - math.fsum(bounds[site] for site in capped), 0.0), math.fsum(free.values())
        for site, weight in free.items():
            # Divide before multiplying, since the sum may be as small as the smallest floating-point number.
            capped_by_site[site] = weight / total * rest if total > 0 else rest / len(free)
        above = {site for site in free if capped_by_site[site] > bounds[site]}
        if not above:
            break
        capped_by_site.update({site: bounds[site] for site in above})
        capped |= above
    return capped_by_site


def excess_of(weights: Mapping[str, float]) -> float:
    r"""Return the sum of the weights' excesses over the equal share, :math:`\sum_k \max(0, w_k - 1/K)`, in [0, 1).

    The sum is the distance (total variation) to equal weights: f sites of K hold at most f / K plus this sum.
    """
    equal = 1.0 / (len(weights) or len(checks.not_empty("the weights", weights)))
    return math.fsum(max(weight - equal, 0.0) for weight in weights.values())


def tempered_weights(weights: Mapping[str, float], excess: float) -> dict[str, float]:
    r"""Move weights towards equal ones until no group of sites holds more than its equal share and a bound.

    .. math:: w'_k = \tfrac1K + \min\Bigl(1, \frac{e}{\sum_j \max(0, w_j - 1/K)}\Bigr) (w_k - \tfrac1K)

    so that any f of the K sites hold at most f / K + e together.

    Args:
        weights: by site, finite, ``>= 0``, sum 1 within 1e-6.
        excess: e, in (0, 1].

    Returns:
        New weights in the order given and in the same order by size; the same values, bit by bit, if they exceed the
        bound by no more than 1e-12.

    Raises:
        ValueError: no site, a weight out of range, another sum, or the bound out of range.

    Example:
        >>> tempered_weights({"A": 1.0, "B": 0.0, "C": 0.0, "D": 0.0}, 0.25)
        {'A': 0.5, 'B': 0.16666666666666669, 'C': 0.16666666666666669, 'D': 0.16666666666666669}
    """
    given = checks.shares(weights)
    most, exceeding = float(checks.number("excess", excess, above=0, high=1)), excess_of(given)
    if exceeding <= most + CAP_TOLERANCE:
        return given
    equal = 1.0 / len(given)
    return {site: equal + most / exceeding * (weight - equal) for site, weight in given.items()}


def mixed(weights: Mapping[str, float], share: float) -> dict[str, float]:
    r"""Return weights moved towards uniform ones.

    .. math:: w'_k = (1 - m)\, w_k + m / K

    Args:
        weights: by site, finite, ``>= 0``, sum 1.
        share: m, in [0, 1]; 0 changes nothing, bit by bit, 1 gives 1 / K.

    Returns:
        Weights by site, sum 1, none below m / K.

    Raises:
        ValueError: no site, a weight out of range, another sum, or share out of range.

    Example:
        >>> mixed({"A": 0.75, "B": 0.25}, 0.5)
        {'A': 0.625, 'B': 0.375}
    """
    share = checks.number("share", share, low=0, high=1)
    given = checks.shares(weights)
    return {site: (1.0 - share) * weight + share / len(given) for site, weight in given.items()}


def feasible_bound(num_sites: int, bound: float) -> float:
    """Return the effective bound on a site's weight: ``bound``, or 1 / K if that is larger, as weights sum to 1.

    Args:
        num_sites: number of sites K, ``>= 1``.
        bound: largest weight of a site, in (0, 1].
    """
    return max(float(checks.number("bound", bound, above=0, high=1)), 1.0 / checks.whole("num_sites", num_sites))


# ------------------------------------------------------------------------------------------------------------


def _replace_non_finite(values: Mapping[str, float], non_finite: NonFinite) -> dict[str, float]:
    """Return the values in sorted order of the sites, with the non-finite ones replaced (by 0 when all are)."""
    if values and checks.plain(values.values()):
        return {site: float(values[site]) for site in sorted(values)}
    checks.not_empty("the values to weight", values)
    ordered = {site: checks.real(f"value of site {site!r}", values[site]) for site in sorted(values)}
    finite = [value for value in ordered.values() if math.isfinite(value)]
    if non_finite == "raise" or len(finite) == len(ordered):
        return checks.numbers("value", ordered)
    middle = statistics.fmean if non_finite == "mean" else statistics.median
    substitute = middle(finite or [0.0])
    return {site: value if math.isfinite(value) else substitute for site, value in ordered.items()}


def _check_same_layers(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    first = min(checks.not_empty("the scores to weight", scores))
    whose = f"the scores of site {first!r}"
    checks.not_empty(whose, scores[first], of="layer")
    for site in sorted(scores):
        checks.same_names(f"the scores of site {site!r}", scores[site], whose, scores[first], of="layer")
    return list(scores[first])
