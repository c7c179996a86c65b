"""Measure time and peak memory of server-side aggregation, ours beside NVIDIA FLARE's own helper.

A round of K sites with a ResNet-18-sized model (11.7 million parameters, batch-norm buffers included). Each
case runs in a process of its own, in which the local models arrive one after the other, as at a server:

- *FLARE helper, as they arrive*: FLARE's ``WeightedAggregationHelper`` adds each model when it arrives.
  Possible only where the weights are known beforehand; a float32 sum in the order of arrival.
- *FLARE helper, all held*: where the weights depend on all reports, every model waits in memory first.
- *ours, streaming*: ``weighted_average`` of an iterable; weights known beforehand, float64 sum.
- *ours, in memory*: every model waits in memory, as at a server with room for all; the same two averages as below.
- *ours, staged*: every model is written to disk when it arrives, then ``weighted_average``, or
  ``layerwise_average`` with one weight for each layer and site (Fed-LWR).

Time is that of the aggregation, by the clock and of the processor: a busy machine stretches the first,
waiting threads spend the second. ``stage`` is the time to write all models, spent while a server waits for
the next site anyway. Memory is the peak growth of the resident size from before the first model.

    python benchmarks/bench_aggregation.py [--sites 4 32] [--repeat 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CASES = {
    "flare": "FLARE helper, as they arrive",
    "flare-held": "FLARE helper, all held",
    "streaming": "ours, streaming",
    "kept": "ours, in memory, weighted",
    "kept-layerwise": "ours, in memory, layer-wise",
    "staged": "ours, staged, weighted",
    "layerwise": "ours, staged, layer-wise",
}


class PeakMemory:
    """Measure the peak resident size above the start, in MB, sampled every 2 ms."""

    def __enter__(self) -> PeakMemory:
        import psutil  # installed with nvflare

        gc.collect()
        self._process = psutil.Process()
        self._start = self._peak = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, self._process.memory_info().rss)

    @property
    def megabytes(self) -> float:
        return (self._peak - self._start) / 2**20


class Elapsed:
    """Add up wall and processor seconds inside ``with`` blocks."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._start[0]
        self.cpu += time.process_time() - self._start[1]


def model_shapes() -> dict[str, tuple[tuple[int, ...], str]]:
    """Return names, shapes and dtypes of MONAI's ResNet-18 for 2D colour images and 1000 classes."""
    from monai.networks.nets import resnet18

    model = resnet18(spatial_dims=2, n_input_channels=3, num_classes=1000)
    return {name: (tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items()}


def run_case(case: str, num_sites: int, shapes_file: str) -> dict[str, float]:
    import torch
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    from fairflare.core.states import layerwise_average, weighted_average
    from fairflare.exchange.staging import Staging

    shapes = json.loads(Path(shapes_file).read_text(encoding="utf-8"))
    sites = [f"site-{index:02d}" for index in range(num_sites)]
    weights = dict.fromkeys(sites, 1 / num_sites)

    def arrives(index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            name: torch.rand(shape, generator=generator) if "float" in dtype else torch.tensor(index)
            for name, (shape, dtype) in shapes.items()
        }

    making = Elapsed()

    def in_turn() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield the models as they arrive; the time to make them is measured apart."""
        for index, site in enumerate(sites):
            with making:
                state = arrives(index)
            yield site, state
            del state  # free it: one model at a time

    arrives(0)  # warm up
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as memory:
        helper, staged, total = WeightedAggregationHelper(), Elapsed(), Elapsed()
        staging = Staging(folder, memory=math.inf if case.startswith("kept") else 0)
        held: dict[str, dict[str, torch.Tensor]] = {}
        if case == "flare-held":
            held = dict(in_turn())
        elif case.startswith(("kept", "staged", "layerwise")):
            for site, state in in_turn():
                with staged:
                    staging.put(site, state)
                del state
        owner = {name: name.rpartition(".")[0] for name in shapes}
        making = Elapsed()

        with total:
            if case == "streaming":
                result = weighted_average(in_turn(), weights)
            elif case in ("staged", "kept"):
                result = weighted_average(staging.open_all(), weights)
            elif case.endswith("layerwise"):
                result = layerwise_average(staging.open_all(), dict.fromkeys(owner.values(), weights), owner)
            else:
                for site, state in held.items() if held else in_turn():
                    helper.add(state, weights[site], site, 0)
                    del state
                result = helper.get_result()
    if len(result) != len(shapes):
        raise RuntimeError(f"{case}: {len(result)} tensors of {len(shapes)}")
    return {
        "stage": staged.wall,
        "seconds": total.wall - making.wall,
        "cpu": total.cpu - making.cpu,
        "megabytes": memory.megabytes,
    }


def measure(case: str, num_sites: int, shapes_file: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", case, "--shapes", shapes_file, "--sites", str(num_sites)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"case {case} with {num_sites} sites failed:\n{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="aggregation: time and peak memory beside FLARE's helper")
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case; the best counts")
    parser.add_argument("--case", choices=sorted(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--shapes", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.sites[0], args.shapes)))
        return

    with tempfile.TemporaryDirectory() as folder:
        shapes = model_shapes()
        file = Path(folder) / "shapes.json"
        file.write_text(json.dumps(shapes), encoding="utf-8")
        numbers = sum(math.prod(shape) for shape, dtype in shapes.values() if "float" in dtype)
        print(f"ResNet-18: {len(shapes)} tensors, {numbers / 1e6:.1f} M numbers, {numbers * 4e-6:.1f} MB")
        print(f"best of {args.repeat} runs each; ratios to FLARE's helper with all models held")
        print("| sites | | keeping, s | seconds | ratio | processor seconds | ratio | peak MB | ratio |")
        print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for num_sites in args.sites:
            runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
            for _ in range(args.repeat):  # cases take turns, so that a busy moment does not affect one case only
                for case in CASES:
                    runs[case].append(measure(case, num_sites, str(file)))
            rows = {case: {key: min(run[key] for run in done) for key in done[0]} for case, done in runs.items()}
            base = rows["flare-held"]
            for case, title in CASES.items():
                row = rows[case]
                stage = f"{row['stage']:.2f}" if row["stage"] else "-"
                print(
                    f"| {num_sites} | {title} | {stage} | {row['seconds']:.3f} | {row['seconds'] / base['seconds']:.2f}"
                    f" | {row['cpu']:.3f} | {row['cpu'] / base['cpu']:.2f}"
                    f" | {row['megabytes']:.0f} | {row['megabytes'] / base['megabytes']:.2f} |"
                )


if __name__ == "__main__":
    main()
