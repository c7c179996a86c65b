"""Run FLARE in tests, in separate folders and process groups that are ended even when a test fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fairflare.cli.run.simulate import LOST
from fairflare.recipes import FairRecipe
from tests.tiny import run_document

ROOT = Path(__file__).parents[2]
TINY = {  # a network and data that one core trains in a blink
    "image_size": [32, 32],
    "features": [4, 4, 8, 8, 8, 4],
    "phantom_cases": 0.3,
}


@dataclass
class SimulatorRun:
    """Hold the files and the output that a finished simulator left."""

    code: int
    log: str
    workspace: Path

    @property
    def folder(self) -> Path:
        return self.workspace / "server" / "simulate_job" / "fairflare"

    @property
    def results(self) -> dict[str, Any]:
        return run_document(self.folder)


def run_group(
    command: Sequence[str], *, timeout: float, cwd: Path, env: dict[str, str], unless: re.Pattern[bytes] | None = None
) -> tuple[int, str]:
    """Run a command in a process group of its own, and end the whole group afterwards.

    Args:
        unless: what ends it at once when it is printed, as after the timeout.
    """
    with tempfile.NamedTemporaryFile() as file:
        process = subprocess.Popen(
            list(command), cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        end = time.monotonic() + timeout
        why = ""

        def output() -> bytes:
            return Path(file.name).read_bytes()  # by a position of its own: the command writes on meanwhile

        try:
            while process.poll() is None and not why:
                time.sleep(0.25)
                if time.monotonic() > end:
                    why = f"after {timeout} s"
                elif unless and unless.search(output()):
                    why = "as it printed what ends it"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        text = output().decode(errors="replace")
        return (-9, f"{text}\n[ended by the test {why}]") if why else (code, text)


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
    """Run the published command in a folder of its own; repeat it once where FLARE lost its race for a port."""
    home = root / "home"
    home.mkdir(exist_ok=True)
    given = {**os.environ, "HOME": str(home), **(env or {})}
    for workspace in (root / name, root / f"{name}-again"):
        (workspace / "local").mkdir(parents=True, exist_ok=True)
        if local is not None:
            (workspace / "local" / "fairflare.json").write_text(json.dumps(local))
        # As the command `nvflare`, which an environment on top of another one does not have.
        command = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), "-w", str(workspace)]
        if threads is not None:
            command += ["-t", str(threads)]
        code, log = run_group(command, timeout=timeout, cwd=root, env=given, unless=LOST)
        (root / f"{workspace.name}.log").write_text(log)
        if not LOST.search(log.encode()):
            break
        warnings.warn(f"FLARE's simulator lost a site to its race for a port; see {workspace}.log", stacklevel=2)
    return SimulatorRun(code, log, workspace)


def tiny_recipe(method: str, *, settings: dict[str, Any] | None = None, **arguments: Any) -> FairRecipe:
    """Return a recipe of three sites and two rounds that runs in seconds."""
    return FairRecipe(method, settings={**TINY, **(settings or {})}, **{"sites": 3, "num_rounds": 2, **arguments})


@pytest.fixture
def simulate(tmp_path):
    """Return ``simulate(job_folder, threads=..., local=...)`` -> :class:`SimulatorRun`, by the published command."""
    return partial(run_simulator, tmp_path)


@pytest.fixture
def job(tmp_path):
    """Return ``job(method, **recipe_arguments)`` -> path of an exported tiny job folder."""

    def make(method: str, *, folder: str = "jobs", **arguments: Any) -> Path:
        recipe = tiny_recipe(method, **arguments)
        recipe.export(str(tmp_path / folder))
        return tmp_path / folder / recipe.name

    return make
