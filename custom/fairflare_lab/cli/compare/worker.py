"""Run one run of a comparison in a process of its own, which ends when its parent process does."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from fairflare.cli.run.here import Stop, run_plan, stop_by_signals, write_log
from fairflare.cli.run.simulate import RUN_FOLDER, simulate
from fairflare.reporting.results import mark_ended

GRACE = 20.0  # seconds that the run has to end by itself


def work(given: Mapping[str, Any], parent: Connection) -> None:
    """Do one run of a comparison, and end this process with the run's exit code.

    Args:
        given: description of the run: ``plan`` (arguments of :func:`fairflare.federation.plan.plan.make_plan`),
            ``workspace``, ``local`` (content of ``local/fairflare.json``), ``log``, ``output`` (file for printed
            output), ``simulator`` (number of the simulator's workers; ``None`` if the run is in this process), and
            ``held_out`` (left-out site that tests the run's model in the end; empty for none).
        parent: connection that is open as long as the parent process lives; the run ends when it is closed.
    """
    with Path(given["output"]).open("ab") as output:
        for printed in (1, 2):
            os.dup2(output.fileno(), printed)
    place = Path(given["workspace"])
    with Path(os.devnull).open("w") as nowhere, stop_by_signals(view := Console(file=nowhere)) as stop:
        threading.Thread(target=_end_with_parent, args=(parent, stop), daemon=True).start()
        try:
            code = _run(given, place, view, stop)
            if code == 0 and given["held_out"]:
                code = _test_further(given, place, stop)
        except KeyboardInterrupt:
            code = stop.code
        if stop.why and code == stop.code:
            mark_ended(place / RUN_FOLDER, stop.why)  # for a run that was ended at once, without its own record
    sys.exit(code)


def _run(given: Mapping[str, Any], place: Path, view: Console, stop: Stop) -> int:
    from fairflare.methods.base.catalog import add_file
    from fairflare_lab.compare.at_left_out import drop_site, is_completed

    for file in given["method_files"]:
        add_file(file)
    local, log = given["local"], Path(given["log"])
    if given["held_out"] and is_completed(place):  # the run is complete; only the test at the left-out site is missing
        return 0
    if given["held_out"]:
        local = drop_site(local, given["held_out"])
    if given["simulator"]:
        from fairflare.flare.export.recipes import FairRecipe

        return simulate(FairRecipe(**given["plan"]), place, given["simulator"], local, log, view, stop)
    from fairflare.federation.plan.plan import make_plan

    with write_log(log, "a"):
        return run_plan(make_plan(**given["plan"]), place, local, stop)


def _test_further(given: Mapping[str, Any], place: Path, stop: Stop) -> int:
    """Test the run's model at the left-out site, and return the exit code."""
    from fairflare_lab.compare.at_left_out import evaluate_unseen

    with write_log(Path(given["log"]), "a"):
        try:
            evaluate_unseen(given["plan"], place, given["held_out"], given["local"], stop)
        except (OSError, RuntimeError, ValueError) as error:
            logging.getLogger().error("the test behind the run failed", exc_info=True)
            sys.stderr.write(f"{error}\n")
            return stop.code if stop.why else 1
    return 0


def _end_with_parent(parent: Connection, stop: Stop) -> None:
    with suppress(EOFError, OSError):
        parent.recv_bytes()
    stop.ask("the comparison was stopped; the same command goes on with this run")
    time.sleep(GRACE)
    os._exit(1)
