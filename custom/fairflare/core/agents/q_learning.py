r"""Define and train a network for the values of each agent's actions, and a monotonic mixer for their joint value."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairflare.base import checks
from fairflare.core.agents.mu_rewards import CAPACITY

OBSERVATION_SIZE = 4  # number of values in an agent's observation
EMBED = 32  # width of the mixer's hidden layer
BATCH, TARGET_EVERY = 32, 10  # transitions per gradient step; transitions between copies to the target networks
CLIP = 10.0  # largest norm of the gradient
INDEX = torch.int16  # dtype of an action's index in the replay memory


def mix(q: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, v: Tensor) -> Tensor:
    r"""Return the joint value of the agents' values; it never falls if an agent's own value rises.

    .. math:: Q_{tot} = \mathrm{ELU}(q^T |W_1| + b_1) \cdot |W_2| + V

    Args:
        q: value of each of the H agents' actions, (..., H).
        w1, b1, w2, v: weights and biases that the hypernetworks compute from the state, before the absolute value is
            taken: (..., H, E), (..., E), (..., E), (...).

    Returns:
        Q_tot, (...).

    Source:
        Rashid et al., ICML 2018 (QMIX), section 4.
    """
    hidden = nn.functional.elu((q.unsqueeze(-2) @ w1.abs()).squeeze(-2) + b1)
    return (hidden * w2.abs()).sum(dim=-1) + v


def td_target(rewards: Tensor, next_q_tot: Tensor, done: Tensor, gamma: float) -> Tensor:
    r"""Return the temporal-difference target of the joint value Q_tot.

    .. math:: y = R + \gamma (1 - done)\, Q_{tot}^{target}(s', a')

    Args:
        rewards, next_q_tot: rewards of n transitions and the target networks' joint value after them, (n,) each.
        done: (n,), 1 where the episode ended with this reward.
        gamma: discount of future rewards, in [0, 1].
    """
    return rewards + gamma * (1.0 - done) * next_q_tot


class _Linear(nn.Module):
    """Apply a linear layer whose initial weights come from a given generator; ``copies``: number of parallel layers."""

    def __init__(self, fan_in: int, fan_out: int, generator: torch.Generator, copies: int | None = None) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(fan_in)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.rand(shape, generator=generator) * (2 * bound) - bound)

        self.weight = draw(fan_in, fan_out) if copies is None else draw(copies, fan_in, fan_out)
        self.bias = draw(fan_out) if copies is None else draw(copies, 1, fan_out)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Mixer(nn.Module):
    """Mix the agents' values by :func:`mix`, with weights that hypernetworks compute from all agents' observations."""

    def __init__(self, num_agents: int, generator: torch.Generator) -> None:
        super().__init__()
        size = num_agents * OBSERVATION_SIZE
        self.w1 = _Linear(size, num_agents * EMBED, generator)
        self.w2 = _Linear(size, EMBED, generator)
        self.b1 = _Linear(size, EMBED, generator)
        self.v = nn.Sequential(_Linear(size, EMBED, generator), nn.ReLU(), _Linear(EMBED, 1, generator))

    def forward(self, q: Tensor, seen: Tensor) -> Tensor:
        """Map the agents' values (n, H) and observations (n, H, 4) to the joint value Q_tot, (n,)."""
        state = seen.flatten(1)
        w1 = self.w1(state).unflatten(-1, (q.shape[-1], -1))
        return mix(q, w1, self.b1(state), self.w2(state), self.v(state).squeeze(-1))


class _Networks(nn.Module):
    """Compute every agent's values Q_h(o_h, a) by a network of its own with two hidden ReLU layers, and mix them."""

    def __init__(self, num_agents: int, num_actions: int, gen: torch.Generator, *, hidden: int, mixer: str) -> None:
        super().__init__()
        self.agents = nn.Sequential(
            _Linear(OBSERVATION_SIZE, hidden, gen, num_agents),
            nn.ReLU(),
            _Linear(hidden, hidden, gen, num_agents),
            nn.ReLU(),
            _Linear(hidden, num_actions, gen, num_agents),
        )
        self.mixer = None if mixer == "vdn" else Mixer(num_agents, gen)

    def forward(self, seen: Tensor) -> Tensor:
        """Return the value Q of every action of each agent, (n, H, actions), for observations (n, H, 4)."""
        return torch.transpose(self.agents(seen.transpose(0, 1)), 0, 1)

    def joint(self, q: Tensor, action: Tensor, seen: Tensor) -> Tensor:
        """Return Q_tot, (n,), from values (n, H, actions), chosen actions (n, H) and observations (n, H, 4)."""
        taken = q.gather(2, action.unsqueeze(2)).squeeze(2)
        total: Tensor = taken.sum(dim=-1) if self.mixer is None else self.mixer(taken, seen)
        return total


class Step(NamedTuple):
    """Store one decision of all agents; agents are in sorted order.

    Attributes:
        observation: observations of the H agents, (H, 4); the mixer sees all of them.
        present: whether each agent is present, (H,); an absent agent can only repeat its previous action.
        previous: index of each agent's previous action, (H,).
        action: index of each agent's chosen action, (H,).
    """

    observation: Tensor
    present: Tensor
    previous: Tensor
    action: Tensor


def available(present: Tensor, previous: Tensor, num_actions: int) -> Tensor:
    """Return which actions each agent may choose: a present agent all, an absent one only its previous action.

    Args:
        present: whether each of the H agents is present, (..., H).
        previous: index of each agent's previous action, (..., H).
        num_actions: number of actions from which each agent chooses.

    Returns:
        (..., H, num_actions), True where the agent may choose the action.
    """
    return present.unsqueeze(-1) | nn.functional.one_hot(previous, num_actions).bool()


