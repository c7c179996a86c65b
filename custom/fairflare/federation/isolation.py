"""One task in a child process: when the child dies (out of memory, a crash in native code) the task fails, not the job.

FLARE fails a whole job when a site's job process dies, whatever its settings say, so a site that fears the
out-of-memory killer sets ``"isolate": true``. Costs the start of a Python process per task.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from fairflare.core.stopping import TaskStopped
from fairflare.exchange.messages import STATUS_FAILED, SiteReply, SiteTask, clean_state
from fairflare.federation.site import SiteWorker, refusal

STOP = "stop"
# Seconds: for a child that was told to stop, or has answered; then after each signal. Three in all: whoever stops a job
# waits for them, and a child that needs longer is in the middle of one batch, or of its own start.
LAST_WORDS, INSIST = 2.0, 0.5


def perform_isolated(
    worker: dict[str, Any], request: SiteTask, should_stop: Callable[[], bool], poll: float = 0.2
) -> SiteReply:
    """Does one task in a spawned process.

    Args:
        worker: arguments of :class:`SiteWorker`; must be picklable.
        request: the task.
        should_stop: asked while waiting; True ends the child within three seconds.
        poll: seconds between two looks.

    Returns:
        The reply; a failed one when the child died (says by which signal or exit code).
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    packed = replace(request, state={}), save_bytes(clean_state(request.state))
    child = context.Process(target=_child, args=(there, worker, packed), daemon=True)
    child.start()
    there.close()
    try:
        while not here.poll(poll):
            if should_stop():
                with suppress(OSError):  # it has just ended
                    here.send(STOP)
                return refusal(worker["site"], request.name, TaskStopped("the job was stopped"))
            if not child.is_alive() and not here.poll(0):
                return SiteReply(STATUS_FAILED, reason=obituary(worker["site"], request.name, child))
        try:
            reply, update = here.recv()
        except EOFError:
            child.join(LAST_WORDS)
            return SiteReply(STATUS_FAILED, reason=obituary(worker["site"], request.name, child))
        return replace(reply, update=None if update is None else load_bytes(update))
    finally:
        end_child(child)
        here.close()


def end_child(child: Any) -> None:
    """Waits for a child that is done or was told to stop, but not for long."""
    child.join(LAST_WORDS)
    for insist in (child.terminate, child.kill):
        if child.is_alive():
            insist()
            child.join(INSIST)


def _child(pipe: Connection, worker: dict[str, Any], packed: tuple[SiteTask, bytes]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    request, state = packed
    try:
        # The parent says only one thing.
        reply = SiteWorker(**worker).perform(replace(request, state=load_bytes(state)), pipe.poll)
    except Exception as error:  # a setting of the site is wrong
        reply = refusal(worker["site"], request.name, error)
    update = None if reply.update is None else save_bytes(clean_state(reply.update))
    pipe.send((replace(reply, update=None), update))
    pipe.close()


def end_with_parent() -> None:
    """Nobody waits for the work of a child whose parent was killed, and it may hold a GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def obituary(site: str, task: str, child: Any) -> str:
    code = child.exitcode
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        hint = "; out of memory?" if -code == signal.SIGKILL else ""
    else:
        how, hint = f"ended with exit code {code}", ""
    return f"site {site!r}: the process of task {task!r} {how}{hint}"
