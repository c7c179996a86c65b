"""Manage a site's state between tasks on its own disk: a folder for each run, locked while a task is performed.

Beside the runs' folders a site has a log of all that it has sent: :func:`note_sent`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from fairflare.base.disk.files import append, private_folder, remove_partials, safe_name
from fairflare.base.disk.locks import Held, hold_lock
from fairflare.exchange.messages import TASK_VALIDATE, SiteReply, SiteTask, encode_reply
from fairflare.exchange.sent_tensors import fingerprint
from fairflare.methods.base.site_run import SiteError, SiteStore

log = logging.getLogger(__name__)

KEPT_RUNS = 3  # number of runs whose folders are kept, to compare runs; each holds two or three models
#: Seconds to wait for a process of an earlier job that holds a run's lock. A process that obeys its abort ends within a
#: few seconds, and FLARE soon kills one that does not obey. A process that holds the lock longer is at work, and
#: further waiting would cost this site the whole phase.
LOCK_WAIT = 60.0
NO_RUN = "run"  # name of the folder for tasks that name no run
LOCK = "lock"  # file in each run's folder; its modification time is when a task last used the run
_GONE = ".gone"
SENT = ".sent"  # folder in a site's state root with its log; no experiment can be called so


def note_sent(path: Path, request: SiteTask, reply: SiteReply) -> None:
    """Append to a site's own log the server's request and every value of the answer, before the answer is sent.

    Of a model or an update the log has the SHA-256 and not the values.

    Args:
        path: the log, one JSON object a line; nobody removes it but the site.
        request: the server's request.
        reply: the answer as it leaves.

    Raises:
        OSError: the disk is full or cannot be written.
        NotSendable: a value of the answer cannot be sent.
    """
    encoded = encode_reply(replace(reply, update=None), request.current_round)
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "experiment": request.experiment,
        "run": request.run, "round": request.current_round, "task": request.name,
        "lists": request.measure if request.name == TASK_VALIDATE else (),
        "model": fingerprint(request.state) if request.state else None,
        "answer": {
            **encoded.meta, "metrics": encoded.metrics, "update": fingerprint(reply.update) if reply.update else None,
        },
    }  # fmt: skip
    append(path, json.dumps(line, default=str).encode() + b"\n", durable=False)


@dataclass
class SiteFolder:
    """Manage the folder ``<state root>/<experiment>/<site>/``, which holds a folder for each run.

    Args:
        site: name of the site.
        folder: folder of this experiment and site; made when a task needs it.
    """

    site: str
    folder: Path

    def store(self, run: str = "") -> SiteStore:
        """Return the store of a run without locking it, for reading only; :meth:`open_store` locks it.

        Raises:
            SiteError: the run's id cannot be a folder's name.
        """
        try:
            return SiteStore(self.folder / safe_name(run or NO_RUN))
        except ValueError as error:
            raise SiteError(f"site {self.site!r}: the server's id of the run is not usable: {error}") from error

    @contextmanager
    def open_store(self, request: SiteTask) -> Iterator[SiteStore]:
        """Lock a run's folder for one task, and return the run's store as a context.

        In the context the scratch folder is empty, and files that killed processes left are removed.

        Raises:
            SiteError: another process holds the lock (the message names the process).
            OSError: the disk is full or cannot be written.
            TaskStopped: the job was stopped meanwhile.
        """
        store = self.store(request.run)
        try:
            with hold_lock(
                store.folder / LOCK, f"process {os.getpid()} ({request.name}, round {request.current_round})", LOCK_WAIT
            ):
                private_folder(self.folder)
                self._tidy(store)
                private_folder(store.scratch)
                try:
                    yield store
                finally:
                    shutil.rmtree(store.scratch, ignore_errors=True)
        except Held as held:
            raise SiteError(
                f"site {self.site!r}: its state of this run is in use by {held}; waited {LOCK_WAIT:g} s. End that "
                "process, or wait until it is done, and submit the job again"
            ) from held

    def _tidy(self, store: SiteStore) -> None:
        """Remove files that killed processes left, and the oldest runs; log what cannot be removed."""
        try:
            shutil.rmtree(store.scratch, ignore_errors=True)
            remove_partials(store.folder, mine=True)
            for path in self.folder.glob(f"*{_GONE}"):
                shutil.rmtree(path, ignore_errors=True)
            self._forget_runs(store.folder.name)
        except OSError as error:
            log.warning("site %s: old files of its state cannot be removed: %s", self.site, error)

    def _forget_runs(self, current: str) -> None:
        used = {
            path: path.joinpath(LOCK).stat().st_mtime_ns
            for path in self.folder.iterdir()
            if path.name != current and path.joinpath(LOCK).is_file()
        }
        surplus = len(used) + 1 - KEPT_RUNS
        for path in sorted(used, key=lambda p: (used[p], p.name)):
            if surplus <= 0:
                return
            try:
                with hold_lock(path / LOCK, f"process {os.getpid()} (removing it)"):
                    # Rename first: a folder that is removed only in part must not be taken for a run.
                    gone = path.replace(path.with_name(f".{path.name}{_GONE}"))
            except Held:
                continue
            shutil.rmtree(gone, ignore_errors=True)
            log.info(
                "site %s: state of the old run %s removed; those of %d runs are kept", self.site, path.name, KEPT_RUNS
            )
            surplus -= 1
