"""A run in this process, and what Ctrl-C or SIGTERM does to it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

#: Exit codes, as a shell has them for a process that Ctrl-C, or SIGTERM, ended.
INTERRUPTED, TERMINATED = 130, 143
WHY = {
    signal.SIGINT: "the run was stopped by Ctrl-C (SIGINT)",
    signal.SIGTERM: "the run was ended by SIGTERM (`kill`, a scheduler's time limit, a container that was stopped)",
}


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
        """Tells it to end; the first one counts."""
        if not self.why:
            self.code, self.why = code, why


def run_here(
    recipe: Any, workspace: Path, local: dict[str, Any], log_path: Path, console: Console, jobs: int, stop: Stop
) -> int:
    """Runs a recipe's plan in this process; the log goes into the file where the simulator's would be.

    Args:
        recipe: what to run.
        workspace: laid out as the simulator's.
        local: content of ``local/fairflare.json``.
        log_path: for the log.
        console: shows how it goes.
        jobs: sites that work at a time.
        stop: of :func:`stopped_by_signals`.

    Returns:
        Exit code: 0, 1 when the run failed (the reason is in the results, where it came from in the log), 130 when it
        was stopped by Ctrl-C, 143 by SIGTERM.
    """
    from fairflare.cli.run_view import view_of
    from fairflare.federation.server.rounds import Stopped
    from fairflare.federation.transports.local import run_local

    handler = logging.FileHandler(log_path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with view_of(recipe, console) as view:
            run_local(recipe.plan, workspace, local, listeners=[view], should_stop=stop, jobs=jobs)
        return 0
    except (KeyboardInterrupt, Stopped):
        return stop.code
    except (RuntimeError, ValueError):
        root.error("the run failed", exc_info=True)
        return 1
    finally:
        root.removeHandler(handler)
        handler.close()


@contextmanager
def stopped_by_signals(console: Console) -> Iterator[Stop]:
    """Listens to Ctrl-C and SIGTERM; a second one of either is a KeyboardInterrupt at once."""
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
