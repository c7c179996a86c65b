"""Measure batch norms' running statistics after averaging: error, exchanges, bytes, seconds, validation.

FedAvg trains for some rounds on a phantom; then the last average gets its statistics in each of the ways, over the
same calls that a run makes (``federation/server/recalibration.py``), and is compared with all sites' images in one
place, in float64. Error: the largest over all channels, of means in standard deviations, of variances as a share.
Seconds are those of one round with the sites one after the other in one process on one thread, beside those of its
training.

    python benchmarks/norm_statistics.py [--rounds 3 5] [--kind segmentation] [--seed 0] [--small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from fairflare.core.features.batch_norms import MEAN, VARIANCE, running_norms
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.transports.local import LocalTransport, run_local
from fairflare.prediction.adapt import recalibrate
from fairflare.reporting.documents import RoundRecord

SETTINGS: dict[str, dict[str, Any]] = {
    "segmentation": {},
    "classification": {"phantom": "fundus"},
}
SMALL: dict[str, dict[str, Any]] = {
    "segmentation": {"phantom_cases": 0.25},
    "classification": {"phantom_samples": 150, "phantom_test": 80},
}
NETWORKS = {"segmentation": "U-Net, prostate phantom", "classification": "ResNet-18, fundus phantom"}
WAYS = ("average", "recalibrated")
State = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", nargs="+", type=int, default=[3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a quarter of the images or less")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | rounds | statistics | error of means | of variances | exchanges | kB out | kB in | seconds "
          "| training | validation: mean | worst |")  # fmt: skip
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for kind in given.kind:
        for rounds in given.rounds:
            for row in rows(kind, rounds, given.seed, SMALL[kind] if given.small else {}):
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


def rows(kind: str, num_rounds: int, seed: int, fewer: dict[str, Any]) -> list[list[Any]]:
    """Return a row for each way."""
    plan = make_plan("fed_avg", task=kind, num_rounds=num_rounds, settings={**SETTINGS[kind], **fewer}, seed=seed)
    found = []
    with tempfile.TemporaryDirectory(prefix="fairflare_norms_") as folder:
        results = json.loads((run_local(plan, Path(folder) / "run") / "results.json").read_text())
        training = results["rounds"][-1]["phases"][0]["seconds"]
        file = Path(folder) / "run" / "server" / "simulate_job" / "FL_global_model.pt"
        averaged: State = torch.load(file, weights_only=True)["model"]
        wanted = central(plan, averaged)
        for way in WAYS:
            state, record = by_way(plan, averaged, way, Path(folder) / way)
            phase = record.phases[0] if record.phases else None
            cost: list[Any] = ["-"] * 4
            if phase is not None:
                number = record.details["norms"]["exchanges"]
                cost = [number, f"{phase.bytes_out / 1e3:.0f}", f"{phase.bytes_in / 1e3:.0f}", f"{phase.seconds:.1f}"]
            scores = validation(plan, state)
            errors = [f"{error:.2g}" for error in difference(state, wanted)]
            measured = [f"{statistics.mean(scores):.3f}", f"{min(scores):.3f}"]
            found.append([NETWORKS[kind], num_rounds, f"`{way}`", *errors, *cost, f"{training:.1f}", *measured])
    return found


def by_way(plan: Plan, state: State, way: Any, folder: Path) -> tuple[State, RoundRecord]:
    """Return the state with its statistics by one way, and the way's cost."""
    assert plan.sites
    run = RunSettings(num_rounds=1, norm_statistics=way)
    transport = LocalTransport(plan.sites, plan.task, plan.training, {}, folder / "sites")
    rounds = Rounds(plan.task, plan.rule, run, transport, Place(folder, folder / "kept", "benchmark"))
    record = RoundRecord(0, plan.sites, accepted=plan.sites)
    for site in plan.sites:  # make the phantom before any way is timed
        transport._worker(site, "")._data = plan.task.open_site(site, {})
    return dict(rounds.recalibration(state, record)), record


def central(plan: Plan, state: State) -> State:
    """Compute the statistics of all sites' images in one place, in float64."""
    model = plan.task.build_model()
    model.load_state_dict(state)
    assert plan.sites
    data = [plan.task.open_site(site, {}) for site in plan.sites]
    images = [x.double() for d in data for x, _ in d.batches("training", batch_size=16)]
    recalibrate(model.double(), lambda: images)
    kept = [f"{name}.{what}" for name in running_norms(model) for what in (MEAN, VARIANCE)]
    return {name: tensor for name, tensor in model.state_dict().items() if name in kept}


def difference(state: State, wanted: State) -> tuple[float, float]:
    """Return the largest difference: of means in standard deviations, of variances as a share."""
    means, variances = [0.0], [0.0]
    for name, tensor in wanted.items():
        variance = wanted[name.replace(MEAN, VARIANCE)] + 1e-5
        gap = (state[name].double() - tensor).abs()
        if name.endswith(MEAN):
            means.append(float((gap / variance.sqrt()).max()))
        else:
            variances.append(float((gap / variance).max()))
    return max(means), max(variances)


def validation(plan: Plan, state: State) -> list[float]:
    """Return the primary metric on each site's validation split."""
    model = plan.task.build_model()
    model.load_state_dict(state)
    assert plan.sites
    found = []
    for site in plan.sites:
        batches = plan.task.open_site(site, {}).batches("validation", batch_size=16)
        found.append(plan.task.evaluate(model, batches, "cpu")[plan.task.primary_metric])
    return found


if __name__ == "__main__":
    main()
