"""Tasks of sites in a child process: when it dies (out of memory, a crash in native code) a task fails, not the run.

FLARE fails a whole job when a site's job process dies, whatever its settings say, so a site that fears the
out-of-memory killer sets ``"isolate": true``. Costs the start of a Python process per task. A run on one machine has
several of these processes, see :mod:`fairflare.federation.transports.processes`.
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

from fairflare.base.stopping import TaskStopped
from fairflare.exchange.messages import STATUS_FAILED, TASK_TRAIN, SiteReply, SiteTask, clean_state
from fairflare.federation.site.site_state import SiteFolder
from fairflare.federation.site.worker import SiteWorker, refusal

log = logging.getLogger(__name__)

STOP = "stop"
# Seconds to wait for a child process to end: LAST_WORDS after it was told to stop or has answered, then INSIST after
# SIGTERM and again after SIGKILL. That is 3 s in all: whoever stops a job waits for them, and a child that needs longer
# is in the middle of one batch, or of its own start.
LAST_WORDS, INSIST = 2.0, 0.5


def perform_isolated(
    worker: dict[str, Any], request: SiteTask, should_stop: Callable[[], bool], poll: float = 0.2
) -> SiteReply:
    """Perform one task in a spawned process.

    Args:
        worker: arguments of :class:`SiteWorker`; must be picklable.
        request: the task.
        should_stop: asked while waiting; True ends the child within three seconds.
        poll: seconds between two looks.

    Returns:
        The reply; a failed one when the child died (says by which signal or exit code). Where it died in a training
        that it had kept half done, another goes on from there, as long as each comes further than the one before.
    """
    arguments = dict(worker)
    child = SiteProcess(arguments.pop("task"), arguments.pop("training"))
    try:
        child.begin(arguments, replace(request, state={}), save_bytes(clean_state(request.state)))
        while True:
            reply = child.hear() if speaking([child], poll) else None
            if reply is not None:
                return reply
            if should_stop():
                child.stop()
                return refusal(worker["site"], request.name, TaskStopped("the job was stopped"))
    finally:
        child.close()


class SiteProcess:
    """A process that works on one task at a time; it starts with the first one, and anew when it has died.

    Where it died in a training that it had kept half done, another goes on from there, as long as each comes further
    than the one before.

    Args:
        task, training: of the run.
        prepare: is called there before the two arrive.
    """

    def __init__(self, task: Any, training: Any, prepare: Callable[[], None] | None = None) -> None:
        self.parts, self.prepare = (task, training), prepare
        self._stopped = False
        self._given: Any = None  # the task that it works on: what was handed over
        self._kept: list[tuple[str, int]] = []  # of that training, when it was handed over
        self._process: Any = None
        self._pipe: Connection | None = None

    @property
    def busy(self) -> bool:
        return self._given is not None

    @property
    def site(self) -> str:
        """That it works for; empty: for nobody."""
        return str(self._given[0]["site"]) if self.busy else ""

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when it says something, or dies."""
        return [self._pipe, self._process.sentinel]

    def begin(self, arguments: dict[str, Any], request: SiteTask, model: Path | bytes | None) -> None:
        """Hand it a task.

        Args:
            arguments: of the site's :class:`SiteWorker`, without task and training.
            request: without its model.
            model: that model, as a file or as its content; ``None``: there is none.
        """
        messages: list[Any] = [(arguments, request, model)]
        if self._process is None or not self._process.is_alive():
            self._start()
            messages.insert(0, self.parts)
        self._given, self._kept = (arguments, request, model), self._progress(arguments, request)
        assert self._pipe is not None
        with suppress(OSError):  # it has just died, which :meth:`hear` says
            for message in messages:
                self._pipe.send(message)

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        level = logging.getLogger().getEffectiveLevel()
        self._process = context.Process(target=_serve, args=(there, self.prepare, level), daemon=True)
        self._process.start()
        there.close()

    def hear(self) -> SiteReply | None:
        """Return what it says: its answer, or ``None`` for a line of the log.

        Dead, it has failed, or another goes on.
        """
        assert self._pipe is not None
        try:
            said, update = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(LAST_WORDS)
            why = obituary(self.site, self._given[1].name, self._process)
            said, update = SiteReply(STATUS_FAILED, reason=why), None
            if not self._stopped and self._progress(*self._given[:2]) != self._kept:
                log.warning("%s; a new one goes on from the half-done round", why)
                given = self._given
                self.close()
                self.begin(*given)
                return None
        if isinstance(said, logging.LogRecord):
            logging.getLogger(said.name).handle(said)
            return None
        self._given = None
        return replace(said, update=None if update is None else load_bytes(update))

    @staticmethod
    def _progress(arguments: dict[str, Any], request: SiteTask) -> list[tuple[str, int]]:
        """Return what it has kept of a training; nothing of another task."""
        store = SiteFolder(arguments["site"], arguments["state_folder"]).store(request.run)
        return store.progress(request.current_round) if request.name == TASK_TRAIN else []

    def stop(self) -> None:
        """End what it does; it answers all the same."""
        self._stopped = True
        if self.busy and self._pipe is not None:
            with suppress(OSError):  # it has just ended
                self._pipe.send(STOP)

    def close(self) -> None:
        """Hang up, and wait for its end, but not for long."""
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
    """Return those that have something to say, or are dead; after some seconds nobody."""
    ready = set(wait([waitable for child in children for waitable in child.waitables], seconds))
    return [child for child in children if ready.intersection(child.waitables)]


def _serve(pipe: Connection, prepare: Callable[[], None] | None, level: int) -> None:
    """Serve one task after the other, until the parent hangs up or dies."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    alone = threading.Lock()

    def say(what: Any) -> None:
        with alone, suppress(OSError):  # nobody listens any more
            pipe.send(what)

    to_parent = logging.handlers.QueueHandler(SimpleNamespace(put_nowait=lambda record: say((record, None))))
    to_parent.setFormatter(logging.Formatter("%(message)s"))  # the parent's handlers add the rest
    logging.basicConfig(level=level, handlers=[to_parent], force=True)
    if prepare is not None:
        prepare()
    task, training = pipe.recv()
    workers: dict[str, SiteWorker] = {}
    while True:
        try:
            received = pipe.recv()
        except (EOFError, OSError):
            return
        if received == STOP:  # it came too late
            continue
        arguments, request, model = received
        site = arguments["site"]
        try:
            if site not in workers:
                workers[site] = SiteWorker(**arguments, task=task, training=training)
            state = {} if model is None else load_bytes(model) if isinstance(model, bytes) else load_file(model)
            # While the task runs, the parent sends nothing but STOP, so any pending message means: stop.
            reply = workers[site].perform(replace(request, state=state), pipe.poll)
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
    """Return how a process ended, in a sentence."""
    code = child.exitcode
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        hint = "; out of memory?" if -code == signal.SIGKILL else ""
        how = f"was killed by {signal.Signals(-code).name}{hint}"
    return f"site {site!r}: the process of task {task!r} {how}"
