"""Run a whole federation in one process: the same rounds and methods as under FLARE, with calls in place of messages.

This is for quick experiments on one machine. Sites work one after the other in one thread, as in FLARE's simulator with
one thread a site, so the results equal the simulator's bit for bit. There is no network, no timeout and no isolation.
With several cores some sites can work at a time, see :mod:`fairflare.federation.transports.processes`.
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
from fairflare.base.machine.one_run import refuse_inside_run
from fairflare.base.machine.threads import one_thread
from fairflare.base.settings import values_of
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import Plan
from fairflare.federation.plan.run_settings import RESULTS_FOLDER, Place, PlanRun
from fairflare.federation.server.planning import Planning
from fairflare.federation.server.rounds import Rounds
from fairflare.federation.site.site_file import SITE_FILE, own_settings
from fairflare.federation.transports.calls import LocalTransport
from fairflare.federation.transports.processes import ProcessTransport
from fairflare.federation.transports.shared_images import refuse_shared_images

log = logging.getLogger(__name__)
RUN_DIR = Path("server") / "simulate_job"  # the same place as in a workspace of FLARE's simulator


def run_local(
    plan: Plan,
    folder: Path,
    local: Mapping[str, Any] | None = None,
    *,
    listeners: Sequence[Listener] = (),
    should_stop: Callable[[], bool | str] = lambda: False,
    jobs: int = 1,
) -> Path:
    """Run a plan with named sites in this process or, with ``jobs`` above 1, with the sites in child processes.

    Args:
        plan: the plan of the run, see :func:`fairflare.federation.plan.plan.make_plan`.
        folder: folder with the layout of the simulator's; results go to ``server/simulate_job/fairflare`` in it.
        local: the sites' private settings, as in ``local/fairflare.json``.
        listeners: observers that are called at each stage of the run.
        should_stop: True stops the run, and so does a text, which stands in the results as the reason.
        jobs: number of sites that work at a time, each in one thread; the results are the same to the bit.

    Returns:
        The folder with ``results.json``.

    Raises:
        ValueError: the plan names no sites, two sites have the same images, a checkpoint does not fit, or another run
            uses the same experiment.
        RuntimeError: the run failed, or another one writes to ``folder``; the text gives the reason.
        Stopped: ``should_stop`` stopped the run.
    """
    refuse_inside_run()
    if not plan.sites:
        raise ValueError("a run in one process has no connected sites: give the number or the names of its sites")
    local = dict(local or {})
    refuse_shared_images(plan.sites, local)
    server_settings = own_settings(local, "server")
    run_dir = folder / RUN_DIR
    for path in (run_dir, folder / "local"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "local" / SITE_FILE).write_text(json.dumps(local, indent=2) + "\n", encoding="utf-8")
    place = Place(
        run_dir=run_dir,
        experiments=Path(server_settings.get("checkpoint_root") or folder / "fairflare_checkpoints"),
        job_id="in_process",
        settings=server_settings,
        site_half=values_of(plan.training),
        apart=jobs > 1,
    )
    # Two runs in one folder would overwrite each other's results; two runs of one experiment exclude each other anyway.
    for text in sweep():
        log.warning("%s", text)
    with _alone(run_dir), OwnedFolder("sites") as temporary, one_thread():
        if plan.task_file.is_file():  # copied as into a job: without the task file the run cannot be repeated
            shutil.copyfile(plan.task_file, run_dir / "task.py")
        if plan.monai_bundle is not None:
            copy_bundle(plan.monai_bundle, run_dir / BUNDLE_FOLDER)
        # With an experiment the sites' state must be there for the next run too.
        state = folder / "fairflare_state" if plan.run.experiment else temporary.path
        rule = copy.deepcopy(plan.rule)  # a rule changes during a run, and the plan may be run again
        with (
            ProcessTransport(jobs, plan, local, state, should_stop) if jobs > 1
            else LocalTransport(plan.sites, plan.task, plan.training, local, state, should_stop)
        ) as transport:  # fmt: skip
            leads = Planning if isinstance(plan.run, PlanRun) else Rounds
            leads(plan.task, rule, plan.run, transport, place, listeners).run()
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
        (folder / LOCK_FILE).unlink(missing_ok=True)  # a process that waits for the lock sees that the file is gone
        lock.release()
