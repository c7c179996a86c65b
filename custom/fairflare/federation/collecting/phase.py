"""One exchange with the sites: who is asked, who answered, who is left out and why, who is not asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fairflare.base.checks import listed
from fairflare.exchange.messages import Message, num_bytes
from fairflare.federation.collecting.collector import Training
from fairflare.federation.collecting.roster import Roster
from fairflare.federation.collecting.transport import Question, Transport
from fairflare.federation.site.replies import printable
from fairflare.methods.base.reports import ReportError
from fairflare.reporting.results import PhaseRecord

SAYS_AFTER = 60.0  # seconds until the log says for whom a phase waits; then after twice as long, and so on
LONGEST = 360  # characters of a reason: a site's own words, and who said them
NAMED = 20  # of them, at most
ABORTED = "the job was aborted (by an administrator, or because a site's process died or no site is left)"


class RoundFailed(RuntimeError):
    """The run cannot go on; the text says which round, which sites, and why.

    Attributes:
        phase: in which it failed; who was left out of it is in the results.
    """

    def __init__(self, text: str, phase: Phase | None = None) -> None:
        super().__init__(text)
        self.phase = phase


class Stopped(Exception):
    """The run was told to stop."""


class ServerFault(RuntimeError):
    """Something at the server broke while it took a reply; no site is to blame."""


@dataclass
class Phase:
    """An exchange, in progress or over.

    Attributes:
        good: sites whose answer is used, with the metrics in it.
        stats: what the answers to the final test say besides.
        left_out: why another one is not, also of sites that are not asked.
        unheard: those of them that were asked and did not answer in time.
        doubtful: asked though they were dropped and have not shown up since: they are not waited for long.
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
        """Sites that said nothing."""
        return [s for s in self.asked if s not in self.good and s not in self.left_out]

    @property
    def waits(self) -> bool:
        """For a site that is more than doubtful."""
        return not self.doubtful.issuperset(self.silent)

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out after all."""
        self.good.pop(site, None)
        self.trained.pop(site, None)
        self.left_out[site] = printable(reason, LONGEST)

    def record(self) -> PhaseRecord:
        """Return the phase as a record for the results."""
        return PhaseRecord(
            name=self.name,
            seconds=round(self.seconds, 4),
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
            asked=len(self.asked),
            answered=len(self.good),
        )


@dataclass
class Exchange:
    """Asks the sites and sorts what comes back.

    Args:
        transport, roster: how, and whom.
        min_sites, grace: late sites get ``grace`` seconds once ``min_sites`` answered well; 0: the whole timeout.
        tell: event log, ``tell(kind, **details)``.
    """

    transport: Transport
    roster: Roster
    min_sites: int
    grace: float
    tell: Callable[..., None]

    def run(
        self,
        phase: Phase,
        task: Message,
        timeout: float,
        num_rounds: int,
        use: Callable[[Phase, str, Message], dict[str, float]],
    ) -> Phase:
        """Send ``task`` to ``phase.asked`` and fill ``phase``.

        Args:
            use: takes an answer out of memory and returns its metrics. A :class:`ReportError` leaves the site out;
                anything else ends the exchange.

        Raises:
            ServerFault: from whatever ``use`` raised.
        """
        if not phase.asked:
            return phase
        lock = threading.Lock()
        started = time.monotonic()
        fault: list[Exception] = []
        over: list[bool] = []
        enough_since: list[float] = []
        rest_since: list[float] = []
        says_at = [SAYS_AFTER]
        self.tell(
            "phase", phase=phase.name, current_round=phase.current_round, num_rounds=num_rounds, sites=phase.asked
        )
        phase.bytes_out = num_bytes(task.params) * len(phase.asked)
        task = _counted(task, phase, lock)

        def hand_over(site: str, answer: Message | str) -> bool:
            with lock:
                if over or fault or site not in phase.asked or site in phase.good or site in phase.left_out:
                    return False
                self.roster.answered(site, phase.name)
                try:
                    _take(phase, site, answer, use)
                    seconds = time.monotonic() - started
                    phase.used_last = seconds if site in phase.good else phase.used_last
                    self._tell_site(phase, site, seconds)
                except Exception as error:
                    fault.append(error)
                return not fault and site in phase.good

        def enough() -> bool:
            waited = time.monotonic() - started
            if waited > says_at[0]:
                says_at[0] = 2 * waited
                self._say_silent(phase, waited, timeout)
            if len(phase.good) >= self.min_sites and not enough_since:
                enough_since.append(time.monotonic())
            late = self.grace > 0 and bool(enough_since) and time.monotonic() > enough_since[0] + self.grace
            if phase.doubtful and not phase.waits and not rest_since and len(phase.good) >= self.min_sites:
                rest_since.append(time.monotonic())
            # Wait for dropped sites, but only as long again as the other sites took.
            hopeless = bool(rest_since) and time.monotonic() - rest_since[0] > rest_since[0] - started
            return bool(fault) or late or hopeless

        try:
            self.transport.ask(Question(phase.name, task, phase.asked, timeout, enough, hand_over))
        finally:
            with lock:
                over.append(True)  # what comes now is of a round that is done, or of a run that was stopped
        with lock:
            phase.seconds = time.monotonic() - started
            if fault:
                raise ServerFault(
                    f"round {phase.current_round}, {phase.name}: the server could not take an answer: "
                    f"{type(fault[0]).__name__}: {fault[0]}"
                ) from fault[0]
            if not self.transport.stopped():
                self._close(phase)
        return phase

    def unless_stopped(self, phase: Phase) -> Phase:
        """Return ``phase``, which :meth:`run` has filled.

        Raises:
            Stopped: the transport says so.
        """
        if why := self.transport.stopped():
            raise Stopped(why if isinstance(why, str) else ABORTED)
        return phase

    def _close(self, phase: Phase) -> None:
        for site in phase.silent:
            phase.left_out[site] = f"no answer within {phase.seconds:.1f} s"
            phase.unheard.append(site)
            self._tell_site(phase, site, phase.seconds)
            self.roster.missed(site, phase.name, phase.current_round)

    def _say_silent(self, phase: Phase, waited: float, timeout: float) -> None:
        silent = phase.silent
        if silent:
            self.transport.say(
                f"round {phase.current_round}, {phase.name}: {len(phase.asked) - len(silent)} of {len(phase.asked)} "
                f"site(s) have answered after {waited:.0f} s; waiting for {listed(silent, NAMED)}, "
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


def _counted(task: Message, phase: Phase, lock: threading.Lock) -> Message:
    """Return a message whose tensors are other ones for every site, each counted when it is made."""
    each = task.each
    if each is None:
        return task

    def counted(site: str) -> Mapping[str, Any]:
        made = each(site)
        with lock:
            phase.bytes_out += num_bytes(made)
        return made

    return replace(task, each=counted)


def _take(
    phase: Phase, site: str, answer: Message | str, use: Callable[[Phase, str, Message], dict[str, float]]
) -> None:
    try:
        if isinstance(answer, str):
            raise ReportError(answer)
        phase.bytes_in += num_bytes(answer.params)
        phase.good[site] = use(phase, site, answer)
        answer.params = None  # on disk now; memory must not grow with the number of sites
    except ReportError as error:
        phase.left_out[site] = printable(str(error), LONGEST)
