"""Perform each task at a site: a function for each task, which takes the worker, the request and the run's store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fairflare.base.cases.resampling import units_of
from fairflare.base.disk.files import write_whole
from fairflare.base.machine.computing import plainly
from fairflare.base.settings import field_names
from fairflare.base.stopping import TaskStopped
from fairflare.base.task import SPLIT_GLOBAL
from fairflare.core.cells import make_cells
from fairflare.core.features.adapting import network_of
from fairflare.exchange.messages import (
    COMPARED,
    SPLIT_TEST,
    SPLIT_VALIDATION,
    STATUS_OK,
    TASK_ANCHOR,
    TASK_CHECK,
    TASK_KEYS,
    TASK_MASK,
    TASK_NORMS,
    TASK_PLAN,
    TASK_RELEASE,
    TASK_TRAIN,
    TASK_VALIDATE,
    SiteReply,
    SiteTask,
    clean_state,
)
from fairflare.federation.site import case_counts, clinical, groups, norm_moments, sums
from fairflare.federation.site.facts import OTHER_IMAGES, facts_of, labels_of, support_of
from fairflare.federation.site.gate import TRAINS_BELOW, check_names
from fairflare.federation.site.replies import DRAWN_UNITS, NUM_UNITS, RESAMPLED
from fairflare.federation.site.site_file import SUBMITS
from fairflare.methods.base.home import LOCAL_MODEL
from fairflare.methods.base.reports import TOO_FEW
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, SiteStore
from fairflare.methods.parts.classifier_retraining import ClassifierRetraining
from fairflare.methods.parts.consistency import Consistency, TrainedOn, check_unlabelled, has_labels
from fairflare.methods.parts.fine_tuning import FineTuning

LISTS = "lists"  # file of a run's folder: checksums of the lists that the site's first round was trained on

if TYPE_CHECKING:
    from fairflare.base.task import SiteData, Task
    from fairflare.federation.site.worker import SiteWorker


def check(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``check``: open the site's data, and report facts about them and about the site."""
    run = worker.run(request, store)
    check_names(worker.site, [metric.name for metric in worker.task.declared_metrics()])
    check_unlabelled(worker.training, run.data, worker.site)
    model = worker.network.build(worker.task, request)
    if worker.private is not None:
        worker.private.check(worker.training, run, model)
    answers = worker.training.check(run, model)
    if (later := ClassifierRetraining.choose(worker.training, run.directives)) is not worker.training:
        check_unlabelled(later, run.data, worker.site)
        later.check(run, model)
    worker.task.check_site(model, run.data, worker.device)
    # Figures of the user's own are measured once here, as the first round would be lost with wrong ones.
    if request.num_rounds and worker.private is None and worker.task.is_overridden("evaluate", "declared_metrics"):
        worker.evaluate(model, run, "validation")
    groups.check_asked(worker.site, worker.task, run.data, request.groups)
    lists = store.folder / LISTS
    facts = {
        **facts_of(run.data, worker.device, worker.sends_classes, run.floor),
        **labels_of(worker.task, run.data, worker.sends_classes, run.floor),
        "personal": worker.has_its_own(request),
        **({OTHER_IMAGES: True} if lists.exists() and lists.read_text("utf-8") != _lists(run.data) else {}),
        **({"computing": worker.computing.describe(worker.device)} if str(worker.computing) else {}),
        **({groups.NAMES: groups.names_of(run.data, request.groups)} if request.groups else {}),
    }
    epochs, steps = worker.training.local_epochs, worker.training.local_steps
    # Number of training samples in a round.
    samples = epochs * run.data.num_samples("training") if steps is None else steps * worker.training.batch_size
    costs = worker.task.costs(model, run.data, worker.device, samples)
    return SiteReply(STATUS_OK, report={**facts, **costs, **answers})


def _lists(data: SiteData) -> str:
    """Return the checksums of a site's lists of images as lines of text; they are saved at the site and not sent."""
    return "".join(f"{split} {data.fingerprint(split)}\n" for split in data.lists)


