"""Run a small federation that dies by SIGKILL at a chosen file operation; see ``test_kills.py``.

    python -m tests.federation.killed METHOD FOLDER SEED KILLS ROUNDS

Imports once and forks a process for each run. Prints a JSON object for each kill.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from tests.tiny import FUNDUS, VOLUMES, run_document, without_times

IMAGES = {**FUNDUS, "phantom_sites": 3, "batch_size": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "fed_lwr": VOLUMES,
    "fed_mrl": {**IMAGES, "weighting.grid": [2, 2], "mu_policy": "qmix"},
    "fed_ism_plus_s": IMAGES,
    "fed_bn": IMAGES,
    "ditto": VOLUMES,
    "fed_avg": {**VOLUMES, "secure": "sums"},
    "fed_mas": IMAGES,
}


class Dying:
    """Count the operations that change files, and kill the process at the n-th.

    At a flush to disk the file that is being written loses half of its content first, as when the power goes: nothing
    of it was promised yet.
    """

    def __init__(self, dies_at: int) -> None:
        self.dies_at, self.count = dies_at, 0
        for owner, name in ((os, "replace"), (os, "rename"), (os, "unlink"), (os, "remove"), (os, "rmdir"),
                            (os, "mkdir"), (os, "fsync"), (os, "truncate")):  # fmt: skip
            setattr(owner, name, self.wrapped(getattr(owner, name), name))
        for owner, name in ((builtins, "open"), (sys.modules["io"], "open")):
            setattr(owner, name, self.opening(getattr(owner, name)))

    def wrapped(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self.step(args[0] if name == "fsync" else None)
            return real(*args, **kwargs)

        return operation

    def opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wax+"):
                self.step(None)
            return real(file, mode, *args, **kwargs)

        return operation

    def step(self, flushed: int | None) -> None:
        self.count += 1
        if self.count == self.dies_at:
            if flushed is not None:
                path = Path(f"/proc/self/fd/{flushed}").readlink()
                if path.name.endswith(".partial"):
                    size = path.stat().st_size
                    os.ftruncate(os.open(path, os.O_WRONLY), size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def run(method: str, folder: Path, rounds: int, dies_at: int = 0) -> int:
    """Do a run in a process of its own, and return its number of file operations; 0: the process was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dying = Dying(dies_at)
            plan = make_plan(method, sites=3, settings=SETTINGS[method], num_rounds=rounds, experiment="e")
            run_local(plan, folder)
            os.write(writer, str(dying.count).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(writer)
    said = b"".join(iter(lambda: os.read(reader, 100), b""))
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return 0
    assert status == 0, f"a run of {method} failed"
    return int(said)


def warm_up(method: str) -> None:
    """Import what a run imports late, MONAI's networks and PyTorch's compiler among it, once for all processes."""
    task = make_plan(method, sites=3, settings=SETTINGS[method]).task
    torch.optim.SGD(task.build_model().parameters(), lr=0.1).zero_grad()
    images = task.open_site("site-1", {"phantom": True}).batches("test", batch_size=8)
    task.evaluate(task.build_model(), images, torch.device("cpu"))


def outcome(folder: Path) -> dict[str, Any]:
    """Return the facts of a run that must be the same whether or not it was killed."""
    place = folder / "server" / "simulate_job"
    models = {}
    for name in ("FL_global_model.pt", "best_FL_global_model.pt"):
        found = torch.load(place / name, weights_only=True)
        digest = hashlib.sha256()
        for key, tensor in found["model"].items():
            digest.update(key.encode() + tensor.contiguous().view(-1).numpy().tobytes())
        models[name] = [digest.hexdigest(), found["train_conf"]]
    document = run_document(place / "fairflare")
    kept = ("status", "rounds", "test", "fairness", "left_out", "phases")
    return {"models": models} | {key: without_times(document[key]) for key in kept}


def main(method: str, folder: Path, seed: int, kills: int, rounds: int) -> None:
    torch.set_num_threads(1)
    warm_up(method)
    choose = random.Random(f"{seed}/{method}")
    operations = run(method, folder / "whole", rounds)
    wanted = outcome(folder / "whole")
    for number in range(kills):
        place, died = folder / str(number), []
        # One in three is killed again while it goes on.
        for _ in range(choose.choice((1, 1, 2))):
            died.append(choose.randint(1, operations))
            if run(method, place, rounds, died[-1]):
                break  # less was left to do
        run(method, place, rounds)
        found = outcome(place)
        differing = [key for key in wanted if found[key] != wanted[key]]
        print(json.dumps({"method": method, "of": operations, "died": died, "differing": differing}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
