"""Measure the server's peak memory with sites that answer all at once, beside FLARE's own FedAvg.

In POC (every site in processes of its own, over the network's loopback) and in the simulator the figure is the resident
size of the process that runs FLARE's server job, from the job's start to its end. Nothing is trained.

    python benchmarks/bench_server_memory.py [--mode poc simulator] [--sites 2 6 12] [--megabytes 60]
    python benchmarks/bench_server_memory.py --in-process [--sites 4 32 100] [--megabytes 20]
    python benchmarks/bench_server_memory.py --in-process --sites 100 300 --megabytes 4

In one process there is no FLARE: the server half alone, with sites that answer one after the other, Fed-LWR's two
phases a round; also the time of a round, its bytes, and how much the results grow.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.conftest import run_group  # noqa: E402
from tests.e2e.poc_tools import SERVER, PocSystem, poc_system  # noqa: E402

OURS, FLARES, FLARES_ON_DISK = "FairFlare FedAvg", "FLARE FedAvg", "FLARE FedAvg, disk offload"
CODE = Path(__file__).with_name("instant_sites.py")


def make_job(folder: Path, what: str, sites: Sequence[str], megabytes: int, rounds: int) -> tuple[Path, Path]:
    """Write a job folder; return it with the file in which the server's peak will be."""
    name = what.replace(" ", "_").replace(",", "").lower()
    job, peak = folder / name, folder / f"{name}.json"
    config = job / "app" / "config"
    config.mkdir(parents=True)
    (job / "app" / "custom").mkdir()
    shutil.copy(CODE, job / "app" / "custom" / CODE.name)
    task = {"path": "instant_sites.Task", "args": {"megabytes": megabytes}}
    meeting = {"meeting": str(folder / f"{name}_meeting"), "sites": len(sites)}
    components: list[Any] = [{"id": "peak", "path": "instant_sites.Peak", "args": {"file": str(peak), **meeting}}]
    if what == OURS:
        path = "fairflare.flare.controller.RoundsController"
        rule = {"path": "fairflare.methods.fed_avg.FedAvg", "args": {}}
        arguments: dict[str, Any] = {"task": task, "rule": rule, "num_rounds": rounds, "min_sites": len(sites)}
    else:
        path = "nvflare.app_common.workflows.fedavg.FedAvg"
        arguments = {"num_clients": len(sites), "num_rounds": rounds}
        arguments["enable_tensor_disk_offload"] = what == FLARES_ON_DISK
        net = {"path": "instant_sites.Net", "args": {"megabytes": megabytes}}
        persistor = "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor"
        components.append(
            {"id": "persistor", "path": persistor, "args": {"model": net, "allow_numpy_conversion": False}}
        )
    workflow = {"id": "rounds", "path": path, "args": arguments}
    server = {"format_version": 2, "workflows": [workflow], "components": components, "task_request_interval": 0.05}
    executor = {"path": "instant_sites.Instant", "args": meeting}
    client = {"format_version": 2, "executors": [{"tasks": ["*"], "executor": executor}]}
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
    meta = {"name": name, "min_clients": len(sites), "deploy_map": {"app": ["server", *sites]}, "resource_spec": {}}
    (job / "meta.json").write_text(json.dumps(meta))
    return job, peak


def prepare_poc(poc: PocSystem, sites: Sequence[str], models_in_memory: int | None = None) -> None:
    """Allow the package at all participants, and start the system."""
    if models_in_memory is not None:
        poc.edit_local(SERVER, "fairflare.json", lambda own: own.update(models_in_memory=models_in_memory))
    for name in (SERVER, *sites):
        poc.allow(name, "fairflare.")
    poc.start(60 + 60 * len(sites))


def in_poc(poc: PocSystem, folder: Path, what: str, sites: Sequence[str], megabytes: int, rounds: int) -> dict:
    """Return MB of the server's job process: at the start of the run, at its peak, at its end."""
    job, peak = make_job(folder, what, sites, megabytes, rounds)
    said = poc.wait(poc.submit(job), 500)
    if not peak.exists():
        raise RuntimeError(f"{what}: {said}")
    return json.loads(peak.read_text())


def in_simulator(
    folder: Path, what: str, sites: Sequence[str], megabytes: int, rounds: int, models_in_memory: int | None = None
) -> dict:
    """Return MB of the simulator's process: at the start of the run, at its peak, at its end."""
    job, peak = make_job(folder, what, sites, megabytes, rounds)
    if models_in_memory is not None:
        local = folder / f"{job.name}_ws" / "local"
        local.mkdir(parents=True)
        (local / "fairflare.json").write_text(json.dumps({"sites": {"server": {"models_in_memory": models_in_memory}}}))
    home = folder / "home"
    home.mkdir(exist_ok=True)
    command = [
        str(Path(sys.executable).with_name("nvflare")),
        "simulator",
        str(job),
        "-w",
        str(folder / job.name) + "_ws",
    ]
    environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    code, log = run_group([*command, "-t", str(len(sites))], timeout=500, cwd=folder, env=environment)
    if code or not peak.exists():
        raise RuntimeError(f"{what}: the simulator ended with {code}\n{log[-3000:]}")
    return json.loads(peak.read_text())


