"""Run the sites of a run on one machine in several child processes, so that a round uses several cores.

A site stays with its process, which reuses data and network for later tasks. The model is written to disk once and read
by each process; a site's state between rounds is in its folder, as under FLARE. Every process computes with one thread,
so the results equal those of sites that work one after the other, bit for bit (on a CPU).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairflare.base.disk.temporary import OwnedFolder
from fairflare.exchange.messages import SiteReply, address, decode_task, encode_reply
from fairflare.exchange.tensor_file import layout_of, write_tensors
from fairflare.federation.collecting.transport import Question
from fairflare.federation.plan.plan import Plan
from fairflare.federation.plan.task_files import brings
from fairflare.federation.site.worker import refusal
from fairflare.federation.transports.calls import LocalTransport
from fairflare.federation.transports.isolation import LAST_WORDS, SiteProcess, speaking

POLL = 0.2  # seconds between two checks whether to stop
MODEL = "model"


class ProcessTransport(LocalTransport):
    """Run the sites' tasks in ``jobs`` child processes; a context manager, which ends all of them.

    Args:
        jobs: number of processes; there is at most one for each site. A process starts with the first task for one of
            its sites, which takes some seconds. If it died, a new one starts, and a half-done training is resumed
            (:class:`SiteProcess`). A process needs as much memory as a run of its sites alone.
        plan: the plan of the run, with names of sites.
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
        prepare = brings(plan.task)
        self._children = [SiteProcess(plan.task, plan.training, prepare) for _ in self.names[:jobs]]
        self._child_of = {site: self._children[k % len(self._children)] for k, site in enumerate(self.names)}

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.close()
        self._folder.cleanup()
        super().__exit__(*error)

    def ask(self, question: Question) -> None:
        queues = {child: deque(s for s in question.sites if self._child_of[s] is child) for child in self._children}
        model = self._folder.path / MODEL
        shared = question.task.each is None and bool(question.task.params)
        if shared:
            write_tensors(model, question.task.params, layout_of(question.task.params))
        stopping: float | None = None  # time at which the child processes were told to stop
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
                    # A reply that is there at once says why the task could not be sent to the child.
                    if reply := self._begin(child, site, question, model if shared else None):
                        question.hand_over(site, encode_reply(reply, question.task.current_round))
            busy = [child for child in self._children if child.busy]
            if not busy:
                return
            for child in speaking(busy, POLL):
                site = child.site
                if reply := child.hear():
                    question.hand_over(site, encode_reply(reply, question.task.current_round))

    def _begin(self, child: SiteProcess, site: str, question: Question, model: Path | None) -> SiteReply | None:
        task = address(question.task, site)
        try:
            request = decode_task(question.name, replace(task, params=None) if model else task, site)
            arguments = self._arguments(site, request.experiment)
        except Exception as error:  # a wrong setting of one site costs only that site its round
            return refusal(site, question.name, error)
        if model is None and (tensors := request.tensors):
            model = Path(self._folder.name) / f"{MODEL}-{self.names.index(site)}"
            write_tensors(model, tensors, layout_of(tensors))
        child.begin(arguments, request.carrying({}), model)
        return None
