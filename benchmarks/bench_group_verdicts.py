"""Measure how often ``fairflare compare`` calls a gap between groups smaller or larger, rightly and wrongly.

Methods are tested on the same cases of two groups. Cases differ in how hard they are; each method has a preference for
some of them, which all of its seeds share; and each seed has its luck. It goes the whole way: from the cases at each
site through the sums that leave it (:class:`fairflare.federation.site.groups.GroupTable` with its floor of cases) and
what the server takes from them (:mod:`fairflare.core.statistics.group_sums` and its neighbours) to the verdict of
:mod:`fairflare_lab.compare.group_gaps`. Five methods make ten comparisons of two, with one reference four.

    python benchmarks/bench_group_verdicts.py --figures           # the table of docs/groups.md, a minute
    python benchmarks/bench_group_verdicts.py --smaller 0         # where nothing differs: four measures, 5 minutes
    python benchmarks/bench_group_verdicts.py --repeats 50        # quicker, and rougher
    python benchmarks/bench_group_verdicts.py --images 4          # of each case
"""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import combinations

import numpy as np

from fairflare.core.statistics.group_intervals import gap_intervals
from fairflare.core.statistics.group_metrics import cases_of, gaps_of
from fairflare.core.statistics.group_sums import FOLDS, Sums, add_parts, add_sums, leave_each_out
from fairflare.federation.site.groups import FIELDS, GroupTable, read_groups
from fairflare_lab.compare.differences import correct_p_values
from fairflare_lab.compare.group_gaps import Key, Value, Values, difference_of

METHODS = 5
BINS, NAMES = 20, ["sex=F", "sex=M"]
SEEDS, CASES = (3, 5, 10), (30, 75, 200)  # numbers of seeds; of cases in each group over all sites
MEASURES = {True: ("dice_gap",), False: ("accuracy_gap", "auc_gap", "equalised_odds")}  # for masks, for classes


def federation(
    rng: np.random.Generator, cases: int, masks: bool, smaller: float, args: argparse.Namespace
) -> dict[Key, Values]:
    """Return what the server knows of the methods' gaps after each of their runs.

    Args:
        cases: of each group over all sites.
        masks: Dice of a structure; else two classes and their probabilities.
        smaller: by how much the true gap of all methods but the first is smaller, in standard deviations of the cases.
        args: of the command line.
    """
    number = 2 * cases
    group = np.arange(number) % 2
    site = rng.permutation(number) % args.sites
    label = rng.integers(0, 2, number)
    hard = rng.normal(size=number)
    found: dict[Key, Values] = {}
    whose = np.repeat(np.arange(number), args.images)
    for method in range(METHODS):
        taste, gap = 0.7 * rng.normal(size=number), args.apart - smaller * (method > 0)
        for seed in range(max(SEEDS)):
            level = 0.8 + hard + taste + 0.1 * rng.normal() - (gap + 0.1 * rng.normal()) * group
            level = (level + 0.4 * rng.normal(size=number))[whose] + 0.3 * rng.normal(size=len(whose))
            sums = []
            for rank in range(args.sites):
                name, at = f"site-{rank + 1}", site[whose] == rank
                if masks:
                    labels, scores = None, np.clip(0.6 + 0.15 * level[at], 0, 1)[:, None]
                else:
                    right = 1 / (1 + np.exp(-1.5 * level[at]))
                    labels = label[whose][at]
                    positive = np.where(labels == 1, right, 1 - right)
                    scores = np.stack([1 - positive, positive], 1)
                table = GroupTable(
                    name, (labels, scores), {"sex": group[whose][at]}, whose[at].tolist(), NAMES, BINS, 5
                )
                told, _ = table.sent(args.floor, True)
                stats = {field.name: told.get(field.name) for field in FIELDS}
                sums.append(read_groups(name, stats, ["sex"], scores.shape[1], BINS, 5) or {})
            for measure, value in at_the_server(sums).items():
                found.setdefault((str(method), "sex", measure), {})[seed] = value
    return found


def at_the_server(sites: list[dict[str, Sums]]) -> dict[str, Value]:
    """Return gaps over all sites, and what each is without every part of the cases in turn."""
    groups = {name: add_sums([of[name] for of in sites]) for name in NAMES}  # of each part of the cases
    whole, nan = {name: add_parts(of) for name, of in groups.items()}, (np.nan, np.nan)
    ends, cases = gap_intervals(whole), min(map(cases_of, whole.values()))
    without = [dict(zip(NAMES, of, strict=True)) for of in zip(*map(leave_each_out, groups.values()), strict=True)]
    gaps, *each = (gaps_of(of, add_sums([*of.values()])) for of in (whole, *without))
    found = {name: Value(gap, ends.get(name, nan), [of[name] for of in each], cases) for name, gap in gaps.items()}
    return {name: value for name, value in found.items() if np.isfinite(value.value)}  # below a floor some stay


