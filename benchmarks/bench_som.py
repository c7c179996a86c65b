"""Measure time and peak memory of FedMRL's self-organizing map on the server.

One round with a grid of 25 neurons. The sites' models lie staged on disk and are read tensor by tensor, as at a
server; each case runs in a process of its own:

- *new map*: the first round; nothing is kept.
- *neurons kept*: takes up the neurons of the round before and writes the new ones, one file per tensor.

Memory is the peak growth of the resident size; ``disk`` is what the neurons of one round take.

    python benchmarks/bench_som.py [--millions 1 8] [--sites 4 20] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_aggregation import PeakMemory

CASES = {"new": "new map", "kept": "neurons kept"}
NUM_TENSORS = 120  # tensors of different sizes, the largest about a twelfth of the model


def shapes(millions: float) -> list[int]:
    """Return sizes of the tensors: few large, many small, as in a convolutional network."""
    shares = [0.95**index for index in range(NUM_TENSORS)]
    return [max(1, round(millions * 1e6 * share / sum(shares))) for share in shares]


def write_models(folder: Path, millions: float, num_sites: int) -> None:
    import torch

    from fairflare.exchange.staging import Staging

    generator = torch.Generator().manual_seed(0)
    received = {f"layer{i:03d}.weight": torch.randn(n, generator=generator) for i, n in enumerate(shapes(millions))}
    Staging(folder / "received").put("server", received)
    for index in range(num_sites):
        local = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in received.items()}
        Staging(folder / "staging").put(f"site-{index:02d}", local)


def run_case(case: str, folder: Path) -> dict[str, float]:
    import torch

    from fairflare.core.som import SelfOrganizingMap
    from fairflare.exchange.staging import Staging
    from fairflare.exchange.tensor_folder import KeptTensors

    torch.set_num_threads(1)
    states = Staging(folder / "staging").open_all()
    received = Staging(folder / "received").open("server")
    warm = {"x": torch.zeros(100)}
    SelfOrganizingMap().step({"A": warm}, warm)
    som, on_disk = SelfOrganizingMap(), 0
    with PeakMemory() as memory, tempfile.TemporaryDirectory(dir=folder) as root:
        neurons = KeptTensors("som", "the neurons of {} are", Path(root))
        kept = keep = None
        if case == "kept":
            som.step(states, received, keep=neurons.begin(1))
            kept, keep = neurons.load(1), neurons.begin(2)
        start = time.perf_counter(), time.process_time()
        som.step(states, received, kept=kept, keep=keep)
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        if case == "kept":
            on_disk = sum(path.stat().st_size for path in (neurons.root / "000002").iterdir())
    return {"seconds": wall, "cpu": cpu, "megabytes": memory.megabytes, "disk": on_disk / 2**20}


def measure(case: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"case {case} failed:\n{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="the map: time and peak memory")
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 8], help="parameters, in millions")
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 20])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case; the best counts")
    parser.add_argument("--case", choices=sorted(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.folder)))
        return

    print(f"grid (5, 5); best of {args.repeat} runs each; one model is 4 MB per million parameters\n")
    print(f"{'M':>4}  {'sites':>5}  {'case':<12}  {'time s':>6}  {'cpu s':>6}  {'peak MB':>7}  {'disk MB':>7}")
    for millions in args.millions:
        for num_sites in args.sites:
            with tempfile.TemporaryDirectory() as name:
                write_models(Path(name), millions, num_sites)
                for case, title in CASES.items():
                    runs = [measure(case, Path(name)) for _ in range(args.repeat)]
                    row = {key: min(run[key] for run in runs) for key in runs[0]}
                    print(
                        f"{millions:>4g}  {num_sites:>5}  {title:<12}  {row['seconds']:>6.2f}  {row['cpu']:>6.2f}"
                        f"  {row['megabytes']:>7.0f}  {row['disk']:>7.0f}"
                    )


if __name__ == "__main__":
    main()
