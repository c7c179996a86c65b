"""What a run needs of whatever carries its messages: FLARE, one process, or a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fairflare.exchange.messages import Message
from fairflare.reporting.documents import RoundRecord


@dataclass(frozen=True)
class Question:
    """One task for some sites.

    Attributes:
        name: one of :data:`fairflare.exchange.messages.TASKS`.
        task: what they get, each its own part; see :func:`fairflare.exchange.messages.for_site`.
        sites: who is asked.
        timeout: seconds until the answers that are missing no longer count.
        enough: says whether to stop waiting before that.
        hand_over: to be called with a site and its message, or with the reason why there is none; True: it is used.
    """

    name: str
    task: Message
    sites: list[str]
    timeout: float
    enough: Callable[[], bool]
    hand_over: Callable[[str, Message | str], bool]


class Transport(Protocol):
    """How the server reaches the sites."""

    def sites(self) -> list[str]:
        """Return the names of the sites of the job, also of those that do not answer at present."""

    def expected(self) -> list[str]:
        """Return the names of the sites that the job was made for; the same as :meth:`sites` where it names none."""

    def ask(self, question: Question) -> None:
        """Send the task and hand over each reply as it arrives, from any thread, one at a time.

        Returns when every site has answered, after the timeout, when there is ``enough()``, or when :meth:`stopped`.
        """

    def stopped(self) -> bool | str:
        """Return whether the run is to stop; a text says why."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Write a line into the server's log."""

    def watch(self, seen: Callable[[str], None]) -> None:
        """Have ``seen`` called with each site that shows signs of life outside of its answers."""


class Listener:
    """Is told how a run goes; does nothing by itself."""

    def event(self, kind: str, details: Mapping[str, Any]) -> None:
        """Take something that the event log has too: ``phase``, ``site``, ``round_done``."""

    def round_started(self, current_round: int) -> None:
        """Take note that a round starts, before the sites are asked."""

    def before_aggregation(self) -> None:
        """Take note that all replies of the round are in."""

    def aggregated(self, state: Mapping[str, Any]) -> None:
        """Take the new global model."""

    def round_done(self, record: RoundRecord, metric: str) -> None:
        """Take everything about a round that is done; ``metric`` is the task's primary one."""

    def best_model(self, state: Mapping[str, Any], made: int) -> None:
        """Take a new best model by the validation metric, and the round that made it."""

    def tested(self, test: Mapping[str, Mapping[str, float]], metric: str, step: int) -> None:
        """Take the metrics of the final model on the sites' test splits."""
