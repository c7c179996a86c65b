"""Check that every quick job learns: its figure as shipped, beside FedAvg trained like it on the same task.

    python benchmarks/bench_jobs.py                                  # every method on its own task
    python benchmarks/bench_jobs.py fed_prox fed_bn --task segmentation
    python benchmarks/bench_jobs.py fed_mrl --set 'image_size=[40,40]'
    python benchmarks/bench_jobs.py fed_lf --seeds 3                  # seeds 0, 1 and 2
    python benchmarks/bench_jobs.py --store quality.csv

The figure is the mean over the sites of the primary metric in the run's final test; seconds are processor time, in one
process and thread. A method that reaches less than 0.9 of FedAvg's is marked, and ``WHY`` says where that is no fault;
so is one of which a site's figure is not above guessing.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench_quality import by_site, federated, origin_of, store
from fairflare.base.settings import field_names, values_of
from fairflare.cli.options import parse_settings
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.run_settings import LIKE_SETTINGS
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.training import LocalTraining

LEAST = 0.9
WHY = {
    "fed_bn": "every site has norms of its own, which few images have trained",
    "fair_lora": "adapters of a random encoder; see docs/fair_lora.md for one that was trained before",
    "moon": "five rounds hardly train its projection head",
    "logit_adjustment": "at seed 0, not at seed 1",
    "bsm_fl": "at seed 0; the same loss as logit adjustment's",
    "ldam": "its cosine classifier learns slowly: FedAvg with it reaches 0.78; see docs/ldam.md",
    "fed_ga": "at seeds 0 and 1; see docs/fed_ga.md",
    "scaffold": "its SGD has no momentum; at seeds 0 to 2 it reaches 0.93, 0.87 and 0.69",
    "fed_dyn": "at seed 0; the mean of seeds 0 to 2 is 0.90",
    "fed_lwr_last_layer": "at seed 0; the mean of seeds 0 to 2 is 0.95",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="default: all")
    parser.add_argument("--task", help="default: each method's own")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--store", type=Path, help="put the figures into this CSV, begun with the head of another")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    known: dict[str, float] = {}
    for name in given.methods or all_methods():
        shares = []
        for seed in range(given.seed, given.seed + given.seeds):
            options: dict[str, Any] = {"task": given.task, "settings": parse_settings(given.set), "seed": seed}
            try:
                plan = make_plan(name, **options)
                common = {*field_names(LocalTraining), *field_names(type(plan.task)), *LIKE_SETTINGS}  # FedAvg has them
                shared = {key: value for key, value in options["settings"].items() if key in common}
                like = make_plan("fed_avg", train_like=name, **{**options, "settings": shared})
            except ValueError as error:
                print(f"{name:20} {error}")
                break
            half = {key: getattr(like.training, key) for key in field_names(LocalTraining)}
            alike = repr([values_of(like.task)["args"], half, like.sites, like.run.num_rounds, seed])
            if alike not in known:
                known[alike] = federated(like, {})
            started = time.process_time()
            sites = by_site(plan, {})
            reached, seconds = fmean(sites.values()), time.process_time() - started
            shares.append(reached / known[alike] if known[alike] else float("nan"))
            guessed = 1 / plan.task.classes if plan.task.classes else 0.0
            marks = ["" if shares[-1] >= LEAST else f"BEHIND {WHY.get(name, '')}"]
            marks += [f"NO BETTER THAN GUESSING: {site}" for site, value in sites.items() if value <= guessed]
            fed_avg = f"worst site {min(sites.values()):.3f}  fed_avg {known[alike]:.3f}  {shares[-1]:5.2f}"
            metric = plan.task.primary_metric
            if given.store:
                told = {**origin_of("bench_jobs.py", seed, {}), "rounds": None}
                values = {"reached": reached, "ratio": shares[-1]}
                store(name, name, metric, values, given.store, f"jobs_{plan.method.task}", told)
            line = f"{name:20} seed {seed}  {metric:18} {reached:.3f}  {fed_avg}  {seconds:4.0f} s  {' '.join(marks)}"
            print(line, flush=True)
        if len(shares) > 1:
            print(f"{name:20} share of fed_avg's: mean {fmean(shares):.2f}, least {min(shares):.2f}", flush=True)


if __name__ == "__main__":
    main()
