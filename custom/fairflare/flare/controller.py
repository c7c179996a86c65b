"""The one controller: rounds of one or two phases for every method, then the fairness table."""

from __future__ import annotations

import json
import math
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.fuel.utils.class_utils import get_component_init_parameters
from nvflare.private.fed.simulator.simulator_const import SimulatorConstants

from fairflare import __version__
from fairflare.core.fairness import summarize
from fairflare.core.states import check_state
from fairflare.exchange.wire import (
    STATUS_OK,
    TASK_ANCHOR,
    TASK_TRAIN,
    TASK_VALIDATE,
    clean_state,
    meta_of,
    num_bytes,
    task_model,
)
from fairflare.flare.checkpoint import Checkpoint, CheckpointFolder, check_same_config
from fairflare.flare.executor import read_site_file
from fairflare.flare.site import safe_name
from fairflare.flare.tracking import Tracker
from fairflare.methods.base import FairAggregator, Weighing
from fairflare.reporting.pictures import draw_pictures
from fairflare.reporting.results import LeftOut, PhaseRecord, ResultsStore, RoundRecord, read_results
from fairflare.reporting.table import fairness_table

if TYPE_CHECKING:
    from fairflare.tasks.base import Task

State = dict[str, torch.Tensor]
RESULTS_FOLDER = "fairflare"
MODEL_FILE = "FL_global_model.pt"
BEST_MODEL_FILE = "best_FL_global_model.pt"


class RoundFailed(RuntimeError):
    """The run cannot go on; the text says which round, which sites, and why."""


@dataclass
class _Phase:
    """One exchange in progress: who was asked, who answered, who is out and why."""

    name: str
    asked: list[str]
    good: dict[str, FLModel] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def silent(self) -> list[str]:
        return [s for s in self.asked if s not in self.good and s not in self.left_out]

    def record(self) -> PhaseRecord:
        return PhaseRecord(
            name=self.name,
            seconds=round(self.seconds, 4),
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
            asked=len(self.asked),
            answered=len(self.good),
        )


