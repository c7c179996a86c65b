"""Measure how often intervals of ``fairflare compare`` hold the truth, and how often equal methods are called better.

Differences of two methods are made up: what all runs share is the patients of the test splits, on which one method may
be better than on others; seeds, and what one seed's model does on one patient and image, are luck. The draws are those
of :func:`fairflare.base.cases.resampling.draws`, and the formulas those that the tables use.

    python benchmarks/bench_intervals.py                # both tables of docs/compare.md, about two minutes
    python benchmarks/bench_intervals.py --repeats 200  # quicker, and rougher
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from fairflare.base.cases.resampling import draws
from fairflare.core.statistics.intervals import LEVEL, degrees, holm, skewness, widen_draws
from fairflare_lab.statistics.seed_intervals import Estimate, aggregate_sites, estimate, shared_variance

Array = npt.NDArray[np.float64]
SITES, DRAWS = 4, 200
SEEDS = (2, 3, 5, 10)
WORDS = ("better", "better or worse", "better, uncorrected", "better or worse, uncorrected")


@dataclass(frozen=True)
class World:
    """Store standard deviations of a difference between two methods, by their source.

    Attributes:
        patients, images: at each site, and of each patient.
        seed: of the whole model.
        patient, image: the same for every seed.
        patient_seed, image_seed: another for every seed.
    """

    patients: int
    images: int
    seed: float
    patient: float = 0.0
    image: float = 0.0
    patient_seed: float = 0.0
    image_seed: float = 0.0


WORLDS = {
    "images, the test images matter most": World(60, 1, 0.003, image=0.08, image_seed=0.05),
    "images, seeds and images alike": World(60, 1, 0.01, image=0.08, image_seed=0.1),
    "images, the seeds matter most": World(60, 1, 0.03, image=0.08, image_seed=0.1),
    "images, no method is better on any": World(60, 1, 0.005, image_seed=0.1),
    "3 images a patient": World(20, 3, 0.01, patient=0.06, image=0.06, patient_seed=0.03, image_seed=0.05),
    "6 images a patient": World(10, 6, 0.01, patient=0.06, image=0.06, patient_seed=0.03, image_seed=0.05),
    "6 images a patient, few patients": World(5, 6, 0.02, patient=0.06, image=0.06, patient_seed=0.03, image_seed=0.05),
}


def by_patient(world: World, repeats: int, seeds: int, rng: np.random.Generator, rows: int = 1) -> Array:
    """Draw (repeats, rows, seeds, sites, patients): mean difference to the truth, over each patient's images."""
    lead, most = (repeats, rows), (SITES, world.patients)
    shared = np.hypot(world.patient, world.image / np.sqrt(world.images))
    own = np.hypot(world.patient_seed, world.image_seed / np.sqrt(world.images))
    found = rng.normal(0, 1, (*lead, seeds, *most)) * own
    found += rng.normal(0, 1, (*lead, 1, *most)) * shared
    found += rng.normal(0, 1, (*lead, seeds, 1, 1)) * world.seed
    return found


def images_first(world: World, repeats: int, seeds: int, rng: np.random.Generator) -> Array:
    """Draw the same with an entry for each image: (repeats, 1, seeds, sites, images)."""
    parts = World(world.patients, 1, world.seed, world.patient, 0.0, world.patient_seed)
    patients = by_patient(parts, repeats, seeds, rng)[..., None]
    found = patients + rng.normal(0, 1, (*patients.shape[:-1], world.images)) * world.image_seed
    found += rng.normal(0, 1, (repeats, 1, 1, SITES, world.patients, world.images)) * world.image
    return found.reshape(*found.shape[:-2], -1)


def on_draws(values: Array) -> Array:
    """Draw (..., sites, units) -> (..., sites, draws): means over units drawn with replacement, as the sites draw."""
    units = values.shape[-1]
    found = np.empty((*values.shape[:-1], DRAWS))
    for site in range(values.shape[-2]):
        times = np.stack([np.bincount(one, minlength=units) for one in draws(f"site-{site + 1}", units, DRAWS)])
        found[..., site, :] = values[..., site, :] @ (times.T / units)
    return found


def averages(values: Array) -> Estimate:
    """Estimate the average over the sites; ``values`` (..., seeds, sites, units)."""
    measured, units = values.mean(-1), [values.shape[-1]] * SITES
    drawn = widen_draws(measured, on_draws(values), units)
    parts = drawn.mean(-3).var(-1)  # of each site
    skew = skewness(drawn.mean((-3, -2)))
    return estimate(measured.mean(-1), shared_variance(drawn.mean(-2)), degrees(parts, units, DRAWS), skew)


