"""The sites of a run on one machine in some processes, each with sites of its own: a round uses the cores.

A site stays with its process, which keeps data and network between tasks. The model is written once for all and read by
each; what a site keeps between rounds is in its folder, as anywhere. Every process computes with one thread, so results
are those of sites that work one after the other, bit for bit (on a CPU).
"""

from __future__ import annotations

import logging
import logging.handlers
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from safetensors.torch import save as save_bytes

from fairflare.core.files import private_opener
from fairflare.core.temporary import OwnedFolder
from fairflare.exchange.messages import (
    STATUS_FAILED,
    SiteReply,
    SiteTask,
    clean_state,
    decode_task,
    encode_reply,
    for_site,
)
from fairflare.exchange.tensor_file import write_tensors
from fairflare.federation.incoming import layout_of
from fairflare.federation.isolation import LAST_WORDS, STOP, end_child, end_with_parent, obituary
from fairflare.federation.local import LocalTransport
from fairflare.federation.plan import TASK_MODULE, load_task_class
from fairflare.federation.site import SiteWorker, refusal
from fairflare.federation.transport import Question

if TYPE_CHECKING:
    from fairflare.federation.plan import Plan

POLL = 0.2  # seconds between two looks whether to stop
MODEL = "model"


@dataclass(frozen=True)
class _TaskFile:
    """Where the class of a plan's task comes from: another process must have it before the task arrives there."""

    path: Path
    bundle: Path | None

    @classmethod
    def of(cls, plan: Plan) -> _TaskFile | None:
        """``None``: the class can be imported."""
        return cls(plan.task_file, plan.monai_bundle) if type(plan.task).__module__ == TASK_MODULE else None

    def load(self) -> None:
        found: Any = load_task_class(self.path)
        if self.bundle is not None:
            found.folder = self.bundle.absolute()


class ProcessTransport(LocalTransport):
    """Asks sites in ``jobs`` processes. A context manager: none of them is left behind.

    Args:
        jobs: processes, at most one for each site. One starts with the first task for one of its sites, which takes
            some seconds, and again when it has died; it needs as much memory as a run of its sites alone.
        plan: what is run, with names of sites.
        local, state, should_stop: see :class:`LocalTransport`.
    """

    def __init__(
        self,
        jobs: int,
        plan: Plan,
        local: Mapping[str, Any],
        state: Path,
        should_stop: Callable[[], bool | str] = lambda: False,
    ) -> None:
        super().__init__(plan.sites or [], plan.task, plan.training, local, state, should_stop)
        self._folder = OwnedFolder("models")
        halves, file = (plan.task, plan.training), _TaskFile.of(plan)
        self._children = [_Child(halves, file) for _ in range(min(jobs, len(self.names)))]
        self._child_of = {site: self._children[k % len(self._children)] for k, site in enumerate(self.names)}

    def __enter__(self) -> ProcessTransport:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.close()
        self._folder.cleanup()

    def ask(self, question: Question) -> None:
        queues = {child: deque(s for s in question.sites if self._child_of[s] is child) for child in self._children}
        model = self._folder.path / MODEL
        shared = question.task.each is None and bool(question.task.params)
        if shared:
            _save(question.task.params, model)
        stopping: float | None = None  # when it was asked for
        while True:
            if stopping is None and self.stopped():
                stopping = time.monotonic()
                for child in self._children:
                    child.stop()
            elif stopping is not None and time.monotonic() - stopping > LAST_WORDS:
                for child in self._children:
                    child.close()
            for child, queue in queues.items():
                while queue and not child.busy and stopping is None and not question.enough():
                    site = queue.popleft()
                    reply = self._begin(child, site, question, model if shared else None)
                    if reply is not None:  # it could not even begin
                        question.hand_over(site, encode_reply(reply, question.task.current_round))
            busy = [child for child in self._children if child.busy]
            if not busy:
                return
            for child in _speaking(busy):
                site, name = child.site, question.name
                reply = child.hear(name)
                if reply is not None:
                    question.hand_over(site, encode_reply(reply, question.task.current_round))

    def _begin(self, child: _Child, site: str, question: Question, model: Path | None) -> SiteReply | None:
        task = for_site(question.task, site)
        try:
            request = decode_task(question.name, replace(task, params=None) if model else task, site)
            arguments = self._arguments(site, request.experiment)
        except Exception as error:  # a setting of one site costs that site its round
            return refusal(site, question.name, error)
        if model is None and request.state:
            model = Path(self._folder.name) / f"{MODEL}-{self.names.index(site)}"
            _save(request.state, model)
        child.begin(site, arguments, replace(request, state={}), model)
        return None


