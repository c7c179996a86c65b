"""Run a plan in this process, and stop the run on Ctrl-C or SIGTERM."""

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

from fairflare.base.machine.memory import workers

if TYPE_CHECKING:
    from fairflare.federation.collecting.transport import Listener
    from fairflare.federation.plan.plan import Plan

#: Exit codes of a run that Ctrl-C or SIGTERM ended, as in a shell.
INTERRUPTED, TERMINATED = 130, 143
WHY = {
    signal.SIGINT: "the run was stopped by Ctrl-C (SIGINT)",
    signal.SIGTERM: "the run was ended by SIGTERM (`kill`, a scheduler's time limit, a container that was stopped)",
}
LINES = logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s")


#: A process of some sites takes seconds to start and a GiB; passes over sites' images that are worth that.
WORTH, EACH = 40, 2**30


def sites_at_a_time(plan: Plan) -> int:
    """Return how many sites to train at a time, each in a process of its own, so that a run is done soonest.

    These are as many as there are cores and memory for. It is one site for little training, which takes less time than
    the start of processes, and where PyTorch sees a GPU, whose memory the processes would share.
    """
    import torch

    sites = len(plan.sites or [])
    passes = plan.run.rounds_in_all * plan.training.local_epochs * sites
    return 1 if passes < WORTH or torch.cuda.is_available() else min(workers(EACH), sites)


class Stop:
    """Record a request to end this process; a call returns the reason, or an empty text without a request.

    Attributes:
        why: reason of the request; empty for no request.
        code: exit code of the process.
    """

    def __init__(self) -> None:
        self.why, self.code = "", INTERRUPTED

    def __call__(self) -> str:
        return self.why

    def ask(self, why: str, code: int = TERMINATED) -> None:
        """Request the end of the process; only the first request counts."""
        if not self.why:
            self.code, self.why = code, why


def run_here(
    plan: Plan, workspace: Path, local: dict[str, Any], log_path: Path, console: Console, jobs: int, stop: Stop
) -> int:
    """Run a plan in this process, show its progress on the console, and return its exit code."""
    from fairflare.cli.run.view import view_of

    with write_log(log_path, "w"), view_of(plan, console) as view:
        return run_plan(plan, workspace, local, stop, [view], jobs)


def run_plan(
    plan: Plan,
    workspace: Path,
    local: Mapping[str, Any],
    stop: Stop,
    listeners: Sequence[Listener] = (),
    jobs: int = 1,
) -> int:
    """Run a plan in this process, and return an exit code.

    Args:
        plan: the plan of the run.
        workspace: folder of the run, laid out like the simulator's workspace.
        local: content of ``local/fairflare.json``.
        stop: request to end the run, from :func:`stop_by_signals`.
        listeners: objects that are notified of the run's progress.
        jobs: number of sites that work at the same time.

    Returns:
        0; 1 when the run failed (the results have the reason, the log has the traceback); 130 when Ctrl-C stopped the
        run, 143 when SIGTERM did.
    """
    from fairflare.federation.record.curves import EventFiles
    from fairflare.federation.server.rounds import Stopped
    from fairflare.federation.transports.local import RUN_DIR, run_local

    try:
        with warn_once(), EventFiles(workspace / RUN_DIR, plan.task.directions()) as curves:
            run_local(plan, workspace, dict(local), listeners=[*listeners, curves], should_stop=stop, jobs=jobs)
    except (KeyboardInterrupt, Stopped):
        return stop.code
    except (RuntimeError, ValueError):
        logging.getLogger().error("the run failed", exc_info=True)
        return 1
    return 0


@contextmanager
def write_log(path: Path, mode: str) -> Iterator[None]:
    """Write Python's log into a file during the context, in the form of the simulator's log."""
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
def warn_once() -> Iterator[None]:
    """Show each Python warning, by place and text, only once during the context.

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
def stop_by_signals(console: Console) -> Iterator[Stop]:
    """Record Ctrl-C or SIGTERM during the context as a request to stop; a second signal raises KeyboardInterrupt."""
    stop = Stop()

    def heard(number: int, frame: FrameType | None) -> None:
        if stop.why:
            raise KeyboardInterrupt
        stop.ask(WHY[signal.Signals(number)], 128 + number)
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        console.print(f"stopping; {again} ends it at once", highlight=False)

    # Only the main thread may handle signals.
    heeded = WHY if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, heard) for number in heeded}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
