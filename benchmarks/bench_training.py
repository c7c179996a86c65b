"""Measure a site's training beside a plain PyTorch loop over the same batches: one CPU thread, or a GPU.

    python benchmarks/bench_training.py [--repeat 5] [--tasks segmentation classification] [--paper]

Each case is a round of one epoch on a phantom, in turns with the plain loop: forward, loss, backward, optimizer step,
and the sum of the losses. Times are the least of ``--repeat`` turns. The ratio is the median of the turns' own ratios,
with the smallest and the largest: on a shared machine the speed changes from minute to minute, within a turn less.
Methods that look twice (GSAM), or at a second network, have their steps' own cost in it; FedProx also has a plain loop
with its term written out. ``compile`` is left out: its first minutes are a compiler's.

Where PyTorch sees a GPU everything runs there, by the clock, and the table has the peak of its memory; without one,
processor time counts. ``--paper``: the papers' sizes (U-Net 384x384, batch 8; ResNet-18 224x224, batch 32), for a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairflare.exchange.messages import SiteTask
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import LocalTransport
from fairflare.methods.base.local_loop import make_optimizer

SMALL: dict[str, dict[str, Any]] = {
    "segmentation": {"phantom_cases": 3.0, "batch_size": 8},
    "classification": {"phantom": "fundus", "phantom_samples": 600, "phantom_test": 80, "batch_size": 8},
}
PAPER: dict[str, dict[str, Any]] = {
    "segmentation": {
        "phantom_cases": 2.0, "batch_size": 8, "image_size": [384, 384], "features": [32, 32, 64, 128, 256, 32],
    },
    "classification": {
        "phantom": "fundus", "phantom_samples": 800, "phantom_test": 40, "batch_size": 32, "image_size": [224, 224],
        "network": "resnet18",
    },
}  # fmt: skip
ALIKE: dict[str, Any] = {"local_epochs": 1, "keep_optimizer_state": False, "augment": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fed_avg", {}),
    "FedAvg, channels last": ("fed_avg", {"channels_last": True}),
    "FedAvg, bf16": ("fed_avg", {"precision": "bf16"}),
    "FedAvg, bf16, channels last": ("fed_avg", {"precision": "bf16", "channels_last": True}),
    "FedProx": ("fed_prox", {}),
    "FedProx, plain loop too": ("fed_prox", {}),
    "GSAM": ("fed_ism", {"criterion": "task"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=tuple(SMALL), default=list(SMALL))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--paper", action="store_true", help="the papers' sizes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | training | ms a step | images a second | to the plain loop | GPU, MB |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for kind in given.tasks:
        data, opened = (PAPER if given.paper else SMALL)[kind], {}
        for label in given.cases:
            method, settings = CASES[label]
            cells = row(kind, method, {**data, **settings}, given.repeat, opened, term=label.endswith("too"))
            print(f"| {kind} | {label} | " + " | ".join(cells) + " |", flush=True)


def site_of(
    kind: str, method: str, settings: dict[str, Any], folder: str, data: Any = None
) -> tuple[Plan, SiteWorker, Any, torch.nn.Module, dict[str, torch.Tensor]]:
    """Return plan, worker, run, network and model of a site with open data (``data``: another site's data)."""
    plan = make_plan(method, task=kind, sites=2, num_rounds=1, settings={**ALIKE, **settings})
    assert plan.sites
    worker = LocalTransport(plan.sites, plan.task, plan.training, {}, Path(folder))._worker(plan.sites[0], "")
    if data is not None:
        worker._data, worker.task = data, worker.task.suited_to(data)
    torch.manual_seed(0)
    state = plan.task.build_model().state_dict()
    # Do a whole task first, not only its loop, so that data and network exist for both loops.
    return plan, worker, *worker.open(SiteTask("train", state, 0, 1, 0, {}), worker.state.store("")), state


def row(
    kind: str, method: str, settings: dict[str, Any], repeat: int, opened: dict[str, Any], *, term: bool
) -> list[str]:
    """Return milliseconds, and their ratio to the plain loop's; ``opened`` holds the site's data for later rows."""
    with tempfile.TemporaryDirectory(prefix="fairflare_training_") as folder:
        plan, worker, run, model, state = site_of(kind, method, settings, folder, opened.get(kind))
        batches = run.data.batches("training", batch_size=plan.training.batch_size, shuffle_seed=run.seed)
        opened[kind] = worker._data
        steps, images = len(batches), run.data.num_samples("training")

        def ours() -> None:
            model.load_state_dict(state)
            plan.training.train(run, model)

        def plain() -> None:
            model.load_state_dict(state)
            loop(plan, worker, model, batches, plan.training.mu if term else 0.0)  # type: ignore[attr-defined]

        ours(), plain()
        memory = "-"
        if worker.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            ours()
            memory = f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"
        times = [(timed(ours, worker.device), timed(plain, worker.device)) for _ in range(repeat)]
    own = 1000 * min(times)[0] / steps
    ratios = sorted(a / b for a, b in times)
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return [f"{own:.1f}", f"{1000 * images / (own * steps):.0f}", ratio, memory]


def loop(plan: Plan, worker: SiteWorker, model: torch.nn.Module, batches: Any, mu: float) -> float:
    """Train a plain loop as somebody would write it; with ``mu`` FedProx."""
    optimizer = make_optimizer(plan.training, model.parameters())
    received = [p.detach().clone() for p in model.parameters()] if mu else []
    model.train()
    total = 0.0
    for inputs, targets in batches:
        inputs, targets = inputs.to(worker.device), targets.to(worker.device)
        optimizer.zero_grad()
        loss = worker.task.loss(model(inputs), targets)
        if mu:
            loss = loss + mu / 2 * sum(((p - r) ** 2).sum() for p, r in zip(model.parameters(), received, strict=True))
        loss.backward()
        optimizer.step()
        total += loss.item() * len(inputs)
    return total


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return seconds: of the processor, or by the clock with a GPU."""
    clock = time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
        clock = time.perf_counter
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
