"""Deal the samples of one data set to sites, and split them within a site. NumPy only.

Every function takes the class index of each sample and returns index arrays, sorted, one for each site (or
part). Unless its docstring says otherwise the arrays are disjoint and hold every index once. The result
depends on the arguments alone: the same seed gives the same partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflare.base.checks import choice, number, numbers, refuse, whole

Indices = npt.NDArray[np.int64]

SHARD_MODES = ("literal", "complement")
TRIES = 100  # number of unsuccessful draws after which a Dirichlet partition raises an error
TIE_DIGITS = 9  # number of digits to which equal remainders agree, so that 0.1 + 0.2 and 0.3 are a tie


def iid_partition(labels: npt.ArrayLike, num_sites: int, *, seed: int = 0) -> list[Indices]:
    """Deal each class to the sites in turn, so that all sites have nearly the same label distribution.

    Each class is shuffled and dealt round-robin; the next class starts with the site after the last one served.
    Sizes of sites, and counts of each class, then differ by at most 1.

    Args:
        labels: (n,) class index of each sample.
        num_sites: K, at least 1. With fewer samples than sites some sites stay empty.
        seed: random seed of the shuffling.

    Source:
        Spec README 4.2.
    """
    y, sites = _labels(labels), whole("num_sites", num_sites)
    turn = cycle(range(sites))
    return _group_by_owner(_cut(y, _generator(seed), lambda size: list(islice(turn, size))), sites)


def dirichlet_partition(
    labels: npt.ArrayLike, num_sites: int, alpha: float, *, seed: int = 0, min_size: int = 10
) -> list[Indices]:
    r"""Give each site a random share of each class: :math:`p_c \sim Dir(\alpha \cdot 1_K)` for each class c.

    The shuffled class is cut at the cumulative shares, rounded by largest remainder. A draw that leaves a site
    too small is thrown away as a whole; after 100 such draws the function raises an error.

    Args:
        labels: (n,) class index of each sample.
        num_sites: K, at least 1.
        alpha: concentration, above 0. Large: nearly IID. Small: most of a class at one site.
        seed: random seed of shares and shuffling.
        min_size: samples that every site must have.

    Raises:
        ValueError: an argument is invalid, or no draw gave every site enough samples.

    Source:
        Spec README 4.3.
    """
    y, sites, least = _check_arguments(labels, num_sites, alpha, min_size)
    refuse({f"{len(y)} samples are too few for {sites} sites with min_size={min_size}": least * sites > len(y)})

    def deal(rng: np.random.Generator) -> Indices:
        return _cut(y, rng, lambda size: _deal_by_shares(rng.dirichlet(np.full(sites, alpha)), size))

    return _large_enough(deal, sites, least, seed, f"Dirichlet draw with alpha={alpha:g}")


def two_pool_partition(
    labels: npt.ArrayLike,
    num_sites: int,
    num_corrupted: int,
    alpha: float,
    *,
    seed: int = 0,
    min_size: int = 1,
) -> list[Indices]:
    """Deal samples by FedISM's partition: a pool for clean and one for corrupted sites, and a Dirichlet draw in each.

    The corrupted sites are the last ones.

    The first round((K - K_c) / K * n_c) samples of each shuffled class are the clean pool, the rest the corrupted pool.
    In each pool, shares are drawn from Dir(alpha) for each class, and a site is drawn from the shares for each sample.
    The authors do not shuffle, so that an order in their files (by hospital, by year) becomes a difference between the
    pools.

    Args:
        labels: (n,) class index of each sample.
        num_sites: K, at least 1.
        num_corrupted: K_c, number of corrupted sites, 0 to K; these are the sites K - K_c to K - 1.
        alpha: concentration, above 0 (authors: 1).
        seed: random seed of the shuffling and of all draws.
        min_size: samples that every site must have, else the whole partition is drawn again, at most 100 times. The
            authors draw once (``min_size=0``).

    Source:
        FedISM, spec README 4.3.
    """
    y, sites, least = _check_arguments(labels, num_sites, alpha, min_size)
    corrupted = whole("num_corrupted", num_corrupted, low=0)
    number(f"num_corrupted of num_sites={sites}", corrupted, low=0, high=sites, whole=True)
    clean = sites - corrupted

    def deal(rng: np.random.Generator) -> Indices:
        owner = np.empty(len(y), np.int64)
        for members in _classes(y):
            members = rng.permutation(members)
            cut = round(clean / sites * len(members))
            for pool, first, count in ((members[:cut], 0, clean), (members[cut:], clean, corrupted)):
                if count and len(pool):
                    owner[pool] = first + rng.choice(count, len(pool), p=rng.dirichlet(np.full(count, alpha)))
        return owner

    return _large_enough(deal, sites, least, seed, f"two-pool draw with alpha={alpha:g}")


def _check_arguments(labels: npt.ArrayLike, num_sites: int, alpha: float, min_size: int) -> tuple[Indices, int, int]:
    """Check a partition's arguments; return the labels, the number of sites and the smallest size of a site."""
    number("alpha", alpha, above=0)
    return _labels(labels), whole("num_sites", num_sites), whole("min_size", min_size, low=0)


