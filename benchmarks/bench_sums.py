"""Measure what secure sums cost at a site and at the server, beside the plain mean of the same models.

Site: an update is turned into numbers of the ring, masked and written into the log (``SumLog.mask_update``). Server:
the vectors of all sites are added, their own masks taken off, and every tensor read (``Addition``). Its ratio is
to ``weighted_average`` of the same updates in float32, already in memory; that of the bytes is to float32. No
message travels. Processor seconds of one thread, the best of the runs.

With ``--run`` a second table instead: a round of runs with and without ``secure=sums`` in one process, in which nearly
nothing is trained: bytes of tensors and of all else in the messages, and processor seconds of all sites and the server.

With ``--liar`` a third table: runs in which one site opens its mask with a wrong key in every round. Rounds that are
lost, sites that go on, and the correlation of the opened sums with a single site's update, which is drawn at random.

    python benchmarks/bench_sums.py [--sites 6 20] [--megabytes 12] [--repeat 3]
    python benchmarks/bench_sums.py --run --sites 6 100
    python benchmarks/bench_sums.py --liar --sites 5 6 9 20
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fairflare.core.states import weighted_average
from fairflare.exchange.messages import Message, num_bytes
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.transports.calls import LocalTransport
from fairflare.federation.transports.local import run_local
from fairflare.privacy.sums.exposure import draw_groups
from fairflare.privacy.sums.journal import SumLog
from fairflare.privacy.sums.keys import SiteKeys
from fairflare.privacy.sums.masks import Addition, SumAsked, digest
from fairflare.privacy.sums.ring import Ring, SumLayout
from fairflare.reporting.results import read_results

LAYERS = 40  # tensors of the model
TASK = Path(__file__).with_name("numbers_task.py")


def best(repeat: int, does: Callable[[], Any]) -> tuple[float, Any]:
    """Return the fewest processor seconds of several runs, and what the last one returned."""
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        result = does()
        seconds.append(time.process_time() - start)
    return min(seconds), result


def measure(num_sites: int, megabytes: float, bits: int, repeat: int, folder: Path) -> str:
    """Return a row of the table."""
    sites = [f"site-{k:02d}" for k in range(num_sites)]
    draws = torch.Generator().manual_seed(0)
    size = int(megabytes * 1e6 / 4 / LAYERS)
    updates = {s: {f"w{k:02d}": torch.randn(size, generator=draws) / 100 for k in range(LAYERS)} for s in sites}
    weights = dict.fromkeys(sites, 1 / num_sites)
    plain, mean = best(repeat, lambda: weighted_average(updates, weights, updates=True))

    run, keys = os.urandom(32), {site: SiteKeys(site, folder / site) for site in sites}
    told = [key.hello(run) for key in keys.values()]
    agreeing, _ = best(1, lambda: keys[sites[0]].agree(run, told))
    pairs = {site: key.agree(run, told) for site, key in keys.items()}
    model = digest(updates[sites[0]])
    table = {site: (weight,) for site, weight in weights.items()}
    asked, layout = (
        SumAsked(0, 0, "params", Ring.fitting(bits, 8.0), model, table),
        SumLayout.make(updates[sites[0]]),
    )
    logs = {site: SumLog(site, folder / site, "bench") for site in sites}
    sent = {site: logs[site].mask_update(asked, pairs[site], layout, updates[site])[0] for site in sites}
    at_site, _ = best(repeat, lambda: logs[sites[0]].mask_update(asked, pairs[sites[0]], layout, updates[sites[0]]))
    own = {site: logs[site].release(asked, pairs[site], sites) for site in sites}

    def summed() -> dict[str, torch.Tensor]:
        total = Addition(asked, layout)
        for site in sites:
            total.add(site, sent[site])
        return {name: tensor.float() for name, tensor in total.open_sum(own).items()}

    at_server, found = best(repeat, summed)
    error = max(float((found[name] - mean[name]).abs().max()) for name in mean)
    length = sent[sites[0]].nbytes
    ratios = f"{at_server / plain:.2f} | {length / 1e6:.1f} | {length / (4 * layout.numbers):.2f} | {error:.1e}"
    times = f"{1e3 * agreeing:.0f} | {at_site:.3f} | {at_site / plain:.2f} | {at_server:.3f} | {plain:.3f}"
    return f"| {num_sites} | {bits} | {times} | {ratios} |"


class Counted(Listener):
    """Count seconds, and bytes by direction, of tensors and of all else, from the first round's begin to its end."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(("sent", "beside", "back", "beside_back"), 0)

    def round_started(self, current_round: int) -> None:
        self.start, self.bytes = time.process_time(), dict.fromkeys(self.bytes, 0)

    def round_done(self, record: object, metric: str) -> None:
        self.seconds, self.of_round = time.process_time() - self.start, dict(self.bytes)


