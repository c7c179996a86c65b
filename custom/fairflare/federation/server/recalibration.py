"""Recalibrate batch norms (``norm_statistics="recalibrated"``): set their statistics by all sites' training images.

After each aggregation the sites are asked for moments, in one exchange for each group of norms that do not depend on
one another, see :mod:`fairflare.core.features.batch_norms`. The first exchange carries the model, later ones only the
new statistics. Means and variances leave the sites, images do not. ``docs/norm_statistics.md`` describes
the cost and the benefit.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fairflare.base.checks import few, printable, refuse_if
from fairflare.base.task import Task
from fairflare.core.features.adapting import network_of
from fairflare.core.features.batch_norms import MEAN, VARIANCE, other_running, pool_statistics, registered_names
from fairflare.exchange.messages import TASK_NORMS, Message, num_bytes
from fairflare.federation.collecting.collector import SUM
from fairflare.federation.collecting.influence import Influence
from fairflare.federation.collecting.phase import Exchange, Phase
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.record.journal import Journal
from fairflare.federation.server.sums import SecureSums, SitesLost
from fairflare.federation.site.norm_moments import DONE, EXCHANGE, FIELDS, MEASURED
from fairflare.federation.site.replies import COUNTS, IN_REPORT, list_suppressed, read_head, read_stats
from fairflare.methods.base.reports import read_report, shorten_value
from fairflare.methods.base.rule import State, Weighing
from fairflare.reporting.documents import RoundRecord, Warned

BYTES = 8  # bytes of one number in a site's report
KINDS = (MEAN, VARIANCE)
SHOWN = 5  # largest number of batch norms that one line names


@dataclass(frozen=True)
class NormReport:
    """Store a site's checked answer to the ``norms`` task.

    Attributes:
        values: by batch norm, the number of values that one channel has over the site's images, in the site's order.
        state: the batch norms' means and (biased) variances, float64, under the names that the model has for them, so
            that ``max_update_norm`` limits them in the same way as the statistics in an update.
        images: number of images that the site reports to have measured on.
        more: whether further batch norms come in a later answer.
    """

    values: dict[str, int]
    state: dict[str, torch.Tensor]
    images: int
    more: bool

    @property
    def group(self) -> tuple[tuple[str, ...], bool]:
        """Return what all sites must report alike: names of the measured batch norms, and whether more follow."""
        return tuple(sorted(self.values)), self.more


def read_norms(
    site: str, message: Message, current_round: int, pending: Mapping[str, int], *, secure: bool = False
) -> NormReport:
    """Return a site's checked answer to the ``norms`` task.

    Args:
        site, message: name and message of the site.
        current_round: the round that the site was asked about.
        pending: number of channels of each batch norm that may be in the answer.
        secure: whether means and variances stay at the site, so that ``state`` is empty.

    Raises:
        ReportError: the answer cannot be used; the message names site, field and value.
    """
    meta = read_head(site, message, current_round)
    report = read_report(
        meta.get("report"), [field for field in FIELDS if not (secure and field.name in MEASURED)], site,
        suppressed=list_suppressed(read_stats(site, meta), IN_REPORT),
    )  # fmt: skip
    images, names = read_report(meta, COUNTS, site)["num_samples"], report["norms"]
    unknown = next((name for name in names if name not in pending), None)
    odd = next((value for value in report["values"] if value != int(value)), 0.0)
    widths = [pending.get(name, 0) for name in names]
    refuse_if(site, {
        "the answer lacks the field 'num_samples'": images is None,
        f"field 'norms' names {shorten_value(unknown)}, which is not asked for": unknown is not None,
        "field 'norms' names a norm twice": len(set(names)) != len(names),
        "field 'more' is true, and field 'norms' is empty": report["more"] and not names,
        f"field 'values' must hold whole numbers, got {odd:.8g}": odd != 0,
        **{
            f"field {key!r} has {len(report[key])} entries, these norms have {sum(widths)} channels":
                len(report[key]) != sum(widths) for key in MEASURED if key in report
        },
    })  # fmt: skip
    state = {
        f"{name}.{kind}": tensor
        for key, kind in zip(MEASURED, () if secure else KINDS, strict=False)
        for name, tensor in zip(names, torch.tensor(report[key], dtype=torch.float64).split(widths), strict=True)
    }
    return NormReport(dict(zip(names, map(int, report["values"]), strict=True)), state, int(images), report["more"])


class Recalibration:
    """Recompute the running statistics of a new global model's batch norms from all sites' training images.

    Args:
        task: builds the network, whose batch norms are recalibrated.
        run: settings of the run.
        ask, journal: the run's exchange with the sites, and its journal.
        sums: opens secure sums of the moments; ``None`` if every site sends its own.
    """

    def __init__(
        self, task: Task, run: RunSettings, ask: Exchange, journal: Journal, sums: SecureSums | None = None
    ) -> None:
        self.task, self.run, self.sums = task, run, sums
        self.ask, self.roster, self.journal = ask, ask.roster, journal
        self._told: set[str] = set()

    def __call__(self, state: State, record: RoundRecord) -> State:
        """Return the model with statistics of the training images of the round's sites.

        The model is returned unchanged where the run or the network needs no recalibration.

        Args:
            state: the new global model, which is not changed in place.
            record: the round's record, to which the phase, the sites left out of it, and warnings are added.

        Raises:
            RoundFailed: fewer than ``min_sites`` usable answers in one of the exchanges.
            ServerFault, Stopped: as in any exchange.
        """
        run, number = self.run, record.current_round
        if run.norm_statistics != "recalibrated" or not self._norms:
            return state
        sites = self.roster.willing(record.accepted, TASK_NORMS, number)
        if len(sites) < run.min_sites:  # ask sites that were late before, rather than too few
            sites = sorted(record.accepted)
        total = Phase(TASK_NORMS, number, sites)  # all exchanges are recorded as one phase
        total.left_out |= self.roster.why_not(sites, TASK_NORMS, record.accepted)
        pending = {name: len(state[f"{name}.{MEAN}"]) for name in self._norms}  # number of channels by norm
        done, images, exchanges, more = list[str](), dict[str, int](), 0, True
        new: dict[str, torch.Tensor] = {}  # statistics, by the state's names
        warnings: dict[tuple[str, str], Warned] = {}
        reports: dict[str, NormReport] = {}

        def use(phase: Phase, site: str, message: Message) -> None:
            reports[site] = read_norms(site, message, number, pending, secure=self.sums is not None)
            phase.bytes_in += BYTES * len(reports[site].values) + num_bytes(reports[site].state)

        while more and pending:
            live = [site for site in total.asked if site not in total.left_out]
            reports.clear()
            _add(total, self.ask(
                TASK_NORMS, number, new if exchanges else state, live, run.norms_timeout, use,
                directives={DONE: list(done), EXCHANGE: exchanges},
            ))  # fmt: skip
            (names, more), usable = self._usable(reports, total)
            try:
                pooled_state, warned = self._pool(names, usable, {**state, **new})
            except SitesLost as lost:  # the remaining sites measure again
                for site, reason in lost.args[0].items():
                    total.refuse(site, reason)
                more = True
            else:
                new |= pooled_state
                done += names
                pending = {name: width for name, width in pending.items() if name not in names}
                images = {site: report.images for site, report in usable.items()}
                exchanges += 1
                for one in warned:
                    warnings.setdefault((one.site, one.kind), replace(one, kind=f"{TASK_NORMS}, {one.kind}"))
        self.journal.record_left_out(total, record)
        self.journal.record_warnings(warnings.values(), record, f", {TASK_NORMS}")
        self._note(total, record, {"measured": len(done), "exchanges": exchanges, "images": images}, pending.keys())
        return {**state, **new}

    def _usable(
        self, reports: Mapping[str, NormReport], total: Phase
    ) -> tuple[tuple[tuple[str, ...], bool], dict[str, NormReport]]:
        """Return the norms that most sites answered about, with whether more follow, and these sites' reports.

        On a tie the answer of the first such site by name counts.

        Raises:
            RoundFailed: fewer than ``min_sites`` answers are usable.
        """
        groups = Counter(reports[site].group for site in sorted(reports)).most_common(1)
        agreed = groups[0][0] if groups else ((), False)
        for site, report in sorted(reports.items()):
            if report.group != agreed:
                total.refuse(site, _odd(site, report, agreed))
        usable = {site: report for site, report in sorted(reports.items()) if site in total.good}
        if len(usable) < self.run.min_sites or not usable:
            raise self.ask.too_few(total)
        return agreed, usable

    def _note(self, total: Phase, record: RoundRecord, measured: Mapping[str, Any], pending: Set[str]) -> None:
        """Record what a round has measured; ``pending``: norms that no image passes, which are named once in a run."""
        record.details = {**record.details, TASK_NORMS: measured}
        self.journal.say(
            f"round {record.current_round}: statistics of {measured['measured']} batch norms from {len(total.good)} "
            f"site(s) in {measured['exchanges']} exchange(s), {total.seconds:.1f} s"
        )
        if left := sorted(pending - self._told):
            self._told |= set(left)
            self.journal.say(
                f"norm_statistics: not in the way of an image, their statistics are averaged: {_some(left)}"
            )

    @cached_property
    def _norms(self) -> dict[str, list[str]]:
        """Return the network's batch norms with running statistics: all names of each norm, by its first name."""
        with torch.random.fork_rng(devices=[]):  # building the network leaves torch's random state unchanged
            model = network_of(self.task)
        if others := other_running(model):
            self.journal.say(f"norm_statistics: no batch norms, their running statistics are averaged: {_some(others)}")
        return registered_names(model)

    def _pool(
        self, names: Sequence[str], reports: Mapping[str, NormReport], state: State
    ) -> tuple[dict[str, torch.Tensor], list[Warned]]:
        """Return the new statistics of batch norms under all their names, and warnings about sites beyond bounds."""
        influence, new = Influence(self.run, len(self.roster.list_known())), dict[str, torch.Tensor]()
        counts, warnings = bound_counts(reports, names, self.run.max_samples)
        weights = {n: {site: count / sum(by.values()) for site, count in by.items()} for n, by in counts.items()}
        weights = influence.bound_weighing(Weighing(layers=weights)).layers or {}
        received = {key: state[key] for name in names for key in (f"{name}.{MEAN}", f"{name}.{VARIANCE}")}
        if self.sums is None:
            states = influence.states({site: report.state for site, report in reports.items()}, received)
        else:
            states = {SUM: self.sums.moments(state, received, weights)}
            weights = {name: {SUM: 1.0} for name in names}
        for name in names:
            total = sum(counts[name].values())
            by_kind = {kind: {site: state[f"{name}.{kind}"] for site, state in states.items()} for kind in KINDS}
            for alias in self._norms[name] if total >= 2 else ():  # one value has no variance
                for kind, pooled_tensor in zip(
                    KINDS, pool_statistics(by_kind[MEAN], by_kind[VARIANCE], weights[name], total), strict=True
                ):
                    new[f"{alias}.{kind}"] = pooled_tensor.to(received[f"{name}.{kind}"].dtype, copy=True)
        return new, [*warnings, *(warned for warned in influence.warnings if warned.kind != "majority")]