def in_process(count: int, megabytes: int, rounds: int, models_in_memory: int | None = None) -> dict:
    """Do one run of Fed-LWR with sites that answer at once, in this process."""
    import instant_sites
    from fairflare import __version__
    from fairflare.core.features.layers import layers_of
    from fairflare.exchange.messages import TASK_ANCHOR, TASK_CHECK, TASK_TRAIN, Message
    from fairflare.federation.plan.run_settings import Place, RunSettings
    from fairflare.federation.server.rounds import Rounds
    from fairflare.methods.fed_lwr import FedLWR

    class Instant:
        def sites(self) -> list[str]:
            return [f"site-{index:03d}" for index in range(count)]

        expected = sites

        def ask(self, question: Any) -> None:
            task = question.task
            if question.name == TASK_CHECK:
                splits = {"splits": ["training", "validation", "test"], "images": [1, 1, 1]}
                for site in question.sites:
                    facts = {**splits, "synthetic": True, "device": "cpu", "personal": False}
                    told = {"version": __version__, "status": "ok", "report": facts}
                    question.hand_over(site, Message(meta=told, current_round=task.current_round))
                return
            layers = list(dict.fromkeys(layers_of(task.params).values()))
            report = {"layers": layers, "cka": [0.9] * len(layers), "dissimilarity": [0.1] * len(layers)}
            for site in question.sites:
                meta: dict[str, Any] = {"version": __version__, "status": "ok", "num_samples": 1}
                reply = Message(
                    meta=meta,
                    metrics=[{"metric": "dice", "split": "validation", "value": 0.5}],
                    current_round=task.current_round,
                )
                if question.name == TASK_TRAIN:
                    reply.params, reply.is_update = {k: v + 0.01 for k, v in task.params.items()}, True
                elif question.name == TASK_ANCHOR:
                    meta["report"] = report
                question.hand_over(site, reply)

        def stopped(self) -> bool:
            return False

        def say(self, text: str, *, warning: bool = False) -> None: ...

        def watch(self, seen: Any) -> None: ...

    with tempfile.TemporaryDirectory(prefix="fairflare_bench_") as name:
        folder = Path(name)
        rule = FedLWR()
        task = instant_sites.Task(megabytes)
        place = Place(folder, folder, "bench", {"models_in_memory": models_in_memory}, None)
        run = Rounds(task, rule, RunSettings(num_rounds=rounds), Instant(), place)
        start = instant_sites.resident()["VmRSS"]
        Path("/proc/self/clear_refs").write_text("5")
        began, busy = time.monotonic(), time.process_time()
        run.run()
        seconds, busy = time.monotonic() - began, time.process_time() - busy
        results = json.loads((folder / "fairflare" / "results.json").read_text())
        sizes = sum(path.stat().st_size for path in (folder / "fairflare").iterdir() if path.is_file())
        phases = results["rounds"][-1]["phases"]
    return {
        "start": start,
        "peak": instant_sites.resident()["VmHWM"],
        "seconds a round": round(seconds / rounds, 2),
        "processor seconds a round": round(busy / rounds, 2),
        "bytes in a round": sum(phase["bytes_in"] for phase in phases),
        "bytes out a round": sum(phase["bytes_out"] for phase in phases),
        "bytes of results a round": round(sizes / rounds),
    }


def one_process_each(counts: Sequence[int], megabytes: int, rounds: int, models_in_memory: int | None) -> None:
    """Start a process for each number of sites, so that none starts with another's memory."""
    rows: dict[int, dict] = {}
    for count in counts:
        command = [sys.executable, __file__, "--in-process", "--one", str(count), "--megabytes", str(megabytes)]
        command += [] if models_in_memory is None else ["--models-in-memory", str(models_in_memory)]
        done = subprocess.run([*command, "--rounds", str(rounds)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        rows[count] = json.loads(done.stdout.splitlines()[-1])
        print(count, rows[count], flush=True)
    table({"one process": rows}, megabytes)


def table(rows: dict[str, dict[int, dict]], megabytes: int) -> None:
    counts = sorted({count for row in rows.values() for count in row})
    print(f"{'peak above the start, in models of ' + str(megabytes) + ' MB':<44}" + "".join(f"{c:>7}" for c in counts))
    for what, row in rows.items():
        above = {count: f"{(found['peak'] - found['start']) / megabytes:.1f}" for count, found in row.items()}
        print(f"{what:<44}" + "".join(f"{above.get(count, '-'):>7}" for count in counts))
    for key in ("peak", "replies"):
        megabyte = {what: {c: round(v[key]) for c, v in row.items() if key in v} for what, row in rows.items()}
        print(f"MB, {key}: {megabyte}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=["poc", "simulator"], default=["poc", "simulator"])
    parser.add_argument("--what", nargs="+", choices=[OURS, FLARES, FLARES_ON_DISK], default=[OURS, FLARES])
    parser.add_argument("--sites", nargs="+", type=int)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--models-in-memory", type=int, help="bytes, of ours; default: the server's own")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    budget = args.models_in_memory
    if args.one:
        print(json.dumps(in_process(args.one, args.megabytes, args.rounds, budget)))
        return
    if args.in_process:
        one_process_each(args.sites or [4, 32, 100], args.megabytes or 20, args.rounds, budget)
        return
    args.sites, args.megabytes = args.sites or [2, 6, 12], args.megabytes or 60
    for mode in args.mode:
        rows: dict[str, dict[int, dict]] = {what: {} for what in args.what}
        for count in args.sites:
            sites = [f"site-{index + 1}" for index in range(count)]
            with tempfile.TemporaryDirectory(prefix="fairflare_bench_") as name:
                folder = Path(name)
                if mode == "poc":
                    with poc_system(folder / "system", sites) as poc:
                        prepare_poc(poc, sites, budget)
                        for what in args.what:
                            rows[what][count] = in_poc(poc, folder, what, sites, args.megabytes, args.rounds)
                            print(mode, what, count, rows[what][count], flush=True)
                else:
                    for what in args.what:
                        rows[what][count] = in_simulator(folder, what, sites, args.megabytes, args.rounds, budget)
                        print(mode, what, count, rows[what][count], flush=True)
        print(f"\n{mode}, {args.rounds} rounds; columns: number of sites")
        table(rows, args.megabytes)


if __name__ == "__main__":
    main()
