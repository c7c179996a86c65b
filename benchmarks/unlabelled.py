"""Measure what images without labels add: 75 % of the masks removed at two sites, against dropping these images.

    python benchmarks/unlabelled.py FOLDER --out RUNS [--task segmentation] [--rounds 12] [--seeds 3] [--share 0.75]

FOLDER is what ``fairflare prepare white-cells`` or ``benchmarks/hippocampus_folders.py`` wrote. At the first two sites
the masks of this share of the training images are put aside. FedAvg runs with all labels, without these images, and
with them as ``unlabelled`` (``unlabelled=consistency``). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import RUN_DIR, run_local
from fairflare.reporting.results import read_document

SETTINGS: dict[str, dict[str, Any]] = {
    "segmentation": {"in_channels": 3, "image_size": [48, 48], "features": [8, 8, 16, 16, 32, 8], "num_classes": 2,
                     "batch_size": 16},
    "volume_segmentation": {"num_classes": 2, "batch_size": 2, "features": [4, 4, 8, 16, 32, 4], "patches": 2},
}  # fmt: skip


def lists(given: Path, local: dict[str, Any], share: float, seed: int, out: Path) -> dict[str, dict[str, Any]]:
    """Write the datalists of the three arms, and return ``fairflare.json`` of each."""
    arms: dict[str, dict[str, Any]] = {"all labels": {}, "images dropped": {}, "unlabelled": {}}
    for number, (site, block) in enumerate(local["sites"].items()):
        content = json.loads((given / site / block.get("datalist", "datalist.json")).read_text(encoding="utf-8"))
        full = content["training"]
        order = np.random.default_rng([seed, number]).permutation(len(full))
        kept = [full[i] for i in order[: max(2, round((1 - share) * len(full)))]] if number < 2 else full
        rest = [{k: v for k, v in entry.items() if k != "label"} for entry in full if entry not in kept]
        for arm, own in zip(arms, ({}, {"training": kept}, {"training": kept, "unlabelled": rest}), strict=True):
            more = {key: value for key, value in own.items() if value}
            file = out / f"{arm.replace(' ', '_')}-{seed}-{site}.json"
            file.write_text(json.dumps({**content, **more}), encoding="utf-8")
            arms[arm].setdefault("sites", {})[site] = {**block, "datalist": str(file.absolute())}
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="segmentation", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.75)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    local = json.loads((given.folder / "fairflare.json").read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(given.seeds):
        for arm, file in lists(given.folder, local, given.share, seed, given.out).items():
            settings = {**SETTINGS[given.task], **({"unlabelled": "consistency"} if arm == "unlabelled" else {})}
            run: dict[str, Any] = {"sites": [*local["sites"]], "num_rounds": given.rounds, "seed": seed}
            place = given.out / f"{arm.replace(' ', '_')}-{seed}"
            if not (place / RUN_DIR / "fairflare").exists():
                run_local(make_plan("fed_avg", task=given.task, settings=settings, **run), place, {**local, **file})
            test = read_document(place / RUN_DIR / "fairflare")["test"]
            found.setdefault(arm, []).append({site: test[site]["dice"] for site in local["sites"]})
    print(f"| labels | {' | '.join(local['sites'])} | mean | worst, by seed |")
    print("| --- |" + " ---: |" * (len(local["sites"]) + 1) + " --- |")
    for arm, runs in found.items():
        means = [fmean(run[site] for run in runs) for site in local["sites"]]
        worst = ", ".join(f"{min(run.values()):.3f}" for run in runs)
        print(f"| {arm} | {' | '.join(f'{value:.3f}' for value in [*means, fmean(means)])} | {worst} |")


if __name__ == "__main__":
    main()
