"""One run of a comparison in a process of its own; ends when its parent does.

``python -m fairflare.cli.compare_worker`` reads a line of JSON from its input: ``plan`` (arguments of
:func:`fairflare.federation.plan.make_plan`), ``workspace``, ``local`` (content of ``local/fairflare.json``), ``log``,
and ``simulator`` (workers; null: in this process). The input stays open as long as the parent lives.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GRACE = 20.0  # seconds to end in good order


def main() -> int:
    """Does the run; the exit code."""
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _simulate(given) if given["simulator"] else _in_process(given)
    except KeyboardInterrupt:
        return 130


def _in_process(given: Mapping[str, Any]) -> int:
    from fairflare.federation.local import run_local
    from fairflare.federation.plan import make_plan

    logging.basicConfig(filename=given["log"], filemode="a", level=logging.INFO, format=LINES, encoding="utf-8")
    try:
        run_local(make_plan(**given["plan"]), Path(given["workspace"]), given["local"])
    except (RuntimeError, ValueError):  # the reason is in the results, where it came from in the log
        logging.getLogger().error("the run failed", exc_info=True)
        return 1
    return 0


def _simulate(given: Mapping[str, Any]) -> int:
    from rich.console import Console

    from fairflare.cli.simulate import simulate
    from fairflare.flare.recipes import FairRecipe

    recipe = FairRecipe(**given["plan"])
    with Path(os.devnull).open("w") as nowhere:
        view = Console(file=nowhere)
        return simulate(recipe, Path(given["workspace"]), given["simulator"], given["local"], Path(given["log"]), view)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


LINES = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"

if __name__ == "__main__":
    sys.exit(main())
