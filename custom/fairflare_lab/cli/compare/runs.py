"""The runs of a comparison, several at once, each in a process and a folder of its own; done ones are not repeated."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fairflare.base.disk.files import write_whole
from fairflare.cli.run.folder import refused
from fairflare.cli.run.simulate import RUN_FOLDER
from fairflare.federation.plan.series import Run, Series
from fairflare.reporting.results import PROGRESS_FILE, find_results, read_results, results_in
from fairflare_lab.cli.compare import worker
from fairflare_lab.compare.left_out import Unseen

POLL = 0.2
WAIT_FOR_END = 30.0  # seconds for a run that is told to end
RUNS, PLAN_FILE = "runs", "run.json"
SIMULATOR = "simulator"  # its workspace, in a run's folder: FLARE empties it when it starts
DONE, FAILED, STOPPED = "completed", "failed", "stopped"
NEEDED_TO_CONTINUE = ("fairflare_state", "fairflare_checkpoints")  # in a run's folder, until it is done


@dataclass
class Progress:
    """Where one run is.

    Attributes:
        rounds: done.
        of: rounds it has.
        state: ``waiting``, ``running``, ``completed``, ``failed``, ``stopped``.
        seconds: it has taken here.
        reason: why it failed.
    """

    run: Run
    of: int
    rounds: int = 0
    state: str = "waiting"
    seconds: float = 0.0
    reason: str = ""
    began_at: int = 0  # rounds that were there already


@dataclass
class _Process:
    process: BaseProcess
    alive: Connection  # the run ends when this end is closed, or this process is no more
    progress: Progress
    started: float = field(default_factory=time.monotonic)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs share the cores; more threads each would only be in each other's way, and move the last bits."""
    name = "OMP_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Runner:
    """Does what is missing of a series.

    Args:
        series: the runs.
        folder: of the comparison; a run lies in ``runs/<row>-seed<seed>``, or ``...-without-<site>``.
        local: content of ``local/fairflare.json``.
        at_once: processes.
        simulator: workers of FLARE's simulator for each run; ``None``: without it.
        overwrite: runs of other settings in the same folders are replaced.

    Raises:
        ValueError: a plan that cannot be; a run of other settings lies where one is to go (says which setting).
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
        self.folder, self.local, self.at_once, self.simulator = folder, dict(local), at_once, simulator
        self.all = [Progress(run, run.make().run.num_rounds) for run in series.runs()]
        for progress in self.all:
            self._look(progress, overwrite)

    def place(self, run: Run) -> Path:
        """A run's folder."""
        return self.folder / RUNS / run.name

    def workspace(self, run: Run) -> Path:
        """Where it lays out its results."""
        return self.place(run) / SIMULATOR if self.simulator else self.place(run)

    def results(self) -> list[dict[str, Any]]:
        """Documents of the runs that completed."""
        return [read_results(find_results(self.place(p.run))) for p in self.all if p.state == DONE]

    def held_out(self) -> list[tuple[dict[str, Any], Unseen]]:
        """Return the documents of the runs that completed, each with its test at the site that was left out."""
        done = [find_results(self.place(p.run)) for p in self.all if p.state == DONE]
        return [(read_results(file), Unseen.read(file.parent)) for file in done]

    @_one_thread()
    def go(self, tell: Callable[[Progress], None], stop: Callable[[], object] = lambda: False) -> None:
        """Does the runs that are not done; ``tell`` is called whenever one got on. Interrupted, it ends them all.

        Raises:
            KeyboardInterrupt: ``stop`` said so.
        """
        waiting = [progress for progress in self.all if progress.state != DONE]
        running: list[_Process] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.at_once and not self._all_refused():
                    running.append(self._start(waiting.pop(self._next(waiting))))
                    tell(running[-1].progress)
                time.sleep(POLL)
                if stop():
                    raise KeyboardInterrupt
                for one in list(running):
                    if self._follow(one):
                        tell(one.progress)
                    if one.progress.state != "running":
                        running.remove(one)
                if not running and self._all_refused():
                    for progress in waiting:
                        progress.state, progress.reason = STOPPED, "not begun, since all before it were refused"
                    waiting.clear()
        finally:
            _end(running)

    def left(self) -> float | None:
        """Seconds to go, by what runs of the same row, else of all rows, took so far; ``None``: nothing is known."""
        if not (took := self._took()):
            return None
        usual = sum(took.values()) / len(took)
        open_ = [p for p in self.all if p.state in ("waiting", "running")]
        each = [max(0.0, took.get(p.run.entry.label, usual) * _share(p) - p.seconds) for p in open_]
        return max(sum(each) / self.at_once, *each, 0.0)

    def unseen(self) -> int:
        """Rows of which no round has ended here and some is to come: :meth:`left` takes them to be like the others."""
        to_come = {p.run.entry.label for p in self.all if p.state in ("waiting", "running")}
        return len(to_come - self._took().keys())

    def _took(self) -> dict[str, float]:
        """Seconds of a whole run by row: of those that ended, else by the rounds so far, the final test as one more."""
        took: dict[str, dict[bool, list[float]]] = {}
        for p in self.all:
            if p.rounds > p.began_at:
                done = p.state == DONE
                whole = p.seconds if done else p.seconds * (p.of - p.began_at + 1) / (p.rounds - p.began_at)
                took.setdefault(p.run.entry.label, {}).setdefault(done, []).append(whole / _share(p))
        best = {label: found.get(True) or found[False] for label, found in took.items()}
        return {label: sum(found) / len(found) for label, found in best.items()}

    def _next(self, waiting: Sequence[Progress]) -> int:
        """Which run is begun: one of a row of which no round has ended here, else the longest: none ends up alone."""
        if self.at_once == 1:
            return 0
        took = self._took()
        return max(range(len(waiting)), key=lambda i: (took.get(waiting[i].run.entry.label, math.inf), -i))

    def _all_refused(self) -> bool:
        """Whether a run of each row, two at least, ended before its first round for one reason; none got further."""
        begun = [p for p in self.all if p.state != "waiting" and (p.state != "running" or p.rounds)]
        refused = {(p.state, p.rounds, p.reason) for p in begun}
        rows = {p.run.entry.label for p in self.all} - {p.run.entry.label for p in begun}
        return len(begun) > 1 and not rows and len(refused) == 1 and (begun[0].state, begun[0].rounds) == (FAILED, 0)

    # -- one run

    def _look(self, progress: Progress, overwrite: bool) -> None:
        """What is there of a run."""
        place = self.place(progress.run)
        differing = _differing(place, self._wanted(progress.run))
        if differing and not overwrite and not refused(place):
            raise ValueError(
                f"{place} holds a run of other settings ({differing}); give --overwrite to replace it, the row another "
                "label, or another --out"
            )
        if differing:
            shutil.rmtree(place)
            return
        if _outcome(place, 0)[0] != DONE:
            return
        if self._tested(progress.run):
            progress.state, progress.rounds, progress.began_at = DONE, progress.of, progress.of

    def _wanted(self, run: Run) -> dict[str, Any]:
        left_out = {"held_out": run.held_out} if run.held_out else {}
        wanted = {"plan": dict(run.plan), "local": self.local, "simulator": bool(self.simulator), **left_out}
        return json.loads(json.dumps(wanted))

    def _tested(self, run: Run) -> bool:
        """Whether nothing is left to test."""
        return not run.held_out or Unseen.is_in(find_results(self.place(run)).parent)

    def _start(self, progress: Progress) -> _Process:
        place, wanted = self.place(progress.run), self._wanted(progress.run)
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(wanted, indent=2) + "\n"
        write_whole(place / PLAN_FILE, lambda path: path.write_text(text, "utf-8"), shared=True)
        # What a run needs to go on stays with it, wherever the data file wants such things.
        own = {"state_root": str(place / "fairflare_state"), "checkpoint_root": str(place / "fairflare_checkpoints")}
        given = {
            "plan": dict(progress.run.plan),
            "workspace": str(self.workspace(progress.run)),
            "local": {**self.local, **own},
            "log": str(place / "run.log"),
            "output": str(place / "output.log"),
            "simulator": self.simulator,
            "held_out": progress.run.held_out,
        }
        theirs, alive = multiprocessing.Pipe(duplex=False)
        process = self._processes().Process(target=worker.work, args=(given, theirs), name=progress.run.name)
        process.start()
        theirs.close()
        progress.state = "running"
        progress.began_at = progress.rounds = _rounds_done(self.workspace(progress.run))
        return _Process(process, alive, progress)

    def _processes(self) -> Any:
        """How processes of runs begin: as copies of one that has imported what they need, where the system can."""
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload([] if self.simulator else ["fairflare_lab.cli.compare.ahead"])
        return context

    def _follow(self, one: _Process) -> bool:
        """Whether something is new."""
        progress, place = one.progress, self.place(one.progress.run)
        before = (progress.state, progress.rounds)
        ended = one.process.exitcode is not None
        progress.seconds = time.monotonic() - one.started
        progress.rounds = max(progress.rounds, _rounds_done(self.workspace(progress.run)))
        if ended:
            one.alive.close()
            progress.state, progress.reason = _outcome(place, one.process.exitcode)
            if progress.state == DONE:
                progress.rounds = progress.of
                for name in NEEDED_TO_CONTINUE:
                    shutil.rmtree(place / name, ignore_errors=True)
        return (progress.state, progress.rounds) != before


