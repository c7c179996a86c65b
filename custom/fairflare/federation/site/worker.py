"""What a task does at a site: plain functions of (task, model, directives, state folder), without FLARE.

The executor calls :meth:`SiteWorker.perform` in its own process or, with ``isolate``, in a child process whose death
costs one task instead of the whole job.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fairflare.base.cases.floor import Floor
from fairflare.base.cases.resampling import units_of
from fairflare.base.machine.computing import NoSuchForm, plainly
from fairflare.base.machine.memory_reuse import reused_memory
from fairflare.base.own_errors import in_one_line, lacking_package
from fairflare.base.stopping import StoppableData, TaskStopped, stoppable
from fairflare.base.task import SPLIT_GLOBAL, Proxy
from fairflare.core.fairness import declared_as
from fairflare.core.features.adapting import network_of, of_site
from fairflare.exchange.anchor_forms import BF16, DIFFERENCE, lighter
from fairflare.exchange.messages import (
    FLOAT32,
    MEASURE_TRAINED,
    SPLIT_TEST,
    SPLIT_VALIDATION,
    STATUS_FAILED,
    STATUS_OK,
    STATUS_SKIPPED,
    TASK_ANCHOR,
    TASK_CHECK,
    TASK_NORMS,
    TASK_TRAIN,
    TASK_VALIDATE,
    SiteReply,
    SiteTask,
    clean_state,
)
from fairflare.federation.site import groups, norm_moments
from fairflare.federation.site.examples import draw_examples, examples_folder
from fairflare.federation.site.facts import facts_of
from fairflare.federation.site.gate import (
    TRAINS_BELOW,
    Gate,
    check_names,
    min_cases,
    safely_named,
    sends_classes,
    trains_below,
)
from fairflare.federation.site.replies import DRAWN_UNITS, NUM_UNITS, RESAMPLED, TRAINED_METRIC, VALIDATED
from fairflare.federation.site.site_file import DECODED, SHELL_SETTINGS, pick_computing, pick_device
from fairflare.federation.site.site_network import SiteNetwork, whole_anchor
from fairflare.federation.site.site_state import SiteFolder
from fairflare.methods.base.home import LOCAL_MODEL, RECEIVED_MODEL, OwnModel
from fairflare.methods.base.reports import MAX_TEXT, TOO_FEW
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, SiteStore
from fairflare.methods.parts.classifier_retraining import ClassifierRetraining

if TYPE_CHECKING:
    from fairflare.base.task import SiteData, Task

log = logging.getLogger(__name__)
#: Members of a site's data that are asked for one of its lists.
OF_A_LIST = ("num_samples", "class_counts", "cases", "num_cases", "class_cases", "order", "fingerprint", "batches")

ROOM = "make room for the site's state (state_root) and its temporary files; the site is back in the round after that"
REMEDIES = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EROFS: "let the site write to its state_root; it is back in the round after that",
}


def round_seed(seed: int, site: str, current_round: int) -> int:
    """A seed for one experiment, site and round; independent of order and process."""
    digest = hashlib.sha256(f"{seed}/{site}/{current_round}".encode()).digest()
    return int.from_bytes(digest[:7], "big") % 2**31


class SiteWorker:
    """Perform tasks at one site; keep data and network between tasks of one process.

    Args:
        site: name.
        task: what is learned.
        training: the method's site half.
        settings: the site's private settings (``local/fairflare.json``).
        state_folder: of this experiment and site; has a folder for each run, see :class:`SiteFolder`.
        decoded: folder for decoded volumes of this site, unless its settings name another; ``None``: none.
        tells_all: the site is a part of the user's own process: errors in his code are told with text and line.
    """

    def __init__(
        self,
        site: str,
        task: Task,
        training: LocalTraining,
        settings: Mapping[str, Any],
        state_folder: Path,
        *,
        num_threads: int | None = None,
        decoded: Path | None = None,
        tells_all: bool = False,
    ) -> None:
        self.site = site
        self.tells_all = tells_all
        self.decoded = decoded
        self.task = task
        self.training = training
        self.settings = dict(settings)
        self.sends_classes = sends_classes(site, self.settings)
        self.min_cases = min_cases(site, self.settings)
        self.trains_below = trains_below(site, self.settings)
        self.examples = examples_folder(site, self.settings)
        self.state = SiteFolder(site, state_folder)
        self.device = pick_device(site, self.settings.get("device"))
        self.computing = pick_computing(site, training, self.settings)
        threads = self.settings.get("num_threads", num_threads)
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise SiteError(f"site {site!r}: setting 'num_threads' must be an integer >= 1, got {threads!r}")
        self.threads: int | None = threads
        self._data: SiteData | None = None
        self.network = SiteNetwork(site, self.device, self.computing)

    def use(self, model: torch.nn.Module) -> None:
        """The network to load models into, in place of one of the task's."""
        self.network.use(model)

    def perform(self, request: SiteTask, should_stop: Callable[[], bool] = lambda: False) -> SiteReply:
        """Perform one task; whatever goes wrong becomes a reply with a reason, and details go to this site's log.

        Args:
            request: the task.
            should_stop: asked at every batch and in every other long loop; True ends the task with a refusal.
        """
        started = time.monotonic()
        if SPLIT_GLOBAL in request.measure:  # of the model that all share
            request = replace(request, as_sent=True)
        if self.threads is not None:  # for each task: in one process another site may have set its own
            torch.set_num_threads(self.threads)
        try:
            with reused_memory(self.device.type), stoppable(should_stop), self.computing.in_force():
                reply = self._perform(request)
                self._keep_home(request, reply)
        except (torch.cuda.OutOfMemoryError, MemoryError) as e:
            self.network.model = None
            traceback.clear_frames(e.__traceback__)  # they hold the model and its gradients
            e.__traceback__ = None  # and so do the closures that ran on them
            gc.collect()  # an optimizer may refer to itself
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            log.warning("site %s, task %s: out of memory: %s", self.site, request.name, e)
            why = f"site {self.site!r}: out of memory in {request.name}; lower batch_size or image_size"
            return SiteReply(STATUS_FAILED, reason=why)
        except NoSuchForm as e:
            why = f"site {self.site!r}: {e} has no deterministic form on its device; set deterministic to false"
            return refusal(self.site, request.name, SiteError(why))
        except Exception as e:
            return refusal(self.site, request.name, e, tells_all=self.tells_all)
        reply.stats["seconds"] = round(time.monotonic() - started, 3)
        return reply

    def _keep_home(self, request: SiteTask, reply: SiteReply) -> None:
        """What stays here by the site's settings or the job's does not leave."""
        assert self._data is not None  # every task that is done opens them
        data = self._shown(self._data, request)
        floor = Floor(data, self._floor(request))
        Gate(self.site, self.task, data, self.training, self.sends_classes, floor).keep_home(request, reply)

    @staticmethod
    def _shown(data: SiteData, request: SiteTask) -> Any:
        """The data as a task sees them: it may be stopped at each batch, and mean another list by the test."""
        return StoppableData(TestedOn(data, SPLIT_GLOBAL) if SPLIT_GLOBAL in request.measure else data)

    def _floor(self, request: SiteTask) -> int:
        """A job can only raise what the site has set."""
        return max(self.min_cases, request.min_cases)

    def _perform(self, request: SiteTask) -> SiteReply:
        jobs = {
            TASK_CHECK: self._check,
            TASK_VALIDATE: self._validate,
            TASK_TRAIN: self._train,
            TASK_ANCHOR: self._anchor,
            TASK_NORMS: self._norms,
        }
        if request.name not in jobs:
            raise SiteError(f"site {self.site!r}: unknown task {request.name!r}, known: {sorted(jobs)}")
        if request.name == TASK_CHECK or (request.name == TASK_VALIDATE and not self._has_its_own(request)):
            return jobs[request.name](request, self.state.store(request.run))  # keeps and reads nothing
        with self.state.opened(request) as store:
            reply = jobs[request.name](request, store)
        if store.lost:
            reply.stats["state_lost"] = "; ".join(store.lost)[:MAX_TEXT]
            log.warning("site %s, round %d: %s", self.site, request.current_round, "; ".join(store.lost))
        return reply

    def local_model(self, asked: SiteTask, current_round: int) -> dict[str, torch.Tensor] | None:
        """What this site trained in a round of the run that ``asked``, whole; ``None``: it is not kept, or damaged."""
        kept = self.state.store(asked.run).load_at(LOCAL_MODEL, current_round)
        if kept is None:
            return None
        self.network.of(self.task, asked)
        return dict(self.network.whole(kept))

    def stays(self, request: SiteTask | None = None) -> list[str]:
        """Tensors of the model that the method keeps at this site."""
        return self.training.home.stays(self.network.of(self.task, request))

    # -- the tasks

    def _check(self, request: SiteTask, store: SiteStore) -> SiteReply:
        run = self._run(request, store)
        check_names(self.site, [metric.name for metric in self.task.declared_metrics()])
        model = self.network.of(self.task, request)
        answers = self.training.check(run, model)
        self.task.check_site(model, run.data, self.device)
        groups.check_asked(self.site, self.task, run.data, request.groups)
        facts = {
            **facts_of(run.data, self.device, self.sends_classes, run.floor),
            "personal": self._has_its_own(request),
        }
        facts |= {"computing": str(self.computing)} if str(self.computing) else {}
        facts |= {groups.NAMES: groups.names_of(run.data, request.groups)} if request.groups else {}
        return SiteReply(STATUS_OK, report={**facts, **answers})

    def _train(self, request: SiteTask, store: SiteStore) -> SiteReply:
        try:
            return self._trained(request, store)
        except BaseException:  # the server has no such round of this site
            store.forget(request.current_round)
            self.network.forget()
            raise

    def _trained(self, request: SiteTask, store: SiteStore) -> SiteReply:
        run, model = self._open(request, store)
        if not self.trains_below and not run.floor.holds("training"):
            raise SiteError(f"site {self.site!r}: it does not train with {TOO_FEW} ({TRAINS_BELOW})", skipped=True)
        home = self.training.home
        received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(home.measured(run, received))
        metrics = run.metrics = self._evaluate(model, run, "validation")
        model.load_state_dict(of_site(self.task, received, self.settings))
        training = ClassifierRetraining.told(self.training, run.directives)
        trained = training.train(run, model)
        local = clean_state(model.state_dict())
        self.network.check_unchanged(received, local)
        report = training.report(run, model)
        stats = {**trained.losses(), "synthetic": bool(run.data.synthetic)}
        if run.directives.get(MEASURE_TRAINED):
            stats[TRAINED_METRIC] = self._evaluate(model, run, "validation")[self.task.primary_metric]
        if request.anchor_as == DIFFERENCE:  # the anchor of this round will be told from it
            store.save(RECEIVED_MODEL, request.current_round, request.state, kept=1)
        store.save(LOCAL_MODEL, request.current_round, self.network.part(local), kept=home.local_models)
        update = self.network.part(home.finish(run, model, received, local))
        sent = {name: update[name] for name in training.sends(update)}
        return SiteReply(
            STATUS_OK,
            update=sent if request.update_dtype == FLOAT32 else lighter(sent, {}, BF16),
            metrics=metrics,
            report=report,
            stats=stats,
            num_samples=trained.num_samples,
            num_steps=trained.num_steps,
        )

    def _anchor(self, request: SiteTask, store: SiteStore) -> SiteReply:
        kept = store.load_at(LOCAL_MODEL, request.current_round)
        if kept is None:
            why = f" ({'; '.join(store.lost)})" if store.lost else ""
            raise SiteError(
                f"site {self.site!r} has no local model of round {request.current_round} to compare the anchor "
                f"with{why}",
                skipped=True,
            )
        run, anchor = self._open(whole_anchor(request, store, self.site), store)
        local = network_of(self.task).to(self.device)
        whole = self.network.whole(kept)
        local.load_state_dict(whole)
        anchor.load_state_dict({name: whole[name] for name in self.stays(request)}, strict=False)  # of this round
        report_anchor = getattr(self.training, "report_anchor", None)
        if report_anchor is None:
            raise SiteError(
                f"site {self.site!r}: the server asks about an anchor, but {type(self.training).__name__} has no "
                "anchor report; choose the training that belongs to the rule"
            )
        with plainly(anchor):  # what is compared differs little
            return SiteReply(STATUS_OK, report=report_anchor(run, local, anchor))

    def _norms(self, request: SiteTask, store: SiteStore) -> SiteReply:
        state = norm_moments.with_kept(request, store, self.site)
        run, model = self._open(replace(request, state=state), store)
        with plainly(model):
            report = norm_moments.report(run, model, self.training.batch_size)
        return SiteReply(STATUS_OK, report=report, num_samples=run.data.num_samples("training"))

    def _validate(self, request: SiteTask, store: SiteStore) -> SiteReply:
        run, model = self._open(request, store)
        if not request.as_sent:
            model.load_state_dict(self.training.home.measured(run, model.state_dict()))
        metrics = self._evaluate(model, run, "test")
        for split in run.data.test_splits:
            if split not in (SPLIT_TEST, SPLIT_GLOBAL):
                further = self._evaluate(model, run, split)
                metrics.update({f"{split.removeprefix('test_')}/{name}": value for name, value in further.items()})
        if SPLIT_VALIDATION in request.measure:
            further = self._evaluate(model, run, "validation")
            metrics.update({VALIDATED + name: value for name, value in further.items()})
        reply = SiteReply(STATUS_OK, metrics=metrics, num_samples=run.data.num_samples("test"))
        if SPLIT_GLOBAL in request.measure or (SPLIT_VALIDATION in request.measure and not request.as_sent):
            # of the run's last model
            reply.stats = self.task.sampling(model, run.data, self.device)
        if request.groups:
            table = groups.table_of(self.site, self.task, model, run.data, self.device, request)
            reply.stats[groups.TABLE] = table
        if request.resample:
            units = units_of(run.data.cases("test"), run.data.num_samples("test"))
            draws = self.task.resampled(model, run.data, units.drawn(self.site, request.resample), self.device)
            if draws is not None:
                reply.stats |= {RESAMPLED: draws, DRAWN_UNITS: units.kind, NUM_UNITS: len(units.members)}
        draw_examples(self.examples, request, run, model, self.training)
        return reply

    # -- pieces

    def _evaluate(self, model: torch.nn.Module, run: SiteRun, split: str) -> dict[str, float]:
        batches = run.data.batches(split, batch_size=self.training.batch_size)
        metrics = safely_named(self.site, self.task.evaluate(model, batches, self.device))
        self._check_metrics(metrics)
        return metrics

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        """The server would refuse them after a round of training; here it costs none, and the remedy is named."""
        declared = self.task.by_name()
        for name, value in metrics.items():
            metric = declared_as(name, declared)
            if metric is None:
                raise SiteError(f"site {self.site!r}: {self.task.asks_for(name)}")
            if math.isfinite(value) and not metric.holds(value):
                raise SiteError(
                    f"site {self.site!r}: metric {name!r} must lie in {metric.range}, got {value!r:.40}; "
                    f"{self.task.asks_for(name)}"
                )

    def _has_its_own(self, request: SiteTask) -> bool:
        """Whether a task of this kind is done with what the site has of its own."""
        return not request.as_sent and bool(self.training.home.model or self.stays(request))

    def _open(self, request: SiteTask, store: SiteStore) -> tuple[SiteRun, torch.nn.Module]:
        """The task's network with the received model, and the site's own parts in it."""
        run, model = self._run(request, store), self.network.of(self.task, request)
        run.sent, home, state = self.network.sent, self.training.home, request.state
        if not request.as_sent and request.name != TASK_ANCHOR:
            # A model of the site's own is sent entries, which are no part of a model.
            received = state if isinstance(home, OwnModel) else self.network.whole(state)
            state = home.begin(run, model, received)
        try:
            model.load_state_dict(self.network.whole(state))
        except RuntimeError as e:
            raise SiteError(
                f"site {self.site!r}: the server's model does not fit the task's network here: {e}",
                public=f"site {self.site!r}: the server's model does not fit the task's network at this site; "
                "server and site must run the same job",
            ) from e
        return run, model

    def _run(self, request: SiteTask, store: SiteStore) -> SiteRun:
        if self._data is None:
            of_task = {k: v for k, v in self.settings.items() if k not in SHELL_SETTINGS}
            known = getattr(getattr(self.task, "site_settings", None), "__dataclass_fields__", ())
            if self.decoded is not None and DECODED in known:
                of_task.setdefault(DECODED, str(self.decoded.absolute()))
            opened = self.task.open_site(self.site, of_task)
            self.task, self._data = self.task.suited_to(opened), opened
            log.info("site %s: %s", self.site, opened.description)
        return SiteRun(
            site=self.site,
            task=self.task,
            data=self._shown(self._data, request),
            device=self.device,
            current_round=request.current_round,
            num_rounds=request.num_rounds,
            seed=round_seed(request.seed, self.site, request.current_round),
            directives=request.directives,
            store=store,
            scratch=store.scratch,
            settings=self.settings,
            computing=self.computing,
            min_cases=self._floor(request),
        )


