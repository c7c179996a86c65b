"""Begin a run at the server: refuse what cannot work, make the first model, and learn from the check of all sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairflare.base.acting import idle, needs_of
from fairflare.base.own_errors import describe_error
from fairflare.base.site_data import UNLABELLED
from fairflare.base.task import Task, metric_name
from fairflare.core.aggregation.partial_slices import PartialSlices
from fairflare.core.features.adapting import products_of
from fairflare.federation.collecting.context import RunContext
from fairflare.federation.collecting.phase import Exchange
from fairflare.federation.collecting.transport import Transport
from fairflare.federation.plan.refusals import facts_of, refuse_run
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.plan.site_training import check_halves, training_of
from fairflare.federation.record.experiment import Experiment
from fairflare.federation.record.journal import Journal
from fairflare.federation.record.models import ModelFiles
from fairflare.federation.record.run_info import config_of, info_of
from fairflare.federation.server.check import Check, check_present
from fairflare.federation.server.first_model import FirstModel, first_model
from fairflare.federation.server.retraining import Retraining
from fairflare.federation.site.facts import CHANNELS
from fairflare.methods.base.rule import MakesTensors, Rule, State, TwoPhase
from fairflare.methods.fed_avg import WithoutReports
from fairflare.methods.parts.classifier_retraining import classifier_names
from fairflare.privacy.policy import LOTTERY, PRIVACY


class Opening:
    """Begin a run: its first model, the check of all sites, and what the server learns of both.

    Args:
        task, rule, run, place: what is learned, the method's server half, the run's settings and folders.
        transport, asking: carry tasks to the sites.
        journal, files, experiment: results, model files and checkpoints of the run.
        retraining: chooses the rule of each round.
        check: asks all sites for their data and settings.
    """

    def __init__(
        self, task: Task, rule: Rule, run: RunSettings, place: Place, *, transport: Transport, asking: Exchange,
        journal: Journal, files: ModelFiles, experiment: Experiment, retraining: Retraining, check: Check,
    ) -> None:  # fmt: skip
        self.task, self.rule, self.run, self.place = task, rule, run, place
        self.transport, self.asking, self.journal, self.files = transport, asking, journal, files
        self.experiment, self.retraining, self.check = experiment, retraining, check

    def __call__(self) -> tuple[int, State, RunContext]:
        """Return the first round to do, the initial or the checkpointed model, and what is known before that round.

        Raises:
            ValueError: parts of the run cannot be used together.
            RoundFailed: too few sites can take part, or their data do not fit together.
        """
        run, place = self.run, self.place
        check_halves(self.rule, place.site_half, run.norm_statistics)
        self.task.permit(place.settings)
        if (metric := self.task.primary_metric) != metric_name(metric):
            raise ValueError(f"primary_metric must be letters, digits, '_', '/', '.' or '-', got {metric!r:.80}")
        makes = self.rule.makes if isinstance(self.rule, MakesTensors) else ()
        first = first_model(self.task, run, place, makes)
        for text, warning in first.said:
            self.transport.say(text, warning=warning)
        run_facts = facts_of(
            run, self.rule, training_of(place.site_half), self.task, still_norm=next(iter(first.still), ""),
            headless=self.task.has_classes is False or not classifier_names(first.state),
        )  # fmt: skip
        refuse_run(run_facts)
        current_round, state = self._resume(first, makes)
        self.check.run(current_round)
        self._say_in_vain(first.facts)
        self._weigh_without_reports(run_facts)
        rows, columns = self._slices(first)
        return current_round, state, RunContext(
            reported=self.check.said, facts=self.check.facts, footing=self.check.footing, rows=rows, columns=columns,
            parameters=first.parameters, frozen=first.frozen, products=products_of(self.task), at_home=first.at_home,
        )  # fmt: skip

    def _resume(self, first: FirstModel, makes: tuple[str, ...]) -> tuple[int, State]:
        """Return the first round to do and its model; begin the results, and tell all tasks what travels."""
        run, place = self.run, self.place
        sites = sorted(self.transport.sites())
        config = config_of(run, place, self.rule, self.task)
        info = info_of(run, place, self.rule, self.task, sites, self.transport.expected(), config)
        info |= {
            "model_parameters": first.numbers, "model_bytes": first.nbytes, **first.note(run),
            "measured": first.at_home.measured,
        }  # fmt: skip
        self.files.noted = {**first.at_home.noted, **first.note(run)}
        begun = self.experiment.begin(first.state, config, info)
        self.asking.form.update(run=self.experiment.run_id, exchange=run.exchange, makes=makes, rest=first.rest)
        check_present(info["sites"], sites, run.min_sites, self.transport.say)
        return begun

    def _say_in_vain(self, network: Mapping[str, bool]) -> None:
        """Say which settings find nothing to act on, and that unlabelled images are not used, as far as it is known."""
        training, run, task, sizes = self.place.site_half, self.run, self.task, self.check.said.values()
        parts = [part for part in (training_of(training), run) if part is not None]
        warnings = list(idle(parts, sorted({name for part in parts for name in needs_of(type(part))}), {
            **network,
            "a site with images that lack labels, or the labels of some structures":
                any(UNLABELLED in size for size in sizes) or (task.consistency == "teacher" and self.check.annotators),
            "a primary metric that can be measured on drawn cases":
                task.primary.mean_of_images or type(task).resampled is not Task.resampled,
            "a site whose cases have several channels":
                any(len(report.get(CHANNELS, ())) > 1 for report in self.check.facts.values()),
            "a second round": run.num_rounds > 1,
            "a round of such a number before the last one": run.test_every < run.rounds_in_all,
        }))  # fmt: skip
        for text in warnings:
            self.journal.note(text, warning=True)
        self.journal.store.update_info(in_vain=warnings)
        if (
            (unused := sum(size.get(UNLABELLED, 0) for size in sizes))
            and training is not None
            and not training.get("args", {}).get("unlabelled")
        ):
            self.journal.note(f"{unused:.0f} unlabelled images lie unused; unlabelled=consistency learns from them")

    def _weigh_without_reports(self, run_facts: dict[str, Any]) -> None:
        """Use FedAvg in place of a rule if privacy noise makes its weights random, or a site withholds its reports."""
        rule, facts = self.rule, self.check.facts.items()
        # Fail now, before the method's rounds spend the budget.
        refuse_run(run_facts | {PRIVACY: ", ".join(site for site, report in facts if PRIVACY in report)})
        # No noise limits one patient's influence on the comparison with the anchor, so such a rule is always replaced.
        least = math.inf if isinstance(rule, TwoPhase) else float(getattr(rule, "noisy_from", LOTTERY))
        worth = {
            site: report[PRIVACY]["worth"]
            for site, report in facts
            if PRIVACY in report and report[PRIVACY]["worth"] < least
        }
        if worth and rule.weighs and (rule.report_fields or isinstance(rule, TwoPhase)):
            worths = ", ".join(
                f"{site} {f'has {n:.3g}' if n and least < math.inf else 'sends none'}" for site, n in worth.items()
            )
            needs = f" (weights are lots below {least:g} patients times epsilon)" * (least < math.inf)
            why = (
                f"{type(rule).__name__} falls back to FedAvg: of its reports under differential privacy {worths}{needs}"
            )
            fallback = WithoutReports()
            fallback.why = why
            self.retraining.own = fallback
            self.journal.note(why, warning=True)

    def _slices(self, first: FirstModel) -> list[PartialSlices]:
        """Return how to average output rows and input columns: over the sites that annotate, or have the channel."""
        annotators, channels = self.check.annotators, self.check.channel_owners
        trains, every = self.run.num_rounds, frozenset(self.check.facts)
        rows, columns = (
            PartialSlices(
                [name for name in tensors_of() if name not in first.at_home.tensors] if owners and trains else (),
                tuple(every.difference(sites) for sites in owners.values()),
                axis,
            )
            for axis, owners, tensors_of in (
                (0, annotators, self.task.output_tensors), (1, channels, self.input_tensors),
            )
        )  # fmt: skip
        partly = {name: sites for name, sites in annotators.items() if rows.tensors and len(sites) < len(every)}
        self.journal.store.update_info(output_rows=partly, channels=channels)
        if annotators and trains and not partly:
            self.transport.say("output rows are averaged over all sites, also those that do not annotate the structure")
        return [rows, columns]

    def input_tensors(self) -> Sequence[str]:
        """Return the names of the weights of the input's channels.

        Raises:
            ValueError: they are not known.
        """
        try:
            return self.task.input_tensors()
        except Exception as error:  # a user's network may raise any error
            raise ValueError(
                "a site lacks a channel, and the network's weights of each channel, which are averaged over the sites "
                f"that have it, are not known: {describe_error(error)}. Choose another network, or leave that site out"
            ) from error
