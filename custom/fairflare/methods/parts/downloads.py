"""Define the server half of methods that send every site a different part of the round's summed updates (CFFL, CGSV).

The server stores the run's common model, but sends it to no site. Every site trains a model of its own, sends the
update of that model, and receives some entries of the common model's change. The server computes these entries when it
sends them, from the present common model and that of the round before. Thus the server stores three models, whatever
the number of sites: these two, and the initial model, which is sent to a site that was not in the round before.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fairflare.base.settings import settings
from fairflare.core.aggregation.entries import change_between
from fairflare.exchange.messages import BySite
from fairflare.methods.base.rule import RoundInputs, SendsParts, State
from fairflare.methods.base.saved import Saved


@settings
class Downloads(SendsParts):
    """Store which sites were in the last round, and which share of that round's change each of them may receive.

    A subclass calls :meth:`remember` when it weighs.
    """

    directive_docs: ClassVar[dict[str, str]] = {
        "download": "which part of the last round's change this site gets (`share`), and the weight of its own update "
        "in it (`own_weight`); nothing of the others"
    }

    _first = Saved["dict[str, torch.Tensor]"](dict)
    _before = Saved["dict[str, torch.Tensor]"](dict)
    _names = Saved(list[str])
    _told = Saved(dict[str, dict[str, float]])

    @abstractmethod
    def part(self, change: State, share: float) -> dict[str, torch.Tensor]:
        """Return the entries of a change for a site; see :func:`fairflare.core.aggregation.entries.pack_entries`."""

    def remember(self, inputs: RoundInputs, shares: Mapping[str, float], weights: Mapping[str, float]) -> None:
        """Store which share of this round's change each site of the round will be sent in the next round.

        Args:
            inputs: inputs of the rule in this round.
            shares: share of the change's entries, in [0, 1], by site.
            weights: weight of the site's own update in the change, by site.

        Raises:
            RuntimeError: under a stock controller, which sends all sites one model.
        """
        if inputs.received is None:
            raise RuntimeError(
                f"{type(self).__name__} sends every site another part of the model, which a stock controller does not "
                "do; run it with fairflare.flare.controller.RoundsController"
            )
        self._before = dict(inputs.received)
        self._names = sorted(inputs.parameters)
        self._told = {site: {"share": float(shares[site]), "own_weight": float(weights[site])} for site in inputs.sites}

    def begin_round(self, received: State) -> None:
        self._first = self._first or dict(received)

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        factors = BySite({site: self._told[site] for site in sites if site in self._told})
        return {"download": factors} if self._told else {}

    def each(self, state: State) -> Callable[[str], State]:
        alone = threading.Lock()  # the entries of one site at a time are computed, to save memory
        first, before, factors = self._first, self._before, self._told
        names = frozenset(self._names)

        def cut_part(site: str) -> State:
            if site not in factors:
                return first
            with alone:
                return self.part(change_between(state, before, names), factors[site]["share"])

        return cut_part