def _large_enough(
    deal: Callable[[np.random.Generator], Indices], sites: int, least: float, seed: int, what: str
) -> list[Indices]:
    """Repeat a draw of the samples' sites until every site has ``least`` samples; return each site's sample indices."""
    best = 0
    for attempt in range(TRIES):
        owner = deal(_generator(seed, attempt))
        smallest = int(np.bincount(owner, minlength=sites).min())
        if smallest >= least:
            return _group_by_owner(owner, sites)
        best = max(best, smallest)
    raise ValueError(
        f"no {what} gave each of {sites} sites {least:g} of {len(owner)} samples in {TRIES} tries (best: {best}); "
        "use a larger alpha, fewer sites or a smaller min_size"
    )


def quantity_partition(
    labels: npt.ArrayLike, num_sites: int, alpha: float, *, seed: int = 0, min_size: int = 10
) -> list[Indices]:
    r"""Deal samples to sites of very different size with the same proportions of classes.

    The sites' shares of the samples are drawn from :math:`p \sim Dir(\alpha)`.

    Each class is shuffled and cut at the same cumulative shares, rounded by largest remainder; so a class with fewer
    samples than sites goes to the largest sites. A draw that leaves a site too small is thrown away, at most 100 times.

    Args:
        labels: (n,) class index of each sample.
        num_sites: K, at least 1.
        alpha: concentration, above 0. Large: sites of nearly the same size.
        seed: random seed of shares and shuffling.
        min_size: samples that every site must have.

    Raises:
        ValueError: an argument is invalid, or no draw gave every site enough samples.
    """
    y, sites, least = _check_arguments(labels, num_sites, alpha, min_size)

    def deal(rng: np.random.Generator) -> Indices:
        shares = rng.dirichlet(np.full(sites, alpha))
        return _cut(y, rng, lambda size: _deal_by_shares(shares, size))

    return _large_enough(deal, sites, least, seed, f"draw of sizes with alpha={alpha:g}")


