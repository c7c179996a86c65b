"""Measure how FedMRL's agents grow with the number of sites: bytes of their checkpoint, seconds of learning.

    python benchmarks/bench_mrl_scale.py --sites 4 8 16 32 --rounds 60

Time is the processor's for one transition, eight gradient steps of up to 32 transitions each, on one thread; the memory
of transitions is as full as after so many rounds.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time

import numpy as np
import torch

from fairflare.core.agents.mu_rewards import observation, reward
from fairflare.core.qmix import QMix


def play(agents: QMix, rounds: int) -> list[float]:
    """Return the seconds of each round in which the agents learned."""
    rng = np.random.default_rng(0)
    seconds = []
    for r in range(rounds):
        seen = {
            site: observation(-rng.random(), 1 / len(agents.agents), rng.random(), 2 * rng.random(), num_classes=7)
            for site in agents.agents
        }
        started = time.process_time()
        _, learnt = agents.end_round(seen, reward(float(rng.random())), done=r == rounds - 1)
        if learnt is not None:
            seconds.append(time.process_time() - started)
    return seconds


def saved(agents: QMix) -> int:
    """Return the bytes of the agents' state on disk."""
    file = io.BytesIO()
    torch.save(agents.state_dict(), file)
    return file.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"after {arguments.rounds} rounds")
    print("sites  checkpoint MB  bytes a site  seconds of learning (median, processor)")
    for sites in arguments.sites:
        agents = QMix([f"site-{k}" for k in range(sites)])
        seconds = play(agents, arguments.rounds)
        size = saved(agents)
        print(f"{sites:5d}  {size / 1e6:13.2f}  {size / sites:12.0f}  {statistics.median(seconds):.3f}", flush=True)


if __name__ == "__main__":
    main()
