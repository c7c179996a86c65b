"""Measure what docs/nnunet.md says of one plan for all sites: the clipped organ, and the hippocampus of three sites.

    python benchmarks/nnunet_figures.py clipped
    python benchmarks/nnunet_figures.py hippocampus REAL_DATA OUT [--seeds 1]

``clipped``: hospitals of 40, 12 and 6 made-up CTs whose organ lies at 110, 55 and 160 HU (standard deviation 25, 12 and
60); printed are the window by the sum of the cases' histograms, and by the mean of the hospitals' percentiles.

``hippocampus``: 20 volumes of each of three export groups (see ``hippocampus_folders.py``). The plan of ``fairflare
plan`` is made coarser, so that two cores train by it in minutes: voxels of 1.5 mm, a patch of 24x40x24 (as much of the
body as the plan's) and a quarter of its features; ten rounds of 25 steps of its batch, momentum 0.9 and rate 0.1 (a
step as long as with nnU-Net's 0.99 and 0.01, which in so few steps find nothing yet); Fed-LWR compares layers on 8
patches. Pooled is one model trained on all volumes together, with the steps of one site. The other task is
``volume_segmentation`` as it comes, by steps and batches of the same number. Runs that are in OUT are not made again.
Printed is the Dice of each site's 6 test volumes, the worst site first (and its difference to FedAvg's of the same
seed; intervals of 95 % over the seeds by Student's t), and the processor minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
from scipy.special import stdtrit

import fairflare
from fairflare.core.plans.counts import HIGHEST_HU, LOWEST_HU, foreground, intensities
from hippocampus_folders import write_folders

HOSPITALS = {"first": (40, 110, 25), "second": (12, 55, 12), "third": (6, 160, 60)}  # cases, HU, standard deviation
VOXELS = 20_000  # of a case's organ
ARMS = {  # method and task of each
    "FedAvg": ("fed_avg", "nnunet"), "Fed-LWR": ("fed_lwr", "nnunet"), "FedISM": ("fed_ism", "nnunet"),
    "pooled": ("", "nnunet"), "FedAvg, the other task": ("fed_avg", "volume_segmentation"),
}  # fmt: skip
WIDTHS = [8, 16, 32, 64]
STEPS = {"local_steps": 25, "batch_size": 2}
QUICK = {**STEPS, "momentum": 0.9, "learning_rate": 0.1}
RUN: dict[str, Any] = {"rounds": 10, "jobs": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("clipped")
    trained = parts.add_parser("hippocampus")
    trained.add_argument("real_data", type=Path)
    trained.add_argument("out", type=Path)
    trained.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    if given.part == "clipped":
        clipped()
    else:
        hippocampus(given.real_data, given.out, given.seeds)


def clipped() -> None:
    rng = np.random.default_rng(0)
    inside = np.ones(VOXELS, bool)
    sums = {
        name: sum(foreground(rng.normal(hu, spread, VOXELS), inside) for _ in range(cases))
        for name, (cases, hu, spread) in HOSPITALS.items()
    }
    every, names = (
        sum(cases for cases, _, _ in HOSPITALS.values()),
        ["mean", "std", "percentile_00_5", "percentile_99_5"],
    )
    each = {name: intensities(np.asarray(histogram)) for name, histogram in sums.items()}
    rows = {
        **each, "sum of the histograms": intensities(np.sum([*sums.values()], axis=0)),
        "mean of the hospitals' figures": {
            name: sum(HOSPITALS[one][0] * each[one][name] for one in each) / every for name in names
        },
    }  # fmt: skip
    voxels = np.sort(np.concatenate([sums["third"]]))  # only to say what is lost of the third hospital's organ
    assert voxels.size == HIGHEST_HU - LOWEST_HU + 1
    print(f"| | {' | '.join(names)} | third hospital's organ above |\n| --- |" + " ---: |" * 5)
    values = np.arange(LOWEST_HU, HIGHEST_HU + 1)
    for row, figures in rows.items():
        above = sums["third"][values > figures["percentile_99_5"]].sum() / sums["third"].sum()
        print(f"| {row} | {' | '.join(f'{figures[name]:.1f}' for name in names)} | {above:.0%} |")


def hippocampus(real_data: Path, out: Path, seeds: int) -> None:
    data, plan = out / "data", out / "plan.json"
    if not plan.exists():
        write_folders(real_data, out / "volumes", 20)
        split = ["--fractions", "0.6", "0.1", "0.3"]
        command("prepare", "volumes", "--source", out / "volumes", "--out", data, *split)
        command("plan", data, "--out", plan, "--set", "num_classes=2")
    planned = json.loads(plan.read_text())
    full = planned["configurations"]["3d_fullres"]
    print(f"plan: patch {full['patch_size']}, batch {full['batch_size']}, spacing {full['spacing']}")
    full["architecture"]["arch_kwargs"]["features_per_stage"] = WIDTHS
    full.update(spacing=[1.5, 1.5, 1.5], patch_size=[24, 40, 24])
    both: dict[str, Any] = {"num_classes": 2, "class_names": ["anterior", "posterior"], **STEPS}
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        for title, (method, task) in ARMS.items():
            place, own = out / f"{method or 'pooled'}-{task}-{seed}", {}
            if not [*place.rglob("results.json")]:
                if not method:
                    own = {"data": together(data, out / "together"), "min_sites": 1}
                settings = {**both, **({"plan": planned, **QUICK} if task == "nnunet" else {})}
                settings |= {"cka_max_samples": 8} if method == "fed_lwr" else {}
                same = {"task": task, "seed": seed, "settings": settings, "workspace": place, **RUN}
                fairflare.run(method or "fed_avg", **{"data": data, **same, **own})
            tested = place if method else out / "pooled-by-site" / place.name
            if not tested.exists():
                command("evaluate", place, "--data", data, "--last", "--out", tested.parent)
            rows.setdefault(title, []).append(dice(tested))
            table(rows)


def together(data: Path, folder: Path) -> Path:
    """Write the data of one site that has all sites' volumes, and return their ``fairflare.json``."""
    lists: dict[str, Any] = {"mask_labels": {"1": None, "2": None}}
    for file in sorted(data.glob("*/datalist.json")):
        for split, items in json.loads(file.read_text()).items():
            for item in items if split in ("training", "validation", "test") else ():
                files = {kind: f"{file.parent.name}/{item[kind]}" for kind in ("image", "label")}
                lists.setdefault(split, []).append({**item, **files})
    folder.mkdir(exist_ok=True)
    (folder / "datalist.json").write_text(json.dumps(lists))
    site = {"data_root": str(data.absolute()), "datalist": str((folder / "datalist.json").absolute())}
    (folder / "fairflare.json").write_text(json.dumps({"sites": {"all": site}}))
    return folder / "fairflare.json"


