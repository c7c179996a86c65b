"""Measure what secure sums cost at a site and at the server, beside the plain mean of the same models.

Site: an update is turned into numbers of the ring, masked and written into the log (``SumLog.masked``). Server: the
vectors of all sites are added, their own masks taken off, and every tensor read (``Addition``). The ratio of the server
is to ``weighted_average`` of the same updates in float32, already in memory; that of the bytes is to float32. No
message travels. Processor seconds of one thread, the best of the runs.

    python benchmarks/bench_sums.py [--sites 6 20] [--megabytes 12] [--repeat 3]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairflare.core.states import weighted_average
from fairflare.privacy.sums.journal import SumLog
from fairflare.privacy.sums.keys import SiteKeys
from fairflare.privacy.sums.masks import Addition, Question, digest
from fairflare.privacy.sums.ring import Layout, Ring

LAYERS = 40  # tensors of the model


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
    asked, layout = Question(0, 0, "params", Ring.fitting(bits, 8.0), model, table), Layout.of(updates[sites[0]])
    logs = {site: SumLog(site, folder / site, "bench") for site in sites}
    sent = {site: logs[site].masked(asked, pairs[site], layout, updates[site]).vector for site in sites}
    at_site, _ = best(repeat, lambda: logs[sites[0]].masked(asked, pairs[sites[0]], layout, updates[sites[0]]))
    own = {site: logs[site].release(asked, pairs[site], sites) for site in sites}

    def summed() -> dict[str, torch.Tensor]:
        total = Addition(asked, layout)
        for site in sites:
            total.add(site, sent[site])
        return {name: tensor.float() for name, tensor in total.opened(own).items()}

    at_server, found = best(repeat, summed)
    error = max(float((found[name] - mean[name]).abs().max()) for name in mean)
    length = sent[sites[0]].nbytes
    ratios = f"{at_server / plain:.2f} | {length / 1e6:.1f} | {length / (4 * layout.numbers):.2f} | {error:.1e}"
    times = f"{1e3 * agreeing:.0f} | {at_site:.3f} | {at_site / plain:.2f} | {at_server:.3f} | {plain:.3f}"
    return f"| {num_sites} | {bits} | {times} | {ratios} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="secure sums: processor seconds and bytes beside a plain mean")
    parser.add_argument("--sites", type=int, nargs="+", default=[6, 20])
    parser.add_argument("--megabytes", type=float, default=12, help="of the model in float32")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
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
