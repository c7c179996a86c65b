"""Attack every method and phase with hostile answers, and the sealed reader with bundles, and print a table.

One case again: ``python -m tests.fuzz --method fed_mas --phase train --seed 0 --case 17``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from fairflare.methods.base.catalog import all_methods

from .bench import OF_BUNDLES, OUTCOMES, Verdict, attack, phases_of
from .bundles import BUNDLES, attack_bundles
from .statistics import STATS, attack_statistics
from .sums import SUMS, attack_sums

COLUMNS = ("method", "phase", "cases", "sent", "accepted", *OUTCOMES, *OF_BUNDLES)
SHOWN = 20
OTHERS = {
    STATS: attack_statistics,
    BUNDLES: attack_bundles,
    SUMS: attack_sums,
}  # besides the methods, each with one phase of its name


def main() -> int:
    given = _arguments()
    chosen = given.method or [*OTHERS, *all_methods()]
    pairs = [(m, p) for m in chosen for p in ([m] if m in OTHERS else phases_of(m))]
    jobs = [(m, p) for m, p in pairs if p in (given.phase or [p])]
    started, faulty = time.monotonic(), 0
    total: Counter[str] = Counter()
    print("  ".join(f"{name:>12}" for name in COLUMNS), flush=True)
    with memory_folder() as root, ProcessPoolExecutor(given.workers) as pool:
        every = range(given.cases) if given.case is None else range(given.case, given.case + 1)
        how = {"cases": every} if given.replies is None else {"replies": given.replies}
        running = {
            pool.submit(OTHERS.get(p, attack), Path(root) / f"{m}-{p}", m, p, given.seed, **how): (m, p)
            for m, p in jobs
        }  # fmt: skip
        for done in as_completed(running):
            method, phase = running[done]
            if error := done.exception():
                faulty += 1
                case = Path(root) / f"{method}-{phase}" / "running"
                text = case.read_text() if case.exists() else ""
                print(f"{method:>12}  {phase:>12}  the bench itself failed: {error!r} {text}", flush=True)
                continue
            verdicts = done.result()
            counts = count(verdicts)
            total.update(counts)
            print("  ".join(f"{x!s:>12}" for x in (method, phase, *(counts[c] for c in COLUMNS[2:]))), flush=True)
            bad = [v for v in verdicts if v.faults]
            faulty += len(bad)
            for verdict in bad[:SHOWN] if given.case is None else verdicts:
                print(told(method, phase, given.seed, verdict), flush=True)
    print("  ".join(f"{x!s:>12}" for x in ("all", "", *(total[c] for c in COLUMNS[2:]))))
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if faulty else 0


def count(verdicts: list[Verdict]) -> Counter[str]:
    """Return how many cases of each kind there are."""
    counts = Counter(kind for verdict in verdicts for kind in verdict.faults)
    counts.update(cases=len(verdicts), sent=sum(v.sent for v in verdicts), accepted=sum(v.accepted for v in verdicts))
    return counts


def told(method: str, phase: str, seed: int, verdict: Verdict) -> str:
    """Return a case in words, with the command that repeats it."""
    what = "accepted" if verdict.accepted else verdict.reason if verdict.sent else f"not sent: {verdict.reason}"
    lines = [f"  {method} {phase} --seed {seed} --case {verdict.index}: {verdict.name!r:.200}", f"    {what:.300}"]
    return "\n".join([*lines, *(f"    {kind}: {text}" for kind, text in verdict.faults.items())])


def memory_folder() -> contextlib.AbstractContextManager[str]:
    """Yield a temporary folder, on a memory disk if possible, as a case writes some dozen small files."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="fairflare_fuzz_", dir=memory if os.access(memory, os.W_OK) else None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--method", action="append", help=f"or one of {', '.join(OTHERS)}; default: all")
    parser.add_argument(
        "--phase",
        action="append",
        choices=("check", "train", "anchor", "norms", "validate", *OTHERS),
        help="default: all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=5000, help="of each method and phase")
    parser.add_argument("--replies", type=int, help="in place of --cases: until so many were sent")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
