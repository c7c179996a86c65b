"""Compare the policies that choose mu, in a world where the right mu of each site is known.

Five sites hold equal shares of one made-up problem (five Gaussian classes in ten dimensions, a network with one hidden
layer). At three of them nine of ten training labels name the next class; validation and test labels are right. So mu
is best 0 at the first two sites, and 1 at the others. Sites weigh alike. The policies are the package's own.

    python benchmarks/bench_mu_policy.py [--rate 0.05] [--rounds 400 --rows "hand|bandit"]

A difference has its 95 % interval over the seeds; a star marks those that exclude 0.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import stats

from fairflare.core.agents.mu_rewards import reward
from fairflare.methods.parts.mu_policy import BanditMu, FixedMu, MuPolicy, QMixMu, RandomMu, VdnMu

SITES = [f"site-{k}" for k in range(1, 6)]
WRONG = 3  # number of sites with wrong labels, the last ones
CLASSES, SIZE, HIDDEN = 5, 10, 32
TRAIN, VALIDATION, TEST = 320, 80, 400  # cases of a site
RATE, BATCH, EPOCHS = 0.02, 16, 2
Array = np.ndarray


class World:
    """Hold the sites' cases, and train and measure all sites' networks at once."""

    def __init__(self, seed: int, separation: float = 0.5) -> None:
        self.rng = np.random.default_rng(seed)
        middles = separation * self.rng.normal(size=(CLASSES, SIZE))

        def cases(count: int) -> tuple[Array, Array]:
            labels = self.rng.integers(CLASSES, size=(len(SITES), count))
            return middles[labels] + self.rng.normal(size=(len(SITES), count, SIZE)), labels

        self.x, right = cases(TRAIN)
        wrong = self.rng.random(right.shape) < 0.9
        wrong[: len(SITES) - WRONG] = False
        self.y = np.where(wrong, (right + 1) % CLASSES, right)
        self.validation, self.test = cases(VALIDATION), cases(TEST)
        self.model = [
            self.rng.normal(size=(SIZE, HIDDEN)) / math.sqrt(SIZE), np.zeros((1, HIDDEN)),
            self.rng.normal(size=(HIDDEN, CLASSES)) / math.sqrt(HIDDEN), np.zeros((1, CLASSES)),
        ]  # fmt: skip

    def train(self, mu: Array) -> tuple[list[Array], Array]:
        """Return the five local models, and the losses of their last epoch, after one round with ``mu`` by site."""
        start = [np.repeat(p[None], len(SITES), 0) for p in self.model]
        local = [p.copy() for p in start]
        losses = np.zeros(len(SITES))
        for epoch in range(EPOCHS):
            order = self.rng.permuted(np.tile(np.arange(TRAIN), (len(SITES), 1)), axis=1)
            for batch in np.split(order, TRAIN // BATCH, axis=1):
                x, y = np.take_along_axis(self.x, batch[:, :, None], 1), np.take_along_axis(self.y, batch, 1)
                hidden = np.maximum(x @ local[0] + local[1], 0)
                share = softmax(hidden @ local[2] + local[3])
                if epoch == EPOCHS - 1:
                    picked = np.take_along_axis(share, y[:, :, None], 2)[:, :, 0]
                    losses += -np.log(np.maximum(picked, 1e-12)).mean(1) * BATCH / TRAIN
                error = (share - np.eye(CLASSES)[y]) / BATCH
                back = (error @ local[2].transpose(0, 2, 1)) * (hidden > 0)
                slopes = [
                    x.transpose(0, 2, 1) @ back, back.sum(1, keepdims=True),
                    hidden.transpose(0, 2, 1) @ error, error.sum(1, keepdims=True),
                ]  # fmt: skip
                for p, slope, first in zip(local, slopes, start, strict=True):
                    p -= RATE * (slope + mu[:, None, None] * (p - first))
        return local, losses


def softmax(z: Array) -> Array:
    power = np.exp(z - z.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def accuracy(model: list[Array], cases: tuple[Array, Array]) -> Array:
    """Return the share of right answers, by site."""
    found = (np.maximum(cases[0] @ model[0] + model[1], 0) @ model[2] + model[3]).argmax(-1)
    return (found == cases[1]).mean(1)


def reports_of(received: Array, local: list[Array], losses: Array, validation: tuple[Array, Array]) -> dict[str, Any]:
    """Return what the sites report of a round."""
    mine = accuracy(local, validation)
    return {
        site: {
            "train_loss": float(losses[k]), "accuracy": float(mine[k]), "global_accuracy": float(received[k]),
            "num_validation": VALIDATION, "entropy": -1.6, "num_classes": CLASSES,
        }
        for k, site in enumerate(SITES)
    }  # fmt: skip


def inputs_of(reports: dict[str, Any], current_round: int, rounds: int, seed: int) -> Any:
    return SimpleNamespace(
        current_round=current_round, num_rounds=rounds, sites=SITES, asked=SITES, seed=seed, reports=reports,
        num_samples=dict.fromkeys(SITES, TRAIN),
    )  # fmt: skip


def steps(mu: Array) -> Array:
    """Return how many plain steps a round's steps with ``mu`` are worth, if a site's slope stayed what it is."""
    decay = 1 - RATE * mu
    return np.array([sum(d**step for step in range(EPOCHS * TRAIN // BATCH)) for d in decay])


def teach(policy: QMixMu, world: World, mu: Array, local: list[Array], how: str, context: tuple[int, int, int]) -> None:
    """Give the agents eight more transitions: what other mu would have made of this round.

    ``how``: "rescaled" gives the models that the sites sent the length that they would have with another mu, were a
    loss flat; "trained" trains them again, as no server can. Either way the models are measured on the sites' images.
    """
    agents = policy._agents
    if agents is None or not agents._pending:
        return
    state, before, first = world.rng.bit_generator.state, agents._pending[-1], [p.copy() for p in world.model]
    other = np.random.default_rng(context)
    for _ in range(8):
        action = other.integers(len(agents.actions), size=len(SITES))
        instead = np.array(agents.actions)[action]
        if how == "trained":
            world.rng.bit_generator.state = state
            made, losses = world.train(instead)
        else:
            factor = (steps(instead) / steps(mu))[:, None, None]
            made, losses = [p + factor * (q - p) for p, q in zip(first, local, strict=True)], np.ones(len(SITES))
        after = accuracy([p.mean(0) for p in made], world.validation)
        seen = policy._observations(inputs_of(reports_of(after, made, losses, world.validation), *context))
        held = agents._last_observation
        following = agents._situation(seen)
        agents._last_observation = held
        agents.observe(before._replace(action=torch.from_numpy(action)), reward(float(after.mean())), following)
    world.rng.bit_generator.state = state


def run(policy: MuPolicy, seed: int, rounds: int, more: str = "") -> tuple[float, float, float]:
    """Return over the last ten rounds: test accuracy, mean mu of the sites with right and with wrong labels."""
    world, chosen, reached = World(seed), [], []
    for r in range(rounds):
        told = policy.directives(SITES)
        mu = np.array([told[site] for site in SITES])
        chosen.append(mu)
        received, state = accuracy(world.model, world.validation), world.rng.bit_generator.state
        local, losses = world.train(mu)
        if more:
            after, world.rng.bit_generator.state = world.rng.bit_generator.state, state
            teach(policy, world, mu, local, more, (r, rounds, seed))  # type: ignore[arg-type]
            world.rng.bit_generator.state = after
        policy.choose(inputs_of(reports_of(received, local, losses, world.validation), r, rounds, seed))
        world.model = [p.mean(0) for p in local]
        reached.append(float(accuracy(world.model, world.test).mean()))
    late = np.mean(chosen[-10:], axis=0)
    return float(np.mean(reached[-10:])), float(late[:-WRONG].mean()), float(late[-WRONG:].mean())


class Eager(QMixMu):
    """Take four times as many gradient steps."""

    updates = 32


class Short(QMixMu):
    """Explore in a tenth of the rounds."""

    explore = 0.1


class Scaled(QMixMu):
    """Multiply the reward by ten."""

    def _new_agents(self, names: set[str], run_seed: int) -> Any:
        agents = super()._new_agents(names, run_seed)
        plain = agents.observe
        agents.observe = lambda step, reward, *rest, **named: plain(step, 10 * reward, *rest, **named)  # type: ignore[method-assign]
        return agents


THREE = (0.0, 0.1, 1.0)
NEEDED = {site: float(k >= len(SITES) - WRONG) for k, site in enumerate(SITES)}
ROWS: dict[str, tuple[Callable[[], MuPolicy], str]] = {
    "mu 0 (FedAvg)": (lambda: FixedMu(by_site=dict.fromkeys(SITES, 0.0)), ""),
    "mu 0.1": (lambda: FixedMu(by_site=dict.fromkeys(SITES, 0.1)), ""),
    "by hand": (lambda: FixedMu(by_site=NEEDED), ""),
    "random": (RandomMu, ""),
    "random, 3 actions": (lambda: RandomMu(actions=THREE), ""),
    "bandit": (BanditMu, ""),
    "bandit, 3 actions": (lambda: BanditMu(actions=THREE), ""),
    "agents": (QMixMu, ""),
    "agents, zeta 0": (lambda: QMixMu(zeta=0.0), ""),
    "agents, reward times 10": (Scaled, ""),
    "agents, 3 actions": (lambda: QMixMu(actions=THREE), ""),
    "agents, exploration 0.1": (Short, ""),
    "agents, updates 32": (Eager, ""),
    "agents, learning rate 0.01": (lambda: QMixMu(learning_rate=0.01), ""),
    "agents, gamma 0": (lambda: QMixMu(gamma=0.0), ""),
    "agents, gamma 0, 3 actions": (lambda: QMixMu(gamma=0.0, actions=THREE), ""),
    "agents, VDN": (VdnMu, ""),
    "agents, 8 more transitions, rescaled": (QMixMu, "rescaled"),
    "agents, 8 more transitions, trained": (QMixMu, "trained"),
}


def difference(mine: list[float], theirs: list[float]) -> str:
    """Return the mean difference over the seeds, with its 95 % interval (Student's t)."""
    found = np.subtract(mine, theirs)
    reach = stats.t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / math.sqrt(len(found))
    low, high = found.mean() - reach, found.mean() + reach
    return f"{found.mean():+.3f} [{low:+.3f}, {high:+.3f}]" + " *" * bool(low > 0 or high < 0)


def main() -> None:
    global RATE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate of the sites")
    parser.add_argument("--rows", default="", help="only rows whose name matches this regular expression")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    RATE = arguments.rate
    found: dict[str, list[tuple[float, float, float]]] = {}
    print(f"learning rate {RATE:g}, {arguments.rounds} rounds, seeds 0 to {arguments.seeds - 1}")
    print("| policy | accuracy | - random | - agents | mu: right labels | wrong labels | seconds |")
    print("| --- |" + " ---: |" * 6)
    names = [name for name in ROWS if name in ("random", "agents") or re.search(arguments.rows, name)]
    for name in sorted(names, key=lambda name: name not in ("random", "agents")):
        make, more = ROWS[name]
        started = time.process_time()
        found[name] = [run(make(), seed, arguments.rounds, more) for seed in range(arguments.seeds)]
        (reached, right, wrong), seconds = zip(*found[name], strict=True), time.process_time() - started
        cells = [
            difference(list(reached), [one for one, *_ in found[other]]) if other in found and other != name else ""
            for other in ("random", "agents")
        ]
        cells += [f"{np.mean(right):.2f}", f"{np.mean(wrong):.2f}", f"{seconds:.0f}"]
        print(" | ".join([f"| {name}", f"{np.mean(reached):.3f}", *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
