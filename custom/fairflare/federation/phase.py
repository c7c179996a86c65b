"""One exchange with the sites: who is asked, who answered, who is left out and why, who is not asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fairflare.exchange.messages import Message, num_bytes
from fairflare.federation.collector import Training
from fairflare.federation.transport import Question, Transport
from fairflare.methods.reports import ReportError
from fairflare.reporting.results import PhaseRecord


class ServerFault(RuntimeError):
    """Something at the server broke while it took a reply; no site is to blame."""


@dataclass
class Phase:
    """An exchange, in progress or over.

    Attributes:
        good: sites whose answer is used, with the metrics in it.
        stats: what the answers to the final test say besides.
        left_out: why another one is not.
        unheard: those of them that did not answer in time.
    """

    name: str
    current_round: int
    asked: list[str]
    good: dict[str, dict[str, float]] = field(default_factory=dict)
    trained: dict[str, Training] = field(default_factory=dict)
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unheard: list[str] = field(default_factory=list)
    seconds: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0

    @property
    def silent(self) -> list[str]:
        """Sites that said nothing."""
        return [s for s in self.asked if s not in self.good and s not in self.left_out]

    def refuse(self, site: str, reason: str) -> None:
        """Leaves a site out after all."""
        self.good.pop(site, None)
        self.trained.pop(site, None)
        self.left_out[site] = reason

    def record(self) -> PhaseRecord:
        """For the results."""
        return PhaseRecord(
            name=self.name,
            seconds=round(self.seconds, 4),
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
            asked=len(self.asked),
            answered=len(self.good),
        )


class Roster:
    """Which sites are asked: all of the job but those that are silent too often.

    Args:
        transport: knows the sites.
        max_missed: a site silent in so many phases running is not asked again until it shows up.
        min_sites: all are asked when fewer would be left.
    """

    def __init__(self, transport: Transport, max_missed: int, min_sites: int) -> None:
        self.transport = transport
        self.max_missed = max_missed
        self.min_sites = min_sites
        self._missed: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._lock = threading.Lock()  # sites show up in the transport's threads
        transport.watch(self.seen)

    def live(self) -> list[str]:
        """Sites to ask, sorted."""
        known = sorted(self.transport.sites())
        live = [site for site in known if site not in self._dropped]
        return live if len(live) >= self.min_sites else known

    def seen(self, site: str) -> None:
        """A site is alive."""
        with self._lock:
            self._missed.pop(site, None)
            self._dropped.discard(site)

    def missed(self, site: str) -> None:
        """A site was silent for a whole phase."""
        with self._lock:
            count = self._missed[site] = self._missed.get(site, 0) + 1
            drop = count >= self.max_missed and site not in self._dropped
            if drop:
                self._dropped.add(site)
        if drop:
            self.transport.say(
                f"site {site!r} was silent in {count} phases running and is not asked again until it shows up",
                warning=True,
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
        """Sends ``task`` to ``phase.asked`` and fills ``phase``.

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
        self.tell(
            "phase", phase=phase.name, current_round=phase.current_round, num_rounds=num_rounds, sites=phase.asked
        )
        phase.bytes_out = num_bytes(task.params) * len(phase.asked)

        def hand_over(site: str, answer: Message | str) -> bool:
            with lock:
                if over or fault or site not in phase.asked or site in phase.good or site in phase.left_out:
                    return False
                self.roster.seen(site)
                try:
                    _take(phase, site, answer, use)
                    self._tell_site(phase, site, time.monotonic() - started)
                except Exception as error:
                    fault.append(error)
                return not fault and site in phase.good

        def enough() -> bool:
            if len(phase.good) >= self.min_sites and not enough_since:
                enough_since.append(time.monotonic())
            late = self.grace > 0 and bool(enough_since) and time.monotonic() > enough_since[0] + self.grace
            return bool(fault) or late

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

    def _close(self, phase: Phase) -> None:
        for site in phase.silent:
            phase.left_out[site] = f"no answer within {phase.seconds:.1f} s"
            phase.unheard.append(site)
            self._tell_site(phase, site, phase.seconds)
            self.roster.missed(site)

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
        phase.left_out[site] = str(error)
