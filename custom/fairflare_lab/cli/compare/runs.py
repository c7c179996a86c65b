"""Do the runs of a comparison, several at once, each in its own process and folder; completed runs are not repeated."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import sha256_of, write_whole
from fairflare.base.machine.one_run import refuse_inside_run
from fairflare.base.settings import flatten
from fairflare.cli.run.folder import was_refused
from fairflare.methods.base.catalog import list_added_files
from fairflare.reporting.documents import RunResults
from fairflare.reporting.results import find_results, read_results, results_in
from fairflare_lab.cli.compare import worker
from fairflare_lab.cli.compare.series import Run, Series
from fairflare_lab.compare.left_out import Unseen

POLL = 0.2
WAIT_FOR_END = 30.0  # seconds that a run has to end after it was asked to
RUNS, PLAN_FILE = "runs", "run.json"
SIMULATOR = "simulator"  # folder of the simulator's workspace in a run's folder; FLARE empties it at the start
WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "completed", "failed", "stopped"
NEEDED_TO_CONTINUE = ("fairflare_state", "fairflare_checkpoints")  # folders that a run has until it completes


@dataclass
class Progress:
    """Describe the state of one run of a comparison.

    Attributes:
        state: one of this module's constants for a run's state.
        started: when the run began, on the clock of this process; 0: the run did not begin here.
        seconds: time that the run took in this process; 0: the run did not end here.
        reason: why the run failed.
    """

    run: Run
    state: str = WAITING
    started: float = 0.0
    seconds: float = 0.0
    reason: str = ""


class Runner:
    """Do the runs of a series that are still missing.

    A pool of `concurrent.futures` is not used: if one run was killed, the pool would end all other runs, and a worker
    that does several runs would keep memory and random state of earlier runs.

    Args:
        series: the series of runs.
        folder: folder of the comparison; a run is in ``runs/<row>-seed<seed>``, or ``...-without-<site>``.
        local: content of ``local/fairflare.json``.
        at_once: number of runs, each in a process, at the same time.
        simulator: number of workers of FLARE's simulator for each run; ``None`` if runs do not use the simulator.
        overwrite: whether runs of other settings in the same folders are replaced.

    Raises:
        ValueError: a run's plan is impossible, or its folder holds a run of other settings; the message names them.
    """

    def __init__(
        self,
        series: Series,
        folder: Path,
        local: Mapping[str, Any],
        *,
        at_once: int = 1,
        simulator: int | None = None,
        overwrite: bool = False,
    ) -> None:
        refuse_inside_run()
        self.folder, self.local, self.at_once, self.simulator = folder, dict(local), at_once, simulator
        self.all = [Progress(run) for run in series.runs()]
        for progress in self.all:
            progress.run.make()
        for progress in self.all:  # a run is replaced when none is impossible
            self._look(progress, overwrite)

    def place(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.folder / RUNS / run.name

    def workspace(self, run: Run) -> Path:
        """Return the workspace of a run, in which it writes its results."""
        return self.place(run) / SIMULATOR if self.simulator else self.place(run)

    def results(self) -> list[RunResults]:
        """Return the results of the runs that completed."""
        return [read_results(find_results(self.place(p.run))) for p in self.all if p.state == DONE]

    def collect_held_out(self) -> list[tuple[RunResults, Unseen]]:
        """Return the results of the completed runs, each with its test at the left-out site."""
        done = [find_results(self.place(p.run)) for p in self.all if p.state == DONE]
        return [(read_results(file), Unseen.read(file.parent)) for file in done]

    def go(self, tell: Callable[[Progress], None], stop: Callable[[], object] = lambda: False) -> None:
        """Do the missing runs of the comparison; on an interruption, end the runs in progress.

        Args:
            tell: function that is called with each run that begins or ends.
            stop: function that returns whether to stop all runs.

        Raises:
            KeyboardInterrupt: ``stop`` returned true.
        """
        waiting = [progress for progress in self.all if progress.state != DONE]
        running: list[tuple[Progress, BaseProcess, Connection]] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.at_once:
                    running.append(self._start(waiting.pop(0)))
                    tell(running[-1][0])
                time.sleep(POLL)
                if stop():
                    raise KeyboardInterrupt
                for progress, process, _ in running:
                    if process.exitcode is not None:
                        self._end(progress, process.exitcode)
                        tell(progress)
                running = [one for one in running if one[0].state == RUNNING]
        finally:
            for progress, _, alive in running:
                progress.state = STOPPED
                alive.close()  # asks the run to end
            for _, process, _ in running:
                process.join(WAIT_FOR_END)
                process.kill()
                process.join()

    # -- one run

    def _look(self, progress: Progress, overwrite: bool) -> None:
        """Look at a run's folder: mark a completed run as done, and remove or refuse a run of other settings."""
        place = self.place(progress.run)
        differing = _differing(place, self._describe(progress.run))
        if differing and not overwrite and not was_refused(place):
            raise ValueError(
                f"{place} holds a run of other settings ({differing}); give --overwrite to replace it, the row another "
                "label, or another --out"
            )
        if differing:
            shutil.rmtree(place)
        elif _outcome(place, 0)[0] == DONE and (not progress.run.held_out or Unseen.is_in(find_results(place).parent)):
            progress.state = DONE

    def _describe(self, run: Run) -> dict[str, Any]:
        always = {"plan": dict(run.plan), "local": self.local, "simulator": bool(self.simulator)}
        files = {str(file): sha256_of(file) for file in list_added_files()}
        seldom = {"held_out": run.held_out, "method_files": files}
        return json.loads(json.dumps({**always, **{name: value for name, value in seldom.items() if value}}))

    def _start(self, progress: Progress) -> tuple[Progress, BaseProcess, Connection]:
        """Begin a run in a process that ends when the returned connection is closed or this process has ended."""
        place = self.place(progress.run)
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._describe(progress.run), indent=2) + "\n"
        write_whole(place / PLAN_FILE, lambda path: path.write_text(text, "utf-8"), shared=True)
        # State that a run needs to be resumed is saved in its own folder, also where the data file names other folders.
        own = {"state_root": str(place / "fairflare_state"), "checkpoint_root": str(place / "fairflare_checkpoints")}
        given = {
            "plan": dict(progress.run.plan),
            "workspace": str(self.workspace(progress.run)),
            "local": {**self.local, **own},
            "log": str(place / "run.log"),
            "output": str(place / "output.log"),
            "simulator": self.simulator,
            "held_out": progress.run.held_out,
            "method_files": [*map(str, list_added_files())],
        }
        theirs, alive = multiprocessing.Pipe(duplex=False)
        process = self._processes().Process(target=worker.work, args=(given, theirs), name=progress.run.name)
        process.start()
        theirs.close()
        progress.state, progress.started = RUNNING, time.monotonic()
        return progress, process, alive

    def _processes(self) -> Any:
        """Return the context that starts processes: where possible as forks of one with the needed imports.

        Runs share the cores, so each run has one thread: more threads would slow each other down and change last bits.
        """
        os.environ["OMP_NUM_THREADS"] = "1"
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload([] if self.simulator else ["fairflare_lab.cli.compare.ahead"])
        return context

    def _end(self, progress: Progress, code: int) -> None:
        """Record how a run ended, and remove the state for resuming it if it completed."""
        place = self.place(progress.run)
        progress.seconds = time.monotonic() - progress.started
        progress.state, progress.reason = _outcome(place, code)
        for name in NEEDED_TO_CONTINUE if progress.state == DONE else ():
            shutil.rmtree(place / name, ignore_errors=True)


def _outcome(place: Path, code: int | None) -> tuple[str, str]:
    try:
        results = read_results(find_results(place))
    except (OSError, ValueError) as error:
        return FAILED, f"no results ({error}); see {place / 'output.log'}"
    if results.status == "completed" and code == 0:
        return DONE, ""
    return FAILED, str(results.reason or f"it ended with code {code}; see {place / 'run.log'}")


def _differing(place: Path, wanted: Mapping[str, Any]) -> str:
    """Return in words how a stored plan differs from the wanted one; empty: not at all, or no run is stored."""
    path = place / PLAN_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "" if results_in(place) is None else f"there is no {path.name} that tells them"
    except ValueError:
        return f"{path.name} cannot be read"
    old, new = flatten(stored), flatten(wanted)
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return ", ".join(f"{name}: {old.get(name)!r}, now {new.get(name)!r}" for name in names[:4])
