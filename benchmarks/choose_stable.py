"""Find settings that steady Fed-LWR, on development data: a grid, validation metrics, differences to FedAvg.

    python benchmarks/choose_stable.py --quick
    python benchmarks/choose_stable.py phantom white-cells nuclei --source FOLDER --seeds 3 --out runs/stable

For each data set and seed: FedAvg with equal weights for ``--warmup`` rounds, and from its model every candidate for
``--rounds`` more, FedAvg among them. So all candidates of a seed have the same start, made once, in place of a
``warmup_rounds`` of their own; sites begin with new optimizer moments. What counts is the primary metric on the sites'
*validation* splits, mean over the last ``--last`` models; test splits are never read. Phantoms are drawn with seeds
that no published table has.

Everything runs in this process. A run that is there is not repeated, so an interrupted grid goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from compare_methods import EXPERIMENTS, prepare
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.reporting.results import read_document

Candidate = tuple[str, Mapping[str, Any]]  # (method, settings)
PLAIN: dict[str, Any] = {"weighting": "uniform"}
HALF: dict[str, Any] = {"mix": 0.5}
#: Recalibration in one pass, as the exact way needs a pass for each norm in every round.
MEASURED: dict[str, Any] = {"norm_statistics": "recalibrated"}


def _lwr(**settings: Any) -> Candidate:
    return "fed_lwr", settings


BASE = "FedAvg"
CANDIDATES: dict[str, Candidate] = {
    BASE: ("fed_avg", PLAIN),
    "FedAvg, recalibrated": ("fed_avg", {**PLAIN, **MEASURED}),
    "paper": _lwr(),
    "paper, recalibrated": _lwr(**MEASURED),
    "authors": _lwr(preset="authors"),
    "unbiased": _lwr(cka_estimator="full_unbiased"),
    "mix 0.25": _lwr(mix=0.25),
    "mix 0.5": _lwr(**HALF),
    "mix 0.75": _lwr(mix=0.75),
    "unbiased, mix 0.5": _lwr(**HALF, cka_estimator="full_unbiased"),
    "mix 0.5, recalibrated": _lwr(**HALF, **MEASURED),
}
QUICK = (BASE, "paper", "mix 0.5")
FIRST_PHANTOM = 500  # first seed of development phantoms


@dataclass(frozen=True)
class Data:
    """Describe a development data set: settings of the task and of the training."""

    settings: Mapping[str, Any]
    experiment: str = ""  # experiment of compare_methods that prepares the data; empty: the phantom


DATA: dict[str, Data] = {
    "phantom": Data({"local_epochs": 1}),
    "white-cells": Data({"local_epochs": 1, "in_channels": 3}, "white-cells"),
    "nuclei": Data({"local_epochs": 1, "in_channels": 3}, "nuclei"),
}


@dataclass
class Found:
    """Store the validation of one run: average, std and worst over the sites, mean over its last models."""

    average: float
    std: float
    worst: float
    by_site: dict[str, float] = field(default_factory=dict)


def measured(results: Path, last: int) -> Found:
    """Return a run's validation, of which a round's record has that of the model that the round began with."""
    record = read_document(results)
    metric = record["info"]["primary_metric"]
    of_models = [r["validation"] for r in record["rounds"][1:]][-last:]
    by_site = {site: fmean(m[site][metric] for m in of_models) for site in of_models[-1]}
    values = [[by[metric] for by in m.values()] for m in of_models]
    return Found(fmean(map(fmean, values)), fmean(map(pstdev, values)), fmean(map(min, values)), by_site)


def done(folder: Path) -> Path | None:
    """Return the results of a finished run in this folder; ``None``: there is none."""
    results = folder / "server" / "simulate_job" / "fairflare"
    there = (results / "results.json").exists() and read_document(results)["status"] == "completed"
    return results if there else None


def run(folder: Path, candidate: Candidate, settings: Mapping[str, Any], local: Any, **options: Any) -> Path:
    """Do one run, unless it has been done already."""
    if (results := done(folder)) is not None:
        return results
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder.parent.name}: {folder.name}", flush=True)
    method, own = candidate
    plan = make_plan(method, settings={**settings, **own}, **options)
    return run_local(plan, folder, local)


def grid(name: str, arguments: argparse.Namespace, out: Path) -> dict[str, list[Found]]:
    """Run every candidate over the seeds."""
    data, local, sites = DATA[name], None, None
    if data.experiment:
        file, listed = prepare(data.experiment, EXPERIMENTS[data.experiment], arguments.source, out)
        local = json.loads(file.read_text()) if file else None
        sites = listed.split(",")
    found: dict[str, list[Found]] = {label: [] for label in arguments.candidates}
    for seed in range(arguments.seeds):
        settings = {**data.settings, **arguments.set}
        if not data.experiment:
            settings["phantom_seed"] = FIRST_PHANTOM + seed
        common: dict[str, Any] = {"sites": sites or 6, "seed": seed, "settings": settings, "local": local}
        start = out / name / f"start-{seed}"
        run(start, CANDIDATES[BASE], num_rounds=arguments.warmup, **common)
        model = start / "server" / "simulate_job" / "FL_global_model.pt"
        for label in arguments.candidates:
            # One round more than is measured, as a model is validated by the round that begins with it.
            options = {"num_rounds": arguments.rounds + 1, "initial_ckpt": str(model), **common}
            folder = out / name / f"{label.replace(', ', '+').replace(' ', '-')}-{seed}"
            found[label].append(measured(run(folder, CANDIDATES[label], **options), arguments.last))
    return found


def shown(values: list[float], sign: str = "") -> str:
    return f"{fmean(values):{sign}.3f} ± {pstdev(values):.3f}"


def table(found: Mapping[str, list[Found]]) -> str:
    """Return a table of mean and population std over the seeds; differences are to FedAvg of the same seed."""
    parts = ("average", "std", "worst")
    lines = ["| candidate | " + " | ".join([*parts, *(f"d {p}" for p in parts)]) + " |", "| --- |" + " ---: |" * 6]
    base = found.get(BASE)
    for label, runs in found.items():
        cells = [shown([getattr(r, p) for r in runs]) for p in parts]
        if base is not None and label != BASE:
            pairs = list(zip(runs, base, strict=True))
            cells += [shown([getattr(r, p) - getattr(b, p) for r, b in pairs], "+") for p in parts]
        else:
            cells += [""] * 3
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=["phantom"], help=f"of {', '.join(DATA)}")
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--last", type=int, default=3, help="models whose validation is averaged")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="settings of task and training")
    images = Path(os.environ.get("FAIRFLARE_REAL_DATA", "."))
    parser.add_argument("--source", type=Path, default=images, help="of the real images; default: FAIRFLARE_REAL_DATA")
    parser.add_argument("--out", type=Path, default=Path("runs/stable"))
    parser.add_argument("--quick", action="store_true", help="few candidates and rounds, small images")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.data) - set(DATA)):
        parser.error(f"unknown data set {unknown[0]!r}; there are {', '.join(DATA)}")
    arguments.set = {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in arguments.set)}
    arguments.candidates = arguments.candidates or list(QUICK if arguments.quick else CANDIDATES)
    if arguments.quick:
        arguments.warmup, arguments.rounds = min(arguments.warmup, 10), min(arguments.rounds, 5)
        arguments.set = {"image_size": [32, 32], **arguments.set}
    # A grid of another length or size has another folder, so that it does not reuse this grid's runs.
    of_grid = [f"w{arguments.warmup}", f"r{arguments.rounds}", *(f"{k}={v}" for k, v in sorted(arguments.set.items()))]
    out = arguments.out.absolute() / "-".join(of_grid).replace(" ", "")
    logging.disable(logging.WARNING)
    for name in arguments.data:
        found = grid(name, arguments, out)
        start, last = f"FedAvg for {arguments.warmup} rounds, {arguments.rounds} more", f"last {arguments.last} models"
        print(f"\n## {name}: {start}; validation, {last}, {arguments.seeds} seed(s)\n\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()
