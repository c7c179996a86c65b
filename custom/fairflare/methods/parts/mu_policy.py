"""Choose the proximal coefficient mu of each site: fixed, at random, by a bandit or by agents (FedMRL's part C).

A rule holds a policy as a part. Before a round the rule sends the policy's directives to the sites, and when the rule
computes the weights, it lets the policy choose mu for the next round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from fairflare.base.checks import list_names, true_texts
from fairflare.base.settings import Fraction, NonNegative, Part, Positive, settings
from fairflare.core.agents.mu_rewards import (
    CAPACITY,
    INITIAL_MU,
    MU_GRID,
    global_accuracy,
    learning_rounds,
    observation,
    reward,
    warmup_in,
)
from fairflare.core.agents.thompson import standardise, thompson
from fairflare.methods.base.rule import RoundInputs, read_reports
from fairflare.methods.base.saved import KeepsState, Own, Saved

if TYPE_CHECKING:
    from fairflare.core.qmix import QMix

SHOWN = 8  # largest number of names that a message lists
FEWEST = 20  # number of learning rounds below which a warning says that the agents hardly learn


def _ascending(actions: tuple[float, ...]) -> tuple[float, ...]:
    if list(actions) != sorted(set(actions)):
        raise ValueError(f"actions must be ascending numbers in [0, 1], at least one, got {list(actions)}")
    return actions


def _no_percentage(zeta: Any) -> Any:
    if isinstance(zeta, (int, float)) and zeta > 1:
        raise ValueError(f"zeta is a fraction in [0, 1], got {zeta!r} (a percentage is 100 times too large)")
    return zeta


#: Type of a setting: values of mu to choose from, ascending.
Actions = Annotated[tuple[Fraction, ...], Field(min_length=1), AfterValidator(_ascending)]
#: Type of a setting: target accuracy in the reward of the agents that choose mu, a fraction.
Zeta = Annotated[Fraction, BeforeValidator(_no_percentage)]


class MuPolicy(KeepsState, Part):
    """Define a policy that chooses mu of each site before a round; ``_mu`` stores the chosen mu by site.

    Attributes:
        follows_num_rounds: whether what it does in a round depends on the number of rounds of the run.
        warnings: texts for the log and the results; the rule that reads them empties the list.
    """

    follows_num_rounds: ClassVar[bool] = False
    _mu = Saved(dict[str, float])
    warnings = Own(list[str])

    @property
    def tells(self) -> bool:
        """Return whether the server sends mu to any site."""
        return True

    def directives(self, asked: Sequence[str]) -> dict[str, float]:
        """Return mu of the coming round for the sites ``asked``; a site without an entry uses its own setting of mu."""
        return {site: self._mu.get(site, INITIAL_MU) for site in asked}

    def accepts(self, site: str) -> str:
        """Return the reason why a site's report cannot be used; empty if the report can be used."""
        return ""

    def choose(self, inputs: RoundInputs) -> dict[str, float]:
        """Choose mu for the next round from the sites' reports of this round; return values to record.

        The reports contain ``accuracy``, ``train_loss``, ``entropy`` and ``num_classes`` (the last two may be None),
        and ``global_accuracy``, the received model's accuracy on ``num_validation`` images.
        """
        return {}


def _accuracy(inputs: RoundInputs) -> float | None:
    """Return the received model's accuracy over all sites' validation images; ``None``: no site measured it."""
    counts = read_reports(inputs, "num_validation")  # a withheld count is NaN
    return global_accuracy(
        read_reports(inputs, "global_accuracy"),
        {site: 0.0 if math.isnan(count) else count for site, count in counts.items()},
    )


