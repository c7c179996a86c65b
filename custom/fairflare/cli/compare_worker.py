"""One run of a comparison in a process of its own; ends when its parent does.

``python -m fairflare.cli.compare_worker`` reads a line of JSON from its input: ``plan`` (arguments of
:func:`fairflare.federation.plan.plan.make_plan`), ``workspace``, ``local`` (content of ``local/fairflare.json``),
``log``, ``simulator`` (workers; null: in this process), and ``held_out`` (a site that is no part of the run, or empty:
the run's model is tested there in the end). The input stays open as long as the parent lives.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fairflare.cli.in_process import Stop, stopped_by_signals
from fairflare.cli.simulate import RUN_FOLDER
from fairflare.reporting.results import mark_ended

GRACE = 20.0  # seconds to end in good order


def main() -> int:
    """Does the run; the exit code."""
    given = json.loads(sys.stdin.readline())
    with Path(os.devnull).open("w") as nowhere, stopped_by_signals(view := Console(file=nowhere)) as stop:
        threading.Thread(target=_end_with_parent, args=(stop,), daemon=True).start()
        try:
            code = _run(given, view, stop)
        except KeyboardInterrupt:
            code = stop.code
        if stop.why and code == stop.code:
            place = Path(given["workspace"])
            mark_ended(place / RUN_FOLDER, stop.why)  # where it was ended at once
    return code


def _run(given: Mapping[str, Any], view: Console, stop: Stop) -> int:
    if not (site := given.get("held_out")):
        return _simulate(given, view, stop) if given["simulator"] else _in_process(given, stop)
    from fairflare.federation.transports.unseen import at_unseen, completed, without

    alone = {**given, "local": without(given["local"], site)}
    if not completed(Path(given["workspace"])):  # else only the test is missing
        code = _simulate(alone, view, stop) if given["simulator"] else _in_process(alone, stop)
        if code:
            return code
    logging.basicConfig(filename=given["log"], filemode="a", level=logging.INFO, format=LINES, encoding="utf-8")
    try:
        at_unseen(given["plan"], Path(given["workspace"]), site, given["local"], stop)
    except (OSError, RuntimeError, ValueError) as error:
        logging.getLogger().error("the test at the left-out site failed", exc_info=True)
        sys.stderr.write(f"{error}\n")
        return stop.code if stop.why else 1
    return 0


def _in_process(given: Mapping[str, Any], stop: Stop) -> int:
    from fairflare.federation.plan.plan import make_plan
    from fairflare.federation.server.rounds import Stopped
    from fairflare.federation.transports.local import run_local

    logging.basicConfig(filename=given["log"], filemode="a", level=logging.INFO, format=LINES, encoding="utf-8")
    try:
        run_local(make_plan(**given["plan"]), Path(given["workspace"]), given["local"], should_stop=stop)
    except Stopped:
        return stop.code
    except (RuntimeError, ValueError):  # the reason is in the results, where it came from in the log
        logging.getLogger().error("the run failed", exc_info=True)
        return 1
    return 0


def _simulate(given: Mapping[str, Any], view: Console, stop: Stop) -> int:
    from fairflare.cli.simulate import simulate
    from fairflare.flare.export.recipes import FairRecipe

    recipe, place, log = FairRecipe(**given["plan"]), Path(given["workspace"]), Path(given["log"])
    return simulate(recipe, place, given["simulator"], given["local"], log, view, stop)


def _end_with_parent(stop: Stop) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    stop.ask("the comparison was stopped; the same command goes on with this run")
    time.sleep(GRACE)
    os._exit(1)


LINES = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"

if __name__ == "__main__":
    sys.exit(main())
