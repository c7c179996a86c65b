"""Test models at the sites: after a round, and at the end of a run, whose final models and results are then written."""

from __future__ import annotations

from typing import Any

from fairflare.base.task import LOSS, Task
from fairflare.core.cells import Cell
from fairflare.core.statistics.group_sums import shapes
from fairflare.exchange.staging import Staging
from fairflare.federation.collecting.context import RunContext
from fairflare.federation.collecting.final_test import BY_GROUP, SAID, Ask, FinalTest, Tested
from fairflare.federation.collecting.phase import Exchange, RoundFailed
from fairflare.federation.collecting.roster import Roster
from fairflare.federation.plan.run_settings import Place, RunSettings
from fairflare.federation.plan.site_training import PERSONAL
from fairflare.federation.record.experiment import writing
from fairflare.federation.record.journal import Journal
from fairflare.federation.record.models import ModelFiles
from fairflare.federation.server.check import Check
from fairflare.federation.server.personalisation import own_models
from fairflare.federation.server.sums import SecureSums
from fairflare.methods.base.rule import State
from fairflare.reporting.global_test import global_test
from fairflare.reporting.groups import POOLED, summarise_groups
from fairflare.reporting.results import LeftOut, RoundRecord


class ModelTests:
    """Test models at every site, and on the images that belong to no site alone.

    Args:
        task, run, place: what is learned, the run's settings and folders.
        context: what is known of the sites.
        ask: performs one exchange with the sites, with the directives of the round's rule.
        asking, roster: perform exchanges without these; the sites of the job.
        journal, files: results and model files.
        check: has what the sites said before the first round.
        sums: opens sums of groups of people; ``None`` without secure sums.
        staging: place where the sites' own models wait for their tests.
    """

    def __init__(
        self, task: Task, run: RunSettings, place: Place, context: RunContext, *, ask: Ask, asking: Exchange,
        roster: Roster, journal: Journal, files: ModelFiles, check: Check, sums: SecureSums | None, staging: Staging,
    ) -> None:  # fmt: skip
        self.task, self.run, self.place, self.context = task, run, place, context
        self.asking, self.journal, self.files, self.check = asking, journal, files, check
        self.sums, self.staging = sums, staging
        self.final_test = FinalTest(
            ask, roster, run, asking.transport.say, check.metrics, task.primary_metric, len(task.outcome_names()),
            task.findings, context,
        )  # fmt: skip

    def test_round(self, state: State, record: RoundRecord) -> None:
        """Test the model that a round has made, and record the figures; a site that fails misses this test alone."""
        tested = self.final_test(state, record.current_round + 1)
        record.test = tested.test
        of_all = self.test_globally(state, record.current_round + 1, tested)
        record.global_test = {cell.metric: cell.counted for cell in of_all[0]} if of_all else None
        record.phases += tested.phases
        record.left_out += tested.left_out

    def finish(self, state: State) -> None:
        """Test the last and the best model on every site's test split, and write the final models and results."""
        number = self.run.rounds_in_all
        last = self.final_test(state, number, validation=True, resample=self.run.bootstrap)
        last.of_all = self.test_globally(state, number, last)
        if self.run.groups:
            self._add_groups(last, state)
        metric = self.check.metrics[self.task.primary_metric]
        undefined = last.list_undefined(metric.name)
        if len(last.phase.good) - len(undefined) < self.run.min_sites:
            for site in undefined:
                last.phase.refuse(site, f"site {site!r}: its {metric.name!r} is not finite")
            raise self.asking.too_few(last.phase)
        if number:  # else the model was given, and has a file already
            with writing("the final model", self.place.run_dir):
                self.files.save(state, number - 1)
                self.keep_best(state, last.validation, number - 1, last=True)
        best, patches = self.files.best, bool(self.journal.info.get("validation"))
        is_last = best.made == number - 1
        # The sites' own tensors from the best model's round are gone, so no site could test that model with them.
        gone = best.made is None or (not is_last and self.journal.info["measured"] == PERSONAL)
        of_best = (
            self.final_test(state if is_last else self.files.load_best(), number, validation=patches, whole=patches)
            if not gone and (patches or not is_last)
            else None
        )
        last.personal = own_models(
            self.place.site_half, self.asking, self.final_test, self.staging, metric, state, last
        )
        with writing("the final results", self.place.run_dir):
            self.journal.record_test(last, best, of_best)

    def _add_groups(self, last: Tested, state: State) -> None:
        """Add the figures of groups of people; with secure sums those over all sites are opened as sums."""
        numbers, withheld = last.collect(BY_GROUP), last.withheld_groups()
        if self.sums is not None:
            record, has, numbers = RoundRecord(current_round=self.run.rounds_in_all), numbers, {}
            form = shapes(self.final_test.parts, self.run.group_bins, self.run.calibration_bins)
            try:
                numbers[POOLED], withheld[POOLED] = self.sums.groups(record, state, has, form)
            except RoundFailed as failed:  # the model and its other figures are available all the same
                self.asking.transport.say(f"groups: {failed}", warning=True)
                record.left_out.append(LeftOut(POOLED, "groups", str(failed)))
            last.phases += record.phases
            last.of_sums = [LeftOut(left.site, "groups", left.reason) for left in record.left_out]
        last.groups = summarise_groups(numbers, withheld)

    def test_globally(self, state: State, number: int, tested: Tested) -> tuple[list[Cell], dict[str, Any]] | None:
        """Return the common model's metrics on ``test_global``, the images that belong to no site alone.

        ``None`` if no site has such images.
        """
        if not (lists := self.check.global_lists):
            return None
        if self.context.at_home.own_everywhere:
            return [], {"reason": "no model is the same at all sites: each has parts, or one, of its own"}
        common, measured = self.final_test.test_globally(state, number, lists)
        tested.phases += common.phases
        names = {name for name, metric in self.check.metrics.items() if metric.mean_of_images or name == LOSS.name}
        return global_test(
            common.test, common.collect(SAID), measured, common.phase.left_out if len(measured) < len(lists) else {},
            self.journal.info, names, self.check.groups,
        )  # fmt: skip

    def keep_best(self, state: State, validation: Any, number: int, *, last: bool = False) -> None:
        """Keep a model if it is the best so far; ``number``: the round that made it, -1 for the initial model."""
        if self.files.keep_best(state, validation, self.task.primary_metric, number, last=last):
            self.journal.new_best(state, self.files.best)