def dice(place: Path) -> dict[str, float]:
    columns = fairflare.Results(place).document.columns
    return {site: cell.counted for site, cell in columns.get("last", columns.get("best"))["dice"].items()}


def table(rows: dict[str, list[dict[str, float]]]) -> None:
    sites = sorted(rows["FedAvg"][0])
    print(f"| | worst site | less FedAvg's | mean | {' | '.join(sites)} |\n| --- |" + " ---: |" * (3 + len(sites)))
    usual = [min(run.values()) for run in rows["FedAvg"]]
    for title, runs in rows.items():
        means = [float(np.mean([run[site] for run in runs])) for site in sites]
        worst = [min(run.values()) for run in runs]
        gains = [own - other for own, other in zip(worst, usual, strict=False)]
        values = [interval(worst), interval(gains), *(f"{value:.3f}" for value in (np.mean(means), *means))]
        print(f"| {title} | {' | '.join(values)} |")
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    print(f"{sum(one.ru_utime + one.ru_stime for one in used) / 60:.1f} processor minutes", flush=True)


def interval(values: list[float]) -> str:
    """Write the mean over seeds with the ends of its 95 % interval, by Student's t."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5 if values[1:] else np.inf
    reach = float(stdtrit(max(1, len(values) - 1), 0.975)) * error
    return f"{mean:.3f} [{mean - reach:.3f}, {mean + reach:.3f}]" if np.isfinite(reach) else f"{mean:.3f}"


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "fairflare.cli", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