@settings
class FixedMu(MuPolicy):
    """Let sites use their own mu, except for sites whose mu is given.

    Args:
        by_site: ``{site: mu}``, sent to these sites in place of their own mu; the same in every round.
    """

    kind: ClassVar[str] = "fixed"
    by_site: dict[str, NonNegative] = Field(default_factory=dict)

    @property
    def tells(self) -> bool:
        return bool(self.by_site)

    def directives(self, asked: Sequence[str]) -> dict[str, float]:
        return {site: self.by_site[site] for site in asked if site in self.by_site}

    def choose(self, inputs: RoundInputs) -> dict[str, float]:
        if inputs.current_round == 0 and (absent := sorted(self.by_site.keys() - inputs.asked)):
            self.warnings.append(f"mu_policy.by_site names sites that are not in this round: {', '.join(absent)}")
        return {}


@settings
class RandomMu(MuPolicy):
    """Draw mu of each site at random after every round, as a control experiment for the learning agents.

    Args:
        actions: mu to choose from, ascending.
    """

    kind: ClassVar[str] = "random"
    actions: Actions = MU_GRID

    def choose(self, inputs: RoundInputs) -> dict[str, float]:
        for site in inputs.sites:
            self._mu[site] = random.Random(f"{inputs.seed}/{site}/{inputs.current_round}").choice(self.actions)
        return {}


@settings
class BanditMu(MuPolicy):
    """Choose mu of each site by Thompson sampling, from the agents' reward; the sites learn apart from each other.

    A site's mu of round r is credited with the reward of the model that the sites receive in round r + 1. The rewards
    of all rounds are standardised, so their scale does not matter.

    Args:
        actions: mu to choose from, ascending.
    """

    kind: ClassVar[str] = "bandit"
    actions: Actions = MU_GRID

    _used = Saved(dict[str, float])  # mu of the sites that took part in the round before
    _past = Saved(list[tuple[float, dict[str, float]]])  # the last rewards, each with mu by site before it

    def choose(self, inputs: RoundInputs) -> dict[str, float]:
        accuracy = _accuracy(inputs)
        values = {} if accuracy is None else {"reward": reward(accuracy)}
        if self._used and values:
            self._past = [*self._past, (values["reward"], self._used)][-CAPACITY:]
        self._used = self.directives(inputs.sites)
        gains = standardise([earned for earned, _ in self._past])
        for site in inputs.sites:
            used = [(gain, mu.get(site)) for gain, (_, mu) in zip(gains, self._past, strict=True)]
            earned = [[gain for gain, mu in used if mu == action] for action in self.actions]
            draws = random.Random(f"{inputs.seed}/{site}/{inputs.current_round}")
            self._mu[site] = self.actions[thompson(earned, draws)]
        return values


