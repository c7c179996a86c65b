r"""Networks that value the action of every agent and, through a monotonic mixer, all of them; and their training."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairflare.core import checks

__all__ = ["Learner", "Mixer", "mix", "td_target"]

OBSERVATION_SIZE = 4  # numbers that an agent sees
EMBED = 32  # width of the mixer
CAPACITY, BATCH, TARGET_EVERY = 1000, 32, 10  # transitions: remembered, per gradient step, between target copies
CLIP = 10.0  # largest norm of the gradient


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
    hidden = nn.functional.elu((q.unsqueeze(-2) @ w1.abs()).squeeze(-2) + b1)
    return (hidden * w2.abs()).sum(dim=-1) + v


def td_target(rewards: Tensor, next_q_tot: Tensor, done: Tensor, gamma: float) -> Tensor:
    r"""What Q_tot should have been, :math:`y = R + \gamma (1 - done)\, Q_{tot}^{target}(s', a')`.

    Args:
        rewards, next_q_tot: (n,).
        done: (n,), 1 where the episode ended with this reward.
        gamma: discount in [0, 1].
    """
    return rewards + gamma * (1.0 - done) * next_q_tot


class _Linear(nn.Module):
    """``nn.Linear``, drawn from a generator of our own; with ``copies``, so many side by side, for (copies, n, in)."""

    def __init__(self, fan_in: int, fan_out: int, generator: torch.Generator, copies: int | None = None) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(fan_in)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.rand(shape, generator=generator) * (2 * bound) - bound)

        self.weight = drawn(fan_in, fan_out) if copies is None else drawn(copies, fan_in, fan_out)
        self.bias = drawn(fan_out) if copies is None else drawn(copies, 1, fan_out)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Mixer(nn.Module):
    """:func:`mix`, with weights that hypernetworks compute from the state, the agents' observations in a row."""

    def __init__(self, num_agents: int, generator: torch.Generator) -> None:
        super().__init__()
        size = num_agents * OBSERVATION_SIZE
        self.w1 = _Linear(size, num_agents * EMBED, generator)
        self.w2 = _Linear(size, EMBED, generator)
        self.b1 = _Linear(size, EMBED, generator)
        self.v = nn.Sequential(_Linear(size, EMBED, generator), nn.ReLU(), _Linear(EMBED, 1, generator))

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """(n, H) and (n, 4 H) to (n,)."""
        w1 = self.w1(state).unflatten(-1, (q.shape[-1], -1))
        return mix(q, w1, self.b1(state), self.w2(state), self.v(state).squeeze(-1))


