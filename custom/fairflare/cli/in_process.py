"""A run in this process, and what Ctrl-C does to it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

INTERRUPTED = 130  # exit code, as a shell has it for a process that Ctrl-C ended


def run_here(recipe: Any, workspace: Path, local: dict[str, Any], log_path: Path, console: Console, jobs: int) -> int:
    """Runs a recipe's plan in this process; the log goes into the file where the simulator's would be.

    Args:
        recipe: what to run.
        workspace: laid out as the simulator's.
        local: content of ``local/fairflare.json``.
        log_path: for the log.
        console: shows how it goes.
        jobs: sites that work at a time.

    Returns:
        Exit code: 0, 1 when the run failed (the reason is in the results, where it came from in the log), 130 when it
        was stopped by Ctrl-C.
    """
    from fairflare.cli.run_view import view_of
    from fairflare.federation.local import run_local
    from fairflare.federation.rounds import Stopped

    handler = logging.FileHandler(log_path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with view_of(recipe, console) as view, stopped_by_ctrl_c(console) as asked:
            run_local(recipe.plan, workspace, local, listeners=[view], should_stop=asked, jobs=jobs)
        return 0
    except (KeyboardInterrupt, Stopped):
        return INTERRUPTED
    except (RuntimeError, ValueError):
        root.error("the run failed", exc_info=True)
        return 1
    finally:
        root.removeHandler(handler)
        handler.close()


@contextmanager
def stopped_by_ctrl_c(console: Console) -> Iterator[Callable[[], bool]]:
    """Gives a function that is True after Ctrl-C; a second Ctrl-C is a KeyboardInterrupt at once."""
    asked = threading.Event()

    def heard(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        console.print("stopping; Ctrl-C again ends it at once", highlight=False)

    if threading.current_thread() is not threading.main_thread():  # only the main one may listen
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, heard)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
