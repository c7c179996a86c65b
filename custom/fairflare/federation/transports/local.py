"""A whole federation in one process: the same rounds and halves as anywhere, with calls in place of messages.

For quick experiments on one machine. Sites work one after the other on one thread each, as in FLARE's simulator with
one thread a site, so the results are the simulator's, bit for bit; there is no network, no timeout, no isolation. With
several cores some sites can work at a time, see :mod:`fairflare.federation.transports.processes`.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairflare.base.disk.bundle_files import BUNDLE_FOLDER, copy_bundle
from fairflare.base.disk.locks import LOCK_FILE, FolderInUse, FolderLock
from fairflare.base.disk.temporary import OwnedFolder, sweep
from fairflare.base.machine.threads import one_thread
from fairflare.base.settings import values_of
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import Plan
from fairflare.federation.plan.run_settings import RESULTS_FOLDER, Place
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.site.site_file import SITE_FILE, own_settings
from fairflare.federation.transports.calls import LocalTransport
from fairflare.federation.transports.processes import ProcessTransport
from fairflare.federation.transports.shared_images import refuse_shared_images

log = logging.getLogger(__name__)
RUN_DIR = Path("server") / "simulate_job"  # as the simulator lays it out


def run_local(
    plan: Plan,
    folder: Path,
    local: Mapping[str, Any] | None = None,
    *,
    listeners: Sequence[Listener] = (),
    should_stop: Callable[[], bool | str] = lambda: False,
    jobs: int = 1,
) -> Path:
    """Run a plan with named sites in this process, or (``jobs``) with the sites in some processes beside it.

    Args:
        plan: see :func:`fairflare.federation.plan.plan.make_plan`.
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
    run_dir = folder / RUN_DIR
    for path in (run_dir, folder / "local"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "local" / SITE_FILE).write_text(json.dumps(local, indent=2) + "\n", encoding="utf-8")
    place = Place(
        run_dir=run_dir,
        experiments=Path(own.get("checkpoint_root") or folder / "fairflare_checkpoints"),
        job_id="in_process",
        settings=own,
        site_half=values_of(plan.training),
        apart=jobs > 1,
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
        where = (local, state, should_stop)
        transport = LocalTransport(plan.sites, plan.task, plan.training, *where)
        if jobs > 1:
            transport = ProcessTransport(jobs, plan, *where)
        with transport:
            Rounds(plan.task, rule, plan.run, transport, place, listeners).run()
    return run_dir / RESULTS_FOLDER


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
        (folder / LOCK_FILE).unlink(missing_ok=True)  # whoever waits for it sees that it is gone
        lock.release()