def train(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``train``: measure the received model on the validation split, train it, and report."""
    if again := sums.repeat_answer(worker, request, store):
        worker.run(request, store)  # opens the data, which the gate looks at
        return again
    try:
        run, model = worker.open(request, store)
        if not worker.trains_below and not run.floor.holds("training"):
            raise SiteError(f"site {worker.site!r}: it does not train with {TOO_FEW} ({TRAINS_BELOW})", skipped=True)
        if not (lists := store.folder / LISTS).exists():
            write_whole(lists, lambda path: path.write_text(_lists(run.data), "utf-8"))
        home = worker.training.home
        received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(home.choose_measured_model(run, received))
        metrics = run.metrics = worker.evaluate(model, run, "validation")
        model.load_state_dict(received)
        training = ClassifierRetraining.choose(worker.training, run.directives)
        training = FineTuning.choose(training, run.directives, shares=worker.settings.get(SUBMITS, False) is True)
        run.unlabelled = Consistency.make(training, run, model) if training is worker.training else None
        if alone := run.unlabelled is not None and run.unlabelled.alone:
            plain = {name: getattr(training, name) for name in field_names(LocalTraining)}  # no terms of the method
            training, run.data = LocalTraining(**plain), TrainedOn(run.data)  # type: ignore[assignment]
        private = worker.private
        trained = training.train(run, model) if private is None else private.train(training, request, run, model)
        trained.check_moved(run, model, received)
        local = clean_state(model.state_dict())
        worker.network.check_unchanged(received, local)
        report = training.report(run, model) if private is None else private.report(run, model, received)
        store.save(LOCAL_MODEL, request.current_round, worker.network.part(local), kept=home.local_models)
        update = worker.network.part(home.finish(run, model, received, local))
        reply = SiteReply(
            STATUS_OK,
            update={name: update[name] for name in training.sends(update)},
            metrics=make_cells(metrics, SPLIT_VALIDATION),
            report=report,
            stats={**trained.losses(), "synthetic": bool(run.data.synthetic)},
            num_samples=None if alone else trained.num_samples,
            num_steps=trained.num_steps,
        )
        return sums.keep_update_home(worker, request, store, reply, local, run.floor) if request.sums else reply
    except BaseException as error:  # the server does not count this round for the site: remove its files
        store.forget(
            request.current_round, half_done=isinstance(error, Exception) and not isinstance(error, TaskStopped)
        )
        worker.network.forget()
        raise


def anchor(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``anchor``: report how the site's local model compares with the average of all local models."""
    if (stored := store.load_at(LOCAL_MODEL, request.current_round)) is None:
        raise SiteError(
            f"site {worker.site!r} has no local model of round {request.current_round} to compare with the average of "
            "all local models" + (f" ({'; '.join(store.lost)})" if store.lost else ""),
            skipped=True,
        )
    run, anchor = worker.open(request, store)
    local = network_of(worker.task).to(worker.device)
    whole = worker.network.whole(stored)
    local.load_state_dict(whole)
    # The tensors that the method keeps at this site are those of this round's local model.
    anchor.load_state_dict({name: whole[name] for name in worker.stays(request)}, strict=False)
    report_anchor = getattr(worker.training, "report_anchor", None)
    if report_anchor is None:
        raise SiteError(
            f"site {worker.site!r}: {type(worker.training).__name__} cannot compare the local model with the average "
            "of all local models, as the server's rule asks; choose the training that belongs to the rule"
        )
    with plainly(anchor):  # in full precision, as the two models differ little
        return SiteReply(STATUS_OK, report=report_anchor(run, local, anchor))


def norms(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``norms``: report the moments of the inputs of the next group of batch norms."""
    request = replace(request, state=norm_moments.restore_model(request, store, worker.site))
    run, model = worker.open(request, store)
    data: Any = run.data if has_labels(run.data) else TrainedOn(run.data)
    with plainly(model):
        report = norm_moments.report(replace(run, data=data), model, worker.training.batch_size)
    return SiteReply(
        STATUS_OK,
        report=sums.moments_home(request, store, report, run.floor) if request.sums else report,
        num_samples=data.num_samples("training"),
    )


def validate(worker: SiteWorker, request: SiteTask, store: SiteStore) -> SiteReply:
    """Perform ``validate``: measure the received model on the site's test splits."""
    run, model = worker.open(request, store)
    if not request.as_sent:
        model.load_state_dict(worker.training.home.choose_measured_model(run, model.state_dict()))
    metrics = make_cells(worker.evaluate(model, run, SPLIT_TEST), SPLIT_TEST)
    if worker.private is not None:  # further measurements would not be counted in the privacy ledger
        return SiteReply(STATUS_OK, metrics=metrics, num_samples=run.data.num_samples("test"))
    splits = [split for split in run.data.test_splits if split not in (SPLIT_TEST, SPLIT_GLOBAL)]
    for split in [*splits, *([SPLIT_VALIDATION] if SPLIT_VALIDATION in request.measure else [])]:
        metrics += make_cells(worker.evaluate(model, run, split), split)
    reply = SiteReply(STATUS_OK, metrics=metrics, num_samples=run.data.num_samples("test") or None)
    if reply.num_samples is None:
        return reply
    of_test = run.task_on("test")
    task = _comparing(worker, request, run, of_test)
    if SPLIT_GLOBAL in request.measure or (SPLIT_VALIDATION in request.measure and not request.as_sent):
        # These splits are measured only in the test of the run's last model.
        reply.stats = task.sampling(model, run.data, worker.device) | support_of(worker.task, run.data, run.floor)
    of_classes = worker.task.has_classes or worker.task.findings
    # A user's own task may have no outcome names.
    if SPLIT_VALIDATION in request.measure and not request.as_sent and of_classes and worker.task.outcome_names():
        reply.stats[clinical.TABLE] = clinical.table_of(worker.task, model, run.data, worker.device)
    if request.groups:
        table = groups.table_of(worker.site, of_test, model, run.data, worker.device, request)
        reply.stats |= sums.groups_home(worker, request, store, run, table) if request.sums else {groups.TABLE: table}
    if request.resample:
        units = units_of(run.data.cases("test"), run.data.num_samples("test"))
        draws = task.resampled(model, run.data, units.draw(worker.site, request.resample), worker.device)
        if draws is not None:
            reply.stats |= {RESAMPLED: draws, DRAWN_UNITS: units.kind, NUM_UNITS: len(units.members)}
    return reply


def _comparing(worker: SiteWorker, request: SiteTask, run: SiteRun, task: Task) -> Task:
    """Return the task restricted to the structures by which sites are compared; if that is impossible, the task itself.

    With a single structure an interval would be a metric by class. So for a site that withholds these the task is not
    restricted, and the interval is that of the site's mean over all of its structures.
    """
    compared = request.directives.get(COMPARED, {}).get(worker.site, ())
    shown = run.data.structures(SPLIT_TEST)
    numbers = tuple(
        number
        for number, name in enumerate(task.outcome_names())
        if name in compared and (shown is None or number in shown)
    )
    with suppress(ValueError):  # a task with its own loss or metrics
        return task.annotating(numbers) if numbers and worker.sends_classes else task
    return task


#: The function that performs a task at a site, by the task's name.
TASKS: dict[str, Callable[[SiteWorker, SiteTask, SiteStore], SiteReply]] = {
    TASK_CHECK: check, TASK_VALIDATE: validate, TASK_TRAIN: train, TASK_ANCHOR: anchor, TASK_NORMS: norms,
    TASK_PLAN: case_counts.plan, TASK_KEYS: sums.keys, TASK_MASK: sums.mask, TASK_RELEASE: sums.release,
}  # fmt: skip
