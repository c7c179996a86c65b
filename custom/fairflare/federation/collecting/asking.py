"""One exchange of a run: what every task of it says, whom it asks, and what follows when too few could answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairflare.exchange.messages import Message, SiteTask, encode_task
from fairflare.federation.collecting.phase import Exchange, Phase, RoundFailed
from fairflare.federation.plan.run_settings import RunSettings
from fairflare.federation.record.experiment import Experiment
from fairflare.federation.site.replies import reasons
from fairflare.methods.base.rule import State


class NobodyCould(RoundFailed):
    """Sites answered, and not one could use the model: most likely it is the model."""


@dataclass(frozen=True)
class Asking:
    """Asks sites a task of this run.

    Args:
        run: settings that every task carries.
        exchange: how and whom.
        experiment: has the id that all jobs of the run share.
        form: which tensors travel, as every task says it.
    """

    run: RunSettings
    exchange: Exchange
    experiment: Experiment
    form: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        name: str,
        current_round: int,
        state: State,
        sites: Sequence[str],
        timeout: float,
        use: Callable[[Phase, str, Message], dict[str, float]],
        **told: Any,
    ) -> Phase:
        """Perform one exchange.

        Args:
            name: of the task.
            current_round: that it is of.
            state: the model; empty: none is sent.
            sites: that are asked.
            timeout: seconds.
            use: see :meth:`fairflare.federation.collecting.phase.Exchange.run`.
            told: further fields of :class:`fairflare.exchange.messages.SiteTask`.

        Raises:
            ServerFault: from whatever ``use`` raised.
            Stopped: the transport says so.
        """
        run = self.run
        task = SiteTask(
            name, dict(state), current_round, run.num_rounds, run.seed,
            experiment=run.experiment, run=self.experiment.run_id, min_cases=run.min_cases, **self.form, **told,
        )  # fmt: skip
        phase = Phase(name, current_round, sorted(sites), doubtful=self.exchange.roster.doubtful(sites))
        self.exchange.run(phase, encode_task(task), timeout, run.rounds_in_all, use)
        return self.exchange.unless_stopped(phase)

    def too_few(self, phase: Phase) -> RoundFailed:
        """Return the error of a phase with fewer than ``min_sites`` usable answers; gives every site's reason."""
        answered = len(phase.asked) - len(phase.unheard)
        kind = NobodyCould if not phase.good and answered >= self.run.min_sites else RoundFailed
        return kind(
            f"round {phase.current_round}, {phase.name}: {len(phase.good)} usable result(s) of {len(phase.asked)} "
            f"asked, min_sites={self.run.min_sites}. Left out: {reasons(phase.left_out.items()) or 'none'}",
            phase,
        )
