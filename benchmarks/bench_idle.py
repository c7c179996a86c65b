"""Measure how long a two-phase round takes without work: six sites, FLARE's simulator, a worker each.

python benchmarks/bench_idle.py --rounds 10
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

TASK = Path(__file__).with_name("numbers_task.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sites", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fairflare.cli", "run", "fed_lwr", "--task-file", str(TASK)]
        command += ["--rounds", str(arguments.rounds), "--sites", str(arguments.sites)]
        command += ["--set", "local_epochs=1", "--workspace", f"{folder}/ws"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        run = Path(folder) / "ws" / "server" / "simulate_job" / "fairflare"
        events = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
        ends = [datetime.fromisoformat(e["time"]).timestamp() for e in events if e["kind"] == "round_done"]
        rounds = [b - a for a, b in itertools.pairwise(ends)]  # the first holds the workers' imports
        later = json.loads((run / "results.json").read_text())["rounds"][1:]
        phases = [phase for record in later for phase in record["phases"]]
    print(f"{arguments.sites} sites, {len(rounds)} rounds after the first")
    print("| | seconds, median (least to largest) |")
    print("| --- | ---: |")
    print(f"| round | {spread(rounds)} |")
    for name in ("train", "anchor", "aggregate"):
        print(f"| {name} | {spread([p['seconds'] for p in phases if p['name'] == name])} |")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
