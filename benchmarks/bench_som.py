"""FedMRL's self-organizing map on the server: time and peak memory of its three forms.

One round with a grid of 25 neurons. The sites' models lie on disk as safetensors files and are read tensor by
tensor, as at a server; each case runs in a process of its own:

- *plain*: neurons and models as float64 vectors.
- *gram*: the same numbers from inner products; neurons are coefficients.
- *gram, kept*: and then writes its neurons, one file per tensor, and takes them up in a second round (timed).
- *sketch*: count sketches of 4096 numbers. Approximate.

``error`` is the largest relative difference of a squared distance from the plain form's in the same round, ``alpha``
the largest difference of a weight. Where the plain form needs more memory than ``--limit`` it is left out. Memory
is the peak growth of the resident size; ``disk`` is what the kept neurons take.

    python benchmarks/bench_som.py [--millions 1 8] [--sites 4 20] [--repeat 3] [--limit 9000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_aggregation import PeakMemory

CASES = {"plain": "plain", "gram": "gram", "kept": "gram, kept", "sketch": "sketch"}
NUM_TENSORS = 120  # of different sizes, the largest about a twelfth of the model


def shapes(millions: float) -> list[int]:
    """Sizes of the tensors: few large, many small, as in a convolutional network."""
    shares = [0.95**index for index in range(NUM_TENSORS)]
    return [max(1, round(millions * 1e6 * share / sum(shares))) for share in shares]


def write_models(folder: Path, millions: float, num_sites: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    received = {f"layer{i:03d}.weight": torch.randn(n, generator=generator) for i, n in enumerate(shapes(millions))}
    save_file(received, folder / "received.safetensors")
    for index in range(num_sites):
        local = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in received.items()}
        save_file(local, folder / f"site-{index:02d}.safetensors")


class Model(Mapping[str, Any]):
    """A state that reads a tensor when it is asked for and forgets it."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._path = path
        with safe_open(path, "pt") as file:
            self._names = list(file.keys())

    def __getitem__(self, name: str) -> Any:
        from safetensors import safe_open

        with safe_open(self._path, "pt") as file:  # opened anew: the file's pages go away with it
            return file.get_tensor(name).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Neurons(Mapping[str, Any]):
    """One file per tensor: the map's memory between rounds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, tensor: Any) -> None:
        from safetensors.torch import save_file

        save_file({"neurons": tensor}, self._folder / name)

    def __getitem__(self, name: str) -> Any:
        from safetensors.torch import load_file

        return load_file(self._folder / name)["neurons"]

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in sorted(self._folder.iterdir()))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return (self._folder / str(name)).exists()


def run_case(case: str, folder: Path) -> dict[str, Any]:
    import torch

    from fairflare.core.som import SelfOrganizingMap

    torch.set_num_threads(1)
    states = {path.stem: Model(path) for path in sorted(folder.glob("site-*.safetensors"))}
    received = Model(folder / "received.safetensors")
    warm = {"x": torch.zeros(100)}
    SelfOrganizingMap().step({"A": warm}, warm)
    som = SelfOrganizingMap(form="gram" if case == "kept" else case)
    with PeakMemory() as memory, tempfile.TemporaryDirectory(dir=folder) as kept:
        rounds: list[Any] = []
        start = time.perf_counter(), time.process_time()
        if case == "kept":
            first, second = Path(kept) / "0", Path(kept) / "1"
            first.mkdir()
            second.mkdir()
            rounds.append(som.step(states, received, keep=Neurons(first).put))
            start = time.perf_counter(), time.process_time()
            rounds.append(som.step(states, received, kept=Neurons(first), keep=Neurons(second).put))
            on_disk = sum(path.stat().st_size for path in second.iterdir())
        else:
            rounds.append(som.step(states, received))
            on_disk = 0
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    return {
        "seconds": wall,
        "cpu": cpu,
        "megabytes": memory.megabytes,
        "disk": on_disk / 2**20,
        "weights": rounds[0].weights,
        "distances": {site: d.tolist() for site, d in rounds[0].sq_distances.items()},
    }


def measure(case: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"case {case} failed:\n{done.stderr}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def difference(row: dict[str, Any], base: dict[str, Any] | None) -> tuple[str, str]:
    if base is None:
        return "-", "-"
    import numpy as np

    error = max(
        float(np.abs(np.array(row["distances"][site]) / np.array(base["distances"][site]) - 1).max())
        for site in base["distances"]
    )
    alpha = max(abs(row["weights"][site] - base["weights"][site]) for site in base["weights"])
    return f"{error:.0e}", f"{alpha:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="the map's forms: time and peak memory")
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 8], help="parameters, in millions")
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 20])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case; the best counts")
    parser.add_argument("--limit", type=float, default=9000, help="MB that the plain form may need by estimate")
    parser.add_argument("--case", choices=sorted(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.folder)))
        return

    print(f"grid (5, 5); best of {args.repeat} runs each; one model is 4 MB per million parameters\n")
    print(
        f"{'M':>4}  {'sites':>5}  {'form':<10}  {'time s':>6}  {'cpu s':>6}  {'peak MB':>7}"
        f"  {'disk MB':>7}  {'error':>6}  {'alpha':>6}"
    )
    for millions in args.millions:
        for num_sites in args.sites:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                write_models(folder, millions, num_sites)
                needed = millions * 8 * 2.2 * (25 + num_sites)  # vectors in float64, and their parts while joined
                cases = [case for case in CASES if case != "plain" or needed <= args.limit]
                rows = {}
                for case in cases:
                    runs = [measure(case, folder) for _ in range(args.repeat)]
                    best = {key: min(run[key] for run in runs) for key in ("seconds", "cpu", "megabytes", "disk")}
                    rows[case] = runs[0] | best
            for case, row in rows.items():
                error, alpha = difference(row, rows.get("plain"))
                print(
                    f"{millions:>4g}  {num_sites:>5}  {CASES[case]:<10}  {row['seconds']:>6.2f}  {row['cpu']:>6.2f}"
                    f"  {row['megabytes']:>7.0f}  {row['disk']:>7.0f}  {error:>6}  {alpha:>6}"
                )
            if "plain" not in rows:
                print(f"{millions:>4g}  {num_sites:>5}  plain       left out: about {needed:.0f} MB")


if __name__ == "__main__":
    main()
