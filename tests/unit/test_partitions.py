"""Test how samples are dealt to sites."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflare.data.partitions import (
    apportion,
    dirichlet_partition,
    iid_partition,
    quantity_partition,
    shard_partition,
    stratified_folds,
    stratified_split,
    two_pool_partition,
)

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(6), [900, 420, 260, 140, 60, 20]))
DISJOINT = {
    "iid": lambda seed: iid_partition(LABELS, 7, seed=seed),
    "dirichlet": lambda seed: dirichlet_partition(LABELS, 7, 0.5, seed=seed),
    "two_pool": lambda seed: two_pool_partition(LABELS, 7, 2, 1.0, seed=seed),
    "literal": lambda seed: shard_partition(LABELS, 7, 0.8, seed=seed),
    "complement": lambda seed: shard_partition(LABELS, 7, 0.8, seed=seed, mode="complement"),
    "quantity": lambda seed: quantity_partition(LABELS, 7, 1.0, seed=seed),
    "split": lambda seed: stratified_split(LABELS, (0.7, 0.15, 0.15), seed=seed),
    "folds": lambda seed: stratified_folds(LABELS, 5, seed=seed),
}


@pytest.mark.parametrize("name", list(DISJOINT))
def test_every_index_once_and_the_seed_decides(name: str) -> None:
    parts, again, other = DISJOINT[name](3), DISJOINT[name](3), DISJOINT[name](4)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all((np.diff(part) > 0).all() for part in parts)
    for a, b in zip(parts, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        ((1, 0.5), 4, (3, 1)),
        ((0, 1), 4, (0, 4)),
        ((1, 0.5, 0.25, 0), 200, (114, 57, 29, 0)),
        ((1, 1, 1), 10, (4, 3, 3)),
        ((0.3, 0.1 + 0.2, 0.6), 2, (1, 0, 1)),  # a tie but for rounding
        ((1, 1, 7), 3, (1, 0, 2)),  # quotas 1/3, 1/3, 2 1/3: a tie too
    ],
)
def test_apportion_worked_by_hand(weights: tuple[float, ...], total: int, counts: tuple[int, ...]) -> None:
    assert tuple(apportion(weights, total)) == counts


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-3), st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_apportion_stays_within_one_of_the_quota(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert counts.sum() == total
    quota = np.array(weights) / sum(weights) * total
    assert (np.abs(counts - quota) < 1 + 1e-6).all()


# IID


def test_iid_sizes_and_class_counts_differ_by_one_at_most() -> None:
    parts = iid_partition(LABELS, 8, seed=1)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    table = np.array([np.bincount(LABELS[part], minlength=6) for part in parts])
    assert (np.ptp(table, axis=0) <= 1).all()


# Dirichlet


def test_min_size_is_kept_or_the_draw_fails() -> None:
    for seed in range(5):
        assert min(len(part) for part in dirichlet_partition(LABELS, 8, 0.3, seed=seed, min_size=40)) >= 40
    with pytest.raises(ValueError, match=r"alpha=0\.01 .* 20 sites 60 of 1800"):
        dirichlet_partition(LABELS, 20, 0.01, min_size=60)
    with pytest.raises(ValueError, match=r"1800 samples .*20 sites .*min_size=100"):
        dirichlet_partition(LABELS, 20, 1.0, min_size=100)


def test_dirichlet_by_the_definition() -> None:
    """Compute line by line from README 4.3, with the random numbers drawn in the same order."""
    seed, sites, alpha, least = 11, 5, 0.5, 120
    for attempt in range(100):
        rng = np.random.default_rng([seed, attempt])
        expected: list[list[int]] = [[] for _ in range(sites)]
        for c in range(6):
            members = np.flatnonzero(np.equal(LABELS, c))
            p = rng.dirichlet([alpha] * sites)
            shuffled, at = rng.permutation(members).tolist(), 0
            for j, count in enumerate(apportion(p, len(members))):
                expected[j] += shuffled[at : at + count]
                at += count
        if min(map(len, expected)) >= least:
            break
    parts = dirichlet_partition(LABELS, sites, alpha, seed=seed, min_size=least)
    assert [part.tolist() for part in parts] == [sorted(e) for e in expected]


# two pools


def test_pools_without_clean_or_without_corrupted_sites() -> None:
    for corrupted in (0, 5):
        assert sum(len(part) for part in two_pool_partition(LABELS, 5, corrupted, 1.0)) == len(LABELS)


def test_two_pools_by_the_definition() -> None:
    """Compute README 4.3 line by line with the same random numbers, drawn again until parts are large enough."""
    seed, sites, corrupted, alpha, least = 3, 5, 2, 0.4, 280
    for attempt in range(100):
        rng = np.random.default_rng([seed, attempt])
        expected: list[list[int]] = [[] for _ in range(sites)]
        for c in range(6):
            members = rng.permutation([i for i, label in enumerate(LABELS) if label == c]).tolist()
            cut = round((sites - corrupted) / sites * len(members))
            for pool, first, count in ((members[:cut], 0, 3), (members[cut:], 3, 2)):
                p = rng.dirichlet([alpha] * count)
                for i, j in zip(pool, rng.choice(count, len(pool), p=p), strict=True):
                    expected[first + j].append(i)
        if min(map(len, expected)) >= least:
            break
    assert 0 < attempt < 99
    parts = two_pool_partition(LABELS, sites, corrupted, alpha, seed=seed, min_size=least)
    assert [part.tolist() for part in parts] == [sorted(e) for e in expected]


# shards


def _dominant(parts: list[np.ndarray], classes: int) -> np.ndarray:
    """Return the share of each class that goes to each site."""
    table = np.array([np.bincount(LABELS[part], minlength=classes) for part in parts])
    return table / np.bincount(LABELS, minlength=classes)


def test_complement_of_eta_one_gives_single_classes() -> None:
    balanced = np.repeat(np.arange(4), 50)
    parts = shard_partition(balanced, 4, 1.0, seed=2, mode="complement")
    assert sorted(int(balanced[part][0]) for part in parts) == [0, 1, 2, 3]
    assert all(len(np.unique(balanced[part])) == 1 for part in parts)
    # classes that dominate nowhere are dealt equally
    shares = _dominant(shard_partition(LABELS, 4, 1.0, seed=0, mode="complement"), 6)
    spread = [c for c in range(6) if shares[:, c].max() < 0.9]
    assert len(spread) == 2
    np.testing.assert_allclose(shares[:, spread], 0.25, atol=0.03)


def test_literal_shards_by_the_definition() -> None:
    """Compute line by line from README 4.4, with the random numbers drawn in the same order."""
    seed, eta, sites, shards = 5, 0.7, 3, 20
    rng = np.random.default_rng([seed])
    order = rng.permutation(6)
    g = np.clip(rng.normal(0.5, 1.0, (sites, 6)), 0, 1)
    expected: list[list[int]] = [[] for _ in range(sites)]
    for c in range(6):
        shuffled = rng.permutation(np.flatnonzero(np.equal(LABELS, c)))
        a = [eta if c == order[h % 6] else g[h, c] for h in range(sites)]
        if sum(a) == 0:
            a = [0.0] * sites
            a[int(np.argmin([len(e) for e in expected]))] = 1.0
        n, number = len(shuffled), min(shards, len(shuffled))
        pieces = iter([shuffled[k * n // number : (k + 1) * n // number] for k in range(number)])
        for h, count in enumerate(apportion(a, number)):
            for _ in range(count):
                expected[h] += next(pieces).tolist()
    for part, want in zip(shard_partition(LABELS, sites, eta, seed=seed, num_shards=shards), expected, strict=True):
        assert part.tolist() == sorted(want)


def test_a_class_that_nobody_wants_goes_to_the_smallest_site() -> None:
    for seed in range(200):  # one site, one class that is not its own, weight 0: it must still get it
        parts = shard_partition(np.repeat([0, 1], 10), 1, 0.0, seed=seed)
        assert len(parts[0]) == 20


# splits


def test_split_sizes_and_single_samples() -> None:
    labels = np.repeat(np.arange(5), [100, 40, 10, 2, 1])
    train, validation, test = stratified_split(labels, (0.7, 0.15, 0.15), seed=0)
    np.testing.assert_array_equal(np.bincount(labels[train], minlength=5)[:3], [70, 28, 7])
    np.testing.assert_array_equal(np.bincount(labels[test], minlength=5)[:2], [15, 6])
    assert set(labels[train]) == {0, 1, 2, 3, 4}
    assert len(validation) + len(test) + len(train) == len(labels)
    assert set(labels[stratified_split(labels, (0.1, 0.9))[0]]) == {0, 1, 2, 3, 4}
    none, everything = stratified_split(labels, (0.0, 1.0))
    assert (len(none), len(everything)) == (0, len(labels))


def test_folds_are_stratified() -> None:
    for fold in stratified_folds(LABELS, 5, seed=7):
        np.testing.assert_allclose(np.bincount(LABELS[fold], minlength=6), np.bincount(LABELS) / 5, atol=1)


# errors


def test_errors_say_what_is_wrong() -> None:
    for call, message in (
        (lambda: iid_partition([], 3), "at least one"),
        (lambda: iid_partition([[0]], 3), "shape"),
        (lambda: iid_partition([0.5], 3), "^labels.* got float64"),
        (lambda: iid_partition([0, -1], 3), "^label at position 1.* got -1$"),
        (lambda: iid_partition([0], 0), "num_sites must be an integer >= 1, got 0"),
        (lambda: iid_partition([0], True), "^num_sites.* got True$"),
        (lambda: iid_partition([0], 1, seed=-1), "seed must be an integer >= 0, got -1"),
        (lambda: dirichlet_partition(LABELS, 3, 0.0), "alpha must be finite and > 0, got 0"),
        (lambda: dirichlet_partition(LABELS, 3, float("nan")), "alpha must be finite and > 0, got nan"),
        (lambda: two_pool_partition(LABELS, 3, 1, 0.0), "alpha must be finite and > 0, got 0"),
        (lambda: two_pool_partition(LABELS, 3, -1, 1.0), "^num_corrupted.* got -1$"),
        (lambda: two_pool_partition(LABELS, 3, 1, 1.0, min_size=-1), "min_size must be an integer >= 0, got -1"),
        (lambda: shard_partition(LABELS, 3, 1.0, num_shards=0), "^num_shards.* got 0$"),
        (
            lambda: two_pool_partition(LABELS, 3, 4, 1.0),
            "^num_corrupted of num_sites=3.* got 4$",
        ),
        (
            lambda: two_pool_partition(LABELS, 20, 4, 0.01, min_size=50),
            r"two-pool .*alpha=0\.01 .* 20 sites 50 of",
        ),
        (lambda: shard_partition(LABELS, 3, 1.5), r"eta must be in \[0, 1\], got 1.5"),
        (
            lambda: shard_partition(LABELS, 3, 0.5, mode="printed"),
            "^shard mode.* got 'printed'$",
        ),
        (lambda: stratified_split(LABELS, (0.5, 0.4)), "sum to 1"),
        (lambda: stratified_split(LABELS, (1.5, -0.5)), "^fraction of part 1.* got -0.5$"),
        (lambda: stratified_folds(LABELS, 1), "num_folds must be an integer >= 2, got 1"),
        (lambda: apportion([0, 0], 3), "not all 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_sites_of_different_size_are_alike_in_their_classes() -> None:
    """Check that every class is cut at the same shares, to less than one sample."""
    parts = quantity_partition(LABELS, 5, 1.0, seed=2, min_size=20)
    shares = np.array([len(part) for part in parts]) / len(LABELS)
    assert shares.max() > 3 * shares.min()
    for c in range(6):
        counts = np.array([(LABELS[part] == c).sum() for part in parts])
        assert np.abs(counts - shares * (c == LABELS).sum()).max() < 2
    sizes = [len(part) for part in quantity_partition(LABELS, 5, 1e6, seed=0)]
    assert max(sizes) - min(sizes) < 20
    with pytest.raises(ValueError, match=r"draw of sizes .*alpha=0.001 .* 300"):
        quantity_partition(LABELS, 5, 0.001, min_size=300)
