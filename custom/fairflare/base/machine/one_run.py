"""Keep a process that belongs to a run from starting another run, as one that starts itself would never end.

What a run imports (a task file, a method of another package, a MONAI bundle's code, a script) is imported again by its
processes. Lines in it that start a run would start one in each of these, and so on.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import current_process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

from fairflare.base.checks import refuse
from fairflare.base.machine.environment import is_flare_process
from fairflare.base.settings import values_of

#: Variable of the environment that names, a line each, what a process and those that it starts belong to.
BELONGS_TO = "FAIRFLARE_BELONGS_TO"
PROCESS = "a process of a run"
REFUSAL = (
    "{} must not start a run, since it belongs to one: runs would start runs without end. Move the lines that start a "
    "run into another file, which no run imports; in a file that is only imported, `if __name__ == '__main__':` above "
    "these lines is enough"
)
_chain: ContextVar[tuple[str, ...]] = ContextVar(
    BELONGS_TO, default=tuple(filter(None, os.environ.get(BELONGS_TO, "").split("\n")))
)


def refuse_inside_run() -> None:
    """Refuse to start a run where this process belongs to a run, or imports a user's code for one.

    Raises:
        ValueError: the process belongs to a run; the text says what to do.
        SystemExit: as above, in a new process that executes the user's main script again; the text is printed alone.
    """
    starting = getattr(current_process(), "_inheriting", False)  # by which Python itself refuses such processes
    # FLARE sets the variable for a training script that runs in a process of its own.
    if starting or _chain.get() or "NVFLARE_CLIENT_API_BOOTSTRAP" in os.environ or is_flare_process():
        raise (SystemExit if starting else ValueError)(REFUSAL.format((PROCESS, *_chain.get())[-1]))


@contextmanager
def belonging_to(what: str) -> Iterator[None]:
    """Mark this thread, and processes that are started inside the context, as belonging to ``what``.

    Raises:
        ValueError: they belong to it already, as where a file that is imported asks for its own import.
    """
    before = _chain.get()
    refuse({REFUSAL.format(what): what in before})
    token = _chain.set((*before, what))
    os.environ[BELONGS_TO] = "\n".join(_chain.get())
    try:
        yield
    finally:
        _chain.reset(token)
        os.environ[BELONGS_TO] = "\n".join(before)


@contextmanager
def starting_process(*work: Any) -> Iterator[None]:
    """Start a process of a run inside the context, for ``work`` that is sent to it.

    The process executes the main script again only if it needs the script's classes; the script may have no guard.

    Raises:
        ValueError: the process would need a class of a notebook or of standard input, which it cannot import.
    """
    main: Any = sys.modules["__main__"]
    sys.modules["__main__"] = main if needs_main(*work) else ModuleType("__main__")
    if sys.modules["__main__"] is main and not Path(getattr(main, "__file__", None) or "").is_file():
        raise ValueError(
            "a class of a notebook, or of a script from standard input, cannot be used in other processes: write it "
            "into a file of its own and import it from there, or run in one process (jobs=1)"
        )
    try:
        with belonging_to(PROCESS):
            yield
    finally:
        sys.modules["__main__"] = main


def needs_main(*work: Any) -> bool:
    """Return whether picklable objects are made of classes or functions of the main script."""
    return b"__main__" in bytes(ForkingPickler.dumps(work))


def refuse_main(component: Any) -> None:
    """Refuse a component of a FLARE job if its class, or that of one of its settings, is of the main script.

    FLARE copies the file of such a class into the job, and every participant would execute the whole script.

    Raises:
        ValueError: the class is of the module ``__main__``; the text names it.
    """
    if named := re.search(r"'path': '__main__\.(\w+)'", str(values_of(component))):
        raise ValueError(
            f"{named[1]} is a class of the main script or notebook (__main__), and a FLARE job is made of classes that "
            f"every participant imports: write {named[1]} into a file of its own and import it from there"
        )
