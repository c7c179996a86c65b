"""Measure what a site's process imports until its first round is done, and how long that takes.

    python benchmarks/bench_imports.py [--repeat 5] [--job jobs/fed_lwr]

FLARE starts a process for each site, and with fewer workers than sites in its simulator one for each task. A process
of its own does a round of the packaged job as a site (FLARE's worker, then check, train, anchor and validate on the
phantom) and lists its modules. Others import these, nothing else: first those of torch, then FLARE's, then MONAI's,
then ours, each with what it brings along. Beside it torch alone (the floor), and what FLARE and MONAI cost without us.
Processor time, with files that have been read before; median (least to largest).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARTS = ("torch", "nvflare", "monai", "fairflare")
# torch._dynamo: every program's first optimizer imports it.
PLAIN = "torch.utils.data torch._dynamo nvflare.private.fed.app.simulator.simulator_worker nvflare.client"
PLAIN += " monai.networks.nets.basic_unet monai.losses.dice monai.data monai.transforms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--job", type=Path, default=Path(__file__).parents[1] / "jobs" / "fed_lwr")
    parser.add_argument("--child", choices=("round", "import"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child == "round":
        print(json.dumps(modules_of_a_round(given.job)))
        return
    if given.child == "import":
        print(json.dumps(seconds_of(json.load(sys.stdin))))
        return
    everything = child("round", given)
    print(f"{len(everything)} modules of a site of {given.job.name}, seconds in the process:")
    print("| | seconds | ratio | " + " | ".join(PARTS) + " |")
    print("| --- | ---: | ---: | " + " | ".join("---:" for _ in PARTS) + " |")
    floor = None
    cases = {"torch alone": ["torch"], "FLARE and MONAI, without us": PLAIN.split(), "a site": everything}
    for title, names in cases.items():
        child("import", given, names)  # reads the files from disk once, before the timing
        runs = [child("import", given, names) for _ in range(given.repeat)]
        totals = [sum(run.values()) for run in runs]
        total = statistics.median(totals)
        floor = floor or total
        parts = " | ".join(f"{statistics.median(run[part] for run in runs):.2f}" for part in PARTS)
        spread = f"{total:.2f} ({min(totals):.2f} to {max(totals):.2f})"
        print(f"| {title} | {spread} | {total / floor:.1f} | {parts} |", flush=True)


def child(what: str, given: argparse.Namespace, names: list[str] | None = None) -> Any:
    command = [sys.executable, __file__, "--child", what, "--job", str(given.job.absolute())]
    with tempfile.TemporaryDirectory(prefix="fairflare_imports_") as folder:
        done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of(names: list[str]) -> dict[str, float]:
    """Return the seconds that the modules of each part take, in the order of PARTS."""
    seconds = {}
    for part in PARTS:
        start = time.process_time()
        for name in names:
            if name.partition(".")[0] == part and name not in sys.modules:
                with contextlib.suppress(ImportError):  # modules made at runtime, such as torch.ops
                    importlib.import_module(name)
        seconds[part] = time.process_time() - start
    return seconds


def modules_of_a_round(job: Path) -> list[str]:
    """Return module names in the order of their import, in a round with FLARE's job building and our server's tasks."""
    importlib.import_module("nvflare.private.fed.app.simulator.simulator_worker")
    sys.path.insert(0, str(job / "app" / "custom"))
    config = json.loads((job / "app" / "config" / "config_fed_client.json").read_text())
    site = built(config["executors"][0]["executor"])
    from fairflare.exchange.messages import TASK_ANCHOR, TASK_CHECK, TASK_TRAIN, TASK_VALIDATE, SiteTask, clean_state
    from fairflare.federation.site.worker import SiteWorker

    with tempfile.TemporaryDirectory(prefix="fairflare_imports_") as folder:
        worker = SiteWorker("site-1", site.task, site.training, {}, Path(folder), num_threads=1)
        state = clean_state(site.task.build_model().state_dict())
        for name in (TASK_CHECK, TASK_TRAIN, TASK_ANCHOR, TASK_VALIDATE):
            reply = worker.perform(SiteTask(name, {} if name == TASK_CHECK else state, 0, 1, 0, run="imports"))
            if reply.status != "ok":
                sys.exit(f"{name}: {reply.status}, {reply.reason}")
    return [name for name in sys.modules if name.partition(".")[0] in PARTS]


def built(component: dict[str, Any]) -> Any:
    """Build a component of a FLARE configuration."""
    module, _, name = component["path"].rpartition(".")
    arguments = {
        key: built(value) if isinstance(value, dict) and "path" in value else value
        for key, value in component.get("args", {}).items()
    }
    return getattr(importlib.import_module(module), name)(**arguments)


if __name__ == "__main__":
    main()
