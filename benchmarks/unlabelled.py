"""Measure what missing labels cost, and what ``unlabelled=consistency`` adds to plain training.

    python benchmarks/unlabelled.py FOLDER --out RUNS [--task segmentation] [--rounds 12] [--seeds 5] [--share 0.75]
    python benchmarks/unlabelled.py FOLDER --out RUNS --drawn JTSC=2 CellaVision=1 [--limit N]

FOLDER is what ``fairflare prepare white-cells``, ``cell-types`` (``--task classification``), or ``fairflare prepare
volumes`` of what ``benchmarks/hippocampus_folders.py`` wrote. At the first two sites by name the masks or classes of
this share of the training images are put aside. FedAvg runs with all labels, without these images, with them as
``unlabelled``, and without them for as many rounds more as take the same processor time as that. With ``--drawn`` the
masks of these sites keep one label alone instead. Then the arms are all labels; the sites' structures declared; trained
as if all were annotated; declared with ``unlabelled=consistency``; and declared, with its processor time. Each
structure's Dice on the complete test masks is printed, and at its worst site the share of that with all labels.
``--limit`` takes the first N images of each site's training, and as large a part of its other lists. Runs that are in
RUNS are not made again. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import nibabel
import numpy as np
import torch
from PIL import Image

from fairflare.data.datalist import SPLITS
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import RUN_DIR, run_local
from fairflare.reporting.results import read_results
from fairflare.reporting.values import collect_by_site

SETTINGS: dict[str, dict[str, Any]] = {
    "segmentation": {"in_channels": 3, "image_size": [48, 48], "features": [8, 8, 16, 16, 32, 8], "num_classes": 2,
                     "batch_size": 16},
    "volume_segmentation": {"num_classes": 2, "batch_size": 2, "features": [8, 8, 16, 32, 64, 8], "patches": 2,
                            "schedule": "cosine"},
    "classification": {"in_channels": 3, "image_size": [48, 48], "num_classes": 5, "batch_size": 16},
}  # fmt: skip
#: Arms: what a site's file says by the name of the arm. The longer arm is the plain one with more rounds.
ALL, LONGER = "all labels", ", longer"
MISSING = (ALL, "images dropped", "unlabelled")
DRAWN = (ALL, "partial labels", "as if all were annotated", "with consistency")


def limited(given: Path, out: Path, limit: int | None) -> dict[str, Any]:
    """Return ``fairflare.json`` of the folder; with a limit, of shorter datalists in ``out``."""
    local: dict[str, Any] = json.loads((given / "fairflare.json").read_text(encoding="utf-8"))
    for site, block in local["sites"].items() if limit else ():
        content = json.loads((given / site / "datalist.json").read_text(encoding="utf-8"))
        share = min(1, limit / len(content["training"]))
        short = {k: v[: round(share * len(v))] if k in SPLITS else v for k, v in content.items()}
        block["datalist"] = str((out / f"{site}.json").absolute())
        Path(block["datalist"]).write_text(json.dumps(short), encoding="utf-8")
    return local


def lists(given: Path, local: dict[str, Any], share: float, seed: int, out: Path) -> dict[str, dict[str, Any]]:
    """Write the datalists of the three arms, and return ``fairflare.json`` of each."""
    arms: dict[str, dict[str, Any]] = {arm: {"sites": {}} for arm in MISSING}
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
            arms[arm]["sites"][site] = {**block, "datalist": str(file.absolute())}
    return arms


def drawn(given: Path, local: dict[str, Any], said: dict[str, int], out: Path) -> dict[str, dict[str, Any]]:
    """Write masks with one label alone for the sites that drew no other, and return ``fairflare.json`` of each arm."""
    part, naive = {}, {}
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
        listed = {**block, "datalist": str(file.absolute())}
        part[site] = {**listed, "structures": [said[site]]} if site in said else listed
        naive[site] = {**listed, "structures": "all"}
    return dict(zip(DRAWN, (local, *({"sites": own} for own in (part, naive, part))), strict=True))


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


def run(given: Any, arm: str, file: dict[str, Any], local: dict[str, Any], seed: int, rounds: int) -> dict[str, float]:
    """Make the run of an arm, or read it, and return its figures, with the processor seconds under ``seconds``."""
    how = {"unlabelled": "consistency"} if arm in (MISSING[-1], DRAWN[-1]) else {}
    settings: dict[str, Any] = {**SETTINGS[given.task], **how}
    place = given.out / f"{arm.replace(' ', '_')}-{seed}"
    plan = make_plan(
        "fed_avg", task=given.task, settings=settings, sites=[*local["sites"]], num_rounds=rounds, seed=seed
    )
    if not (clock := place / "seconds.txt").exists():
        before = time.process_time()
        run_local(plan, place, {**local, **file})
        clock.write_text(str(time.process_time() - before), encoding="utf-8")
    metric = "balanced_accuracy" if given.task == "classification" else "dice"
    test = collect_by_site(read_results(place / RUN_DIR / "fairflare"), metric)
    found = {site: test[site] for site in local["sites"]}
    return {
        **(on_complete_masks(plan, place, local) if given.drawn else found),
        "seconds": float(clock.read_text(encoding="utf-8")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="segmentation", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.75)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--drawn", nargs="*", default=[], metavar="SITE=LABEL")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    local = limited(given.folder, given.out, given.limit)
    found: dict[str, list[dict[str, float]]] = {}
    said = {site: int(label) for site, label in (entry.split("=") for entry in given.drawn)}
    for seed in range(given.seeds):
        arms = (drawn(given.folder, local, said, given.out) if said
                else lists(given.folder, local, given.share, seed, given.out))  # fmt: skip
        for arm, file in arms.items():
            found.setdefault(arm, []).append(run(given, arm, file, local, seed, given.rounds))
        plain, dear = [*arms][1], [*arms][-1]
        more = round(given.rounds * found[dear][-1]["seconds"] / found[plain][-1]["seconds"])
        found.setdefault(plain + LONGER, []).append(
            {**run(given, plain + LONGER, arms[plain], local, seed, more), "rounds": more}
        )
    columns = [name for name in found[ALL][0] if name != "seconds"]
    print(f"| labels | {' | '.join(columns)} | mean | worst, by seed | rounds | processor seconds |")
    print("| --- |" + " ---: |" * (len(columns) + 1) + " --- |" + " ---: |" * 2)
    for arm, runs in found.items():
        means = [fmean(run[column] for run in runs) for column in columns]
        worst = ", ".join(f"{min(run[column] for column in columns):.3f}" for run in runs)
        rounds, seconds = (fmean(run.get(key, given.rounds) for run in runs) for key in ("rounds", "seconds"))
        values = " | ".join(f"{value:.3f}" for value in [*means, fmean(means)])
        print(f"| {arm} | {values} | {worst} | {rounds:.0f} | {seconds:.0f} |")
    for name in sorted({column.split()[1] for column in columns}) if said else []:
        lowest = {
            arm: [min(v for k, v in run.items() if k.endswith(name)) for run in runs] for arm, runs in found.items()
        }
        for arm, values in lowest.items():
            each = [value / full for value, full in zip(values, lowest[ALL], strict=True)]
            told = ", ".join(f"{value:.3f} ({one:.0%})" for value, one in zip(values, each, strict=True))
            print(
                f"\n{name} at its worst site, {arm}: {told}; mean {fmean(values):.3f}, "
                f"{fmean(values) / fmean(lowest[ALL]):.1%} of all labels; 90 % in {sum(one >= 0.9 for one in each)} of "
                f"{len(each)} seeds"
            )


if __name__ == "__main__":
    main()