def shard_partition(
    labels: npt.ArrayLike, num_sites: int, eta: float, *, seed: int = 0, num_shards: int = 200, mode: str = "literal"
) -> list[Indices]:
    r"""Return FedMRL's partition: each site has a dominant class, and gets more shards of this class the larger eta is.

    Site h has the dominant class :math:`j_h` = class number h mod C of a random order of the classes, and the
    weight :math:`a_{hc} = \eta` for :math:`c = j_h`, else :math:`g_{hc} = clip(N(0.5, 1), 0, 1)`. Class c is
    shuffled and cut into min(S, n_c) shards of nearly equal size, which go to the sites in proportion to
    :math:`a_{hc}` (:func:`apportion`). A class of total weight 0 goes to the site with the fewest samples so far.

    Order of classes, g and shuffling do not depend on eta: with the same seed, a site keeps or gains shards of its
    dominant class when eta grows.

    Args:
        labels: (n,) class index of each sample.
        num_sites: K, at least 1.
        eta: weight of a site's dominant class, 0 to 1 (paper: 1).
        seed: random seed of the order of the classes, g and the shuffling.
        num_shards: S, number of shards of a class (paper: 200).
        mode: ``"literal"``: as above. Even eta = 1 leaves a site many samples of other classes.
            ``"complement"``: the other weights are multiplied by 1 - eta, so that eta = 1 gives each site its
            dominant class only; a class of total weight 0 is dealt to all sites equally.

    Source:
        FedMRL Eq. (11) prints only the two weights; the rest is spec README 4.4. Reports should state the mode.
    """
    y = _labels(labels)
    sites = whole("num_sites", num_sites)
    shards = whole("num_shards", num_shards)
    number("eta", eta, low=0, high=1)
    choice("shard mode", mode, SHARD_MODES)
    rng = _generator(seed)
    classes = _classes(y)
    dominant = np.zeros((sites, len(classes)), bool)
    dominant[np.arange(sites), rng.permutation(len(classes))[np.arange(sites) % len(classes)]] = True
    others = np.clip(rng.normal(0.5, 1.0, (sites, len(classes))), 0, 1) * (1 - eta if mode == "complement" else 1)
    owner = np.empty(len(y), np.int64)
    sizes = np.zeros(sites, np.int64)
    for members, shares in zip(classes, np.where(dominant, eta, others).T, strict=True):
        count = min(shards, len(members))
        # Cut at k n / S, so that shards with one sample more are spread over the sites.
        pieces = np.split(rng.permutation(members), np.arange(1, count) * len(members) // count)
        if shares.sum() <= 0:
            shares = np.ones(sites) if mode == "complement" else (np.arange(sites) == np.argmin(sizes)).astype(float)
        for site, piece in zip(_deal_by_shares(shares, len(pieces)), pieces, strict=True):
            owner[piece] = site
            sizes[site] += len(piece)
    return _group_by_owner(owner, sites)


def apportion(weights: npt.ArrayLike, total: int) -> Indices:
    """Split ``total`` items in proportion to ``weights`` by largest remainder; ties go to the lower index.

    >>> apportion([1, 0.5, 0.25, 0], 200).tolist()
    [114, 57, 29, 0]
    """
    w = np.asarray(weights, np.float64)
    refuse({
        f"weights must be finite, >= 0 and not all 0, got {w.tolist()}":
            w.ndim != 1 or not len(w) or not np.isfinite(w).all() or (w < 0).any() or w.sum() <= 0,
    })  # fmt: skip
    quotas = np.round(w / w.sum() * total, TIE_DIGITS)
    counts = np.floor(quotas).astype(np.int64)
    counts[np.argsort(-np.round(quotas - counts, TIE_DIGITS), kind="stable")[: total - counts.sum()]] += 1
    return counts


def stratified_split(labels: npt.ArrayLike, fractions: Sequence[float], *, seed: int = 0) -> list[Indices]:
    """Split samples into parts, such as training, validation and test, each class in the same proportions.

    Args:
        labels: (n,) class index of each sample.
        fractions: fraction of each part, at least 0, sum 1. The counts of a class are rounded by largest remainder.
        seed: random seed of the shuffling.

    Returns:
        Sample indices of each part. Every sample is in one part; a class always has a sample in the first part with
        a fraction above 0, so a class with a single sample is trained on rather than only tested.

    Source:
        Spec README 4.6.
    """
    y = _labels(labels)
    parts = np.array(list(numbers("fraction", dict(enumerate(fractions)), of="part", low=0).values()))
    refuse({f"fractions must sum to 1, got {list(fractions)}": abs(parts.sum() - 1) > 1e-6})
    first = int(np.argmax(parts > 0))

    def owners(size: int) -> Indices:
        counts = apportion(parts, size)
        if counts[first] == 0:
            counts[np.argmax(counts)] -= 1
            counts[first] = 1
        return np.repeat(np.arange(len(parts)), counts)

    return _group_by_owner(_cut(y, _generator(seed), owners), len(parts))


def stratified_folds(labels: npt.ArrayLike, num_folds: int, *, seed: int = 0) -> list[Indices]:
    """Return the test parts of a stratified k-fold cross-validation (scikit-learn's ``StratifiedKFold``, shuffled).

    A class with fewer samples than folds is missing from some folds, and scikit-learn warns.

    >>> [fold.size for fold in stratified_folds([0, 0, 0, 0, 1, 1], 2)]
    [3, 3]
    """
    from sklearn.model_selection import StratifiedKFold

    y = _labels(labels)
    folds = StratifiedKFold(
        whole("num_folds", num_folds, low=2), shuffle=True, random_state=whole("seed", seed, low=0) % 2**32
    )
    return [np.sort(test).astype(np.int64) for _, test in folds.split(y, y)]


def _labels(labels: npt.ArrayLike) -> Indices:
    y = np.asarray(labels)
    refuse({
        f"labels must be whole numbers in a list, at least one, got {y.dtype} of shape {y.shape}":
            y.ndim != 1 or not len(y) or not np.issubdtype(y.dtype, np.integer),
    })  # fmt: skip
    number(f"label at position {int(y.argmin())}", int(y.min()), low=0, whole=True)
    return y.astype(np.int64)


def _classes(y: Indices) -> list[Indices]:
    """Return the sample indices of each class that occurs, ascending, in the order of the classes."""
    return [np.flatnonzero(y == c) for c in np.unique(y)]


def _cut(y: Indices, rng: np.random.Generator, owners: Callable[[int], npt.ArrayLike]) -> Indices:
    """Return the owner of each sample: shuffle each class and assign ``owners(size of the class)`` to its samples."""
    owner = np.empty(len(y), np.int64)
    for members in _classes(y):
        owner[rng.permutation(members)] = owners(len(members))
    return owner


def _deal_by_shares(shares: npt.ArrayLike, total: int) -> Indices:
    counts = apportion(shares, total)
    return np.repeat(np.arange(len(counts)), counts)


def _group_by_owner(owner: Indices, parts: int) -> list[Indices]:
    return [np.flatnonzero(owner == part) for part in range(parts)]


def _generator(seed: Any, *more: int) -> np.random.Generator:
    return np.random.default_rng([whole("seed", seed, low=0), *more])
