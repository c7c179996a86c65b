"""A run's model at a site that was no part of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fairflare.core.settings import values_of
from fairflare.core.temporary import OwnedFolder
from fairflare.core.threads import one_thread
from fairflare.exchange.messages import SPLIT_TEST, STATUS_OK, TASK_VALIDATE, SiteTask
from fairflare.federation.models import MODEL_FILE
from fairflare.federation.plan import Plan, make_plan
from fairflare.federation.run_settings import RESULTS_FOLDER
from fairflare.federation.site import SiteWorker
from fairflare.federation.site_file import own_settings
from fairflare.federation.site_training import at_home
from fairflare.reporting.results import read_results
from fairflare.reporting.unseen import Unseen, write_unseen

RUN_DIR = Path("server") / "simulate_job"
NO_MODEL = "no model is the same at all sites: each has parts, or one, of its own"


def without(local: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Takes a site's block out of the content of ``local/fairflare.json``."""
    blocks = local.get("sites")
    if not isinstance(blocks, Mapping):
        return dict(local)
    return {**local, "sites": {name: block for name, block in blocks.items() if name != site}}


def completed(workspace: Path) -> bool:
    """Whether the run in this folder has completed."""
    try:
        return bool(read_results(workspace / RUN_DIR / RESULTS_FOLDER)["status"] == "completed")
    except (OSError, ValueError):
        return False


def at_unseen(
    arguments: Mapping[str, Any],
    workspace: Path,
    site: str,
    local: Mapping[str, Any],
    should_stop: Callable[[], bool | str] = lambda: False,
) -> Unseen:
    """Tests the last common model of a run on the test split of a site that was not there; keeps the result beside it.

    Args:
        arguments: of :func:`fairflare.federation.plan.make_plan`, as the run had them.
        workspace: of the run, which has completed.
        site: name.
        local: content of ``local/fairflare.json``, with this site.
        should_stop: True ends the test.

    Raises:
        RuntimeError: the site could not test it; the text says why.
        ValueError: the site was part of the run.
    """
    plan = make_plan(**arguments)
    if site in (plan.sites or ()):
        raise ValueError(f"site {site!r} was part of the run: it is not unseen; leave it out of the run's sites")
    network = plan.task.build_model()
    if at_home(values_of(plan.training), network, lambda *_, **__: None).own_everywhere:
        found = Unseen(site=site, reason=NO_MODEL)
    else:
        found = _tested(plan, workspace / RUN_DIR / MODEL_FILE, site, local, should_stop)
    write_unseen(workspace / RUN_DIR / RESULTS_FOLDER, found)
    return found


def _tested(plan: Plan, file: Path, site: str, local: Mapping[str, Any], stop: Callable[[], bool | str]) -> Unseen:
    """As any site tests a model that it is sent: same code, same floor of cases, nothing of its own in the model."""
    rounds = plan.run.num_rounds
    request = SiteTask(
        name=TASK_VALIDATE,
        state=torch.load(file, map_location="cpu", weights_only=True)["model"],
        current_round=rounds,
        num_rounds=rounds,
        seed=plan.run.seed,
        measure=(SPLIT_TEST,),
        min_cases=plan.run.min_cases,
        as_sent=True,
    )
    with OwnedFolder("unseen") as temporary, one_thread():
        worker = SiteWorker(
            site, plan.task, plan.training, own_settings(local, site), temporary.path, num_threads=1, tells_all=True
        )
        reply = worker.perform(request, lambda: bool(stop()))
    if reply.status != STATUS_OK:
        raise RuntimeError(f"the left-out site {site!r} could not test the model: {reply.reason}")
    metrics = {name: value if math.isfinite(value) else None for name, value in reply.metrics.items()}
    reason = "" if metrics else "the site keeps its figures, which are of too few cases (min_cases)"
    return Unseen(site=site, metrics=metrics, images=reply.num_samples, reason=reason)
