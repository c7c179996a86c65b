"""Run sites' tasks in child processes: a child that dies (out of memory, a crash in native code) fails only its task.

FLARE fails a whole job when a site's job process dies, whatever FLARE's settings are, so a site that fears the
out-of-memory killer sets ``"isolate": true``. The price is the start of a Python process for each task. A run on one
machine has several such processes, see :mod:`fairflare.federation.transports.processes`.
"""

from __future__ import annotations

import logging
import logging.handlers
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from safetensors.torch import save as save_bytes

from fairflare.base.machine.environment import shield_imports
from fairflare.base.machine.one_run import starting_process
from fairflare.base.stopping import TaskStopped
from fairflare.exchange.messages import STATUS_FAILED, TASK_TRAIN, SiteReply, SiteTask, clean_state
from fairflare.federation.site.site_state import SiteFolder
from fairflare.federation.site.worker import SiteWorker, refusal

log = logging.getLogger(__name__)

STOP = "stop"
# Seconds to wait for a child process to end: LAST_WORDS after it was told to stop or has answered, then INSIST after
# SIGTERM and again after SIGKILL. That is 3 s in all, for which a user who stops a job has to wait. A child that needs
# longer is in the middle of one batch, or is still starting.
LAST_WORDS, INSIST = 2.0, 0.5


def perform_isolated(
    worker: dict[str, Any], request: SiteTask, should_stop: Callable[[], bool], poll: float = 0.2
) -> SiteReply:
    """Perform one task of a site in a spawned process.

    Args:
        worker: arguments of :class:`SiteWorker`; must be picklable.
        request: the task.
        should_stop: is called while waiting; True ends the child within three seconds.
        poll: seconds between two calls of ``should_stop``.

    Returns:
        The reply; if the child died, a failed reply with the signal or exit code. If a child dies after saving a
        half-done training, a new child resumes it, as long as each child saves more progress than the one before.
    """
    arguments = dict(worker)
    child = SiteProcess(arguments.pop("task"), arguments.pop("training"))
    try:
        child.begin(arguments, request.carrying({}), save_bytes(clean_state(request.tensors)))
        while True:
            if speaking([child], poll) and (reply := child.hear()):
                return reply
            if should_stop():
                child.stop()
                return refusal(worker["site"], request.name, TaskStopped("the job was stopped"))
    finally:
        child.close()