class TestedOn(Proxy):
    """A site's data whose test list is another one; no further test list is shown.

    Args:
        inner: of the site.
        test: the list that is shown as ``"test"``.
    """

    __test__ = False  # for pytest: this is no test
    test_splits = (SPLIT_TEST,)

    def __init__(self, inner: SiteData, test: str) -> None:
        super().__init__(inner)
        for name in OF_A_LIST:
            setattr(self, name, partial(self._of, getattr(inner, name), test))

    @staticmethod
    def _of(method: Callable[..., Any], test: str, split: str, *args: Any, **options: Any) -> Any:
        return method(test if split == SPLIT_TEST else split, *args, **options)


def refusal(site: str, task: str, error: Exception, *, tells_all: bool = False) -> SiteReply:
    """The answer when a task could not be done; details go to this site's log.

    Args:
        site, task: names.
        error: why.
        tells_all: the server is the same person's: he is told his own error's text and line.
    """
    if isinstance(error, TaskStopped):
        log.info("site %s, task %s: %s", site, task, error)
        return SiteReply(STATUS_SKIPPED, reason=f"site {site!r}: {error}")
    # SiteError and DataError carry a text for the server; of anything else only the kind may leave the site.
    public = getattr(error, "public", None)
    if lacking := lacking_package(error):
        public = f"site {site!r}: {lacking}"
    if public:
        log.warning("%s", error)
    else:
        log.warning("site %s, task %s failed", site, task, exc_info=error)
    tell = tells_all and not isinstance(error, OSError)
    told = in_one_line(error) if tell else f"{_kind(error)} (details in the site's log)"
    kind = f"site {site!r}: {task} failed with {told}"
    return SiteReply(STATUS_SKIPPED if getattr(error, "skipped", False) else STATUS_FAILED, reason=public or kind)


def _kind(error: Exception) -> str:
    """What kind of error it was; of the system's, what the system says without the file's name, and what to do."""
    name = type(error).__name__
    if not isinstance(error, OSError) or not error.errno:
        return name
    remedy = REMEDIES.get(error.errno)
    return f"{name}: {os.strerror(error.errno)}" + (f"; {remedy}" if remedy else "")
