"""A site's training beside a plain PyTorch loop over the same batches: processor time of one thread.

    python benchmarks/bench_training.py [--repeat 5] [--tasks segmentation classification]

Each case is a round of one epoch on a phantom, in turns with the plain loop, and the least of ``--repeat`` runs
counts: the plain loop is forward, loss, backward, optimizer step, and the sum of the losses. The ratio is to it.
Methods that look twice (GSAM), or at a second network, have their steps' own cost in it. ``compile`` is left out: its
first minutes are a compiler's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairflare.exchange.messages import SiteTask
from fairflare.federation.local import LocalTransport
from fairflare.federation.plan import Plan, make_plan
from fairflare.federation.site import SiteWorker

DATA: dict[str, dict[str, Any]] = {
    "segmentation": {"phantom_cases": 3.0},
    "classification": {"phantom": "fundus", "phantom_samples": 600, "phantom_test": 80},
}
ALIKE: dict[str, Any] = {"batch_size": 8, "local_epochs": 1, "keep_optimizer_state": False, "augment": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fed_avg", {}),
    "FedAvg, channels last": ("fed_avg", {"channels_last": True}),
    "FedAvg, bf16": ("fed_avg", {"precision": "bf16"}),
    "FedAvg, bf16, channels last": ("fed_avg", {"precision": "bf16", "channels_last": True}),
    "FedProx": ("fed_prox", {}),
    "GSAM": ("fed_ism", {"criterion": "task"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=tuple(DATA), default=list(DATA))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | training | steps | ms a step | plain loop, ms a step | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for kind in given.tasks:
        for label, (method, settings) in CASES.items():
            print(f"| {kind} | {label} | " + " | ".join(row(kind, method, settings, given.repeat)) + " |", flush=True)


def row(kind: str, method: str, settings: dict[str, Any], repeat: int) -> list[str]:
    """Steps, milliseconds of both, and their ratio."""
    plan = make_plan(method, task=kind, sites=2, num_rounds=1, settings={**DATA[kind], **ALIKE, **settings})
    with tempfile.TemporaryDirectory(prefix="fairflare_training_") as folder:
        assert plan.sites
        transport = LocalTransport(plan.sites, plan.task, plan.training, {}, Path(folder))
        worker = transport._worker(plan.sites[0], "")
        torch.manual_seed(0)
        state = plan.task.build_model().state_dict()
        # The task, not its loop: that of the site goes first, so that data and network are there for both.
        run, model = worker._open(SiteTask("train", state, 0, 1, 0, {}), worker.state.store(""))
        batches = run.data.batches("training", batch_size=plan.training.batch_size, shuffle_seed=run.seed)
        steps = len(batches)

        def ours() -> None:
            model.load_state_dict(state)
            plan.training.train(run, model)

        def plain() -> None:
            model.load_state_dict(state)
            loop(plan, worker, model, batches)

        ours(), plain()
        times = [(timed(ours), timed(plain)) for _ in range(repeat)]
    own, floor = (1000 * min(column) / steps for column in zip(*times, strict=True))
    return [str(steps), f"{own:.1f}", f"{floor:.1f}", f"{own / floor:.3f}"]


def loop(plan: Plan, worker: SiteWorker, model: torch.nn.Module, batches: Any) -> float:
    """What somebody would write."""
    optimizer = plan.training.make_optimizer(model.parameters())
    model.train()
    total = 0.0
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = worker.task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(inputs)
    return total


def timed(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