class _Networks(nn.Module):
    """Q_h(o_h, a) of every agent, two hidden layers with ReLU and linear output, and the mixer over them."""

    def __init__(
        self, num_agents: int, num_actions: int, hidden: int, shared: bool, mixer: str, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.num_actions, self.shared = num_actions, shared
        copies, extras = (1, num_agents + num_actions) if shared else (num_agents, 0)
        self.agents = nn.Sequential(
            _Linear(OBSERVATION_SIZE + extras, hidden, generator, copies),
            nn.ReLU(),
            _Linear(hidden, hidden, generator, copies),
            nn.ReLU(),
            _Linear(hidden, num_actions, generator, copies),
        )
        self.mixer = Mixer(num_agents, generator) if mixer == "qmix" else None

    def forward(self, seen: Tensor, previous: Tensor) -> Tensor:
        """Q of every action: (n, H, 4) and (n, H) to (n, H, actions)."""
        if self.shared:  # who is asked, and its action before
            who = torch.eye(seen.shape[1]).expand(len(seen), -1, -1)
            seen = torch.cat([seen, who, nn.functional.one_hot(previous, self.num_actions)], dim=2)
        return self.agents(seen.transpose(0, 1)).transpose(0, 1)

    def joint(self, q: Tensor, action: Tensor, seen: Tensor) -> Tensor:
        """Q_tot of the agents' actions: (n, H, actions), (n, H) and (n, H, 4) to (n,)."""
        taken = q.gather(2, action.unsqueeze(2)).squeeze(2)
        return taken.sum(dim=-1) if self.mixer is None else self.mixer(taken, seen.flatten(1))


class Learner:
    r"""Agents and mixer with target networks and replay.

    Agent h has a network :math:`Q_h(o_h, a)`; the mixer makes of their values a joint one. They are trained together to

    .. math:: y = R + \gamma (1 - done)\, Q_{tot}^{target}\bigl((\max_a Q_h^{target}(o'_h, a))_h, s'\bigr)

    Args:
        num_agents, num_actions: H and the actions of each.
        generator: of weights and batches.
        mixer, share_agents, double_q, gamma, lr, hidden, warmup, updates: of :class:`fairflare.core.qmix.QMix`.
    """

    def __init__(
        self,
        num_agents: int,
        num_actions: int,
        generator: torch.Generator,
        *,
        mixer: str,
        share_agents: bool,
        double_q: bool,
        gamma: float,
        lr: float,
        hidden: int,
        warmup: int,
        updates: int,
    ) -> None:
        checks.choice("mixer", mixer, ("qmix", "vdn"))
        checks.whole("hidden", hidden)
        self.double_q = double_q
        self.gamma = checks.number("gamma", gamma, low=0, high=1)
        self.warmup = checks.number("warmup", warmup, low=1, high=CAPACITY, whole=True)
        self.updates = checks.whole("updates", updates)
        self.observed = 0  # transitions
        self._generator = generator
        self._online = _Networks(num_agents, num_actions, hidden, share_agents, mixer, generator)
        self._target = copy.deepcopy(self._online).requires_grad_(False)
        lr = checks.number("lr", lr, above=0)
        # without foreach the sums have one order on every machine
        self._optimizer = torch.optim.Adam(self._online.parameters(), lr=lr, foreach=False)
        self._replay: deque[dict[str, Tensor]] = deque(maxlen=CAPACITY)

    @property
    def warming_up(self) -> bool:
        """Too few transitions to learn from."""
        return len(self._replay) < self.warmup

    @torch.no_grad()
    def values(self, observation: Tensor, previous: Tensor) -> Tensor:
        """Q_h of each action: (H, 4) and (H,), the actions before, to (H, actions)."""
        return self._online(observation[None], previous[None])[0]

    @torch.no_grad()
    def joint_value(self, decision: Mapping[str, Tensor]) -> float:
        """Q_tot of ``observation``, ``previous`` and ``action``."""
        return float(self._q_tot(_stacked([decision])))

    def observe(self, transition: Mapping[str, Tensor]) -> float | None:
        """Remembers a transition and learns from the memory.

        Args:
            transition: ``observation`` (H, 4), ``previous`` and ``action`` (H,), ``reward`` and ``done`` (scalars),
                ``next_observation`` (H, 4), ``next_available`` (H, actions).

        Returns:
            Squared TD error, mean over the updates; None during the warm-up.
        """
        self._replay.append(dict(transition))
        self.observed += 1
        if self.warming_up:
            return None
        losses = [self._update() for _ in range(self.updates)]
        if self.observed % TARGET_EVERY == 0:
            self._target.load_state_dict(self._online.state_dict())
        return math.fsum(losses) / len(losses)

    def _update(self) -> float:
        """One gradient step on transitions drawn without replacement; their mean squared TD error."""
        drawn = torch.randperm(len(self._replay), generator=self._generator)[:BATCH]
        batch = _stacked(self._replay[place] for place in drawn.tolist())
        loss = ((self._q_tot(batch) - self._wanted(batch)) ** 2).mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._online.parameters(), CLIP, foreach=False)
        self._optimizer.step()
        return loss.item()

    def _q_tot(self, batch: Mapping[str, Tensor]) -> Tensor:
        q = self._online(batch["observation"], batch["previous"])
        return self._online.joint(q, batch["action"], batch["observation"])

    @torch.no_grad()
    def _wanted(self, batch: Mapping[str, Tensor]) -> Tensor:
        after = batch["next_observation"], batch["action"]
        q = self._target(*after)
        ranking = self._online(*after) if self.double_q else q
        best = ranking.masked_fill(~batch["next_available"], -math.inf).argmax(dim=2)
        q_tot = self._target.joint(q, best, batch["next_observation"])
        return td_target(batch["reward"], q_tot, batch["done"], self.gamma)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, shared with this object."""
        moments = self._optimizer.state
        return {
            "online": dict(self._online.state_dict()),
            "target": dict(self._target.state_dict()),
            "optimizer": {name: dict(moments[p]) for name, p in self._online.named_parameters() if p in moments},
            "replay": _stacked(self._replay),
            "observed": self.observed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave, and keeps it."""
        self._online.load_state_dict(state["online"])
        self._target.load_state_dict(state["target"])
        names = [name for name, _ in self._online.named_parameters()]
        moments = {names.index(name): values for name, values in state["optimizer"].items()}
        groups = self._optimizer.state_dict()["param_groups"]  # this object's learning rate
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        replay = state["replay"]
        self._replay.clear()
        self._replay.extend(dict(zip(replay, row, strict=True)) for row in zip(*replay.values(), strict=True))
        self.observed = int(state["observed"])


def _stacked(transitions: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    rows = list(transitions)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}
