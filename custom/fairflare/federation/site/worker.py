"""Perform the server's tasks at a site, without FLARE: with a learning task, a model, directives and a state folder.

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
from pathlib import Path
from typing import Any

import torch

from fairflare.base.aspect import SUMS
from fairflare.base.cases.floor import Floor, ShownRecords
from fairflare.base.checks import refuse
from fairflare.base.machine.computing import NoSuchForm
from fairflare.base.machine.memory_reuse import reuse_memory
from fairflare.base.own_errors import describe_error, lacking_package
from fairflare.base.settings import NonNegative, PositiveInt
from fairflare.base.site_data import UNLABELLED, VALIDATION_PATCHES
from fairflare.base.stopping import StoppableData, TaskStopped, stoppable
from fairflare.base.task import LOSS, SPLIT_GLOBAL, Batches, Proxy, SiteData, Task
from fairflare.core.fairness import declared_as
from fairflare.exchange.messages import (
    PATCHWISE,
    SPLIT_TEST,
    SPLIT_VALIDATION,
    STATUS_FAILED,
    STATUS_SKIPPED,
    TASK_ANCHOR,
    TASK_CHECK,
    TASK_VALIDATE,
    SiteReply,
    SiteTask,
)
from fairflare.federation.site.facts import find_measurable
from fairflare.federation.site.gate import METRICS_BY_CLASS, MIN_CASES, TRAINS_BELOW, Gate, safely_named
from fairflare.federation.site.site_file import (
    DECODED,
    SAVE_SECONDS,
    SAVES,
    SHELL_SETTINGS,
    pick_computing,
    pick_device,
    setting,
)
from fairflare.federation.site.site_network import SiteNetwork
from fairflare.federation.site.site_state import SiteFolder, note_sent
from fairflare.federation.site.site_tasks import TASKS
from fairflare.federation.site.sums import check_asked
from fairflare.methods.base.home import LOCAL_MODEL, OwnModel
from fairflare.methods.base.reports import MAX_TEXT
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun, SiteStore
from fairflare.methods.parts.group_sums import ByPeople
from fairflare.privacy.ledger import BudgetRefused
from fairflare.privacy.policy import Private
from fairflare.privacy.sums.journal import HEAD, LOG
from fairflare.privacy.sums.keys import KEY, SumRefused
from fairflare.privacy.training import PrivateUnits

log = logging.getLogger(__name__)
#: Methods of a site's data whose first argument is the name of a list (split).
OF_A_LIST = (
    "num_samples",
    "class_counts",
    "cases",
    "num_cases",
    "class_cases",
    "order",
    "identities",
    "chosen",
    "fingerprint",
    "batches",
    "marks",
    "structures",
)

REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT),
        "make room for the site's state (state_root) and its temporary files; the site is back in the round after that",
    ),
    errno.EROFS: "let the site write to its state_root; it is back in the round after that",
}


def round_seed(seed: int, site: str, current_round: int) -> int:
    """Return a seed for one experiment, site and round, which does not depend on the order of sites or the process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{site}/{current_round}".encode()).digest()[:7], "big") % 2**31


