"""Measure layer-wise CKA of two U-Nets over a data set: time, memory and error of ours and of published packages.

    python benchmarks/bench_cka.py [--case a16] [--packages cka-pytorch torch-cka ckatorch]

Every method runs in a process of its own, on the same models and images. Time is given relative to the floor,
the two models' forward passes alone (wall clock, and processor time for busy machines; ``again`` is processor time
the second time in a process, which then has its memory: on a virtual machine the first touch can cost more than all
else), and memory as the peak of the resident set above the floor's; with ``--device cuda`` floor and ours run on the
GPU, and the memory is its.
The error is that of 1 - delta, relative to the exact biased value in float64: this is what site weights are made
of. Packages that are not installed, or that fail, are skipped with a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from monai.networks.nets import BasicUNet
from torch import Tensor, nn

# Cases by name: number of images, pixels of a side, width of the network.
CASES = {
    "a16": (64, 96, 16),
    "a32": (64, 96, 32),
    "b16": (64, 192, 16),
    "b32": (64, 192, 32),
    "c16": (128, 384, 16),
}
OURS = ("ours, in memory", "ours, spilled")
PACKAGES = ("cka-pytorch", "torch-cka", "ckatorch")
BATCH = 8
REFERENCE_BYTES = 256 * 2**20  # bytes of one model's float64 features that the reference holds at once
Scores = dict[str, float]  # 1 - delta by layer


def make_case(name: str, images: int | None) -> tuple[nn.Module, nn.Module, list[Tensor], list[str]]:
    """Return two models that were one a while ago, as in a federated round, and the matched layers."""
    n, size, base = CASES[name]
    n = images or n
    torch.manual_seed(0)
    coarse = torch.randn(n, 1, size // 8, size // 8)
    data = nn.functional.interpolate(coarse, size=size, mode="bilinear") + 0.1 * torch.randn(n, 1, size, size)
    widths = (base, base, 2 * base, 4 * base, 8 * base, base)
    model = BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, features=widths, norm="batch", bias=False)
    with torch.no_grad():
        for _ in range(10):
            model.train()(data[:BATCH])
    other = BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, features=widths, norm="batch", bias=False)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.05 * torch.randn_like(tensor))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    return model.eval(), other.eval(), list(data.split(BATCH)), names


# --- methods ----------------------------------------------------------------------------------------------


def floor(a: nn.Module, b: nn.Module, batches: list[Tensor], names: list[str]) -> Scores:
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(next(a.parameters()).device)
            a(batch)
            b(batch)
    return {}


def ours(memory: int) -> Callable[..., Scores]:
    def method(a: nn.Module, b: nn.Module, batches: list[Tensor], names: list[str]) -> Scores:
        from fairflare.core.similarity import layerwise_cka

        with tempfile.TemporaryDirectory() as scratch:
            result = layerwise_cka(a, b, batches, layers=names, memory=memory, scratch=scratch)
        return {name: value.dissimilarity for name, value in result.items()}

    return method


def outputs(model: nn.Module, batches: list[Tensor], names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            found[name].append(output.flatten(1).to(dtype, copy=True))

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def centered_gram(features: Tensor) -> Tensor:
    """Return a Gram matrix of features, which are centered in place, some columns at a time."""
    gram = torch.zeros(len(features), len(features), dtype=torch.float64)
    for part in features.split(2**16, dim=1):
        part = part.double()
        part = part - part.mean(0)
        gram += part @ part.T
    return gram


def reference(a: nn.Module, b: nn.Module, batches: list[Tensor], names: list[str]) -> Scores:
    """Compute exact scores from float64 Gram matrices, as many layers at a time as fit, repeating forward passes."""
    sizes: dict[str, int] = {}
    first = outputs(a, [batches[0][:1]], names, torch.float32)
    n = sum(map(len, batches))
    for name, features in first.items():
        sizes[name] = 4 * n * features.shape[1]
    groups: list[list[str]] = [[]]
    for name in names:
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + sizes[name] > REFERENCE_BYTES:
            groups.append([])
        groups[-1].append(name)
    scores = {}
    for group in groups:
        grams = []
        for model in (a, b):
            features = outputs(model, batches, group, torch.float32)
            grams.append({name: centered_gram(features.pop(name)) for name in group})
        for name in group:
            k, l = (gram[name] / gram[name].norm() for gram in grams)
            scores[name] = 0.5 * float((k - l).square().sum())
    return scores


class Loader:
    """Yield batches as (images, labels), in the form that packages expect of a torch DataLoader."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches
        self.dataset = torch.utils.data.TensorDataset(torch.cat(batches))
        self.batch_size = len(batches[0])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(batch, torch.zeros(len(batch))) for batch in self.batches])


def without_figures() -> None:
    """Replace the plotting libraries that the packages import, since nothing is plotted here."""
    if importlib.util.find_spec("matplotlib") is None:
        for missing in ("matplotlib", "matplotlib.pyplot", "mpl_toolkits"):
            sys.modules[missing] = MagicMock()
    if importlib.util.find_spec("seaborn") is None:
        sys.modules["seaborn"] = MagicMock()


def cka_pytorch(a: nn.Module, b: nn.Module, batches: list[Tensor], names: list[str]) -> Scores:
    without_figures()
    from cka_pytorch import CKACalculator  # type: ignore[import-not-found]

    cka = CKACalculator(a, b, names, names, device=torch.device("cpu"), hook_recursive=False, verbose=False)
    with torch.no_grad():
        matrix = cka.calculate_cka_matrix(Loader(batches), num_epochs=1, epsilon=0.0)
    return diagonal(matrix, names)


