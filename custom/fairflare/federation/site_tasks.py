"""What each task does at a site: functions of the worker, the request and what the site keeps, called by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fairflare.core.computing import plainly
from fairflare.core.resampling import units_of
from fairflare.core.task import SPLIT_GLOBAL
from fairflare.exchange.anchor_forms import DIFFERENCE, restored
from fairflare.exchange.messages import (
    MEASURE_TRAINED,
    SPLIT_TEST,
    SPLIT_VALIDATION,
    STATUS_OK,
    TASK_ANCHOR,
    TASK_CHECK,
    TASK_NORMS,
    TASK_TRAIN,
    TASK_VALIDATE,
    SiteReply,
    SiteTask,
    clean_state,
)
from fairflare.federation import norm_moments
from fairflare.federation.examples import draw_examples
from fairflare.federation.facts import facts_of
from fairflare.federation.leaving import TRAINS_BELOW, check_names
from fairflare.federation.replies import DRAWN_UNITS, NUM_UNITS, RESAMPLED, TRAINED_METRIC, VALIDATED
from fairflare.methods.classifier_retraining import ClassifierRetraining
from fairflare.methods.home import LOCAL_MODEL, RECEIVED_MODEL
from fairflare.methods.reports import TOO_FEW
from fairflare.methods.training import SiteError, SiteStore

if TYPE_CHECKING:
    from fairflare.federation.site import SiteWorker


def check(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Open the data and say what the site has."""
    run = worker.run(request, store)
    check_names(worker.site, [metric.name for metric in worker.task.declared_metrics()])
    answers = worker.training.check(run, worker.network())
    worker.task.check_site(worker.network(), run.data, worker.device)
    facts = {
        **facts_of(run.data, worker.device, worker.sends_classes, run.floor),
        "personal": worker.has_its_own(request),
    }
    facts |= {"computing": str(worker.computing)} if str(worker.computing) else {}
    return SiteReply(STATUS_OK, report={**facts, **answers})


def train(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Measure the received model, train it, and report."""
    try:
        return _trained(worker, request, store)
    except BaseException:  # the server has no such round of this site
        store.forget(request.current_round)
        raise


def _trained(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    run, model = worker.open(request, store)
    if not worker.trains_below and not run.floor.holds("training"):
        raise SiteError(f"site {worker.site!r}: it does not train with {TOO_FEW} ({TRAINS_BELOW})", skipped=True)
    home = worker.training.home
    received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(home.measured(run, received))
    metrics = run.metrics = worker.evaluate(model, run, "validation")
    model.load_state_dict(received)
    training = ClassifierRetraining.told(worker.training, run.directives)
    trained = training.train(run, model)
    local = clean_state(model.state_dict())
    report = training.report(run, model)
    stats = {**trained.losses(), "synthetic": bool(run.data.synthetic)}
    if run.directives.get(MEASURE_TRAINED):
        stats[TRAINED_METRIC] = worker.evaluate(model, run, "validation")[worker.task.primary_metric]
    if request.anchor_as == DIFFERENCE:  # the anchor of this round will be told from it
        store.save(RECEIVED_MODEL, request.current_round, request.state, kept=1)
    store.save(LOCAL_MODEL, request.current_round, local, kept=home.local_models)
    update = home.finish(run, model, received, local)
    return SiteReply(
        STATUS_OK,
        update={name: update[name] for name in training.sends(update)},
        metrics=metrics,
        report=report,
        stats=stats,
        num_samples=trained.num_samples,
        num_steps=trained.num_steps,
    )


def anchor(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Report about the average of the local models."""
    kept = store.load_at(LOCAL_MODEL, request.current_round)
    if kept is None:
        why = f" ({'; '.join(store.lost)})" if store.lost else ""
        raise SiteError(
            f"site {worker.site!r} has no local model of round {request.current_round} to compare the anchor with{why}",
            skipped=True,
        )
    run, averaged = worker.open(_whole_anchor(worker, request, store), store)
    local = worker.task.build_model().to(worker.device)
    local.load_state_dict(kept)
    averaged.load_state_dict({name: kept[name] for name in worker.stays}, strict=False)  # of this round
    report_anchor = getattr(worker.training, "report_anchor", None)
    if report_anchor is None:
        raise SiteError(
            f"site {worker.site!r}: the server asks about an anchor, but {type(worker.training).__name__} has no "
            "anchor report; choose the training that belongs to the rule"
        )
    with plainly(averaged):  # what is compared differs little
        return SiteReply(STATUS_OK, report=report_anchor(run, local, averaged))


def _whole_anchor(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteTask:
    if request.anchor_as != DIFFERENCE:
        return request
    base = store.load_at(RECEIVED_MODEL, request.current_round)
    if base is None:
        raise SiteError(
            f"site {worker.site!r} has not kept the model that it was sent for round {request.current_round}, which "
            "the anchor is told from",
            skipped=True,
        )
    try:
        return replace(request, state=restored(request.state, base))
    except ValueError as error:
        raise SiteError(f"site {worker.site!r}: {error}") from error


def norms(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Measure the inputs of the norms whose turn it is."""
    state = norm_moments.with_kept(request, store, worker.site)
    run, model = worker.open(replace(request, state=state), store)
    with plainly(model):
        report = norm_moments.report(run, model, worker.training.batch_size)
    return SiteReply(STATUS_OK, report=report, num_samples=run.data.num_samples("training"))


def validate(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Test the model that was sent."""
    run, model = worker.open(request, store)
    if not request.as_sent:
        model.load_state_dict(worker.training.home.measured(run, model.state_dict()))
    metrics = worker.evaluate(model, run, "test")
    for split in run.data.test_splits:
        if split not in (SPLIT_TEST, SPLIT_GLOBAL):
            further = worker.evaluate(model, run, split)
            metrics.update({f"{split.removeprefix('test_')}/{name}": value for name, value in further.items()})
    if SPLIT_VALIDATION in request.measure:
        further = worker.evaluate(model, run, "validation")
        metrics.update({VALIDATED + name: value for name, value in further.items()})
    reply = SiteReply(STATUS_OK, metrics=metrics, num_samples=run.data.num_samples("test"))
    if SPLIT_GLOBAL in request.measure or (SPLIT_VALIDATION in request.measure and not request.as_sent):
        # of the run's last model
        reply.stats = worker.task.sampling(model, run.data, worker.device)
    if request.resample:
        units = units_of(run.data.cases("test"), run.data.num_samples("test"))
        draws = worker.task.resampled(model, run.data, units.drawn(worker.site, request.resample), worker.device)
        if draws is not None:
            reply.stats |= {RESAMPLED: draws, DRAWN_UNITS: units.kind, NUM_UNITS: len(units.members)}
    draw_examples(worker.examples, request, run, model, worker.training)
    return reply


#: What a site does, by the task's name.
TASKS: dict[str, Callable[[SiteWorker, SiteTask, SiteStore], SiteReply]] = {
    TASK_CHECK: check, TASK_VALIDATE: validate, TASK_TRAIN: train, TASK_ANCHOR: anchor, TASK_NORMS: norms,
}  # fmt: skip
