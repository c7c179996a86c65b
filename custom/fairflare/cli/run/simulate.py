"""Run a recipe in FLARE's simulator as a process group of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.console import Console

from fairflare.base.disk.temporary import OwnedFolder
from fairflare.base.machine.one_run import refuse_inside_run
from fairflare.cli.run.here import Stop
from fairflare.cli.run.view import RunView, view_of
from fairflare.reporting.results import mark_ended

if TYPE_CHECKING:
    from fairflare.flare.export.recipes import FairRecipe

RUN_FOLDER = Path("server") / "simulate_job" / "fairflare"  # folder of the results in the simulator's workspace

#: Finds the log's lines about a site whose process could not start. FLARE looks for a free port that the site's process
#: takes seconds later. Meanwhile another program may take the port (and answer in the site's place), or the process may
#: need more than a minute to start. Then the server would wait for the lost site until the phase's timeout. A process
#: that dies later does not match: FLARE logs an end of file for it, not a reset.
LOST = re.compile(
    rb"Execute exception: OSError: \[Errno \d+\] Address already in use"
    rb"|Failed to create connection to the child process in SimulatorClientRunner"
    rb"|Communication error with client \S{1,128}: \[Errno \d+\] Connection reset by peer"
)
LONGEST = 200  # largest number of bytes that LOST matches
# Longest path, in bytes, of a folder in which Python can create its sockets.
SOCKET = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
ATTEMPTS = 3
#: FLARE allocates a buffer of this size for each message, however small, and leaves it in a reference cycle; with
#: FLARE's default of 1 MB the server's process holds some 30 MB of such buffers.
CHUNK, CHUNK_BYTES = "NVFLARE_STREAMING_CHUNK_SIZE", 2**17
#: One heap for all of FLARE's threads saves 16 MB, where few tensors travel. glibc reads it when a process begins.
ARENAS = {"MALLOC_ARENA_MAX": "1"}


def simulate(
    recipe: FairRecipe,
    workspace: Path,
    threads: int,
    local: Mapping[str, Any],
    log_path: Path,
    console: Console,
    stop: Stop | None = None,
) -> int:
    """Run a recipe that names its sites in FLARE's simulator, and show its progress.

    A run that loses a site to FLARE's race for ports is started again, at most twice: from its last round if it has an
    experiment id, else from the first round. The third attempt continues without a lost site.

    Args:
        recipe: the recipe to run.
        workspace: workspace of the simulator.
        threads: number of the simulator's workers.
        local: content of ``local/fairflare.json``.
        log_path: file for the output of FLARE.
        console: console that shows the progress.
        stop: request to end the run, from :func:`fairflare.cli.run.here.stop_by_signals`; ``None`` for none.

    Returns:
        The simulator's exit code; 130 when Ctrl-C ended it, 143 when SIGTERM did. A run that was cut off has a reason
        in its results.
    """
    refuse_inside_run()
    folder = workspace / "local"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fairflare.json").write_text(json.dumps(dict(local), indent=2) + "\n", encoding="utf-8")
    stop = stop or Stop()
    # FLARE's temporary files, which may hold single sites' updates, are removed with this folder however the run ends.
    with OwnedFolder("sim") as owned, log_path.open("wb") as log, log_path.open("rb") as printed:
        job_root = owned.path / "job"
        recipe.export(str(job_root))
        command = _command(job_root / recipe.name, workspace, recipe.plan.sites or [], threads)
        events = workspace / RUN_FOLDER / "progress.jsonl"
        run = partial(_run, command, owned, log, events=events, recipe=recipe, console=console, stop=stop)
        for attempt in range(2, ATTEMPTS + 1):
            if (code := run(printed)) is not None:
                break
            text = (
                "FLARE's simulator lost a site, whose process found its port taken by another program, or was not "
                f"up within a minute. Started again ({attempt} of {ATTEMPTS})."
            )
            log.write(f"\n{text}\n\n".encode())
            log.flush()
            console.print(f"{text} {log_path}", soft_wrap=True, markup=False)
            events.unlink(missing_ok=True)  # events of the attempt before
        else:
            code = run(None)
    assert code is not None
    cut_off = stop.why or f"FLARE's simulator ended with code {code} in the middle of the run; its log: {log_path}"
    mark_ended(workspace / RUN_FOLDER, cut_off)
    return code


def _command(job: Path, workspace: Path, names: Sequence[str], threads: int) -> list[str]:
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(job), "-w", str(workspace)]
    return [*command, "-c", ",".join(names), "-n", str(len(names)), "-t", str(threads)]


def _run(
    command: list[str],
    owned: OwnedFolder,
    log: BinaryIO,
    printed: BinaryIO | None,
    *,
    events: Path,
    recipe: FairRecipe,
    console: Console,
    stop: Stop,
) -> int | None:
    """Run one attempt and return its exit code; ``None`` if it was stopped as FLARE's output reports a lost site."""
    if printed is not None:
        printed.seek(0, os.SEEK_END)
    fits = len(os.fsencode(owned.name)) <= SOCKET
    if not fits:
        console.print(f"TMPDIR is too long a path: what a killed simulator leaves there stays ({owned.path.parent})")
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={
            CHUNK: str(CHUNK_BYTES),
            **(ARENAS if recipe.plan.run.exchange != "all" else {}),
            **os.environ,
            **({"TMPDIR": owned.name} if fits else {}),
        },
        # The simulator owns the folder too, in case it outlives this process.
        pass_fds=() if owned.descriptor is None else (owned.descriptor,),
    )
    try:
        with view_of(recipe.plan, console) as view:
            ended = _follow(process, events, printed, view, stop)
        if not ended:
            _stop(process)
        return process.returncode if ended else None
    except KeyboardInterrupt:
        _stop(process)
        return stop.code
    except BaseException:
        _stop(process)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, kind)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
    finally:  # end workers that outlived the simulator; after a second Ctrl-C the simulator too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _follow(
    process: subprocess.Popen[bytes], events: Path, printed: BinaryIO | None, view: RunView, stop: Stop
) -> bool:
    """Show the run's events until the process ends, and return True; ``False``: the run has lost a site.

    Raises:
        KeyboardInterrupt: an end of this process was requested.
    """
    started = time.time()
    position = 0
    tail = b""
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
            return True
        if stop():
            raise KeyboardInterrupt
        if printed is not None:
            tail = tail[-LONGEST:] + printed.read()
            if LOST.search(tail):
                return False
        time.sleep(0.2)