def counted(
    masks: bool, smaller: float, cases: int, number: int, args: argparse.Namespace
) -> dict[tuple[str, int], Counter[str]]:
    """Count the verdicts of one federation on each measure by number of seeds, each as if it were the only one."""
    found: dict[tuple[str, int], Counter[str]] = {(m, n): Counter() for m in MEASURES[masks] for n in SEEDS}
    values = federation(np.random.default_rng([7, number]), cases, masks, smaller, args)
    for measure, many in found:
        some = {key: {s: of_seed[s] for s in range(many)} for key, of_seed in values.items() if key[2] == measure}
        for reference, method in pairs_of(smaller):
            key = (method, "sex", measure)
            told = difference_of(key, some, reference) if key in some else None
            found[measure, many][correct_p_values([told])[0].verdict if told else ""] += 1
    return found


def pairs_of(smaller: float) -> list[tuple[str, str]]:
    """Return the comparisons of one federation: all pairs where no method differs, else pairs with the first method."""
    return [pair for pair in combinations(map(str, range(METHODS)), 2) if smaller == 0 or pair[0] == "0"]


def of_figures(smaller: float, cases: int, args: argparse.Namespace) -> dict[int, Counter[str]]:
    """Count verdicts on a gap of means by number of seeds; the gaps are simulated, the verdicts are the package's."""
    rng, group = np.random.default_rng(7), np.arange(2 * cases) % 2
    found: dict[int, Counter[str]] = {many: Counter() for many in SEEDS}
    for _ in range(args.repeats):
        part, hard = rng.permutation(2 * cases) % FOLDS, rng.normal(size=2 * cases)
        kept = np.stack([part >= 0, *(part != k for k in range(FOLDS))]).astype(float)
        values: dict[Key, Values] = {}
        for label, gap in (("first", args.apart), ("second", args.apart - smaller)):
            level = hard + 0.7 * rng.normal(size=2 * cases) + 0.5 * rng.normal(size=(max(SEEDS), 2 * cases))
            level = (0.15 * (level - (gap + 0.1 * rng.normal(size=(max(SEEDS), 1))) * group)).T
            of = [(kept * (group == g)) @ level / (kept * (group == g)).sum(1, keepdims=True) for g in (0, 1)]
            gaps = np.abs(of[0] - of[1])
            values[label, "sex", "dice_gap"] = {
                s: Value(float(gaps[0, s]), (0.0, 1.0), gaps[1:, s].tolist(), cases) for s in range(max(SEEDS))
            }
        for many in SEEDS:
            some = {key: {s: of_seed[s] for s in range(many)} for key, of_seed in values.items()}
            told = difference_of(("second", "sex", "dice_gap"), some, "first")
            found[many][correct_p_values([told])[0].verdict if told else ""] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--images", type=int, default=1, help="of each case")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--smaller", type=float, nargs="*", default=[0.0, 0.4, 0.8], help="true differences")
    parser.add_argument("--apart", type=float, default=0.8, help="true gap of the first method")
    parser.add_argument("--floor", type=int, default=1, help="min_cases of the sites")
    parser.add_argument("--kinds", nargs="*", default=["masks", "classes"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--figures", action="store_true", help="gaps made here, not through the sites' sums")
    args = parser.parse_args()
    if args.figures:
        print("| truly smaller by | cases of a group | seeds | smaller | larger |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        for smaller, cases in ((s, c) for s in args.smaller for c in CASES):
            for many, of in of_figures(smaller, cases, args).items():
                told = " | ".join(f"{of[verdict] / args.repeats:.3f}" for verdict in ("better", "worse"))
                print(f"| {0.15 * smaller:.3f} | {cases} | {many} | {told} |", flush=True)
        return
    jobs = [(kind == "masks", smaller, cases) for kind in args.kinds for smaller in args.smaller for cases in CASES]
    totals = {job: {(m, n): Counter[str]() for m in MEASURES[job[0]] for n in SEEDS} for job in jobs}
    with ProcessPoolExecutor(args.processes) as pool:
        parts = {
            pool.submit(counted, *job, number, args): job
            for job in jobs
            for number in range(-(-args.repeats // len(pairs_of(job[1]))))
        }
        for future in as_completed(parts):
            for of, verdicts in future.result().items():
                totals[parts[future]][of] += verdicts
    print("| measure | truly smaller by | cases of a group | seeds | comparisons | smaller | larger | not known |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for (_, smaller, cases), found in totals.items():
        for (measure, many), of_verdict in found.items():
            total = of_verdict.total()
            shares = [f"{of_verdict[verdict] / total:.3f}" for verdict in ("better", "worse", "not known")]
            print(f"| {measure} | {smaller} | {cases} | {many} | {total} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
