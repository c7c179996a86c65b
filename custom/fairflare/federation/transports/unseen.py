"""A run's model at a site that was no part of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fairflare.base.disk.temporary import OwnedFolder
from fairflare.base.machine.threads import one_thread
from fairflare.base.settings import values_of
from fairflare.core.features.adapting import network_of
from fairflare.core.features.batch_norms import MEAN, VARIANCE, recalibrate, registered_names
from fairflare.exchange.messages import SPLIT_TEST, STATUS_OK, TASK_VALIDATE, SiteTask
from fairflare.exchange.sent_tensors import rebuilt
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.run_settings import RESULTS_FOLDER
from fairflare.federation.plan.site_training import at_home
from fairflare.federation.record.models import MODEL_FILE
from fairflare.federation.site.site_file import own_settings
from fairflare.federation.site.worker import SiteWorker
from fairflare.reporting.compare.unseen import Unseen, write_unseen
from fairflare.reporting.results import read_results

RUN_DIR = Path("server") / "simulate_job"
BATCH = 32  # images, for the statistics
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

    A network with batch norms is tested once more with statistics of the site's own training images, without their
    labels, as ``fairflare adapt`` measures them; of ``norm_statistics=site`` that is the only way.

    Args:
        arguments: of :func:`fairflare.federation.plan.plan.make_plan`, as the run had them.
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
    content = torch.load(workspace / RUN_DIR / MODEL_FILE, map_location="cpu", weights_only=True)
    network, state = rebuilt(
        lambda: network_of(plan.task), content["model"], content["train_conf"].get("exchange") or {}
    )
    network.load_state_dict(state)
    home = at_home(values_of(plan.training), network, lambda *_, **__: None)
    found = Unseen(site=site, reason=NO_MODEL)
    if not home.own_everywhere:
        found = _tested(plan, state, site, local, should_stop)
    statistics = _statistics(network)
    if statistics and (not home.own_everywhere or home.tensors <= statistics):
        data = plan.task.open_site(site, own_settings(local, site))
        with one_thread(), torch.no_grad():
            recalibrate(network, lambda: (inputs for inputs, *_ in data.batches("training", batch_size=BATCH)))
        found.adapted = _tested(plan, network.state_dict(), site, local, should_stop).metrics
    write_unseen(workspace / RUN_DIR / RESULTS_FOLDER, found)
    return found


def _statistics(network: torch.nn.Module) -> set[str]:
    """Names of what batch norms measure, of every name that a norm has."""
    names = [name for same in registered_names(network).values() for name in same]
    return {f"{name}.{kind}" for name in names for kind in (MEAN, VARIANCE, "num_batches_tracked")}


def _tested(
    plan: Plan, state: Mapping[str, torch.Tensor], site: str, local: Mapping[str, Any], stop: Callable[[], bool | str]
) -> Unseen:
    """As any site tests a model that it is sent: same code, same floor of cases, nothing of its own in the model."""
    rounds = plan.run.num_rounds
    request = SiteTask(
        name=TASK_VALIDATE,
        state=dict(state),
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
