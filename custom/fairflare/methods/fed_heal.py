r"""Define FedHEAL: sites send only changes of a steady direction, and sites whose models move further weigh more.

Chen et al., "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity", CVPR 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fairflare.base.settings import BelowOne, settings
from fairflare.core.aggregation.updates import squared_norms
from fairflare.core.states import Made, State
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import Home, last_kept
from fairflare.methods.base.rule import RoundInputs, Rule, Weighing
from fairflare.methods.base.saved import Own, Saved
from fairflare.methods.base.training import LocalTraining, SiteRun

SIGNS, ROUNDS = "signs", "rounds"  # names of a site's history in its store, and of the number of rounds in the history


@dataclass
class ConsistentUpdates(Home):
    """Count how often each entry of the model fell, and send 0 for a change whose direction was rare in past rounds."""

    def finish(self, run: SiteRun, model: torch.nn.Module, start: State, local: State) -> dict[str, torch.Tensor]:
        update = super().finish(run, model, start, local)
        trained = {n: update[n] for n, p in model.named_parameters() if p.requires_grad and n in update}
        stored = last_kept(run, SIGNS, {ROUNDS: torch.tensor(0), **trained})
        rounds = int(stored[ROUNDS]) if stored else 0
        history = {ROUNDS: torch.tensor(rounds + 1)}
        for name, change in trained.items():
            fell = change <= 0  # the paper's w^r - w_k >= 0
            before = stored[name] if stored else torch.zeros_like(fell, dtype=torch.int16)
            agreed = torch.where(fell, before, rounds - before)
            if rounds:
                update[name] = change * (agreed > self.half.heal_tau * rounds)
            history[name] = before + fell
        run.store.save(SIGNS, run.current_round, history)
        return update


@settings
class ConsistentTraining(LocalTraining):
    r"""Train, and send only the entries of the change that agree with the site's earlier rounds (FedHEAL).

    An entry is sent if its direction was that of more than a share :math:`\tau` of the rounds that the site trained
    before. The history stays at the site.

    Args:
        heal_tau: tau, share of earlier rounds with the same direction that a change must exceed to be sent, in [0, 1).

    Source:
        Chen et al., section 3.2; the default is the authors' code's.
    """

    under_dp: ClassVar[bool] = True  # what is left out follows from trained models alone

    heal_tau: BelowOne = 0.3

    @property
    def home(self) -> Home:
        return ConsistentUpdates(self)


@settings
class FedHEAL(Rule):
    r"""Weight sites by how far their models move, and average each entry over the sites that sent it (FedHEAL).

    .. math:: d_k = \sum_l \lVert \Delta_{k,l} \rVert, \quad
              p'_k \leftarrow (1 - \beta) p'_k + \beta \frac{d_k}{\sum_j d_j}, \quad
              P_k \leftarrow P_k + p'_k, \quad p_k = \frac{P_k}{\sum_j P_j}

    over the trained tensors l and the sites of the round; P starts as 1 / (number of sites). An entry moves by the
    mean of the sites that changed it, with weights in proportion to p. Batch norm's statistics are weighed by p.

    Args:
        heal_beta: beta, share of this round in the moving average, in [0, 1).

    Source:
        Chen et al., section 3.3 and the authors' code.
    """

    only_mean: ClassVar[str] = "each entry is a mean over the sites that sent it"
    weighs: ClassVar[bool] = True

    reads_models: ClassVar[str] = "it needs the length of each site's update, and which entries it has"

    heal_beta: BelowOne = 0.4

    _weights = Saved(dict[str, float])
    _momentum = Saved(dict[str, float])
    _entries = Own[Made | None](lambda: None)  # shares of the weight behind each entry, until the model is moved

    def weigh(self, inputs: RoundInputs) -> Weighing:
        start, states, sites = inputs.start(self), inputs.states, inputs.sites
        names = [n for n in states[sites[0]] if n in inputs.parameters and n not in inputs.frozen]
        lengths = dict.fromkeys(sites, 0.0)
        for name in names:
            for site, square in squared_norms(states, start, [name]).items():
                lengths[site] += math.sqrt(square)
        lengths = inputs.moderated(lengths, "length of the update")
        if (total := sum(lengths.values())) > 0:
            for site, length in lengths.items():
                old = self._momentum.get(site, 0.0)
                self._momentum[site] = (1 - self.heal_beta) * old + self.heal_beta * length / total
                self._weights[site] = self._weights.get(site, 1 / len(sites)) + self._momentum[site]
        weights = inputs.bounded(normalise({site: self._weights.get(site, 1 / len(sites)) for site in sites}))
        most = max(inputs.bounded({site: float(site == sites[0]) for site in sites}).values())

        def sum_shares(name: str) -> torch.Tensor:
            base = 0 if start is None else start[name]
            sent = torch.stack([weight * (states[site][name] != base).double() for site, weight in weights.items()])
            share = torch.maximum(sent.sum(0), sent.amax(0) / most)  # no site's share exceeds the run's bound
            return torch.where(share == 0, 1.0, share)

        self._entries = Made(names, sum_shares)
        return Weighing(sites=weights, details={"length": lengths})

    def move(self, change: State) -> State:
        behind, self._entries = self._entries, None
        if behind is None:
            return change
        return Made(change, lambda name: change[name] / behind[name] if name in behind else change[name])


METHODS = [
    Method(
        name="fed_heal",
        title="FedHEAL",
        summary="sites that go further weigh more; entries without a steady direction are not sent",
        rule=FedHEAL,
        training=ConsistentTraining,
        source="Chen et al., CVPR 2024",
    )
]
