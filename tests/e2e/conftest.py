"""Running FLARE from tests: own folders, own process group, everything stopped also on failure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fairflare.recipes import FairRecipe

ROOT = Path(__file__).parents[2]
TINY = {  # a network and data that one core trains in a blink
    "image_size": [32, 32],
    "features": [4, 4, 8, 8, 8, 4],
    "phantom_cases": 0.3,
}


@dataclass
class SimulatorRun:
    """What a finished simulator left."""

    code: int
    log: str
    workspace: Path

    @property
    def folder(self) -> Path:
        return self.workspace / "server" / "simulate_job" / "fairflare"

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text())


def run_group(command: Sequence[str], *, timeout: float, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """Runs a command in a process group of its own and ends the whole group afterwards."""
    process = subprocess.Popen(
        list(command),
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return -9, output + f"\n[ended by the test after {timeout} s]"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run_simulator(
    root: Path,
    job: Path,
    *,
    threads: int | None = None,
    local: dict[str, Any] | None = None,
    name: str = "ws",
    timeout: float = 480,
    env: dict[str, str] | None = None,
) -> SimulatorRun:
    """The published command in a folder of its own."""
    workspace = root / name
    (workspace / "local").mkdir(parents=True, exist_ok=True)
    if local is not None:
        (workspace / "local" / "fairflare.json").write_text(json.dumps(local))
    home = root / "home"
    home.mkdir(exist_ok=True)
    command = [str(Path(sys.executable).with_name("nvflare")), "simulator", str(job), "-w", str(workspace)]
    if threads is not None:
        command += ["-t", str(threads)]
    code, log = run_group(command, timeout=timeout, cwd=root, env={**os.environ, "HOME": str(home), **(env or {})})
    (root / f"{name}.log").write_text(log)
    return SimulatorRun(code, log, workspace)


def tiny_recipe(method: str, *, settings: dict[str, Any] | None = None, **arguments: Any) -> FairRecipe:
    """Three sites, two rounds, in seconds."""
    return FairRecipe(method, settings={**TINY, **(settings or {})}, **{"sites": 3, "num_rounds": 2, **arguments})


@pytest.fixture
def simulate(tmp_path):
    """``simulate(job_folder, threads=..., local=...)`` -> :class:`SimulatorRun`, by the published command."""
    return partial(run_simulator, tmp_path)


@pytest.fixture
def job(tmp_path):
    """``job(method, **recipe_arguments)`` -> path of an exported tiny job folder."""

    def make(method: str, *, folder: str = "jobs", **arguments: Any) -> Path:
        recipe = tiny_recipe(method, **arguments)
        recipe.export(str(tmp_path / folder))
        return tmp_path / folder / recipe.name

    return make
