"""Measure many sites in one process: processor seconds and memory of a round, for 100, 1,000 and 3,000 sites.

    python benchmarks/bench_scale.py [--sites 100 1000 3000] [--methods fed_avg fed_lwr fed_mrl] [--rounds 3]

What is measured is what FairFlare does around the training: messages, checks, what sites and server keep, aggregation,
agents, results. Each run is a process of its own; its memory is the largest that it had, less that of two sites. Seven
weights are trained with one batch of four images, so that nearly nothing of the time is training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TASK = Path(__file__).with_name("numbers_task.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[100, 1000, 3000])
    parser.add_argument("--methods", nargs="+", default=["fed_avg", "fed_lwr"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "SITES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one[0], int(given.one[1]), given.rounds)
        return
    print("| method | sites | processor seconds a round | ms a site | MB more than with 2 sites | KB a site |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for method in given.methods:
        floor = measured(method, 2, given.rounds)[1]
        for sites in given.sites:
            seconds, peak = measured(method, sites, given.rounds)
            more = max(0, peak - floor)
            cells = (f"{seconds:.2f}", f"{1000 * seconds / sites:.1f}", f"{more / 1024:.0f}", f"{more / sites:.0f}")
            print(f"| {method} | {sites} | " + " | ".join(cells) + " |", flush=True)


def measured(method: str, sites: int, rounds: int) -> tuple[float, float]:
    """Return the median processor seconds of a round, and peak memory in KB."""
    command = [sys.executable, __file__, "--one", method, str(sites), "--rounds", str(rounds)]
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "FAIRFLARE_REPORT": "0"}
    )
    found = json.loads(said.stdout.splitlines()[-1])
    return found["seconds"], found["peak"]


def one(method: str, sites: int, rounds: int) -> None:
    """Do one run in this process."""
    import logging

    from fairflare.federation.collecting.transport import Listener
    from fairflare.federation.plan.plan import make_plan
    from fairflare.federation.transports.local import run_local

    class Clock(Listener):
        ends: Sequence[float] = ()

        def round_started(self, current_round: int) -> None:
            self.ends = (*self.ends, time.process_time())

        def round_done(self, record: object, metric: str) -> None:
            self.last = time.process_time()

    logging.disable(logging.WARNING)
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="fairflare_scale_") as folder:
        settings = {"local_epochs": 1}
        plan = make_plan(method, sites=sites, num_rounds=rounds, settings=settings, task_file=TASK)
        run_local(plan, Path(folder) / "run", listeners=[clock])
    ends = [*clock.ends, clock.last]
    seconds = statistics.median(b - a for a, b in itertools.pairwise(ends))
    print(json.dumps({"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


if __name__ == "__main__":
    main()