class _Child:
    """A process that works on one site at a time."""

    def __init__(self, halves: tuple[Any, Any], task_file: _TaskFile | None) -> None:
        self.halves, self.task_file = halves, task_file
        self.site = ""  # that it works on
        self._process: Any = None
        self._pipe: Connection | None = None

    @property
    def busy(self) -> bool:
        return bool(self.site)

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when it says something, or dies."""
        return [self._pipe, self._process.sentinel]

    def begin(self, site: str, arguments: dict[str, Any], request: SiteTask, model: Path | None) -> None:
        if self._process is None or not self._process.is_alive():
            self.close()
            context = multiprocessing.get_context("spawn")
            self._pipe, there = context.Pipe()
            level = logging.getLogger().getEffectiveLevel()
            self._process = context.Process(target=_serve, args=(there, self.task_file, level), daemon=True)
            self._process.start()
            there.close()
            self._pipe.send(self.halves)
        assert self._pipe is not None
        self._pipe.send((arguments, request, model))
        self.site = site

    def hear(self, task: str) -> SiteReply | None:
        """What it says: its answer, or ``None`` for a line of the log; dead, it has failed."""
        assert self._pipe is not None
        try:
            said, update = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(LAST_WORDS)
            said, update = SiteReply(STATUS_FAILED, reason=obituary(self.site, task, self._process)), None
        if isinstance(said, logging.LogRecord):
            logging.getLogger(said.name).handle(said)
            return None
        self.site = ""
        return replace(said, update=None if update is None else load_bytes(update))

    def stop(self) -> None:
        """Ends what it does; it answers all the same."""
        if self.busy and self._pipe is not None and self._process.is_alive():
            self._pipe.send(STOP)

    def close(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            end_child(self._process)
        self._process = self._pipe = None
        self.site = ""


def _speaking(children: list[_Child]) -> list[_Child]:
    """Those that have something to say, or are dead; after a short while nobody."""
    ready = set(wait([waitable for child in children for waitable in child.waitables], POLL))
    return [child for child in children if ready.intersection(child.waitables)]


def _save(state: Mapping[str, torch.Tensor], path: Path) -> None:
    with open(path, "wb", opener=private_opener) as file:
        write_tensors(file, state, layout_of(state), {})


class _ToParent(logging.handlers.QueueHandler):
    """Lines of the log go to the parent's."""

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue((record, None))  # type: ignore[operator]


def _serve(pipe: Connection, task_file: _TaskFile | None, level: int) -> None:
    """A child's life: one task after the other, until the parent hangs up or dies."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    speaking = threading.Lock()

    def say(what: Any) -> None:
        with speaking:
            pipe.send(what)

    to_parent = _ToParent(say)  # type: ignore[arg-type]
    to_parent.setFormatter(logging.Formatter("%(message)s"))  # the parent's handlers add the rest
    logging.basicConfig(level=level, handlers=[to_parent], force=True)
    torch.set_num_threads(1)
    if task_file is not None:
        task_file.load()
    task, training = pipe.recv()
    workers: dict[str, SiteWorker] = {}
    while True:
        try:
            received = pipe.recv()
        except EOFError:
            return
        if received == STOP:  # it came too late
            continue
        arguments, request, model = received
        site = arguments["site"]
        try:
            if site not in workers:
                workers[site] = SiteWorker(**{**arguments, "task": task, "training": training})
            state = {} if model is None else load_file(model)
            # While it works the parent says only one thing.
            reply = workers[site].perform(replace(request, state=state), pipe.poll)
        except Exception as error:
            reply = refusal(site, request.name, error)
        update = None if reply.update is None else save_bytes(clean_state(reply.update))
        say((replace(reply, update=None), update))