class Learner:
    r"""Train the networks of agents and mixer, with target networks and a replay memory.

    Agent h has a network :math:`Q_h(o_h, a)`; the mixer combines the agents' values into a joint one. The networks and
    the mixer are trained together to reach the target

    .. math:: y = R + \gamma (1 - done)\, Q_{tot}^{target}\bigl((\max_a Q_h^{target}(o'_h, a))_h, s'\bigr)

    Args:
        num_agents: number of agents H.
        num_actions: number of actions from which each agent chooses.
        generator: random generator for initial weights and for batches.
        mixer, gamma, lr, hidden, warmup, updates: settings that :class:`fairflare.core.qmix.QMix` describes.
    """

    def __init__(
        self,
        num_agents: int,
        num_actions: int,
        generator: torch.Generator,
        *,
        mixer: str = "qmix",
        gamma: float = 0.99,
        lr: float = 1e-3,
        hidden: int = 64,
        warmup: int = 10,
        updates: int = 8,
    ) -> None:
        checks.choice("mixer", mixer, ("qmix", "vdn"))
        self.num_actions = num_actions
        self.gamma = checks.number("gamma", gamma, low=0, high=1)
        self.warmup = checks.number("warmup", warmup, low=1, high=CAPACITY, whole=True)
        self.updates = checks.whole("updates", updates)
        self.observed = 0  # number of observed transitions
        self._generator = generator
        #: Settings that a saved state must share with this learner to be loaded here.
        self.settings: dict[str, Any] = {"mixer": mixer, "hidden": checks.whole("hidden", hidden)}
        self._online = _Networks(num_agents, num_actions, generator, **self.settings)
        self._target = copy.deepcopy(self._online).requires_grad_(False)
        # Without foreach, the optimizer sums in the same order on every machine.
        self._optimizer = torch.optim.Adam(
            self._online.parameters(), lr=checks.number("lr", lr, above=0), foreach=False
        )
        self._replay: deque[dict[str, Tensor]] = deque(maxlen=CAPACITY)

    @property
    def warming_up(self) -> bool:
        """Return whether the replay memory still holds too few transitions for learning to start."""
        return len(self._replay) < self.warmup

    @torch.no_grad()
    def values(self, step: Step) -> Tensor:
        """Return the value Q_h of each action of each agent, (H, actions)."""
        return torch.squeeze(self._online(step.observation[None]), 0)

    @torch.no_grad()
    def joint_value(self, step: Step) -> float:
        """Return the joint value Q_tot of a decision of all agents."""
        return float(self._q_tot({name: tensor[None] for name, tensor in step._asdict().items()}))

    def observe(self, step: Step, reward: float, following: Step, done: bool) -> float | None:
        """Store a transition in the replay memory (35 bytes per agent), and learn from the memory.

        Returns:
            Squared TD error, mean over the updates; None during the warm-up.
        """
        self._replay.append({
            "observation": step.observation, "action": step.action.to(INDEX), "reward": torch.tensor(float(reward)),
            "next_observation": following.observation, "next_present": following.present,
            "done": torch.tensor(float(done)),
        })  # fmt: skip
        self.observed += 1
        if self.warming_up:
            return None
        losses = [self._update() for _ in range(self.updates)]
        if self.observed % TARGET_EVERY == 0:
            self._target.load_state_dict(self._online.state_dict())
        return math.fsum(losses) / len(losses)

    def _update(self) -> float:
        """Take one gradient step on transitions drawn without replacement; return their mean squared TD error."""
        drawn = torch.randperm(len(self._replay), generator=self._generator)[:BATCH]
        batch = _stack(self._replay[place] for place in drawn.tolist())
        batch["action"] = batch["action"].long()
        loss = ((self._q_tot(batch) - self._compute_targets(batch)) ** 2).mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._online.parameters(), CLIP, foreach=False)
        self._optimizer.step()
        return loss.item()

    def _q_tot(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._online.joint(self._online(batch["observation"]), batch["action"], batch["observation"])

    @torch.no_grad()
    def _compute_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        q = self._target(batch["next_observation"])
        open_to = available(batch["next_present"], batch["action"], self.num_actions)
        best = q.masked_fill(~open_to, -math.inf).argmax(dim=2)
        q_tot = self._target.joint(q, best, batch["next_observation"])
        return td_target(batch["reward"], q_tot, batch["done"], self.gamma)

    def state_dict(self) -> dict[str, Any]:
        """Return the learner's state as plain values and tensors, which are shared with this object."""
        moments = self._optimizer.state
        return {
            "online": dict(self._online.state_dict()),
            "target": dict(self._target.state_dict()),
            "optimizer": {name: dict(moments[p]) for name, p in self._online.named_parameters() if p in moments},
            "replay": _stack(self._replay),
            "observed": self.observed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned."""
        self._online.load_state_dict(state["online"])
        self._target.load_state_dict(state["target"])
        names = [name for name, _ in self._online.named_parameters()]
        moments = {names.index(name): values for name, values in state["optimizer"].items()}
        # The groups have this object's learning rate.
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})
        replay = state["replay"]
        self._replay.clear()
        self._replay.extend(dict(zip(replay, row, strict=True)) for row in zip(*replay.values(), strict=True))
        self.observed = int(state["observed"])


def _stack(transitions: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    rows = list(transitions)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}
