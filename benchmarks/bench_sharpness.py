"""Measure the cost of flat minima: SAM, GSAM and FedLESAM beside an Adam step, and the probe beside an epoch.

    python benchmarks/bench_sharpness.py [--pixels 64 32] [--repeat 5] [--trained]

Model: MONAI's ResNet-18 for colour images, batch 32, on the CPU. All cases train copies of the same model on the
same batch, in turn, so that a busy moment does not hit one case only; a ratio is to the plain step of the same
turn, and the median over the turns is printed, by the clock and of the processor. Two forward and two backward
passes are 2x; a published package that is not installed is skipped with a line that says so. The probe is two
forward passes and one backward pass over the data set, beside one plain training epoch over it.

``--trained``: instead, the quick jobs of plain steps, GSAM and FedLESAM, all with FedISM's weights, and how sharp the
model is after them: the exact S at a distance of 0.05, as sites report it of the last round's model.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from monai.networks.nets import resnet18
from torch import Tensor, nn

from fairflare.core.sharpness import GSAM, SAM, sharpness
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare.methods.fed_lesam import GlobalPerturbation
from fairflare.reporting.results import read_results

BATCH = 32
CLASSES = 8
RHO = 0.05
ALPHA = 0.1
EPOCH = 2  # number of batches of the probe's epoch
PACKAGES = {"pytorch-optimizer": "pytorch_optimizer", "sam-pytorch": "sam"}
Step = Callable[[], None]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-4, weight_decay=5e-4)


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = adam(model)
    closure = closure_of(model, optimizer, x, y)

    def step() -> None:
        closure()
        optimizer.step()

    return step


def ours(make: type[SAM]) -> Callable[..., Step]:
    def case(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        optimizer = make(adam(model), rho=RHO, model=model)
        closure = closure_of(model, optimizer, x, y)
        return lambda: optimizer.step(closure)

    return case


def lesam(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer, half = adam(model), GlobalPerturbation()
    closure = closure_of(model, optimizer, x, y)
    push = {name: torch.randn_like(parameter) * 1e-5 for name, parameter in model.named_parameters()}
    run: Any = SimpleNamespace(own=SimpleNamespace(push=push))
    return lambda: (half.step(run, model, optimizer, closure), None)[1]


def pytorch_optimizer_sam(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from pytorch_optimizer import SAM as Theirs

    optimizer = Theirs(model.parameters(), torch.optim.Adam, rho=RHO, lr=3e-4, weight_decay=5e-4)
    closure = closure_of(model, optimizer, x, y)

    def step() -> None:
        closure()
        optimizer.step(closure)

    return step


def pytorch_optimizer_gsam(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from pytorch_optimizer import GSAM as Theirs
    from pytorch_optimizer import ProportionScheduler
    from pytorch_optimizer.lr_scheduler import ConstantLR

    base = adam(model)
    rate = ConstantLR(base, factor=1.0)
    distance = ProportionScheduler(rate, max_lr=3e-4, min_lr=0.0, max_value=RHO, min_value=0.0)
    optimizer = Theirs(model.parameters(), base, model, distance, alpha=ALPHA)
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.set_closure(loss_fn, x, y)
        optimizer.step()

    return step


def sam_pytorch(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from sam.sam import SAM as Theirs

    base = adam(model)
    optimizer = Theirs(model.parameters(), base, rho=RHO)
    closure = closure_of(model, base, x, y)
    return lambda: optimizer.step(closure)


CASES: dict[str, tuple[str | None, Callable[..., Step]]] = {
    "plain Adam step": (None, plain),
    "ours, SAM": (None, ours(SAM)),
    "ours, GSAM": (None, ours(GSAM)),
    "ours, FedLESAM": (None, lesam),
    "pytorch-optimizer, SAM": ("pytorch-optimizer", pytorch_optimizer_sam),
    "pytorch-optimizer, GSAM": ("pytorch-optimizer", pytorch_optimizer_gsam),
    "sam-pytorch, SAM": ("sam-pytorch", sam_pytorch),
}


def probe_cases(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Step]:
    trained = copy.deepcopy(model)
    optimizer = adam(trained)
    losses = nn.CrossEntropyLoss(reduction="none")

    def epoch() -> None:
        for x, y in batches:
            closure_of(trained, optimizer, x, y)()
            optimizer.step()

    return {
        "plain epoch": epoch,
        "ours, probe": lambda: (sharpness(model, losses, batches, RHO), None)[1],
        "ours, probe, rho 0": lambda: (sharpness(model, losses, batches, 0.0), None)[1],
    }


def installed(package: str) -> str | None:
    if importlib.util.find_spec(PACKAGES[package]) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_turn(cases: dict[str, Step], repeat: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and processor seconds of every case, turn by turn, after a warm-up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for turn in range(-1, repeat):
        for name, step in cases.items():
            start = time.perf_counter(), time.process_time()
            step()
            if turn >= 0:
                times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return times


def report(times: dict[str, list[tuple[float, float]]], titles: dict[str, str]) -> None:
    base = next(iter(times.values()))
    for name, runs in times.items():
        wall, cpu = (
            statistics.median(run[i] / first[i] for run, first in zip(runs, base, strict=True)) for i in (0, 1)
        )
        seconds = statistics.median(run[0] for run in runs)
        print(f"{titles.get(name, name):<34}{wall:>10.2f}x{cpu:>10.2f}x{seconds:>10.3f}", flush=True)


def trained() -> None:
    """Print S and balanced accuracy after the quick jobs of plain steps, GSAM and FedLESAM."""
    torch.set_num_threads(1)
    for title, method, settings in (
        ("plain steps", "fed_ism", {"salt": False}), ("GSAM", "fed_ism", {}),
        ("FedLESAM", "fed_lesam", {"saga": True, "rho": RHO}),
    ):  # fmt: skip
        plan = make_plan(method, settings=settings, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            found = read_results(run_local(plan, Path(folder)))
        last = found.rounds[-1].reports or {}
        figure = statistics.fmean(tested[plan.task.primary_metric] or 0.0 for tested in (found.test or {}).values())
        values = [report["sharpness"] for report in last.values()]
        print(f"{title:<14} S {statistics.fmean(values):.4f}  {plan.task.primary_metric} {figure:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pixels", type=int, nargs="+", default=[64, 32], help="image sides")
    parser.add_argument("--repeat", type=int, default=5, help="turns")
    parser.add_argument("--trained", action="store_true", help="sharpness after quick jobs, in place of seconds")
    options = parser.parse_args()
    if options.trained:
        logging.disable(logging.WARNING)
        trained()
        return

    print(f"ResNet-18, batch {BATCH}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"median over {options.repeat} turns of the ratio to the first row of the same turn")
    versions = {package: installed(package) for package in PACKAGES}
    titles = {name: f"{name} ({versions[package]})" for name, (package, _) in CASES.items() if package is not None}
    for pixels in options.pixels:
        torch.manual_seed(0)
        model = resnet18(spatial_dims=2, n_input_channels=3, num_classes=CLASSES)
        batches = [(torch.randn(BATCH, 3, pixels, pixels), torch.randint(CLASSES, (BATCH,))) for _ in range(EPOCH)]
        print(f"\n{f'images 3x{pixels}x{pixels}':<34}{'time':>11}{'cpu':>11}{'seconds':>10}")
        cases = {}
        for name, (package, make) in CASES.items():
            if package is not None and versions[package] is None:
                print(f"{name:<34} skipped: {package} is not installed")
                continue
            cases[name] = make(copy.deepcopy(model), *batches[0])
        report(in_turn(cases, options.repeat), titles)
        report(in_turn(probe_cases(model, batches), options.repeat), titles)


if __name__ == "__main__":
    main()
