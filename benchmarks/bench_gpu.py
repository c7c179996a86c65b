"""Measure where a site's step waits for the GPU, what GPU and host do in it, and rounds beside a plain loop.

    python benchmarks/bench_gpu.py [--repeat 3] [--parts waits rounds compile]

At the papers' sizes (U-Net 384x384, batch 8; ResNet-18 224x224, batch 32), on phantoms. It needs a GPU; ``--small
--parts rounds`` goes through the rounds of a small network on any machine.

``waits``: for FedAvg, FedProx and FedISM's GSAM the places in which the host waits for the GPU, with who called whom,
per step; milliseconds of a step in which the GPU computes; the operations that take most of the host's time; and the
loader alone, with pinned and with plain copies to the GPU.

``rounds``: a whole round of a site, from the received model to the reply's report, beside a plain loop over the same
batches (``bench_training.loop``). Fed-LWR's has the report about the anchor; its own floor is the loop's epoch and two
forward passes over the training images. FedISM+'s has the sharpness of the received model (two forward passes and a
backward one), which its floor has too. Median of the turns' ratios, with the least and the largest.

``compile``: a step with ``compile=true`` beside one without, after one round that compiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench_training import PAPER, SMALL, loop, site_of, timed
from fairflare.federation.plan.plan import Plan
from fairflare.federation.site.site_network import network_of
from fairflare.federation.site.worker import SiteWorker

STEPS: dict[str, dict[str, Any]] = {"fed_avg": {}, "fed_prox": {}, "fed_ism": {"criterion": "task"}}
ROUNDS: dict[str, dict[str, Any]] = {"fed_avg": {}, "fed_lwr": {}, "fed_ism_plus_s": {"criterion": "task"}}
STACK = 6  # number of callers that are named for a place


@dataclass
class Site:
    """Hold a site with its data open and its network on the GPU."""

    plan: Plan
    worker: SiteWorker
    run: Any
    model: nn.Module
    received: dict[str, Tensor]

    @classmethod
    def of(cls, kind: str, method: str, settings: dict[str, Any], folder: str, sizes: Any = PAPER) -> Site:
        return cls(*site_of(kind, method, {**sizes[kind], **settings}, folder))

    def batches(self) -> Any:
        size = self.plan.training.batch_size
        return self.run.data.batches("training", batch_size=size, shuffle_seed=self.run.seed)

    def train(self) -> None:
        self.model.load_state_dict(self.received)
        self.plan.training.train(self.run, self.model)

    def round(self) -> None:
        """Do a site's training and the method's own reports."""
        self.train()
        training = self.plan.training
        training.report(self.run, self.model)
        if hasattr(training, "report_anchor"):
            anchor = network_of(self.worker.task).to(self.worker.device)
            anchor.load_state_dict(self.received)
            self.run.scratch.mkdir(parents=True, exist_ok=True)
            training.report_anchor(self.run, self.model, anchor)

    def floor(self, forward: int, backward: int) -> None:
        """Do the plain loop's epoch, and so many forward passes over the training images, and with a backward one."""
        self.model.load_state_dict(self.received)
        loop(self.plan, self.worker, self.model, self.batches(), 0.0)
        self.model.eval()
        for turn in range(forward + backward):
            with torch.set_grad_enabled(turn >= forward):
                for inputs, targets in self.batches():
                    inputs, targets = inputs.to(self.worker.device), targets.to(self.worker.device)
                    loss = self.worker.task.loss(self.model(inputs), targets)
                    if turn >= forward:
                        loss.backward()


