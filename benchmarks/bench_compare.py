"""Measure a comparison of 4 methods with 3 seeds, two runs at a time, beside single runs: clock and processor time.

    python benchmarks/bench_compare.py [--rounds N] [--seeds 3] [--jobs 2] [--set NAME=VALUE ...]

The runs are quick jobs on the phantom. *Single* is ``fairflare run METHOD --in-process`` with seed 0 and the
comparison's number of draws, each by itself; their mean is the unit. With two jobs on two cores the floor without
sharing is half as many units as there are runs: 6 for 12. Processor seconds are those of all processes together,
imports, start and tables too, divided by the jobs; on a busy machine only they say something. Also checked: how far off
the first estimate of the time left was that the comparison printed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

METHODS = ("fed_avg", "fed_prox", "fed_nova", "fed_lwr")
POLL = 0.1
UNITS = {"h": 3600, "min": 60, "s": 1}
Told = tuple[float, str]  # time of a printed line, and its text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default: each quick job's own")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    program = [sys.executable, "-m", "fairflare.cli"]
    more = [part for setting in given.set for part in ("--set", setting)]
    more += ["--task", "segmentation", *(["--rounds", str(given.rounds)] if given.rounds else [])]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="fairflare_compare_") as folder:
        alone = []
        print("| | seconds | processor seconds | in mean single runs: clock, processors |")
        print("| --- | ---: | ---: | ---: |")
        for method in given.methods:
            place = Path(folder) / method
            options = ["--in-process", "--set", "bootstrap=200", "--workspace", str(place), *more]
            alone.append(measured([*program, "run", method, *options])[:2])
            print(f"| single {method} | {alone[-1][0]:.1f} | {alone[-1][1]:.1f} | |", flush=True)
        options = ["--seeds", str(given.seeds), "--jobs", str(given.jobs), "--train-like", "own"]
        options += ["--out", str(Path(folder) / "all"), *more]
        wall, busy, said = measured([*program, "compare", *given.methods, *options])
    units = [sum(column) / len(column) for column in zip(*alone, strict=True)]
    runs = len(given.methods) * given.seeds
    ratios = f"{wall / units[0]:.2f}, {busy / given.jobs / units[1]:.2f}"
    print(f"| {runs} runs, {given.jobs} at a time | {wall:.1f} | {busy:.1f} | {ratios} |")
    when, told = first_estimate(said)
    if told:
        print(f"first estimate of what is left: {told:.0f} s, {wall - when:.0f} s before the end")


def measured(command: Sequence[str]) -> tuple[float, float, list[Told]]:
    """Return seconds by the clock and of all processes' processors together, and the output with its times."""
    start = time.perf_counter()
    busy: dict[tuple[int, float], float] = {}
    said: list[Told] = []
    with tempfile.NamedTemporaryFile("w") as output, Path(output.name).open(encoding="utf-8") as lines:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None:
            with suppress(psutil.Error):
                for one in [process, *process.children(recursive=True)]:
                    times = one.cpu_times()
                    busy[one.pid, one.create_time()] = times.user + times.system
            said += [(time.perf_counter() - start, line) for line in lines]
            time.sleep(POLL)
        wall = time.perf_counter() - start
        said += [(wall, line) for line in lines]
    if process.returncode:
        text = "".join(line for _, line in said[-30:])
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
    return wall, sum(busy.values()), said


def first_estimate(said: Sequence[Told]) -> tuple[float, float]:
    """Return when the first estimate was printed, and its seconds; 0: none was printed."""
    for when, line in said:
        if found := re.search(r"about (.+) left", line):
            return when, sum(float(n) * UNITS[unit] for n, unit in re.findall(r"(\d+) (h|min|s)\b", found[1]))
    return 0.0, 0.0


if __name__ == "__main__":
    main()