class SiteProcess:
    """Control a child process that performs one task at a time; it is started at the first task, and again if it died.

    If the child dies after saving a half-done training, a new child resumes it, as long as each child saves more
    progress than the one before.

    Args:
        task, training: the run's learning task, and the method's site half.
        prepare: function that is called in the child before task and site half are sent to it.
    """

    def __init__(self, task: Any, training: Any, prepare: Callable[[], None] = shield_imports) -> None:
        self.parts, self.prepare = (task, training), prepare
        self._stopped = False
        self._given: Any = None  # arguments of begin() for the task in progress; None if no task
        self._kept: list[tuple[str, int]] = []  # saved progress of that task's training when begin() was called
        self._process: Any = None
        self._pipe: Connection | None = None

    @property
    def busy(self) -> bool:
        return self._given is not None

    @property
    def site(self) -> str:
        """Return the name of the site whose task is in progress; empty if no task is."""
        return str(self._given[0]["site"]) if self.busy else ""

    @property
    def waitables(self) -> list[Any]:
        """Return the objects to wait for: one becomes ready when the child has sent something or has died."""
        return [self._pipe, self._process.sentinel]

    def begin(self, arguments: dict[str, Any], request: SiteTask, model: Path | bytes | None) -> None:
        """Send a task to the child process, and start the child if it is not running.

        Args:
            arguments: arguments of the site's :class:`SiteWorker`, without task and training.
            request: the task without its tensors.
            model: the task's tensors (:attr:`SiteTask.tensors`), as a file or as a file's content; ``None`` if the task
                has none.
        """
        messages: list[Any] = [(arguments, request, model)]
        if self._process is None or not self._process.is_alive():
            self._start()
            messages.insert(0, self.parts)
        self._given, self._kept = (arguments, request, model), self._progress(arguments, request)
        assert self._pipe is not None
        with suppress(OSError):  # the child has just died, which :meth:`hear` reports
            for message in messages:
                self._pipe.send(message)

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, self.prepare, logging.getLogger().getEffectiveLevel()), daemon=True
        )
        with starting_process(*self.parts):
            self._process.start()
        there.close()

    def hear(self) -> SiteReply | None:
        """Receive what the child sent, and return its reply to the task, or ``None`` if the reply is still to come.

        A line of the child's log goes to this process's log. For a child that has died, return a failed reply, or
        start a new child that resumes the half-done training.
        """
        assert self._pipe is not None
        try:
            reply, update = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(LAST_WORDS)
            why = obituary(self.site, self._given[1].name, self._process)
            reply, update = SiteReply(STATUS_FAILED, reason=why), None
            if not self._stopped and self._progress(*self._given[:2]) != self._kept:
                log.warning("%s; a new one goes on from the half-done round", why)
                given = self._given
                self.close()
                self.begin(*given)
                return None
        if isinstance(reply, logging.LogRecord):
            logging.getLogger(reply.name).handle(reply)
            return None
        self._given = None
        return replace(reply, update=None if update is None else load_bytes(update))

    @staticmethod
    def _progress(arguments: dict[str, Any], request: SiteTask) -> list[tuple[str, int]]:
        """Return the saved progress of a ``train`` task; an empty list for any other task."""
        store = SiteFolder(arguments["site"], arguments["state_folder"]).store(request.run)
        return store.progress(request.current_round) if request.name == TASK_TRAIN else []

    def stop(self) -> None:
        """Tell the child process to stop its task; the child still sends a reply."""
        self._stopped = True
        if self.busy and self._pipe is not None:
            with suppress(OSError):  # the child has just ended
                self._pipe.send(STOP)

    def close(self) -> None:
        """Close the pipe and end the child process: wait for it briefly, then terminate it, then kill it."""
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.join(LAST_WORDS)
            for insist in (self._process.terminate, self._process.kill):
                if self._process.is_alive():
                    insist()
                    self._process.join(INSIST)
        self._process = self._pipe = None
        self._given = None


def speaking(children: Sequence[SiteProcess], seconds: float) -> list[SiteProcess]:
    """Return the child processes that have sent something or have died; wait for one at most ``seconds``."""
    ready = set(wait([waitable for child in children for waitable in child.waitables], seconds))
    return [child for child in children if ready.intersection(child.waitables)]


def _serve(pipe: Connection, prepare: Callable[[], None], level: int) -> None:
    """Perform one task after the other in a child process, until the parent closes the pipe or dies."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    alone = threading.Lock()

    def say(what: Any) -> None:
        with alone, suppress(OSError):  # the parent has closed the pipe
            pipe.send(what)

    to_parent = logging.handlers.QueueHandler(SimpleNamespace(put_nowait=lambda record: say((record, None))))
    to_parent.setFormatter(logging.Formatter("%(message)s"))  # the parent's handlers add time and level
    logging.basicConfig(level=level, handlers=[to_parent], force=True)
    prepare()
    task, training = pipe.recv()
    workers: dict[str, SiteWorker] = {}
    while True:
        try:
            received = pipe.recv()
        except (EOFError, OSError):
            return
        if received == STOP:  # the stop came after the end of the task that it was meant for
            continue
        arguments, request, model = received
        site = arguments["site"]
        try:
            if site not in workers:
                workers[site] = SiteWorker(**arguments, task=task, training=training)
            tensors = {} if model is None else load_bytes(model) if isinstance(model, bytes) else load_file(model)
            # While the task runs, the parent sends nothing but STOP, so any pending message means: stop.
            reply = workers[site].perform(request.carrying(tensors), pipe.poll)
        except Exception as error:
            reply = refusal(site, request.name, error)
        update = None if reply.update is None else save_bytes(clean_state(reply.update))
        say((replace(reply, update=None), update))


def _end_with_parent() -> None:
    """End this child process when its parent ends.

    Nobody waits for the work of a child whose parent was killed, and such a child may hold a GPU.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def obituary(site: str, task: str, child: Any) -> str:
    """Return a sentence about how the process of a site's task ended."""
    code = child.exitcode
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}{'; out of memory?' * (-code == signal.SIGKILL)}"
    return f"site {site!r}: the process of task {task!r} {how}"
