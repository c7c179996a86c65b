"""Who gains from a model fine-tuned at the own site: cells and nuclei, parts of the network, three seeds.

    python benchmarks/fine_tuning.py FOLDER --out RUNS [--parts head norms all] [--rounds 12] [--seeds 3] [--store CSV]

FOLDER is what ``fairflare prepare white-cells|nuclei`` wrote. For each part FedAvg runs with ``personalise``, and all
sites let their own model be tested at the others. Gains of single test images are averaged over the seeds first;
intervals and p-values are over the images. Prints Markdown; ``--store docs/results/data/fine_tuning.csv`` also puts the
figures there, in tables ``NAME_PART`` after FOLDER's name.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fairflare.base.cases.resampling import units_of
from fairflare.core.statistics.intervals import holm, paired_gain
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import RUN_DIR, run_local
from fairflare.reporting.results import read_document
from fairflare.reporting.sites.own_models import SHOULD, SHOULD_NOT, verdict

SETTINGS: dict[str, Any] = {"in_channels": 3, "image_size": [48, 48], "features": [8, 8, 16, 16, 32, 8],
                            "batch_size": 16, "local_epochs": 1}  # fmt: skip
#: Rows of the results page.
COMMON, OWN, STEPS = "common model", "own model", "steps of fine-tuning"
AWAY, WORST = "gain at the other sites", "gain at the other sites, worst"
NONE = "no own model"
VERDICTS = {SHOULD: "better", SHOULD_NOT: "worse"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["head", "norms", "all"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--store", type=Path)
    given = parser.parse_args()
    if given.store and not given.store.is_file():
        parser.error(f"--store {given.store}: no such file; begin it with the head of another CSV of docs/results/data")
    local = json.loads((given.folder / "fairflare.json").read_text(encoding="utf-8")) | {"submit_model": True}
    print("| part | site | steps | common | own | gain [95 %] | p (Holm) | advice | at the others: mean, worst |")
    print("| --- | --- | --- | ---: | ---: | --- | ---: | --- | --- |")
    for part in given.parts:
        found: dict[str, list[Any]] = {site: [] for site in local["sites"]}
        for seed in range(given.seeds):
            settings = {**SETTINGS, "personalise": f"finetune:{part}"}
            run = {"num_rounds": given.rounds, "seed": seed, "experiment": "tuned"}
            plan, place = make_plan("fed_avg", sites=[*found], settings=settings, **run), given.out / f"{part}-{seed}"
            if not (place / RUN_DIR / "best_FL_global_model.pt").exists():
                run_local(plan, place, local)
            states = [torch.load(place / RUN_DIR / "FL_global_model.pt", weights_only=True)["model"]]
            for site, of in read_document(place / RUN_DIR / "fairflare")["personal"]["sites"].items():
                (kept,) = (place / "fairflare_state").glob(f"**/{site}/*/local_model.{given.rounds:06d}.pt")
                data, scores = plan.task.open_site(site, {**local, **local["sites"][site]}), []
                for state in (*states, torch.load(kept, weights_only=True)):
                    model = plan.task.build_model()
                    model.load_state_dict(state)
                    scores.append(np.array(plan.task.image_scores(model, data, torch.device("cpu"))))
                found[site].append((of, *scores, units_of(data.cases("test"), len(scores[0])).draw(site, 1000)))
        rows = {}
        for site, runs in found.items():
            gains = np.mean([own - common for _, common, own, _ in runs], 0)
            rows[site] = paired_gain(float(gains.mean()), np.array([gains[one].mean() for one in runs[0][3]]))
        corrected = holm([row[3] for row in rows.values()])
        table = f"{given.folder.name.replace('-', '_')}_{part}"
        for p, (site, (gain, low, high, alone, _)) in zip(corrected, rows.items(), strict=True):
            of, common, own, _ = zip(*found[site], strict=True)
            steps, others = [o["steps"] for o in of], [[*o["others"].values()] for o in of if o["others"]]
            away = f"{fmean(map(fmean, others)):+.3f}, {min(map(min, others)):+.3f}" if others else "-"
            advice = verdict(max(steps), low, high, float(p))
            print(f"| {part} | {site} | {', '.join(f'{n:.0f}' for n in steps)} | {np.mean(common):.3f} | "
                  f"{np.mean(own):.3f} | {gain:+.3f} [{low:+.3f}, {high:+.3f}] | {p:.3f} | {advice} | {away} |",
                  flush=True)  # fmt: skip
            if given.store:
                every = " ".join(map(str, range(given.seeds)))
                tuned = " ".join(str(seed) for seed, o in enumerate(of) if o["others"])  # no step, no own model
                seen = {
                    (COMMON, every): [one.mean() for one in common], (OWN, every): [one.mean() for one in own],
                    (STEPS, every): steps, (AWAY, tuned): [*map(fmean, others)],
                    (WORST, tuned): [min(map(min, others))] if others else [],
                }  # fmt: skip
                known = VERDICTS.get(advice, "within noise")
                store(given.store, table, site, seen, [OWN, COMMON, site, every], (gain, low, high, known, alone, p))


def store(
    path: Path,
    table: str,
    site: str,
    seen: Mapping[tuple[str, str], Sequence[float]],
    of: list[str],
    gain: Sequence[Any],
) -> None:
    """Put a site's figures into the CSV of a results page, in place of earlier ones.

    Args:
        path: the CSV, with its head.
        table, site: the site's place in it.
        seen: values by seed, by row and seeds.
        of: row, reference, site and seeds of the gain.
        gain: mean gain, ends of its interval, verdict, p-value alone and corrected.
    """
    with path.open(encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    kept = [line for line in lines if (line[0], line[3]) != (table, site)]
    for (row, seeds), values in seen.items():
        mean, spread = (f"{np.mean(values):.8f}", f"{np.std(values):.8f}") if values else ("nan", "")
        kept.append(
            [table, row, "", site, seeds, mean, spread * (len(values) > 1), "", "", "" if values else NONE, *[""] * 3]
        )
    mean, low, high, known, *ps = gain
    ends = f"{mean:.8f}", "", f"{low:.8f}", f"{high:.8f}"
    kept.append([table, *of, *ends, known, *(f"{p:.8f}" for p in ps), ""])
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *kept])


if __name__ == "__main__":
    main()