class SiteWorker:
    """Perform the server's tasks at one site; reuse its data and network for later tasks of the same process.

    Args:
        site: name of the site.
        task: the learning task: data, network, loss and metrics.
        training: the method's site half.
        settings: the site's private settings (``local/fairflare.json``).
        state_folder: folder of this experiment and site; has a folder for each run, see :class:`SiteFolder`.
        num_threads: threads of torch, unless the site's settings name a number; ``None`` for torch's own choice.
        decoded: folder for decoded volumes of this site, unless its settings name another; ``None`` for no folder.
        sent: file in which the site logs what it is asked and what it sends (:func:`note_sent`); ``None`` for no log.
        tells_all: whether a reply gives text and line of an error in the task's code, as the site runs in the process
            of that code's author.
        startup: folder of the site's startup kit, whose certificate signs its keys; ``None`` if they are not signed.
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
        sent: Path | None = None,
        tells_all: bool = False,
        startup: Path | None = None,
    ) -> None:
        self.site, self.task, self.training = site, task, training
        self.decoded, self.sent, self.startup = decoded, sent, startup  # places at the site
        self.tells_all = tells_all
        self.settings = dict(settings)
        self.sends_classes = setting(site, self.settings, METRICS_BY_CLASS, True)
        self.min_cases: int = setting(site, self.settings, MIN_CASES, 1, PositiveInt)
        self.trains_below = setting(site, self.settings, TRAINS_BELOW, True)
        self.private = Private.read(site, self.settings)
        self.save_seconds = setting(site, self.settings, SAVES, SAVE_SECONDS, NonNegative, "a number of seconds >= 0")
        self.state = SiteFolder(site, state_folder)
        self.device = pick_device(site, self.settings.get("device"))
        self.computing = pick_computing(site, training, self.settings)
        self.threads = setting(site, self.settings, "num_threads", num_threads, PositiveInt | None, "an integer >= 1")
        self._data: SiteData | None = None
        self.fingerprints: list[Any] | None = None  # of the training cases, for a plan
        self._views: dict[int, Any] = {}  # the data without classes of too few cases, by the least number of cases
        self.network = SiteNetwork(site, self.device, self.computing, self.settings.get("initial_weights"))

    def perform(self, request: SiteTask, should_stop: Callable[[], bool] = lambda: False) -> SiteReply:
        """Perform one task and return the reply; an error becomes a reply with a reason, its details are only logged.

        Args:
            request: the task that the server asks for.
            should_stop: is called at every batch and in every other long loop; True ends the task with a refusal.
        """
        reply = self._release(request, self._answer(request, should_stop))
        try:
            if self.sent is not None:
                note_sent(self.sent, request, reply)
        except Exception as error:  # an answer that cannot be logged is not sent
            reply = self._release(request, refusal(self.site, request.name, error))
        return reply

    def _release(self, request: SiteTask, reply: SiteReply) -> SiteReply:
        """Return the part of an answer that is sent: with differential privacy only counted or public values."""
        if self.private is None or request.name in SUMS.tasks:
            return reply
        units = PrivateUnits.find(self._data) if self._data is not None else None
        return self.private.release(request, reply, [metric.name for metric in self.task.declared_metrics()], units)

    def _answer(self, request: SiteTask, should_stop: Callable[[], bool]) -> SiteReply:
        started = time.monotonic()
        if SPLIT_GLOBAL in request.measure:  # the global test is about the model that all sites share
            request = replace(request, as_sent=True)
        if self.threads is not None:  # set before each task: another site in this process may have set its own number
            torch.set_num_threads(self.threads)
        try:
            with reuse_memory(self.device.type), stoppable(should_stop), self.computing.enforce():
                reply = self._perform(request)
                self._keep_home(request, reply)
        except (torch.cuda.OutOfMemoryError, MemoryError) as e:
            self.network.model = None
            traceback.clear_frames(e.__traceback__)  # the frames hold the model and its gradients
            e.__traceback__ = None  # closures in the frames hold them too
            gc.collect()  # an optimizer may be in a cycle of references
            torch.cuda.empty_cache()  # does nothing in a process that has not used a GPU
            log.warning("site %s, task %s: out of memory: %s", self.site, request.name, e)
            return SiteReply(
                STATUS_FAILED,
                reason=f"site {self.site!r}: out of memory in {request.name}; lower batch_size or image_size",
            )
        except NoSuchForm as e:
            why = f"site {self.site!r}: {e} has no deterministic form on its device; set deterministic to false"
            return refusal(self.site, request.name, SiteError(why))
        except Exception as e:
            if self.private is not None and isinstance(e, (BudgetRefused, SumRefused)):  # their texts reveal no image
                self.private.public.add(e.public)
            return refusal(self.site, request.name, e, tells_all=self.tells_all)
        reply.stats["seconds"] = round(time.monotonic() - started, 3)
        return reply

    def _keep_home(self, request: SiteTask, reply: SiteReply) -> None:
        """Remove from a reply the values that must not leave the site by the settings of the site or of the job."""
        if request.name in SUMS.tasks:  # such a reply has no measured values
            return
        floor = Floor(self._restrict_data(request), self._floor(request))
        Gate(self.site, self.task, self.training, self.sends_classes, floor).keep_home(request, reply)

    def _restrict_data(self, request: SiteTask) -> Any:
        """Return the data as a task uses them: without classes of too few cases, and with the list that is tested."""
        assert self._data is not None  # every task that was performed has opened the data
        floor = self._floor(request)
        # Under differential privacy nothing is measured, and the number of images is public, whatever the images show.
        whole = floor <= 1 or self.private is not None
        data: Any = self._data if whole else self._views.get(floor) or ShownRecords(self._data, floor)
        self._views[floor] = data
        data = Patchwise(data) if request.directives.get(PATCHWISE) else data
        return StoppableData(GloballyTested(data) if SPLIT_GLOBAL in request.measure else data)

    def _floor(self, request: SiteTask) -> int:
        """Return the smallest number of cases that a value leaving the site may be about; a job can only raise it."""
        data = self._data  # only with unlabelled images may a list be empty
        empty = data is not None and UNLABELLED in data.lists and not all(map(data.num_samples, data.lists))
        return max(self.min_cases, request.min_cases, 1 + empty)

    def _perform(self, request: SiteTask) -> SiteReply:
        refuse({
            f"site {self.site!r}: unknown task {request.name!r}, known: {sorted(TASKS)}": request.name not in TASKS,
        }, SiteError)  # fmt: skip
        do = TASKS[request.name]
        if self.private is not None:
            self.private.begin(request)
        check_asked(self, request)
        keeps = request.name != TASK_VALIDATE or self.has_its_own(request) or (request.sums and request.groups)
        if request.name == TASK_CHECK or not keeps:
            return do(self, request, self.state.store(request.run))  # without a lock: this task saves nothing
        with self.state.open_store(request) as store:
            reply = do(self, request, store)
        if store.lost:
            reply.stats["state_lost"] = "; ".join(store.lost)[:MAX_TEXT]
            log.warning("site %s, round %d: %s", self.site, request.current_round, "; ".join(store.lost))
        return reply

    def local_model(self, asked: SiteTask, current_round: int) -> dict[str, torch.Tensor] | None:
        """Return the whole model that this site trained in a round of the run that ``asked`` belongs to.

        ``None`` if the model is no longer saved, or its file is damaged.
        """
        if (stored := self.state.store(asked.run).load_at(LOCAL_MODEL, current_round)) is None:
            return None
        self.network.build(self.task, asked)
        return dict(self.network.whole(stored))

    def stays(self, request: SiteTask | None = None) -> list[str]:
        """Return the names of the model's tensors that the method keeps at this site."""
        return self.training.home.stays(self.network.build(self.task, request))

    # -- internal parts

    def evaluate(self, model: torch.nn.Module, run: SiteRun, split: str) -> dict[str, float]:
        """Return the metrics of a model on a split of the site's data.

        Metrics that the server would refuse after a round of training are refused here, before the training.
        """
        if self.private is not None:
            return self.private.measure(run, model, split)
        # A site without labels has nothing to measure; the gate says so.
        if UNLABELLED in run.data.lists and not run.data.num_samples(split):
            return dict.fromkeys((self.task.primary_metric, LOSS.name), math.nan)
        batches = run.data.batches(split, batch_size=self.training.batch_size)
        metrics = safely_named(self.site, run.task_on(split).evaluate(model, batches, self.device))
        declared = self.task.by_name()
        if (primary := self.task.primary_metric) not in metrics:
            raise SiteError(f"site {self.site!r}: evaluate() of the task gives no {primary!r}, its primary metric")
        for name, value in metrics.items():
            metric = declared_as(name, declared)
            if metric is None:
                raise SiteError(f"site {self.site!r}: {self.task.asks_for(name)}")
            if math.isfinite(value) and not metric.holds(value):
                raise SiteError(
                    f"site {self.site!r}: metric {name!r} must lie in {metric.range}, got {value!r:.40}; "
                    f"{self.task.asks_for(name)}"
                )
        return metrics

    def has_its_own(self, request: SiteTask) -> bool:
        """Return whether a task is performed with a model or tensors of this site's own, beside the received ones."""
        return not request.as_sent and bool(self.training.home.model or self.stays(request))

    def open(self, request: SiteTask, store: SiteStore) -> tuple[SiteRun, torch.nn.Module]:
        """Return a task's run, and the network with the received model and the site's own tensors loaded into it."""
        run, model = self.run(request, store), self.network.build(self.task, request)
        run.sent, home, state = self.network.sent, self.training.home, request.state
        if isinstance(self.training, ByPeople):
            run.data = self.training.shown(run, model)
        if not request.as_sent and request.name != TASK_ANCHOR:
            # With OwnModel the server sends only some tensors and no whole model, so there is nothing to complete.
            state = home.begin(run, model, state if isinstance(home, OwnModel) else self.network.whole(state))
        try:
            model.load_state_dict(self.network.whole(state))
        except RuntimeError as e:
            raise SiteError(
                f"site {self.site!r}: the server's model does not fit the task's network here: {e}",
                public=f"site {self.site!r}: the server's model does not fit the task's network at this site; "
                "server and site must run the same job",
            ) from e
        return run, model

    def run(self, request: SiteTask, store: SiteStore) -> SiteRun:
        """Return the run that training and methods see for a task; open the site's data at the first call."""
        if self._data is None:
            of_task = {k: v for k, v in self.settings.items() if k not in SHELL_SETTINGS}
            known = getattr(getattr(self.task, "site_settings", None), "__dataclass_fields__", ())
            if self.decoded is not None and DECODED in known:
                of_task.setdefault(DECODED, str(self.decoded.absolute()))
            opened = self.task.open_site(self.site, of_task)
            self.task, self._data = self.task.suited_to(opened), opened
            measured = None if self.private else find_measurable(opened, Floor(opened, self._floor(request)))
            self.task = self.task.annotating(measured) if measured else self.task
            log.info("site %s: %s", self.site, opened.description)
        return SiteRun(
            site=self.site,
            task=self.task,
            data=self._restrict_data(request),
            device=self.device,
            current_round=request.current_round,
            num_rounds=request.num_rounds,
            seed=round_seed(request.seed, self.site, request.current_round),
            directives=request.directives,
            private=self.private is not None,
            beside=request.beside,
            store=store,
            scratch=store.scratch,
            settings=self.settings,
            computing=self.computing,
            min_cases=self._floor(request),
            save_seconds=self.save_seconds,
        )


