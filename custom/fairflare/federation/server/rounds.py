"""Run the rounds of every method: ``check`` first, ``validate`` last; each round has ``train``, maybe more phases.

The further phases of a round are ``anchor`` and ``norms``. How messages travel is a matter of
:class:`fairflare.federation.collecting.transport.Transport`. Every phase asks an explicit list of sites and has a
timeout. A site that fails, is silent, or sends an unusable answer is left out of that phase, and is named in log and
results. Fewer than ``min_sites`` usable answers, or a fault of the server itself, end the run as failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

from fairflare.base.task import Task
from fairflare.core.statistics.footing import name_structures
from fairflare.exchange.messages import (
    CHANNEL_DROP,
    COMPARED,
    PATCHWISE,
    TASK_ANCHOR,
    TASK_TRAIN,
    TASK_VALIDATE,
    BySite,
    Message,
    clean_state,
)
from fairflare.federation.collecting.collector import Collector, LikeReceived
from fairflare.federation.collecting.context import RunContext
from fairflare.federation.collecting.phase import Exchange, NobodyCould, Phase
from fairflare.federation.collecting.phase import RoundFailed as RoundFailed
from fairflare.federation.collecting.phase import Stopped as Stopped
from fairflare.federation.collecting.roster import Roster
from fairflare.federation.collecting.transport import Listener, Transport
from fairflare.federation.plan.run_settings import RESULTS_FOLDER, Place, RunSettings
from fairflare.federation.record.experiment import Experiment, writing
from fairflare.federation.record.journal import Journal
from fairflare.federation.record.models import model_files
from fairflare.federation.server.check import Check
from fairflare.federation.server.model_tests import ModelTests
from fairflare.federation.server.opening import Opening
from fairflare.federation.server.recalibration import Recalibration
from fairflare.federation.server.retraining import Retraining
from fairflare.federation.server.sums import SecureSums, SitesLost, SumLost
from fairflare.federation.site.replies import reasons
from fairflare.methods.base.rule import Rule, SendsBeside, SendsParts, State, TwoPhase, enter_run
from fairflare.reporting.results import PhaseRecord, RoundRecord

DROP = 0.25  # default of ``channel_drop`` where a site lacks a channel
T = TypeVar("T")


class Rounds:
    """Lead one run at the server: the check, all rounds, and the final test.

    Args:
        task: the task that is learned; it builds the initial model.
        rule: the method's server half.
        run: settings of the run.
        transport: sends messages to the sites.
        place: folders of the run.
        listeners: objects that are notified of the run's progress.
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
        self.results = place.run_dir / RESULTS_FOLDER
        self.journal = Journal(self.results, transport, listeners, task.primary_metric, apart=place.spares_memory(run))
        self.metrics = task.by_name()  # metrics of classes that the sites name are added by the check
        self.files = model_files(task, rule, run, place.run_dir, lambda: self.journal.info)
        self.bounds = run.bound_sums()
        self.roster = Roster(transport, run.max_missed, run.min_sites)
        self.retraining = Retraining(rule, run)
        self.asking = Exchange(run, transport, self.roster, run.straggler_grace, self.journal.tell)
        self.sums = SecureSums(run, self.asking, self.journal) if run.secure else None
        self.experiment = Experiment(
            run, place, self.retraining, self.journal, self.files, transport.say, self.sums.kept if self.sums else {}
        )
        enter_run(rule, self.experiment.memory, secure=bool(run.secure))
        self.check = Check(task, run, self.asking, self.journal, self.retraining, self.metrics)
        self.opening = Opening(
            task, rule, run, place, transport=transport, asking=self.asking, journal=self.journal, files=self.files,
            experiment=self.experiment, retraining=self.retraining, check=self.check,
        )  # fmt: skip
        self.recalibration = Recalibration(task, self.bounds, self.asking, self.journal, self.sums)
        self._went_back_from: set[int] = set()

    # -------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Run all rounds and the final test.

        Raises:
            Stopped: the job was stopped; the results record the run as failed.
            RoundFailed, ServerFault, ValueError: the run cannot continue; the results record the reason.
        """
        try:
            self.experiment.open()
            current_round, state, context = self.opening()
            self.make_collector(context)
            with closing(self.collector):
                while current_round < self.settings.rounds_in_all + 1:
                    try:
                        if current_round < self.settings.rounds_in_all:
                            state = self._round(current_round, state)
                        else:
                            self.finish(state)
                        current_round += 1
                    except NobodyCould as failed:
                        state = self._go_back(current_round, state, failed)
                        current_round -= 1
        except Exception as error:
            self.journal.record_failure(str(error), error.phase if isinstance(error, RoundFailed) else None)
            raise
        finally:
            self.experiment.close()

    def finish(self, state: State) -> None:
        """End the run with the final test."""
        self.tests.finish(state)

    def make_collector(self, context: RunContext) -> None:
        """Make what collects and tests models; it needs the network and what the sites reported in the check."""
        run, place = self.settings, self.place
        self.context = context
        self.collector = Collector(
            self.rule, self.results / "staging", self.bounds, run.seed, place.models_in_memory, self.metrics, self.sums,
            context,
        )  # fmt: skip
        if self.sums is not None:
            self.sums.learn_layout((context.rows, context.columns), self.collector.bound_weights)
        self.tests = ModelTests(
            self.task, run, place, context, ask=self._ask, asking=self.asking, roster=self.roster, journal=self.journal,
            files=self.files, check=self.check, sums=self.sums, staging=self.collector.staging,
        )  # fmt: skip

    def _go_back(self, current_round: int, state: State, failed: NobodyCould) -> State:
        """Restore the state before the last round, once for each round, and return its model.

        This needs an experiment id: without one no earlier model is saved, and the run ends.

        Raises:
            NobodyCould: no earlier state can be restored.
            RoundFailed: the run went back from this round before.
        """
        if current_round in self._went_back_from:
            raise RoundFailed(f"{failed} (going back one round did not help)") from failed
        self._went_back_from.add(current_round)
        before = self.experiment.go_back(current_round, state, str(failed)) if current_round > 0 else None
        if before is None:
            raise failed
        return before

    def _round(self, current_round: int, state: State) -> State:
        """Train at the sites, average what they send, record the round, and return the next round's model."""
        for listener in self.listeners:
            listener.round_started(current_round)
        run = self.settings
        self.transport.say(f"round {current_round} of {run.rounds_in_all}, from 0")
        record = RoundRecord(current_round=current_round, sites=self.roster.live(current_round))
        rule = self.retraining.rule_at(current_round)
        trained = self.retraining.start_round(state, current_round)
        self.collector.begin(
            current_round, run.num_rounds, shape=LikeReceived(trained, self.context.at_home.tensors), received=trained,
            sites=record.sites, rule=rule, num_sites=len({*self.journal.info["sites"], *self.roster.list_known()}),
        )  # fmt: skip
        no_key = {}
        asks_again = isinstance(rule, TwoPhase) and rule.asks_about_anchor(current_round)
        if self.sums is not None:
            no_key = self.sums.agree(current_round, record.sites, two=asks_again)
            record.sites = [site for site in record.sites if site in self.sums.agreed]
            summed = {name: tensor for name, tensor in trained.items() if name not in self.context.at_home.tensors}
            self.sums.begin(record, summed, self.context.parameters or frozenset())
        train = self._ask(TASK_TRAIN, current_round, state, record.sites, run.train_timeout, self._take_training)
        train.left_out |= self.roster.why_not(record.sites) | no_key
        train.good = self.context.footing.make_comparable(train.good)
        for site, reason in self.collector.screen().items():
            train.refuse(site, reason)
        record.accepted = self.collector.accepted
        self.journal.training(train, record)
        if len(record.accepted) < self.settings.min_sites:
            raise self.asking.too_few(train)
        before = {} if self.sums is None else self.retraining.state_dict()
        try:
            if asks_again and len(self.collector.labelled) > 1:
                self._ask_about_anchor(record)
            next_state = self._aggregate(record, state)
        except SumLost as lost:
            assert self.sums is not None
            self.retraining.load_state_dict(before)
            next_state, record.accepted, record.site_weights, record.layers = state, [], None, None
            self.sums.lose(lost, last=current_round + 1 == run.rounds_in_all)
        if self.settings.tests(current_round):
            self.tests.test_round(next_state, record)
        with writing(f"the results and models of round {current_round}", self.place.run_dir):
            # The sites have validated the model that they received, which is that of the round before.
            self.tests.keep_best(state, record.validation, current_round - 1)
            self.journal.round_done(record)
            self.files.save(next_state, current_round)
        self.experiment.save(current_round + 1, next_state)
        self.journal.tell(
            "round_done", current_round=current_round, num_rounds=run.rounds_in_all, metrics=record.validation,
            over=name_structures(self.tests.final_test.footing.how, self.tests.final_test.footing.shared),
        )  # fmt: skip
        return next_state

    def _ask_about_anchor(self, record: RoundRecord) -> None:
        """Run the ``anchor`` phase of a round, and free the anchor model's memory afterwards."""
        number, timeout = record.current_round, self.settings.anchor_timeout
        anchor = clean_state(self._try_with_fewer(record, self.collector.anchor_model))
        asked = self.collector.labelled  # sites without labels have no report
        sites = self.roster.willing(asked, TASK_ANCHOR, number)
        phase = self._ask(TASK_ANCHOR, number, anchor, sites, timeout, self._take_anchor_report)
        phase.left_out |= self.roster.why_not(sites, TASK_ANCHOR, asked)
        self.journal.record_left_out(phase, record)

    def _try_with_fewer(self, record: RoundRecord, make: Callable[[], T]) -> T:
        """Return the result of ``make``; with secure sums, call ``make`` again without the sites that were lost."""
        while True:
            before = {} if self.sums is None else self.retraining.state_dict()
            try:
                return make()
            except SitesLost as lost:
                self.retraining.load_state_dict(before)  # the rule weighs the remaining sites anew
                for site, reason in lost.args[0].items():
                    self.collector.drop(site, reason)
                record.accepted = self.collector.accepted
                if len(record.accepted) < self.settings.min_sites:
                    raise RoundFailed(f"round {record.current_round}: {reasons(lost.args[0].items())}") from lost

    def _aggregate(self, record: RoundRecord, received: State) -> State:
        """Return the average of what the sites sent, recalibrated where the run says so; record weights and seconds."""
        for listener in self.listeners:
            listener.before_aggregation()
        started = time.monotonic()
        state, weighing = self._try_with_fewer(record, self.collector.aggregate)
        next_state: State = clean_state({**received, **state})  # a round may train only some of the tensors
        self.retraining.remember(weighing, record.current_round)
        record.phases.append(PhaseRecord("aggregate", round(time.monotonic() - started, 4), 0, 0, 0, 0))
        self.journal.record_weights(
            weighing, record, self.collector.warnings,
            last=record.current_round == self.settings.num_rounds - 1 and self.retraining.own.weighs,
        )  # fmt: skip
        if self.collector.rule is self.retraining.own:
            # Only in the method's own rounds: in the classifier retraining after them the encoder is frozen.
            next_state = self.recalibration(next_state, record)
        for listener in self.listeners:
            listener.aggregated(next_state)
        if self.settings.keep_local_models:
            self.collector.staging.write_all(self.results / "local_models" / f"round_{record.current_round:04d}")
        self.collector.clear()
        return next_state

    # -------------------------------------------------------------------------------------------- exchanges

    def _ask(
        self, name: str, current_round: int, state: State, sites: list[str], timeout: float, use: Any, *,
        whole: bool = False, **task_of: Any,
    ) -> Phase:  # fmt: skip
        """Ask the sites for a task with the round's directives; ``use`` takes an answer, ``whole`` forbids patches."""
        rule = self.retraining.rule_at(current_round)
        directives = {**rule.directives(current_round, self.settings.num_rounds, sites), **self.journal.ledgers()}
        if self.journal.info.get("validation") and not whole:  # also where an earlier part of the run was validated so
            directives[PATCHWISE] = True
        if name == TASK_TRAIN and (self.settings.channel_drop or self.check.channel_owners):
            directives[CHANNEL_DROP] = DROP if self.settings.channel_drop is None else self.settings.channel_drop
        if name == TASK_VALIDATE and self.tests.final_test.footing.differs:
            directives[COMPARED] = BySite({site: self.tests.final_test.footing.list_compared(site) for site in sites})
        task_of["each"] = rule.each(state) if isinstance(rule, SendsParts) else None
        if name == TASK_TRAIN and isinstance(rule, SendsBeside):
            task_of["beside"] = dict(rule.beside())
        phase = self.asking(name, current_round, state, sites, timeout, use, directives=directives, **task_of)
        self.journal.record_spent(phase)
        return phase

    def _take_training(self, phase: Phase, site: str, message: Message) -> dict[str, float]:
        """Check a site's answer to ``train`` and store it; return its metrics of the received model."""
        training = self.collector.read_training(site, message)
        self.check.same_kind(site, training.stats["synthetic"])
        self.collector.keep(training)
        phase.trained[site] = training
        return training.metrics

    def _take_anchor_report(self, phase: Phase, site: str, message: Message) -> None:
        self.collector.keep_anchor(site, self.collector.read_anchor(site, message))