def _share(progress: Progress) -> float:
    """Of a whole run, the part that is done here; the rest was there already."""
    return (progress.of - progress.began_at + 1) / (progress.of + 1)


def _outcome(place: Path, code: int | None) -> tuple[str, str]:
    try:
        results = read_results(find_results(place))
    except (OSError, ValueError) as error:
        return FAILED, f"no results ({error}); see {place / 'output.log'}"
    if results["status"] == "completed" and code == 0:
        return DONE, ""
    return FAILED, str(results.get("reason") or f"it ended with code {code}; see {place / 'run.log'}")


def _differing(place: Path, wanted: Mapping[str, Any]) -> str:
    """Which values of a stored plan are others; empty: none, or there is no plan and no run either."""
    path = place / PLAN_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "" if results_in(place) is None else f"there is no {path.name} that tells them"
    except ValueError:
        return f"{path.name} cannot be read"
    old, new = (_flat(plan) for plan in (stored, wanted))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return ", ".join(f"{name}: {old.get(name)!r}, now {new.get(name)!r}" for name in names[:4])


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, entry in value.items() for k, v in _flat(entry, f"{name}.{key}" if name else key).items()}


def _rounds_done(workspace: Path) -> int:
    """By the run's event log; of a run that went on, the last start counts."""
    with suppress(OSError):
        lines = (workspace / RUN_FOLDER / PROGRESS_FILE).read_text(encoding="utf-8").splitlines()
        for line in reversed([line for line in lines if '"round_done"' in line]):
            with suppress(ValueError, KeyError):  # half a line of a killed process
                return int(json.loads(line)["current_round"]) + 1
    return 0


def _end(running: Sequence[_Process]) -> None:
    for one in running:
        one.progress.state = STOPPED
        one.alive.close()
    for one in running:
        one.process.join(WAIT_FOR_END)
        if one.process.exitcode is None:
            one.process.kill()
            one.process.join()
