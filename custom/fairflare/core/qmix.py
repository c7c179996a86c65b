r"""QMIX: agents that learn together, from a common reward, which action each of them should take.

In FedMRL there is one agent per site; it lives on the server, sees what the site reported and picks the site's
proximal coefficient mu for the next round; the reward follows from the accuracy of the global model. The class
knows nothing of that: observations, a grid of actions and a reward are all it needs, so that it can be tried on
games whose solution is known. :meth:`QMix.act` and :meth:`QMix.observe` serve any multi-step episode,
:meth:`QMix.end_round` is federated learning, where the reward of a choice is only known two rounds later.

The networks are dictionaries of tensors and functions of them instead of modules: a state is then plain, and all
randomness, initial weights included, comes from one generator of the object.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "FINE_GRID",
    "MU_GRID",
    "QMix",
    "Step",
    "Update",
    "epsilon_at",
    "global_accuracy",
    "label_entropy",
    "mix",
    "mu_grid",
    "observation",
    "reward",
    "td_target",
]

Observations: TypeAlias = Mapping[str, Sequence[float]]

#: The proximal coefficient before an agent has chosen one.
INITIAL_MU = 1e-5
#: Actions of the specification.
MU_GRID = (1e-5, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
#: Actions among which a critic chooses: nearly continuous.
FINE_GRID = (1e-5, *(round(0.05 * step, 2) for step in range(21)))
#: A loss counts as this one at most.
LOSS_CAP = 10.0
#: Scaled entropy of a site that does not tell it. It never changes, so to the site's own network any number is as good.
UNKNOWN_ENTROPY = -0.5
#: Largest action during the warm-up with ``eps_prior="small"``.
SMALL_MU = 0.1


# --- what agents see and get --------------------------------------------------------------------------------


def mu_grid(num: int = 5, *, low: float = 1e-5, high: float = 1.0, zero: bool = True) -> tuple[float, ...]:
    """Proximal coefficients evenly spaced by their logarithm.

    Args:
        num: how many from ``low`` to ``high``, both included, ``>= 2``.
        low, high: limits, ``0 < low < high <= 1``.
        zero: put 0 (no proximal term) before them.

    Returns:
        Ascending values.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> mu_grid(6)
        (0.0, 1e-05, 0.0001, 0.001, 0.01, 0.1, 1.0)
    """
    if int(num) != num or num < 2:
        raise ValueError(f"num must be a whole number >= 2, got {num}")
    if not 0.0 < low < high <= 1.0:
        raise ValueError(f"low and high must hold 0 < low < high <= 1, got {low}, {high}")
    span = math.log10(high) - math.log10(low)
    inner = [float(f"{10 ** (math.log10(low) + span * k / (num - 1)):.6g}") for k in range(1, num - 1)]
    return (*((0.0,) if zero else ()), float(low), *inner, float(high))


def label_entropy(counts: Sequence[int]) -> float:
    r"""Entropy of a site's labels with the paper's sign.

    .. math:: E_h = \sum_c \frac{n_{hc}}{n_h} \log \frac{n_{hc}}{n_h}

    Args:
        counts: training images of each class, ``>= 0``, at least one image.

    Returns:
        E in [-log C, 0]: 0 when all labels are alike, -log C when the classes are balanced. Natural logarithm.

    Raises:
        ValueError: a negative or non-finite count, or no image.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), Eq. (6), which has no minus sign. The authors' code uses the count of
        class 0 in every logarithm.
    """
    for label, count in enumerate(counts):
        if not (math.isfinite(count) and count >= 0):
            raise ValueError(f"count of class {label} must be finite and >= 0, got {count}")
    total = math.fsum(counts)
    if total <= 0:
        raise ValueError(f"counts must hold at least one image, got {list(counts)}")
    return math.fsum(count / total * math.log(count / total) for count in counts if count > 0) + 0.0


def observation(
    entropy: float | None, share: float, accuracy: float, loss: float, *, num_classes: int
) -> tuple[float, float, float, float]:
    r"""What an agent sees of its site, scaled for a network.

    .. math:: o_h = (E_h / \log C,\; P_h,\; acc_h,\; \min(loss_h, 10) / 10)

    Args:
        entropy: E_h as :func:`label_entropy` gives it; None where the site withholds it: then -0.5.
        share: P_h, share of the site in all training images, in [0, 1].
        accuracy: of the local model after training, on the site's validation images, in [0, 1].
        loss: mean training loss of the last local epoch, ``>= 0``. Where it is not finite, it counts as the
            largest and the accuracy as 0.
        num_classes: C, ``>= 1``.

    Returns:
        Four numbers in [-1, 1].

    Raises:
        ValueError: a value out of range (names it).

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), Eqs. (5) to (7); the scaling is our specification's.
    """
    if int(num_classes) != num_classes or num_classes < 1:
        raise ValueError(f"num_classes must be a whole number >= 1, got {num_classes}")
    most = math.log(num_classes)
    if entropy is None:
        scaled = UNKNOWN_ENTROPY
    elif not -most - 1e-6 <= entropy <= 1e-6:
        raise ValueError(f"entropy must be in [-log {num_classes}, 0], got {entropy}")
    else:
        scaled = max(min(entropy, 0.0) / most, -1.0) if most else 0.0
    _fraction("share", share)
    if not math.isfinite(loss):
        return scaled, float(share), 0.0, 1.0
    _fraction("accuracy", accuracy)
    if loss < 0:
        raise ValueError(f"loss must be >= 0, got {loss}")
    return scaled, float(share), float(accuracy), min(float(loss), LOSS_CAP) / LOSS_CAP


def global_accuracy(
    accuracies: Mapping[str, float | None], num_validation: Mapping[str, float] | None = None
) -> float | None:
    r"""Accuracy of the global model over the validation images of all sites.

    .. math:: acc = \sum_h n^{val}_h gacc_h / \sum_h n^{val}_h

    Args:
        accuracies: of the *received* model at each site, before local training, in [0, 1]. None or NaN where a site
            has no validation images; it is left out.
        num_validation: n_val by site, ``>= 0``; None: every site counts the same.

    Returns:
        The accuracy, or None where no site measured one.

    Raises:
        ValueError: a value out of range, or a site without a count (names the site).
    """
    total = weighted = 0.0
    for site in sorted(accuracies):
        value = accuracies[site]
        if value is None or math.isnan(value):
            continue
        _fraction(f"accuracy of site {site!r}", value)
        if num_validation is not None and site not in num_validation:
            raise ValueError(f"site {site!r} has an accuracy and no number of validation images")
        count = 1.0 if num_validation is None else float(num_validation[site])
        if not (math.isfinite(count) and count >= 0):
            raise ValueError(f"number of validation images of site {site!r} must be finite and >= 0, got {count}")
        total += count
        weighted += count * value
    return weighted / total if total > 0 else None


def reward(accuracy: float, zeta: float = 0.95) -> float:
    r"""Common reward of all agents.

    .. math:: R = e^{acc - \zeta} - 1

    Args:
        accuracy: of the global model, in [0, 1] (:func:`global_accuracy`). Validation images: the paper's test
            images would leak into the training.
        zeta: target accuracy, in [0, 1].

    Returns:
        R, ``> 0`` where the target is surpassed.

    Raises:
        ValueError: a value out of range; percentages are, on purpose.

    Source:
        Sahoo et al., MICCAI 2024 (FedMRL), section 3.1. The authors' code has zeta = 95 and no exponential.

    Example:
        >>> round(reward(0.8), 6)
        -0.139292
    """
    _fraction("accuracy", accuracy)
    _fraction("zeta", zeta)
    return math.exp(accuracy - zeta) - 1.0


# --- formulas of QMIX ---------------------------------------------------------------------------------------


def mix(q: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, v: Tensor) -> Tensor:
    r"""Joint value of the agents' values, which no agent can raise by lowering its own.

    .. math:: Q_{tot} = \mathrm{ELU}(q^T |W_1| + b_1) \cdot |W_2| + V

    Args:
        q: value of each agent's action, (..., H).
        w1, b1, w2, v: what the hypernetworks make of the state, before the absolute value: (..., H, E), (..., E),
            (..., E), (...).

    Returns:
        Q_tot, (...).

    Source:
        Rashid et al., ICML 2018 (QMIX), section 4.
    """
    hidden = torch.nn.functional.elu((q.unsqueeze(-2) @ w1.abs()).squeeze(-2) + b1)
    return (hidden * w2.abs()).sum(dim=-1) + v


def td_target(rewards: Tensor, next_q_tot: Tensor, done: Tensor, gamma: float) -> Tensor:
    r"""What Q_tot should have been.

    .. math:: y = R + \gamma (1 - done)\, Q_{tot}^{target}(s', a')

    Args:
        rewards, next_q_tot: (n,).
        done: (n,), 1 where the episode ended with this reward.
        gamma: discount in [0, 1].
    """
    return rewards + gamma * (1.0 - done) * next_q_tot


def epsilon_at(step: int, *, start: float, end: float, steps: int) -> float:
    """Share of random actions: linear from ``start`` at step 0 to ``end`` at ``steps``, then constant."""
    return end if step >= steps else start + (end - start) * step / steps


# --- the learner --------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One decision of all agents, agents in sorted order.

    Attributes:
        observation: (H, observation size).
        state: (state size,), what the mixer sees.
        available: (H, actions), False where an agent may not act so.
        previous: (H,), the actions before.
        action: (H,), the actions chosen.
    """

    observation: Tensor
    state: Tensor
    available: Tensor
    previous: Tensor
    action: Tensor


