"""What a site keeps between tasks, on its own disk: a folder for each run, locked while a task is performed."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairflare.base.disk.files import private_folder, remove_partials, safe_name
from fairflare.base.disk.locks import Held, locked
from fairflare.exchange.messages import SiteTask
from fairflare.methods.base.site_run import SiteError, SiteStore

log = logging.getLogger(__name__)

KEPT_RUNS = 3  # enough to compare, or to go back to the one before; each holds two or three models
#: Seconds to wait for a process of an earlier job. One that hears its abort ends within a few, and FLARE kills one that
#: does not soon after; whoever holds on longer is at work, and waiting on would cost this site the whole phase.
LOCK_WAIT = 60.0
NO_RUN = "run"  # the folder of a task that names no run
LOCK = "lock"  # in each run's folder; its time is when the run was last worked on
_GONE = ".gone"


class SiteFolder:
    """``<state root>/<experiment>/<site>/``.

    Args:
        site: name.
        folder: of this experiment and site; made when it is needed.
    """

    def __init__(self, site: str, folder: Path) -> None:
        self.site = site
        self.folder = folder

    def store(self, run: str = "") -> SiteStore:
        """Return what is kept of a run, to look at; see :meth:`opened`.

        Raises:
            SiteError: the run's id cannot be a folder's name.
        """
        try:
            return SiteStore(self.folder / safe_name(run or NO_RUN))
        except ValueError as error:
            raise SiteError(f"site {self.site!r}: the server's id of the run is not usable: {error}") from error

    @contextmanager
    def opened(self, request: SiteTask) -> Iterator[SiteStore]:
        """Return the run's folder.

        Held by this task alone, with an empty scratch folder and nothing that the dead left.

        Raises:
            SiteError: another process holds it (says which).
            OSError: the disk is full or cannot be written.
            TaskStopped: the job was stopped meanwhile.
        """
        store = self.store(request.run)
        holder = f"process {os.getpid()} ({request.name}, round {request.current_round})"
        try:
            with locked(store.folder / LOCK, holder, LOCK_WAIT):
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
        """Remove what killed processes left, and the oldest runs. What cannot be removed costs no task."""
        try:
            shutil.rmtree(store.scratch, ignore_errors=True)
            remove_partials(store.folder, mine=True)
            for path in self.folder.iterdir():
                if path.name.endswith(_GONE):
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
                with locked(path / LOCK, f"process {os.getpid()} (removing it)"):
                    gone = path.replace(path.with_name(f".{path.name}{_GONE}"))  # at once: half of it would be a run
            except Held:
                continue
            shutil.rmtree(gone, ignore_errors=True)
            log.info(
                "site %s: state of the old run %s removed; those of %d runs are kept", self.site, path.name, KEPT_RUNS
            )
            surplus -= 1
