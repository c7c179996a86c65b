"""Measure a training step on a CPU with freed memory reused, beside a plain PyTorch loop with glibc's limits.

    python benchmarks/bench_memory_reuse.py [--sizes 64 96 192] [--repeat 3] [--steps 20]

A U-Net (BasicUNet, 16 to 128 channels), batch of 8, one thread. Each figure is a process of its own, in turns: the
plain loop as the C library comes; the same loop inside ``reuse_memory``; FairFlare's site half inside it.
Milliseconds are processor time of a step, the least of the turns; page faults are those of one step; the ratio is that
of the medians to the plain loop's. The last column is what a process holds at its peak.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

WAYS = {"plain": "plain loop", "reused": "plain loop, memory reused", "ours": "FairFlare, memory reused"}
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 96, 192])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(*measured(given.one[0], int(given.one[1]), given.steps))
        return
    print("| image | loop | ms a step | ratio | page faults a step | peak, MB |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for size in given.sizes:
        turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(given.repeat):
            for way in WAYS:
                command = [sys.executable, __file__, "--steps", str(given.steps), "--one", way, str(size)]
                answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                turns[way].append([float(value) for value in answer])
        floor = statistics.median(turn[0] for turn in turns["plain"])
        for way, label in WAYS.items():
            ms, faults, peak = (list(column) for column in zip(*turns[way], strict=True))
            ratio = statistics.median(ms) / floor
            cells = f"{min(ms):.0f} | {ratio:.2f} | {statistics.median(faults):.0f} | {max(peak):.0f}"
            print(f"| {size}x{size} | {label} | {cells} |", flush=True)


def measured(way: str, size: int, steps: int) -> tuple[float, float, float]:
    """Return milliseconds and page faults of a step, and the peak of this process's memory in MB."""
    from fairflare.base.machine.memory_reuse import reuse_memory

    torch.set_num_threads(1)
    with nullcontext() if way == "plain" else reuse_memory("cpu"):
        step = steps_of(way, size)
        for _ in range(WARM_UP):
            step()
        faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        for _ in range(steps):
            step()
        seconds = time.process_time() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * seconds / steps, (used.ru_minflt - faults) / steps, used.ru_maxrss / 1024


def steps_of(way: str, size: int) -> Callable[[], Any]:
    """Return a function that does one step on one batch: a plain loop's, or the site half's."""
    from monai.networks.nets import BasicUNet

    torch.manual_seed(0)
    model = BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, features=(16, 16, 32, 64, 128, 16))
    model.train()
    inputs, targets = torch.randn(8, 1, size, size), torch.randint(0, 2, (8, 1, size, size)).float()
    criterion = torch.nn.BCEWithLogitsLoss()
    if way == "ours":
        from fairflare.methods.base.local_loop import LocalLoop, make_optimizer
        from fairflare.methods.base.training import LocalTraining

        training = LocalTraining(weight_decay=0.0)
        own = make_optimizer(training, model.parameters())
        run: Any = SimpleNamespace(
            device=torch.device("cpu"), scale=None, first_pass=True, task=SimpleNamespace(loss=criterion)
        )
        site = LocalLoop(training, run, model, own)
        return lambda: site.one_pass(inputs, targets) and own.step()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


if __name__ == "__main__":
    main()
