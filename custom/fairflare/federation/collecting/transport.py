"""Define the interface between a run and the transport of its messages: FLARE, one process, or a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fairflare.exchange.messages import Message
from fairflare.reporting.documents import RoundRecord


@dataclass(frozen=True)
class Question:
    """Describe one task that some sites are asked to perform.

    Attributes:
        name: name of the task, one of :data:`fairflare.exchange.messages.TASKS`.
        task: message to the sites, each of which is sent its own part; see
            :func:`fairflare.exchange.messages.address`.
        sites: names of the sites that are asked.
        timeout: seconds after which missing answers no longer count.
        enough: function that returns whether to stop waiting before the timeout.
        hand_over: function that the transport calls with a site and its answer, or the reason why the site gave none;
            it returns whether the answer is used.
    """

    name: str
    task: Message
    sites: list[str]
    timeout: float
    enough: Callable[[], bool]
    hand_over: Callable[[str, Message | str], bool]


class Transport(Protocol):
    """Define how the server sends tasks to the sites and receives their answers."""

    def sites(self) -> list[str]:
        """Return the names of the sites of the job, including sites that do not answer at present."""

    def expected(self) -> list[str]:
        """Return the names of the sites that the job names; if it names none, the same as :meth:`sites`."""

    def ask(self, question: Question) -> None:
        """Send a question's task to the sites that it names, and hand over each reply as it arrives, one at a time.

        Return when every site has answered, after the timeout, when ``enough()`` is True, or when :meth:`stopped` is.
        """

    def stopped(self) -> bool | str:
        """Return whether the run is to stop; a text means that it is, and gives the reason."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Write a line into the server's log."""

    def watch(self, seen: Callable[[str], None]) -> None:
        """Register ``seen``, to be called with each site that shows a sign of life outside of its answers."""


class Listener:
    """Define the calls that report a run's progress to an observer; every method here does nothing."""

    def event(self, kind: str, details: Mapping[str, Any]) -> None:
        """Handle an event that is also written to the event log; its kind is ``phase``, ``site`` or ``round_done``."""

    def round_started(self, current_round: int) -> None:
        """Handle the start of a round, before the sites are asked."""

    def before_aggregation(self) -> None:
        """Handle the moment when all replies of a round are in, before their models are averaged."""

    def aggregated(self, state: Mapping[str, Any]) -> None:
        """Handle the new global model of a round."""

    def round_done(self, record: RoundRecord, metric: str) -> None:
        """Handle the record of a finished round; ``metric`` is the name of the task's primary metric."""

    def best_model(self, state: Mapping[str, Any], number: int) -> None:
        """Handle a new best model by the validation metric; ``number`` is the round that made the model."""

    def tested(self, test: Mapping[str, Mapping[str, float]], metric: str, step: int) -> None:
        """Handle the final model's metrics on the sites' test splits; ``metric`` names the task's primary metric."""
