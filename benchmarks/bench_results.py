"""Measure what a long run writes: bytes and time per round of results and checkpoint, and the folders' size.

Records are made as Fed-LWR makes them: the rule weighs random similarity scores of every site and layer. The model is
left out (one small tensor): its bytes are the same in every round.

    python benchmarks/bench_results.py [--rounds 200] [--sites 100] [--layers 41]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fairflare.federation.record.checkpoint import Checkpoint, CheckpointFolder
from fairflare.methods.base.rule import RoundInputs
from fairflare.methods.fed_lwr import FedLWR
from fairflare.reporting.results import LeftOut, PhaseRecord, ResultsStore, RoundRecord


def record(rule: FedLWR, number: int, sites: list[str], layers: list[str], seed: int = 0) -> RoundRecord:
    """Make a round of Fed-LWR in which one site is silent."""
    rng = np.random.default_rng([seed, number])
    scores = {site: rng.gamma(2.0, 0.01, len(layers)) for site in sites}
    reports = {
        site: {
            "cka": dict(zip(layers, (1.0 - found).tolist(), strict=True)),
            "dissimilarity": dict(zip(layers, found.tolist(), strict=True)),
        }
        for site, found in scores.items()
    }
    weighing = rule.weigh(
        RoundInputs(
            current_round=number, num_rounds=1000, sites=sites, num_samples=dict.fromkeys(sites, 100), reports={},
            anchor_reports=reports, states={}, owner={layer: layer for layer in layers},
        )
    )  # fmt: skip
    phases = [PhaseRecord(name, float(rng.random() * 60), 10**9, 10**9, len(sites), len(sites)) for name in
              ("train", "anchor", "aggregate")]  # fmt: skip
    return RoundRecord(
        current_round=number,
        sites=sites,
        accepted=sites[1:],
        left_out=[LeftOut(sites[0], "train", "no answer within 3600.0 s")],
        phases=phases,
        validation={site: {"dice": float(rng.random()), "loss": float(rng.random())} for site in sites},
        train={
            site: {"loss": float(rng.random()), "num_samples": 321, "num_steps": 41, "seconds": round(rng.random(), 3)}
            for site in sites
        },
        layers=weighing.record,
    )


def events(store: ResultsStore, made: RoundRecord) -> None:
    """Write the event log's lines of a round."""
    for phase in ("train", "anchor"):
        store.event("phase", phase=phase, current_round=made.current_round, num_rounds=200, sites=made.sites)
        for site in made.sites:
            metrics = made.validation[site] if phase == "train" else {}
            store.event("site", phase=phase, current_round=made.current_round, site=site, ok=True, reason="",
                        metrics=metrics, seconds=1.25)  # fmt: skip
    store.event("round_done", current_round=made.current_round, num_rounds=200)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--layers", type=int, default=41)
    args = parser.parse_args()
    sites = sorted(f"site-{k}" for k in range(1, args.sites + 1))
    layers = [f"encoder.{k // 4}.conv{k % 4}" for k in range(args.layers)]
    with tempfile.TemporaryDirectory(prefix="bench-results-") as temporary:
        run, kept = Path(temporary, "run"), Path(temporary, "checkpoint")
        rule, store, checkpoints = FedLWR(), ResultsStore(run), CheckpointFolder(kept)
        store.start({"method": "FedLWR", "sites": sites, "config": {}})
        seconds, largest = [], 0
        for number in range(args.rounds):
            made = record(rule, number, sites, layers)
            started = time.process_time()  # not the clock, as other programs use the disk too
            events(store, made)
            store.add_round(made)
            made_of = {"w": torch.zeros(8)}
            checkpoints.save(
                Checkpoint(number + 1, made_of, rule.state_dict(), store.state_dict(), {}, {}), store.log
            )  # fmt: skip
            seconds.append(time.process_time() - started)
            largest = max(largest, size(run) + size(kept))
        started = time.process_time()
        store.finish("completed", {site: {"dice": 0.5} for site in sites})
        ended = time.process_time() - started
        first, last = seconds[:10], seconds[-10:]
        print(f"{args.rounds} rounds, {args.sites} sites, {args.layers} layers")
        middle = seconds[len(seconds) // 2 - 5 : len(seconds) // 2 + 5]
        early, half, late = (statistics.median(some) for some in (first, middle, last))
        print("| | |")
        print("| --- | ---: |")
        print(f"| processor seconds a round, first ten / middle / last | {early:.3f} / {half:.3f} / {late:.3f} |")
        print(f"| processor seconds at the end of the run | {ended:.1f} |")
        left = size(run) + size(kept)
        print(f"| MB on disk, at most while it runs / in the end | {largest / 1e6:.1f} / {left / 1e6:.1f} |")
        print(f"| of these results.json | {(run / 'results.json').stat().st_size / 1e6:.1f} |")


if __name__ == "__main__":
    main()
