"""Ask the sites to perform one task, and record which answered, were left out (and why), or were silent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairflare.base.checks import list_names, printable
from fairflare.exchange.messages import Message, SiteTask, encode_task, num_bytes
from fairflare.federation.collecting.collector import Training
from fairflare.federation.collecting.roster import Roster
from fairflare.federation.collecting.transport import Question, Transport
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.site.replies import reasons
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import State
from fairflare.reporting.results import PhaseRecord

SAYS_AFTER = 60.0  # seconds until the log names the sites that a phase waits for; again at each doubling of that time
LONGEST = 360  # largest number of characters of a reason for leaving a site out, which may have the site's own words
NAMED = 20  # largest number of silent sites that a line of the log names
ABORTED = "the job was aborted (by an administrator, or because a site's process died or no site is left)"


class RoundFailed(RuntimeError):
    """Signal that the run cannot continue; the text gives the round, the sites and their reasons.

    Attributes:
        phase: the phase in which the run failed; the sites that it left out are in the results.
    """

    def __init__(self, text: str, phase: Phase | None = None) -> None:
        super().__init__(text)
        self.phase = phase


class NobodyCould(RoundFailed):
    """Signal that enough sites answered but not one could use the model, so that the model is most likely at fault."""


class Stopped(Exception):
    """Signal that the run was stopped from outside."""


class ServerFault(RuntimeError):
    """Signal that an error at the server kept it from taking a reply; no site is to blame."""


@dataclass
class Phase:
    """Record one exchange with the sites, in progress or over.

    Attributes:
        good: metrics of each site whose answer is used.
        trained: checked answer to ``train`` of each such site.
        stats: other fields of the answers to the final test, by site.
        left_out: reason for each site whose answer is not used, also for sites that were not asked.
        unheard: sites that were asked and did not answer in time.
        doubtful: asked sites that were dropped before and have shown no sign of life since; the wait for them is short.
        used_last: seconds until the last answer that is used.
    """

    name: str
    current_round: int
    asked: list[str]
    good: dict[str, dict[str, float]] = field(default_factory=dict)
    trained: dict[str, Training] = field(default_factory=dict)
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unheard: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    seconds: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    used_last: float = 0.0

    @property
    def silent(self) -> list[str]:
        """Return the asked sites that have not answered yet."""
        return [s for s in self.asked if s not in self.good and s not in self.left_out]

    @property
    def all_stats(self) -> dict[str, dict[str, Any]]:
        """Return the other fields of the answers to ``train`` and to the final test, by site."""
        return {site: training.stats for site, training in self.trained.items()} | self.stats

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out whose answer was used so far, and record the reason."""
        self.good.pop(site, None)
        self.trained.pop(site, None)
        self.left_out[site] = printable(reason, LONGEST)

    def record(self) -> PhaseRecord:
        """Return the record of this exchange with the sites (phase) for the results."""
        return PhaseRecord(
            name=self.name,
            seconds=round(self.seconds, 4),
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
            asked=len(self.asked),
            answered=len(self.good),
        )


Use = Callable[[Phase, str, Message], "dict[str, float] | None"]


