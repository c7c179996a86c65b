"""Compare a whole run with other software: 6 sites, 3 rounds, the same small U-Net; wall time and memory.

    python benchmarks/bench_beside.py [--jobs 2] [--workers 6] [--flower-python PATH] [--repeat 1]

- *plain loop*: FedAvg, and Fed-LWR as its authors' loop is described, in one process: no messages, checks or files.
- *FairFlare, one process* and *, --jobs 2*: ``fairflare run --in-process``, with all that a run leaves.
- *FairFlare, simulator*: the job in FLARE's simulator.
- *FLARE's recipe*: FLARE's own FedAvg there, with a Client API script.
- *Flower*: its FedAvg in its simulation, with the interpreter of an environment that has flwr[simulation], torch and
  monai (beside FLARE it cannot be installed: their pins exclude each other). Left out without ``--flower-python``.

From the start of the process to its end, imports and start-up too; one thread a process. Processor seconds are those of
all processes together; with Flower at least these, since nobody waits for Ray's. Memory is the largest sum of their
proportional set sizes, looked at every 0.2 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

HERE = Path(__file__).parent / "beside"
TASK = str(HERE / "fairflare_task.py")
ALIKE = ["--sites", "6", "--rounds", "3", "--set", "local_epochs=1", "--set", "batch_size=8", "--task-file", TASK]
LWR = [*ALIKE, "--set", "preset=authors"]
AVERAGE = [*ALIKE, "--set", "weighting=uniform", "--set", "keep_optimizer_state=false"]


def cases(jobs: int, workers: int, flower: str | None) -> Mapping[str, tuple[str, Sequence[str]]]:
    """Return command lines by name, with the name of the floor that each is compared with; ``{}`` is a folder."""
    run = [sys.executable, "-m", "fairflare.cli", "run"]
    plain = [sys.executable, str(HERE / "plain.py")]
    found: dict[str, tuple[str, Sequence[str]]] = {}
    for title, method, settings in (("FedAvg", "fed_avg", AVERAGE), ("Fed-LWR", "fed_lwr", LWR)):
        floor = f"{title}: plain loop"
        ours = [*run, method, *settings, "--workspace", "{}/ws"]
        found[floor] = (floor, [*plain, method])
        found[f"{title}: FairFlare, one process"] = (floor, [*ours, "--in-process", "--jobs", "1"])
        found[f"{title}: FairFlare, --jobs {jobs}"] = (floor, [*ours, "--in-process", "--jobs", str(jobs)])
        found[f"{title}: FairFlare, simulator, {workers} workers"] = (floor, [*ours, "--threads", str(workers)])
    floor = "FedAvg: plain loop"
    job = [sys.executable, str(HERE / "flare_job.py"), "{}/ws", str(workers)]
    found[f"FedAvg: FLARE's recipe, simulator, {workers} workers"] = (floor, job)
    if flower is not None:
        found[f"FedAvg: Flower, {workers} workers"] = (floor, [flower, str(HERE / "flower_job.py"), str(workers)])
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes of FairFlare without FLARE (default 2)")
    workers = "sites at a time in the simulators (default 6: with fewer FLARE starts a process for each task)"
    parser.add_argument("--workers", type=int, default=6, help=workers)
    parser.add_argument("--flower-python", help="interpreter of an environment with Flower")
    parser.add_argument("--repeat", type=int, default=1, help="the least of so many runs counts")
    given = parser.parse_args()
    print("| | seconds | to the plain loop | processor seconds | MB | to the plain loop |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    floors: dict[str, tuple[float, float]] = {}
    for name, (floor, command) in cases(given.jobs, given.workers, given.flower_python).items():
        runs = [measured(command) for _ in range(given.repeat)]
        if isinstance(failed := next((run for run in runs if isinstance(run, str)), None), str):
            print(f"| {name} | failed: {failed} | | | | |", flush=True)
            continue
        wall, processor, peak = (min(column) for column in zip(*runs, strict=True))
        base = floors.setdefault(floor, (wall, peak))
        cells = (f"{wall:.1f}", f"{wall / base[0]:.1f}", f"{processor:.1f}", f"{peak:.0f}", f"{peak / base[1]:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def measured(command: Sequence[str]) -> tuple[float, float, float] | str:
    """Return wall and processor seconds, and MB, of a command and its children; or its last line where it fails."""
    with tempfile.TemporaryDirectory(prefix="fairflare_beside_") as folder:
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HOME": folder}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        with (Path(folder) / "output.txt").open("w+") as output:
            process = subprocess.Popen(
                [part.replace("{}", folder) for part in command],
                stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True,
            )  # fmt: skip
            peak, busy = 0.0, dict[int, float]()
            while process.poll() is None:
                peak = max(peak, settings_in_use(process.pid, busy))
                time.sleep(0.2)
            wall = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            output.seek(0)
            lines = output.read().strip().splitlines()
    if process.returncode:
        return (lines or ["no output"])[-1][:200]
    waited_for = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, max(waited_for, sum(busy.values())), peak  # no process waits for Ray's, which are in busy


def settings_in_use(pid: int, busy: dict[int, float]) -> float:
    """Return MB of a process and its children, with shared pages once; ``busy``: processor seconds of each."""
    total = 0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                spent = process.cpu_times()
                busy[process.pid] = spent.user + spent.system
                total += process.memory_full_info().pss
    return total / 2**20


if __name__ == "__main__":
    main()
