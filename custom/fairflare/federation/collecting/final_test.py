"""Test a model on the sites' test splits: ask every site, and ask sites that failed or were silent once more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fairflare.base.aspect import GROUPS
from fairflare.base.cases.resampling import IMAGES, UNITS
from fairflare.base.checks import group_by_key, list_names, printable, refuse_if
from fairflare.base.task import SPLIT_GLOBAL, Metric
from fairflare.core.cells import SUPPRESSED, VALIDATION, Cell, Vector, values_of
from fairflare.core.statistics.footing import ADJUSTED, OWN, Footing
from fairflare.core.statistics.group_sums import shapes
from fairflare.exchange.messages import SPLIT_TEST, SPLIT_VALIDATION, TASK_VALIDATE, Message
from fairflare.federation.collecting.context import UNKNOWN, RunContext
from fairflare.federation.collecting.phase import Phase
from fairflare.federation.collecting.roster import Roster
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.site.clinical import read_clinical
from fairflare.federation.site.groups import IN_GROUPS, NAMES, read_groups, read_kept
from fairflare.federation.site.replies import (
    COUNTS,
    DRAWN_UNITS,
    NUM_UNITS,
    OF_TEST,
    RESAMPLED,
    list_suppressed,
    read_head,
    read_metrics,
    read_stats,
)
from fairflare.federation.site.sampling import read_sampling
from fairflare.methods.base.reports import read_report
from fairflare.reporting.documents import LeftOut, PhaseRecord

BY_GROUP = "by_group"  # key that the server adds to a reply's stats: sums by group of people
CLINICAL = "clinical"  # key that the server adds to a reply's stats: a classifier's clinical figures
CELLS = "cells"  # key that the server adds to a reply's stats: the reply's metrics as cells
SAID = "sampling"  # key that the server adds to a reply's stats: the reply's fields about chance, in one mapping
NOTHING: Mapping[str, Any] = {"images": {}}
AGAIN = 30.0  # least timeout, in seconds, of sites that are asked again: a site that restarts is back by then

Ask = Callable[..., Phase]


@dataclass
class Tested:
    """Hold the sites' answers to the test of one model.

    Attributes:
        phase: the test's two exchanges in one: the sites that answered, and why the other sites are left out.
        validation: ``{site: {metric: value}}`` on the validation split, where the test included that split.
        phases: a record of each exchange, for the results.
        of_all: the global test (:func:`fairflare.reporting.global_test.global_test`); ``None`` if there is none.
        personal: gains of the models that sites fine-tuned for themselves; ``None`` if there are none.
        groups: metrics by group of people (:func:`fairflare.reporting.groups.summarise_groups`), if asked for.
        footing: describes which structures of which sites are compared.
        of_sums: sites left out only of the secure sums by group, with the reasons.
    """

    phase: Phase
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    phases: list[PhaseRecord] = field(default_factory=list)
    of_all: tuple[list[Cell], dict[str, Any]] | None = None
    groups: tuple[list[Cell], list[Vector]] | None = None
    footing: Footing = field(default_factory=lambda: Footing({}))
    personal: dict[str, Any] | None = None
    of_sums: list[LeftOut] = field(default_factory=list)

    @property
    def test(self) -> dict[str, dict[str, float]]:
        """Return the test metrics, ``{site: {metric: value}}``; NaN if the site measured a value that is not finite."""
        return {site: dict(values) for site, values in sorted(self.phase.good.items())}

    @property
    def left_out(self) -> list[LeftOut]:
        """Return the sites that are left out of the test, with the reasons."""
        return [LeftOut(site, TASK_VALIDATE, reason) for site, reason in sorted(self.phase.left_out.items())]

    def collect(self, name: str) -> dict[str, Any]:
        """Return one field of the sites' answers, by site, without the sites whose answer lacks it.

        Args:
            name: the field. ``RESAMPLED``: the primary metric on draws of the test patients or images; ``SAID``: how
                far chance moves the site's figures; ``BY_GROUP``: ``{"<attribute>=<group>": sums}``; ``CLINICAL``:
                clinical figures.
        """
        return {site: value for site in sorted(self.phase.good) if (value := self.phase.stats[site][name]) is not None}

    def withheld(self) -> dict[str, list[str]]:
        """Return the names of the test metrics that a site withholds, ``{site: names}``, where it withholds any."""
        return group_by_key(
            (cell.site, cell.name)
            for site in sorted(self.phase.good)
            for cell in self.phase.stats[site][CELLS]
            if cell.reason == SUPPRESSED and cell.split != VALIDATION
        )

    def withheld_groups(self) -> dict[str, list[str]]:
        """Return the names of groups of people, and of classes in them, that a site withholds, where it does so."""
        return {
            site: names
            for site in sorted(self.phase.good)
            if (names := list_suppressed(self.phase.stats[site], IN_GROUPS))
        }

    def collect_draws(self, metric: str) -> list[Vector]:
        """Return the primary metric on draws of each site's test cases, with what was drawn (such as patients)."""
        units, counts = self.collect(DRAWN_UNITS), self.collect(NUM_UNITS)
        return [
            Vector(metric, site, unit=units.get(site, IMAGES), count=(site in counts and int(counts[site])) or None,
                   values=tuple(values))
            for site, values in self.collect(RESAMPLED).items()
        ]  # fmt: skip

    def list_undefined(self, metric: str) -> list[str]:
        """Return the sites that answered and whose value of ``metric`` is not finite, sorted."""
        return sorted(
            site
            for site, figures in self.phase.good.items()
            if math.isnan(figures.get(OWN + metric, figures.get(metric, 0.0)))
        )


