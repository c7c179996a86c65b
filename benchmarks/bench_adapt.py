"""Measure what a hospital that took no part gains by norm statistics of its own images, and how many it needs.

Each site is left out in turn: the others train FedAvg with averaged norm statistics and with statistics of their own
(``norm_statistics=site``), and both models are tested at the site that was not there: as they are (the first only: the
second has no statistics), and with statistics measured on 2, 4, 8 ... of its training images, without labels, as
``fairflare adapt`` measures them. Mean over seeds and left-out sites with a 95 % t interval over the seeds' means.

    python benchmarks/bench_adapt.py --data data/nuclei/fairflare.json --set in_channels=3 --set local_epochs=2
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from scipy.stats import t as student

from fairflare.cli.options import parse_settings
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.site_file import own_settings
from fairflare.federation.transports.local import run_local
from fairflare.prediction.adapt import recalibrate
from fairflare.prediction.predictor import load_predictor

SETTINGS = {
    "image_size": [32, 32], "in_channels": 1, "features": [8, 8, 16, 16, 32, 8], "norm_momentum": 0.5,
    "local_epochs": 3, "learning_rate": 3e-3,
}  # fmt: skip
COUNTS = (2, 4, 8, 16, 32, 64)
AS_IS = "as it is"


def unseen(
    site: str, others: list[str], local: Mapping[str, Any], given: Mapping[str, Any], rounds: int, seed: int
) -> dict[tuple[str, str], float]:
    """Return Dice at the left-out site, by training and number of its images."""
    found = {}
    for statistics in ("average", "site"):
        settings = {**SETTINGS, **given, "norm_statistics": statistics}
        plan = make_plan(
            "fed_avg", task="segmentation", small=False, settings=settings, num_rounds=rounds, sites=others, seed=seed
        )
        with tempfile.TemporaryDirectory(prefix="fairflare_adapt_") as folder:
            run_local(plan, Path(folder), local)
            predictor = load_predictor(Path(folder), "last", to_adapt=True)
        network = predictor.network
        data = plan.task.open_site(site, own_settings(local, site))
        images = torch.cat([inputs for inputs, _ in data.batches("training", batch_size=64)])
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))]

        def dice(network: Any = network, data: Any = data, plan: Any = plan) -> float:
            tested = plan.task.evaluate(network, data.batches("test", batch_size=64), torch.device("cpu"))
            return float(tested[plan.task.primary_metric])

        if statistics == "average":
            found[statistics, AS_IS] = dice()
        for count in COUNTS:
            if count < len(images):
                with torch.no_grad():
                    recalibrate(network, lambda few=images[:count]: few.split(64))
                found[statistics, str(count)] = dice()
        with torch.no_grad():
            recalibrate(network, lambda every=images: every.split(64))
        found[statistics, "all"] = dice()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a fairflare.json with the sites' own images; default: the phantom")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    local = json.loads(options.data.read_text(encoding="utf-8")) if options.data else {}
    sites = sorted(local["sites"]) if local else [f"site-{number}" for number in range(1, 7)]
    by_seed: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(options.seeds):
        for site in sites:
            others = [name for name in sites if name != site]
            for key, value in unseen(site, others, local, parse_settings(options.set), options.rounds, seed).items():
                by_seed[key][seed].append(value)
                print(f"seed {seed}, without {site}: {key[0]:8} {key[1]:>8} {value:.3f}", flush=True)
    print(f"\n| statistics in training | images at the unseen site | Dice | 95 % over {options.seeds} seeds |")
    print("| --- | ---: | ---: | --- |")
    for (statistics, count), seeds in by_seed.items():
        if any(len(values) < len(sites) for values in seeds.values()):
            continue  # some sites have fewer images
        means = [fmean(values) for values in seeds.values()]
        half = student.ppf(0.975, len(means) - 1) * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        print(f"| {statistics} | {count} | {fmean(means):.3f} | ± {half:.3f} |")


if __name__ == "__main__":
    main()