# ------------------------------------------------------------------------------------------------ pieces


def bound_counts(
    reports: Mapping[str, NormReport], names: Sequence[str], most: int | None
) -> tuple[dict[str, dict[str, int]], list[Warned]]:
    """Return the number of values per channel by batch norm and site, bounded by ``max_samples``, and warnings.

    With ``max_samples`` a site's values count as those of at most so many images. An image is taken to have as many
    values a channel as an image of the median site.
    """
    counts = {name: {site: report.values[name] for site, report in reports.items()} for name in names}
    if most is None:
        return counts, []
    warnings: dict[str, Warned] = {}
    for by in counts.values():
        limit = max(1, math.floor(most * statistics.median_low([n / reports[site].images for site, n in by.items()])))
        for site, claimed in sorted(by.items()):
            by[site] = min(claimed, limit)
            if claimed > limit:
                text = f"claims {claimed} values a channel, counted as {limit} (max_samples)"
                warnings.setdefault(site, Warned(site, "max_samples", claimed, limit, text))
    return counts, list(warnings.values())


def _odd(site: str, report: NormReport, agreed: tuple[tuple[str, ...], bool]) -> str:
    if report.group[0] == agreed[0]:
        return f"site {site!r}: field 'more' is {report.more}, at most sites {agreed[1]}"
    odd = sorted(set(report.values) ^ set(agreed[0]))
    return f"site {site!r}: field 'norms' differs from that of most sites in {len(odd)} norm(s), such as {odd[0]!r:.80}"


def _add(total: Phase, phase: Phase) -> None:
    """Add one exchange's answers to those of earlier exchanges; a site that is not in all exchanges is left out."""
    total.good = dict(phase.good)
    total.left_out |= phase.left_out
    total.unheard = sorted({*total.unheard, *phase.unheard})
    total.seconds += phase.seconds
    total.bytes_out += phase.bytes_out
    total.bytes_in += phase.bytes_in


def _some(names: list[str]) -> str:
    return printable(few(names, SHOWN))