@dataclass
class Exchange:
    """Ask the sites to perform a task of the run, and sort their answers.

    Args:
        run: settings of the run, some of which every task carries.
        transport: carries the task to the sites.
        roster: knows which sites may be asked.
        grace: seconds to wait for late sites once ``min_sites`` usable answers have arrived; 0: the whole timeout.
        tell: writes to the event log, ``tell(kind, **details)``.
        form: fields that every task has: the run's id, and which tensors are sent.
    """

    run: RunSettings
    transport: Transport
    roster: Roster
    grace: float
    tell: Callable[..., None]
    form: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, name: str, current_round: int, state: State, sites: Sequence[str], timeout: float, use: Use, **more: Any
    ) -> Phase:
        """Perform one exchange with the sites.

        Args:
            name: name of the task.
            current_round: number of the round that the task belongs to.
            state: the model; empty if none is sent.
            sites: names of the sites that are asked.
            timeout: seconds to wait for answers.
            use: see :meth:`fill`.
            more: further fields of :class:`fairflare.exchange.messages.SiteTask`.

        Raises:
            ServerFault: ``use`` raised an error other than :class:`ReportError`.
            Stopped: the run was stopped.
        """
        run, doubtful = self.run, self.roster.doubtful(sites)
        task = SiteTask(
            name, dict(state), current_round, run.num_rounds, run.seed,
            **{"experiment": run.experiment, "min_cases": run.min_cases, **self.form, **more},
        )  # fmt: skip
        phase = Phase(name, current_round, sorted(sites), doubtful=doubtful)
        if phase.asked:
            self.fill(phase, encode_task(task), timeout, use)
        if why := self.transport.stopped():
            raise Stopped(why if isinstance(why, str) else ABORTED)
        return phase

    def too_few(self, phase: Phase) -> RoundFailed:
        """Return the error of a phase with fewer than ``min_sites`` usable answers; gives every site's reason."""
        answered, least = len(phase.asked) - len(phase.unheard), self.run.min_sites
        kind = NobodyCould if not phase.good and answered >= least else RoundFailed
        return kind(
            f"round {phase.current_round}, {phase.name}: {len(phase.good)} usable result(s) of {len(phase.asked)} "
            f"asked, min_sites={least}. Left out: {reasons(phase.left_out.items()) or 'none'}",
            phase,
        )

    def fill(self, phase: Phase, task: Message, timeout: float, use: Use) -> None:
        """Send ``task`` to ``phase.asked`` and fill ``phase``.

        Args:
            phase: the exchange, with the sites to ask.
            task: the message that the sites are sent.
            timeout: seconds to wait for answers.
            use: function that checks an answer, stages its model, and returns its metrics, if any. If it raises a
                :class:`ReportError`, the site is left out; any other error ends the exchange.

        Raises:
            ServerFault: ``use`` raised an error other than :class:`ReportError`.
        """
        lock, fault, over = threading.Lock(), list[Exception](), False
        started, says_at = time.monotonic(), SAYS_AFTER
        enough_since = rest_since = math.inf  # times from which on a condition holds; infinite: it does not hold yet
        number, sites = phase.current_round, phase.asked
        self.tell("phase", phase=phase.name, current_round=number, num_rounds=self.run.rounds_in_all, sites=sites)
        phase.bytes_out = num_bytes(task.params) * len(sites)

        def make_tensors(site: str) -> Mapping[str, Any]:  # makes the tensors for one site, and counts their bytes
            extra = task.each(site) if task.each else {}
            with lock:
                phase.bytes_out += num_bytes(extra)
            return extra

        def hand_over(site: str, answer: Message | str) -> bool:
            with lock:
                if over or fault or site not in phase.silent:
                    return False
                self.roster.record_answer(site, phase.name)
                try:
                    _take(phase, site, answer, use)
                    seconds = time.monotonic() - started
                    phase.used_last = seconds if site in phase.good else phase.used_last
                    self._tell_site(phase, site, seconds)
                except Exception as error:
                    fault.append(error)
                return not fault and site in phase.good

        def enough() -> bool:
            nonlocal says_at, enough_since, rest_since
            now = time.monotonic()
            if now - started > says_at:
                says_at = 2 * (now - started)
                self._say_silent(phase, now - started, timeout)
            if len(phase.good) >= self.run.min_sites:
                enough_since = min(enough_since, now)
                if phase.doubtful and phase.doubtful.issuperset(phase.silent):
                    rest_since = min(rest_since, now)
            # Wait for dropped sites too, but once all others have answered, at most as long again as the others took.
            return bool(fault) or 0 < self.grace < now - enough_since or now - rest_since > rest_since - started

        try:
            self.transport.ask(Question(
                phase.name, replace(task, each=task.each and make_tensors), sites, timeout, enough, hand_over
            ))  # fmt: skip
        finally:
            with lock:
                over = True  # an answer that comes from now on is too late
                phase.seconds = time.monotonic() - started
        if fault:
            raise ServerFault(
                f"round {number}, {phase.name}: the server could not take an answer: {type(fault[0]).__name__}: "
                f"{fault[0]}"
            ) from fault[0]
        self._leave_out_silent(phase)

    def _leave_out_silent(self, phase: Phase) -> None:
        for site in phase.silent if not self.transport.stopped() else ():
            phase.left_out[site] = f"no answer within {phase.seconds:.1f} s"
            phase.unheard.append(site)
            self._tell_site(phase, site, phase.seconds)
            self.roster.record_miss(site, phase.name, phase.current_round)

    def _say_silent(self, phase: Phase, waited: float, timeout: float) -> None:
        if silent := phase.silent:
            self.transport.say(
                f"round {phase.current_round}, {phase.name}: {len(phase.asked) - len(silent)} of {len(phase.asked)} "
                f"site(s) have answered after {waited:.0f} s; waiting for {list_names(silent, NAMED)}, "
                f"at most {timeout:.0f} s in all"
            )

    def _tell_site(self, phase: Phase, site: str, seconds: float) -> None:
        self.tell(
            "site",
            phase=phase.name,
            current_round=phase.current_round,
            site=site,
            ok=site in phase.good,
            reason=phase.left_out.get(site, ""),
            metrics=phase.good.get(site, {}),
            seconds=round(seconds, 2),
        )


def _take(phase: Phase, site: str, answer: Message | str, use: Use) -> None:
    try:
        if isinstance(answer, str):
            raise ReportError(answer)
        phase.bytes_in += num_bytes(answer.params)
        phase.good[site] = use(phase, site, answer) or {}
        answer.params = None  # the tensors are staged; memory must not grow with the number of sites
    except ReportError as error:
        phase.left_out[site] = printable(str(error), LONGEST)
