"""A whole federation in one process: the same rounds and halves as anywhere, with calls in place of messages.

For quick experiments on one machine. Sites work one after the other on one thread each, as in FLARE's simulator with
one thread a site, so the results are the simulator's, bit for bit; there is no network, no timeout, no isolation. With
several cores some sites can work at a time, see :mod:`fairflare.federation.processes`.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflare.core.bundle_files import BUNDLE_FOLDER, copy_bundle
from fairflare.core.locks import FolderInUse, FolderLock
from fairflare.core.settings import values_of
from fairflare.core.temporary import OwnedFolder, sweep
from fairflare.core.threads import one_thread
from fairflare.exchange.messages import Message, decode_task, encode_reply, for_site
from fairflare.federation.rounds import Rounds
from fairflare.federation.run_settings import RESULTS_FOLDER, Place
from fairflare.federation.shared_images import refuse_shared_images
from fairflare.federation.site import SiteWorker, refusal
from fairflare.federation.site_file import DECODED_PLACE, SITE_FILE, own_settings
from fairflare.federation.site_state import safe_name
from fairflare.federation.transport import Listener, Question
from fairflare.methods.training import LocalTraining

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fairflare.core.task import Task
    from fairflare.federation.plan import Plan

log = logging.getLogger(__name__)


class LocalTransport:
    """Asks sites by calling them.

    Args:
        sites: names.
        task: what is learned.
        training: the method's site half.
        local: content of ``local/fairflare.json``.
        state: folder of what sites keep, unless ``state_root`` in ``local`` says otherwise.
        should_stop: asked between the sites and while they train; a text says why.
    """

    def __init__(
        self,
        sites: Sequence[str],
        task: Task,
        training: LocalTraining,
        local: Mapping[str, Any],
        state: Path,
        should_stop: Callable[[], bool | str] = lambda: False,
    ) -> None:
        self.names = list(sites)
        self.task, self.training = task, training
        self.local, self.state = dict(local), state
        self.stopped = should_stop
        self._workers: dict[str, SiteWorker] = {}

    def sites(self) -> list[str]:
        return self.names

    def expected(self) -> list[str]:
        return self.names

    def ask(self, question: Question) -> None:
        for site in question.sites:
            if question.enough() or self.stopped():
                return
            question.hand_over(site, self._answer(site, question.name, for_site(question.task, site)))

    def say(self, text: str, *, warning: bool = False) -> None:
        log.log(logging.WARNING if warning else logging.INFO, "%s", text)

    def watch(self, seen: Callable[[str], None]) -> None:
        """A site here only ever speaks when it is asked."""

    def _answer(self, site: str, name: str, task: Message) -> Message:
        try:
            request = decode_task(name, task, site)
            reply = self._worker(site, request.experiment).perform(request, lambda: bool(self.stopped()))
        except Exception as error:  # a setting of one site costs that site its round
            reply = refusal(site, name, error, tells_all=True)
        return encode_reply(reply, task.current_round)

    def _worker(self, site: str, experiment: str) -> SiteWorker:
        if site not in self._workers:
            arguments = self._arguments(site, experiment)
            self._workers[site] = SiteWorker(task=self.task, training=self.training, **arguments)
        return self._workers[site]

    def _arguments(self, site: str, experiment: str) -> dict[str, Any]:
        """Of the site's :class:`SiteWorker`, without task and site half."""
        settings = own_settings(self.local, site)
        kept = Path(settings.get("state_root") or self.state)
        root = kept if experiment else self.state
        return {
            "site": site,
            "settings": settings,
            "state_folder": root / safe_name(experiment or "run") / safe_name(site),
            "num_threads": 1,
            "tells_all": True,
            "decoded": kept / DECODED_PLACE / safe_name(site),
        }


def run_local(
    plan: Plan,
    folder: Path,
    local: Mapping[str, Any] | None = None,
    *,
    listeners: Sequence[Listener] = (),
    should_stop: Callable[[], bool | str] = lambda: False,
    jobs: int = 1,
) -> Path:
    """Runs a plan with named sites in this process, or (``jobs``) with the sites in some processes beside it.

    Args:
        plan: see :func:`fairflare.federation.plan.make_plan`.
        folder: laid out as the simulator's: results go to ``server/simulate_job/fairflare`` in it.
        local: the sites' private settings, as ``local/fairflare.json``.
        listeners: are told how it goes.
        should_stop: True ends the run, and so does a text, which says why in the results.
        jobs: so many sites work at a time, each in one thread; the results are the same bits.

    Returns:
        The folder with ``results.json``.

    Raises:
        ValueError: the plan names no sites, two sites have the same images, a checkpoint does not fit, or another run
            has its experiment.
        RuntimeError: the run failed, or another one writes to ``folder``; the text says why.
        Stopped: ``should_stop`` said so.
    """
    if not plan.sites:
        raise ValueError("in one process there are no connected sites: give their number or names")
    local = dict(local or {})
    refuse_shared_images(plan.sites, local)
    own = own_settings(local, "server")
    run_dir = folder / "server" / "simulate_job"
    for path in (run_dir, folder / "local"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "local" / SITE_FILE).write_text(json.dumps(local, indent=2) + "\n", encoding="utf-8")
    place = Place(
        run_dir=run_dir,
        experiments=Path(own.get("checkpoint_root") or folder / "fairflare_checkpoints"),
        job_id="in_process",
        settings=own,
        site_half=values_of(plan.training),
    )
    # Two runs in one folder would write each other's results; of one experiment they exclude each other anyway.
    for text in sweep():
        log.warning("%s", text)
    with _alone(run_dir), OwnedFolder("sites") as temporary, one_thread():
        if plan.task_file.is_file():  # as a job carries it: without it the run could not be repeated
            shutil.copyfile(plan.task_file, run_dir / "task.py")
        if plan.monai_bundle is not None:
            copy_bundle(plan.monai_bundle, run_dir / BUNDLE_FOLDER)
        # With an experiment what sites keep must be there for the next run too.
        state = folder / "fairflare_state" if plan.run.experiment else temporary.path
        rule = copy.deepcopy(plan.rule)  # what it learns is of this run; the plan may be run again
        with _transport(jobs, plan, local, state, should_stop) as transport:
            Rounds(plan.task, rule, plan.run, transport, place, listeners).run()
    return run_dir / RESULTS_FOLDER


@contextmanager
def _transport(
    jobs: int, plan: Plan, local: Mapping[str, Any], state: Path, should_stop: Callable[[], bool | str]
) -> Iterator[LocalTransport]:
    if jobs == 1:
        yield LocalTransport(plan.sites or [], plan.task, plan.training, local, state, should_stop)
        return
    from fairflare.federation.processes import ProcessTransport

    with ProcessTransport(jobs, plan, local, state, should_stop) as transport:
        yield transport


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = FolderLock(folder, {})
    try:
        lock.take()
    except FolderInUse as error:
        raise RuntimeError(f"{error}; wait until that run is over, or give this one another folder") from None
    try:
        yield
    finally:
        lock.release()
