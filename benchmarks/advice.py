"""Judge the advice and the promise of docs/results/protocol.md on families that they were not fitted on.

    python benchmarks/advice.py [--stage final]

Reads what benchmarks/evidence.py stored. Advice: a rule with one figure of ``fairflare stats``, one threshold and two
rows of the table, fitted on all families but one. Promise: an interval for what FedAvg's worst site gains over training
alone, by conformal prediction from the other families.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

import evidence
from fairflare.reporting.values import collect_by_site

LEVEL = 0.8  # of the promise
Gains = Mapping[str, Mapping[str, float]]  # mean gain of the worst site over FedAvg, by family and row


def figures_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures by which the rule decides, from the document of ``fairflare stats``."""
    images = [site["counts"]["images_training"] for site in stats["sites"].values()]
    farthest = {name: max(site.get(name) or 0.0 for site in stats["distances"].values()) for name in (
        "intensity_wasserstein", "classes_jensen_shannon")}  # fmt: skip
    return {"fewest_images": min(images), "share_of_fewest": min(images) / sum(images), **farthest}


@dataclass(frozen=True)
class Advice:
    """Name the row to try first: ``above`` where a family's figure exceeds the threshold, else ``below``."""

    figure: str
    threshold: float
    below: str
    above: str

    def choose(self, figures: Mapping[str, float]) -> str:
        """Return the row to try first on data with these figures."""
        return self.above if figures[self.figure] > self.threshold else self.below


def best_row(gains: Gains, families: Sequence[str]) -> str:
    """Return the row with the greatest mean gain among those that every one of the families has."""
    rows = set.intersection(*(set(gains[family]) for family in families))
    return max(sorted(rows), key=lambda row: fmean(gains[family][row] for family in families))


def fit(gains: Gains, figures: Mapping[str, Mapping[str, float]]) -> Advice:
    """Return the advice with the greatest mean gain over the families; without a useful split, one row for all."""
    everywhere = best_row(gains, list(gains))
    rules = [Advice(next(iter(figures[next(iter(gains))])), math.inf, everywhere, everywhere)]
    for figure in figures[next(iter(gains))]:
        values = sorted({figures[family][figure] for family in gains})
        for threshold in (fmean(pair) for pair in pairwise(values)):
            sides = [[f for f in gains if (figures[f][figure] > threshold) == above] for above in (False, True)]
            rules.append(Advice(figure, threshold, *(best_row(gains, side) for side in sides)))
    return max(rules, key=lambda rule: fmean(gains[f][rule.choose(figures[f])] for f in gains))


def judge(gains: Gains, figures: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[Advice, str, str]]:
    """Return by family the advice fitted without it, its choice there, and the row that was best elsewhere."""
    verdicts = {}
    for family in gains:
        others = {other: gains[other] for other in gains if other != family}
        advice = fit(others, figures)
        verdicts[family] = advice, advice.choose(figures[family]), best_row(others, list(others))
    return verdicts


def promise(values: Mapping[str, float]) -> tuple[float, float]:
    """Return the interval for a family that is not among ``values``: median, and a rank of the others' distances to it.

    Each distance is to the median of the values without it (jackknife+'s residuals); with ``n`` families the rank is
    ceil((n + 1) * LEVEL), and infinite if there are fewer.

    Source:
        Barber et al., "Predictive inference with the jackknife+", Annals of Statistics 2021.
    """
    distance_by_family = {
        name: abs(value - median([v for n, v in values.items() if n != name])) for name, value in values.items()
    }
    rank, distances = math.ceil((len(values) + 1) * LEVEL), sorted(distance_by_family.values())
    width = distances[rank - 1] if rank <= len(distances) else math.inf
    return median(values.values()) - width, median(values.values()) + width


# ------------------------------------------------------------------------------------------------ what is stored


def stats_of(name: str) -> dict[str, Any]:
    """Return the document of ``fairflare stats`` that is stored with a comparison."""
    with tarfile.open(evidence.STORE / f"{name}.tar.xz") as stored:
        head = next(head for head in stored if head.name.endswith(evidence.STATS))
        content: dict[str, Any] = json.loads(stored.extractfile(head).read())  # type: ignore[union-attr]
    return content


def worst_sites(stage: str, family: str) -> dict[str, dict[int, float]]:
    """Return the worst site's test figure of each stored run, by row and seed."""
    worst: dict[str, dict[int, float]] = {}
    for run in evidence.runs_of(f"{stage}-{family}"):
        by_site = collect_by_site(run, str(run.info.primary_metric))
        worst.setdefault(str(run.info.label), {})[int(run.info.config["seed"])] = min(by_site.values())
    return worst


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="final", choices=list(evidence.PLAN["stages"]))
    stage = parser.parse_args(arguments).stage
    stored = [
        f for f in evidence.PLAN["stages"][stage]["families"] if (evidence.STORE / f"{stage}-{f}.tar.xz").exists()
    ]
    worst = {family: worst_sites(stage, family) for family in stored}
    reference = evidence.REFERENCE
    differences = {
        family: {
            row: [value - rows[reference][seed] for seed, value in by_seed.items() if seed in rows[reference]]
            for row, by_seed in rows.items()
            if row != reference
        }
        for family, rows in worst.items()
    }
    gains = {f: {row: fmean(values) for row, values in rows.items() if values} for f, rows in differences.items()}
    if len(gains) < 3:
        raise SystemExit(f"{len(gains)} families of stage {stage} are stored; a rule needs three or more")
    figures = {family: figures_of(stats_of(f"{stage}-{family}")) for family in gains}
    verdicts = judge(gains, figures)
    print("| family | rule fitted on the others | first choice, gain | best elsewhere, gain |\n" + "| --- " * 4 + "|")
    for family, (rule, choice, elsewhere) in verdicts.items():
        words = f"{rule.figure} > {rule.threshold:.3g}: {rule.above}, else {rule.below}"
        both = " | ".join(f"{row}, {gains[family].get(row, math.nan):+.3f}" for row in (choice, elsewhere))
        print(f"| {family} | {words} | {both} |")
    for name, index in (("the first choice", 1), ("the row that was best elsewhere", 2)):
        share = fmean(gains[family].get(verdict[index], 0.0) > 0 for family, verdict in verdicts.items())
        print(f"{name} beats {reference} at the worst site on {share:.0%} of {len(verdicts)} families")
    over_solo = {
        f: {seed: rows[reference][seed] - rows["Solo"][seed] for seed in rows[reference] if seed in rows["Solo"]}
        for f, rows in worst.items()
    }
    means = {family: fmean(by_seed.values()) for family, by_seed in over_solo.items()}
    covered = []
    for family, by_seed in over_solo.items():
        low, high = promise({other: mean for other, mean in means.items() if other != family})
        covered += [low <= value <= high for value in by_seed.values()]
        print(f"{family}: promised {low:+.3f} to {high:+.3f}, was {means[family]:+.3f}")
    print(f"{np.mean(covered):.0%} of {len(covered)} runs lie in an interval of {LEVEL:.0%}")


if __name__ == "__main__":
    main()