@settings
class QMixMu(MuPolicy):
    """Choose mu with one agent per site; QMIX trains the agents together, on the accuracy of the global model.

    There is an agent for each site of the first round, also for sites that failed in it; a site that joins later is
    refused. The agent of an absent site keeps its last observation and action.

    Args:
        actions: mu to choose from, ascending; ``None`` for ten from 1e-5 to 1.
        zeta: target accuracy of the reward exp(accuracy - zeta) - 1, a fraction.
        gamma: discount of later rewards.
        learning_rate: learning rate of the agents.

    Attributes:
        warmup: transitions (one a round from the third round on) before the first update; a quarter of the rounds
            where that is less.
        updates: gradient steps after each transition.
        explore: share of the rounds in which, after the warm-up, random actions fall from all to 5 %.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.1; Rashid et al., ICML 2018 (QMIX).
    """

    kind: ClassVar[str] = "qmix"
    actions: Actions | None = None
    zeta: Zeta = 0.95
    gamma: Fraction = 0.99
    learning_rate: Positive = 1e-3
    follows_num_rounds: ClassVar[bool] = True  # the agents' training depends on which round is the last
    warmup: ClassVar[int] = 10
    updates: ClassVar[int] = 8
    explore: ClassVar[float] = 0.3

    _entropy = Saved(dict[str, float])  # last reported label entropy, by site
    _classes = Saved(lambda: 1)
    _steps = Saved(int)  # number of decisions after which the exploration rate has reached its minimum
    _warmup = Saved(lambda: QMixMu.warmup)  # number of transitions in the warm-up, limited by the length of this run
    _agents = Own["QMix | None"](lambda: None)

    def accepts(self, site: str) -> str:
        if self._agents is None or site in self._agents.agents:
            return ""
        return (
            f"site {site!r} joined after the first round; FedMRL has an agent for each site from the start "
            f"({list_names(self._agents.agents, SHOWN)}): start a new run"
        )

    def choose(self, inputs: RoundInputs) -> dict[str, float]:
        if self._agents is None:
            self._steps = round(self.explore * inputs.num_rounds)
            self._warmup = warmup_in(inputs.num_rounds, self.warmup)
            self._agents = self._new_agents({*inputs.asked, *inputs.sites}, inputs.seed)
            rounds = learning_rounds(inputs.num_rounds, self.warmup)
            self.warnings += true_texts({
                f"the agents that choose mu can learn in {rounds} of {inputs.num_rounds} rounds "
                f"({rounds * self.updates} updates; each round from the third on gives a transition, the first update "
                f"needs {self._warmup} of them), so they hardly do better than chance; take at least {self.enough} "
                "rounds, or a policy without agents ('bandit', 'fixed', 'random')": rounds < FEWEST,
            })  # fmt: skip
        accuracy = _accuracy(inputs)
        earned = None if accuracy is None else reward(accuracy, self.zeta)
        values: dict[str, float | None] = {"reward": earned, "epsilon": self._agents.epsilon}
        done = inputs.current_round == inputs.num_rounds - 1
        step, loss = self._agents.end_round(self._observations(inputs), earned, done=done)
        self._mu = self._agents.chosen(step)
        values |= {"q_tot": self._agents.joint_value(step), "td_loss": loss}
        return {name: value for name, value in values.items() if value is not None}

    def _observations(self, inputs: RoundInputs) -> dict[str, Sequence[float]]:
        reports = {site: inputs.reports[site] for site in inputs.sites}
        self._classes = max(
            [self._classes, *(int(count or 1) for count in read_reports(inputs, "num_classes").values())]
        )
        self._entropy |= {site: value for site, value in read_reports(inputs, "entropy").items() if value is not None}
        total = sum(inputs.num_samples[site] for site in reports)
        least = -math.log(self._classes)  # sites may report different numbers of classes
        entropy = {site: max(value, least) for site, value in self._entropy.items()}
        return {
            site: observation(
                entropy.get(site), inputs.num_samples[site] / total, report["accuracy"], report["train_loss"],
                num_classes=self._classes,
            )
            for site, report in reports.items()
        }  # fmt: skip

    def _new_agents(self, names: set[str], seed: int) -> QMix:
        from fairflare.core.qmix import QMix

        return QMix(
            names, actions=MU_GRID if self.actions is None else self.actions,
            mixer=self.kind, gamma=self.gamma, lr=self.learning_rate, warmup=self._warmup, updates=self.updates,
            eps_steps=self._steps, seed=seed,
        )  # fmt: skip

    @property
    def enough(self) -> int:
        """Return the number of rounds that a run needs for its agents to learn in at least :data:`FEWEST` rounds."""
        return next(rounds for rounds in count(1) if learning_rounds(rounds, self.warmup) >= FEWEST)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "agents": None if self._agents is None else self._agents.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "agents"})
        self._agents, agents = None, state["agents"]
        if agents is not None:  # the seed has no effect: the state has the generator
            self._agents = self._new_agents({*agents["settings"]["agents"]}, seed=0)
            self._agents.load_state_dict(agents)


@settings
class VdnMu(QMixMu):
    """Choose mu as :class:`QMixMu` does, but with VDN: the agents' values are simply added (the paper's Eq. 4)."""

    kind: ClassVar[str] = "vdn"