def torch_cka(a: nn.Module, b: nn.Module, batches: list[Tensor], names: list[str]) -> Scores:
    without_figures()
    from torch_cka import CKA  # type: ignore[import-not-found]

    cka = CKA(a, b, model1_layers=names, model2_layers=names, device="cpu")
    with torch.no_grad():
        cka.compare(Loader(batches))
    return diagonal(cka.export()["CKA"], names)


def ckatorch(a: nn.Module, b: nn.Module, batches: list[Tensor], names: list[str]) -> Scores:
    without_figures()
    from ckatorch.core import cka_base  # type: ignore[import-not-found]

    u, v = (outputs(model, batches, names, torch.float32) for model in (a, b))
    return {
        name: 1 - float(cka_base(u.pop(name).double(), v.pop(name).double(), kernel="linear", method="fro_norm"))
        for name in names
    }


def diagonal(matrix: Any, names: list[str]) -> Scores:
    values = torch.as_tensor(matrix)
    return {name: 1 - float(values[i, i]) for i, name in enumerate(names)}


METHODS: dict[str, Callable[..., Scores]] = {
    "floor": floor,
    "ours, in memory": ours(2**40),
    "ours, spilled": ours(0),
    "cka-pytorch": cka_pytorch,
    "torch-cka": torch_cka,
    "ckatorch": ckatorch,
    "reference": reference,
}


# --- running and reporting --------------------------------------------------------------------------------


def run_here(method: str, case: str, images: int | None, device: str) -> dict[str, Any]:
    """Run one method in a child process, and print time, peak memory (bytes) and scores."""
    a, b, batches, names = make_case(case, images)
    if on_gpu := device == "cuda" and (method == "floor" or method.startswith("ours")):
        a, b = a.cuda(), b.cuda()
    floor(a, b, batches[:1], names)  # warm-up
    if on_gpu:  # warm up: a GPU's libraries and memory take seconds at first
        METHODS[method](a, b, batches[:2], names)
        torch.cuda.synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    scores = METHODS[method](a, b, batches, names)
    if on_gpu:
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    again = time.process_time()
    if method != "reference":
        METHODS[method](a, b, batches, names)
    again = time.process_time() - again
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak
    return {"seconds": seconds, "cpu": cpu, "again": again, "peak": peak, "scores": scores}


def run_child(method: str, case: str, images: int | None, timeout: float, device: str = "cpu") -> dict[str, Any] | str:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [
            sys.executable,
            __file__,
            "--case",
            case,
            "--child",
            method,
            "--result",
            str(target),
            "--device",
            device,
        ]
        if images:
            command += ["--images", str(images)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"stopped after {timeout:.0f} s"
        if done.returncode or not target.exists():
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"exit status {done.returncode}"
        result: dict[str, Any] = json.loads(target.read_text())
        return result


def wrong(scores: Scores, exact: Scores) -> str:
    """Return relative errors as text: median / largest."""
    relative = [abs(scores[name] / exact[name] - 1) if name in scores else math.nan for name in exact]
    return f"{statistics.median(relative):.1e} / {max(relative):.1e}"


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="a16")
    parser.add_argument("--packages", nargs="*", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--ours", nargs="+", choices=OURS, default=list(OURS), help="spilled alone: little memory")
    parser.add_argument("--no-reference", action="store_true", help="no errors: large cases take it half an hour")
    parser.add_argument("--images", type=int, help="fewer images than the case has")
    parser.add_argument("--repeat", type=int, default=1, help="take the least time and memory of this many runs")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the floor and of ours")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.result.write_text(json.dumps(run_here(options.child, options.case, options.images, options.device)))
        return

    n, size, base = CASES[options.case]
    print(f"case {options.case}: {options.images or n} images of {size}x{size}, U-Net of base width {base},")
    print(f"batches of {BATCH}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    exact: dict[str, Any] | str = "not asked for"
    if not options.no_reference:
        exact = run_child("reference", options.case, options.images, options.timeout)
    base_line = None
    print("| method | clock | processor | again | seconds | GB beyond the passes | GB in all | error of 1 - delta |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for method in ("floor", *options.ours, *options.packages):
        version = installed(method) if method in PACKAGES else ""
        if version is None:
            print(f"| {method} | not installed | | | | | | |")
            continue
        runs = [
            run_child(method, options.case, options.images, options.timeout, options.device)
            for _ in range(options.repeat)
        ]
        good = [run for run in runs if not isinstance(run, str)]
        if not good:
            print(f"| {method} {version} | failed: {runs[0]} | | | | | | |")
            continue
        best = good[0] | {key: min(run[key] for run in good) for key in ("seconds", "cpu", "again", "peak")}
        base_line = base_line or best
        ratio, extra = best["seconds"] / base_line["seconds"], (best["peak"] - base_line["peak"]) / 1e9
        busy, again = (best[key] / base_line[key] for key in ("cpu", "again"))
        told = "" if isinstance(exact, str) or not best["scores"] else wrong(best["scores"], exact["scores"])
        line = f"| {method} {version} | {ratio:.2f} | {busy:.2f} | {again:.2f} | {best['seconds']:.1f} | {extra:.2f} | "
        print(f"{line}{best['peak'] / 1e9:.2f} | {told} |", flush=True)


if __name__ == "__main__":
    main()
