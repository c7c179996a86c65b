"""Measure what noise does to a worst site: coverage of intervals, tests of sites, and ``best_by``'s chance choices.

Sites are simulated; the intervals, the tests and the choice of the best model are the package's own.

    python benchmarks/bench_worst.py [--repeats 1000] [--seed 0]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from scipy import stats

from fairflare.base.cases.sampling import BINS, case_scores, standard_error
from fairflare.core.statistics.inequality import (
    errors_test,
    mean_interval,
    mean_of_shares_interval,
    permutation_test,
    scores_test,
    share_interval,
)
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.record.best_model import BestModel

Generator = np.random.Generator
MIDDLES = ((np.arange(BINS) + 0.5) / BINS).tolist()


def beta(generator: Generator, count: int, mean: float = 0.85, sd: float = 0.12) -> np.ndarray:
    """Draw skewed scores such as Dice has."""
    size = mean * (1 - mean) / sd**2 - 1
    return generator.beta(mean * size, (1 - mean) * size, count)


def coverage(repeats: int, generator: Generator) -> None:
    """Print the share of 95 % intervals of one site that hold the truth."""

    def covers(draw: Callable[[], tuple[float, float]], truth: float) -> float:
        return float(np.mean([low <= truth <= high for low, high in (draw() for _ in range(repeats))]))

    def of_dice(cases: int, each: int, mean: float = 0.85, sd: float = 0.12) -> tuple[float, float]:
        whose = np.repeat(np.arange(cases), each)
        scores = (np.repeat(beta(generator, cases, mean, sd), each) + generator.normal(0, 0.05, cases * each)).clip(
            0, 1
        )
        error = standard_error((scores - scores.mean()) / len(scores), whose.tolist())
        return mean_interval(float(scores.mean()), error, cases, 0, 1)

    def of_recalls(sizes: tuple[int, ...]) -> tuple[float, float]:
        right = [float(generator.binomial(n, p)) for n, p in zip(sizes, (0.9, 0.7, 0.5), strict=True)]
        return mean_of_shares_interval(right, sizes)

    truth, high = (
        float(np.mean((beta(generator, 10**6, mean, sd) + generator.normal(0, 0.05, 10**6)).clip(0, 1)))
        for mean, sd in ((0.85, 0.12), (0.93, 0.08))
    )
    print("| interval of a site | " + " | ".join(f"{n} cases" for n in (5, 10, 20, 60)) + " |\n| --- |" + " ---: |" * 4)
    for title, draw, right in (
        ("Dice, skewed, mean .85", lambda n: lambda: of_dice(n, 1), truth),
        ("Dice, mean .93, deviation .08", lambda n: lambda: of_dice(n, 1, 0.93, 0.08), high),
        ("Dice .85, 5 images a patient", lambda n: lambda: of_dice(n, 5), truth),
        ("accuracy .85", lambda n: lambda: share_interval(float(generator.binomial(n, 0.85)), n), 0.85),
        ("balanced accuracy, as many of each of 3 classes", lambda n: lambda: of_recalls((n, n, n)), 0.7),
        ("balanced accuracy, one class of 2", lambda n: lambda: of_recalls((n, n, 2)), 0.7),
    ):
        print(f"| {title} | " + " | ".join(f"{covers(draw(n), right):.3f}" for n in (5, 10, 20, 60)) + " |")


def tests(repeats: int, generator: Generator) -> None:
    """Print how often six sites are told apart: equal sites, and with one that is behind."""

    def shares(cases: int, lag: float) -> tuple[float, bool]:
        sizes, recalls = np.full((6, 2), cases // 2), np.tile([0.9, 0.7], (6, 1))
        recalls[-1] -= lag
        right = generator.binomial(sizes, recalls)
        found = permutation_test(right, sizes, np.full((6, 2), 0.5), draws=399)
        return found.p_value, bool(found.p_sites[-1] <= 0.05 and (right / sizes).mean(1)[-1] < found.expected[-1])

    def dice(cases: int, lag: float) -> tuple[float, bool]:
        own = [beta(generator, cases, 0.85 - lag * (k == 5)) for k in range(6)]
        counts = np.array([case_scores(x, None, 0, 1) for x in own])
        found = scores_test(counts, MIDDLES, draws=399)
        return found.p_value, bool(found.p_sites[-1] <= 0.05 and own[-1].mean() < found.expected[-1])

    def errors(cases: int, lag: float) -> tuple[float, bool]:
        own = [beta(generator, cases, 0.85 - lag * (k == 5)) for k in range(6)]
        means = [float(x.mean()) for x in own]
        found = errors_test(means, [float(stats.sem(x)) for x in own], [cases] * 6, low=0, high=1, draws=399)
        return found.p_value, bool(found.p_sites[-1] <= 0.05 and means[-1] < found.expected[-1])

    sizes = (10, 20, 60)
    print("\n| six sites | equal: p <= 0.05, with " + " | ".join(f"{n}" for n in sizes) + " cases | "
          + " | ".join(f"one .10 behind: named, {n}" for n in sizes) + " cases |\n| --- |" + " ---: |" * 6)  # fmt: skip
    for title, deal in (("balanced accuracy, dealt in classes", shares), ("Dice, dealt", dice), ("Dice, Q", errors)):
        size = [np.mean([deal(n, 0.0)[0] <= 0.05 for _ in range(repeats)]) for n in sizes]
        power = [np.mean([deal(n, 0.1)[1] for _ in range(repeats // 2)]) for n in sizes]
        print(f"| {title} | " + " | ".join(f"{x:.3f}" for x in (*size, *power)) + " |")


def best(repeats: int, generator: Generator) -> None:
    """Print what a criterion chooses among 30 models of six sites that all improve alike, and its own figure.

    A site's true Dice rises to .85 and moves by .01 from round to round; it is measured on the same validation images
    in every round. Last column: in which share of the last 15 rounds one and the same site is the worst by validation
    (six alike: .17 each).
    """
    rounds, sites = 30, [f"site-{k}" for k in range(6)]
    heads = ("value of the best", "its true worst site", "best true worst site of all", "decided by one site")
    print(f"\n| validation images a site | best_by | {' | '.join(heads)} |\n| ---: | --- |" + " ---: |" * 4)
    for images in (5, 20, 100):
        for by in ("worst", "mean_minus_std", "mean"):
            rows = []
            for _ in range(repeats // 5):
                level = 0.85 * (1 - np.exp(-np.arange(1, rounds + 1) / 5))[:, None]
                truth = (level + generator.normal(0, 0.01, (rounds, len(sites)))).clip(0.02, 0.98)
                hard = generator.normal(0, 0.12, (len(sites), images))  # the same images in every round
                noise = hard[None] + generator.normal(0, 0.05, (rounds, len(sites), images))
                seen = (truth[:, :, None] + noise).clip(0, 1).mean(2)
                chosen = BestModel(RunSettings(num_rounds=rounds, best_by=by), higher=True)
                for number in range(rounds):
                    chosen.offer(dict(zip(sites, seen[number].tolist(), strict=True)), number)
                own = truth[chosen.made]
                lowest = np.bincount(seen[-15:].argmin(1))  # by validation, of the models that are equally good
                rows.append((chosen.value, own.min(), truth.min(1).max(), lowest.max() / 15))
            cells = " | ".join(f"{x:.3f}" for x in np.mean(np.array(rows, float), 0))
            print(f"| {images} | {by} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for part in (coverage, tests, best):
        part(given.repeats, np.random.default_rng(given.seed))


if __name__ == "__main__":
    main()
