"""Runs a recipe in FLARE's simulator as a process group of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fairflare.cli.in_process import INTERRUPTED
from fairflare.cli.run_view import RunView, view_of

if TYPE_CHECKING:
    from fairflare.flare.recipes import FairRecipe

RUN_FOLDER = Path("server") / "simulate_job" / "fairflare"  # in the simulator's workspace


def simulate(
    recipe: FairRecipe, workspace: Path, threads: int, local: Mapping[str, Any], log_path: Path, console: Console
) -> int:
    """Runs a recipe that names its sites, and shows its progress.

    Args:
        recipe: what to run.
        workspace: of the simulator.
        threads: workers.
        local: content of ``local/fairflare.json``.
        log_path: for what FLARE prints.
        console: shows how it goes.

    Returns:
        The simulator's exit code; 130 when Ctrl-C ended it.
    """
    names = recipe.plan.sites or []
    folder = workspace / "local"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fairflare.json").write_text(json.dumps(dict(local), indent=2) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="fairflare-job-") as job_root:
        recipe.export(job_root)
        command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator"]
        command += [str(Path(job_root) / recipe.name), "-w", str(workspace)]
        command += ["-c", ",".join(names), "-n", str(len(names)), "-t", str(threads)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                with view_of(recipe, console) as view:
                    _follow(process, workspace / RUN_FOLDER / "progress.jsonl", view)
            except KeyboardInterrupt:
                _stop(process)
                return INTERRUPTED
            except BaseException:
                _stop(process)
                raise
        return process.returncode


def _stop(process: subprocess.Popen[bytes]) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, kind)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlived the simulator
    except ProcessLookupError:
        return


def _follow(process: subprocess.Popen[bytes], events: Path, view: RunView) -> None:
    """Shows the events that the run writes, until the process ends."""
    started = time.time()
    position = 0
    while True:
        ended = process.poll() is not None
        if events.exists() and events.stat().st_mtime >= started - 1:
            with events.open(encoding="utf-8") as f:
                f.seek(position)
                for line in f:
                    if not line.endswith("\n"):
                        break
                    position += len(line.encode())
                    event = json.loads(line)
                    view.event(str(event.get("kind")), event)
        if ended:
            return
        time.sleep(0.2)