def of_a_round(method: str, sites: int, megabytes: float, secure: str) -> Counted:
    """Return what a round of a run costs."""
    counted, answer = Counted(), LocalTransport._answer

    def weighed(transport: LocalTransport, site: str, name: str, task: Message) -> Message:
        found = answer(transport, site, name, task)
        sizes = (num_bytes(task.params), len(pickle.dumps(task.meta)), num_bytes(found.params))
        for key, size in zip(counted.bytes, (*sizes, len(pickle.dumps(found.meta))), strict=True):
            counted.bytes[key] += size
        return found

    settings = {"local_epochs": 1, "max_weight": 0.5, "secure": secure, "width": int(megabytes * 1e6 / 4 / 3)}
    plan = make_plan(method, task_file=TASK, sites=sites, num_rounds=1, settings=settings)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(LocalTransport, "_answer", weighed):
        run_local(plan, Path(folder), listeners=[counted])
    return counted


def in_a_run(method: str, sites: int, megabytes: float) -> str:
    """Return a row of the table of rounds."""
    plain, sums = (of_a_round(method, sites, megabytes, secure) for secure in ("", "sums"))
    old, new = plain.of_round, sums.of_round
    up = [(of["back"] + of["beside_back"]) / sites / 1e6 for of in (old, new)]
    down = [(of["sent"] + of["beside"]) / sites / 1e6 for of in (old, new)]
    rest = [(of["beside"] + of["beside_back"]) / sites / 1e3 for of in (old, new)]
    every = sum(new.values()) / sum(old.values())
    cells = [f"{up[0]:.2f}", f"{up[1]:.2f}", f"{new['back'] / old['back']:.3f}", f"{down[0]:.2f}", f"{down[1]:.2f}"]
    cells += [f"{rest[0]:.1f}", f"{rest[1]:.1f}", f"{every:.3f}", f"{plain.seconds / sites:.2f}"]
    return f"| {method} | {sites} | {' | '.join(cells)} | {sums.seconds / sites:.2f} |"


def with_a_liar(sites: int, rounds: int = 6) -> str:
    """Return a row of the table of runs in which the last site lies."""
    answer, liar = LocalTransport._answer, f"site-{sites}"

    def lies(transport: LocalTransport, site: str, name: str, task: Message) -> Message:
        found = answer(transport, site, name, task)
        if (site, name) == (liar, "release"):
            found.meta["report"] = {label: bytes(32) for label in found.meta["report"]}
        return found

    settings = {"local_epochs": 1, "max_weight": 0.5, "secure": "sums", "width": 1000}
    plan = make_plan("fed_avg", task_file=TASK, sites=sites, num_rounds=rounds, settings=settings)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(LocalTransport, "_answer", lies):
        with contextlib.suppress(RoundFailed):
            run_local(plan, Path(folder))
        (results,) = Path(folder).rglob("results.json")
        done = [len(record.accepted) for record in read_results(results.parent).rounds]
    ends = "the run ends" if len(done) < rounds else str(done[-1])
    draws = torch.randn(sites, 100_000, generator=torch.Generator().manual_seed(0))

    def correlation(part: Sequence[int]) -> float:
        return max(float(torch.corrcoef(torch.stack([draws[list(part)].mean(0), draws[k]]))[0, 1]) for k in part)

    parts = draw_groups("bench", dict.fromkeys(map(str, range(sites)), 1.0))
    largest = max(correlation([int(k) for k in part]) for part in parts)
    sizes = " + ".join(str(len(part)) for part in parts) if len(parts) > 1 else "-"
    shown = f"{largest:.2f}" if len(parts) > 1 else "-"
    return f"| {sites} | {2 if ends == 'the run ends' else done.count(0)} | {sizes} | {ends} | " + (
        f"{correlation(range(sites)):.2f} | {shown} |"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="secure sums: processor seconds and bytes beside a plain mean")
    parser.add_argument("--sites", type=int, nargs="+", default=[6, 20])
    parser.add_argument("--megabytes", type=float, default=12, help="of the model in float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--run", action="store_true", help="a round of runs in one process")
    parser.add_argument("--liar", action="store_true", help="runs in one process, in which one site lies")
    parser.add_argument("--methods", nargs="+", default=["fed_avg", "fed_lwr"], help="of these runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.run or args.liar:
        logging.disable(logging.ERROR if args.liar else logging.WARNING)
        os.environ["FAIRFLARE_REPORT"] = "0"
    if args.liar:
        print("| sites | rounds lost | groups | sites that go on | a site in the sum of all | in that of a group |")
        print("| --- " * 6 + "|")
        for num_sites in args.sites:
            print(with_a_liar(num_sites), flush=True)
        return
    if args.run:
        print("| method | sites | MB up | sums | tensors | MB down | sums | KB beside | sums | all | s a site | sums |")
        print("| --- " * 12 + "|")
        of_a_round("fed_avg", 3, 0.01, "sums")  # loads what a first run loads
        for method in args.methods:
            for num_sites in args.sites:
                print(in_a_run(method, num_sites, args.megabytes), flush=True)
        return
    print(
        "| sites | ring | keys, ms | a site, s | to plain | server, s | plain, s | to plain | MB | to float32 | error |"
    )
    print("| --- " * 11 + "|")
    for num_sites in args.sites:
        for bits in (64, 32):
            with tempfile.TemporaryDirectory() as folder:
                print(measure(num_sites, args.megabytes, bits, args.repeat, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
