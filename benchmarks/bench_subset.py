"""Measure Fed-LWR's similarity from a fixed subset of images (``cka_max_samples``): saving and error.

    python benchmarks/bench_subset.py [--samples 8 16 32 64] [--data FILE --set in_channels=3 ...]

One run in one process. In each round each site is also asked about subsets of its images, with both estimators of all
images; for each number of images ``--draws`` choices, the site's own among them. Models, anchor and images are those of
the run, and so is everything that a site does for its answer. A site with no more images than asked for uses all.

Errors are those to the same estimator with all images: of 1 - delta relative, of the weights (Eq. 5, all sites with the
same draw) absolute. Cost is the processor's time of the sites' answers beside that with all images.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fairflare.core.weighting import dissimilarity_weights
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.training import SiteRun
from fairflare.methods.parts.anchor_report import LayerSimilarityReport

ESTIMATORS: tuple[Any, ...] = ("full_biased", "full_unbiased")
SETTINGS: dict[str, Any] = {
    "image_size": [32, 32], "features": [8, 8, 16, 32, 64, 8], "local_epochs": 1, "phantom_cases": 3.0,
}  # fmt: skip
Scores = dict[str, float]  # 1 - delta by layer
Case = tuple[str, int, int]  # estimator, images (0: all), draw


@dataclass
class Reordered:
    """Hold a site's data in another order, so that the fixed choice takes other images; draw 0: unchanged."""

    data: Any
    draw: int

    def num_samples(self, split: str) -> int:
        return int(self.data.num_samples(split))

    def batches(self, split: str, *, batch_size: int, shuffle_seed: int | None = None) -> Iterator[Any]:
        yield from self.data.batches(split, batch_size=batch_size, shuffle_seed=self.draw or None)


class Asked:
    """Replace the site half's report: compute all cases, and return the one that the run asked for."""

    def __init__(self, samples: list[int], draws: int) -> None:
        self.cases: list[Case] = [(estimator, 0, 0) for estimator in ESTIMATORS]
        self.cases += itertools.product(ESTIMATORS, samples, range(draws))
        self.plain = LayerSimilarityReport.report_anchor
        self.scores: dict[tuple[int, Case], dict[str, Scores]] = defaultdict(dict)  # by round and case: by site
        self.seconds: dict[tuple[str, int], float] = defaultdict(float)
        self.images: dict[str, int] = {}

    def __call__(self, half: LayerSimilarityReport, run: SiteRun, *models: torch.nn.Module) -> dict[str, Any]:
        self.images[run.site] = run.data.num_samples("training")
        of_the_run = self.plain(half, run, *models)  # first, so that memory is allocated before the timing
        for case in self.cases:
            estimator, samples, draw = case
            asked = replace(half, cka_estimator=estimator, cka_max_samples=samples or None)
            start = time.process_time()
            report = self.plain(asked, replace(run, data=Reordered(run.data, draw)), *models)  # type: ignore[arg-type]
            self.seconds[estimator, samples] += time.process_time() - start
            self.scores[run.current_round, case][run.site] = scores_of(report)
        return of_the_run


def run_parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return the argument parser of a benchmark that looks into one run of Fed-LWR."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--data", type=Path, help="local/fairflare.json of some sites; default: the phantom")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    return parser


def planned(given: argparse.Namespace, settings: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of the run, and the sites' private settings."""
    local = json.loads(given.data.read_text()) if given.data else {}
    asked = {key: json.loads(value) for key, _, value in (item.partition("=") for item in given.set)}
    sites = list(local["sites"]) if local else 6
    return make_plan("fed_lwr", sites=sites, num_rounds=given.rounds, settings={**settings, **asked}), local


def main() -> None:
    parser = run_parser(__doc__, rounds=3)
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--draws", type=int, default=3)
    given = parser.parse_args()
    plan, local = planned(given, SETTINGS)
    asked = Asked(given.samples, given.draws)
    LayerSimilarityReport.report_anchor = lambda *arguments: asked(*arguments)  # type: ignore[method-assign]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fairflare_subset_") as folder:
        run_local(plan, Path(folder), local)
    if not asked.images:
        raise SystemExit("no site could answer; why is said above")
    print(f"images of the sites: {', '.join(map(str, sorted(asked.images.values())))}; {given.draws} draws;")
    print(f"{given.rounds} rounds; 1 - delta and weights: median error / largest, of all layers and sites")
    print("| images | estimator | time | 1 - delta | weights |")
    print("| ---: | --- | ---: | ---: | ---: |")
    for samples, estimator in itertools.product(given.samples, ESTIMATORS):
        cost = asked.seconds[estimator, samples] / given.draws / asked.seconds[estimator, 0]
        scores, weights = errors(asked, estimator, samples)
        figures = [f"{x.median():.2g} / {x.max():.2g}" for x in (scores, weights)]
        print(f"| {samples} | {estimator} | {cost:.2f} | " + " | ".join(figures) + " |")
    apart = [
        abs(weights_of(asked.scores[number, (ESTIMATORS[0], 0, 0)])[layer][site] - value)
        for number in range(given.rounds)
        for layer, by_site in weights_of(asked.scores[number, (ESTIMATORS[1], 0, 0)]).items()
        for site, value in by_site.items()
    ]
    print(f"weights of the two estimators with all images: {torch.tensor(apart).median():.2g} apart, at most", end=" ")
    print(f"{max(apart):.2g}")


def errors(asked: Asked, estimator: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relative errors of 1 - delta, and absolute errors of the weights."""
    scores, weights = [], []
    for (number, (name, count, _)), by_site in asked.scores.items():
        if (name, count) != (estimator, samples):
            continue
        exact = asked.scores[number, (estimator, 0, 0)]
        there, here = weights_of(exact), weights_of(by_site)
        for site, layers in exact.items():
            scores += [abs(by_site[site][layer] / value - 1) for layer, value in layers.items() if value > 0]
            weights += [abs(here[layer][site] - there[layer][site]) for layer in layers]
    return torch.tensor(scores), torch.tensor(weights)


def weights_of(by_site: dict[str, Scores]) -> dict[str, dict[str, float]]:
    return dissimilarity_weights(by_site, clip_min=0.0, clip_max=1.0)


def scores_of(report: dict[str, Any]) -> Scores:
    return dict(zip(report["layers"], report["dissimilarity"], strict=True))


if __name__ == "__main__":
    main()
