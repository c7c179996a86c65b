"""Test a run's model at the site that was left out of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fairflare.base.aspect import GROUPS
from fairflare.base.disk.temporary import OwnedFolder
from fairflare.base.machine.threads import one_thread
from fairflare.base.settings import values_of
from fairflare.core.cells import SUPPRESSED as WITHHELD
from fairflare.core.features.batch_norms import MEAN, VARIANCE, registered_names
from fairflare.exchange.messages import SPLIT_TEST, STATUS_OK, TASK_VALIDATE, SiteTask
from fairflare.exchange.sent_tensors import rebuilt
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.run_settings import RESULTS_FOLDER
from fairflare.federation.plan.site_training import find_local_tensors
from fairflare.federation.record.models import MODEL_FILE
from fairflare.federation.site.groups import FIELDS, IN_GROUPS, read_groups
from fairflare.federation.site.replies import DRAWN_UNITS, NUM_UNITS, RESAMPLED, list_suppressed
from fairflare.federation.site.site_file import SHELL_SETTINGS, own_settings
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import RUN_DIR
from fairflare.methods.base.reports import SUPPRESSED
from fairflare.prediction.adapt import recalibrate
from fairflare.reporting.results import read_results
from fairflare_lab.compare.left_out import Unseen

BATCH = 32  # number of images in a batch that measures norm statistics
NO_MODEL = "it has no common model, as each site keeps parts of it, or all"


def drop_site(local: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Return the content of ``local/fairflare.json`` without the block of one site."""
    blocks = local.get("sites")
    if not isinstance(blocks, Mapping):
        return dict(local)
    return {**local, "sites": {name: block for name, block in blocks.items() if name != site}}


def is_completed(workspace: Path) -> bool:
    """Return whether the run in this folder has completed."""
    try:
        return read_results(workspace / RUN_DIR / RESULTS_FOLDER).status == "completed"
    except (OSError, ValueError):
        return False


def evaluate_unseen(
    arguments: Mapping[str, Any],
    workspace: Path,
    site: str,
    local: Mapping[str, Any],
    should_stop: Callable[[], bool | str] = lambda: False,
) -> Unseen:
    """Test a run's last common model on a left-out site's test split, and save the result beside the run's results.

    A network with batch norms is tested once more with norm statistics of the site's own training images, without their
    labels, as ``fairflare adapt`` measures them. With ``norm_statistics=site`` this is the only possible test.

    Args:
        arguments: arguments of :func:`fairflare.federation.plan.plan.make_plan` that the run had.
        workspace: folder of the completed run.
        site: name of the left-out site.
        local: content of ``local/fairflare.json``, including this site.
        should_stop: function that returns whether to end the test.

    Raises:
        RuntimeError: the site could not test the model; the text says why.
        ValueError: the site was part of the run.
    """
    plan = make_plan(**arguments)
    if site in (plan.sites or ()):
        raise ValueError(f"site {site!r} was part of the run: it is not unseen; leave it out of the run's sites")
    network, state = common_model(plan, workspace, local)
    home = find_local_tensors(values_of(plan.training), network, lambda *_, **__: None)
    result = Unseen(site=site, reason=NO_MODEL)
    if not home.own_everywhere:
        result = _test_model(plan, state, site, local, should_stop)
    statistics = _statistics(network)
    if statistics and (not home.own_everywhere or home.tensors <= statistics):
        settings = {key: value for key, value in own_settings(local, site).items() if key not in SHELL_SETTINGS}
        data = plan.task.open_site(site, settings)
        with one_thread(), torch.no_grad():
            recalibrate(network, lambda: (inputs for inputs, *_ in data.batches("training", batch_size=BATCH)))
        adapted = _test_model(plan, network.state_dict(), site, local, should_stop)
        result.adapted, result.adapted_resampled = adapted.metrics, adapted.resampled
        if home.own_everywhere:  # without adapted statistics there is no common model
            result.groups, result.groups_kept = adapted.groups, adapted.groups_kept
    result.write(workspace / RUN_DIR / RESULTS_FOLDER)
    return result


def common_model(
    plan: Plan, workspace: Path, local: Mapping[str, Any]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return the network of a run, with a common model loaded, and all tensors of this model.

    Args:
        plan: plan of the run.
        workspace, local: see :func:`evaluate_unseen`.
    """
    content = torch.load(workspace / RUN_DIR / MODEL_FILE, map_location="cpu", weights_only=True)
    note = content["train_conf"].get("exchange") or {}
    network, state = rebuilt(plan.task, content["model"], note, local.get("initial_weights"))
    network.load_state_dict(state)
    return network, dict(state)


def _statistics(network: torch.nn.Module) -> set[str]:
    """Return the names of the running statistics of all batch norms, under every name that a norm has."""
    names = [name for same in registered_names(network).values() for name in same]
    return {f"{name}.{kind}" for name in names for kind in (MEAN, VARIANCE, "num_batches_tracked")}


def _test_model(
    plan: Plan, state: Mapping[str, torch.Tensor], site: str, local: Mapping[str, Any], stop: Callable[[], bool | str]
) -> Unseen:
    """Test a model at a site as in a run, with the same code and ``min_cases``, but no tensors of the site's own."""
    rounds, asked = plan.run.rounds_in_all, {name: getattr(plan.run, name) for name in GROUPS.fields}
    request = SiteTask(
        name=TASK_VALIDATE, state=dict(state), current_round=rounds, num_rounds=rounds, seed=plan.run.seed,
        measure=(SPLIT_TEST,), resample=plan.run.bootstrap, min_cases=plan.run.min_cases, as_sent=True, **asked,
    )  # fmt: skip
    with OwnedFolder("unseen") as temporary, one_thread():
        worker = SiteWorker(
            site, plan.task, plan.training, own_settings(local, site), temporary.path, num_threads=1, tells_all=True
        )
        reply = worker.perform(request, lambda: bool(stop()))
    if reply.status != STATUS_OK:
        raise RuntimeError(f"the left-out site {site!r} could not test the model: {reply.reason}")
    metrics = {cell.name: cell.value for cell in reply.metrics if cell.reason != WITHHELD}
    drawn = [value if math.isfinite(value) else None for value in reply.stats.get(RESAMPLED) or ()]
    statistics = {**dict.fromkeys((SUPPRESSED, *(field.name for field in FIELDS))), **reply.stats}
    sums = read_groups(
        site, statistics, plan.run.groups, len(plan.task.outcome_names()), plan.run.group_bins,
        plan.run.calibration_bins,
    )  # fmt: skip
    return Unseen(
        site=site,
        metrics=metrics,
        images=reply.num_samples,
        reason="" if metrics else "the site keeps its figures, which are of too few cases (min_cases)",
        resampled=drawn,
        unit=reply.stats.get(DRAWN_UNITS, "") if drawn else "",
        units=reply.stats.get(NUM_UNITS) if drawn else None,
        groups={
            name: {kind: values.tolist() for kind, values in kinds.items()} for name, kinds in (sums or {}).items()
        },
        groups_kept=list_suppressed(statistics, IN_GROUPS),
    )
