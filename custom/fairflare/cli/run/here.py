"""A run in this process, and what Ctrl-C or SIGTERM does to it."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from fairflare.federation.collecting.transport import Listener
    from fairflare.federation.plan.plan import Plan

#: Exit codes, as a shell has them for a process that Ctrl-C, or SIGTERM, ended.
INTERRUPTED, TERMINATED = 130, 143
WHY = {
    signal.SIGINT: "the run was stopped by Ctrl-C (SIGINT)",
    signal.SIGTERM: "the run was ended by SIGTERM (`kill`, a scheduler's time limit, a container that was stopped)",
}
LINES = logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s")


class Stop:
    """Whether this process was told to end: called, why, or an empty text.

    Attributes:
        why: see there.
        code: that the process is to end with.
    """

    def __init__(self) -> None:
        self.why, self.code = "", INTERRUPTED

    def __call__(self) -> str:
        return self.why

    def ask(self, why: str, code: int = TERMINATED) -> None:
        """Tell it to end; the first one counts."""
        if not self.why:
            self.code, self.why = code, why


class PlanHere:
    """What a recipe is for the command line, without a FLARE job: FLARE is not imported.

    Args:
        given: arguments of a recipe.
    """

    def __init__(self, *, min_sites: int | None = None, phase_timeout: float | None = None, **given: Any) -> None:
        from fairflare.federation.plan.plan import make_plan
        from fairflare.federation.plan.run_settings import usual_waits

        self.plan = make_plan(**{**usual_waits(min_sites, phase_timeout), **given})
        self.name = self.plan.method.name


def run_here(
    recipe: PlanHere, workspace: Path, local: dict[str, Any], log_path: Path, console: Console, jobs: int, stop: Stop
) -> int:
    """Run a recipe's plan in this process and show on the console how it goes; see :func:`run_plan`."""
    from fairflare.cli.run.view import view_of

    with logged(log_path, "w"), view_of(recipe, console) as view:
        return run_plan(recipe.plan, workspace, local, stop, [view], jobs)


def run_plan(
    plan: Plan,
    workspace: Path,
    local: Mapping[str, Any],
    stop: Stop,
    listeners: Sequence[Listener] = (),
    jobs: int = 1,
) -> int:
    """Do a run in this process.

    Args:
        plan: what to run.
        workspace: laid out as the simulator's.
        local: content of ``local/fairflare.json``.
        stop: of :func:`stopped_by_signals`.
        listeners: are told how it goes.
        jobs: sites that work at a time.

    Returns:
        Exit code: 0, 1 when the run failed (the reason is in the results, where it came from in the log), 130 when it
        was stopped by Ctrl-C, 143 by SIGTERM.
    """
    from fairflare.federation.record.curves import EventFiles
    from fairflare.federation.server.rounds import Stopped
    from fairflare.federation.transports.local import RUN_DIR, run_local

    try:
        with warned_once(), EventFiles(workspace / RUN_DIR, plan.task.directions()) as curves:
            run_local(plan, workspace, dict(local), listeners=[*listeners, curves], should_stop=stop, jobs=jobs)
    except (KeyboardInterrupt, Stopped):
        return stop.code
    except (RuntimeError, ValueError):
        logging.getLogger().error("the run failed", exc_info=True)
        return 1
    return 0


@contextmanager
def logged(path: Path, mode: str) -> Iterator[None]:
    """Write the log into a file, as the simulator does."""
    handler = logging.FileHandler(path, mode=mode, encoding="utf-8")
    handler.setFormatter(LINES)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@contextmanager
def warned_once() -> Iterator[None]:
    """Show a warning of one place with one text once.

    Python's own filters forget what was shown whenever one of them changes, as in each `warnings.catch_warnings`.
    """
    shown: set[tuple[str, type[Warning], str, int]] = set()
    show = warnings.showwarning

    def once(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        key = (str(message), category, filename, lineno)
        if key not in shown:
            shown.add(key)
            show(message, category, filename, lineno, *rest, **more)

    warnings.showwarning = once
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def stopped_by_signals(console: Console) -> Iterator[Stop]:
    """Listen to Ctrl-C and SIGTERM; a second one of either is a KeyboardInterrupt at once."""
    stop = Stop()

    def heard(number: int, frame: FrameType | None) -> None:
        if stop.why:
            raise KeyboardInterrupt
        stop.ask(WHY[signal.Signals(number)], 128 + number)
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        console.print(f"stopping; {again} ends it at once", highlight=False)

    if threading.current_thread() is not threading.main_thread():  # only the main one may listen
        yield stop
        return
    before = {number: signal.signal(number, heard) for number in WHY}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
