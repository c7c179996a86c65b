"""Who gains from a model fine-tuned at the own site: cells and nuclei, parts of the network, three seeds.

    python benchmarks/fine_tuning.py FOLDER --out RUNS [--parts head norms all] [--rounds 12] [--seeds 3]

FOLDER is what ``fairflare prepare white-cells|nuclei`` wrote. For each part FedAvg runs with ``personalise``, and all
sites let their own model be tested at the others. Gains of single test images are averaged over the seeds first;
intervals and p-values are over the images. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
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
from fairflare.reporting.sites.own_models import verdict

SETTINGS: dict[str, Any] = {"in_channels": 3, "image_size": [48, 48], "features": [8, 8, 16, 16, 32, 8],
                            "batch_size": 16, "local_epochs": 1}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["head", "norms", "all"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
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
                found[site].append((of, *scores, units_of(data.cases("test"), len(scores[0])).drawn(site, 1000)))
        rows = {}
        for site, runs in found.items():
            gains = np.mean([own - common for _, common, own, _ in runs], 0)
            rows[site] = paired_gain(float(gains.mean()), np.array([gains[one].mean() for one in runs[0][3]]))
        corrected = holm([row[3] for row in rows.values()])
        for p, (site, (gain, low, high, _, _)) in zip(corrected, rows.items(), strict=True):
            of, common, own, _ = zip(*found[site], strict=True)
            steps, others = [o["steps"] for o in of], [[*o["others"].values()] for o in of if o["others"]]
            away = f"{fmean(map(fmean, others)):+.3f}, {min(map(min, others)):+.3f}" if others else "-"
            advice = verdict(max(steps), low, high, float(p))
            print(f"| {part} | {site} | {', '.join(f'{n:.0f}' for n in steps)} | {np.mean(common):.3f} | "
                  f"{np.mean(own):.3f} | {gain:+.3f} [{low:+.3f}, {high:+.3f}] | {p:.3f} | {advice} | {away} |",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
