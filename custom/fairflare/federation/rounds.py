"""Rounds for every method: ``train``, if need be ``anchor``, aggregate, checkpoint; ``validate`` at the end.

Nothing here knows how messages travel; see :class:`fairflare.federation.transport.Transport`. Every phase asks an
explicit list of sites and has a timeout. A site that fails, is silent, or reports nonsense is left out of that phase,
by name, in log and results. Fewer than ``min_sites`` usable results end the run as failed, and so does a fault of the
server itself.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fairflare import __version__
from fairflare.core.settings import values_of
from fairflare.core.states import check_state
from fairflare.exchange.messages import (
    TASK_ANCHOR,
    TASK_TRAIN,
    TASK_VALIDATE,
    Message,
    SiteTask,
    clean_state,
    encode_task,
    num_bytes,
)
from fairflare.federation.checkpoint import Checkpoint, CheckpointFolder, check_same_config
from fairflare.federation.collector import Collector, LikeReceived, read_head, read_metrics, reasons
from fairflare.federation.journal import Journal
from fairflare.federation.models import ModelFiles
from fairflare.federation.phase import Exchange, Phase, Roster
from fairflare.federation.run_settings import RESULTS_FOLDER, Place, RunSettings
from fairflare.federation.transport import Listener, Transport
from fairflare.methods.rule import Rule, State
from fairflare.reporting.results import PhaseRecord, RoundRecord

if TYPE_CHECKING:
    from fairflare.core.task import Task


class RoundFailed(RuntimeError):
    """The run cannot go on; the text says which round, which sites, and why."""


class Stopped(Exception):
    """The run was told to stop."""


class Rounds:
    """One run.

    Args:
        task: what is learned; builds the initial model.
        rule: the method's server half.
        run: settings.
        transport: to the sites.
        place: folders.
        listeners: are told how it goes.
    """

    def __init__(
        self,
        task: Task,
        rule: Rule,
        run: RunSettings,
        transport: Transport,
        place: Place,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.task, self.rule, self.settings = task, rule, run
        self.transport, self.place, self.listeners = transport, place, list(listeners)
        self.journal = Journal(place.run_dir / RESULTS_FOLDER, transport, listeners, task.primary_metric)
        self.files = ModelFiles(place.run_dir, type(rule).__name__)
        self.collector = Collector(rule, place.run_dir / RESULTS_FOLDER / "staging")
        self.roster = Roster(transport, run.max_missed, run.min_sites)
        self.exchange = Exchange(transport, self.roster, run.min_sites, run.straggler_grace, self.journal.tell)
        self.checkpoints = CheckpointFolder(place.experiments / run.experiment) if run.experiment else None
        kept = self.checkpoints.folder if self.checkpoints else place.run_dir / RESULTS_FOLDER
        self.rule.memory_folder = kept / "memory"
        self._config: dict[str, Any] = {}

    # -------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """All rounds and the final test.

        Raises:
            Stopped: the transport said so; the results say failed.
            RoundFailed, ServerFault, ValueError: the run cannot go on; the results say why.
        """
        try:
            first, state = self._start()
            for current_round in range(first, self.settings.num_rounds):
                state = self._round(current_round, state)
            self._finish(state)
        except Exception as error:
            self.journal.failed(str(error))
            raise
        finally:
            self.collector.clear()
            if self.checkpoints is None and self.rule.memory_folder is not None:
                # Nobody can go on with this run, and the rule's memory may be many models large.
                shutil.rmtree(self.rule.memory_folder, ignore_errors=True)

    def _start(self) -> tuple[int, State]:
        """Initial or checkpointed model, and the first round to do."""
        run, place = self.settings, self.place
        torch.manual_seed(run.seed)
        model = self.task.build_model()
        self.transport.say(self.task.initialise(model, place.settings.get("initial_weights")))
        state: State = clean_state(model.state_dict())
        sites = sorted(self.transport.sites())
        self._config = {
            "num_rounds": run.num_rounds,
            "seed": run.seed,
            "rule": values_of(self.rule),
            "task": values_of(self.task),
            "training": place.site_half,
        }
        info = self._info(state, sites)
        found = self.checkpoints.load() if self.checkpoints is not None else None
        first = 0
        if found is not None:
            first, state = self._resume(found, state, info)
        info["synthetic"] = self.journal.synthetic
        self.journal.store.start(info)
        if found is not None:
            self.journal.store.load_state_dict(found.results)
        if not sites:
            raise RoundFailed("no site is connected")
        if len(sites) < run.min_sites:
            raise RoundFailed(
                f"{len(sites)} site(s) in the job ({', '.join(sites)}), min_sites={run.min_sites}; start more sites "
                "or lower min_sites"
            )
        return first, state

    def _resume(self, found: Checkpoint, state: State, info: dict[str, Any]) -> tuple[int, State]:
        check_same_config(found.config, self._config, self.settings.experiment)
        self.rule.load_state_dict(found.rule)
        self.files.best = found.extra.get("best")
        self.journal.synthetic = bool(found.extra.get("synthetic"))
        check_state(found.model, state, "checkpoint")
        info["resumed_at_round"] = found.next_round
        self.transport.say(
            f"experiment {self.settings.experiment!r}: going on at round {found.next_round} of "
            f"{self.settings.num_rounds}"
        )
        # The file sorts its names; everything that lists layers keeps the network's order.
        return found.next_round, {name: found.model[name] for name in state}

    def _info(self, state: State, sites: list[str]) -> dict[str, Any]:
        method = type(self.rule).__name__
        return {
            "experiment": self.settings.experiment,
            "job_id": self.place.job_id,
            "method": method,
            "label": self.settings.label or method,
            "primary_metric": self.task.primary_metric,
            "shown_metrics": list(self.task.shown_metrics),
            "num_rounds": self.settings.num_rounds,
            "min_sites": self.settings.min_sites,
            "seed": self.settings.seed,
            "sites": sites,
            "config": self._config,
            "model_parameters": sum(t.numel() for t in state.values() if t.is_floating_point()),
            "model_bytes": num_bytes(state),
            "versions": versions(),
        }

    # -------------------------------------------------------------------------------------------- one round

    def _round(self, current_round: int, state: State) -> State:
        for listener in self.listeners:
            listener.round_started(current_round)
        self.transport.say(f"round {current_round + 1} of {self.settings.num_rounds}")
        record = RoundRecord(current_round=current_round, sites=self.roster.live())
        self.collector.begin(
            current_round, self.settings.num_rounds, shape=LikeReceived(state), received=state, sites=record.sites
        )
        train = self._ask(TASK_TRAIN, current_round, state, record.sites, self.settings.train_timeout, self._trained)
        for site, reason in self.collector.screen().items():
            train.refuse(site, reason)
        self._note_left_out(train)
        record.accepted = self.collector.accepted
        self.journal.training(train, record)
        if len(record.accepted) < self.settings.min_sites:
            raise RoundFailed(self._too_few(train))
        if self.rule.two_phase and len(record.accepted) > 1:
            self._ask_about_anchor(record)
        next_state = self._aggregate(record)
        self.files.keep_best(state, record.validation, self.task.primary_metric, current_round - 1)
        self.journal.round_done(record)
        self.files.save(next_state, current_round)
        self._checkpoint(current_round + 1, next_state)
        self.journal.tell("round_done", current_round=current_round, num_rounds=self.settings.num_rounds)
        return next_state

    def _ask_about_anchor(self, record: RoundRecord) -> None:
        """The second phase; the anchor's memory is free again afterwards."""
        anchor = clean_state(self.collector.anchor_model())
        timeout = self.settings.anchor_timeout
        phase = self._ask(TASK_ANCHOR, record.current_round, anchor, record.accepted, timeout, self._about_anchor)
        self._note_left_out(phase)
        self.journal.left_out(phase, record)

    def _aggregate(self, record: RoundRecord) -> State:
        for listener in self.listeners:
            listener.before_aggregation()
        started = time.monotonic()
        state, weighing = self.collector.aggregate()
        next_state: State = clean_state(state)
        record.phases.append(PhaseRecord("aggregate", round(time.monotonic() - started, 4), 0, 0, 0, 0))
        for listener in self.listeners:
            listener.aggregated(next_state)
        self.journal.weighed(weighing, record)
        if self.settings.keep_local_models:
            kept = self.place.run_dir / RESULTS_FOLDER / "local_models" / f"round_{record.current_round:04d}"
            shutil.copytree(self.collector.staging.folder, kept, dirs_exist_ok=True)
        self.collector.clear()
        return next_state

    def _checkpoint(self, next_round: int, state: State) -> None:
        if self.checkpoints is None:
            return
        self.checkpoints.save(
            Checkpoint(
                next_round=next_round,
                model=dict(state),
                rule=self.rule.state_dict(),
                results=self.journal.store.state_dict(),
                config=self._config,
                extra={"best": self.files.best, "synthetic": self.journal.synthetic},
            )
        )

    # -------------------------------------------------------------------------------------------- the end

    def _finish(self, state: State) -> None:
        """Test split of every site, and the summary over them."""
        number = self.settings.num_rounds
        phase = self._ask(
            TASK_VALIDATE, number, state, self.roster.live(), self.settings.validate_timeout, self._validated
        )
        if len(phase.good) < self.settings.min_sites:
            raise RoundFailed(self._too_few(phase))
        self.files.save(state, number)
        self.journal.tested(phase)

    # -------------------------------------------------------------------------------------------- one exchange

    def _ask(self, name: str, current_round: int, state: State, sites: list[str], timeout: float, use: Any) -> Phase:
        task = encode_task(
            SiteTask(
                name=name,
                state=dict(state),
                current_round=current_round,
                num_rounds=self.settings.num_rounds,
                seed=self.settings.seed,
                directives=self.rule.directives(current_round, self.settings.num_rounds, sites),
                experiment=self.settings.experiment,
                by_site=self.rule.directives_by_site,
            )
        )
        phase = Phase(name, current_round, sorted(sites))
        self.exchange.run(phase, task, timeout, self.settings.num_rounds, use)
        if self.transport.stopped():
            raise Stopped(
                "the job was aborted (by an administrator, or because a site's process died or no site is left)"
            )
        return phase

    def _trained(self, phase: Phase, site: str, message: Message) -> dict[str, float]:
        training = self.collector.read_training(site, message)
        self.collector.keep(training)
        phase.trained[site] = training
        return training.metrics

    def _about_anchor(self, phase: Phase, site: str, message: Message) -> dict[str, float]:
        self.collector.keep_anchor(site, self.collector.read_anchor(site, message))
        return {}

    def _validated(self, phase: Phase, site: str, message: Message) -> dict[str, float]:
        read_head(site, message, phase.current_round)
        return read_metrics(site, message.metrics)

    def _note_left_out(self, phase: Phase) -> None:
        for site, reason in phase.left_out.items():
            self.collector.reject(site, reason)

    def _too_few(self, phase: Phase) -> str:
        return (
            f"round {phase.current_round}, {phase.name}: {len(phase.good)} usable result(s) of {len(phase.asked)} "
            f"asked, min_sites={self.settings.min_sites}. Left out: {reasons(phase.left_out.items()) or 'none'}"
        )


def versions() -> dict[str, str]:
    """Of this package, Python and what the results depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"fairflare": __version__, "python": platform.python_version()}
    for name in ("nvflare", "torch", "monai", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
