"""Methods side by side over several seeds, in FLARE's simulator; prints a fairness table for each data set.

    python benchmarks/compare_methods.py phantom --seeds 3 --rounds 8
    python benchmarks/compare_methods.py nuclei white-cells --source ../shared/data --methods fed_avg fed_lwr

A finished run is not repeated: its folder under ``--out`` is reused, so an interrupted comparison goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from fairflare.reporting.results import read_results
from fairflare.reporting.table import compare

# Label -> (method, settings).
VARIANTS = {
    "fed_avg": ("fed_avg", {"weighting": "uniform"}),
    "fed_lwr": ("fed_lwr", {}),
    "fed_lwr_authors": ("fed_lwr", {"preset": "authors"}),
    "fed_lwr_unbiased": ("fed_lwr", {"cka_estimator": "full_unbiased"}),
    "fed_lwr_cosine": ("fed_lwr_cosine", {}),
    "fed_lwr_last_layer": ("fed_lwr_last_layer", {}),
}
TASKS: dict[str, dict[str, object]] = {
    "phantom": {"local_epochs": 2},
    "nuclei": {"local_epochs": 1, "in_channels": 3},
    "white-cells": {"local_epochs": 1, "in_channels": 3},
}


def prepare(dataset: str, source: Path, out: Path) -> tuple[Path | None, str]:
    """The site file and the sites of a data set; the phantom needs no file."""
    if dataset == "phantom":
        return None, "6"
    folder = out / "data" / dataset
    if not (folder / "fairflare.json").exists():
        command = [sys.executable, "-m", "fairflare.data.prepare", dataset]
        subprocess.run([*command, "--source", str(source), "--out", str(folder)], check=True)
    sites = json.loads((folder / "fairflare.json").read_text())["sites"]
    return folder / "fairflare.json", ",".join(sorted(sites))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--source", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    for dataset in arguments.datasets:
        site_file, sites = prepare(dataset, arguments.source, out)
        found = []
        for seed in range(arguments.seeds):
            for label in arguments.methods:
                folder = out / dataset / f"{label}-{seed}"
                results = folder / "server" / "simulate_job" / "fairflare" / "results.json"
                if not results.exists() or read_results(results)["status"] != "completed":
                    run(dataset, label, seed, arguments.rounds, sites, site_file, folder)
                record = read_results(results)
                record["info"]["label"] = label
                found.append(record)
        found.sort(key=lambda r: arguments.methods.index(r["info"]["label"]))
        print(f"\n## {dataset}, {arguments.rounds} rounds, {arguments.seeds} seeds\n")
        print(compare(found, style="markdown"), flush=True)


def run(dataset: str, label: str, seed: int, rounds: int, sites: str, site_file: Path | None, folder: Path) -> None:
    """One run of the simulator."""
    method, settings = VARIANTS[label]
    command = [sys.executable, "-m", "fairflare.cli", "run", method, "--sites", sites, "--rounds", str(rounds)]
    command += ["--seed", str(seed), "--workspace", str(folder)]
    if site_file is not None:
        command += ["--data", str(site_file)]
    # The phantom is drawn anew for each seed, as another sample of patients.
    extra = {"phantom_seed": seed} if dataset == "phantom" else {}
    for key, value in {**TASKS[dataset], **extra, **settings}.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    print(f"{dataset}: {label}, seed {seed}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