class RoundsController(ModelController):
    """Rounds for every method: ``train``, if need be ``anchor``, aggregate, checkpoint; ``validate`` at the end.

    Every phase asks an explicit list of sites and has a timeout. A site that fails, is silent, or reports nonsense is
    left out of that phase, by name, in log and results. Fewer than ``min_sites`` usable results end the job as failed.

    Args:
        task: what is learned; builds the initial model.
        aggregator: the method's server half.
        num_rounds: communication rounds, >= 1.
        min_sites: usable results a round needs, >= 1.
        seed: of the initial model and of every site's training.
        experiment: id under which checkpoint and site state outlive the job; empty: no resume.
        train_timeout, anchor_timeout, validate_timeout: seconds a phase may take, > 0.
        straggler_grace: seconds that late sites get once ``min_sites`` answered well; 0: the phase's whole timeout.
        max_missed: a site silent in so many phases running is not asked again until it shows up, >= 1.
        keep_local_models: leave each round's local models in the run directory (for audits; large).
        label: what tables call this run; default: the class of the aggregator.
        task_check_period: seconds between FLARE's looks at a task.
    """

    def __init__(
        self,
        task: Task,
        aggregator: FairAggregator,
        num_rounds: int = 5,
        min_sites: int = 1,
        seed: int = 0,
        experiment: str = "",
        train_timeout: float = 3600.0,
        anchor_timeout: float = 3600.0,
        validate_timeout: float = 3600.0,
        straggler_grace: float = 0.0,
        max_missed: int = 2,
        keep_local_models: bool = False,
        label: str = "",
        task_check_period: float = 0.05,
    ) -> None:
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=task_check_period)
        for name, value in (("num_rounds", num_rounds), ("min_sites", min_sites), ("max_missed", max_missed)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        timeouts = {
            "train_timeout": train_timeout,
            "anchor_timeout": anchor_timeout,
            "validate_timeout": validate_timeout,
        }
        for name, seconds in timeouts.items():
            if not seconds > 0:
                raise ValueError(f"{name} must be > 0 seconds (a site may never answer), got {seconds!r}")
        if not straggler_grace >= 0:
            raise ValueError(f"straggler_grace must be >= 0 seconds, got {straggler_grace!r}")
        if experiment:
            safe_name(experiment)
        if not isinstance(aggregator, FairAggregator):
            raise TypeError(f"aggregator must be a FairAggregator, got {type(aggregator).__name__}")
        self.task = task
        self.aggregator = aggregator
        self.num_rounds = num_rounds
        self.min_sites = min_sites
        self.seed = seed
        self.experiment = experiment
        self.train_timeout = train_timeout
        self.anchor_timeout = anchor_timeout
        self.validate_timeout = validate_timeout
        self.straggler_grace = straggler_grace
        self.max_missed = max_missed
        self.keep_local_models = keep_local_models
        self.label = label
        self.task_check_period = task_check_period
        self._missed: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._phase: _Phase | None = None
        self._best: float | None = None
        self._synthetic = False

    # -------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """The workflow; see the class."""
        self.fl_ctx.set_prop(AppConstants.NUM_ROUNDS, self.num_rounds, private=True, sticky=False)
        run_dir = Path(self.get_run_dir())
        store = ResultsStore(run_dir / RESULTS_FOLDER)
        try:
            first, state = self._start(run_dir, store)
            for current_round in range(first, self.num_rounds):
                next_state = self._round(current_round, state, run_dir, store)
                if next_state is None:
                    self._aborted(store)
                    return
                state = next_state
            self._finish(state, run_dir, store)
        except Exception as e:
            store.finish("failed", reason=str(e))
            self.error(str(e))
            raise

    def _start(self, run_dir: Path, store: ResultsStore) -> tuple[int, State]:
        """Initial or checkpointed model, and the first round to do."""
        settings = read_site_file(self.engine.get_workspace(), "server")
        self._tracker = Tracker(self)
        self.aggregator.min_sites = self.min_sites
        root = settings.get("checkpoint_root")
        if self.experiment:
            base = Path(root) if root else Path(self.engine.get_workspace().get_root_dir()) / "fairflare_checkpoints"
            self._checkpoints = CheckpointFolder(base / self.experiment)
        else:
            self._checkpoints = CheckpointFolder(run_dir / RESULTS_FOLDER / "checkpoint")
        self.aggregator.memory_folder = self._checkpoints.folder / "memory"
        config = self._config()
        torch.manual_seed(self.seed)
        model = self.task.build_model()
        self.info(self.task.initialise(model, settings.get("initial_weights")))
        state = clean_state(model.state_dict())
        first = 0
        found = self._checkpoints.load() if self.experiment else None
        sites = sorted(client.name for client in self.engine.get_clients())
        info = {
            "experiment": self.experiment,
            "job_id": self.fl_ctx.get_job_id(),
            "method": type(self.aggregator).__name__,
            "label": self.label or type(self.aggregator).__name__,
            "primary_metric": self.task.primary_metric,
            "shown_metrics": list(self.task.shown_metrics),
            "num_rounds": self.num_rounds,
            "min_sites": self.min_sites,
            "seed": self.seed,
            "sites": sites,
            "config": config,
            "model_parameters": sum(t.numel() for t in state.values() if t.is_floating_point()),
            "model_bytes": num_bytes(state),
            "versions": _versions(),
        }
        if found is not None:
            check_same_config(found.config, config, self.experiment)
            self.aggregator.load_state_dict(found.aggregator)
            self._best = found.extra.get("best")
            self._synthetic = bool(found.extra.get("synthetic"))
            check_state(found.model, state, "checkpoint")
            # The file sorts its names; everything that lists layers keeps the network's order.
            first, state = found.next_round, {name: found.model[name] for name in state}
            info["resumed_at_round"] = first
            self.info(f"experiment {self.experiment!r}: going on at round {first} of {self.num_rounds}")
        info["synthetic"] = self._synthetic
        store.start(info)
        if found is not None:
            store.load_state_dict(found.results)
        if not sites:
            raise RoundFailed("no site is connected")
        if len(sites) < self.min_sites:
            raise RoundFailed(
                f"{len(sites)} site(s) in the job ({', '.join(sites)}), min_sites={self.min_sites}; start more sites "
                "or lower min_sites"
            )
        return first, state

    def _round(self, current_round: int, state: State, run_dir: Path, store: ResultsStore) -> State | None:
        """One round; ``None`` after an abort."""
        self.fl_ctx.set_prop(AppConstants.CURRENT_ROUND, current_round, private=True, sticky=False)
        self.event(AppEventType.ROUND_STARTED)
        self.info(f"round {current_round + 1} of {self.num_rounds}")
        aggregator = self.aggregator
        staging = run_dir / RESULTS_FOLDER / "staging"
        record = RoundRecord(current_round=current_round, sites=self._live_sites())
        aggregator.begin_round(current_round, self.num_rounds, global_state=state, folder=staging, sites=record.sites)

        train = self._exchange(
            TASK_TRAIN, current_round, state, record.sites, self.train_timeout, store, aggregator.accept_model
        )
        if self.abort_signal.triggered:
            return None
        record.phases.append(train.record())
        record.accepted = list(aggregator.accepted)
        self._note_left_out(train, record)
        for site, reply in sorted(train.good.items()):
            self._note_training(site, reply, record)
            if not self._synthetic and (meta_of(reply).get("stats") or {}).get("synthetic"):
                self._synthetic = True
                store.update_info(synthetic=True)
                self.info("the data are SYNTHETIC (a phantom): the figures say nothing about patients")
        try:
            aggregator.require_quorum()
        except RuntimeError:
            raise RoundFailed(self._too_few(current_round, train)) from None

        if aggregator.two_phase and len(record.accepted) > 1:
            anchor = clean_state(aggregator.anchor_model())
            phase = self._exchange(
                TASK_ANCHOR,
                current_round,
                anchor,
                record.accepted,
                self.anchor_timeout,
                store,
                aggregator.accept_anchor,
            )
            if self.abort_signal.triggered:
                return None
            record.phases.append(phase.record())
            self._note_left_out(phase, record)

        self.event(AppEventType.BEFORE_AGGREGATION)
        started = time.monotonic()
        if aggregator.two_phase and len(record.accepted) == 1:
            # One model is its own average: every weight is 1 and there is nothing to ask.
            next_state = clean_state(aggregator.anchor_model())
            aggregator.last_weighing = Weighing(sites={record.accepted[0]: 1.0})
            result = FLModel(params=next_state)
        else:
            result = aggregator.aggregate_model()
            next_state = clean_state(result.params)
        record.phases.append(PhaseRecord("aggregate", round(time.monotonic() - started, 4), 0, 0, 0, 0))
        self.fire_event_with_data(AppEventType.AFTER_AGGREGATION, self.fl_ctx, AppConstants.AGGREGATION_RESULT, result)
        weighing = aggregator.last_weighing
        if weighing is not None:
            record.site_weights = weighing.sites
            record.layers = weighing.record or None
            record.reports = weighing.reports
            record.values = weighing.values
            record.details = weighing.details
        if self.keep_local_models:
            shutil.copytree(
                staging, run_dir / RESULTS_FOLDER / "local_models" / f"round_{current_round:04d}", dirs_exist_ok=True
            )
        aggregator.reset_stats()
        self._keep_best(current_round, state, record, run_dir)
        store.add_round(record)
        self._tracker.round(record, self.task.primary_metric)
        self._save_model(next_state, run_dir / MODEL_FILE, current_round)
        self._checkpoints.save(
            Checkpoint(
                next_round=current_round + 1,
                model=next_state,
                aggregator=aggregator.state_dict(),
                results=store.state_dict(),
                config=self._config(),
                extra={"best": self._best, "synthetic": self._synthetic},
            )
        )
        store.event("round_done", current_round=current_round, num_rounds=self.num_rounds)
        return next_state

    def _finish(self, state: State, run_dir: Path, store: ResultsStore) -> None:
        """Test split of every site, then the table."""
        phase = self._exchange(
            TASK_VALIDATE, self.num_rounds, state, self._live_sites(), self.validate_timeout, store, _check_validation
        )
        if self.abort_signal.triggered:
            self._aborted(store)
            return
        metric = self.task.primary_metric
        test = {site: dict(reply.metrics or {}) for site, reply in sorted(phase.good.items())}
        left_out = [LeftOut(site, TASK_VALIDATE, reason) for site, reason in sorted(phase.left_out.items())]
        for left in left_out:
            self.warning(f"validate: site {left.site!r} left out: {left.reason}")
        if len(test) < self.min_sites:
            raise RoundFailed(self._too_few(self.num_rounds, phase))
        names = sorted({name for values in test.values() for name in values})
        fairness: dict[str, Any] = {}
        for name in names:
            values = {site: by[name] for site, by in test.items() if name in by}
            if values:
                fairness[name] = summarize(values)
        self._save_model(state, run_dir / MODEL_FILE, self.num_rounds)
        store.finish("completed", test=test, fairness=fairness, phases=[phase.record()], left_out=left_out)
        self._tracker.test(test, metric, self.num_rounds)
        if not self.experiment and self.aggregator.memory_folder is not None:
            # Nobody can go on with this run, and the method's memory may be many models large.
            shutil.rmtree(self.aggregator.memory_folder, ignore_errors=True)
        results = read_results(store.folder)
        for line in draw_pictures(results, store.folder):
            self.info(line)
        self.info("fairness on the sites' test splits\n" + fairness_table(results))

    def _aborted(self, store: ResultsStore) -> None:
        reason = "the job was aborted (by an administrator, or because a site's process died or no site is left)"
        store.finish("failed", reason=reason)
        if self.fl_ctx.get_job_id() == SimulatorConstants.JOB_NAME:
            self.panic(reason)  # the simulator would end with exit code 0

    # -------------------------------------------------------------------------------------------- one exchange

    def _exchange(
        self,
        name: str,
        current_round: int,
        state: State,
        sites: list[str],
        timeout: float,
        store: ResultsStore,
        accept: Callable[[FLModel], None],
    ) -> _Phase:
        """Sends one task to ``sites`` and collects until all answered, the time is over or the grace has passed.

        ``accept`` takes a result out of memory as it arrives; it reports a refusal by raising or through the
        aggregator's ``rejected``.
        """
        phase = _Phase(name=name, asked=sorted(sites))
        self._phase = phase
        started = time.monotonic()
        if not phase.asked:
            return phase
        meta = {
            "version": __version__,
            "experiment": self.experiment,
            "seed": self.seed,
            "current_round": current_round,
            "num_rounds": self.num_rounds,
            "directives": self.aggregator.directives(current_round, self.num_rounds),
        }
        message = task_model(state, meta, current_round=current_round, num_rounds=self.num_rounds)
        phase.bytes_out = num_bytes(state) * len(phase.asked)
        store.event("phase", phase=name, current_round=current_round, num_rounds=self.num_rounds, sites=phase.asked)

        def received(reply: FLModel) -> bool:
            site = str((reply.meta or {}).get("client_name"))
            with phase.lock:
                if site not in phase.asked or site in phase.good or site in phase.left_out:
                    return False
                self._seen(site)
                phase.bytes_in += num_bytes(reply.params) if reply.params else 0
                try:
                    refusal = self._take(site, reply, accept)
                except Exception as e:
                    refusal = str(e)
                reply.params = None  # on disk now; memory must not grow with the number of sites
                if refusal:
                    phase.left_out[site] = refusal
                else:
                    phase.good[site] = reply
            seconds = round(time.monotonic() - started, 2)
            store.event(
                "site",
                phase=name,
                current_round=current_round,
                site=site,
                ok=not refusal,
                reason=refusal or "",
                metrics=dict(reply.metrics or {}),
                seconds=seconds,
            )
            return not refusal

        self.send_model(
            task_name=name, data=message, targets=phase.asked, timeout=math.ceil(timeout), callback=received
        )
        enough_since: float | None = None
        while self.get_num_standing_tasks():
            if self.abort_signal.triggered:
                return phase
            now = time.monotonic()
            if enough_since is None and len(phase.good) >= self.min_sites:
                enough_since = now
            graced = self.straggler_grace > 0 and enough_since is not None and now > enough_since + self.straggler_grace
            if graced or now > started + timeout:
                self.cancel_all_tasks()
                break
            time.sleep(min(self.task_check_period, 0.05))
        with phase.lock:
            phase.seconds = time.monotonic() - started
            self._phase = None
            waited = f"{phase.seconds:.1f} s"
            for site in phase.silent:
                reason = f"no answer within {waited}"
                phase.left_out[site] = reason
                store.event(
                    "site",
                    phase=name,
                    current_round=current_round,
                    site=site,
                    ok=False,
                    reason=reason,
                    metrics={},
                    seconds=round(phase.seconds, 2),
                )
                self._missed[site] = self._missed.get(site, 0) + 1
                if self._missed[site] >= self.max_missed and site not in self._dropped:
                    self._dropped.add(site)
                    self.warning(
                        f"site {site!r} was silent in {self._missed[site]} phases running and is not asked again until "
                        "it shows up"
                    )
        return phase

    def _take(self, site: str, reply: FLModel, accept: Callable[[FLModel], None]) -> str:
        """Checks and stores one answer; the reason when it cannot be used."""
        version = str(meta_of(reply).get("version", ""))
        if version.split(".")[:2] != __version__.split(".")[:2]:
            return f"site {site!r} answers with fairflare {version or 'unknown'}, the server has {__version__}"
        bad = _bad_metric(reply.metrics)
        if bad and meta_of(reply).get("status") == STATUS_OK:
            return f"site {site!r}: {bad}"
        accept(reply)
        return self.aggregator.rejected.get(site, "")

    def _accept_train_result(
        self, client_name: str, result: Shareable, fl_ctx: FLContext, is_unknown_task: bool = False
    ) -> bool:
        """Records error replies, which FLARE keeps from the callback; an error never ends the job here."""
        self.fl_ctx = fl_ctx
        code = result.get_return_code()
        if code and code != ReturnCode.OK:
            phase = self._phase
            if phase is not None and not is_unknown_task:
                with phase.lock:
                    if client_name in phase.asked and client_name not in phase.good:
                        phase.left_out[client_name] = f"site {client_name!r} answered {code}"
                        self._seen(client_name)
            self.warning(f"site {client_name!r} answered {code}")
            return False
        self.fl_ctx.set_prop(AppConstants.TRAINING_RESULT, result, private=True, sticky=False)
        return True

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A late answer: too late to be used, but the site is alive."""
        self._seen(client.name)
        self.info(f"site {client.name!r}: late answer to {task_name!r} is not used")

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.CLIENT_RECONNECTED:
            name = fl_ctx.get_prop(FLContextKey.RECONNECTED_CLIENT_NAME)
            if name:
                self._seen(str(name))

    def _seen(self, site: str) -> None:
        self._missed.pop(site, None)
        self._dropped.discard(site)

    def _live_sites(self) -> list[str]:
        """Sites of the job that are not dropped; all of them when that would leave too few."""
        known = sorted(client.name for client in self.engine.get_clients())
        live = [site for site in known if site not in self._dropped]
        return live if len(live) >= self.min_sites else known

    # -------------------------------------------------------------------------------------------- bookkeeping

    def _note_left_out(self, phase: _Phase, record: RoundRecord) -> None:
        for site, reason in sorted(phase.left_out.items()):
            record.left_out.append(LeftOut(site=site, phase=phase.name, reason=reason))
            self.warning(f"round {record.current_round}, {phase.name}: site {site!r} left out: {reason}")

    def _note_training(self, site: str, reply: FLModel, record: RoundRecord) -> None:
        meta = meta_of(reply)
        stats = dict(meta.get("stats") or {})
        record.validation = {
            **record.validation,
            site: {k: float(v) for k, v in (reply.metrics or {}).items()},
        }
        train: dict[str, Any] = {
            "loss": stats.get("train_loss"),
            "num_samples": meta.get("num_samples"),
            "num_steps": (reply.meta or {}).get("NUM_STEPS_CURRENT_ROUND"),
            "seconds": stats.get("seconds"),
        }
        record.train = {**record.train, site: train}

    def _too_few(self, current_round: int, phase: _Phase) -> str:
        reasons = "; ".join(
            reason if site in reason else f"{site}: {reason}" for site, reason in sorted(phase.left_out.items())
        )
        return (
            f"round {current_round}, {phase.name}: {len(phase.good)} usable result(s) of {len(phase.asked)} asked, "
            f"min_sites={self.min_sites}. Left out: {reasons or 'none'}"
        )

    def _keep_best(self, current_round: int, state: State, record: RoundRecord, run_dir: Path) -> None:
        """Keeps the model with the best mean validation metric (it was measured on the received model)."""
        values = [v[self.task.primary_metric] for v in record.validation.values() if self.task.primary_metric in v]
        if not values:
            return
        mean = sum(values) / len(values)
        if self._best is None or mean > self._best:
            self._best = mean
            self._save_model(state, run_dir / BEST_MODEL_FILE, current_round - 1)

    def _save_model(self, state: State, path: Path, current_round: int) -> None:
        """FLARE's own file layout, so that its tools and examples read it."""
        temporary = path.with_suffix(".tmp")
        torch.save(
            {"model": state, "train_conf": {"round": current_round, "method": type(self.aggregator).__name__}},
            temporary,
        )
        temporary.replace(path)

    def _config(self) -> dict[str, Any]:
        return {
            "num_rounds": self.num_rounds,
            "seed": self.seed,
            "aggregator": describe(self.aggregator),
            "task": describe(self.task),
            "training": self._site_half(),
        }

    def _site_half(self) -> Any:
        """The site half's settings as this job's client configuration has them; ``None`` when it is not here."""
        path = Path(self.get_app_dir()) / "config" / "config_fed_client.json"
        try:
            executors = json.loads(path.read_text(encoding="utf-8"))["executors"]
            return executors[0]["executor"]["args"]["training"]
        except (OSError, ValueError, LookupError, TypeError):
            return None


def describe(component: Any) -> dict[str, Any]:
    """Class path and constructor arguments, as plain values."""
    arguments: dict[str, Any] = {}
    for name in get_component_init_parameters(component):
        if name not in ("self", "args", "kwargs") and hasattr(component, name):
            value = getattr(component, name)
            arguments[name] = list(value) if isinstance(value, tuple) else value
    return {"path": f"{type(component).__module__}.{type(component).__name__}", "args": arguments}


def _check_validation(reply: FLModel) -> None:
    meta = meta_of(reply)
    if meta.get("status", STATUS_OK) != STATUS_OK:
        raise ValueError(str(meta.get("reason") or meta["status"]))


def _bad_metric(metrics: Mapping[str, Any] | None) -> str:
    for name, value in (metrics or {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"metric {name!r} must be a finite number, got {value!r}"
        if name.rpartition("/")[2] != "loss" and not 0.0 <= value <= 1.0:
            return f"metric {name!r} must lie in [0, 1], got {value!r}"
    return ""


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"fairflare": __version__, "python": platform.python_version()}
    for name in ("nvflare", "torch", "monai", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