def parts_of(repeats: int, most: int = 100) -> Iterator[int]:
    """Yield sizes of parts that fit into memory."""
    for first in range(0, repeats, most):
        yield min(most, repeats - first)


def holds(of: Estimate) -> int:
    return int((of.p >= 1 - LEVEL).sum())


def satterthwaite(of: Estimate) -> int:
    """Return degrees of freedom of a single t distribution, for comparison with :func:`holds`."""
    df = 1 / (of.share**2 / of.seeds_df + (1 - of.share) ** 2 / of.patients_df)
    return int((np.abs(of.mean) <= stdtrit(df, 0.5 + LEVEL / 2) * of.error).sum())


def coverage(world: World, seeds: int, repeats: int, rng: np.random.Generator) -> dict[str, float]:
    """Return the share of intervals that hold the truth: ours, and others for comparison."""
    found = dict.fromkeys(("drawn by patient", "drawn by image", "seeds alone", "Satterthwaite"), 0)
    for part in parts_of(repeats):
        images = images_first(world, part, seeds, rng)
        patients = images.reshape(*images.shape[:-1], world.patients, world.images).mean(-1)
        of = averages(patients)
        found["drawn by patient"] += holds(of)
        found["Satterthwaite"] += satterthwaite(of)
        found["drawn by image"] += holds(averages(images)) if world.images > 1 else holds(of)
        found["seeds alone"] += holds(estimate(patients.mean((-1, -2))))
    return {name: count / repeats for name, count in found.items()}


def false_words(world: World, seeds: int, repeats: int, rng: np.random.Generator, rows: int = 10) -> dict[str, float]:
    """Return the share of comparisons of equal methods in which any row and measure is called better (or worse).

    Every method has its own luck, so that rows share that of the reference. The sites lie 0.1 apart.
    """
    found = dict.fromkeys(WORDS, 0)
    level = 0.6 + 0.1 * np.arange(SITES)
    units = [world.patients] * SITES
    for part in parts_of(repeats, 20):
        own = by_patient(world, part, seeds, rng, rows + 1) / np.sqrt(2) + level[:, None]
        measured = own.mean(-1)
        drawn = widen_draws(measured, on_draws(own), units)
        values, on = aggregate_sites(measured, True), aggregate_sites(drawn, True, -2)
        parts = {name: np.empty((part, rows, SITES)) for name in values}
        for site in range(SITES):
            held = np.broadcast_to(measured[..., None], drawn.shape).copy()
            held[..., site, :] = drawn[..., site, :]
            for name, one in aggregate_sites(held, True, -2).items():
                parts[name][..., site] = (one[:, 1:] - one[:, :1]).mean(-2).var(-1)
        p, good = [], []
        for name in values:
            minus, drawn_minus = (x[:, 1:] - x[:, :1] for x in (values[name], on[name]))
            skew = skewness(drawn_minus.mean(-2))
            of = estimate(minus, shared_variance(drawn_minus), degrees(parts[name], units, DRAWS), skew)
            p.append(of.p)
            good.append(of.mean < 0 if name == "std" else of.mean > 0)
        tests, better = np.concatenate(p, -1), np.concatenate(good, -1)
        beyond, alone = holm(tests) < 1 - LEVEL, tests < 1 - LEVEL
        for word, there in zip(WORDS, (beyond & better, beyond, alone & better, alone), strict=True):
            found[word] += int(there.any(-1).sum())
    return {name: count / repeats for name, count in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    print(f"Coverage of the {LEVEL:.0%} interval of the average, {asked.repeats} repeats, {SITES} sites\n")
    print("| world | seeds | interval | Satterthwaite | drawn by image | seeds alone |\n| --- |" + " ---: |" * 5)
    for name, world in WORLDS.items():
        for seeds in SEEDS:
            of = coverage(world, seeds, asked.repeats, rng)
            shown = [of[key] for key in ("drawn by patient", "Satterthwaite", "drawn by image", "seeds alone")]
            print(f"| {name} | {seeds} | " + " | ".join(f"{share:.3f}" for share in shown) + " |", flush=True)
    print(f"\nEqual methods called better, {asked.repeats} comparisons of 10 rows with the reference\n")
    print("| world | seeds | " + " | ".join(WORDS) + " |\n| --- |" + " ---: |" * (len(WORDS) + 1))
    for name, world in WORLDS.items():
        for seeds in SEEDS:
            words = false_words(world, seeds, asked.repeats, rng)
            print(f"| {name} | {seeds} | " + " | ".join(f"{words[word]:.3f}" for word in WORDS) + " |", flush=True)


if __name__ == "__main__":
    main()