@dataclass(frozen=True)
class Update:
    """What the updates after one transition did, for tracking.

    Attributes:
        loss: mean squared TD error, mean over the updates.
        q_tot: mean Q_tot of the transitions replayed last.
        target: mean of what it should have been.
        updates: number of gradient steps.
    """

    loss: float
    q_tot: float
    target: float
    updates: int


class QMix:
    r"""Agents, monotonic mixer, target networks and replay.

    Agent h has a network :math:`Q_h(o_h, a)`; the mixer (:func:`mix`) makes of their values a joint one, with weights
    that hypernetworks compute from the global state. Since it rises with each of them, each agent can choose by its
    own network alone. They are trained together to

    .. math:: y = R + \gamma (1 - done)\, Q_{tot}^{target}\bigl((\max_a Q_h^{target}(o'_h, a))_h, s'\bigr)

    Args:
        agents: names, one or more. Their number is fixed: an absent one keeps its last observation and action.
        observation_size: numbers in an observation.
        actions: value of each action; ascending and in [0, 1] for a proximal coefficient, but any will do.
        initial: index of the action an agent has before its first choice; default: the one nearest to 1e-5.
        state_size: numbers in the mixer's state; None: the observations of all agents one after the other.
        mixer: ``"qmix"``, or ``"vdn"``: Q_tot is the plain sum, FedMRL's Eq. (4).
        action_mode: ``"grid"``: a network has one output per action. ``"critic"``: the action's value is a further
            input and the output is one number, so that near actions are alike.
        share_agents: one network for all agents, which also sees who is asked; default: one each, as in the paper.
        obs_extras: append who is asked and the action before to the observation.
        hidden, embed: width of the agents' two layers, and of the mixer.
        hyper_hidden: width of a hidden layer in the hypernetworks of the mixer's weights; 0: none.
        double_q: choose the next action by the trained networks and value it by the target ones.
        gamma: discount, in [0, 1].
        lr: learning rate of Adam, ``> 0``.
        capacity: transitions remembered, ``>= 1``; then the oldest is overwritten.
        warmup: transitions before the first update, ``>= 1``.
        batch_size, updates: transitions per gradient step, and gradient steps per transition, ``>= 1``.
        clip: largest norm of the gradient, ``> 0``.
        target_every: transitions between copies of the networks to the target ones, ``>= 1``.
        target_tau: in (0, 1]; moves the target networks by this share after every update, instead of the copies.
        eps_start, eps_end: share of random actions at first and at last, in [0, 1]; one draw per agent.
        eps_steps: decisions from first to last, ``>= 0``; 30 % of the rounds in the specification.
        eps_prior: ``"small"``: during the warm-up, random actions are at most 0.1, which protects the training.
        reward_delay: rounds from a choice to its reward in :meth:`end_round`. 2: the chosen mu is used in round
            r + 1, and the sites measure what came of it at the start of round r + 2. 1: the server itself measures
            the new model.
        seed: of everything random, ``>= 0``.

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
        observation_size: int = 4,
        actions: Sequence[float] = MU_GRID,
        initial: int | None = None,
        state_size: int | None = None,
        mixer: Literal["qmix", "vdn"] = "qmix",
        action_mode: Literal["grid", "critic"] = "grid",
        share_agents: bool = False,
        obs_extras: bool = False,
        hidden: int = 64,
        embed: int = 32,
        hyper_hidden: int = 0,
        double_q: bool = False,
        gamma: float = 0.99,
        lr: float = 1e-3,
        capacity: int = 1000,
        warmup: int = 10,
        batch_size: int = 32,
        updates: int = 8,
        clip: float = 10.0,
        target_every: int = 10,
        target_tau: float | None = None,
        eps_start: float = 1.0,
        eps_end: float = 0.05,
        eps_steps: int = 60,
        eps_prior: Literal["small"] | None = None,
        reward_delay: int = 2,
        seed: int = 0,
    ) -> None:
        self.agents = tuple(sorted(set(agents)))
        if not self.agents or len(self.agents) != len(agents):
            raise ValueError(f"agents must be one or more different names, got {list(agents)}")
        self.actions = tuple(float(value) for value in actions)
        if not self.actions or not all(map(math.isfinite, self.actions)):
            raise ValueError(f"actions must be one or more finite numbers, got {list(actions)}")
        for name, count, least in (
            ("observation_size", observation_size, 1),
            ("state_size", 1 if state_size is None else state_size, 1),
            ("hidden", hidden, 1),
            ("embed", embed, 1),
            ("hyper_hidden", hyper_hidden, 0),
            ("capacity", capacity, 1),
            ("warmup", warmup, 1),
            ("batch_size", batch_size, 1),
            ("updates", updates, 1),
            ("target_every", target_every, 1),
            ("eps_steps", eps_steps, 0),
            ("reward_delay", reward_delay, 1),
            ("seed", seed, 0),
        ):
            if int(count) != count or count < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {count}")
        for name, number in (("gamma", gamma), ("eps_start", eps_start), ("eps_end", eps_end)):
            _fraction(name, number)
        for name, number in (("lr", lr), ("clip", clip)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name} must be finite and > 0, got {number}")
        if target_tau is not None and not 0.0 < target_tau <= 1.0:
            raise ValueError(f"target_tau must be in (0, 1], got {target_tau}")
        for name, value, known in (
            ("mixer", mixer, ("qmix", "vdn")),
            ("action_mode", action_mode, ("critic", "grid")),
            ("eps_prior", eps_prior, (None, "small")),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; Available: {', '.join(map(repr, known))}")
        if initial is None:
            initial = min(range(len(self.actions)), key=lambda a: abs(self.actions[a] - INITIAL_MU))
        if not 0 <= initial < len(self.actions):
            raise ValueError(f"initial must be the index of one of {len(self.actions)} actions, got {initial}")

        num_agents = len(self.agents)
        self.observation_size = int(observation_size)
        self.state_size = num_agents * self.observation_size if state_size is None else int(state_size)
        self._own_state = state_size is not None
        self.mixer, self.action_mode = mixer, action_mode
        self.share_agents, self.obs_extras, self.double_q = bool(share_agents), bool(obs_extras), bool(double_q)
        self.hidden, self.embed, self.hyper_hidden = int(hidden), int(embed), int(hyper_hidden)
        self.gamma, self.lr, self.clip = float(gamma), float(lr), float(clip)
        self.capacity, self.warmup, self.batch_size = int(capacity), int(warmup), int(batch_size)
        self.updates, self.target_every, self.target_tau = int(updates), int(target_every), target_tau
        self.eps_start, self.eps_end, self.eps_steps = float(eps_start), float(eps_end), int(eps_steps)
        self.eps_prior, self.reward_delay, self.initial = eps_prior, int(reward_delay), int(initial)

        self._generator = torch.Generator().manual_seed(int(seed))
        self._online = self._new_networks()
        self._target = {name: tensor.detach().clone() for name, tensor in self._online.items()}
        self._optimizer = torch.optim.Adam(list(self._online.values()), lr=self.lr, foreach=False)
        self._action_values = torch.tensor(self.actions)
        #: Decisions so far that may have been random, and transitions observed.
        self.decisions = 0
        self.observed = 0
        self._last_observation = torch.zeros(num_agents, self.observation_size)
        self._last_action = torch.full((num_agents,), self.initial, dtype=torch.long)
        self._seen = [False] * num_agents
        self._pending: list[Step] = []
        self._replay = {
            name: torch.zeros((self.capacity, *shape), dtype=dtype) for name, (shape, dtype) in self._fields().items()
        }

    # --- acting ---------------------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """Share of random actions in the next decision."""
        return epsilon_at(self.decisions, start=self.eps_start, end=self.eps_end, steps=self.eps_steps)

    @property
    def filled(self) -> int:
        """Transitions in the replay memory."""
        return min(self.observed, self.capacity)

    def act(
        self,
        observations: Observations,
        *,
        present: Collection[str] | None = None,
        available: Mapping[str, Sequence[bool]] | None = None,
        state: Sequence[float] | None = None,
        greedy: bool = False,
    ) -> Step:
        """All agents choose.

        Args:
            observations: by agent; one that is not named keeps its last observation (0 before its first).
            present: agents that choose; default: those with an observation now or earlier. The others keep their last
                action (the initial one before their first).
            available: actions an agent may take, by agent; default: all.
            state: what the mixer sees; exactly if ``state_size`` was given.
            greedy: choose the best actions. Draws nothing at random and does not count as a decision.

        Returns:
            The decision, to be given to :meth:`observe`; :meth:`chosen` names the actions.

        Raises:
            ValueError: an unknown agent (the number of agents is fixed), an observation or state of another length or
                that is not finite, or no available action (names the agent).
        """
        return self._choose(self._situation(observations, present, available, state), greedy)

    def chosen(self, step: Step) -> dict[str, float]:
        """Value of the action of each agent, as ``{site: mu}``."""
        return {agent: self.actions[int(action)] for agent, action in zip(self.agents, step.action, strict=True)}

    def values(self, step: Step) -> dict[str, list[float]]:
        """Q_h of each action, by agent; to look at."""
        with torch.no_grad():
            q = self._utilities(self._online, step.observation[None], step.previous[None])[0]
        return {agent: row.tolist() for agent, row in zip(self.agents, q, strict=True)}

    def q_tot(self, utilities: Tensor, state: Tensor) -> Tensor:
        """Joint value of the agents' values (..., H) in a state (..., state size) by the trained mixer."""
        return self._mixed(self._online, utilities, state)

    def joint_value(self, step: Step) -> float:
        """Q_tot of a decision."""
        with torch.no_grad():
            q = self._utilities(self._online, step.observation[None], step.previous[None])
            taken = q.gather(2, step.action[None, :, None]).squeeze(2)
            return float(self._mixed(self._online, taken, step.state[None])[0])

    # --- learning -------------------------------------------------------------------------------------------

    def observe(self, step: Step, reward: float, following: Step | None, done: bool = False) -> Update | None:
        """Remembers a transition and learns from the memory.

        Args:
            step: the decision, from :meth:`act`.
            reward: what it brought, finite.
            following: the situation it led to, as the next :meth:`act` returned it (its actions do not matter).
                May be None only where the episode is done.
            done: the episode ended.

        Returns:
            What the updates did; None during the warm-up.

        Raises:
            ValueError: a reward that is not finite, or no following situation where the episode goes on.
        """
        if not math.isfinite(reward):
            raise ValueError(f"reward must be finite, got {reward}")
        if following is None:
            if not done:
                raise ValueError("following may be None only where the episode is done")
            following = step
        place = self.observed % self.capacity
        for name, value in zip(Step._fields, step, strict=True):
            self._replay[name][place] = value
        for name in ("observation", "state", "available"):
            self._replay[f"next_{name}"][place] = getattr(following, name)
        self._replay["reward"][place] = float(reward)
        self._replay["done"][place] = float(done)
        self.observed += 1
        if self.filled < self.warmup:
            return None
        done_updates = [self.update() for _ in range(self.updates)]
        if self.target_tau is None and self.observed % self.target_every == 0:
            self._move_target(1.0)
        last = done_updates[-1]
        return Update(
            loss=math.fsum(update.loss for update in done_updates) / len(done_updates),
            q_tot=last.q_tot,
            target=last.target,
            updates=len(done_updates),
        )

    def update(self) -> Update:
        """One gradient step on transitions drawn from the memory, without replacement.

        Raises:
            ValueError: the memory is empty.
        """
        if not self.filled:
            raise ValueError("there is no transition to learn from")
        drawn = torch.randperm(self.filled, generator=self._generator)[: self.batch_size]
        batch = {name: values[drawn] for name, values in self._replay.items()}
        q = self._utilities(self._online, batch["observation"], batch["previous"])
        q = q.gather(2, batch["action"].unsqueeze(2)).squeeze(2)
        q_tot = self._mixed(self._online, q, batch["state"])
        with torch.no_grad():
            after = (batch["next_observation"], batch["action"])
            next_q = self._utilities(self._target, *after)
            ranking = self._utilities(self._online, *after) if self.double_q else next_q
            best = ranking.masked_fill(~batch["next_available"], -math.inf).argmax(dim=2, keepdim=True)
            next_q_tot = self._mixed(self._target, next_q.gather(2, best).squeeze(2), batch["next_state"])
            target = td_target(batch["reward"], next_q_tot, batch["done"], self.gamma)
        loss = ((q_tot - target) ** 2).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self._online.values()), self.clip, foreach=False)
        self._optimizer.step()
        if self.target_tau is not None:
            self._move_target(self.target_tau)
        return Update(loss.item(), q_tot.mean().item(), target.mean().item(), 1)

    # --- federated learning ---------------------------------------------------------------------------------

    def end_round(
        self,
        observations: Observations,
        reward: float | None,
        *,
        present: Collection[str] | None = None,
        done: bool = False,
        greedy: bool = False,
    ) -> tuple[Step, Update | None]:
        """One round of federated learning: learns from a choice whose reward is now known, and chooses.

        At the end of round r the reward is that of the model which round r *received*, and belongs to the choice made
        ``reward_delay`` rounds earlier.

        Args:
            observations: of the sites that took part in this round.
            reward: of this round's accuracy; None where no site measured one: that choice is not learnt from.
            present: sites that choose; default: those that took part. The others keep their last action.
            done: this is the last round.
            greedy: choose without exploring.

        Returns:
            The choice for round r + 1, and what was learnt.

        Raises:
            ValueError: as :meth:`act` and :meth:`observe`; nothing is then changed.
        """
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward must be finite or None, got {reward}")
        situation = self._situation(observations, tuple(observations) if present is None else present, None, None)
        learnt = None
        if len(self._pending) == self.reward_delay:
            past = self._pending.pop(0)
            if reward is not None:
                learnt = self.observe(past, reward, self._pending[0] if self._pending else situation, done)
        step = self._choose(situation, greedy)
        self._pending.append(step)
        return step, learnt

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that goes on: tensors, numbers, strings, lists and dicts, fit for ``torch.load(weights_only=True)``."""
        moments = self._optimizer.state_dict()["state"]
        return {
            "settings": self._settings(),
            "online": {name: tensor.detach().clone() for name, tensor in self._online.items()},
            "target": {name: tensor.clone() for name, tensor in self._target.items()},
            "optimizer": {
                name: {key: value.clone() for key, value in moments[number].items()}
                for number, name in enumerate(self._online)
                if number in moments
            },
            "replay": {name: values[: self.filled].clone() for name, values in self._replay.items()},
            "generator": self._generator.get_state(),
            "decisions": self.decisions,
            "observed": self.observed,
            "last_observation": self._last_observation.clone(),
            "last_action": self._last_action.clone(),
            "seen": list(self._seen),
            "pending": [{name: value.clone() for name, value in step._asdict().items()} for step in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; goes on bit by bit as if never interrupted.

        Raises:
            ValueError: the state is of other agents, actions or networks (names the first difference).
        """
        settings = self._settings()
        for name, value in settings.items():
            theirs = state["settings"].get(name)
            if theirs != value:
                raise ValueError(f"state has {name} {theirs!r}, this object {value!r}")
        with torch.no_grad():
            for name, tensor in self._online.items():
                tensor.copy_(state["online"][name])
                self._target[name].copy_(state["target"][name])
        numbers = {name: number for number, name in enumerate(self._online)}
        self._optimizer.load_state_dict(
            {
                "state": {
                    numbers[name]: {key: value.clone() for key, value in moments.items()}
                    for name, moments in state["optimizer"].items()
                },
                "param_groups": self._optimizer.state_dict()["param_groups"],
            }
        )
        for name, values in self._replay.items():
            values.zero_()
            values[: len(state["replay"][name])] = state["replay"][name]
        self._generator.set_state(state["generator"].cpu())
        self.decisions, self.observed = int(state["decisions"]), int(state["observed"])
        self._last_observation = state["last_observation"].clone()
        self._last_action = state["last_action"].clone()
        self._seen = [bool(seen) for seen in state["seen"]]
        self._pending = [Step(**{name: value.clone() for name, value in step.items()}) for step in state["pending"]]

    # --------------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """What must agree for a state to mean the same here."""
        return {
            "agents": list(self.agents),
            "actions": list(self.actions),
            "observation_size": self.observation_size,
            "state_size": self.state_size,
            "mixer": self.mixer,
            "action_mode": self.action_mode,
            "share_agents": self.share_agents,
            "obs_extras": self.obs_extras,
            "hidden": self.hidden,
            "embed": self.embed,
            "hyper_hidden": self.hyper_hidden,
            "capacity": self.capacity,
            "reward_delay": self.reward_delay,
        }

    def _fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what is remembered of a transition."""
        num_agents, num_actions = len(self.agents), len(self.actions)
        seen: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "observation": ((num_agents, self.observation_size), torch.float32),
            "state": ((self.state_size,), torch.float32),
            "available": ((num_agents, num_actions), torch.bool),
        }
        return {
            **seen,
            "previous": ((num_agents,), torch.long),
            "action": ((num_agents,), torch.long),
            "reward": ((), torch.float32),
            "done": ((), torch.float32),
            **{f"next_{name}": field for name, field in seen.items()},
        }

    def _situation(
        self,
        observations: Observations,
        present: Collection[str] | None,
        available: Mapping[str, Sequence[bool]] | None,
        state: Sequence[float] | None,
    ) -> Step:
        """What the agents see, with their last actions in place of the choice."""
        rows = {agent: row for row, agent in enumerate(self.agents)}
        for named in (observations, present or (), available or ()):
            for agent in sorted(named):
                if agent not in rows:
                    raise ValueError(f"unknown agent {agent!r}; the agents are fixed at the start: {list(rows)}")
        seen = self._last_observation.clone()
        for agent, numbers in observations.items():
            seen[rows[agent]] = self._vector(f"observation of agent {agent!r}", numbers, self.observation_size)
        now_seen = [before or agent in observations for agent, before in zip(self.agents, self._seen, strict=True)]
        acting = {a for a, known in zip(self.agents, now_seen, strict=True) if known} if present is None else present
        allowed = torch.zeros(len(self.agents), len(self.actions), dtype=torch.bool)
        for agent, row in rows.items():
            if agent not in acting:
                allowed[row, self._last_action[row]] = True
                continue
            mask = (available or {}).get(agent, [True] * len(self.actions))
            if len(mask) != len(self.actions):
                raise ValueError(f"agent {agent!r} has {len(mask)} flags for {len(self.actions)} actions")
            allowed[row] = torch.as_tensor(mask, dtype=torch.bool)
            if not bool(allowed[row].any()):
                raise ValueError(f"agent {agent!r} has no available action")
        if (state is not None) != self._own_state:
            raise ValueError("state must be given exactly if state_size was")
        whole = seen.reshape(-1) if state is None else self._vector("state", state, self.state_size)
        self._last_observation, self._seen = seen, now_seen
        return Step(seen.clone(), whole.clone(), allowed, self._last_action.clone(), self._last_action.clone())

    def _choose(self, situation: Step, greedy: bool) -> Step:
        with torch.no_grad():
            q = self._utilities(self._online, situation.observation[None], situation.previous[None])[0]
        best = q.masked_fill(~situation.available, -math.inf).numpy()
        action = torch.from_numpy(np.argmax(best, axis=1))  # the first of equal ones
        if not greedy:
            # Every decision draws the same number of random numbers, whoever is present.
            explore, which = torch.rand(2, len(self.agents), generator=self._generator, dtype=torch.float64)
            for row in torch.nonzero(explore < self.epsilon).flatten().tolist():
                options = torch.nonzero(self._explored(situation.available[row])).flatten()
                action[row] = options[min(int(which[row] * len(options)), len(options) - 1)]
            self.decisions += 1
        self._last_action = action.clone()
        return situation._replace(action=action)

    def _explored(self, available: Tensor) -> Tensor:
        if self.eps_prior == "small" and self.filled < self.warmup:
            small = available & (self._action_values <= SMALL_MU)
            if bool(small.any()):
                return small
        return available

    def _vector(self, what: str, numbers: Sequence[float], size: int) -> Tensor:
        vector = torch.as_tensor(numbers, dtype=torch.float32)
        if vector.shape != (size,):
            raise ValueError(f"{what} must be {size} numbers, got shape {tuple(vector.shape)}")
        if not bool(torch.isfinite(vector).all()):
            raise ValueError(f"{what} must be finite, got {vector.tolist()}")
        return vector

    # --- networks -------------------------------------------------------------------------------------------

    def _new_networks(self) -> dict[str, Tensor]:
        """Weights (inputs, outputs) and biases, drawn as ``torch.nn.Linear`` does; a leading axis for the agents."""
        num_agents, num_actions = len(self.agents), len(self.actions)
        copies = 1 if self.share_agents else num_agents
        inputs = self.observation_size
        if self.obs_extras:
            inputs += num_agents + num_actions
        elif self.share_agents:
            inputs += num_agents
        critic = self.action_mode == "critic"
        networks: dict[str, Tensor] = {}

        def layer(name: str, fan_in: int, fan_out: int, lead: tuple[int, ...] = ()) -> None:
            bound = 1.0 / math.sqrt(fan_in)
            for part, shape in (("weight", (*lead, fan_in, fan_out)), ("bias", (*lead, 1, fan_out))):
                drawn = torch.rand(shape, generator=self._generator) * (2 * bound) - bound
                networks[f"{name}.{part}"] = drawn.requires_grad_()

        layer("agent.0", inputs + critic, self.hidden, (copies,))
        layer("agent.1", self.hidden, self.hidden, (copies,))
        layer("agent.2", self.hidden, 1 if critic else num_actions, (copies,))
        if self.mixer == "qmix":
            for name, size in (("hyper_w1", num_agents * self.embed), ("hyper_w2", self.embed)):
                if self.hyper_hidden:
                    layer(f"{name}.0", self.state_size, self.hyper_hidden)
                layer(f"{name}.1", self.hyper_hidden or self.state_size, size)
            layer("hyper_b1", self.state_size, self.embed)
            layer("value.0", self.state_size, self.embed)
            layer("value.1", self.embed, 1)
        return networks

    def _utilities(self, networks: Mapping[str, Tensor], seen: Tensor, previous: Tensor) -> Tensor:
        """Q of every agent and action: (n, H, observation) and (n, H) to (n, H, actions)."""
        n, num_agents = seen.shape[:2]
        parts = [seen]
        if self.obs_extras or self.share_agents:
            parts.append(torch.eye(num_agents).expand(n, -1, -1))
        if self.obs_extras:
            parts.append(torch.nn.functional.one_hot(previous, len(self.actions)).to(seen.dtype))
        x = torch.cat(parts, dim=2).transpose(0, 1)  # (H, n, inputs)
        critic = self.action_mode == "critic"
        if critic:
            num_actions = len(self.actions)
            x = x.repeat_interleave(num_actions, dim=1)
            asked = self._action_values.repeat(n)[None, :, None].expand(num_agents, -1, -1)
            x = torch.cat([x, asked], dim=2)  # (H, n * actions, inputs + 1)
        for number in range(3):
            x = x @ networks[f"agent.{number}.weight"] + networks[f"agent.{number}.bias"]
            if number < 2:
                x = x.relu()
        if critic:
            x = x.reshape(num_agents, n, -1)
        return x.transpose(0, 1)

    def _mixed(self, networks: Mapping[str, Tensor], q: Tensor, state: Tensor) -> Tensor:
        if self.mixer == "vdn":
            return q.sum(dim=-1)

        def linear(name: str, x: Tensor) -> Tensor:
            return x @ networks[f"{name}.weight"] + networks[f"{name}.bias"].squeeze(0)

        def hyper(name: str) -> Tensor:
            return linear(f"{name}.1", linear(f"{name}.0", state).relu() if self.hyper_hidden else state)

        w1 = hyper("hyper_w1").unflatten(-1, (len(self.agents), self.embed))
        v = linear("value.1", linear("value.0", state).relu()).squeeze(-1)
        return mix(q, w1, linear("hyper_b1", state), hyper("hyper_w2"), v)

    def _move_target(self, share: float) -> None:
        with torch.no_grad():
            for name, tensor in self._target.items():
                tensor.copy_(self._online[name]) if share == 1.0 else tensor.lerp_(self._online[name], share)


def _fraction(what: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:  # also refuses NaN
        raise ValueError(f"{what} must be in [0, 1], got {value}")
