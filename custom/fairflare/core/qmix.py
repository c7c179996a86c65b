r"""Train agents by QMIX: they learn together, from a common reward, which action each of them should take.

In FedMRL the server has one agent per site, which observes the site's report and chooses the site's proximal
coefficient mu for the next round. The class :class:`QMix` does not depend on federated learning, so that it can be
tested on games with a known solution: :meth:`QMix.act` and :meth:`QMix.observe` serve any multi-step episode, and
:meth:`QMix.end_round` serves federated learning, where the reward of a choice is only known two rounds later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fairflare.base import checks
from fairflare.core.agents.mu_rewards import INITIAL_MU, MU_GRID, REWARD_DELAY
from fairflare.core.agents.mu_rewards import learning_rounds as learning_rounds
from fairflare.core.agents.mu_rewards import warmup_in as warmup_in
from fairflare.core.agents.q_learning import OBSERVATION_SIZE, Learner, available
from fairflare.core.agents.q_learning import Step as Step

EPS_START, EPS_END = 1.0, 0.05  # share of random actions in the first decisions and after the decay


def epsilon_at(step: int, *, start: float, end: float, steps: int) -> float:
    """Return the share of random actions: linear from ``start`` at step 0 to ``end`` at ``steps``, then constant."""
    return end if step >= steps else start + (end - start) * step / steps


class QMix:
    r"""Train agents by QMIX, with a monotonic mixer, target networks and a replay memory.

    Agent h has a network :math:`Q_h(o_h, a)`; the mixer combines the agents' values into a joint value. Since the joint
    value rises with each agent's value, each agent can choose by its own network alone. The mixer's size grows with the
    square of the number of agents.

    Args:
        agents: names of one or more agents. Their number is fixed: an absent agent keeps its last observation and
            action.
        actions: value of each action. Before its first choice, an agent's action is the one whose value is nearest to
            1e-5.
        eps_steps: number of decisions after the warm-up over which the share of random actions (one draw per agent)
            falls from 1 to 0.05; may be 0.
        seed: seed of all random numbers, ``>= 0``; torch's global random state is not changed.
        learning: further settings. ``mixer``: ``"qmix"``, or ``"vdn"``: Q_tot is the plain sum, FedMRL's Eq. (4).
            ``gamma``: discount, in [0, 1]. ``lr``: learning rate of Adam, ``> 0``. ``hidden``: width of the agents' two
            layers. ``warmup``: transitions before the first update, at most the 1000 that are remembered. ``updates``:
            gradient steps per transition.

    Raises:
        ValueError: an argument out of range (names it and the value).

    Source:
        Rashid et al., ICML 2018; Sahoo et al., MICCAI 2024 (FedMRL), section 3.1, read as (MRL-11) to (MRL-15) of
        our specification. The authors' code of FedMRL has no replay, no target network, no exploration and a mixer
        that is not monotonic.
    """

    def __init__(
        self,
        agents: Collection[str],
        *,
        actions: Sequence[float] = MU_GRID,
        eps_steps: int = 60,
        seed: int = 0,
        **learning: Any,
    ) -> None:
        self.agents = tuple(sorted(checks.different("agents", agents)))
        checks.whole("number of actions", len(actions))
        self.actions = tuple(float(checks.number(f"actions[{a}]", value)) for a, value in enumerate(actions))
        self.eps_steps = checks.whole("eps_steps", eps_steps, low=0)
        self._generator = torch.Generator().manual_seed(checks.whole("seed", seed, low=0))
        self._learner = Learner(len(self.agents), len(self.actions), self._generator, **learning)
        self._settings = {"agents": list(self.agents), "actions": list(self.actions), **self._learner.settings}
        self._rows = {agent: row for row, agent in enumerate(self.agents)}
        self.decisions = 0  # number of decisions since the warm-up that may have been random
        initial = min(range(len(self.actions)), key=lambda a: abs(self.actions[a] - INITIAL_MU))
        self._last_observation = torch.zeros(len(self.agents), OBSERVATION_SIZE)
        self._last_action = torch.full((len(self.agents),), initial)
        self._pending: list[Step] = []  # decisions whose reward is not known yet

    # -- acting

    @property
    def epsilon(self) -> float:
        """Return the probability that an agent acts at random in the next decision."""
        return epsilon_at(self.decisions, start=EPS_START, end=EPS_END, steps=self.eps_steps)

    def act(self, observations: Mapping[str, Sequence[float]], *, greedy: bool = False) -> Step:
        """Choose an action for each agent and return the decision.

        Args:
            observations: four numbers by agent. An agent without entry is absent: it keeps its last observation (at
                first 0) and its last action (at first the initial action).
            greedy: whether every agent takes its best action; no random number is drawn, and the call does not count as
                a decision.

        Returns:
            The decision, to be given to :meth:`observe`; :meth:`chosen` names the actions.

        Raises:
            ValueError: an unknown agent (their number is fixed), or an observation of another length or that is not
                finite (names the agent); nothing is then changed.
        """
        return self._choose(self._situation(observations), greedy)

    def chosen(self, step: Step) -> dict[str, float]:
        """Return the mu that each agent's action stands for, as ``{site: mu}``."""
        return {agent: self.actions[int(action)] for agent, action in zip(self.agents, step.action, strict=True)}

    def values(self, step: Step) -> dict[str, list[float]]:
        """Return the value Q_h of each action of each agent h, for inspection."""
        return dict(zip(self.agents, self._learner.values(step).tolist(), strict=True))

    def joint_value(self, step: Step) -> float:
        """Return the joint value Q_tot of all agents' actions in a decision."""
        return self._learner.joint_value(step)

    def _situation(self, observations: Mapping[str, Sequence[float]]) -> Step:
        """Return the agents' observations as a step, with their last actions in place of new ones."""
        seen, present = self._last_observation.clone(), torch.zeros(len(self.agents), dtype=torch.bool)
        for agent in sorted(observations):
            checks.refuse({
                f"unknown agent {agent!r}; the agents are fixed at the start: {list(self.agents)}":
                    agent not in self._rows,
            })  # fmt: skip
            numbers = [checks.number(f"observation of agent {agent!r}", value) for value in observations[agent]]
            checks.refuse({
                f"observation of agent {agent!r} must be {OBSERVATION_SIZE} numbers, got {numbers}":
                    len(numbers) != OBSERVATION_SIZE,
            })  # fmt: skip
            seen[self._rows[agent]], present[self._rows[agent]] = torch.tensor(numbers), True
        self._last_observation = seen
        return Step(seen, present, self._last_action, self._last_action)

    def _choose(self, situation: Step, greedy: bool) -> Step:
        open_to = available(situation.present, situation.previous, len(self.actions))
        best = self._learner.values(situation).masked_fill(~open_to, -math.inf).numpy()
        action = torch.from_numpy(np.argmax(best, axis=1))  # on a tie, the first of equally good actions
        if not greedy:
            # Every decision draws the same number of random numbers, whoever is present.
            explore, which = torch.rand(2, len(self.agents), generator=self._generator, dtype=torch.float64)
            for row in torch.nonzero(explore < self.epsilon).flatten().tolist():
                options = torch.nonzero(open_to[row]).flatten()
                action[row] = options[min(int(which[row] * len(options)), len(options) - 1)]
            self.decisions += not self._learner.warming_up  # agents that cannot learn yet keep exploring
        self._last_action = action
        return situation._replace(action=action)

    # -- learning

    def observe(self, step: Step, reward: float, following: Step | None, done: bool = False) -> float | None:
        """Store a transition in the replay memory and learn from the memory.

        Args:
            step: the decision, from :meth:`act`.
            reward: reward of the decision, finite.
            following: situation that the decision led to, as returned by the next :meth:`act` (its actions do not
                matter); may be None only at the end of an episode.
            done: whether the episode has ended.

        Returns:
            Squared TD error, mean over the updates; None during the warm-up.

        Raises:
            ValueError: the reward is not finite, or ``following`` is None although the episode has not ended.
        """
        checks.number("reward", reward)
        checks.refuse({
            "following (the next decision) may be None only at the end of an episode, with done=True":
                following is None and not done,
        })  # fmt: skip
        return self._learner.observe(step, reward, step if following is None else following, done)

    def end_round(
        self, observations: Mapping[str, Sequence[float]], reward: float | None, *, done: bool = False
    ) -> tuple[Step, float | None]:
        """Run one round of federated learning: learn from a choice whose reward is now known, and choose.

        Args:
            observations: observations of the sites that took part in this round r, by site.
            reward: reward of the model that round r *received*; it belongs to the choice of two rounds earlier. None if
                no site measured it: the agents then do not learn from that choice.
            done: whether this is the last round.

        Returns:
            The choice for round r + 1, and the squared TD error of the learning step (None if no agent learnt).

        Raises:
            ValueError: as :meth:`act` and :meth:`observe`; nothing is then changed.
        """
        if reward is not None:
            checks.number("reward", reward)
        situation = self._situation(observations)
        learnt = None
        if len(self._pending) == REWARD_DELAY:
            past = self._pending.pop(0)
            if reward is not None:
                learnt = self.observe(past, reward, self._pending[0], done)
        step = self._choose(situation, greedy=False)
        self._pending.append(step)
        return step, learnt

    # -- state between rounds

    def state_dict(self) -> dict[str, Any]:
        """Return the learner's whole state, to be restored before the next round.

        The state consists of tensors, numbers, strings, lists and dicts, so that ``torch.load(weights_only=True)`` can
        read it.
        """
        return copy.deepcopy(
            {
                "settings": self._settings,
                **self._learner.state_dict(),
                "generator": self._generator.get_state(),
                "decisions": self.decisions,
                "last_observation": self._last_observation,
                "last_action": self._last_action,
                "pending": [step._asdict() for step in self._pending],
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`; training is then resumed with bit-equal results.

        Raises:
            ValueError: the state belongs to other agents, actions or networks (the message names the first difference).
        """
        checks.same_settings("agents", state["settings"], self._settings)
        state = copy.deepcopy(dict(state))
        self._learner.load_state_dict(state)
        self._generator.set_state(state["generator"])
        self.decisions = int(state["decisions"])
        self._last_observation, self._last_action = state["last_observation"], state["last_action"]
        self._pending = [Step(**step) for step in state["pending"]]