def waits(work: Callable[[], Any]) -> Counter[str]:
    """Count how often the host waited for the GPU, by the lines of Python that led there, innermost first."""
    found: Counter[str] = Counter()

    def noted(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            stack = traceback.extract_stack()[:-1][-STACK:]
            found[" < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(stack))] += 1

    torch.cuda.synchronize()
    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
    return found


def seconds(work: Callable[[], Any], site: Site) -> float:
    return timed(work, site.worker.device)


def ratio(times: list[tuple[float, float]]) -> str:
    ratios = sorted(a / b for a, b in times)
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def show_waits(repeat: int, sizes: Any) -> None:
    for kind in sizes:
        for method, settings in STEPS.items():
            with tempfile.TemporaryDirectory(prefix="fairflare_gpu_") as folder:
                site = Site.of(kind, method, settings, folder, sizes)
                steps = len(site.batches())
                site.train()
                took = min(seconds(site.train, site) for _ in range(repeat))
                print(f"\n{kind}, {method}: {steps} steps, {1000 * took / steps:.2f} ms a step")
                for place, count in waits(site.train).most_common(6):
                    print(f"  waits {count / steps:.2f} times a step: {place}")
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as told:
                    site.train()
                    torch.cuda.synchronize()
                by_name = told.key_averages()
                busy = sum(event.self_device_time_total for event in by_name)
                print(f"  the GPU computes {busy / 1000 / steps:.2f} ms a step; the host is busy most with")
                for event in sorted(by_name, key=lambda e: -e.self_cpu_time_total)[:8]:
                    spent = event.self_cpu_time_total / 1000 / steps
                    print(f"    {spent:8.3f} ms, {event.count / steps:6.1f} times: {event.key[:70]}")
                show_loader(site, steps)


def show_loader(site: Site, steps: int) -> None:
    def through(copy: Callable[[Tensor], Any]) -> float:
        return 1000 * seconds(lambda: [(copy(a), copy(b)) for a, b in site.batches()], site) / steps

    alone, pinned = through(lambda t: None), through(site.run.on_device)
    plain = through(lambda t: t.to(site.run.device))
    print(f"  loader {alone:.2f} ms a step, with our copies {pinned:.2f}, with plain copies {plain:.2f}", flush=True)


def show_rounds(repeat: int, sizes: Any) -> None:
    print("\n| task | round | s | of its floor | of a plain epoch |\n| --- | --- | ---: | ---: | ---: |")
    for kind in sizes:
        for method, settings in ROUNDS.items():
            if kind == "segmentation" and method.startswith("fed_ism"):
                continue  # it weighs classes
            with tempfile.TemporaryDirectory(prefix="fairflare_gpu_") as folder:
                site = Site.of(kind, method, settings, folder, sizes)
                forward, backward = {"fed_lwr": (2, 0), "fed_ism_plus_s": (1, 1)}.get(method, (0, 0))
                site.round(), site.floor(forward, backward)
                floors, epochs = [], []
                for _ in range(repeat):
                    own = seconds(site.round, site)
                    floors.append((own, seconds(partial(site.floor, forward, backward), site)))
                    epochs.append((own, seconds(partial(site.floor, 0, 0), site)))
                own = min(a for a, _ in floors)
                print(f"| {kind} | {method} | {own:.3f} | {ratio(floors)} | {ratio(epochs)} |", flush=True)


def show_compiled(repeat: int, sizes: Any) -> None:
    print("\n| task | compiled: s a round | ratio to plain | first round, s |\n| --- | ---: | ---: | ---: |")
    for kind in sizes:
        with tempfile.TemporaryDirectory(prefix="fairflare_gpu_") as a, tempfile.TemporaryDirectory() as b:
            plain, compiled = (
                Site.of(kind, "fed_avg", settings, folder, sizes)
                for settings, folder in (({}, a), ({"compile": True}, b))
            )
            plain.train()
            first = seconds(compiled.train, compiled)
            times = [(seconds(compiled.train, compiled), seconds(plain.train, plain)) for _ in range(repeat)]
            print(f"| {kind} | {min(t for t, _ in times):.3f} | {ratio(times)} | {first:.1f} |", flush=True)


def main() -> None:
    parts = {"waits": show_waits, "rounds": show_rounds, "compile": show_compiled}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=tuple(parts), default=list(parts))
    parser.add_argument("--small", action="store_true", help="small networks and images")
    given = parser.parse_args()
    if not torch.cuda.is_available() and given.parts != ["rounds"]:
        parser.error("PyTorch sees no GPU here; --small --parts rounds needs none")
    torch.set_num_threads(1)
    for part in given.parts:
        parts[part](given.repeat, SMALL if given.small else PAPER)


if __name__ == "__main__":
    main()
