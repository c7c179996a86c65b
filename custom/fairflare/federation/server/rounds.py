"""Run the rounds of every method: ``check`` first, ``validate`` last; each round has ``train``, maybe more phases.

The further phases of a round are ``anchor`` and ``norms``. How messages travel is a matter of
:class:`fairflare.federation.collecting.transport.Transport`. Every phase asks an explicit list of sites and has a
timeout. A site that fails, is silent, or sends an unusable answer is left out of that phase, and is named in log and
results. Fewer than ``min_sites`` usable answers, or a fault of the server itself, end the run as failed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fairflare.base.acting import idle, needs_of
from fairflare.base.site_data import UNLABELLED
from fairflare.base.task import LOSS, Task, metric_name
from fairflare.core.aggregation.output_rows import OutputRows
from fairflare.core.features.adapting import products_of
from fairflare.core.statistics.footing import in_brackets
from fairflare.core.statistics.group_sums import shapes
from fairflare.exchange.messages import (
    COMPARED,
    PATCHWISE,
    TASK_ANCHOR,
    TASK_TRAIN,
    TASK_VALIDATE,
    BySite,
    Message,
    clean_state,
)
from fairflare.exchange.sent_tensors import ALL
from fairflare.federation.collecting.collector import Collector, LikeReceived
from fairflare.federation.collecting.final_test import BY_GROUP, SAID, FinalTest, Tested
from fairflare.federation.collecting.phase import Exchange, NobodyCould, Phase
from fairflare.federation.collecting.phase import RoundFailed as RoundFailed
from fairflare.federation.collecting.phase import Stopped as Stopped
from fairflare.federation.collecting.roster import Roster
from fairflare.federation.collecting.transport import Listener, Transport
from fairflare.federation.plan.refusals import facts_of, refuse
from fairflare.federation.plan.run_settings import RESULTS_FOLDER, Place, RunSettings
from fairflare.federation.plan.site_training import PERSONAL, AtHome, check_halves, training_of
from fairflare.federation.record.best_model import BestModel
from fairflare.federation.record.experiment import Experiment, writing
from fairflare.federation.record.journal import Journal
from fairflare.federation.record.models import ModelFiles
from fairflare.federation.record.run_info import config_of, info_of
from fairflare.federation.record.task_record import TaskRecorder
from fairflare.federation.server.check import Check, check_present
from fairflare.federation.server.first_model import first_model
from fairflare.federation.server.personalisation import own_models
from fairflare.federation.server.recalibration import Recalibration
from fairflare.federation.server.retraining import Retraining
from fairflare.federation.server.sums import SecureSums, SitesLost, SumLost
from fairflare.federation.site.replies import reasons
from fairflare.methods.base.rule import MakesTensors, Rule, SendsBeside, SendsParts, State, TwoPhase
from fairflare.methods.fed_avg import WithoutReports
from fairflare.methods.parts.classifier_retraining import of_classifier
from fairflare.privacy.policy import LOTTERY, PRIVACY
from fairflare.privacy.sums.exposure import Limits
from fairflare.reporting.global_test import global_test
from fairflare.reporting.groups import POOLED, by_group
from fairflare.reporting.results import LeftOut, PhaseRecord, RoundRecord

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
        folder, small = place.run_dir / RESULTS_FOLDER, place.apart and run.exchange != ALL
        self.journal = Journal(folder, transport, listeners, task.primary_metric, apart=small)
        self.metrics = task.by_name()  # metrics of classes that the sites name are added by the check
        best = BestModel(run, bool(self.metrics[task.primary_metric].higher_is_better))
        recorder = TaskRecorder(task, lambda: self.journal.info, folder)
        self.files = ModelFiles(place.run_dir, type(rule).__name__, best, recorder)
        bounds = replace(run, max_weight=Limits().max_weight) if run.secure and run.max_weight is None else run
        self.collector = Collector(rule, folder / "staging", bounds, run.seed, place.models_in_memory, self.metrics)
        self.roster = Roster(transport, run.max_missed, run.min_sites)
        self.retraining = Retraining(rule, run)
        self.experiment = Experiment(run, place, self.retraining, self.journal, self.files, transport.say)
        rule.memory_folder, rule.secure = self.experiment.memory, bool(run.secure)
        self.asking = Exchange(run, transport, self.roster, run.straggler_grace, self.journal.tell)
        parts = len(task.outcome_names())
        self.test = FinalTest(
            self._ask, self.roster, run, transport.say, self.metrics, task.primary_metric, parts, task.findings
        )
        self.check = Check(task, run, self.asking, self.journal, self.retraining, self.metrics)
        self.sums = self.collector.sums = SecureSums(run, self.asking, self.journal) if run.secure else None
        self.experiment.sums = self.sums.kept if self.sums is not None else {}
        self.at_home, self.network = AtHome(), dict[str, Any]()
        self.recalibration = Recalibration(task, bounds, self.asking, self.journal, self.sums)
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
            current_round, state = self._start()
            self.check.run(current_round)
            self.collector.said, self.test.facts = self.check.said, self.check.facts
            self._say_in_vain()
            self._weigh_without_reports()
            self.collector.footing = self.test.footing = self.check.footing
            self._average_rows()
            while current_round < self.settings.rounds_in_all + 1:
                try:
                    if current_round < self.settings.rounds_in_all:
                        state = self._round(current_round, state)
                    else:
                        self._finish(state)
                    current_round += 1
                except NobodyCould as failed:
                    state = self._go_back(current_round, state, failed)
                    current_round -= 1
        except Exception as error:
            self.journal.failed(str(error), error.phase if isinstance(error, RoundFailed) else None)
            raise
        finally:
            self.collector.clear()
            self.collector.staging.close()
            self.experiment.close()

    def _say_in_vain(self) -> None:
        """Say which settings find nothing to act on, and that unlabelled images are not used, as far as it is known."""
        half, run, task, said = self.place.site_half, self.settings, self.task, self.check.said.values()
        parts = [part for part in (training_of(half), run) if part is not None]
        found = list(idle(parts, sorted({name for part in parts for name in needs_of(type(part))}), {
            **self.network,
            "a site with images that lack labels, or the labels of some structures":
                any(UNLABELLED in of for of in said) or (task.consistency == "teacher" and self.check.annotators),
            "a primary metric that can be measured on drawn cases":
                task.primary.mean_of_images or type(task).resampled is not Task.resampled,
            "a second round": run.num_rounds > 1,
            "a round of such a number before the last one": run.test_every < run.rounds_in_all,
        }))  # fmt: skip
        for text in found:
            self.journal.note(text, warning=True)
        self.journal.store.update_info(in_vain=found)
        if (
            (unused := sum(of.get(UNLABELLED, 0) for of in said))
            and half is not None
            and not half.get("args", {}).get("unlabelled")
        ):
            self.journal.note(f"{unused:.0f} unlabelled images lie unused; unlabelled=consistency learns from them")

    def _weigh_without_reports(self) -> None:
        """Use FedAvg in place of a rule if privacy noise makes its weights random, or a site withholds its reports."""
        rule, own = self.rule, self.check.facts.items()
        # Fail now, before the method's rounds spend the budget.
        refuse(self.facts | {PRIVACY: ", ".join(site for site, said in own if PRIVACY in said)})
        # No noise limits one patient's influence on the comparison with the anchor, so such a rule is always replaced.
        least = math.inf if isinstance(rule, TwoPhase) else float(getattr(rule, "noisy_from", LOTTERY))
        worth = {
            site: said[PRIVACY]["worth"] for site, said in own if PRIVACY in said and said[PRIVACY]["worth"] < least
        }
        if worth and rule.weighs and (rule.report_fields or isinstance(rule, TwoPhase)):
            told = ", ".join(
                f"{site} {f'has {n:.3g}' if n and least < math.inf else 'sends none'}" for site, n in worth.items()
            )
            needs = f" (weights are lots below {least:g} patients times epsilon)" * (least < math.inf)
            why = f"{type(rule).__name__} falls back to FedAvg: of its reports under differential privacy {told}{needs}"
            self.retraining.own = fallback = WithoutReports()
            fallback.why = why
            self.journal.note(why, warning=True)

    def _average_rows(self) -> None:
        """Average output rows over the sites that annotate them, where sites annotate different structures."""
        annotators = self.check.annotators if self.settings.num_rounds else {}
        outputs = self.task.output_tensors() if annotators else ()
        tensors = [name for name in outputs if name not in self.at_home.tensors]
        every = frozenset(self.check.facts)
        self.collector.rows = OutputRows(tensors, tuple(every.difference(sites) for sites in annotators.values()))
        partly = {name: sites for name, sites in annotators.items() if tensors and len(sites) < len(every)}
        self.journal.store.update_info(output_rows=partly)
        if annotators and not partly:
            self.transport.say("output rows are averaged over all sites, also those that do not annotate the structure")

    def _start(self) -> tuple[int, State]:
        """Return the first round to do, and the initial or the checkpointed model."""
        run, place = self.settings, self.place
        check_halves(self.rule, place.site_half, run.norm_statistics)
        self.task.permit(place.settings)
        if (metric := self.task.primary_metric) != metric_name(metric):
            raise ValueError(f"primary_metric must be letters, digits, '_', '/', '.' or '-', got {metric!r:.80}")
        makes = self.rule.makes if isinstance(self.rule, MakesTensors) else ()
        first = first_model(self.task, run, place, makes)
        for text, warning in first.said:
            self.transport.say(text, warning=warning)
        state: State = first.state
        headless = self.task.has_classes is False or not of_classifier(state)
        still = next(iter(first.still), "")
        self.facts = facts_of(
            run, self.rule, training_of(place.site_half), self.task, headless=headless, still_norm=still
        )
        refuse(self.facts)
        self.collector.parameters, self.collector.frozen = first.parameters, first.frozen
        self.collector.products = products_of(self.task)
        sites = sorted(self.transport.sites())
        config = config_of(run, place, self.rule, self.task)
        info = info_of(run, place, self.rule, self.task, sites, self.transport.expected(), config)
        info |= {"model_parameters": first.numbers, "model_bytes": first.nbytes, **first.note(run)}
        self.at_home, self.network = first.at_home, first.facts
        info["measured"] = self.at_home.measured
        self.files.noted = {**self.at_home.noted, **first.note(run)}
        found = self.experiment.begin(state, config, info)
        self.asking.form.update(run=self.experiment.run_id, exchange=run.exchange, makes=makes, rest=first.rest)
        check_present(info["sites"], sites, run.min_sites, self.transport.say)
        return found

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
        for listener in self.listeners:
            listener.round_started(current_round)
        run = self.settings
        self.transport.say(f"round {current_round} of {run.rounds_in_all}, from 0")
        record = RoundRecord(current_round=current_round, sites=self.roster.live(current_round))
        rule = self.collector.rule = self.retraining.rule_at(current_round)
        trained = self.retraining.trained(state, current_round)
        self.collector.num_sites = len({*self.journal.info["sites"], *self.roster.known()})
        self.collector.begin(
            current_round, run.num_rounds, shape=LikeReceived(trained, self.at_home.tensors), received=trained,
            sites=record.sites,
        )  # fmt: skip
        no_key = {}
        asks_again = isinstance(rule, TwoPhase) and rule.asks_about_anchor(current_round)
        if self.sums is not None:
            no_key = self.sums.agree(current_round, record.sites, two=asks_again)
            record.sites = [site for site in record.sites if site in self.sums.agreed]
            makes, stay = rule.makes if isinstance(rule, MakesTensors) else (), self.at_home.tensors
            self.sums.begin(
                record,
                {name: own for name, own in trained.items() if name not in stay and not name.startswith(makes)},
                self.collector.parameters or frozenset(),
            )
        train = self._ask(TASK_TRAIN, current_round, state, record.sites, run.train_timeout, self._trained)
        train.left_out |= self.roster.why_not(record.sites) | no_key
        train.good = self.collector.footing.on_one(train.good)
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
            next_state = self._aggregate(record, state, train)
        except SumLost as lost:
            assert self.sums is not None
            self.retraining.load_state_dict(before)
            next_state, record.accepted, record.site_weights, record.layers = state, [], None, None
            self.sums.lose(lost, last=current_round + 1 == run.rounds_in_all)
        if self.settings.tests(current_round):
            tested = self.test(next_state, current_round + 1)  # a site that fails is left out of the test alone
            record.test = tested.test
            record.global_test = (self._of_all(next_state, current_round + 1, tested) or {}).get("metrics")
            record.phases += tested.phases
            record.left_out += tested.left_out
        with writing(f"the results and models of round {current_round}", self.place.run_dir):
            self._keep_best(state, record.validation, current_round - 1)
            self.journal.round_done(record)
            self.files.save(next_state, current_round)
        self.experiment.save(current_round + 1, next_state)
        self.journal.tell(
            "round_done", current_round=current_round, num_rounds=run.rounds_in_all, metrics=record.validation,
            over=in_brackets(self.test.footing.how, self.test.footing.shared),
        )  # fmt: skip
        return next_state

    def _ask_about_anchor(self, record: RoundRecord) -> None:
        """Run the ``anchor`` phase of a round, and free the anchor model's memory afterwards."""
        number, timeout = record.current_round, self.settings.anchor_timeout
        anchor = clean_state(self._with_fewer(record, self.collector.anchor_model))
        asked = self.collector.labelled  # sites without labels have no report
        sites = self.roster.willing(asked, TASK_ANCHOR, number)
        phase = self._ask(TASK_ANCHOR, number, anchor, sites, timeout, self._about_anchor)
        phase.left_out |= self.roster.why_not(sites, TASK_ANCHOR, asked)
        self.journal.left_out(phase, record)

    def _with_fewer(self, record: RoundRecord, make: Callable[[], T]) -> T:
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

    def _aggregate(self, record: RoundRecord, received: State, train: Phase) -> State:
        for listener in self.listeners:
            listener.before_aggregation()
        started = time.monotonic()
        state, weighing = self._with_fewer(record, self.collector.aggregate)
        next_state: State = clean_state({**received, **state})  # a round may train only some of the tensors
        self.retraining.remember(weighing, record.current_round)
        record.phases.append(PhaseRecord("aggregate", round(time.monotonic() - started, 4), 0, 0, 0, 0))
        self.journal.weighed(
            weighing, record, self.collector.warnings,
            last=record.current_round == self.settings.num_rounds - 1 and self.retraining.own.weighs,
        )  # fmt: skip
        if self.collector.rule is self.retraining.own:
            # Only in the method's own rounds: in the classifier retraining after them the encoder is frozen.
            next_state = self.recalibration(next_state, record)
        for listener in self.listeners:
            listener.aggregated(next_state)
        if self.settings.keep_local_models:
            folder = self.place.run_dir / RESULTS_FOLDER / "local_models"
            self.collector.staging.write_all(folder / f"round_{record.current_round:04d}")
        self.collector.clear()
        return next_state

    # -------------------------------------------------------------------------------------------- the end

    def _finish(self, state: State) -> None:
        """Test the last and the best model on every site's test split, and write the final models and results."""
        number = self.settings.rounds_in_all
        last = self.test(state, number, validation=True, resample=self.settings.bootstrap)
        last.of_all = self._of_all(state, number, last)
        if self.settings.groups:
            bins = self.settings.group_bins, self.settings.calibration_bins
            said, kept = last.said(BY_GROUP), last.groups_kept
            if self.sums is not None:
                record, has, said = RoundRecord(current_round=number), said, {}
                try:
                    said[POOLED], kept[POOLED] = self.sums.groups(record, state, has, shapes(self.test.parts, *bins))
                except RoundFailed as failed:  # the model and its other figures are available all the same
                    self.transport.say(f"groups: {failed}", warning=True)
                    record.left_out.append(LeftOut(POOLED, "groups", str(failed)))
                last.phases += record.phases
                last.of_sums = [LeftOut(left.site, "groups", left.reason) for left in record.left_out]
            last.groups = by_group(said, kept, *bins)
        metric = self.metrics[self.task.primary_metric]
        undefined = last.without(metric.name)
        if len(last.phase.good) - len(undefined) < self.settings.min_sites:
            for site in undefined:
                last.phase.refuse(site, f"site {site!r}: its {metric.name!r} is not finite")
            raise self.asking.too_few(last.phase)
        if number:  # else the model was given, and has a file already
            with writing("the final model", self.place.run_dir):
                self.files.save(state, number - 1)
                self._keep_best(state, last.validation, number - 1, last=True)
        best = self.files.best
        # The sites' own tensors from the best model's round are gone, so no site could test that model with them.
        of_best = (
            self.test(self.files.load_best(), number)
            if best.made not in (None, number - 1) and self.journal.info["measured"] != PERSONAL
            else None
        )
        last.personal = own_models(
            self.place.site_half, self.asking, self.test, self.collector.staging, metric, state, last
        )
        with writing("the final results", self.place.run_dir):
            self.journal.tested(last, best, of_best)

    def _of_all(self, state: State, number: int, tested: Tested) -> dict[str, Any] | None:
        """Return the common model's metrics on ``test_global``, the images that belong to no site alone.

        ``None`` if no site has such images.
        """
        if not (lists := self.check.global_lists):
            return None
        if self.at_home.own_everywhere:
            return {"metrics": {}, "reason": "no model is the same at all sites: each has parts, or one, of its own"}
        found, measured = self.test.of_all(state, number, lists)
        tested.phases += found.phases
        names = {name for name, metric in self.metrics.items() if metric.mean_of_images or name == LOSS.name}
        return global_test(
            found.test, found.said(SAID), measured, found.phase.left_out if len(measured) < len(lists) else {},
            self.journal.info, names, self.check.groups,
        )  # fmt: skip

    def _keep_best(self, state: State, validation: Any, made: int, *, last: bool = False) -> None:
        if self.files.keep_best(state, validation, self.task.primary_metric, made, last=last):
            self.journal.new_best(state, self.files.best)

    def _ask(
        self, name: str, current_round: int, state: State, sites: list[str], timeout: float, use: Any, **task_of: Any
    ) -> Phase:
        rule = self.retraining.rule_at(current_round)
        told = {**rule.directives(current_round, self.settings.num_rounds, sites), **self.journal.ledgers()}
        if self.journal.info.get("validation"):  # also where an earlier part of the run was validated so
            told[PATCHWISE] = True
        if name == TASK_VALIDATE and self.test.footing.differs:
            told[COMPARED] = BySite({site: self.test.footing.compared(site) for site in sites})
        task_of["each"] = rule.each(state) if isinstance(rule, SendsParts) else None
        if name == TASK_TRAIN and isinstance(rule, SendsBeside):
            task_of["beside"] = dict(rule.beside())
        phase = self.asking(name, current_round, state, sites, timeout, use, directives=told, **task_of)
        self.journal.spent(phase)
        return phase

    def _trained(self, phase: Phase, site: str, message: Message) -> dict[str, float]:
        training = self.collector.read_training(site, message)
        self.check.same_kind(site, training.stats["synthetic"])
        self.collector.keep(training)
        phase.trained[site] = training
        return training.metrics

    def _about_anchor(self, phase: Phase, site: str, message: Message) -> dict[str, float]:
        self.collector.keep_anchor(site, self.collector.read_anchor(site, message))
        return {}
