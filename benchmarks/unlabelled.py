"""Measure what missing labels cost, and what images without labels add.

    python benchmarks/unlabelled.py FOLDER --out RUNS [--task segmentation] [--rounds 12] [--seeds 3] [--share 0.75]
    python benchmarks/unlabelled.py FOLDER --out RUNS --drawn JTSC=2 CellaVision=1 [...]

FOLDER is what ``fairflare prepare white-cells`` wrote, or ``fairflare prepare volumes`` of what
``benchmarks/hippocampus_folders.py`` wrote. At the first two sites by name the masks of this share of the training
images are put aside. FedAvg runs with all labels, without these images, and with them as ``unlabelled``
(``unlabelled=consistency``). With ``--drawn`` the masks of these sites keep one label alone instead, without and with
``unlabelled=consistency``; then each structure's Dice on the complete test masks is printed, and at its worst site the
share of that with all labels. Runs that are in RUNS are not made again. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import nibabel
import numpy as np
import torch
from PIL import Image

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import RUN_DIR, run_local
from fairflare.reporting.results import read_document

SETTINGS: dict[str, dict[str, Any]] = {
    "segmentation": {"in_channels": 3, "image_size": [48, 48], "features": [8, 8, 16, 16, 32, 8], "num_classes": 2,
                     "batch_size": 16},
    "volume_segmentation": {"num_classes": 2, "batch_size": 2, "features": [8, 8, 16, 32, 64, 8], "patches": 2,
                            "schedule": "cosine"},
}  # fmt: skip


def lists(given: Path, local: dict[str, Any], share: float, seed: int, out: Path) -> dict[str, dict[str, Any]]:
    """Write the datalists of the three arms, and return ``fairflare.json`` of each."""
    arms: dict[str, dict[str, Any]] = {"all labels": {}, "images dropped": {}, "unlabelled": {}}
    for number, (site, block) in enumerate(sorted(local["sites"].items())):
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


def drawn(given: Path, local: dict[str, Any], said: dict[str, int], out: Path) -> dict[str, dict[str, Any]]:
    """Write masks with one label alone for the sites that drew no other, and return ``fairflare.json`` of each arm."""
    part = {}
    for site, block in local["sites"].items():
        content = json.loads((given / site / block.get("datalist", "datalist.json")).read_text(encoding="utf-8"))
        for number, entry in enumerate(entry for split in content if isinstance(content[split], list)
                                       for entry in content[split] if site in said and "label" in entry):  # fmt: skip
            file = given / site / entry["label"]
            volume = nibabel.load(file) if file.name.endswith(".nii.gz") else None
            mask = np.asarray(Image.open(file) if volume is None else volume.dataobj)
            kept = np.where(mask == said[site], mask, 0).astype(np.uint8)
            entry["label"] = f"drawn_{number}.{'png' if volume is None else 'nii.gz'}"
            if volume is None:
                Image.fromarray(kept).save(given / site / entry["label"])
            else:
                nibabel.save(nibabel.Nifti1Image(kept, volume.affine), given / site / entry["label"])
        file = out / f"drawn-{site}.json"
        file.write_text(json.dumps(content), encoding="utf-8")
        own = {"datalist": str(file.absolute()), "structures": [said[site]]} if site in said else {}
        part[site] = {**block, **own}
    return {"all labels": local, "with consistency": {"sites": part}, "partial labels": {"sites": part}}


def on_complete_masks(plan: Any, place: Path, local: dict[str, Any]) -> dict[str, float]:
    """Return the Dice of a run's last model by site and structure, on the complete masks of each site's test images."""
    (file,) = place.rglob("FL_global_model.pt")
    model = plan.task.build_model()
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    found: dict[str, float] = {}
    for site, block in local["sites"].items():
        test = plan.task.open_site(site, block).batches("test", batch_size=4)
        of = plan.task.evaluate(model, test, "cpu")
        found |= {f"{site} {name}": value for name, value in of.items() if name.startswith("dice_")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="segmentation", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.75)
    parser.add_argument("--drawn", nargs="*", default=[], metavar="SITE=LABEL")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    local = json.loads((given.folder / "fairflare.json").read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, float]]] = {}
    said = {site: int(label) for site, label in (entry.split("=") for entry in given.drawn)}
    for seed in range(given.seeds):
        arms = drawn(given.folder, local, said, given.out) if said else None
        for arm, file in (arms or lists(given.folder, local, given.share, seed, given.out)).items():
            how = {"unlabelled": "consistency"} if arm in ("unlabelled", "with consistency") else {}
            settings = {**SETTINGS[given.task], **how}
            run: dict[str, Any] = {"sites": [*local["sites"]], "num_rounds": given.rounds, "seed": seed}
            place = given.out / f"{arm.replace(' ', '_')}-{seed}"
            plan = make_plan("fed_avg", task=given.task, settings=settings, **run)
            if not (place / RUN_DIR / "fairflare").exists():
                run_local(plan, place, {**local, **file})
            if said:
                found.setdefault(arm, []).append(on_complete_masks(plan, place, local))
                continue
            test = read_document(place / RUN_DIR / "fairflare")["test"]
            found.setdefault(arm, []).append({site: test[site]["dice"] for site in local["sites"]})
    columns = [*found["all labels"][0]]
    print(f"| labels | {' | '.join(columns)} | mean | worst, by seed |")
    print("| --- |" + " ---: |" * (len(columns) + 1) + " --- |")
    for arm, runs in found.items():
        means = [fmean(run[column] for run in runs) for column in columns]
        worst = ", ".join(f"{min(run.values()):.3f}" for run in runs)
        print(f"| {arm} | {' | '.join(f'{value:.3f}' for value in [*means, fmean(means)])} | {worst} |")
    for name in sorted({column.split()[1] for column in columns}) if said else []:
        lowest = {
            arm: [min(v for k, v in run.items() if k.endswith(name)) for run in runs] for arm, runs in found.items()
        }
        for arm, values in lowest.items():
            each = [value / full for value, full in zip(values, lowest["all labels"], strict=True)]
            share = fmean(values) / fmean(lowest["all labels"])
            told = ", ".join(f"{value:.3f} ({one:.0%})" for value, one in zip(values, each, strict=True))
            print(f"\n{name} at its worst site, {arm}: {told}; mean {fmean(values):.3f}, {share:.1%} of all labels")


if __name__ == "__main__":
    main()
