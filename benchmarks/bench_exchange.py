"""Measure bytes and server memory with a large frozen encoder: ``exchange=trainable`` beside ``exchange=all``.

The encoder is random (seeded), each site builds it, and a head of some thousand numbers is trained by FedAvg; with
``--lora`` it is a ViT (``--network``; ``vit_l``: 302 M parameters) with LoRA of rank 8 on the layers of ``--targets``
(needs ``peft``).
``processes``: FairFlare without FLARE, the server in one process and the sites in others; ``simulator``: FLARE's, where
the server is the simulator's own process. Bytes are those of the last round in ``results.json``, a site; the peak is
the largest resident size (``VmHWM``) of the server's process, and ``child`` that of the process in which the network is
built once and which ends.

    python benchmarks/bench_exchange.py [--parameters 300e6] [--sites 4] [--rounds 2] [--how processes simulator]
        [--exchange trainable all]

With 300e6 parameters each site holds 1.2 GB of network and as much again while it trains; ``processes`` works on
``--jobs`` sites at a time, the simulator on all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

TASK = Path(__file__).with_name("frozen_task.py")
VIT = {
    "image_size": "[32,32]", "patch_size": 16, "local_steps": 2, "batch_size": 8,
    "phantom_test": 64, "phantom_own_test": 64, "adapters": "lora", "adapters.rank": 8,
}  # fmt: skip
ROLES = {"simulator_worker": "sites", "simulator.simulator": "server", "spawn_main": "child"}


class Found(NamedTuple):
    """Store a run's MB of the server's process and its children, bytes a site and round, and seconds."""

    peaks: dict[str, float]
    down: float
    up: float
    model: int
    seconds: float


def role(process: psutil.Process, how: str, main: int) -> str:
    """Return the role of a process; in ``processes`` the command itself is the server."""
    if process.pid == main:
        return "server" if how == "processes" else "command"
    line = " ".join(process.cmdline())
    return next((name for part, name in ROLES.items() if part in line), "other")


def peak(pid: int) -> float:
    """Return a process's largest resident size so far, in MB."""
    with Path(f"/proc/{pid}/status").open(encoding="ascii") as file:
        return next((int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM")), 0.0)


def watched(command: list[str], how: str, environment: dict[str, str]) -> dict[str, float]:
    """Run a command to its end, and return the largest size of each role's processes."""
    peaks: dict[str, float] = {}
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        top = psutil.Process(running.pid)
        while running.poll() is None:
            try:
                for process in (top, *top.children(recursive=True)):
                    name = role(process, how, running.pid)
                    peaks[name] = max(peaks.get(name, 0.0), peak(process.pid))
            except (psutil.Error, OSError):
                pass  # a process has just ended
            time.sleep(0.05)
        if running.returncode:
            log.seek(0)
            raise RuntimeError(log.read()[-3000:])
    return peaks


def run(how: str, exchange: str, args: argparse.Namespace, folder: Path) -> Found:
    """Do one run in a workspace of its own."""
    workspace, sites = folder / f"{how}-{exchange}", args.sites
    command = [sys.executable, "-m", "fairflare.cli.commands", "run", "fed_avg", "--task", "classification"]
    command += ["--sites", str(sites), "--rounds", str(args.rounds), "--workspace", str(workspace)]
    if args.lora:
        lora = {**VIT, "network": args.network, "adapters.targets": args.targets, "phantom_samples": 40 * args.sites}
        command += [part for name, value in lora.items() for part in ("--set", f"{name}={value}")]
    else:
        command += ["--task-file", str(TASK)]
    command += ["--set", f"exchange={exchange}", "--set", "keep_optimizer_state=false", "--timeout", "3000"]
    command += ["--in-process", "--jobs", str(args.jobs)] if how == "processes" else ["--threads", str(sites)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAIRFLARE_BENCH_PARAMETERS": str(int(args.parameters))}
    started = time.monotonic()
    peaks = watched(command, how, environment)
    seconds = time.monotonic() - started
    results = next(workspace.rglob("results.json"))
    last = json.loads(results.read_text())["rounds"][-1]
    row = next(phase for phase in last["phases"] if phase["name"] == "train")
    size = (results.parents[1] / "FL_global_model.pt").stat().st_size
    return Found(peaks, row["bytes_out"] / sites, row["bytes_in"] / sites, size, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="processes of sites, for `processes`")
    parser.add_argument("--how", nargs="+", choices=["processes", "simulator"], default=["processes", "simulator"])
    parser.add_argument("--exchange", nargs="+", default=["trainable", "all"])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--network", default="vit_l", choices=["vit_mini", "vit_s", "vit_b", "vit_l"], help="of --lora")
    parser.add_argument("--targets", default=r"attn\.out_proj$", help="layers with an adapter, for --lora")
    args = parser.parse_args()
    encoder = (
        f"{args.network}, LoRA of rank 8 on {args.targets}" if args.lora else f"{args.parameters / 1e6:.0f} M frozen"
    )
    print(f"{encoder}, {args.sites} sites, {args.rounds} rounds, FedAvg")
    columns = (
        "run",
        "exchange",
        "down, B/site/round",
        "up, B/site/round",
        "server MB",
        "child MB",
        "model file B",
        "s",
    )
    print(" | ".join(columns), flush=True)
    with tempfile.TemporaryDirectory(prefix="fairflare_bench_") as name:
        for how in args.how:
            for exchange in args.exchange:
                found = run(how, exchange, args, Path(name))
                # In `processes` the sites are children of the command too.
                child = "-" if how == "processes" or exchange == "all" else f"{found.peaks.get('child', 0):.0f}"
                cells = (how, exchange, f"{found.down:.0f}", f"{found.up:.0f}", f"{found.peaks.get('server', 0):.0f}")
                print(" | ".join((*cells, child, str(found.model), f"{found.seconds:.0f}")), flush=True)


if __name__ == "__main__":
    main()
