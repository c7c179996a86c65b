"""Model a round's cost with many hospitals, and the effect of relays that add up, by a formula and a simulation.

    python benchmarks/arrivals.py [--sites 1000] [--relays 0 10 32] [--model-mb 30] [--rounds 200]
    python benchmarks/arrivals.py --check              # beside rounds that were measured (docs/performance.md)

A round of one phase: the server hands the model out over its line, each site fetches it over its own, trains, and
sends an update of the same size back; the server takes each in (check, keep) and sums. Sites differ: speed of training
is log-normal, lines are of three kinds, and some sites are away. With relays a site talks to its relay; one that only
passes on (FLARE 2.9's) carries every byte to the server; one that adds up sends one sum. Nothing here is measured but
``PER_ROUND``, ``PER_SITE`` and ``PER_MEGABYTE``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

#: Seconds of the server's processor for each site and round: a message and what is kept of it (bench_scale, FedAvg),
#: and for each MB of model to check, keep and sum it in memory (bench_aggregation: 0.127 s and 0.14 s for 8 x 46.8 MB).
PER_SITE, PER_MEGABYTE = 0.006, 0.0007
PER_ROUND = 0.4  # seconds of a round for any number of sites, fitted to the rows of --check


@dataclass(frozen=True)
class Network:
    """Describe a network of hospitals.

    Args:
        sites: how many.
        model: MB, each way.
        server_line: MB/s of the server, each way; relays have the same.
        train: median seconds of a site's training.
        spread: standard deviation of its logarithm.
        lines: MB/s of the sites' lines, and the share of the sites that has each.
        away: share of the sites that do not answer in a round.
    """

    sites: int = 1000
    model: float = 30.0
    server_line: float = 120.0
    train: float = 300.0
    spread: float = 0.5
    lines: tuple[tuple[float, float], ...] = ((1.0, 0.05), (5.0, 0.35), (50.0, 0.6))
    away: float = 0.02


def served(ready: np.ndarray, size: float, rate: float) -> np.ndarray:
    """Return when a line that serves one piece after the other has finished each piece of work.

    Args:
        ready: seconds at which each is there, in any order.
        size, rate: MB of each, MB/s.
    """
    order = np.argsort(ready, kind="stable")
    done, free = np.empty_like(ready), 0.0
    for place in order:
        free = max(free, float(ready[place])) + size / rate
        done[place] = free
    return done


def one_round(net: Network, rng: np.random.Generator, relays: int, adds: bool) -> dict[str, float]:
    """Return seconds until the last answer and until 90 % and 99 %, MB over the server's line, its processor seconds.

    Args:
        net: of whom.
        rng: of this round.
        relays: that the sites are dealt to in turn; 0: none.
        adds: they hand on one sum, and not each answer.
    """
    rates = rng.choice([rate for rate, _ in net.lines], net.sites, p=[share for _, share in net.lines])
    training = net.train * np.exp(net.spread * rng.standard_normal(net.sites))
    here = rng.random(net.sites) >= net.away
    group = np.arange(net.sites) % max(relays, 1)
    zero = np.zeros(net.sites)
    if not relays:
        have = np.maximum(served(zero, net.model, net.server_line), net.model / rates)
    else:
        # A relay that adds up is handed the model once; one that only passes on is handed it for each of its sites.
        if adds:
            at_relay = served(np.zeros(relays), net.model, net.server_line)[group]
        else:
            at_relay = served(zero, net.model, net.server_line)
        have = at_relay.copy()
        for relay in range(relays):
            mine = group == relay
            have[mine] = np.maximum(
                served(at_relay[mine], net.model, net.server_line), at_relay[mine] + net.model / rates[mine]
            )
    sent = (have + training + net.model / rates)[here]
    if relays and adds:
        groups = group[here]
        last = np.array([served(sent[groups == r], net.model, net.server_line).max() for r in range(relays)])
        done, answers = served(last, net.model, net.server_line), relays
    else:
        through = sent
        if relays:
            groups, through = group[here], sent.copy()
            for relay in range(relays):
                through[groups == relay] = served(sent[groups == relay], net.model, net.server_line)
        done, answers = served(through, net.model, net.server_line), int(here.sum())
    each = PER_SITE + PER_MEGABYTE * net.model
    processor = PER_ROUND + answers * each
    carried = net.model * (answers + (relays if relays and adds else net.sites))
    return {
        "seconds": float(done.max()) + PER_ROUND + each,
        "90 %": float(np.quantile(done, 0.9)),
        "99 %": float(np.quantile(done, 0.99)),
        "MB": carried,
        "processor": processor,
    }


def table(net: Network, relays: list[int], rounds: int) -> None:
    print(
        f"{net.sites} sites, a model of {net.model:g} MB, server's line {net.server_line:g} MB/s, "
        f"median training {net.train:g} s"
    )
    print(
        "| relays | what a relay does | seconds, median round | until 90 % | until 99 % | GB over the server's line | "
        "processor s |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for count in relays:
        for adds in [False] if not count else [False, True]:
            rng = np.random.default_rng(0)
            found = [one_round(net, rng, count, adds) for _ in range(rounds)]
            middle = {key: float(np.median([one[key] for one in found])) for key in found[0]}
            what = "adds up" if adds else "passes on" if count else "-"
            print(
                f"| {count} | {what} | {middle['seconds']:.0f} | {middle['90 %']:.0f} | {middle['99 %']:.0f} | "
                f"{middle['MB'] / 1000:.1f} | {middle['processor']:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--relays", type=int, nargs="+", default=[0, 10, 32])
    parser.add_argument("--model-mb", type=float, default=30.0)
    parser.add_argument("--train", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--check", action="store_true", help="rounds without training, beside bench_scale")
    given = parser.parse_args()
    if given.check:
        check()
        return
    table(Network(sites=given.sites, model=given.model_mb, train=given.train), given.relays, given.rounds)


def check() -> None:
    """Print the model's processor seconds of a round beside a process's own, at two sizes of model."""
    import bench_server_memory

    print("| sites | MB | processor seconds, measured | model | ratio |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for sites, megabytes in ((30, 4), (100, 4), (30, 20)):
        found = bench_server_memory.in_process(sites, megabytes, 2)["processor seconds a round"]
        expected = PER_ROUND + sites * (PER_SITE + PER_MEGABYTE * megabytes)
        print(f"| {sites} | {megabytes} | {found:.2f} | {expected:.2f} | {found / expected:.1f} |", flush=True)


if __name__ == "__main__":
    main()
