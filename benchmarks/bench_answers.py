"""Measure processor seconds and megabytes of command lines without tensors, beside those of a small program.

    python benchmarks/bench_answers.py [--repeat 3]

The small program is ``python -c 'import typer, pydantic.dataclasses'``; a ratio to it means the same on any machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = [sys.executable, "-c", "import typer, pydantic.dataclasses"]
ANSWERS = (
    "--help", "--version", "list", "describe fed_lwr", "examples", "show nowhere", "runn", "run --colour",
    "run fed_proxx", "run fed_prox --set mux=1", "export fed_prox --out jobs --set mu=-1",
    "run fed_mas --task segmentation", "compare fed_prox --set mux=1",
)  # fmt: skip


def cost(command: list[str], folder: Path) -> tuple[float, float]:
    """Return processor seconds and megabytes of a program that is run in an empty folder."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    """Print a line for each command: the least of several runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    programs = {f"fairflare {line}": [sys.executable, "-m", "fairflare.cli", *line.split()] for line in ANSWERS}
    print(f"{'':50}{'s':>6}{'ratio':>8}{'MB':>7}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        small = min(cost(SMALL, Path(folder)) for _ in range(repeat + 1))
        for name, command in {"import typer, pydantic.dataclasses": SMALL, **programs}.items():
            seconds, size = min(cost(command, Path(folder)) for _ in range(repeat))
            print(f"{name:50}{seconds:6.2f}{seconds / small[0]:8.1f}{size:7.0f}{size / small[1]:8.1f}")


if __name__ == "__main__":
    main()
