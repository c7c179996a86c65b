"""Compare methods side by side over several seeds, and print a table for each experiment.

    python benchmarks/compare_methods.py phantom --rounds 6
    python benchmarks/compare_methods.py nuclei white-cells --source FOLDER --variants fed_avg fed_lwr
    python benchmarks/compare_methods.py noise blur --jobs 2

Runs go through FLARE's simulator, or, with ``--in-process``, through the same controller and site halves without its
processes (the same bits, sooner on a small machine). A finished run is not repeated: its folder under ``--out`` is
reused, so an interrupted comparison goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import read_document, read_results
from fairflare.reporting.values import summary_of
from fairflare_lab.compare.comparison import compare

Variants = Mapping[str, tuple[str, Mapping[str, Any]]]  # label -> (method, settings)
# Columns of a table: (title, metric, statistic over the sites).
Columns = Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Experiment:
    """Describe an experiment: methods, data and table; without ``columns`` the table of the primary metric."""

    variants: Variants
    settings: Mapping[str, Any]
    task: str = "segmentation"
    sites: int | None = None  # None: all sites of the data set
    rounds: int = 8
    columns: Columns = ()
    synthetic: bool = True
    first_seed: int = 0  # first seed of the phantom
    averages: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # title -> mean of two columns


LWR: Variants = {
    "fed_avg": ("fed_avg", {"weighting": "uniform"}),
    "fed_lwr": ("fed_lwr", {}),
    "fed_lwr_authors": ("fed_lwr", {"preset": "authors"}),
    "fed_lwr_unbiased": ("fed_lwr", {"cka_estimator": "full_unbiased"}),
    "fed_lwr_cosine": ("fed_lwr_cosine", {}),
    "fed_lwr_last_layer": ("fed_lwr_last_layer", {}),
}
# The same local training for all rows, so that they differ in their methods only.
ADAM: dict[str, Any] = {
    "optimizer": "adam", "learning_rate": 1e-3, "betas": [0.9, 0.999], "weight_decay": 5e-4, "batch_size": 32,
    "keep_optimizer_state": False, "augment": True, "augmentation": ["flip"], "max_pool": True,
}  # fmt: skip
ISM: Variants = {
    "FedAvg": ("fed_avg", {"criterion": "logit_adjusted"}),
    "SALT only": ("fed_ism_plus_s", {"saga": False}),
    "SAGA (S) only": ("fed_ism_plus_s", {"salt": False}),
    "SAGA (L) only": ("fed_ism_plus_l", {"salt": False}),
    "FedISM": ("fed_ism", {}),
    "FedISM+ (S)": ("fed_ism_plus_s", {}),
    "FedISM+ (L)": ("fed_ism_plus_l", {}),
}
# One camera, so that only the images' quality differs between sites, as in the paper.
QUALITY: dict[str, Any] = {
    **ADAM, "phantom": "dermoscopy", "phantom_samples": 1200, "phantom_test": 300, "camera_shift": 0.0,
    "partition": "two_pool", "alpha": 1.0, "corrupted_sites": 1, "local_epochs": 2,
}  # fmt: skip
QUALITY_COLUMNS: Columns = (
    ("clean bACC", "clean/balanced_accuracy", "mean"),
    ("clean AUC", "clean/auc_ovo", "mean"),
    ("corrupted bACC", "corrupted/balanced_accuracy", "mean"),
    ("corrupted AUC", "corrupted/auc_ovo", "mean"),
    ("std of AUC", "common/auc_ovo", "std"),  # the same images at every site, in its own quality
)
QUALITY_AVERAGES = {
    "average bACC": ("clean bACC", "corrupted bACC"),
    "average AUC": ("clean AUC", "corrupted AUC"),
}


def _quality(corruption: str, severity: int) -> Experiment:
    settings = {**QUALITY, "corruption": corruption, "severity": severity}
    return Experiment(
        variants=ISM, settings=settings, task="classification", sites=5, rounds=6,
        columns=QUALITY_COLUMNS, averages=QUALITY_AVERAGES,
    )  # fmt: skip


MAS: Variants = {
    "FedAvg": ("bsm_fl", {"criterion": "task"}),
    "BSM-FL": ("bsm_fl", {}),
    "BSM + KD": ("bsm_kd", {}),
    "Fed-MAS": ("fed_mas", {}),
    "Fed-MAS, lambda 0": ("fed_mas", {"lambda_f": 0.0}),
}
LONG_TAILED: dict[str, Any] = {**ADAM, "local_epochs": 2, "weight_decay": 0.0}  # on the jobs' own phantom
MAS_COLUMNS: Columns = (
    ("head", "common/head", "mean"),
    ("medium", "common/medium", "mean"),
    ("tail", "common/tail", "mean"),
    ("All", "common/all", "mean"),
    ("common bACC", "common/balanced_accuracy", "mean"),
    ("own bACC", "balanced_accuracy", "mean"),
    ("std", "balanced_accuracy", "std"),
    ("worst", "balanced_accuracy", "worst"),
)


def _long_tailed(**partition: Any) -> Experiment:
    return Experiment(
        variants=MAS, settings={**LONG_TAILED, **partition}, task="classification", sites=4, rounds=6,
        columns=MAS_COLUMNS, first_seed=10,  # 0 was looked at when the packaged prior was chosen
    )  # fmt: skip


MRL: Variants = {
    "FedAvg": ("fed_avg", {}),
    "FedProx 0.001": ("fed_prox", {"mu": 0.001}),
    "FedProx 0.1": ("fed_prox", {"mu": 0.1}),
    "FedProx 0.4": ("fed_prox", {"mu": 0.4}),
    # Twelve rounds give ten transitions: the agents learn from the third on, not after ten as by default.
    "FedMRL": ("fed_mrl", {"mu_policy": "qmix"}),
    "FedMRL, no fairness loss": ("fed_mrl", {"mu_policy": "qmix", "use_fair": False}),
    "FedMRL, no map": ("fed_mrl", {"mu_policy": "qmix", "weighting": "samples"}),
    "FedMRL, fixed mu": ("fed_mrl", {"mu_policy": "fixed"}),
    "FedMRL, random mu": ("fed_mrl", {"mu_policy": "random"}),
}
SHARDS: dict[str, Any] = {
    **ADAM, "phantom": "dermoscopy7", "phantom_samples": 1200, "phantom_test": 300, "camera_shift": 0.0,
    "partition": "shards", "eta": 1.0, "corrupted_sites": 0, "local_epochs": 1, "weight_decay": 0.0, "augment": False,
}  # fmt: skip
# Columns of the common test set; the spread is of the received model on the sites' own validation images.
MRL_COLUMNS: Columns = (
    ("ACC", "common/accuracy", "mean"),
    ("AUC (OvR)", "common/auc_ovr", "mean"),
    ("precision", "common/precision", "mean"),
    ("recall", "common/recall", "mean"),
    ("F1", "common/f1", "mean"),
    ("bACC", "common/balanced_accuracy", "mean"),
    ("std of sites' ACC", "accuracy", "validation_std"),
)

EXPERIMENTS: dict[str, Experiment] = {
    "phantom": Experiment(LWR, {"local_epochs": 2}, sites=6),
    "nuclei": Experiment(LWR, {"local_epochs": 1, "in_channels": 3}, synthetic=False),
    "white-cells": Experiment(LWR, {"local_epochs": 1, "in_channels": 3}, synthetic=False),
    "noise": _quality("gaussian_noise", 3),
    "blur": _quality("motion_blur", 5),  # severity 3 hardly hurts at 48x48
    "mas-iid": _long_tailed(partition="iid"),
    "mas-dirichlet": _long_tailed(partition="dirichlet", alpha=0.5),
    "mrl": Experiment(
        variants=MRL,
        settings=SHARDS,
        task="classification",
        sites=4,
        rounds=12,
        columns=MRL_COLUMNS,
    ),
}


def prepare(name: str, experiment: Experiment, source: Path, out: Path) -> tuple[Path | None, str]:
    """Return the site file and the sites of a data set; a phantom needs no file."""
    if experiment.sites is not None:
        return None, str(experiment.sites)
    folder = out / "data" / name
    if not (folder / "fairflare.json").exists():
        command = [sys.executable, "-m", "fairflare.data.preparers", name]
        subprocess.run([*command, "--source", str(source), "--out", str(folder)], check=True)
    sites = json.loads((folder / "fairflare.json").read_text())["sites"]
    return folder / "fairflare.json", ",".join(sorted(sites))


def results_file(folder: Path) -> Path:
    return folder / "server" / "simulate_job" / "fairflare" / "results.json"


def run(
    name: str, label: str, seed: int, rounds: int, sites: str, site_file: Path | None, folder: Path, in_process: bool
) -> None:
    """Do one run, unless it has been done already."""
    results = results_file(folder)
    if results.exists() and read_document(results)["status"] == "completed":
        return
    experiment = EXPERIMENTS[name]
    method, settings = experiment.variants[label]
    command = [sys.executable, "-m", "fairflare.cli", "run", method, "--sites", sites, "--rounds", str(rounds)]
    command += ["--seed", str(seed), "--workspace", str(folder), "--task", experiment.task]
    command += ["--in-process"] if in_process else []
    if site_file is not None:
        command += ["--data", str(site_file)]
    # A phantom is drawn again for each seed, as another sample of patients.
    extra = {"phantom_seed": experiment.first_seed + seed} if experiment.synthetic else {}
    if method == "fed_mrl":
        # Parts of the method that draw random numbers get another seed.
        random = {
            "mu_policy": settings.get("mu_policy") != "fixed",
            "weighting": settings.get("weighting") != "samples",
        }
        extra |= {f"{part}.seed": seed for part, used in random.items() if used}
    for key, value in {**experiment.settings, **extra, **settings}.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    print(f"{name}: {label}, seed {seed}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def value(record: RunResults, metric: str, statistic: str) -> float:
    """Return one number of one run: over the sites' tests, or the spread of the last round's validation."""
    if statistic == "validation_std":
        return pstdev(by[metric] for by in record.rounds[-1].validation.values())
    return float(getattr(summary_of(record, metric), statistic))


def table(experiment: Experiment, found: Mapping[str, list[RunResults]]) -> str:
    """Return a table of mean and population std over the seeds of every column."""
    titles = [title for title, _, _ in experiment.columns] + list(experiment.averages)
    lines = ["| method | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(titles)]
    for label, records in found.items():
        values = {t: [value(r, metric, stat) for r in records] for t, metric, stat in experiment.columns}
        for title, (a, b) in experiment.averages.items():
            values[title] = [(x + y) / 2 for x, y in zip(values[a], values[b], strict=True)]
        cells = [f"{fmean(values[t]):.3f} ± {pstdev(values[t]):.3f}" for t in titles]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=list(EXPERIMENTS))
    parser.add_argument("--variants", nargs="+", help="labels; default: all of the experiment")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="default: the experiment's")
    images = Path(os.environ.get("FAIRFLARE_REAL_DATA", "."))
    parser.add_argument("--source", type=Path, default=images, help="of the real images; default: FAIRFLARE_REAL_DATA")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    for name in arguments.experiments:
        experiment = EXPERIMENTS[name]
        labels = [label for label in experiment.variants if label in (arguments.variants or experiment.variants)]
        rounds = arguments.rounds or experiment.rounds
        site_file, sites = prepare(name, experiment, arguments.source, out)
        folders = {(label, s): out / name / f"{label}-{s}" for s in range(arguments.seeds) for label in labels}
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            runs = [
                pool.submit(run, name, label, seed, rounds, sites, site_file, folder, arguments.in_process)
                for (label, seed), folder in folders.items()
            ]
            for future in runs:
                future.result()
        found: dict[str, list[RunResults]] = {label: [] for label in labels}
        for (label, _), folder in folders.items():
            record = read_results(results_file(folder))
            record.info.label = label
            found[label].append(record)
        print(f"\n## {name}, {rounds} rounds, {arguments.seeds} seeds\n")
        if experiment.columns:
            print(table(experiment, found), flush=True)
        else:
            print(compare([r for records in found.values() for r in records], style="markdown"), flush=True)


if __name__ == "__main__":
    main()
