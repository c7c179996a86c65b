"""Measure Fed-LWR's anchor phase beside one epoch of training, and beside the two forward passes alone.

    python benchmarks/bench_phase.py [--size 48] [--samples 32] [--images N] [--features 16 16 32 64 128 16]

Three laboratories' white blood cells (221, 179 and 60 training images) of ``FAIRFLARE_REAL_DATA``, or as many made-up
images of the same size and number; one thread. The epoch is ``LocalTraining.train``, the phase the whole task: local
model read, anchor loaded, images read, both forward passes, the similarity of all 41 layers. The floor is both models'
forward passes over the same batches, and the loading of these.

Seconds are processor time, all sites together, the least of ``--repeat`` turns; ratios are the median of the turns'
own ones. Errors are those of 1 - delta (relative) to ``--exact``, float64 Gram matrices of the network's float32
features (median / largest of all layers and sites), and of the weights of Eq. 5 (absolute).
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_cka import reference
from fairflare.base.machine.memory_reuse import reuse_memory
from fairflare.cli.options import parse_settings
from fairflare.core.features.joint_pass import JointPass
from fairflare.core.similarity import parameter_layers
from fairflare.core.similarity.layerwise import LEAST_PIXELS
from fairflare.core.similarity.products import products_of_rows
from fairflare.core.weighting import dissimilarity_weights
from fairflare.exchange.messages import SiteTask
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import LocalTransport
from fairflare.methods.base.training import SiteRun
from fairflare_lab.sets.published import PREPARERS, WHITE_CELLS

IMAGES = {"JTSC": 299, "CellaVision": 100, "BCCD": 367}  # number of images in each real file
Scores = dict[str, dict[str, float]]  # 1 - delta by site and layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=48, help="pixels")
    parser.add_argument("--features", type=int, nargs=6, default=[16, 16, 32, 64, 128, 16], help="widths of the U-Net")
    parser.add_argument("--images", type=int, help="at most so many of each laboratory, before they are split")
    parser.add_argument("--samples", type=int, nargs="*", default=[], help="cka_max_samples, a row for each")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings of the phase")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--exact", action="store_true", help="errors too; the reference takes long")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fairflare_phase_") as folder:
        phases = opened(given, Path(folder))
        report(given, phases)


def opened(given: argparse.Namespace, folder: Path) -> list[Phase]:
    """Return the sites, each trained for an epoch from one model; the mean of their models is the anchor."""
    source = os.environ.get("FAIRFLARE_REAL_DATA")
    files = [np.load(Path(source) / f"wbc_{name.lower()}.npz") for name in WHITE_CELLS] if source else []
    drawn = np.random.default_rng(0)
    for i, name in enumerate(WHITE_CELLS):
        arrays = dict(files[i]) if files else made_up(name, IMAGES[name], drawn)
        cut = {key: value[: given.images] if value.ndim else value for key, value in arrays.items()}
        np.savez(folder / f"wbc_{name.lower()}.npz", **cut)
    places = PREPARERS["white-cells"].prepare(folder, folder / "data")
    task = {"image_size": [given.size] * 2, "in_channels": 3, "features": given.features, "local_epochs": 1}
    settings = {**task, **parse_settings(given.set)}
    plan = make_plan("fed_lwr", sites=list(places), num_rounds=1, settings=settings)
    local: dict[str, Any] = {"sites": {site: {"data_root": str(place)} for site, place in places.items()}}
    local |= {"mask_values": {"0": 0, "1": 1, "2": 1}}
    assert plan.sites
    transport = LocalTransport(plan.sites, plan.task, plan.training, local, folder)
    torch.manual_seed(0)
    phases = [Phase(transport._worker(site, ""), plan.task.build_model().state_dict()) for site in plan.sites]
    for phase in phases:
        phase.state = phases[0].state
        phase.begin()
    mean = {k: torch.stack([p.local[k].double() for p in phases]).mean(0) for k in phases[0].state}
    for phase in phases:
        phase.anchor = replace(phase.task, name="anchor", state={k: v.to(phase.state[k]) for k, v in mean.items()})
    return phases


class Phase:
    """Hold a trained site, and the parts of its phase that are timed."""

    anchor: SiteTask

    def __init__(self, worker: SiteWorker, state: dict[str, torch.Tensor]) -> None:
        self.worker, self.state = worker, state

    def begin(self) -> None:
        """Do one round's training, as the server asks for it."""
        self.task = SiteTask("train", self.state, 0, 1, 0, {})
        reply = self.worker.perform(self.task)
        assert reply.update, reply.reason
        self.local = {name: self.state[name] + change for name, change in reply.update.items()}
        self.network = self.worker.network.build(self.worker.task, self.task)

    @property
    def run(self) -> SiteRun:
        return self.worker.run(self.task, self.worker.state.store(""))

    def epoch(self) -> None:
        self.network.load_state_dict(self.state)
        self.worker.training.train(replace(self.run, store=Forgetful(), save_seconds=0), self.network)  # type: ignore[arg-type]

    def floor(self) -> None:
        self.network.load_state_dict(self.anchor.state)
        self.network.eval()
        with torch.no_grad():
            for images, _ in self.run.data.batches("training", batch_size=8):
                self.network(images)
                self.network(images)

    def ask(self, samples: int | None = None) -> dict[str, float]:
        self.worker.training = replace(self.worker.training, cka_max_samples=samples)  # type: ignore[call-arg]
        reply = self.worker.perform(self.anchor)
        assert reply.status == "ok", reply.reason
        return dict(zip(reply.report["layers"], reply.report["dissimilarity"], strict=True))

    def exact(self) -> dict[str, float]:
        """Compute scores in float64 from the features as the networks compute them."""
        networks = [self.worker.task.build_model() for _ in range(2)]
        for network, state in zip(networks, (self.local, self.anchor.state), strict=True):
            network.load_state_dict(state)
            network.eval()
        batches = [images for images, _ in self.run.data.batches("training", batch_size=8)]
        return reference(networks[0], networks[1], batches, list(parameter_layers(networks[0])))


