"""Measure what a missing channel costs, and what the column rule and dropped channels give back.

    python benchmarks/missing_channel.py --out RUNS [--rounds 30] [--seeds 3]

Synthetic abdomens have four channels; the lesion shows in channel c2 only, which site-3 lacks. FedAvg runs on all three
sites, with and without the rule that averages input columns over the sites that have the channel, with and without
``channel_drop``; and on the two sites with all channels alone. Runs that are in RUNS are not made again. Prints
Markdown: Dice of each structure, mean of the seeds, at the sites that have c2 and at the one that lacks it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import nibabel
import numpy as np
import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.opening import Opening
from fairflare.federation.transports.local import RUN_DIR, run_local
from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import read_results
from fairflare.reporting.values import collect_by_site, list_answering_sites, site_columns
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask
from fairflare_lab.phantoms.volumes import patients

CHANNELS, SIZE, LACKS = ["c1", "c2", "c3", "c4"], (32, 32, 32), "site-3"
HAVE = ["site-1", "site-2"]
SETTINGS: dict[str, Any] = {
    "channels": CHANNELS, "num_classes": 2, "class_names": ["organ", "lesion"],
    "patches": 1, "batch_size": 1, "local_steps": 8, "schedule": "cosine", "learning_rate": 0.01,
}  # fmt: skip
ARMS: dict[str, tuple[list[str], bool, float]] = {
    "sites with c2 alone": (HAVE, True, 0.0),
    "all, no rule": ([*HAVE, LACKS], False, 0.0),
    "all, column rule": ([*HAVE, LACKS], True, 0.0),
    "all, no rule, `channel_drop` 0.25": ([*HAVE, LACKS], False, 0.25),
    "all, column rule, `channel_drop` 0.25": ([*HAVE, LACKS], True, 0.25),
}


class Small(torch.nn.Module):
    """Segment with five convolutions at two resolutions, a tenth of the U-Net's work."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = torch.nn.Sequential(torch.nn.Conv3d(len(CHANNELS), 8, 3, padding=1), torch.nn.ReLU())
        self.coarse = torch.nn.Sequential(
            torch.nn.Conv3d(8, 16, 3, stride=2, padding=1), torch.nn.ReLU(),
            torch.nn.Conv3d(16, 16, 3, padding=2, dilation=2), torch.nn.ReLU(),
            torch.nn.Conv3d(16, 16, 3, padding=4, dilation=4), torch.nn.ReLU(), torch.nn.Upsample(scale_factor=2),
        )  # fmt: skip
        self.last = torch.nn.Sequential(torch.nn.Conv3d(24, 16, 1), torch.nn.ReLU(), torch.nn.Conv3d(16, 2, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        fine = self.fine(inputs)
        return self.last(torch.cat([fine, self.coarse(fine)], 1))


def written(folder: Path, site: str, seed: int) -> dict[str, Any]:
    """Write a site's volumes and datalist, and return its block of ``fairflare.json``."""
    names = [name for name in CHANNELS if site != LACKS or name != "c2"]
    lists: dict[str, Any] = {"channels": names}
    for split, drawn in patients(site, size=SIZE, seed=seed, cases=1.5, channels=4, shows={2: [1]}).items():
        for number, patient in enumerate(drawn):
            image = np.moveaxis(patient.image, 0, -1)[..., [CHANNELS.index(name) for name in names]]
            pair = {"image": image, "label": patient.label}
            entry = {key: f"{split}_{number}_{key}.nii.gz" for key in pair}
            for key, array in pair.items():
                path = folder / site / entry[key]
                path.parent.mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(array, np.diag([*patient.voxel, 1.0])), path)
            lists.setdefault(split, []).append({**entry, "patient": f"{split}-{number}"})
    (folder / site / "datalist.json").write_text(json.dumps(lists), encoding="utf-8")
    return {"data_root": str((folder / site).absolute())} | ({"channels": names} if site == LACKS else {})


def tests_of(results: RunResults) -> dict[str, dict[str, float]]:
    """Return the last model's test metrics, ``{site: {metric: value}}``."""
    columns = {name: collect_by_site(results, name) for name in site_columns(results)}
    return {site: {name: of[site] for name, of in columns.items()} for site in list_answering_sites(results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[dict[str, dict[str, float]]]] = {arm: [] for arm in ARMS}
    for seed in range(given.seeds):
        blocks = {site: written(given.out / f"data-{seed}", site, seed) for site in (*HAVE, LACKS)}
        for number, (arm, (sites, rule, drop)) in enumerate(ARMS.items()):
            place = given.out / f"run-{number}-{seed}"
            if not (place / RUN_DIR / "fairflare").exists() or not read_results(place / RUN_DIR / "fairflare").cells:
                shutil.rmtree(place, ignore_errors=True)  # of a run that was ended
                settings = {**SETTINGS, "channel_drop": drop}
                run: dict[str, Any] = {"sites": sites, "num_rounds": given.rounds, "seed": seed}
                plan = make_plan("fed_avg", task="volume_segmentation", settings=settings, **run)
                own = Opening.input_tensors if rule else lambda opening: ()
                small = patch.object(VolumeSegmentationTask, "build_unet", lambda task: Small())
                with small, patch.object(Opening, "input_tensors", own):
                    run_local(plan, place, {"sites": {site: blocks[site] for site in sites}})
            found[arm].append(tests_of(read_results(place / RUN_DIR / "fairflare")))
    print("| run | organ, have c2 | lesion, have c2 | organ, lacks c2 | lesion, lacks c2 | share kept |")
    print("| --- |" + " ---: |" * 5)
    groups = [(name, sites) for sites in (HAVE, [LACKS]) for name in ("dice_organ", "dice_lesion")]
    alone = 0.0
    for arm, runs in found.items():
        means = [
            fmean(run[site][name] for run in runs for site in sites) if sites[0] in runs[0] else None
            for name, sites in groups
        ]
        have = fmean(run[site]["dice"] for run in runs for site in HAVE)
        alone = alone or have
        print(f"| {arm} | {' | '.join('-' if m is None else f'{m:.2f}' for m in means)} | {have / alone:.0%} |")


if __name__ == "__main__":
    main()