class FinalTest:
    """Test a model at every site of the job, also at sites that were dropped during training.

    Args:
        ask: function that performs one exchange with the sites, with the directives of the round's rule.
        roster, run: the sites of the job; the run's settings, among them the timeout.
        say: writes a line to the server's log.
        metrics, primary: the metrics that sites may measure, by name; the name of the primary one.
        parts: number of classes or structures, where the task has outcomes of single images.
        findings: names of the findings, where the task has any.
        context: what is known of the sites.
    """

    def __init__(
        self,
        ask: Ask,
        roster: Roster,
        run: RunSettings,
        say: Callable[..., None],
        metrics: Mapping[str, Metric],
        primary: str,
        parts: int = 0,
        findings: Sequence[str] | None = None,
        context: RunContext = UNKNOWN,
    ) -> None:
        self.ask, self.roster, self.run, self.say = ask, roster, run, say
        self.metrics, self.primary, self.parts, self.findings = metrics, primary, parts, findings
        self.facts, self.footing = context.facts, context.footing

    def __call__(
        self, state: Mapping[str, Any], current_round: int, *, validation: bool = False, resample: int = 0,
        whole: bool = False,
    ) -> Tested:  # fmt: skip
        """Test a model on the sites' test splits.

        Args:
            state: the model.
            current_round: number of the round that would receive the model.
            validation: whether to test on the validation split too.
            resample: number of draws of the test patients or images on which to measure the primary metric too.
            whole: whether the validation is of whole volumes in a run that validates on patches.
        """
        measure = (SPLIT_TEST, SPLIT_VALIDATION) if validation else (SPLIT_TEST,)
        # Sums by group are asked for in the test of the last model only.
        of_groups = {name: getattr(self.run, name) for name in GROUPS.fields if validation and self.run.groups}

        def use(phase: Phase, site: str, message: Message) -> dict[str, float]:
            metrics = self._read(phase, site, message)
            values, unit = phase.stats[site][RESAMPLED], phase.stats[site][DRAWN_UNITS]
            refuse_if(site, {
                f"field {RESAMPLED!r} has {len(values or ())} entries, asked for {resample}":
                    values is not None and len(values) != resample,
                f"field {DRAWN_UNITS!r} must be one of {', '.join(UNITS)}, got {unit!r:.40}":
                    unit is not None and unit not in UNITS,
            })  # fmt: skip
            return metrics

        def exchange(sites: list[str], timeout: float) -> Phase:
            return self.ask(
                TASK_VALIDATE, current_round, state, sites, timeout, use,
                measure=measure, resample=resample, whole=whole, **of_groups,
            )  # fmt: skip

        phase = exchange(self.roster.list_known(), self.run.validate_timeout)
        tested = Tested(phase, phases=[phase.record()])
        # Ask failed sites again, unless all failed (then the model is at fault) or a dropped site never came back.
        again = sorted(set(phase.left_out) - self.roster.doubtful(phase.left_out))
        if phase.good and again:
            self.say(f"{TASK_VALIDATE}: asking once more: {', '.join(again)}")
            second = exchange(again, min(self.run.validate_timeout, max(AGAIN, 2 * phase.used_last)))
            tested.phases.append(second.record())
            _merge(phase, second)
        phase.left_out |= self.roster.excluded
        if validation:
            tested.validation = self.footing.make_comparable({
                site: values_of(cell for cell in phase.stats[site][CELLS] if cell.split == VALIDATION)
                for site in phase.good
            })  # fmt: skip
            self.footing = self.footing.drop_empty(
                {site: values.get("structure_support") or {} for site, values in tested.collect(SAID).items()}
            )
        phase.good = self.footing.make_comparable(phase.good)
        for site in phase.good if self.footing.how == ADJUSTED else ():
            phase.stats[site][RESAMPLED] = None  # draws resample the plain mean, not the adjusted figure
        tested.footing = self.footing
        return tested

    def test_globally(
        self, state: Mapping[str, Any], current_round: int, lists: Sequence[Sequence[str]]
    ) -> tuple[Tested, list[list[str]]]:
        """Test the model that all sites share on the global test lists, each list at one of the sites that have it.

        Args:
            state: the model.
            current_round: number of the round that would receive the model.
            lists: for each list the sites that have it; where one site fails, the next one is asked.

        Returns:
            The answers; and for each list that was measured the sites that have it, first the one that measured it.
        """
        tested = Tested(Phase(TASK_VALIDATE, current_round, []))
        waiting = [list(sites) for sites in lists]
        measured = []
        while waiting := [sites for sites in waiting if sites]:
            phase = self.ask(
                TASK_VALIDATE, current_round, state, sorted(sites[0] for sites in waiting), self.run.validate_timeout,
                partial(self._read, split=SPLIT_GLOBAL), measure=(SPLIT_GLOBAL,),
            )  # fmt: skip
            tested.phases.append(phase.record())
            _merge(tested.phase, phase)
            measured += [sites for sites in waiting if sites[0] in phase.good]
            waiting = [sites[1:] for sites in waiting if sites[0] not in phase.good]
        return tested, measured

    def _read(self, phase: Phase, site: str, message: Message, split: str = SPLIT_TEST) -> dict[str, float]:
        """Return an answer's checked metrics, and store its other fields in the phase's ``stats``."""
        head = read_head(site, message, phase.current_round)
        stats = read_stats(site, head, self.metrics[self.primary])
        sample_count, has = (
            read_report(head, COUNTS, site)["num_samples"],
            self.facts.get(site, NOTHING)["images"].get(split),
        )
        images, units = has if sample_count is None else sample_count, stats[NUM_UNITS]
        refuse_if(site, {
            f"it speaks of {sample_count or 0:.0f} {split} images, and had {has or 0:.0f} before the first round":
                None not in (sample_count, has) and sample_count > has,
            f"field {NUM_UNITS!r} is {units or 0:.0f}, of {images or 0:.0f} {split} images":
                None not in (units, images) and units > images,
        })  # fmt: skip
        stats[SAID] = read_sampling(site, stats, images)
        run, named = self.run, next((report[NAMES] for report in self.facts.values() if report.get(NAMES)), None)
        withheld = {*list_suppressed(stats, IN_GROUPS)}
        if named is not None:
            withheld -= {*named, *(f"{name}/class {part}" for name in run.groups for part in range(self.parts))}
        refuse_if(site, {
            printable(f"it keeps the groups {list_names(withheld, 3)}, for which nobody asked"):
                bool(withheld) and (named is not None or not run.groups),
        })  # fmt: skip
        bins = self.parts, run.group_bins, run.calibration_bins
        stats[BY_GROUP] = (
            read_kept(site, stats, run.groups, shapes(*bins), named)
            if run.secure
            else read_groups(site, stats, run.groups, *bins, declared=named, images=images)
        )
        stats[CLINICAL] = read_clinical(site, stats, self.parts, images, self.findings)
        phase.stats[site] = stats
        stats[CELLS] = read_metrics(site, message.metrics, self.metrics, OF_TEST)
        return values_of(cell for cell in stats[CELLS] if cell.split != VALIDATION)


def _merge(first: Phase, second: Phase) -> None:
    for site in second.asked:
        again = first.left_out.pop(site, None) is not None
        if site in second.left_out:
            first.left_out[site] = f"{second.left_out[site]}{' (asked twice)' if again else ''}"
    first.good |= second.good
    first.stats |= second.stats
    first.unheard = sorted(set(first.unheard) - set(second.asked) | set(second.unheard))


def mean_of(tests: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, dict[str, float]]:
    """Return each metric's mean over several models, by site; NaN where one of the models lacks the metric.

    A mean over the existing values alone would leave out the models that a site could not use.
    """
    return {
        site: {
            name: sum(math.nan if (v := test.get(site, {}).get(name)) is None else v for test in tests) / len(tests)
            for name in dict.fromkeys(name for test in tests for name in test.get(site, ()))
        }
        for site in sorted({site for test in tests for site in test})
    }