class Forgetful:
    """Stand in for a site's store and save nothing, to time the epoch without the moments' file."""

    def load_before(self, *named: Any) -> None:
        return None

    def save(self, *named: Any, **more: Any) -> None:
        pass


def report(given: argparse.Namespace, phases: list[Phase]) -> None:
    counts = [phase.run.data.num_samples("training") for phase in phases]
    print(f"{given.size}x{given.size}, widths {given.features}, training images {counts}, {given.repeat} turns")
    works: dict[str, Callable[[Phase], Any]] = {"an epoch": Phase.epoch, "two forward passes": Phase.floor}
    works["phase"] = Phase.ask
    for samples in given.samples:
        works[f"phase, cka_max_samples={samples}"] = partial(Phase.ask, samples=samples)
    gc.collect()
    gc.freeze()  # else garbage collection walks all imports, a quarter of a second each time
    found: dict[str, Scores] = {}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-1, given.repeat):  # the first turn only allocates memory
        for name, work in works.items():
            start = time.process_time()
            with reuse_memory("cpu"):
                found[name] = {phase.worker.site: work(phase) for phase in phases}
            if turn >= 0:
                seconds[name].append(time.process_time() - start)
    exact = {phase.worker.site: phase.exact() for phase in phases} if given.exact else found["phase"]
    against = "float64" if given.exact else "all images"
    print(f"| | seconds | to an epoch | 1 - delta, to {against} | weights |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds["an epoch"], strict=True))
        cells = errors(found[name], exact) if name.startswith("phase") else " | "
        print(f"| {name} | {min(times):.2f} | {ratio:.2f} | {cells} |", flush=True)
    print(roofline(phases, min(seconds["two forward passes"]) / min(seconds["an epoch"]), min(seconds["an epoch"])))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak {peak:.0f} MB")


def roofline(phases: list[Phase], forward: float, epoch: float) -> str:
    """Return the phase's unavoidable work, and this machine's rates for it: a float32 product of 221 rows, and a copy.

    Of the products half is needed, of each model's features with themselves; of models that are near to each other a
    half more. The forward passes are those of the second row; with the channels last they take less.
    """
    sizes: dict[str, int] = {}
    image = next(iter(phases[0].run.data.batches("training", batch_size=1)))[0]
    networks = phases[0].network, phases[0].worker.task.build_model()
    with JointPass(*networks, None, LEAST_PIXELS) as joint:
        joint.run(image, lambda name, a, b: sizes.update({name: a[0].numel()}))
    kept = sum(size for name, size in sizes.items() if name not in joint.scaled)
    counts = [phase.run.data.num_samples("training") for phase in phases]
    flops, moved = sum(2 * n**2 * kept for n in counts), sum(16 * n * kept for n in counts)
    u, w = torch.randn(2, 1, 221, 6912)
    values = torch.randn(2**24)
    copy = torch.empty_like(values)
    product, copied = least(lambda: products_of_rows(u, w)), least(lambda: copy.copy_(values))
    rate, bandwidth = 2 * 221**2 * 6912 / product, 2 * values.nbytes / copied
    floor = forward + (flops / rate + moved / bandwidth) / epoch
    return (
        f"{kept:.3g} of {sum(sizes.values()):.3g} numbers an image are kept; products: {flops / 1e9:.0f} GF at "
        f"{rate / 1e9:.0f} GF/s, {flops / rate / epoch:.2f} of an epoch; features written and read: "
        f"{moved / 1e9:.1f} GB at {bandwidth / 1e9:.0f} GB/s, {moved / bandwidth / epoch:.2f}; "
        f"with both forward passes {floor:.2f}"
    )


def least(work: Callable[[], Any]) -> float:
    """Return processor seconds, the least of ten."""
    times = []
    for _ in range(10):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def errors(scores: Scores, exact: Scores) -> str:
    relative = [abs(scores[s][name] / value - 1) for s, by in exact.items() for name, value in by.items() if value > 0]
    here, there = (dissimilarity_weights(x, clip_min=0.0, clip_max=1.0) for x in (scores, exact))
    moved = [abs(here[name][site] - value) for name, by in there.items() for site, value in by.items()]
    return (
        f"{statistics.median(relative):.1e} / {max(relative):.1e} | {statistics.median(moved):.1e} / {max(moved):.1e}"
    )


def made_up(name: str, count: int, drawn: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw bright discs on a noisy ground, as large and as many as the real images."""
    y, x = np.mgrid[:96, :96]
    middle, radius = drawn.uniform(30, 66, (count, 2, 1, 1)), drawn.uniform(12, 28, (count, 1, 1))
    away = np.hypot(y - middle[:, 0], x - middle[:, 1])
    masks = (away < radius).astype(np.uint8) + (away < radius / 2)
    tint = np.array([180, 120, 160]) + 20 * WHITE_CELLS.index(name)
    images = tint - 40 * masks[..., None] + drawn.normal(0, 12, (count, 96, 96, 3))
    return {
        "images": images.clip(0, 255).astype(np.uint8), "masks": masks.astype(np.uint8),
        "labels": np.zeros(count, np.int64), "ids": np.array([f"{name}{i}" for i in range(count)]),
        "site": np.array(name),
    }  # fmt: skip


if __name__ == "__main__":
    main()