class Patchwise(Proxy):
    """Give a site's data with fixed patches of the validation volumes in place of the whole volumes."""

    def batches(self, split: str, **options: Any) -> Batches:
        """Return batches as :meth:`fairflare.base.task.SiteData.batches` does."""
        batches: Batches = self._inner.batches(VALIDATION_PATCHES if split == SPLIT_VALIDATION else split, **options)
        return batches


class GloballyTested(Proxy):
    """Give a site's data with the list of the global test in place of the test list, and without further test lists."""

    test_splits = (SPLIT_TEST,)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name not in OF_A_LIST:
            return value
        return lambda split, *args, **options: value(SPLIT_GLOBAL if split == SPLIT_TEST else split, *args, **options)


def refusal(site: str, task: str, error: Exception, *, tells_all: bool = False) -> SiteReply:
    """Return the reply for a task that could not be performed; write the details to this site's log.

    Args:
        site, task: names of the site and of the task.
        error: the error that ended the task.
        tells_all: whether the reply gives the error's text and line, as server and code belong to the same person.
    """
    if isinstance(error, TaskStopped):
        log.info("site %s, task %s: %s", site, task, error)
        return SiteReply(STATUS_SKIPPED, reason=f"site {site!r}: {error}")
    # SiteError and DataError have a text for the server. For any other error only the kind may leave the site.
    lacking = lacking_package(error)
    public = f"site {site!r}: {lacking}" if lacking else getattr(error, "public", None)
    log.warning("%s", error if public else f"site {site}, task {task} failed", exc_info=None if public else error)
    tell = tells_all and not isinstance(error, OSError)
    text = describe_error(error) if tell else f"{_kind(error)} (details in the site's log)"
    return SiteReply(
        STATUS_SKIPPED if getattr(error, "skipped", False) else STATUS_FAILED,
        reason=public or f"site {site!r}: {task} failed with {text}",
    )


def _kind(error: Exception) -> str:
    """Return the kind of an error as a text that may be sent to the server.

    For an error of the operating system, add the system's text without the file's name, and a remedy if one is known.
    """
    name, number = type(error).__name__, error.errno if isinstance(error, OSError) else None
    # These files have fixed names, chosen by the program, so a name may be sent.
    broken_file = next((name for name in (KEY, LOG, HEAD) if str(getattr(error, "filename", "")).endswith(name)), "")
    remedy = REMEDIES.get(number or 0, broken_file and "move away what has this name, or give it to the site's user")
    return name if not number else f"{broken_file or name}: {os.strerror(number)}" + (f"; {remedy}" if remedy else "")
